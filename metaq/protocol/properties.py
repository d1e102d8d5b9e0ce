"""Message properties as senders write them and as records keep them (specs: store format, section 1.2).

``name 01 value 02``, repeated; the last 02 may be missing.
"""

from collections.abc import Mapping
from typing import Final

from metaq.errors import MessageIllegal
from metaq.protocol.record import CHECKSUM_SIZE, MAX_PROPERTIES_LENGTH

KEYS: Final = "KEYS"
UNIQUE_KEY: Final = "UNIQ_KEY"
WAIT: Final = "WAIT"
DELAY: Final = "DELAY"
REAL_TOPIC: Final = "REAL_TOPIC"
REAL_QUEUE: Final = "REAL_QID"
TRANSACTION: Final = "TRAN_MSG"
RETRY_TOPIC: Final = "RETRY_TOPIC"
ORIGIN_ID: Final = "ORIGIN_MESSAGE_ID"
REPLY_TO: Final = "REPLY_TO_CLIENT"
CLUSTER: Final = "CLUSTER"
CHECKSUM: Final = "__CRC32#"
TIMERS: Final = ("TIMER_DELAY_SEC", "TIMER_DELAY_MS", "TIMER_DELIVER_MS", "__STARTDELIVERTIME")

UNKEPT: Final = frozenset((WAIT, CHECKSUM))
"""What a sender says to the broker only."""

MOST_BYTES: Final = MAX_PROPERTIES_LENGTH - CHECKSUM_SIZE


def parse(text: str) -> dict[str, str]:
    """Pairs by name. Pieces without 01, without name or without value are skipped; of equal names the last wins."""
    pairs = {}
    for piece in text.split("\x02"):
        name, _, value = piece.partition("\x01")
        if name and value:
            pairs[name] = value
    return pairs


def encode(pairs: Mapping[str, str]) -> bytes:
    """Pairs in the record's form; ``MessageIllegal`` when they are more than a record can keep."""
    data = "".join([f"{name}\x01{value}\x02" for name, value in pairs.items() if name not in UNKEPT]).encode()
    if len(data) > MOST_BYTES:
        raise MessageIllegal(f"properties of {len(data)} bytes are longer than {MOST_BYTES}")
    return data


def index_keys(pairs: Mapping[str, str]) -> tuple[str, ...]:
    """What a message can be found by: its unique key, and each word of its keys."""
    unique = pairs.get(UNIQUE_KEY)
    words = pairs.get(KEYS)
    if words is None:
        return () if unique is None else (unique,)
    parts = tuple(word for word in words.split(" ") if word)
    return parts if unique is None else (unique, *parts)

"""Message properties as senders write them and as records keep them (specs: store format, section 1.2).

``name 01 value 02``, repeated; the last 02 may be missing.
"""

import re
from collections.abc import Mapping
from typing import Final

from metaq.errors import MessageIllegal
from metaq.protocol.record import CHECKSUM_SIZE, MAX_PROPERTIES_LENGTH, TAGS

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

SCHEDULED: Final = "METAQ_SCHEDULED"
"""Which delayed message a record is the delivered copy of: *level:ordinal*. Only the broker sets it."""

UNKEPT: Final = frozenset((WAIT, CHECKSUM, SCHEDULED))
"""What a sender says to the broker only, or may not say at all."""

NONE: Final[Mapping[str, str]] = {}

MOST_BYTES: Final = MAX_PROPERTIES_LENGTH - CHECKSUM_SIZE


def parse(text: str) -> dict[str, str]:
    """Pairs by name. Pieces without 01, without name or without value are skipped; of equal names the last wins."""
    pairs = {}
    for piece in text.split("\x02"):
        name, _, value = piece.partition("\x01")
        if name and value:
            pairs[name] = value
    return pairs


_TAKEN_APART: Final = (DELAY, TRANSACTION, REPLY_TO, CHECKSUM, SCHEDULED, *TIMERS)
_CHANGED: Final = re.compile(f"\x02(?:(?:{'|'.join(map(re.escape, _TAKEN_APART))})\x01|{WAIT}\x01(?!true\x02))")
_WAITING: Final = f"\x02{WAIT}\x01true\x02"
_TAG, _UNIQUE, _KEYS = [f"\x02{name}\x01" for name in (TAGS, UNIQUE_KEY, KEYS)]
_TAG_SIZE, _UNIQUE_SIZE, _KEYS_SIZE = len(_TAG), len(_UNIQUE), len(_KEYS)


AsSent = tuple[bytes, str | None, tuple[str, ...]]
"""What a record keeps, the tag, and the keys by which the message is found."""


def as_sent(text: str) -> AsSent | None:
    """Properties that the broker leaves as they are; ``None`` for others.

    The short way for nearly every message: a third of the cost of taking the pairs apart and writing them again.
    """
    marked = f"\x02{text}" if text[-1:] == "\x02" else f"\x02{text}\x02"
    if _CHANGED.search(marked):
        return None
    marked = marked.replace(_WAITING, "\x02", 1)
    tag = unique = words = None
    at = marked.rfind(_TAG) + _TAG_SIZE
    if at >= _TAG_SIZE:
        tag = marked[at : marked.index("\x02", at)] or None
    at = marked.rfind(_UNIQUE) + _UNIQUE_SIZE
    if at >= _UNIQUE_SIZE:
        unique = marked[at : marked.index("\x02", at)]
    at = marked.rfind(_KEYS) + _KEYS_SIZE
    if at >= _KEYS_SIZE:
        words = marked[at : marked.index("\x02", at)]
    data = marked[1:].encode()
    if len(data) > MOST_BYTES:
        raise MessageIllegal(f"properties of {len(data)} bytes are longer than {MOST_BYTES}")
    if words is None:
        return data, tag, (unique,) if unique else ()
    return data, tag, tuple(filter(None, (unique, *words.split(" "))))


def encode(pairs: Mapping[str, str], own: Mapping[str, str] = NONE) -> bytes:
    """Pairs in the record's form, and behind them the broker's ``own``; ``MessageIllegal``: more than a record can keep."""
    pieces = [f"{name}\x01{value}\x02" for name, value in pairs.items() if name not in UNKEPT]
    if own:
        pieces += [f"{name}\x01{value}\x02" for name, value in own.items()]
    data = "".join(pieces).encode()
    if len(data) > MOST_BYTES:
        raise MessageIllegal(f"properties of {len(data)} bytes are longer than {MOST_BYTES}")
    return data

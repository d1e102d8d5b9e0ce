"""IDs of leased messages, as clients send them back in ``ack``, ``nack`` and ``extend``.

::

    PARTITION-ORDINAL-TOKEN     0-17-4q9zk2

The token is 1 to 8 digits in base 32, lower case, without i, l, o and u, which people mistake for other characters.
"""

import re
from typing import Final, NamedTuple

from metaq.errors import BadRequest

MOST_IDS: Final = 1024
MOST_PARTITION: Final = 1023
MOST_ORDINAL: Final = (1 << 63) - 1
DIGITS: Final = "0123456789abcdefghjkmnpqrstvwxyz"
TOKEN_DIGITS: Final = 6
"""Digits of a token that the broker makes: 30 bits."""

_new: Final = tuple.__new__
"""Makes a named tuple at a third of the cost of its own constructor."""
_PAIRS: Final = [high + low for high in DIGITS for low in DIGITS]
"""Two digits by the ten bits that they stand for."""
assert TOKEN_DIGITS == 6

_ID: Final = re.compile(f"(0|[1-9][0-9]{{0,3}})-(0|[1-9][0-9]{{0,18}})-([{DIGITS}]{{1,8}})")


class MessageId(NamedTuple):
    """The name of one lease of a message: where the message stands, and a token that only the broker can make."""

    partition: int
    ordinal: int
    token: str

    def __str__(self) -> str:
        return f"{self.partition}-{self.ordinal}-{self.token}"


def encode_token(bits: int) -> str:
    """Return the lowest 30 of ``bits`` as a token."""
    return _PAIRS[bits >> 20 & 1023] + _PAIRS[bits >> 10 & 1023] + _PAIRS[bits & 1023]


def read_id(text: str) -> MessageId:
    """Return the ID that ``text`` is; ``BadRequest`` when it is none. Each ID has one form: numbers begin with no zero."""
    found = _ID.fullmatch(text)
    if found is None:
        raise BadRequest(f"{text[:40]!r} is not an ID of the form PARTITION-ORDINAL-TOKEN")
    partition, ordinal = int(found[1]), int(found[2])
    if partition > MOST_PARTITION:
        raise BadRequest(f"the partition of the ID {text} is not within 0 … {MOST_PARTITION}")
    if ordinal > MOST_ORDINAL:
        raise BadRequest(f"the ordinal of the ID {text} is not within 0 … {MOST_ORDINAL}")
    return _new(MessageId, (partition, ordinal, found[3]))


def read_ids(text: str) -> tuple[MessageId, ...]:
    """Return the IDs of a list with commas; ``BadRequest`` when there are more than ``MOST_IDS``, or one is none."""
    count = text.count(",") + 1
    if count > MOST_IDS:
        raise BadRequest(f"{count} IDs in one command are more than {MOST_IDS}")
    return tuple([read_id(one) for one in text.split(",")])

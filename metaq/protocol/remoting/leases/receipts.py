"""Receipts of leased messages, as RocketMQ's clients make them from the answer to a pop, and send them back as ``extraInfo``.

::

    START_OFFSET POP_MS INVISIBLE_MS TOKEN MARK BROKER QUEUE OFFSET [LOG_OFFSET]
    └ of its queue                   └ reviveQid                    └ only proxies add it

MARK says where a message comes from (``metaq.protocol.remoting.leases.pop``). All messages of one queue that one pop gave have
the same words before OFFSET.
"""

import re
from typing import Final, NamedTuple

from metaq.errors import ReceiptInvalid

OWN: Final = 0
"""The mark of a message that comes from the topic itself."""
SHOWN: Final = 60
_new: Final = tuple.__new__
"""Makes a named tuple at a third of the cost of its own constructor."""

_WHOLE: Final = "(0|[1-9][0-9]{0,18})"
_RECEIPT: Final = re.compile(
    rf"{_WHOLE} {_WHOLE} {_WHOLE} {_WHOLE} ([012]) ([^ ]{{1,255}}) {_WHOLE} {_WHOLE}(?: {_WHOLE})?", re.ASCII
)


class Receipt(NamedTuple):
    """The words that a consumer gives back with an ack or a change of a message."""

    start_offset: int
    pop_ms: int
    invisible_ms: int
    token: int
    mark: int
    broker_name: str
    queue: int
    offset: int
    log_offset: int | None = None

    def __str__(self) -> str:
        words = self if self.log_offset is not None else self[:-1]
        return " ".join(map(str, words))


def decode_receipt(text: str) -> Receipt:
    """Return a receipt in its written form. Raise ``ReceiptInvalid`` for anything else."""
    found = _RECEIPT.fullmatch(text)
    if found is None:
        raise ReceiptInvalid(f"extraInfo is {text[:SHOWN]!r}, not the eight words of a receipt")
    words = found.groups()
    start, pop_ms, invisible_ms, token = int(words[0]), int(words[1]), int(words[2]), int(words[3])
    queue, offset, log_offset = int(words[6]), int(words[7]), None if words[8] is None else int(words[8])
    if (start | pop_ms | invisible_ms | offset | (log_offset or 0)) >> 63 or (token | queue) >> 31:  # none is negative
        reason = "its numbers have at most 63 bits, the fourth and the seventh 31"
        raise ReceiptInvalid(f"extraInfo is {text[:SHOWN]!r}, not a receipt: {reason}")
    return _new(Receipt, (start, pop_ms, invisible_ms, token, int(words[4]), words[5], queue, offset, log_offset))


def is_plain(word: str) -> bool:
    """Return whether a word is a number as receipts have it: of at most 18 digits, the first of which is no zero."""
    return word.isdecimal() and word.isascii() and len(word) < 19 and word[0] != "0"

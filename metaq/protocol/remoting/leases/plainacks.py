"""Acks of one pop, which clients send one by one: a header like that of the ack before is not parsed.

The JSON headers of the acks (request 200051) of the messages that one pop gave of one queue differ in three numbers, two of
which are the same::

    {"code":200051,"extFields":{"consumerGroup":"billing","extraInfo":"4096 1790000000000 60000 4711 0 broker-a 0 4097",
     "offset":"4097","queueId":"0","topic":"orders"},"flag":0,"language":"JAVA","opaque":12,…}

The header of the latest ack that was parsed is cut at them. One that has the same bytes around its numbers means the same of
others: only the numbers have to be read.
"""

import re
from typing import Final, NamedTuple

from metaq.protocol.remoting.codes import RESPONSE_FLAG, Request
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.protocol.remoting.leases.receipts import is_plain
from metaq.protocol.remoting.signature import SIGNATURE

ACK: Final = int(Request.ACK_MESSAGE)
LONGEST_ACK: Final = 1024
"""Bytes of a header that is kept, for each connection."""
_NAMES: Final = (b'"offset"', b'"extraInfo"', b'"opaque"')
_NUMBERS: Final = [
    re.compile(each) for each in (rb'"offset":"([0-9]+)"', rb'"extraInfo":"[^"]* ([0-9]+)"', rb'"opaque":([0-9]+)')
]
_MOST_DIGITS: Final = 18
_MOST_OPAQUE: Final = (1 << 31) - 1
_ZERO: Final = 0x30
_new: Final = tuple.__new__
"""Makes a named tuple at a third of the cost of its own constructor."""


class PlainAcks(NamedTuple):
    """Acks that differ in the message only, in the order in which they came."""

    sample: RemotingCommand
    """An ack like them, of any message of the same pop and queue."""
    offsets: list[int]
    opaques: list[int]

    @property
    def code(self) -> int:
        return ACK

    @property
    def flag(self) -> int:
        return self.sample.flag

    def commands(self) -> list[RemotingCommand]:
        """Return the acks as any requests."""
        sample, fields = self.sample, self.sample.fields
        common = fields["extraInfo"].removesuffix(fields["offset"])
        return [
            sample._replace(opaque=opaque, fields={**fields, "offset": str(offset), "extraInfo": f"{common}{offset}"})
            for offset, opaque in zip(self.offsets, self.opaques, strict=True)
        ]


def plain_ack(request: RemotingCommand) -> PlainAcks | None:
    """Return a request as a plain ack; ``None`` when it is none: its receipt does not end with its offset."""
    fields = request.fields
    offset = fields.get("offset", "")
    if request.code != ACK or request.flag & RESPONSE_FLAG or request.body or not is_plain(offset):
        return None
    if not fields.get("extraInfo", "").endswith(f" {offset}"):
        return None
    return _new(PlainAcks, (request, [int(offset)], [request.opaque]))


class AckReader:
    """The acks of one connection, read by the header of the latest one that was parsed."""

    def __init__(self) -> None:
        self.knows = False
        """True while there is such a header, which could be cut."""
        self._sample: RemotingCommand | None = None  # the ack that had it
        self.opaque = 0
        """That of the ack that was read last."""
        self._parts = (b"", b"", b"", b"")
        self._opaque_at = 0  # which of the three numbers between the parts it is
        self._end = 0  # after the number that was read last

    def read(self, data: bytes, start: int, end: int) -> int:
        """Return the offset of an ack whose header stands from ``start`` to ``end``; -1 when the known one is another one."""
        at, offset = start, -1
        first, second, third, last = self._parts
        for index, part in enumerate((first, second, third)):
            stop = at + len(part)
            if stop > end or data[at:stop] != part:
                return -1
            number = self._number(data, stop, end)
            at = self._end
            if index == self._opaque_at:
                self.opaque = number
                if not 0 < number <= _MOST_OPAQUE:
                    return -1
            elif number < 0 or (offset >= 0 and number != offset):
                return -1
            else:
                offset = number
        return offset if data[at:end] == last else -1

    def _number(self, data: bytes, at: int, end: int) -> int:
        """Return the number at a place, up to ``_end``; -1 when it is none, or begins with a zero, or is too long."""
        number, most = 0, min(end, at + _MOST_DIGITS)
        start = at
        while at < most:
            digit = data[at] - _ZERO
            if not 0 <= digit <= 9:
                break
            number = 10 * number + digit
            at += 1
        self._end = at
        return number if at > start and data[start] != _ZERO else -1

    def begun(self) -> PlainAcks:
        """Return acks with the known header, none so far."""
        sample = self._sample
        assert sample is not None
        return _new(PlainAcks, (sample, [], []))

    def learn(self, header: bytes, request: RemotingCommand) -> PlainAcks | None:
        """Return a request that was parsed as a plain ack, if it is one, and keep its header when it can be cut.

        One that is signed is none here: its sender is authenticated before it is taken.
        """
        found = None if SIGNATURE in request.fields else plain_ack(request)
        self.knows = (
            found is not None
            and self._cut(header)
            and self.read(header, 0, len(header)) == found.offsets[0]
            and self.opaque == request.opaque
        )
        self._sample = request if self.knows else None
        return found

    def _cut(self, header: bytes) -> bool:
        """Cut a header at its three numbers, if each of them is certainly where it seems to be; return whether it is."""
        if len(header) > LONGEST_ACK or b"\\" in header or any(header.count(name) != 1 for name in _NAMES):
            return False
        found = [pattern.search(header) for pattern in _NUMBERS]
        places = [each.span(1) for each in found if each is not None]
        if len(places) < len(_NUMBERS):
            return False
        opaque = places[-1]
        places.sort()
        (first, first_end), (second, second_end), (third, third_end) = places
        self._parts = (header[:first], header[first_end:second], header[second_end:third], header[third_end:])
        self._opaque_at = places.index(opaque)
        return True

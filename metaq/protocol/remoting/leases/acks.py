"""Acks of many leased messages in one request: the body of 200151, in fastjson's JSON.

::

    {"brokerName":…,"acks":[{"c":group,"t":topic,"r":"0","so":start,"q":queue,"rq":token,"pt":popMs,"it":invisibleMs,"b":bits},…]}

``t`` is the topic of the pop, ``r`` the mark that says whether the messages came from a retry topic instead
(``metaq.protocol.remoting.leases.pop``). Bit i of the bits, the least significant of a byte first, stands for the offset
``so`` + i. They are bytes in base64; some versions of fastjson write a list of numbers. Every member has a long name, too.
"""

import base64
import binascii
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from metaq.errors import BadRequest
from metaq.protocol.remoting import fastjson
from metaq.protocol.remoting.leases.receipts import Receipt

MOST_ACKS: Final = 1024
"""Acks in one request."""
MOST_BIT_BYTES: Final = 4096
"""Bytes of the bits of one ack, which then stand for"""
MOST_OFFSETS: Final = 8 * MOST_BIT_BYTES
"""offsets: as many may be set in a whole request."""
MARKS: Final = ("0", "1", "2")
_LONG_NAMES: Final = {
    "c": "consumerGroup",
    "t": "topic",
    "r": "retry",
    "so": "startOffset",
    "q": "queueId",
    "rq": "reviveQueueId",
    "pt": "popTime",
    "it": "invisibleTime",
    "b": "bitSet",
}


class AckRow(NamedTuple):
    """An ack of messages that one pop gave of one queue."""

    group: str
    topic: str
    mark: int
    start_offset: int
    queue: int
    token: int
    pop_ms: int
    invisible_ms: int
    bits: bytes

    def offsets(self) -> Iterator[int]:
        """Return the offsets that are acked, in ascending order."""
        for index, byte in enumerate(self.bits):
            if byte:
                first = self.start_offset + 8 * index
                yield from (first + bit for bit in range(8) if byte >> bit & 1)


class BatchAck(NamedTuple):
    """The body of 200151."""

    broker_name: str
    acks: tuple[AckRow, ...]


class BatchAckAnswer(NamedTuple):
    """The answer to 200151, whose fields RocketMQ's own brokers leave out."""

    done: int
    """The number of messages that were open in these deliveries; the others were done, or their receipts mean nothing."""


def decode_batch_ack(body: bytes) -> BatchAck:
    """Return the acks of a body. Raise ``BadRequest`` when it cannot be read, or has more acks than a request may."""
    content = fastjson.members_of(fastjson.decode_plain(body), "batch of acks")
    rows = fastjson.rows_of(content, "acks")
    if len(rows) > MOST_ACKS:
        raise BadRequest(f"{len(rows)} acks in one request are more than {MOST_ACKS}")
    acks = tuple(_ack(fastjson.members_of(row, "row of acks")) for row in rows)
    count = sum(int.from_bytes(ack.bits).bit_count() for ack in acks)
    if count > MOST_OFFSETS:
        raise BadRequest(f"acks of {count} messages in one request are more than {MOST_OFFSETS}")
    return BatchAck(fastjson.text_of(content, "brokerName", ""), acks)


def encode_batch_ack(batch: BatchAck) -> bytes:
    """Return the body of a request."""
    rows = [
        {
            "c": ack.group,
            "t": ack.topic,
            "r": MARKS[ack.mark],
            "so": ack.start_offset,
            "q": ack.queue,
            "rq": ack.token,
            "pt": ack.pop_ms,
            "it": ack.invisible_ms,
            "b": base64.b64encode(ack.bits).decode(),
        }
        for ack in batch.acks
    ]
    return fastjson.encode({"brokerName": batch.broker_name, "acks": rows})


def acks_of(group: str, topic: str, receipts: Iterable[Receipt]) -> list[AckRow]:
    """Return as few acks as possible for the messages with these receipts, all of the same broker.

    Messages that are too far apart for the bits of one ack get several.
    """
    heads: dict[AckRow, int] = {}  # each without its bits
    for receipt in sorted(receipts, key=lambda each: each.offset):
        apart = (receipt.offset - receipt.start_offset) // MOST_OFFSETS * MOST_OFFSETS
        start = receipt.start_offset + apart
        head = AckRow(
            group, topic, receipt.mark, start, receipt.queue, receipt.token, receipt.pop_ms, receipt.invisible_ms, b""
        )
        heads[head] = heads.get(head, 0) | 1 << receipt.offset - start
    return [head._replace(bits=bits.to_bytes((bits.bit_length() + 7) // 8, "little")) for head, bits in heads.items()]


def _ack(members: Mapping[str, Any]) -> AckRow:
    row = {short: members.get(short, members.get(long)) for short, long in _LONG_NAMES.items()}
    mark = fastjson.text_of(row, "r", MARKS[0])
    if mark not in MARKS:
        raise BadRequest(f"JSON body: r is {fastjson.shown(mark)}, not one of {', '.join(MARKS)}")
    numbers = {name: fastjson.number_of(row, name, bits=bits) for name, bits in (("so", 64), ("q", 32), ("pt", 64), ("it", 64))}
    for name, number in numbers.items():
        if number < 0:
            raise BadRequest(f"JSON body: {name} is {number}, which is negative")
    return AckRow(
        fastjson.text_of(row, "c"),
        fastjson.text_of(row, "t"),
        int(mark),
        numbers["so"],
        numbers["q"],
        fastjson.number_of(row, "rq"),
        numbers["pt"],
        numbers["it"],
        _bits(row["b"]),
    )


def _bits(value: object) -> bytes:
    """Return the bits of an ack from text in base64, or from a list of bytes as Java has them, -128 to 127."""
    if value is None:
        return b""
    try:
        match value:
            case str() if len(value) <= 4 * (MOST_BIT_BYTES // 3 + 1):
                bits = base64.b64decode(value, validate=True)
            case list() if len(value) <= MOST_BIT_BYTES:
                bits = bytes(_byte(number) for number in value)
            case str() | list():
                raise BadRequest(f"JSON body: the bits of an ack are longer than {MOST_BIT_BYTES} bytes")
            case _:
                raise BadRequest(f"JSON body: b is {fastjson.shown(value)}, neither base64 nor a list of bytes")
    except (binascii.Error, ValueError) as error:
        raise BadRequest(f"JSON body: b cannot be read as bits: {error}"[:200]) from error
    if len(bits) > MOST_BIT_BYTES:
        raise BadRequest(f"JSON body: the bits of an ack are longer than {MOST_BIT_BYTES} bytes")
    return bits


def _byte(value: object) -> int:
    if type(value) is not int or not -128 <= value <= 255:
        raise ValueError(f"{fastjson.shown(value)} is not a byte")
    return value & 0xFF

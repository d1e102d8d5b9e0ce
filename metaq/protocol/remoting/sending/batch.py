"""The body of a batch: messages one after the other (specs: remoting protocol, section 3.2.1).

::

    size   field
    4      size of the item, itself included
    4      magic, 0
    4      CRC of the body, 0
    4      flag
    4 + n  body
    2 + m  properties: name 01 value 02, repeated

``read_batch`` gives its fields in columns, since an object for each message costs as much as reading it.
"""

import struct
from collections.abc import Iterable
from typing import Final, NamedTuple

from librt.strings import read_i32_be

from metaq.errors import MessageIllegal
from metaq.protocol.record import MAX_PROPERTIES_LENGTH

MOST: Final = 1024
"""The most messages in a batch: that many of 4 KiB each take a broker some 15 ms."""
HEAD_SIZE: Final = 20
LENGTH_SIZE: Final = 2
_HEAD: Final = struct.Struct(">iiiii")  # size, magic, CRC, flag, length of the body
_LENGTH: Final = struct.Struct(">h")


class BatchItem(NamedTuple):
    """One message of a batch."""

    flag: int
    body: bytes
    properties: str


class BatchColumns(NamedTuple):
    """The messages of a batch, field by field, in order."""

    flags: list[int]
    bodies: list[bytes]
    properties: list[str]


def read_batch(data: bytes) -> BatchColumns:
    """Return the messages. ``MessageIllegal`` when lengths contradict each other, or there are more than ``MOST``."""
    flags: list[int] = []
    bodies: list[bytes] = []
    properties: list[str] = []
    at, end = 0, len(data)
    try:
        while at < end:
            size: int = read_i32_be(data, at)
            length: int = read_i32_be(data, at + 16)
            body_at, stop = at + HEAD_SIZE, at + size
            body_end = body_at + length
            properties_at = body_end + LENGTH_SIZE
            if (
                not (body_at <= body_end and properties_at <= stop <= end)
                or stop - properties_at > MAX_PROPERTIES_LENGTH
                or stop - properties_at != data[body_end] << 8 | data[body_end + 1]
            ):
                raise MessageIllegal(f"the lengths of the message at byte {at} of a batch of {end} contradict each other")
            if len(flags) == MOST:
                raise MessageIllegal(f"a batch has more than {MOST} messages: send several batches")
            flags.append(read_i32_be(data, at + 12))
            bodies.append(data[body_at:body_end])
            properties.append(data[properties_at:stop].decode())
            at = stop
    except (IndexError, UnicodeDecodeError) as error:
        raise MessageIllegal(f"the message at byte {at} of a batch of {end} cannot be read: {error}") from error
    return BatchColumns(flags, bodies, properties)


def decode_batch(data: bytes) -> list[BatchItem]:
    """Return the same as ``read_batch``, message by message."""
    return list(map(BatchItem._make, zip(*read_batch(data), strict=True)))


def encode_batch(items: Iterable[BatchItem]) -> bytes:
    """Return the body of a batch.

    ``MessageIllegal`` when there are more than ``MOST`` messages, or the properties of one are too long for their length field.
    """
    parts = []
    for number, (flag, body, properties) in enumerate(items, start=1):
        text = properties.encode()
        if len(text) > MAX_PROPERTIES_LENGTH:
            limit = f"over the limit of {MAX_PROPERTIES_LENGTH}"
            raise MessageIllegal(f"message {number} of the batch: {len(text)} bytes of properties are {limit}")
        size = _HEAD.size + len(body) + _LENGTH.size + len(text)
        if number > MOST:
            raise MessageIllegal(f"a batch has more than {MOST} messages: send several batches")
        parts.append(b"%b%b%b%b" % (_HEAD.pack(size, 0, 0, flag, len(body)), body, _LENGTH.pack(len(text)), text))
    return b"".join(parts)

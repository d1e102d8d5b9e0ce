"""The body of a batch: messages one after the other (specs: remoting protocol, section 3.2.1).

::

    size   field
    4      size of the item, itself included
    4      magic, 0
    4      CRC of the body, 0
    4      flag
    4 + n  body
    2 + m  properties: name 01 value 02, repeated
"""

import struct
from collections.abc import Iterable
from typing import Final, NamedTuple

from metaq.errors import MessageIllegal
from metaq.protocol.record import MAX_PROPERTIES_LENGTH

MOST: Final = 1024
"""The most messages in a batch: that many of 4 KiB each take a broker some 15 ms."""
_HEAD: Final = struct.Struct(">iiiii")  # size, magic, CRC, flag, length of the body
_LENGTH: Final = struct.Struct(">h")
_new: Final = tuple.__new__
"""Makes a named tuple at a third of the cost of its own constructor."""


class BatchItem(NamedTuple):
    """One message of a batch."""

    flag: int
    body: bytes
    properties: str


def decode_batch(data: bytes) -> list[BatchItem]:
    """Return the messages in order. ``MessageIllegal`` when lengths contradict each other, or there are more than ``MOST``."""
    items: list[BatchItem] = []
    at, end = 0, len(data)
    try:
        while at < end:
            size, _, _, flag, length = _HEAD.unpack_from(data, at)
            body_at = at + _HEAD.size
            body_end = body_at + length
            properties_at = body_end + _LENGTH.size
            stop = properties_at + (_LENGTH.unpack_from(data, body_end)[0] if length >= 0 else -1)
            if not properties_at <= stop == at + size <= end:
                raise MessageIllegal(f"the lengths of the message at byte {at} of a batch of {end} contradict each other")
            if len(items) == MOST:
                raise MessageIllegal(f"a batch has more than {MOST} messages: send several batches")
            items.append(_new(BatchItem, (flag, data[body_at:body_end], data[properties_at:stop].decode())))
            at = stop
    except (struct.error, UnicodeDecodeError) as error:
        raise MessageIllegal(f"the message at byte {at} of a batch of {end} cannot be read: {error}") from error
    return items


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

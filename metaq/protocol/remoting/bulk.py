"""The bulk fetch (30030): much of a partition at once, for readers that make columns of it.

The body of the answer, all integers big-endian::

    size    field
    4       n: count of units
    n × 16  units: those of the consume queue (log offset 8, size 4, tag hash 4), one a message, of rising ordinals
    …       records: in the order of the units, one after the other, as they are in the log (metaq.protocol.record)

A unit of 16 zero bytes has no record: that message is damaged or lost. When a request does not ask for ``verified`` records,
the broker may send them as they are on the disk, and the answer says so. Then the reader compares them with their units, and
asks once more for those that do not fit.
"""

import struct
import sys
from array import array
from collections.abc import Mapping, Sequence
from itertools import count, repeat
from operator import add
from typing import Final, NamedTuple

from metaq.errors import BadRequest, StreamLost
from metaq.protocol.record import CHECKSUM_SIZE, HEADER_SIZE, MAGIC, checksum_properties
from metaq.protocol.remoting.headers import Int32, parse_int

COUNT: Final = struct.Struct(">i")
UNIT_SIZE: Final = 16
MISSING: Final = bytes(UNIT_SIZE)
"""The unit of a message that is damaged or lost."""

_HEAD: Final = struct.Struct(">ii4xi4xqq48xi")  # total size, magic, partition, queue offset, log offset, body length
assert _HEAD.size == HEADER_SIZE


class BulkFetch(NamedTuple):
    """Fetch many messages of a queue at once (30030)."""

    topic: str
    queue_id: Int32
    queue_offset: int
    max_msg_nums: Int32
    max_bytes: Int32
    verified: bool = True
    """Whether the broker has to verify the checksums of records that it reads from the disk; otherwise the reader does."""


class Bulk(NamedTuple):
    """Consecutive messages of one partition."""

    first: int
    """Ordinal of the first unit."""
    units: memoryview
    """16 bytes a message."""
    records: memoryview
    next: int
    """The ordinal at which the next fetch begins."""
    least: int
    """Ordinal of the oldest message that is kept."""
    most: int
    """The ordinal after the newest one that readers may see."""
    verified: bool
    """Whether the broker has made sure that the records are intact."""


def encode_bulk_head(units: bytes) -> bytes:
    """Return the part of the body that precedes the records."""
    return COUNT.pack(len(units) // UNIT_SIZE) + units


def decode_bulk(first: int, fields: Mapping[str, str], body: bytes | bytearray | memoryview) -> Bulk:
    """Return the content of the answer to a fetch from the ordinal ``first``, as slices of ``body``.

    ``StreamLost`` when the body contradicts itself or the fields. The records themselves are not read: only their sizes are
    added up.
    """
    data = memoryview(body)
    try:
        following, least, most = (parse_int(name, fields[name]) for name in ("nextBeginOffset", "minOffset", "maxOffset"))
    except (KeyError, BadRequest) as error:
        raise StreamLost(f"the answer to a bulk fetch without its ordinals: {error}") from error
    verified = fields.get("verified") == "true"
    if not data:
        return Bulk(first, data, data, following, least, most, verified)
    messages = COUNT.unpack_from(data)[0] if len(data) >= COUNT.size else -1
    records_at = COUNT.size + messages * UNIT_SIZE
    if messages < 0 or records_at > len(data) or following != first + messages:
        raise StreamLost(
            f"a bulk of {len(data)} bytes that says {messages} messages from {first} on, and to go on at {following}"
        )
    units, records = data[COUNT.size : records_at], data[records_at:]
    sizes = unit_sizes(units)
    if sum(sizes) != len(records) or min(sizes, default=0) < 0:
        raise StreamLost(f"a bulk whose {messages} units name {sum(sizes)} bytes of records, and {len(records)} came")
    return Bulk(first, units, records, following, least, most, verified)


def unit_columns(units: bytes | memoryview) -> tuple[list[int], list[int]]:
    """Return log offsets and sizes, in a tenth of the time of a loop over the units."""
    return _every("q", units, 0, 2), unit_sizes(units)


def unit_sizes(units: bytes | memoryview) -> list[int]:
    """Return the sizes alone."""
    return _every("i", units, 2, 4)


def _every(code: str, units: bytes | memoryview, first: int, step: int) -> list[int]:
    """Return big-endian numbers, ``first`` and every ``step``-th after it. "q" has eight bytes, "i" four, on all platforms."""
    numbers = array(code)
    numbers.frombytes(units)
    chosen = numbers[first::step]
    if sys.byteorder == "little":
        chosen.byteswap()
    return chosen.tolist()


def are_intact(
    data: bytes, starts: Sequence[int], offsets: Sequence[int], sizes: Sequence[int], topic: str, partition: int, first: int
) -> bool:
    """Return whether records are those of consecutive messages of a partition from ``first`` on, with every bit as written.

    ``starts`` are their positions in ``data``, ``offsets`` the log offsets where they were written. None of the ``sizes`` may
    be less than that of an empty record. This costs a quarter of checking them one by one, which finds the bad ones.
    """
    ends = list(map(add, starts, sizes))
    if ends[-1] > len(data):
        return False
    closed = [(start, end - CHECKSUM_SIZE, end) for start, end in zip(starts, ends, strict=True)]
    records = [data[start:end] for start, end, _ in closed]
    if checksum_properties(records) != b"".join([data[start:end] for _, start, end in closed]):
        return False
    heads = list(map(_HEAD.unpack_from, records))
    lengths = [head[-1] for head in heads]
    if heads != list(zip(sizes, repeat(MAGIC), repeat(partition), count(first), offsets, lengths)):
        return False
    name = bytes((len(topic),)) + topic.encode()
    return all(map(bytes.startswith, records, repeat(name), map(add, lengths, repeat(HEADER_SIZE))))

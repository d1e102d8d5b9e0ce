"""The bulk fetch, request 30030: much of a partition at once, for readers that make columns of it.

The body of the answer, all integers big-endian::

    size    field
    4       n: count of units
    n × 16  units: those of the consume queue (log offset 8, size 4, tag hash 4), one a message, of rising ordinals
    …       records: in the order of the units, one behind the other, as they are in the log (metaq.protocol.record)

A unit of 16 zero bytes has no record: that message is damaged or lost.
"""

import struct
import sys
from array import array
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from metaq.errors import BadRequest, StreamLost
from metaq.protocol.headers import Int32, parse_int

COUNT: Final = struct.Struct(">i")
UNIT_SIZE: Final = 16
MISSING: Final = bytes(UNIT_SIZE)
"""The unit of a message that is damaged or lost."""


class BulkFetch(NamedTuple):
    """30030."""

    topic: str
    queue_id: Int32
    queue_offset: int
    max_msg_nums: Int32
    max_bytes: Int32


class Bulk(NamedTuple):
    """Consecutive messages of one partition."""

    first: int
    """Ordinal of the first unit."""
    units: memoryview
    """16 bytes a message."""
    records: memoryview
    next: int
    """Where to go on."""
    least: int
    """Ordinal of the oldest message that is kept."""
    most: int
    """The ordinal after the newest one that readers may see."""


def encode_bulk_head(units: bytes) -> bytes:
    """What precedes the records in the body."""
    return COUNT.pack(len(units) // UNIT_SIZE) + units


def decode_bulk(first: int, fields: Mapping[str, str], body: bytes | bytearray | memoryview) -> Bulk:
    """What an answer to a fetch from the ordinal ``first`` holds, as slices of ``body``.

    ``StreamLost`` for bytes that contradict themselves. Records are looked at by nobody: only their sizes are added up.
    """
    data = memoryview(body)
    try:
        following, least, most = (parse_int(name, fields[name]) for name in ("nextBeginOffset", "minOffset", "maxOffset"))
    except (KeyError, BadRequest) as error:
        raise StreamLost(f"the answer to a bulk fetch without its ordinals: {error}") from error
    if not data:
        return Bulk(first, data, data, following, least, most)
    count = COUNT.unpack_from(data)[0] if len(data) >= COUNT.size else -1
    records_at = COUNT.size + count * UNIT_SIZE
    if count < 0 or records_at > len(data) or following != first + count:
        raise StreamLost(f"a bulk of {len(data)} bytes that says {count} messages from {first} on, and to go on at {following}")
    units, records = data[COUNT.size : records_at], data[records_at:]
    sizes = record_sizes(units)
    if sum(sizes) != len(records) or min(sizes, default=0) < 0:
        raise StreamLost(f"a bulk whose {count} units name {sum(sizes)} bytes of records, and {len(records)} came")
    return Bulk(first, units, records, following, least, most)


def record_sizes(units: bytes | memoryview) -> Sequence[int]:
    """The sizes that units name, in a tenth of the time of a loop over them."""
    numbers = array("i")  # of four bytes, wherever CPython runs
    numbers.frombytes(units)
    sizes = numbers[2::4]
    if sys.byteorder == "little":
        sizes.byteswap()
    return sizes

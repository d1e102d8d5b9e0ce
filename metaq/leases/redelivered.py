"""Records as a consumer gets them when they are given again.

The record is that of the log, with two changes: the number of earlier deliveries is in its field ``reconsumeTimes``, and the
property ``1ST_POP_TIME`` has the time of the first one. The checksum is made anew.
"""

import struct
from typing import Final

from metaq.protocol.properties import FIRST_POP_TIME
from metaq.protocol.record import CHECKSUM_SIZE, HEADER_SIZE, MAX_PROPERTIES_LENGTH, checksum_property

_SIZE: Final = struct.Struct(">i")
_TIMES: Final = struct.Struct(">i")
_TIMES_AT: Final = 72
_BODY_LENGTH: Final = struct.Struct(">i")
_BODY_LENGTH_AT: Final = 84
_PROPERTIES_LENGTH: Final = struct.Struct(">H")
_NAME: Final = FIRST_POP_TIME.encode() + b"\x01"
MOST_TIMES: Final = (1 << 31) - 1


def times_of(record: bytes | memoryview) -> int:
    """Return ``reconsumeTimes`` of an intact record."""
    times: int = _TIMES.unpack_from(record, _TIMES_AT)[0]
    return times


def redelivered(record: bytes | memoryview, times: int, first_pop_ms: int) -> bytes:
    """Return an intact record as it is given again, after ``times`` deliveries, the first at ``first_pop_ms`` (Unix time).

    A record that has the property, or no room for it, keeps its properties.
    """
    copy = bytearray(record)
    _TIMES.pack_into(copy, _TIMES_AT, min(MOST_TIMES, times_of(record) + times))
    length_at = HEADER_SIZE + _BODY_LENGTH.unpack_from(copy, _BODY_LENGTH_AT)[0]
    length_at += 1 + copy[length_at]
    begin, end = length_at + _PROPERTIES_LENGTH.size, len(copy) - CHECKSUM_SIZE
    pair = b"%b%d\x02" % (_NAME, first_pop_ms)
    length = _PROPERTIES_LENGTH.unpack_from(copy, length_at)[0] + len(pair)
    known = copy[begin:end]
    if length <= MAX_PROPERTIES_LENGTH and not (known.startswith(_NAME) or b"\x02" + _NAME in known):
        copy[end:end] = pair
        end += len(pair)
        _PROPERTIES_LENGTH.pack_into(copy, length_at, length)
        _SIZE.pack_into(copy, 0, len(copy))
    copy[end:] = checksum_property(bytes(copy[:end]))
    return bytes(copy)

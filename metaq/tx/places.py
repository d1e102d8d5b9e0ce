"""The place of a prepared branch: the log offset of its mark and its reserved room, as one number.

One number instead of two saves memory for 100,000 branches. The room is in KiB, rounded up.
"""

from typing import Final

_SIZE_BITS: Final = 24
_KIB: Final = 1024


def packed(log_offset: int, size: int) -> int:
    """Return the place of a branch whose mark is at ``log_offset`` and whose messages have ``size`` bytes."""
    return log_offset << _SIZE_BITS | min((size + _KIB - 1) // _KIB, (1 << _SIZE_BITS) - 1)


def offset_of(place: int) -> int:
    """Return the log offset of the mark."""
    return place >> _SIZE_BITS


def bytes_of(place: int) -> int:
    """Return the reserved bytes."""
    return (place & (1 << _SIZE_BITS) - 1) * _KIB

"""The two checksums of the formats.

``crc32`` is CRC-32 (IEEE 802.3), with the values of zlib's function of that name in a fraction of its time
(docs/decisions/0017-checksums.md). ``body_crc`` is the same with the top bit cleared, as RocketMQ and MetaQ clients expect it.
``crc32c`` is CRC-32C (Castagnoli), for files that only metaq reads: checkpoints and control documents.
"""

from collections.abc import Callable
from functools import cache

from zlib_ng.zlib_ng import crc32

__all__ = ["body_crc", "crc32", "crc32c"]


@cache
def _crc32c() -> Callable[[bytes], int]:
    """Return crcmod's function; clients need none, and its tables take a while."""
    import crcmod.predefined  # noqa: PLC0415

    made: Callable[[bytes], int] = crcmod.predefined.mkCrcFun("crc-32c")
    return made


def body_crc(data: bytes | memoryview, start: int = 0) -> int:
    """Return the CRC-32 of ``data`` with the top bit cleared: 0 … 2³¹−1. ``start`` is a plain CRC-32 to continue from."""
    return crc32(data, start) & 0x7FFFFFFF


def crc32c(data: bytes | memoryview) -> int:
    """Return the CRC-32C of ``data``: 0 … 2³²−1."""
    return _crc32c()(bytes(data))

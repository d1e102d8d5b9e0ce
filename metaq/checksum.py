"""The two checksums of the formats.

``body_crc`` is CRC-32 (IEEE 802.3, as zlib computes it) with the top bit cleared, as RocketMQ and MetaQ clients expect it.
``crc32c`` is CRC-32C (Castagnoli), for files that only metaq reads: checkpoints and control documents.
"""

import zlib

import crcmod.predefined

_crc32c = crcmod.predefined.mkCrcFun("crc-32c")


def body_crc(data: bytes | memoryview, start: int = 0) -> int:
    """Return the CRC-32 of ``data`` with the top bit cleared: 0 … 2³¹−1. ``start`` is a plain CRC-32 to continue from."""
    return zlib.crc32(data, start) & 0x7FFFFFFF


def crc32c(data: bytes | memoryview) -> int:
    """Return the CRC-32C of ``data``: 0 … 2³²−1."""
    return int(_crc32c(bytes(data)))

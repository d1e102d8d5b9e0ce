"""The two checksums of the formats.

``body_crc`` is CRC-32 (IEEE 802.3, as zlib computes it) with the top bit cleared: what RocketMQ and MetaQ clients know.
``crc32c`` is CRC-32C (Castagnoli) for files that only we read: checkpoints and control documents.
"""

import zlib

import crcmod.predefined

_crc32c = crcmod.predefined.mkCrcFun("crc-32c")


def body_crc(data: bytes | memoryview, start: int = 0) -> int:
    """CRC-32 of ``data`` with the top bit cleared: 0 … 2³¹−1. ``start`` is a plain CRC-32 to go on from."""
    return zlib.crc32(data, start) & 0x7FFFFFFF


def crc32c(data: bytes | memoryview) -> int:
    """CRC-32C of ``data``: 0 … 2³²−1."""
    return int(_crc32c(bytes(data)))

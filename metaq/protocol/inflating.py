"""Decompression of message bodies that a client has compressed (specs: store format, section 1).

The system flag of a message says whether its body is compressed, and how::

    bit 0       compressed
    bits 8-10   0 and 3 a zlib stream, 1 an LZ4 frame, 2 a Zstandard frame

The broker does not check that body and flag agree: a body may not be such a stream at all, may be cut, or may inflate to more
than the memory holds. LZ4 and Zstandard need libraries that are an optional extra.
"""

import zlib
from typing import Final

from metaq.errors import DecodeError
from metaq.protocol.sysflag import COMPRESSED, COMPRESSION_KIND

MAX_INFLATED_BYTES: Final = 16 * 1024 * 1024
"""The default limit for one inflated body: four times the largest message that brokers accept (``max_message_bytes``)."""
COMPRESSION: Final = COMPRESSED | COMPRESSION_KIND
"""The bits that say whether a body is compressed, and how."""
COMPRESSED_ZLIB: Final = 0x301
_LZ4: Final = 0x100
_ZSTD: Final = 0x200
_ZLIB_KINDS: Final = frozenset({0, 0x300})
_ZSTD_WINDOW: Final = 8 * 1024 * 1024
"""The memory that a decoder needs for a frame of the usual levels, whatever the frame inflates to."""
_CUT: Final = "it is cut"


def inflated(body: bytes, sys_flag: int, most: int = MAX_INFLATED_BYTES) -> bytes:
    """Return the body as it was before compression.

    ``DecodeError`` when the body is not what the flag says, inflates to more than ``most`` bytes, or needs a library that is
    missing.
    """
    if not sys_flag & COMPRESSED:
        return body
    kind = sys_flag & COMPRESSION_KIND
    if kind in _ZLIB_KINDS:
        return inflated_zlib(body, most)
    if kind == _LZ4:
        return _inflated_lz4(body, most)
    if kind == _ZSTD:
        return _inflated_zstd(body, most)
    known = "zlib (0 and 3), LZ4 (1) and Zstandard (2) are known"
    raise DecodeError(f"a body of {len(body)} bytes is compressed with method {kind >> 8}; {known}")


def inflated_zlib(body: bytes, most: int = MAX_INFLATED_BYTES) -> bytes:
    """Return the content of a zlib stream. ``DecodeError`` when it cannot be read, is cut, or is larger than ``most`` bytes."""
    stream = zlib.decompressobj()
    try:
        data = stream.decompress(body, most + 1)
    except zlib.error as error:
        raise _unreadable(body, "zlib", error) from error
    return _whole(data, body, most, "zlib", is_end=stream.eof)


def _inflated_lz4(body: bytes, most: int) -> bytes:
    try:
        import lz4.frame  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise _no_library("LZ4", error) from error
    stream = lz4.frame.LZ4FrameDecompressor()
    try:
        data: bytes = stream.decompress(body, max_length=most + 1)
    except RuntimeError as error:
        raise _unreadable(body, "LZ4", error) from error
    return _whole(data, body, most, "LZ4", is_end=stream.eof)


def _inflated_zstd(body: bytes, most: int) -> bytes:
    try:
        import zstandard  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise _no_library("Zstandard", error) from error
    decoder = zstandard.ZstdDecompressor(max_window_size=max(most, _ZSTD_WINDOW))
    try:
        # decompress() allocates the size that a frame declares at once, whatever max_output_size is
        if zstandard.frame_content_size(body) > most or len(decoder.stream_reader(body).read(most + 1)) > most:
            raise _too_large(body, most)
        return decoder.decompress(body, max_output_size=most)  # the reader cannot tell a cut frame from a whole one
    except zstandard.ZstdError as error:
        raise _unreadable(body, "Zstandard", error) from error


def _whole(data: bytes, body: bytes, most: int, name: str, *, is_end: bool) -> bytes:
    if len(data) > most:
        raise _too_large(body, most)
    if not is_end:
        raise _unreadable(body, name, _CUT)
    return data


def _too_large(body: bytes, most: int) -> DecodeError:
    return DecodeError(f"a body of {len(body)} bytes inflates to more than {most} (max_inflated_bytes)")


def _unreadable(body: bytes, name: str, reason: object) -> DecodeError:
    return DecodeError(f"a body of {len(body)} bytes cannot be inflated by {name}: {reason}")


def _no_library(name: str, error: ImportError) -> DecodeError:
    return DecodeError(f"a body is compressed by {name}, and {error.name} is missing: pip install 'metaq-broker[compression]'")

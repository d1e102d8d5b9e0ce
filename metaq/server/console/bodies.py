"""Bodies of messages as people read them: JSON with indents, text, or a dump of bytes."""

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

import orjson

MOST_SHOWN: Final = 64 * 1024
"""Bytes of a body that a page shows; the download has all."""
MOST_DUMPED: Final = 4096
"""Bytes of a dump."""
MOST_PREVIEW: Final = 160
"""Characters of a body in a list."""
_ROW: Final = 16
_TOKEN: Final = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{},:]|[^\s\[\]{},:"]+')
"""A text, a sign, or a number or word, of JSON."""
JSON: Final = "json"
TEXT: Final = "text"
HEX: Final = "hex"
FORMS: Final = (JSON, TEXT, HEX)


class ShownBody(NamedTuple):
    """A body in one of its forms."""

    form: str
    text: str
    is_cut: bool


def shown_body(data: bytes, wanted: str) -> ShownBody:
    """Return a body in the wanted form, or else in the one that suits it: JSON, text, or a dump. It may take some 50 ms."""
    if wanted == HEX:
        return _dumped(data)
    part = data[:MOST_SHOWN]
    is_cut = len(part) < len(data)
    if wanted != TEXT and not is_cut and data.lstrip()[:1] in (b"{", b"["):
        try:
            orjson.loads(data)
            return ShownBody(JSON, b"".join(_indented(data)).decode(), is_cut=False)
        except orjson.JSONDecodeError:
            pass  # it only looks like it
    try:
        return ShownBody(TEXT, part.decode(), is_cut)
    except UnicodeDecodeError as error:
        if is_cut and error.start > len(part) - 4:  # the cut is inside of a character
            return ShownBody(TEXT, part[: error.start].decode(), is_cut)
        return ShownBody(TEXT, part.decode(errors="replace"), is_cut) if wanted == TEXT else _dumped(data)


def _indented(data: bytes) -> Iterator[bytes]:
    """Yield JSON with indents, and otherwise as it is: to parse it would change long numbers, and drop repeated names."""
    depth, is_empty = 0, False
    for token in _TOKEN.findall(data):
        if token in b"]}":
            depth -= 1
            if not is_empty:
                yield b"\n" + b"  " * depth
        elif is_empty:
            yield b"\n" + b"  " * depth
        is_empty = token in b"[{"
        depth += is_empty
        yield _readable(token) if token[:1] == b'"' else token
        if token == b",":
            yield b"\n" + b"  " * depth
        elif token == b":":
            yield b" "


def _readable(text: bytes) -> bytes:
    """Return a text of JSON whose letters are not escaped."""
    return orjson.dumps(orjson.loads(text)) if b"\\u" in text else text


def preview(text: str | None, size: int) -> str:
    """Return the begin of a body for a list; ``text`` is ``None`` when it is no text."""
    if text is None:
        return f"{size:,} bytes that are no text"
    line = " ".join(text[: 2 * MOST_PREVIEW].split())
    return line if len(line) <= MOST_PREVIEW else f"{line[:MOST_PREVIEW]}…"


def _dumped(data: bytes) -> ShownBody:
    part = data[:MOST_DUMPED]
    lines = (
        f"{at:08x}  {part[at : at + _ROW].hex(' '):<{3 * _ROW - 1}}  {_printable(part[at : at + _ROW])}"
        for at in range(0, len(part), _ROW)
    )
    return ShownBody(HEX, "\n".join(lines), is_cut=len(part) < len(data))


def _printable(data: bytes) -> str:
    return "".join(chr(byte) if 0x20 <= byte < 0x7F else "." for byte in data)

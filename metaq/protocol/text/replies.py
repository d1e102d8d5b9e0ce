"""The frames that a broker sends: replies, and messages between them (specs: text protocol, sections 1.4, 3 and 16).

``result CODE LENGTH OPAQUE CR LF body`` and ``value LENGTH OPAQUE CR LF records``. This broker always writes ``value``; the 1.3
manual calls it ``data``, so the reader accepts both words. Message frames are those of ``metaq.protocol.text.pushed``.
"""

import re
from typing import Final, NamedTuple

from metaq.errors import StreamLost
from metaq.protocol.text.pushed import PUSHED, Pushed, PushedHead, read_pushed_line

OK: Final = 200
MOVED: Final = 301
BAD_REQUEST: Final = 400
FORBIDDEN: Final = 403
NOT_FOUND: Final = 404
NOTHING_TO_POP: Final = "there is nothing to pop"
"""The text of the 404 that tells an empty pop from a topic that does not exist."""
CONFLICT: Final = 409
ERROR: Final = 500
STORED_AT: Final = "stored at "
"""The beginning of the 500 for a put that is stored, and not yet as safe as configured."""
IN_DOUBT: Final = "may be stored or not"
"""The words in the 500 for a put of which nobody knows whether it is stored."""
UNAVAILABLE: Final = 503

VALUE: Final = 0
"""The ``code`` of a ``Reply`` that is a ``value`` frame."""

MAX_BODY_BYTES: Final = 64 * 1024 * 1024
_MAX_LINE: Final = 4096
_NO_LINE_END: Final = f"no line end within {_MAX_LINE} bytes: this is not a metaq broker"
# at most 19 digits: a broken peer could make int() of more costly
_LINE: Final = re.compile(rb"(?:result (\d{1,9})|value|data) (-?\d{1,19}) ([+-]?\d{1,19})(?: .*)?", re.DOTALL)


class Reply(NamedTuple):
    """One reply; ``code`` is ``VALUE`` for records, otherwise the HTTP-like status."""

    code: int
    opaque: int
    body: bytes


class _ReplyHead(NamedTuple):
    """The line of a reply."""

    code: int
    length: int
    opaque: int


def write_result(code: int, body: str, opaque: str) -> bytes:
    """Return a ``result`` frame. ``body`` is encoded in UTF-8, and its length counts bytes."""
    data = body.encode()
    return b"result %d %d %b\r\n%b" % (code, len(data), opaque.encode("ascii"), data)


def write_value_head(length: int, opaque: str) -> bytes:
    """Return the line that precedes ``length`` bytes of records."""
    return f"value {length} {opaque}\r\n".encode("ascii")


class TextReader:
    """The parser of bytes from a broker into replies and pushed messages, whatever the slices they arrive in."""

    def __init__(self, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self._max_body_bytes = max_body_bytes
        self._chunks: list[bytes] = []
        self._have = 0
        self._need = 0

    def receive(self, data: bytes) -> list[Reply | Pushed]:
        """Return what is complete now, in its order; ``StreamLost`` when the bytes are neither replies nor messages."""
        self._chunks.append(data)
        self._have += len(data)
        if self._have < self._need:
            return []
        data = b"".join(self._chunks)
        frames: list[Reply | Pushed] = []
        at = 0
        self._need = 0
        while (line_end := data.find(b"\r\n", at)) >= 0:
            line = data[at:line_end]
            if len(line) > _MAX_LINE:
                raise StreamLost(_NO_LINE_END)
            head = read_pushed_line(line) if line.startswith(PUSHED) else _read_line(line)
            length = head.length
            if not 0 <= length <= self._max_body_bytes:
                raise StreamLost(f"a reply of {length} bytes; the limit is {self._max_body_bytes} (max_body_bytes)")
            start = line_end + 2
            if start + length > len(data):
                self._need = start + length - at
                break
            body = data[start : start + length]
            frames.append(Pushed(head, body) if isinstance(head, PushedHead) else Reply(head.code, head.opaque, body))
            at = start + length
        rest = data[at:]
        if not self._need and len(rest) > _MAX_LINE + 1:  # a CR whose LF has not arrived does not belong to the line
            raise StreamLost(_NO_LINE_END)
        self._chunks = [rest] if rest else []
        self._have = len(rest)
        return frames


def _read_line(line: bytes) -> _ReplyHead:
    """Return what the line of a reply says; ``StreamLost`` when it is none."""
    match = _LINE.fullmatch(line)
    if match is None:
        raise StreamLost(f"it answered {line[:80].decode('ascii', 'backslashreplace')!r}")
    return _ReplyHead(int(match[1] or VALUE), int(match[2]), int(match[3]))

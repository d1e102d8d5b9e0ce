"""The head of a request: its line and its fields, as they come over a connection (RFC 9112, sections 3 and 5).

::

    METHOD SP TARGET SP VERSION CR LF
    NAME ":" value CR LF        repeated
    CR LF

pywsgi would have the standard library parse the fields as those of an e-mail, which takes 22 µs for five of them; this takes 4.
What two programs on the way could read in two ways is refused: folded lines, a length that is there twice or beside chunks.
"""

import re
from collections.abc import Callable
from typing import Final, NamedTuple

MOST_LINE: Final = 16 * 1024
"""Bytes of a field; its length is also that of the longest credentials."""
MOST_FIELDS: Final = 100
MOST_HEAD: Final = 64 * 1024
"""Bytes of all fields together."""
CHUNKED: Final = "chunked"

_FIELD: Final = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):([^\x00\r\n]*)\r?\n")
"""Blanks around a value are taken off later: the expression for them would try each of a long row of blanks with each."""
_VERSIONS: Final = ("HTTP/1.1", "HTTP/1.0")
_LENGTH: Final = re.compile(r"[0-9]{1,18}")
_ONCE: Final = frozenset(("content-length", "host", "transfer-encoding"))


class BadHead(ValueError):
    """The reason why a request cannot be read; its connection is closed, as nobody knows where the next one begins."""


class Head(NamedTuple):
    """The head of one request."""

    method: str
    target: str
    version: str
    fields: dict[str, str]
    """By names in small letters; values of a field that is there several times are joined by commas, those of cookies by
    semicolons."""

    @property
    def length(self) -> int | None:
        """The bytes of the body, if they are given."""
        length = self.fields.get("content-length")
        return None if length is None else int(length)

    @property
    def is_chunked(self) -> bool:
        return "transfer-encoding" in self.fields

    @property
    def goes_on(self) -> bool:
        """True when another request may follow over the connection: not after chunks, whose end nobody looks for."""
        wanted = self.fields.get("connection", "").lower()
        is_wanted = wanted == "keep-alive" if self.version == "HTTP/1.0" else wanted != "close"
        return is_wanted and not self.is_chunked

    @property
    def is_usual(self) -> bool:
        """True when it says nothing unusual about the connection or the transfer."""
        plain = self.version == "HTTP/1.1" and self.goes_on and self.length is not None
        return plain and not ("expect" in self.fields or "upgrade" in self.fields)

    @property
    def wants_upgrade(self) -> bool:
        """True when WebSocket may follow the answer; a request with a body is read as any other one."""
        is_bare = self.method == "GET" and not self.length and not self.is_chunked
        return is_bare and self.fields.get("upgrade", "").lower() == "websocket"


def read_head(line: str, readline: Callable[[int], bytes]) -> Head:
    """Return the head that begins with ``line``; ``readline`` has the lines after it. Raise ``BadHead``."""
    words = line.split()
    if len(words) != 3 or words[2] not in _VERSIONS:
        raise BadHead(f"no request of HTTP/1: {line[:80]!r}")
    fields = _read_fields(readline)
    length = fields.get("content-length")
    if "transfer-encoding" in fields:
        if fields["transfer-encoding"].lower() != CHUNKED:
            raise BadHead(f"an unknown transfer encoding: {fields['transfer-encoding'][:80]!r}")
        if length is not None:
            raise BadHead("a length beside chunks")
    if length is not None and not _LENGTH.fullmatch(length):
        raise BadHead(f"no length: {length[:80]!r}")
    return Head(words[0], words[1], words[2], fields)


def _read_fields(readline: Callable[[int], bytes]) -> dict[str, str]:
    fields: dict[str, str] = {}
    left = MOST_HEAD
    for _ in range(MOST_FIELDS + 1):
        line = readline(MOST_LINE)
        left -= len(line)
        if left < 0:
            raise BadHead(f"fields of more than {MOST_HEAD} bytes")
        if line in (b"\r\n", b"\n"):
            return fields
        found = _FIELD.fullmatch(line)
        if found is None:
            raise BadHead(f"no field of a head: {line[:80]!r}")
        name, value = found[1].decode("ascii").lower(), found[2].strip(b" \t").decode("latin-1")
        if name not in fields:
            fields[name] = value
        elif name in _ONCE:
            raise BadHead(f"the field {name} is there twice")
        else:
            fields[name] += ("; " if name == "cookie" else ",") + value
    raise BadHead(f"more than {MOST_FIELDS} fields")

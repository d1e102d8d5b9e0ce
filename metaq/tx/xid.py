"""Keys of transactions, as the lines of the text protocol hold them (specs: text protocol, section 1.7).

::

    XID:<formatId>:<gtrid, hex>:<bqual, hex>:<qualifier>    a branch of a distributed transaction (X/Open XA)
    XID:<formatId>:<gtrid, hex>:<bqual, hex>                the same from clients before 1.4.5: no qualifier
    TX:<session>:<number>                                   a local transaction

Inside the broker a key is always its canonical text, ``str(parse_key(text))``: two spellings of one branch are one key.
"""

import string
from functools import lru_cache
from typing import Final, NamedTuple

from metaq.errors import BadRequest
from metaq.protocol.text.tokens import INT32, integer

MAX_ID_BYTES: Final = 64
"""The most bytes of a gtrid, and of a bqual (X/Open XA: MAXGTRIDSIZE, MAXBQUALSIZE)."""
MAX_NAME_LENGTH: Final = 255
"""The most characters of a qualifier, and of a session."""
_HEX_DIGITS: Final = frozenset(string.hexdigits)
_KEYS_KEPT: Final = 1024


class Xid(NamedTuple):
    """The name of an XA branch."""

    format_id: int
    """int32."""
    gtrid: bytes
    """The global transaction."""
    bqual: bytes
    """The branch within the global transaction."""
    qualifier: str = ""
    """The resource manager, so that RECOVER can list only the branches of one; empty in keys of four parts."""

    def __str__(self) -> str:
        """Return the canonical key: hex digits in lower case, and four parts when there is no qualifier."""
        tail = f":{self.qualifier}" if self.qualifier else ""
        return f"XID:{self.format_id}:{self.gtrid.hex()}:{self.bqual.hex()}{tail}"


class LocalKey(NamedTuple):
    """The name of a transaction that belongs to one connection."""

    session: str
    number: int
    """int32."""

    def __str__(self) -> str:
        return f"TX:{self.session}:{self.number}"


class Key(NamedTuple):
    """A key as the broker's tables have it."""

    text: str
    """The canonical text."""
    is_local: bool


@lru_cache(_KEYS_KEPT)  # every command of a transaction repeats its key
def read_key(text: str) -> Key:
    """Return the key that a token stands for. Raises what ``parse_key`` raises."""
    key = parse_key(text)
    return Key(str(key), isinstance(key, LocalKey))


def parse_key(text: str) -> Xid | LocalKey:
    """Return the key that a token stands for. ``BadRequest`` for anything else, as the ``null`` of RECOVER."""
    kind, *parts = text.split(":")
    if kind == "XID" and len(parts) in (3, 4):
        qualifier = parts[3] if len(parts) == 4 else ""
        format_id = integer(parts[0], "formatId", INT32)
        return Xid(format_id, _id(parts[1], "gtrid"), _id(parts[2], "bqual"), _name(qualifier, "qualifier"))
    if kind == "TX" and len(parts) == 2:
        return LocalKey(_name(parts[0], "session"), integer(parts[1], "number of the transaction", INT32))
    raise BadRequest(
        f"transaction key {text[:80]!r} is neither XID:<formatId>:<gtrid hex>:<bqual hex>:<qualifier> nor TX:<session>:<number>"
    )


def qualifier_of(key: str) -> str:
    """Return the qualifier in a canonical XA key; empty when it has none."""
    parts = key.split(":", 4)
    return parts[4] if len(parts) == 5 else ""


def _id(digits: str, field: str) -> bytes:
    # bytes.fromhex alone would also skip blanks
    if not _HEX_DIGITS.issuperset(digits):
        raise BadRequest(f"{field} {digits[:40]!r} is not hexadecimal")
    value = bytes.fromhex(digits[: len(digits) & ~1])
    if len(value) > MAX_ID_BYTES:
        raise BadRequest(f"{field} has {len(value)} bytes, the limit is {MAX_ID_BYTES}")
    return value


def _name(text: str, field: str) -> str:
    # other characters would come back changed: lines are read as Latin-1, answers are written in UTF-8
    if not all("!" <= character <= "~" for character in text):
        raise BadRequest(f"{field} {text[:40]!r} has characters other than visible ASCII")
    if len(text) > MAX_NAME_LENGTH:
        raise BadRequest(f"{field} has {len(text)} characters, the limit is {MAX_NAME_LENGTH}")
    return text

"""The tokens of a line: numbers, words, opaques and options."""

import re
from typing import Final

from metaq.errors import BadRequest
from metaq.protocol.text.commands import NO_OPAQUE

INT32: Final = (-(1 << 31), (1 << 31) - 1)
INT64: Final = (-(1 << 63), (1 << 63) - 1)
OPAQUE: Final = (-(1 << 31), (1 << 32) - 1)
"""Signed in the Java client, unsigned in the C++ client."""

_OPAQUE_AT: Final = {"get": 6, "offset": 5, "stats": 2, "version": 1, "help": 1, "auth": 3, "cancel": 2}
"""Where the opaque stands in commands that may have tokens after it; elsewhere it is the last token."""
_WORD: Final = re.compile("[^\x00-\x20\x7f-\xa0]+")
_MOST_WORD_BYTES: Final = 255
_OPTION: Final = re.compile("[a-z]+=")


def integer(token: str, field: str, bounds: tuple[int, int]) -> int:
    """Return a decimal number with optional sign. ``BadRequest`` names the field when it is not one or out of ``bounds``."""
    digits = token[1:] if token[:1] in ("-", "+") else token
    # isdecimal: int() alone would also take "1_0", blanks and digits of other scripts
    if not digits.isascii() or not digits.isdecimal() or len(digits) > 20:
        raise BadRequest(f"{field} {token[:40]!r} is not a decimal number")
    value = int(token)
    if not bounds[0] <= value <= bounds[1]:
        raise BadRequest(f"{field} {token} is not within {bounds[0]} … {bounds[1]}")
    return value


def opaque(token: str) -> str:
    if not (token.isdecimal() and len(token) < 10):
        integer(token, "opaque", OPAQUE)
    return token


def fits(token: str, bounds: tuple[int, int]) -> bool:
    """Return whether ``integer`` would accept the token and it has no plus. Most are short and without sign."""
    if token.isdecimal() and len(token) < 10:
        return True
    if token.startswith("+"):
        return False  # as the sixth of seven tokens, one with a plus is a transaction key
    try:
        integer(token, "", bounds)
    except BadRequest:
        return False
    return True


def opaque_or_default(tokens: list[str]) -> str:
    """Return the opaque to answer a refused line with: the token in its place, or the last; ``NO_OPAQUE`` if it is not one."""
    place = _OPAQUE_AT.get(tokens[0], -1)
    try:
        return opaque(tokens[place if place < len(tokens) else -1])
    except BadRequest:
        return NO_OPAQUE


def need(tokens: list[str], least: int, usage: str) -> None:
    if len(tokens) < least:
        raise BadRequest(f"{tokens[0]} needs {usage}")


def is_word(text: str) -> bool:
    """Return whether a text can be one word of a line: up to 255 bytes without blanks and control characters."""
    return _WORD.fullmatch(text) is not None and len(text.encode()) <= _MOST_WORD_BYTES


def word(token: str, field: str) -> str:
    """Return a word, which may have characters beyond ASCII. ``BadRequest`` names the field when it is none."""
    try:
        text = token.encode("latin-1").decode()  # a line is read byte by byte
    except UnicodeDecodeError as error:
        raise BadRequest(f"{field} {token[:40]!r} is not UTF-8") from error
    if not is_word(text):
        raise BadRequest(f"{field} {text[:40]!r} is not a word of 1 to {_MOST_WORD_BYTES} bytes without control characters")
    return text


def choice(token: str, field: str, yes: str, no: str) -> bool:
    """Return whether a token is ``yes``. ``BadRequest`` when it is neither that nor ``no``."""
    if token not in (yes, no):
        raise BadRequest(f"{field} is {yes} or {no}, not {token[:40]!r}")
    return token == yes


def is_option(token: str) -> bool:
    """Return whether a token is an option: ``name=value``. Transaction keys begin with capitals, and numbers have no ``=``."""
    return _OPTION.match(token) is not None


def option_values(command: str, tokens: list[str], known: tuple[str, ...]) -> dict[str, str]:
    """Return options by name, ``=`` included. ``BadRequest`` for one that is not in ``known``, or that comes twice."""
    values: dict[str, str] = {}
    for token in tokens:
        name, equals, value = token.partition("=")
        name += equals
        if name not in known:
            raise BadRequest(f"{command} does not know the option {name[:40]}; it knows {', '.join(known) or 'none'}")
        if name in values:
            raise BadRequest(f"{command} has the option {name} twice")
        values[name] = value
    return values

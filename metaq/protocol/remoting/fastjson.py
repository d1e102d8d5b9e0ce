"""JSON as fastjson writes it, which is not always JSON (specs: remoting protocol, sections 2.2 and 3.3).

Beside plain JSON there are maps whose keys are not strings::

    {"offsetTable":{{"brokerName":"broker-a","queueId":3,"topic":"TopicA"}:12}}            an object as key
    {"offsetTable":{"{\\"brokerName\\":\\"broker-a\\",\\"queueId\\":3,\\"topic\\":\\"TopicA\\"}":12}}  the same, its text as key
    {"offsetTable":{"TopicA@CG_A":{0:5,1:7}}}                                              bare integers as keys

In Python a key that is an object, or the text of one, with these three members is a ``MessageQueue``, and a bare integer is an
``int``. A quoted integer stays a ``str``: readers of maps that come in both forms (broker addresses) use ``int(key)``.
"""

import math
import re
from collections.abc import Mapping
from typing import Any, Final, NoReturn

import orjson

from metaq.errors import BadRequest
from metaq.message import MessageQueue

MAX_NESTING: Final = 64
"""Objects and arrays within each other, where the text is not plain JSON. The parser of plain JSON allows 1,024."""
MAX_LENIENT_BYTES: Final = 4 << 20
"""Bytes of a text that is not plain JSON: it is parsed in Python, which takes some seconds for this much."""

_BLANKS: Final = re.compile(r"[ \t\n\r]*")
_TEXT: Final = re.compile(r'"([^"\\]*(?:\\.[^"\\]*)*)"', re.DOTALL)
_ESCAPE: Final = re.compile(r"\\(?:u([0-9a-fA-F]{4})(?:\\u([dD][c-fC-F][0-9a-fA-F]{2}))?|(.))", re.DOTALL)
_ESCAPED: Final = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_NUMBER: Final = re.compile(r"(-?(?:0|[1-9][0-9]*))(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_WORD: Final = re.compile(r"true|false|null")
_WORDS: Final[dict[str, bool | None]] = {"true": True, "false": False, "null": None}
_INT64: Final = range(-(1 << 63), 1 << 64)
"""The integers that stay integers, as in the parser of plain JSON; larger ones become floats."""


def decode(data: bytes, most_lenient: int = MAX_LENIENT_BYTES) -> Any:
    """Return the value of a body in fastjson's JSON.

    ``most_lenient`` is the limit in bytes for a body that is not plain JSON. ``BadRequest`` names the place where the body is
    wrong, or the limit that it exceeds.
    """
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        pass  # either not plain, or wrong: the parser below finds out
    else:
        # A text that begins with a brace may be a key that stands for an object.
        return _with_queues(value, 1) if b'"{' in data else value
    if len(data) > most_lenient:
        limit = f"the limit of {most_lenient} for what is not plain JSON"
        raise BadRequest(f"JSON body: {len(data)} bytes are over {limit}; write all keys in quotes")
    try:
        return _Parser(data.decode()).parse()
    except UnicodeDecodeError as error:
        raise BadRequest(f"JSON body, byte {error.start + 1}: not UTF-8") from error


def decode_plain(data: bytes) -> Any:
    """Return the value of a body that all clients write as plain JSON. It takes some milliseconds for a MiB.

    ``BadRequest`` names the place where it is not plain JSON.
    """
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"JSON body, {error}") from error


def shown(value: object) -> str:
    """Return a wrong value for an error message, in a few characters, however long or deep it is."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return repr(value[:40]) if isinstance(value, str) else str(value)


def members_of(value: Any, what: str) -> Mapping[str, Any]:
    """Return the members of an object, ``what`` in an error. Raise ``BadRequest`` for another value."""
    if not isinstance(value, dict):
        raise BadRequest(f"JSON body: {shown(value)} where a {what} should be, an object")
    return value


def rows_of(members: Mapping[str, Any], name: str) -> list[Any]:
    """Return the list of this name; an absent one, or ``null``, is empty. Raise ``BadRequest`` for another value."""
    rows = members.get(name)
    if rows is None:
        return []
    if not isinstance(rows, list):
        raise BadRequest(f"JSON body: {name} is not a list")
    return rows


def text_of(members: Mapping[str, Any], name: str, default: str | None = None) -> str:
    """Return the text of this name. Raise ``BadRequest`` for another value, and for none when there is no default."""
    value = members.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, str):
        raise BadRequest(f"JSON body: {name} is {shown(value)}, not a text")
    return value


def number_of(members: Mapping[str, Any], name: str, default: int | None = None, *, bits: int = 32) -> int:
    """Return the whole number of this name, of at most ``bits`` bits. Raise ``BadRequest`` as ``text_of`` does."""
    value = members.get(name)
    if value is None and default is not None:
        return default
    if type(value) is not int or not -(1 << bits - 1) <= value < 1 << bits - 1:
        raise BadRequest(f"JSON body: {name} is {shown(value)}, not a number of {bits} bits")
    return value


def encode(value: Any) -> bytes:
    """Return the JSON of ``value``, without blanks: an ``int`` key is bare, a ``MessageQueue`` an object, as key and as value.

    ``TypeError`` when JSON cannot hold the value: an error in the program.
    """
    try:
        return orjson.dumps(value, default=_members)
    except orjson.JSONEncodeError:
        # a key, here or deeper, is not a string; or a leaf cannot be encoded, and raises again
        if isinstance(value, dict):
            return b"{%b}" % b",".join(b"%b:%b" % (_key(key), encode(inner)) for key, inner in value.items())
        if isinstance(value, list):
            return b"[%b]" % b",".join(map(encode, value))
        raise


def _with_queues(value: Any, nesting: int) -> Any:
    """Return plain JSON with each key that is the text of a message queue replaced by that queue."""
    if not isinstance(value, dict | list):
        return value
    if nesting > MAX_NESTING:
        raise BadRequest(f"JSON body: values are nested deeper than the limit of {MAX_NESTING}")
    if isinstance(value, list):
        return [_with_queues(inner, nesting + 1) for inner in value]
    return {
        (_queue_text(key) or key) if key.startswith("{") else key: _with_queues(inner, nesting + 1)
        for key, inner in value.items()
    }


def _members(value: object) -> dict[str, str | int]:
    if not isinstance(value, MessageQueue):
        raise TypeError(f"JSON cannot hold a {type(value).__name__}")
    return {"brokerName": value.broker_name, "queueId": value.partition, "topic": value.topic}


def _key(key: object) -> bytes:
    if not isinstance(key, str | int | MessageQueue) or isinstance(key, bool):
        raise TypeError(f"a {type(key).__name__} is no key: texts, whole numbers and message queues are")
    return encode(key)


def _queue(value: object) -> MessageQueue | None:
    """Return the message queue that an object stands for, or ``None``."""
    match value:
        # not int(partition), which takes a bool, too: compiled, nothing could tell the two apart any more
        case {"topic": str(topic), "brokerName": str(broker_name), "queueId": partition} if type(partition) is int:
            return MessageQueue(topic, broker_name, partition)
    return None


class _Parser:
    """A recursive-descent parser of a whole text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._nesting = 0

    def parse(self) -> Any:
        value = self._value()
        if self._peek():
            self._refuse("expected the end")
        return value

    def _refuse(self, reason: str) -> NoReturn:
        found = repr(self._text[self._at : self._at + 16]) if self._at < len(self._text) else "the end"
        raise BadRequest(f"JSON body, character {self._at + 1}: {reason}, not {found}")

    def _peek(self) -> str:
        """Skip blanks and return the next character, without consuming it; empty at the end."""
        sign = self._text[self._at : self._at + 1]
        if not sign.isspace():  # as a rule: fastjson writes no blanks
            return sign
        match = _BLANKS.match(self._text, self._at)
        assert match is not None
        self._at = match.end()
        return self._text[self._at : self._at + 1]

    def _took(self, sign: str) -> bool:
        found = self._peek() == sign
        self._at += found
        return found

    def _need(self, sign: str) -> None:
        if not self._took(sign):
            self._refuse(f"expected {sign!r}")

    def _value(self) -> Any:
        match self._peek():
            case "{":
                return self._object()
            case "[":
                return self._array()
            case '"':
                return self._string()
        word = _WORD.match(self._text, self._at)
        if word:
            self._at = word.end()
            return _WORDS[word[0]]
        return self._number()

    def _enter(self) -> None:
        self._nesting += 1
        if self._nesting > MAX_NESTING:
            self._refuse(f"expected values nested no deeper than the limit of {MAX_NESTING}")
        self._at += 1

    def _object(self) -> dict[str | int | MessageQueue, Any]:
        self._enter()
        members: dict[str | int | MessageQueue, Any] = {}
        if not self._took("}"):
            while True:
                key = self._object_key()
                self._need(":")
                members[key] = self._value()
                if self._took("}"):
                    break
                self._need(",")
        self._nesting -= 1
        return members

    def _array(self) -> list[Any]:
        self._enter()
        values: list[Any] = []
        if not self._took("]"):
            while True:
                values.append(self._value())
                if self._took("]"):
                    break
                self._need(",")
        self._nesting -= 1
        return values

    def _object_key(self) -> str | int | MessageQueue:
        sign = self._peek()
        start = self._at
        if sign == '"':
            text = self._string()
            return (_queue_text(text) if text.startswith("{") else None) or text
        if sign == "{":
            queue = _queue(self._object())
            if queue is None:
                self._at = start
                self._refuse("expected a message queue (topic, brokerName and queueId) as an object that is a key")
            return queue
        number = self._number() if sign and sign in "-0123456789" else None
        if not isinstance(number, int):
            self._at = start
            self._refuse("expected a key: a text, a whole number or a message queue")
        return number

    def _string(self) -> str:
        match = _TEXT.match(self._text, self._at)
        if match is None:
            self._refuse("expected a text with a closing quote")
        text = match[1]
        if "\\" in text:
            text = _ESCAPE.sub(self._unescaped, text)
        self._at = match.end()
        return text

    def _unescaped(self, match: re.Match[str]) -> str:
        first, second, letter = match.groups()
        if letter is not None:
            if letter not in _ESCAPED:
                self._refuse(f"expected a text without the escape \\{letter}")
            return _ESCAPED[letter]
        high = int(first, 16)
        if second is not None and 0xD800 <= high < 0xDC00:
            return chr(0x10000 + ((high - 0xD800) << 10) + int(second, 16) - 0xDC00)
        if second is not None or 0xD800 <= high < 0xE000:
            self._refuse(f"expected a text without half a character (\\u{first})")
        return chr(high)

    def _number(self) -> int | float:
        match = _NUMBER.match(self._text, self._at)
        if match is None:
            self._refuse("expected a value")
        whole, fraction, exponent = match.groups()
        # twenty digits and a sign hold all of 64 bits; int() of a much longer number is costly
        if fraction is None and exponent is None and len(whole) <= 21 and int(whole) in _INT64:
            self._at = match.end()
            return int(whole)
        number = float(match[0])
        if math.isinf(number):
            self._refuse("expected a number within the range of a double")
        self._at = match.end()
        return number


def _queue_text(text: str) -> MessageQueue | None:
    """Return the message queue whose text stands as a key, or ``None`` when the text only looks like one."""
    if not text.endswith("}"):  # thousands of errors would take long
        return None
    try:
        return _queue(orjson.loads(text))
    except orjson.JSONDecodeError:
        return None

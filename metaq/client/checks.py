"""Checks of parameters at the call. Each raises ``BadRequest`` with the parameter, its value, and what it takes."""

import enum
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeVar

from metaq.errors import BadRequest
from metaq.message import MAX_PARTITIONS, MessageQueue
from metaq.protocol.subscription import BLANKS, EVERYTHING, SEPARATOR

_TOPIC: Final = re.compile(r"[%|a-zA-Z0-9_-]{1,127}")
_GROUP: Final = re.compile(r"[%|a-zA-Z0-9_-]{1,120}")
MOST_PRIORITY: Final = 1023
"""The greatest priority: a topic has at most 1,024 partitions."""
_MOST_TAGS: Final = f"{EVERYTHING}, or tags with {SEPARATOR} between them, in one text"
E = TypeVar("E", bound=enum.Enum)


def wrong(name: str, value: object, takes: str) -> BadRequest:
    """Return the error for a wrong parameter; ``takes`` describes the right ones."""
    what = "" if value is None else f" ({type(value).__name__})"
    return BadRequest(f"{name} is {reprlib.repr(value)}{what}; it takes {takes}")


def text(name: str, value: object, takes: str = "text") -> None:
    """Refuse a value that is not a ``str``."""
    if not isinstance(value, str):
        raise wrong(name, value, takes)


def secret(name: str, value: object) -> None:
    """Refuse a value that is not a ``str``, without showing it."""
    if not isinstance(value, str):
        raise BadRequest(f"{name} is of type {type(value).__name__}; it takes text")


def topic(value: object) -> None:
    """Refuse a name that no topic can have."""
    text("topic", value, "the name of a topic")
    if not _TOPIC.fullmatch(str(value)):
        raise BadRequest(f"topic {str(value)[:140]!r}: write 1 to 127 letters, digits, and _ - % |")


def group(value: object) -> None:
    """Refuse a name that no group can have."""
    text("group", value, "the name of a group")
    if not _GROUP.fullmatch(str(value)):
        raise BadRequest(f"group {str(value)[:140]!r}: write 1 to 120 letters, digits, and _ - % |")


def body(value: object, name: str = "body") -> None:
    """Refuse a value that is not ``bytes``, without showing it."""
    if not isinstance(value, bytes):
        hint = ", as of text.encode()" if isinstance(value, str) else ""
        what = "None" if value is None else f"of type {type(value).__name__}"
        raise BadRequest(f"{name} is {what}; it takes bytes{hint}")


def tag(value: object) -> None:
    """Refuse a tag that no consumer could subscribe to; ``None`` is allowed."""
    if value is None:
        return
    text("tag", value, "one text, or None")
    if SEPARATOR in str(value) or value == EVERYTHING or str(value) != str(value).strip(BLANKS):
        takes = f"one tag without {SEPARATOR} and blanks around it, and not {EVERYTHING}: consumers could not choose it"
        raise wrong("tag", value, takes)


def keys(value: str | Iterable[str]) -> str | list[str]:
    """Return the keys in a form that can be iterated more than once; refuse keys that are not text."""
    takes = "a text, or several texts"
    if isinstance(value, str):
        return value
    if isinstance(value, bytes) or not isinstance(value, tuple | list | Iterable):
        raise wrong("keys", value, takes)
    found: list[Any] = list(value)  # not of str yet: compiled code would refuse others itself, without naming the parameter
    for one in found:
        text("keys", one, takes)
    return found


def properties(value: object) -> None:
    """Refuse a value that is not a mapping of ``str`` to ``str``."""
    if not isinstance(value, dict | MappingProxyType | Mapping):  # the usual ones first: an abstract class is slow to ask
        raise wrong("properties", value, "a mapping of texts to texts")
    for name, one in value.items():
        text("a name in properties", name)
        text(f"property {name!r}", one)


def ordering_key(value: object) -> None:
    """Refuse a value that is not a text without the characters 1 and 2."""
    text("ordering_key", value, "a text, or None")
    if "\x01" in str(value) or "\x02" in str(value):
        raise wrong("ordering_key", value, "a text without the characters 1 and 2")


def dedupe_id(value: object) -> None:
    """Refuse a value that is not the id of a message: a text that is not empty, without the characters 1 and 2."""
    text("dedupe_id", value, "a text, or None")
    if not value or "\x01" in str(value) or "\x02" in str(value):
        raise wrong("dedupe_id", value, "a text that is not empty, without the characters 1 and 2")


def number(name: str, value: object, least: int | None = 0, most: int | None = None) -> None:
    """Refuse a value that is not an ``int`` or not between ``least`` and ``most``."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if not is_number or (least is not None and value < least) or (most is not None and value > most):  # type: ignore[operator]
        limits = f" from {least} {'on' if most is None else f'to {most}'}" if least is not None else ""
        raise wrong(name, value, f"a whole number{limits}")


def partitions(value: object) -> None:
    """Refuse a value that is not a valid number of partitions."""
    number("partitions", value, 1, MAX_PARTITIONS)


def seconds(name: str, value: object) -> None:
    """Refuse a value that is not a number of seconds, 0 or more."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise wrong(name, value, "a number of seconds, 0 or more")


def span(name: str, value: object, least: float = 0.0) -> float:
    """Return a length of time in seconds; refuse what is neither a ``timedelta`` nor a number, or less than ``least``."""
    found = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(found, bool) or not isinstance(found, int | float) or not least <= found < float("inf"):
        raise wrong(name, value, f"a timedelta or a number of seconds, {least:g} or more")
    return float(found)


def flag(name: str, value: object) -> None:
    """Refuse a value that is not a ``bool``."""
    if not isinstance(value, bool):
        raise wrong(name, value, "True or False")


def choice(name: str, value: object, kind: type[E], *, or_time: bool = False) -> None:
    """Refuse a value that is not a member of an enumeration; with ``or_time`` a ``datetime`` is allowed, too."""
    if isinstance(value, kind) or (or_time and isinstance(value, datetime)):
        return
    members = ", ".join(f"metaq.{kind.__name__}.{member.name}" for member in kind)
    raise wrong(name, value, f"{members}{', or a datetime' if or_time else ''}")


def time(name: str, value: object) -> None:
    """Refuse a value that is not a ``datetime``."""
    if not isinstance(value, datetime):
        raise wrong(name, value, "a datetime")


def delay(level: object, span: object, at: object) -> None:
    """Refuse delays that cannot be sent: invalid ones, more than one, and times without a time zone."""
    number("delay_level", level, 0, 18)
    if span is None and at is None:
        return
    if span is not None and (not isinstance(span, timedelta) or span < timedelta(0)):
        raise wrong("delay", span, "a timedelta, 0 or more")
    if at is not None:
        time("deliver_at", at)
        if isinstance(at, datetime) and at.utcoffset() is None:
            raise BadRequest(f"deliver_at is {at} and has no time zone; add one: astimezone() adds the local one")
    given = {"delay_level": level or None, "delay": span, "deliver_at": at}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise BadRequest(f"{' and '.join(names)} contradict each other; give one of them")


def priority(value: object) -> None:
    """Refuse what is no priority."""
    if value is not None:
        number("priority", value, 0, MOST_PRIORITY)


def function(name: str, value: object, does: str) -> None:
    """Refuse a value that cannot be called."""
    if not isinstance(value, Callable):  # type: ignore[arg-type]
        raise wrong(name, value, f"a function that {does}")


def folder(name: str, value: object) -> None:
    """Refuse a value that is not a ``pathlib.Path``."""
    if not isinstance(value, Path):
        raise wrong(name, value, "a pathlib.Path")


def queue(value: object) -> None:
    """Refuse a value that is not a ``MessageQueue``."""
    if not isinstance(value, MessageQueue):
        raise wrong("queue", value, "a metaq.MessageQueue, as partitions() gives them")


def subscription(to: object, tags: object, sql: object) -> None:
    """Refuse an invalid topic, and tags or an SQL92 condition that are not text; expressions are not parsed here."""
    topic(to)
    text("tags", tags, _MOST_TAGS)
    if sql is not None:
        text("sql", sql, "a condition in one text, or None")


def message(content: object, its_tag: object, its_properties: object) -> None:
    """Refuse a message whose body, tag or properties cannot be sent."""
    body(content)
    tag(its_tag)
    properties(its_properties)

"""Parameters that cannot be right, said at the call: which one, what came, and what it takes. All raise ``BadRequest``."""

import enum
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Final, TypeVar

from metaq.errors import BadRequest
from metaq.message import MAX_PARTITIONS, MessageQueue
from metaq.protocol.subscription import BLANKS, EVERYTHING, SEPARATOR

_TOPIC: Final = re.compile(r"[%|a-zA-Z0-9_-]{1,127}")
_GROUP: Final = re.compile(r"[%|a-zA-Z0-9_-]{1,120}")
_MOST_TAGS: Final = f"{EVERYTHING}, or tags with {SEPARATOR} between them, in one text"
E = TypeVar("E", bound=enum.Enum)


def wrong(name: str, value: object, takes: str) -> BadRequest:
    """The error for a parameter."""
    what = "" if value is None else f" ({type(value).__name__})"
    return BadRequest(f"{name} is {reprlib.repr(value)}{what}; it takes {takes}")


def text(name: str, value: object, takes: str = "text") -> None:
    """Refuse what is no text."""
    if not isinstance(value, str):
        raise wrong(name, value, takes)


def secret(name: str, value: object) -> None:
    """Refuse what is no text, without showing it."""
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
    """Refuse what is no bytes; what it holds is not shown."""
    if not isinstance(value, bytes):
        hint = ", as of text.encode()" if isinstance(value, str) else ""
        what = "None" if value is None else f"of type {type(value).__name__}"
        raise BadRequest(f"{name} is {what}; it takes bytes{hint}")


def tag(value: object) -> None:
    """Refuse a tag that no consumer could choose."""
    if value is None:
        return
    text("tag", value, "one text, or None")
    if SEPARATOR in str(value) or value == EVERYTHING or str(value) != str(value).strip(BLANKS):
        takes = f"one tag without {SEPARATOR} and blanks around it, and not {EVERYTHING}: consumers could not choose it"
        raise wrong("tag", value, takes)


def keys(value: str | Iterable[str]) -> str | list[str]:
    """The keys, to be gone through more than once."""
    takes = "a text, or several texts"
    if isinstance(value, str):
        return value
    if isinstance(value, bytes) or not isinstance(value, Iterable):
        raise wrong("keys", value, takes)
    found = list(value)
    for one in found:
        text("keys", one, takes)
    return found


def properties(value: object) -> None:
    """Refuse what is no mapping of texts to texts."""
    if not isinstance(value, Mapping):
        raise wrong("properties", value, "a mapping of texts to texts")
    for name, one in value.items():
        text("a name in properties", name)
        text(f"property {name!r}", one)


def number(name: str, value: object, least: int | None = 0, most: int | None = None) -> None:
    """Refuse what is no whole number, or out of range."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if not is_number or (least is not None and value < least) or (most is not None and value > most):  # type: ignore[operator]
        limits = f" from {least} {'on' if most is None else f'to {most}'}" if least is not None else ""
        raise wrong(name, value, f"a whole number{limits}")


def partitions(value: object) -> None:
    """Refuse what is no number of partitions."""
    number("partitions", value, 1, MAX_PARTITIONS)


def seconds(name: str, value: object) -> None:
    """Refuse what is no time to wait."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise wrong(name, value, "a number of seconds, 0 or more")


def flag(name: str, value: object) -> None:
    """Refuse what is neither true nor false."""
    if not isinstance(value, bool):
        raise wrong(name, value, "True or False")


def choice(name: str, value: object, kind: type[E], *, or_time: bool = False) -> None:
    """Refuse what is no member of an enumeration, nor a time where that will do."""
    if isinstance(value, kind) or (or_time and isinstance(value, datetime)):
        return
    members = ", ".join(f"metaq.{kind.__name__}.{member.name}" for member in kind)
    raise wrong(name, value, f"{members}{', or a datetime' if or_time else ''}")


def time(name: str, value: object) -> None:
    """Refuse what is no time."""
    if not isinstance(value, datetime):
        raise wrong(name, value, "a datetime")


def function(name: str, value: object, does: str) -> None:
    """Refuse what cannot be called."""
    if not isinstance(value, Callable):  # type: ignore[arg-type]
        raise wrong(name, value, f"a function that {does}")


def folder(name: str, value: object) -> None:
    """Refuse what is no path."""
    if not isinstance(value, Path):
        raise wrong(name, value, "a pathlib.Path")


def queue(value: object) -> None:
    """Refuse what is no partition of a topic on a broker."""
    if not isinstance(value, MessageQueue):
        raise wrong("queue", value, "a metaq.MessageQueue, as partitions() gives them")


def subscription(to: object, tags: object, sql: object) -> None:
    """Refuse a topic, tags or a condition that are none."""
    topic(to)
    text("tags", tags, _MOST_TAGS)
    if sql is not None:
        text("sql", sql, "a condition in one text, or None")


def message(content: object, its_tag: object, its_properties: object) -> None:
    """Refuse a message that cannot be sent."""
    body(content)
    tag(its_tag)
    properties(its_properties)

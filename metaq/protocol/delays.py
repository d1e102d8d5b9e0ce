"""PURE: the time to which a message is delayed, as its properties say."""

from collections.abc import Mapping
from typing import Final, NamedTuple

from metaq.errors import MessageIllegal
from metaq.protocol import properties
from metaq.protocol.properties import TIMER_OUT, TIMERS

MOST_DIGITS: Final = 18
_FROM_NOW: Final = (properties.TIMER_SECONDS, properties.TIMER_DELAY)


def due_of(pairs: Mapping[str, str], now_ms: int) -> int | None:
    """Return when a message with these properties wants to be delivered, in Unix milliseconds; ``None``: at once.

    Raise ``MessageIllegal`` for a time that is not a number. A message that has been delayed already is not delayed again.
    """
    if TIMER_OUT in pairs:
        return None
    for name in TIMERS:
        value = pairs.get(name)
        if value is not None:
            if not (value.isascii() and value.isdecimal() and len(value) <= MOST_DIGITS):
                unit = "s" if name == properties.TIMER_SECONDS else "ms"
                raise MessageIllegal(f"the property {name} is {value[:20]!r}, not a number of {unit}")
            return due_ms(name, value, now_ms)
    return None


def due_ms(name: str, value: str, now_ms: int) -> int:
    """Return the time that one of the properties in ``TIMERS`` asks for, whose value is a number, in Unix milliseconds."""
    time_ms = int(value) * 1000 if name == properties.TIMER_SECONDS else int(value)
    return now_ms + time_ms if name in _FROM_NOW else time_ms


class Delayed(NamedTuple):
    """The properties of a message that is delayed to a time, and of which the broker keeps all others as they were sent."""

    others: bytes
    """All but the time, in the form of a record."""
    name: str
    value: str
    """The property that says the time, for ``due_ms``."""
    tag: str | None
    unique_key: str


MAY_DELAY: Final = "TIMER_DEL"
"""What the names of all but the last one in ``TIMERS`` begin with, which only old clients use."""
_NAMES: Final = frozenset(name for name in TIMERS if name.startswith(MAY_DELAY))
_PARKED: Final = (f"{TIMER_OUT}\x01", f"{properties.REAL_TOPIC}\x01", f"{properties.REAL_QUEUE}\x01")
"""The names at the end of a park's properties: a message that has one of them already is taken apart."""
_UNIQUE: Final = f"\x02{properties.UNIQUE_KEY}\x01"
_new: Final = tuple.__new__
"""Costs a third of a named tuple's own constructor."""


def as_delayed(text: str) -> Delayed | None:
    """Return properties that only delay their message to a time, as they are sent; ``None`` when they must be parsed.

    Raise ``MessageIllegal`` when they are longer than a record can keep.
    """
    at = text.find(MAY_DELAY)
    named = text.find("\x01", at)
    name = text[at:named]
    if at < 0 or name not in _NAMES or (at and text[at - 1] != "\x02"):
        return None
    end = text.find("\x02", named)
    value = text[named + 1 :] if end < 0 else text[named + 1 : end]
    if not (value.isascii() and value.isdecimal() and len(value) <= MOST_DIGITS):
        return None
    others = text[:at] if end < 0 else text[:at] + text[end + 1 :]
    if not others:
        return _new(Delayed, (b"", name, value, None, ""))
    if _PARKED[0] in others or _PARKED[1] in others or _PARKED[2] in others:
        return None
    sent = properties.as_sent(others)
    if sent is None:
        return None
    return _new(Delayed, (sent[0], name, value, sent[1], _unique_key(f"\x02{others}\x02")))


def _unique_key(marked: str) -> str:
    """Return the last value of UNIQ_KEY in properties with 02 before and after them; empty when there is none."""
    at = marked.rfind(_UNIQUE)
    return "" if at < 0 else marked[at + len(_UNIQUE) : marked.index("\x02", at + 1)]

"""PURE: the time to which a message is delayed, as its properties say."""

import re
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
    """The properties of a message that is delayed to a time, and of which the broker keeps all as they were sent."""

    kept: bytes
    """In the form of a record."""
    name: str
    value: str
    """The property that says the time, for ``due_ms``."""
    tag: str | None
    unique_key: str


MAY_DELAY: Final = "TIMER_DEL"
"""What the names of all but the last one in ``TIMERS`` begin with, which only old clients use."""
_OTHERS: Final = (*properties.TAKEN_APART, TIMER_OUT, properties.REAL_TOPIC, properties.REAL_QUEUE)
_TIME: Final = "|".join(map(re.escape, TIMERS))
_OTHER: Final = "|".join(map(re.escape, _OTHERS))
_SPECIAL: Final = re.compile(
    f"\x02(?:({_TIME})\x01([0-9]{{1,{MOST_DIGITS}}})(?=\x02)|(?:{_OTHER})\x01|{properties.UNUSUAL_WAIT})"
)
"""Finds what the broker acts on; of a time that is a number, the name and the number."""


def as_delayed(text: str) -> Delayed | None:
    """Return properties that only delay their message to a time, as they are sent; ``None`` when they must be parsed."""
    marked = f"\x02{text}" if text[-1:] == "\x02" else f"\x02{text}\x02"
    found = _SPECIAL.findall(marked)
    if len(found) != 1 or not found[0][0]:
        return None
    name, value = found[0]
    kept, tag, unique_key, _ = properties.looked_up(marked)
    return Delayed(kept, name, value, tag, unique_key or "")

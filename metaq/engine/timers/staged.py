"""Records of timers on their way into the log, and the times that senders ask for."""

from typing import Any, NamedTuple

from metaq.engine.writing import Draft
from metaq.errors import MessageIllegal
from metaq.protocol import properties
from metaq.timers.records import Definition, Key, TimerEvent


class Staged(NamedTuple):
    """A record that is in flight, and what it means."""

    is_park: bool
    ordinal: int
    event: TimerEvent
    taken: tuple[Key, ...] = ()
    """The timers that are taken for it: given back when it is not stored."""


class NextRun(NamedTuple):
    """The next run of a definition, on its way into the log."""

    definition: Definition
    due_ms: int
    draft: Draft

    @property
    def own(self) -> dict[str, str]:
        """The properties that only the broker may set."""
        return {properties.CRON: f"{self.definition.name}:{self.definition.number}"}


def due_of(pairs: dict[str, Any], now_ms: int) -> int | None:
    """Return when a message with these properties wants to be delivered, in Unix milliseconds; ``None``: at once.

    Raise ``MessageIllegal`` for a time that is not a number. A message that has been delayed already is not delayed again.
    """
    if properties.TIMER_OUT in pairs:
        return None
    for name, unit_ms, since_ms in properties.TIMES:
        value = pairs.get(name)
        if value is not None:
            if not (value.isascii() and value.isdecimal() and len(value) <= 18):
                raise MessageIllegal(f"the property {name} is {value[:20]!r}, not a number of {'s' if unit_ms > 1 else 'ms'}")
            return int(value) * unit_ms + (now_ms if since_ms else 0)
    return None

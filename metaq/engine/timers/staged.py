"""Records of timers on their way into the log, and the times that senders ask for."""

from typing import Any, Final, NamedTuple

from metaq.engine.writing import Draft
from metaq.errors import MessageIllegal
from metaq.protocol import properties
from metaq.timers.records import Definition, Key, TimerEvent, properties_of_park

RESERVED_BYTES: Final = 2048
"""Room in a segment for the mark that is stored together with a delivered message, and for the rest of both records."""
LONGEST_TIMES: Final = {properties.TIMER_ENQUEUE: str((1 << 63) - 1), properties.TIMER_DEQUEUE: str((1 << 63) - 1)}
"""What a delivered copy adds to the properties of its park, at its longest."""


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


def properties_to_park(draft: Draft, due_ms: int, segment_bytes: int) -> dict[str, str]:
    """Return the properties of a message's park. Raise ``MessageIllegal`` when its copy would not fit into a segment."""
    added = properties_of_park(due_ms, draft.topic, draft.partition)
    kept = {name: value for name, value in draft.properties.items() if name not in added} | added
    size = len(draft.body) + len(properties.encode(kept, LONGEST_TIMES)) + RESERVED_BYTES
    if size > segment_bytes:
        raise MessageIllegal(f"a delayed message must leave {RESERVED_BYTES} bytes of a segment (segment_bytes) free")
    return kept


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

"""Records of timers on their way into the log."""

from dataclasses import dataclass, field
from typing import Final, NamedTuple

from metaq.engine.writing import Draft
from metaq.errors import MessageIllegal
from metaq.protocol import properties
from metaq.protocol.delays import Delayed
from metaq.store.queues.consumequeue import ConsumeQueue
from metaq.timers.fold import Ordinals
from metaq.timers.records import Definition, Key, Parks, TimerEvent, properties_of_park

RESERVED_BYTES: Final = 2048
"""Room in a segment for the mark that is stored together with a delivered message, and for the rest of both records."""
LONGEST_TIMES: Final = {properties.TIMER_ENQUEUE: str((1 << 63) - 1), properties.TIMER_DEQUEUE: str((1 << 63) - 1)}
"""What a delivered copy adds to the properties of its park, at its longest."""
_LONGEST_ADDED: Final = len(properties.encode(LONGEST_TIMES))


@dataclass(slots=True)
class Changes:
    """The changes of timers that one turn stages."""

    events: list[TimerEvent] = field(default_factory=list)
    """What the records mean that are staged, in their order."""
    taken: list[Key] = field(default_factory=list)
    """The timers that are taken for them: given back when they are not stored."""
    names: list[str] = field(default_factory=list)
    """The recurring messages that are being defined or ended, or get a run that was lost."""
    _run: Parks | None = None  # the last of the events, when more parks may join it

    def add(self, event: TimerEvent) -> None:
        """Take what a record means that was staged."""
        self.events.append(event)
        self._run = None

    def park(self, key: Key, place: int, end: int) -> None:
        """Take the first park of a timer that was staged."""
        run = self._run
        if run is None or run.is_full:
            run = self._run = Parks()
            self.events.append(run)
        run.add(key, place, end)


class Appended(NamedTuple):
    """The changes of a turn that are in the log, and perhaps not yet seen by readers."""

    changes: Changes
    end: Ordinals
    """The place after their records: readers see them when they see so far."""
    size: int
    """The number of their records."""


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


def short_to_park(delayed: Delayed, due_ms: int, queue: ConsumeQueue, room: int) -> bytes | None:
    """Return the same of properties that stay as they were sent, as a record keeps them; ``None`` when they are too long.

    ``room`` are the bytes of a segment beside the body.
    """
    others, name, value, _, _ = delayed
    added = (
        f"{name}\x01{value}\x02{properties.TIMER_OUT}\x01{due_ms}\x02"
        f"{properties.REAL_TOPIC}\x01{queue.topic}\x02{properties.REAL_QUEUE}\x01{queue.partition}\x02"
    )
    kept = others + added.encode()
    size = len(kept) + _LONGEST_ADDED
    return kept if size <= properties.MOST_BYTES and size + RESERVED_BYTES <= room else None

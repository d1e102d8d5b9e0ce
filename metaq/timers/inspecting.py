"""The inspection of the records of timers in a data folder: what a checksum cannot show about marks, definitions and runs."""

from collections.abc import Iterator

from metaq.errors import BadRequest, CorruptRecord
from metaq.message import TopicPartition
from metaq.protocol.record import decode_record
from metaq.protocol.text.messages import Stored
from metaq.store.recordgroups import group_end, is_member
from metaq.timers.definitions import recurring_of
from metaq.timers.records import MARKS, PARKS, Defined, Park, TimerEvent, event_of_mark, event_of_park


class _Group:
    """The group that is being read: its mark, and its members so far."""

    def __init__(self, mark: Stored, event: TimerEvent, end: int) -> None:
        self.place = mark.log_offset
        self.event = event
        self.end = end
        self.at = mark.log_offset + mark.size
        """Where the next member begins."""
        self.runs: list[int | None] = []
        """The numbers of the definitions whose runs are members."""

    def error(self) -> str | None:
        """Return what is wrong with a group that is read to its end."""
        if self.at != self.end:
            return f"its group ends at the log offset {self.at}, the mark says {self.end}"
        if isinstance(self.event, Defined) and self.runs != [self.event.definition.number]:
            return f"the group of the definition {self.event.definition.name} does not consist of its first run"
        if None in self.runs:
            return "its group has a parked message that is no run of a definition"
        return None


class TimerInspection:
    """An inspection of one folder, which is given its records in the order of the log."""

    def __init__(self) -> None:
        self._group: _Group | None = None

    def record(self, key: TopicPartition, stored: Stored) -> Iterator[tuple[int, str]]:
        """Take the next record; yield log offsets, and what is wrong there.

        A group with a gap is not looked at: the gap is reported by who found it.
        """
        group = self._group
        if group is not None and group.at != stored.log_offset:
            group = self._group = None
        event: TimerEvent | None = None
        if key in (MARKS, PARKS):
            try:
                event = _mark(stored) if key == MARKS else _park(stored)
            except CorruptRecord as error:
                yield stored.log_offset, str(error)
        if group is not None:
            self._grow(group, stored, event)
            if group.at == group.end or self._group is None:
                self._group = None
                if (reason := group.error()) is not None:
                    yield group.place, f"the mark of timers at log offset {group.place}: {reason}"
        if key != MARKS or event is None:
            return
        end = group_end(stored)
        if end is not None:
            self._group = _Group(stored, event, end)
        elif isinstance(event, Defined) and event.definition.number == event.definition.place:
            yield stored.log_offset, f"the definition {event.definition.name} has no first run in its group"

    def _grow(self, group: _Group, stored: Stored, event: TimerEvent | None) -> None:
        """Add a record to the group, or end the group when the record is no member of it."""
        end = stored.log_offset + stored.size
        if not is_member(stored) or end > group.end:
            self._group = None
            return
        group.at = end
        if isinstance(event, Park):
            group.runs.append(event.definition)


def _mark(stored: Stored) -> TimerEvent:
    """Return what a mark means; a definition must be one that could be made now. Raises ``CorruptRecord``."""
    event = event_of_mark(stored)
    if isinstance(event, Defined):
        body = decode_record(bytes(stored.buffer[stored.at : stored.at + stored.size])).body
        try:
            recurring_of(body)._replace(zone="UTC").check()  # this machine may know other zones than the broker's
        except (BadRequest, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptRecord(f"the definition at log offset {stored.log_offset} cannot be read: {error}") from error
    return event


def _park(stored: Stored) -> Park:
    """Return what a park means; the run of a definition comes into the log with a mark. Raises ``CorruptRecord``."""
    park = event_of_park(stored)
    if park.definition is not None and park.before is None and not is_member(stored):
        raise CorruptRecord(f"the run at log offset {stored.log_offset} belongs to no group")
    return park

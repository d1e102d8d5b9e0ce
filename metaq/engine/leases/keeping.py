"""Keeping the leases: snapshots for openings, and the end of open messages whose segments are deleted."""

import logging
from collections.abc import Callable, Sequence
from typing import Final

from gevent.lock import BoundedSemaphore

from metaq.engine.leases.leases import Leases
from metaq.engine.leases.poison import Poison, Reason
from metaq.leases.events import EVENTS, Dead
from metaq.leases.state import PartitionLeases
from metaq.message import GroupPartition, TopicPartition
from metaq.store.files.filecache import Run, read_through

logger = logging.getLogger(__name__)

KEEP_S: Final = 1.0
AT_ONCE: Final = 64
"""Places whose states are recorded between two rests."""
DROP: Final = "drop"


class LeaseKeeper:
    """Takes snapshots, and ends what retention ends."""

    def __init__(self, leases: Leases, poison: Poison, rest: Callable[[], None], run: Run) -> None:
        """Create it; ``rest`` lets all others go on, and returns after the end of a turn."""
        self._leases = leases
        self._poison = poison
        self._store = leases.context.store
        self._rest = rest
        self._read = read_through(run)
        self._taking = BoundedSemaphore(1)  # another snapshot, begun meanwhile, would miss what this one has told before

    def tend(self) -> None:
        """Do what is due: record again what could not be stored, take a snapshot, leave unused states."""
        if not self._store.appendable:
            return
        self._tell(self._leases.log.unkept)
        self._leases.leave_unused()
        if self._leases.log.snapshot_due:
            self._take_snapshot()

    def _take_snapshot(self) -> None:
        with self._taking:
            self._leases.log.begin_snapshot()
            self._tell(self._leases.places())
            self._leases.log.end_snapshot()

    def _tell(self, places: Sequence[GroupPartition]) -> None:
        """Record the whole states of places, until there is no room for one; afterwards they are in the log."""
        for start in range(0, len(places), AT_ONCE):
            has_room = all(map(self._leases.tell, places[start : start + AT_ONCE]))
            self._rest()
            if not has_room:
                return

    # -- retention ----------------------------------------------------------------------------------------------------

    @property
    def oldest(self) -> int | None:
        """The lowest log offset that is needed: of the records of the leases, and of what is open."""
        records = self._oldest_record
        needed = [] if records is None else [records]
        for place in self._leases.places():
            state = self._leases.get(place)
            offset = None if state is None or not state.open else self._log_offset(place, state.base)
            if offset is not None:
                needed.append(offset)
        return min(needed, default=None)

    @property
    def _oldest_record(self) -> int | None:
        """The log offset of the first record that an opening reads; ``None`` when there is none."""
        queue = self._store.queues.get(EVENTS)
        if queue is None:
            return None
        since = max(self._leases.log.since, self._store.first(queue, self._read)[0])
        return queue.unit(since, self._read)[0] if since < queue.next else None

    def _log_offset(self, place: GroupPartition, ordinal: int) -> int | None:
        """Return the log offset of a message; ``None`` when it is not there any more."""
        queue = self._store.queues.get(TopicPartition(place.topic, place.partition))
        if queue is None or not self._store.first(queue, self._read)[0] <= ordinal < queue.next:
            return None
        return queue.unit(ordinal, self._read)[0]

    def keep(self, before: int) -> None:
        """Record the states again, and give up what is open in segments that are to be deleted.

        What cannot be given up stays open, and so does its segment.
        """
        oldest = self.oldest
        if oldest is None or oldest >= before:
            return
        self._store.check_appendable()
        records = self._oldest_record
        if records is not None and records < before:
            self._take_snapshot()
        for place in self._leases.places():
            state = self._leases.get(place)
            if state is not None and state.open:
                self._age_out(place, state, before)

    def _age_out(self, place: GroupPartition, state: PartitionLeases, before: int) -> None:
        for index, ordinal in enumerate(state.ordinals()):
            offset = self._log_offset(place, ordinal)
            if offset is not None and offset >= before:
                break
            if not self._give_up(place, state, ordinal):
                break  # its segment stays, so the others need not go now
            if index % AT_ONCE == AT_ONCE - 1:
                self._rest()
        self._rest()

    def _give_up(self, place: GroupPartition, state: PartitionLeases, ordinal: int) -> bool:
        """Give a message up; return false when it stays open."""
        group, queue = self._leases.context.groups.get(place.group), self._store.queues.get(TopicPartition(*place[1:]))
        stored = None if queue is None else self._store.reader.record(queue, ordinal, self._read)
        if self._leases.get(place) is not state or state.find(ordinal) is None:
            return True  # another has finished it meanwhile
        if stored is None or group is None or group.lease_aged_out == DROP:
            self._leases.record(place, Dead(ordinal))
            return True
        record = bytes(stored.buffer[stored.at : stored.at + stored.size])
        return self._poison.give_up(place, ordinal, record, Reason.AGED_OUT)

"""Keeping the leases: snapshots for openings, and the end of open messages whose segments are deleted."""

import logging
from collections.abc import Callable
from typing import Final

from metaq.engine.leases.leases import Leases
from metaq.engine.leases.poison import Poison, Reason
from metaq.leases.events import EVENTS, Dead
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

    def tend(self) -> None:
        """Do what is due: record again what could not be stored, take a snapshot, leave unused states."""
        self._leases.keep_again()
        self._leases.leave_unused()
        if self._leases.log.snapshot_due and self._store.writable:
            self._take_snapshot()

    def _take_snapshot(self) -> None:
        log = self._leases.log
        log.begin_snapshot()
        for index, place in enumerate(self._leases.places()):
            while (state := self._leases.get(place)) is not None and state.has_claims:
                self._rest()
            if state is not None:
                self._leases.tell(place)
            if index % AT_ONCE == AT_ONCE - 1:
                self._rest()
        log.end_snapshot()

    # -- retention ----------------------------------------------------------------------------------------------------

    @property
    def oldest(self) -> int | None:
        """The lowest log offset that is needed: of the records of the leases, and of what is open."""
        queue = self._store.queues.get(EVENTS)
        if queue is None or not queue.readable:
            return None
        needed = [queue.unit(max(self._leases.log.since, self._store.first(queue, self._read)[0]), self._read)[0]]
        for place in self._leases.places():
            offset = self._log_offset_of_base(place)
            if offset is not None:
                needed.append(offset)
        return min(needed)

    def _log_offset_of_base(self, place: GroupPartition) -> int | None:
        state, queue = self._leases.get(place), self._store.queues.get(TopicPartition(place.topic, place.partition))
        if state is None or not state.open or queue is None:
            return None
        base = state.base
        if not self._store.first(queue, self._read)[0] <= base < queue.readable:
            return None
        return queue.unit(base, self._read)[0]

    def keep(self, before: int) -> None:
        """Record the states again, and give up what is open in segments that are to be deleted."""
        self._take_snapshot()
        for place in self._leases.places():
            while (offset := self._log_offset_of_base(place)) is not None and offset < before:
                if not self._age_out(place):
                    break

    def _age_out(self, place: GroupPartition) -> bool:
        """Give up the lowest open message of a place; return false if it is still open, so that its segment stays."""
        state, group = self._leases.get(place), self._leases.context.groups.get(place.group)
        if state is None:
            return False
        ordinal, queue = state.base, self._store.queues[TopicPartition(place.topic, place.partition)]
        stored = self._store.reader.record(queue, ordinal, self._read)
        if stored is None or group is None or group.lease_aged_out == DROP:
            self._leases.record(place, Dead(ordinal))
            return True
        record = bytes(stored.buffer[stored.at : stored.at + stored.size])
        self._poison.give_up(place, ordinal, record, Reason.AGED_OUT)
        self._rest()
        return state.find(ordinal) is None

"""Planning the part of a pop that concerns one partition: what is read, and nothing that is changed.

What waits to be given again comes first, but is at most half of what is wanted while there are enough messages that were never
given. A message that was delivered as often as its group allows goes to the dead letters instead. In order, nothing is given
while messages of the partition are leased, except to the attempt that has them.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from metaq.engine.context import Context
from metaq.engine.leases.attempts import Attempts
from metaq.engine.leases.keyed import MOST_LINED, KeyedReader, keys_of_open
from metaq.engine.leases.leases import MOST_OPEN, Leases
from metaq.engine.reading.collecting import MOST_BYTES, Collected, collect_messages
from metaq.engine.reading.filters import Filter
from metaq.engine.reading.young import is_young
from metaq.engine.tables.groups import Group
from metaq.engine.tables.topics import Topic
from metaq.leases.redelivered import redelivered, times_of
from metaq.leases.state import PartitionLeases
from metaq.message import GroupPartition, TopicPartition
from metaq.store.files.filecache import Read
from metaq.store.queues.consumequeue import ConsumeQueue

_new: Final = tuple.__new__
"""Makes a named tuple at a third of the cost of its own constructor."""
ORDER_BY_PARTITION: Final = "partition"
ORDER_BY_KEY: Final = "key"
SPARE: Final = 64
"""Messages more that are looked at when some were delivered as often as allowed: those stay where they are while there is no
room for dead letters, and must not stop the others."""


class PopRequest(NamedTuple):
    """The wishes of a consumer."""

    group: Group
    topic: Topic
    partitions: Sequence[int] | None
    """Those from which it wants messages; ``None``: all of them."""
    most: int
    """Messages, at least 1."""
    invisible_ms: int
    """The length of the leases."""
    wanted: Filter
    from_first: bool
    """Where a group without an offset begins: at the first message, otherwise at the end of all but young partitions."""
    in_order: bool = False
    """Give nothing of a partition while messages of it are leased."""
    most_bytes: int = MOST_BYTES
    attempt: str | None = None
    """A name for this pop, under which it may be made again (``metaq.engine.leases.attempts``)."""

    @property
    def by_partition(self) -> bool:
        """True when the messages of each partition are given in order."""
        return self.in_order or self.group.order == ORDER_BY_PARTITION

    @property
    def by_key(self) -> bool:
        """True when the messages of each key are given in order."""
        return self.group.order == ORDER_BY_KEY


class AgainPart(NamedTuple):
    """Messages of a partition to be given again."""

    ordinals: list[int]
    records: list[bytes | memoryview]
    times: list[int]
    poisoned: list[tuple[int, bytes | None]]
    """Those that were delivered as often as allowed; without their records those that are too many bytes to be moved now."""
    lost: list[int]
    """Those whose records are not there any more."""
    same_attempt: bool = False
    """They are not waiting: the attempt that has them gets them once more."""

    @property
    def looked_at(self) -> int:
        """The number of messages that were looked at."""
        return len(self.ordinals) + len(self.poisoned) + len(self.lost)

    def before(self, ordinal: int) -> "AgainPart":
        """Return the same part without the messages from ``ordinal`` on that it gives."""
        count = bisect_left(self.ordinals, ordinal)
        return self._replace(ordinals=self.ordinals[:count], records=self.records[:count], times=self.times[:count])


NOTHING_AGAIN: Final = AgainPart([], [], [], [], [])


class Fresh(NamedTuple):
    """Messages of a partition that were never given."""

    given: Collected | None
    lined: Sequence[int] = ()
    keys: Mapping[int, str] | None = None


NOTHING_FRESH: Final = Fresh(None)


class PlanPart(NamedTuple):
    """The part of a plan that concerns one partition."""

    place: GroupPartition
    state: PartitionLeases | None
    version: int
    offset: int | None
    """That of the group, if it has one and no state: from there it begins."""
    next: int
    """The first message that was never given and is still there."""
    again: AgainPart
    fresh: Collected | None
    begins: bool
    """The group must have an offset, or it would begin at a later end the next time; or its offset is of what is gone."""
    lined: Sequence[int] = ()
    """Messages that were never given, and are opened without being given: others with their keys are before them."""
    keys: Mapping[int, str] | None = None
    """The keys of those that were never given; ``None`` if the group has no order by keys."""

    @property
    def gives(self) -> int:
        return len(self.again.ordinals) + (0 if self.fresh is None else len(self.fresh.ordinals))

    @property
    def changes(self) -> bool:
        again = self.again
        return bool(again.ordinals or again.poisoned or again.lost or self.fresh is not None or self.begins)


Plan = list[PlanPart]


class Planner:
    """Plans what a pop takes from a partition."""

    def __init__(self, context: Context, leases: Leases, attempts: Attempts) -> None:
        self._context = context
        self._store = context.store
        self._leases = leases
        self._attempts = attempts

    def plan(self, request: PopRequest, partition: int, most: int, most_bytes: int, read: Read) -> PlanPart | None:
        """Return what the pop takes from a partition; ``None`` when there is nothing. Raise ``ColdRead`` as ``read`` does."""
        topic_name = request.topic.name
        place = _new(GroupPartition, (request.group.name, topic_name, partition))
        queue = self._store.queues.get(_new(TopicPartition, (topic_name, partition)))
        if queue is None or not queue.readable:
            return None
        least = self._store.first(queue, read)[0]
        state, offset = self._leases.settled(place), None
        if state is None:
            offset = self._context.offsets.get(*place)
            following = offset if offset is not None else self._first(request, queue, least, read)
            begins = offset is None or offset < least
        else:
            if not self._keep_order(state, queue, request, read):
                return None
            if request.by_partition and state.leased:
                return self._plan_held(request, place, state, queue, most, read)
            following, begins = state.next, False
        version = 0 if state is None else state.version
        fresh_from, room = max(following, least), self._room(request, state)
        has_fresh = fresh_from < queue.readable and room > 0
        again = NOTHING_AGAIN
        if state is not None and state.waiting:
            half = max(1, most // 2) if has_fresh else most
            again = self._again(state, queue, request.group, half, most_bytes, read)
        fresh_most, fresh_bytes = most - len(again.ordinals), most_bytes - sum(map(len, again.records))
        fresh = NOTHING_FRESH
        if has_fresh and fresh_most > 0 and fresh_bytes > 0:
            fresh = self._fresh(request, state, queue, fresh_from, min(fresh_most, room), fresh_bytes, read)
        if fresh.given is None and state is not None and following < least:  # the rest has aged out
            fresh = Fresh(Collected([], [], least))
        found = fresh.given
        count, size = (0, 0) if found is None else (len(found.ordinals), sum(map(len, found.body)))
        if state is not None and has_fresh and count < fresh_most and state.waiting > again.looked_at:
            # there were few: the rest is for what waits, before anything of a lower level
            again = self._again(state, queue, request.group, most - count, most_bytes - size, read)
        return _new(PlanPart, (place, state, version, offset, fresh_from, again, found, begins, fresh.lined, fresh.keys))

    def _keep_order(self, state: PartitionLeases, queue: ConsumeQueue, request: PopRequest, read: Read) -> bool:
        """Have a state know the keys of its messages, or not, as the order of the group is now; return false when it cannot."""
        if request.by_key and state.keys is None:
            ordinals = state.ordinals()
            if ordinals and queue.readable <= ordinals[-1] < queue.next:
                return False  # their keys cannot be read until replicas have them
            keys = keys_of_open(self._store, queue, ordinals, read)
            if state.keys is None:  # else another pop has learned them while this one waited for the disk
                state.learn(keys)
        elif not request.by_key and state.keys is not None:
            state.forget_keys()
        return True

    def _room(self, request: PopRequest, state: PartitionLeases | None) -> int:
        """Return how many messages that were never given may be opened now."""
        group, leased, opened = request.group, 0, 0
        if state is not None:
            if request.by_partition and state.open:
                return 0
            leased, opened = state.leased, state.open
        return min(group.max_in_flight - leased, group.max_open - opened, MOST_OPEN - self._leases.open)

    def _first(self, request: PopRequest, queue: ConsumeQueue, least: int, read: Read) -> int:
        """Return the offset at which a group begins that has none."""
        if request.from_first or is_young(self._store, queue, read):
            return least
        return queue.readable

    def _fresh(
        self,
        request: PopRequest,
        state: PartitionLeases | None,
        queue: ConsumeQueue,
        first: int,
        most: int,
        most_bytes: int,
        read: Read,
    ) -> Fresh:
        """Return messages that were never given, from ``first`` on; nothing when the lines of their keys are full."""
        if not request.by_key:
            return _new(Fresh, (collect_messages(self._store, queue, first, most, request.wanted, read, most_bytes), (), None))
        busy, lines_room = (None, MOST_LINED) if state is None else (state.keys, MOST_LINED - state.lined)
        reader = KeyedReader(self._store, queue, request.wanted, read)
        found = reader.collect(first, most, most_bytes, busy, lines_room)
        # a part that passes nothing is no change: recorded, it would wake the consumer that waits, again and again
        return NOTHING_FRESH if found.given.following == first else Fresh(*found)

    def _again(
        self, state: PartitionLeases, queue: ConsumeQueue, group: Group, most: int, most_bytes: int, read: Read
    ) -> AgainPart:
        """Return what is given again of what waits, at most ``most`` messages."""
        found = self._look_at(state.first_waiting(most), state, queue, group, most, most_bytes, read)
        if not found.poisoned:
            return found
        return self._look_at(state.first_waiting(most + SPARE), state, queue, group, most, most_bytes, read)

    def _look_at(
        self,
        waiting: Sequence[int],
        state: PartitionLeases,
        queue: ConsumeQueue,
        group: Group,
        most: int,
        most_bytes: int,
        read: Read,
    ) -> AgainPart:
        """Return what is given again of some messages that wait, at most ``most`` of them."""
        again = AgainPart([], [], [], [], [])
        size = poisoned_size = 0
        for ordinal in waiting:
            if len(again.ordinals) == most:
                break
            bunch = state.find(ordinal)
            if bunch is None or queue.readable <= ordinal < queue.next:
                continue  # finished while another record was read: the plan is not taken; or hidden until replicas have it
            stored = self._store.reader.record(queue, ordinal, read) if ordinal < queue.readable else None
            if stored is None:
                again.lost.append(ordinal)
                continue
            record = stored.buffer[stored.at : stored.at + stored.size]
            if bunch.times and bunch.times + times_of(record) >= group.retry_max_times:
                is_too_much = poisoned_size > 0 and poisoned_size + stored.size > most_bytes
                again.poisoned.append((ordinal, None if is_too_much else bytes(record)))
                poisoned_size += stored.size
                continue
            if again.ordinals and size + stored.size > most_bytes:
                break
            size += stored.size
            again.ordinals.append(ordinal)
            again.records.append(redelivered(record, bunch.times, bunch.first_ms) if bunch.times else record)
            again.times.append(bunch.times)
        return again

    def _plan_held(
        self, request: PopRequest, place: GroupPartition, state: PartitionLeases, queue: ConsumeQueue, most: int, read: Read
    ) -> PlanPart | None:
        """Plan to give an attempt what it has of the partition; ``None`` when another one has it."""
        version, held = state.version, self._attempts.held(place, request.attempt)
        again = self._held_again(state, queue, held, read)
        return PlanPart(place, state, version, None, state.next, again, None, begins=False) if len(held) <= most else None

    def _held_again(self, state: PartitionLeases, queue: ConsumeQueue, held: Sequence[int], read: Read) -> AgainPart:
        """Plan to give an attempt what it has: as it was given before."""
        again = AgainPart([], [], [], [], [], same_attempt=True)
        for ordinal in held:
            bunch = state.find(ordinal)
            if bunch is None or queue.readable <= ordinal < queue.next:
                continue  # as above
            stored = self._store.reader.record(queue, ordinal, read) if ordinal < queue.readable else None
            if stored is None:
                again.lost.append(ordinal)
                continue
            record, before = stored.buffer[stored.at : stored.at + stored.size], bunch.times - 1
            again.ordinals.append(ordinal)
            again.records.append(redelivered(record, before, bunch.first_ms) if before else record)
            again.times.append(before)
        return again

"""Pops: messages of a topic are leased to a consumer of a group.

A pop is planned first, and then taken. A plan changes nothing, because reading may wait for the disk, and others go on then. It
is taken in one step if the states that it was made from are still the same.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from metaq.engine.context import Context
from metaq.engine.leases.attempts import Attempts
from metaq.engine.leases.leases import Leases
from metaq.engine.leases.planning import Plan, Planner, PlanPart, PopRequest
from metaq.engine.leases.poison import Poison, Reason
from metaq.engine.priorities.order import ReadyPartition, pop_order
from metaq.engine.reading.collecting import Collected
from metaq.leases.events import Dead, LeaseEvent, Lined, Passed, Popped, Repeated
from metaq.message import GroupPartition, TopicPartition
from metaq.protocol.record import store_ms
from metaq.store.files.filecache import ColdRead, Read, read_cached

_new: Final = tuple.__new__
"""Makes a named tuple at a third of the cost of its own constructor."""


class GivenPart(NamedTuple):
    """Messages of one partition that a pop gave."""

    partition: int
    ordinals: Sequence[int]
    """In ascending order: those that are given again are before those that were never given."""
    times: Sequence[int]
    """The number of deliveries of each, before this one."""
    body: Sequence[bytes | memoryview]
    """Their records, in the same order; one slice may hold several."""


class PopResult(NamedTuple):
    """The messages that a pop gave."""

    pop_ms: int
    """Names the delivery, in Unix milliseconds."""
    given: Sequence[GivenPart]
    rest: int
    """Messages that are ready in the partitions that were looked at, at most."""


class Pops:
    """Plans pops and takes them."""

    def __init__(self, context: Context, leases: Leases, poison: Poison) -> None:
        self._context = context
        self._store = context.store
        self._leases = leases
        self._poison = poison
        self._attempts = Attempts(leases)
        self._planner = Planner(context, leases, self._attempts)
        self._last: dict[tuple[str, str], int] = {}
        """The partition that the last pop of a group from a topic began with."""
        self._counts: Counter[tuple[str, str]] = Counter()
        """Pops of a group from a topic with priorities."""

    def forget(self, *, topic: str | None = None, group: str | None = None) -> None:
        """Drop what is kept about a topic, or a group, that is deleted."""
        for key in [key for key in self._last if group == key[0] or topic == key[1]]:
            del self._last[key]
            self._counts.pop(key, None)
        self._attempts.forget(topic=topic, group=group)
        for pair in [pair for pair in self._leases.pairs() if pair[1] == topic]:
            self._leases.forget(*pair)  # those that were begun in this turn have no offset yet, by which they would be found

    def is_ready(self, group: str, topic: str, partitions: Sequence[int] | None = None) -> bool:
        """Return whether a topic may have messages to give to a group."""
        known = self._context.topics.get(topic)
        if known is None:
            return False
        wanted = range(known.read_partitions) if partitions is None else partitions
        return any(self._count_ready(GroupPartition(group, topic, number)) for number in wanted)

    def may_give(self, request: PopRequest) -> bool:
        """Return whether a pop may give messages: in order by partitions, also what an earlier one of its name has still."""
        if not request.by_partition:
            return self.is_ready(request.group.name, request.topic.name, request.partitions)
        places = (GroupPartition(request.group.name, request.topic.name, each) for each in self._wanted(request))
        return any(self._may_give_in_order(place, request.attempt) for place in places)

    def _may_give_in_order(self, place: GroupPartition, attempt: str | None) -> bool:
        state = self._leases.settled(place)
        if state is None or not state.open:
            return self._count_ready(place) > 0
        return bool(self._attempts.held(place, attempt)) if state.leased else state.waiting > 0

    def _count_ready(self, place: GroupPartition) -> int:
        """Return how many messages wait or were never given; of a group without an offset, those of the whole partition."""
        queue = self._store.queues.get(_new(TopicPartition, (place.topic, place.partition)))
        if queue is None or not queue.readable:
            return 0
        state = self._leases.settled(place)
        if state is not None:
            return max(0, queue.readable - state.next) + state.waiting
        return max(0, queue.readable - (self._context.offsets.get(*place) or 0))

    def now(self, request: PopRequest) -> PopResult | None:
        """Return what a pop gets without waiting for anything, which is what most pops need; ``None`` when that is nothing."""
        try:
            plan = self.plan(request, read_cached)
        except ColdRead:
            return None
        result = self.take(request, plan) if plan else None
        return result if result is not None and result.given else None

    # -- planning -----------------------------------------------------------------------------------------------------

    def plan(self, request: PopRequest, read: Read) -> Plan:
        """Return what the pop takes. Raise ``ColdRead`` as ``read`` does, ``Overloaded`` when it could not be granted."""
        self._leases.check_grants(request.group)
        plan: Plan = []
        if self._context.topics.get(request.topic.name) is None:
            return plan  # it was deleted while the pop waited
        wanted, room_bytes = request.most, request.most_bytes
        order, held = self._partitions(request, read), self._held(request)
        for partition in [*held, *[each for each in order if each not in held]] if held else order:
            if wanted <= 0 or room_bytes <= 0:
                break
            part = self._planner.plan(request, partition, wanted, room_bytes, read)
            if part is not None and part.changes:
                plan.append(part)
                wanted -= part.gives
                if wanted > 0:
                    room_bytes -= sum(map(len, part.again.records))
                    room_bytes -= 0 if part.fresh is None else sum(map(len, part.fresh.body))
        return plan

    def _held(self, request: PopRequest) -> list[int]:
        """Return the partitions that are leased to an earlier pop with the name of this one."""
        if request.attempt is None or not request.by_partition:
            return []
        places = (GroupPartition(request.group.name, request.topic.name, each) for each in self._wanted(request))
        return [place.partition for place in places if self._attempts.held(place, request.attempt)]

    @staticmethod
    def _wanted(request: PopRequest) -> Sequence[int]:
        return range(request.topic.read_partitions) if request.partitions is None else request.partitions

    def _partitions(self, request: PopRequest, read: Read) -> Iterable[int]:
        """Return the partitions in the order in which they are looked at."""
        topic, key, wanted = request.topic, (request.group.name, request.topic.name), self._wanted(request)
        if len(wanted) == 1:
            return wanted
        count = topic.read_partitions
        if topic.has_priorities:
            max_wait_ms, factor = topic.priority_max_wait_ms, request.group.priority_factor
            ready = self._ready_levels(request, wanted, max_wait_ms, read)
            return pop_order(ready, levels=count, factor=factor, pops=self._counts[key], max_wait_ms=max_wait_ms)
        last = self._last.get(key, -1)
        return sorted(wanted, key=lambda partition: (partition <= last, partition))

    def _ready_levels(self, request: PopRequest, wanted: Sequence[int], max_wait_ms: int, read: Read) -> list[ReadyPartition]:
        """Return the levels with messages; how long the oldest has been there is looked up only where it counts."""
        now_ms, levels = self._store.clock.now_ms(), []
        for partition in wanted:
            place = GroupPartition(request.group.name, request.topic.name, partition)
            if self._count_ready(place):
                oldest_ms = self._oldest_ms(place, read) if max_wait_ms else now_ms
                levels.append(ReadyPartition(partition, max(0, now_ms - oldest_ms)))
        return levels

    def _oldest_ms(self, place: GroupPartition, read: Read) -> int:
        """Return when the oldest message that is ready was stored."""
        queue, state = self._store.queues[TopicPartition(place.topic, place.partition)], self._leases.get(place)
        waiting = [] if state is None else state.first_waiting(1)
        following = (self._context.offsets.get(*place) or 0) if state is None else state.next
        ordinal = min(*waiting, following) if waiting else following
        ordinal = max(ordinal, self._store.first(queue, read)[0])
        stored = self._store.reader.record(queue, ordinal, read) if ordinal < queue.readable else None
        if stored is None:
            return self._store.clock.now_ms()
        return store_ms(stored.buffer[stored.at : stored.at + stored.size])

    # -- taking -------------------------------------------------------------------------------------------------------

    def take(self, request: PopRequest, plan: Plan) -> PopResult | None:
        """Lease what a plan has; return ``None`` when all of it has changed meanwhile."""
        current = [part for part in plan if self._is_current(part)]
        if not current and plan:
            return None
        now_ms = self._store.clock.now_ms()
        pop_ms = now_ms
        for part in current:
            if part.state is not None and part.state.last_pop_ms >= pop_ms:
                pop_ms = part.state.last_pop_ms + 1
        given: list[GivenPart] = []
        rest = 0
        for planned in current:
            part = self._give_up(request, planned)
            self._take_part(request, part, pop_ms)
            rest += self._count_ready(part.place)
            taken = _given(part)
            if taken.ordinals:
                given.append(taken)
                if request.by_partition:
                    self._attempts.note(part.place, request.attempt, pop_ms, taken.ordinals)
        if given:
            key = request.group.name, request.topic.name
            self._counts[key] += request.topic.has_priorities
            self._last[key] = given[0].partition
        return _new(PopResult, (pop_ms, given, rest))

    def _is_current(self, part: PlanPart) -> bool:
        state, place = self._leases.get(part.place), part.place
        if self._context.topics.get(place.topic) is None or part.next < self._store.queues[TopicPartition(*place[1:])].first:
            return False  # it is of a topic that was deleted meanwhile, and perhaps made again
        if state is None or part.state is None:
            return state is part.state and self._context.offsets.get(*place) == part.offset
        return state is part.state and state.version == part.version

    def _give_up(self, request: PopRequest, part: PlanPart) -> PlanPart:
        """Give up what was delivered as often as allowed; return the part: in order, without what comes after one left open."""
        for ordinal, record in part.again.poisoned:
            is_given_up = record is not None and self._poison.give_up(part.place, ordinal, record, Reason.TIMES)
            if not is_given_up and request.by_partition:
                return part._replace(again=part.again.before(ordinal))
        return part

    def _take_part(self, request: PopRequest, part: PlanPart, pop_ms: int) -> None:
        place, again, fresh = part.place, part.again, part.fresh
        if part.state is None:
            self._leases.begin(place, part.next)
        due_ms = pop_ms + request.invisible_ms
        events: list[LeaseEvent] = [Dead(ordinal) for ordinal in again.lost]
        if again.ordinals:
            events.append(Repeated(pop_ms, due_ms, again.ordinals, again.same_attempt))
        if fresh is not None:
            events.append(_fresh_event(fresh, pop_ms, due_ms))
        if part.lined:
            events.append(Lined(part.lined))
        if events:
            self._leases.record(place, *events)
        if part.keys is not None:
            self._take_keys(place, part.keys)

    def _take_keys(self, place: GroupPartition, keys: Mapping[int, str]) -> None:
        """Have the state know the keys of messages that were opened just now."""
        state = self._leases.get(place)
        assert state is not None, place
        if state.keys is None:
            state.learn(keys)
            return
        for ordinal, key in keys.items():
            state.keys.add(ordinal, key)


def _fresh_event(fresh: Collected, pop_ms: int, due_ms: int) -> LeaseEvent:
    """Return what happens to messages that were never given: those that match are leased, the others are passed."""
    ordinals = fresh.ordinals
    if not ordinals:
        return Passed(fresh.following)
    first = ordinals[0]
    if isinstance(ordinals, range):
        return _new(Popped, (pop_ms, due_ms, first, len(ordinals), (1 << len(ordinals)) - 1))
    bits = 0
    for ordinal in ordinals:
        bits |= 1 << (ordinal - first)
    return Popped(pop_ms, due_ms, first, fresh.following - first, bits)


def _given(part: PlanPart) -> GivenPart:
    again, fresh, partition = part.again, part.fresh, part.place.partition
    if fresh is None:
        return _new(GivenPart, (partition, again.ordinals, again.times, again.records))
    first_times = [0] * len(fresh.ordinals)
    if not again.ordinals:
        return _new(GivenPart, (partition, fresh.ordinals, first_times, fresh.body))
    ordinals, times = [*again.ordinals, *fresh.ordinals], again.times + first_times
    return _new(GivenPart, (partition, ordinals, times, again.records + fresh.body))


def count_given(context: Context, request: PopRequest, result: PopResult) -> None:
    """Count the messages that a pop gives."""
    messages = size = 0
    for part in result.given:
        messages += len(part.ordinals)
        size += sum([len(each) for each in part.body])
    context.statistics.got(request.group.name, request.topic.name, messages, size)

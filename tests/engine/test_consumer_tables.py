"""Tables of consumers' state: queue locks, offsets, members. Laws for any order of calls."""

from typing import Any, Final

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from metaq.engine.offsets.offsetlog import changes_of, rows_of
from metaq.engine.tables.locks import LOCK_S, QueueLocks
from metaq.engine.tables.offsets import RESET_STANDS_S, OffsetTable
from metaq.message import GroupPartition, MessageQueue

GROUPS: Final = st.sampled_from(["g", "h"])
CLIENTS: Final = st.sampled_from(["a@1", "b@1", "c@1"])
QUEUES: Final = st.lists(st.builds(MessageQueue, st.just("T"), st.just("metaq"), st.integers(0, 3)), unique=True)
TOPICS: Final = st.sampled_from(["T", "%RETRY%g"])
PARTITIONS: Final = st.integers(0, 2)
OFFSETS: Final = st.integers(-1, 9)


class Locks(RuleBasedStateMachine):
    """SG-123: beside a model that says of each queue who took it last, and when."""

    def __init__(self) -> None:
        super().__init__()
        self.locks = QueueLocks()
        self.taken: dict[tuple[str, MessageQueue], tuple[str, float]] = {}
        self.now_s = 0.0

    def owner(self, group: str, queue: MessageQueue) -> str | None:
        client, taken_s = self.taken.get((group, queue), (None, 0.0))
        return client if self.now_s < taken_s + LOCK_S else None

    @rule(seconds=st.floats(0, 2 * LOCK_S))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(group=GROUPS, client=CLIENTS, queues=QUEUES)
    def lock(self, group: str, client: str, queues: list[MessageQueue]) -> None:
        expected = [queue for queue in queues if self.owner(group, queue) in (None, client)]
        assert self.locks.lock(group, client, queues, self.now_s) == expected
        self.taken.update(((group, queue), (client, self.now_s)) for queue in expected)

    @rule(group=GROUPS, client=CLIENTS, queues=QUEUES)
    def unlock(self, group: str, client: str, queues: list[MessageQueue]) -> None:
        self.locks.unlock(group, client, queues)
        for queue in queues:
            if self.taken.get((group, queue), ("", 0))[0] == client:
                del self.taken[group, queue]

    @rule()
    def expire(self) -> None:
        self.locks.expire(self.now_s)
        assert len(self.locks) == sum(self.owner(*key) is not None for key in self.taken)

    @invariant()
    def has_the_owners_of_the_model(self) -> None:
        for group, queue in self.taken:
            assert self.locks.holder(group, queue, self.now_s) == self.owner(group, queue)


class Offsets(RuleBasedStateMachine):
    """SG-067: beside a plain table; what was kept, in a snapshot and the changes behind it, gives the same table again."""

    def __init__(self) -> None:
        super().__init__()
        self.table = OffsetTable()
        self.model: dict[GroupPartition, int] = {}
        self.standing: dict[GroupPartition, float] = {}
        self.now_s = 0.0
        self.snapshot: dict[str, dict[str, int]] = {}
        self.log: list[dict[str, dict[str, int]]] = []
        self.on_their_way: list[dict[GroupPartition, int]] = []

    @rule(seconds=st.floats(0, 2 * RESET_STANDS_S))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(group=GROUPS, topic=TOPICS, partition=PARTITIONS, offset=OFFSETS)
    def commit(self, group: str, topic: str, partition: int, offset: int) -> None:
        place = GroupPartition(group, topic, partition)
        known = self.model.get(place, -1)
        self.table.commit(*place, offset, self.now_s)
        if offset == known:
            self.standing.pop(place, None)
        elif offset > known and not self.now_s < self.standing.get(place, 0):
            self.standing.pop(place, None)
            self.model[place] = offset

    @rule(group=GROUPS, topic=TOPICS, partition=PARTITIONS, offset=st.integers(0, 9), stands=st.booleans())
    def reset(self, group: str, topic: str, partition: int, offset: int, stands: bool) -> None:
        place = GroupPartition(group, topic, partition)
        self.table.reset(*place, offset, self.now_s if stands else None)
        self.model[place] = offset
        if stands:
            self.standing[place] = self.now_s + RESET_STANDS_S

    @rule(group=GROUPS, topic=TOPICS, partition=PARTITIONS)
    def ask(self, group: str, topic: str, partition: int) -> None:
        self.table.taken_up(group, topic, partition)
        self.standing.pop(GroupPartition(group, topic, partition), None)

    @rule(group=GROUPS)
    def remove_group(self, group: str) -> None:
        self.table.remove(group)
        self._forget([place for place in self.model if place.group == group])

    @rule(topic=TOPICS)
    def remove_topic(self, topic: str) -> None:
        self.table.remove_topic(topic)
        self._forget([place for place in self.model if place.topic == topic])

    def _forget(self, places: list[GroupPartition]) -> None:
        for place in places:
            del self.model[place]
            self.standing.pop(place, None)

    # -- keeping: as the broker does it -------------------------------------------------------------------------------

    @precondition(lambda self: not self.on_their_way)
    @rule()
    def append(self) -> None:
        changes = self.table.take_changes()
        if changes:
            self.on_their_way.append(changes)

    @precondition(lambda self: bool(self.on_their_way))
    @rule(stored=st.booleans())
    def stored(self, stored: bool) -> None:
        changes = self.on_their_way.pop()
        if stored:
            self.log.append(rows_of(changes.items()))
        else:
            self.table.give_back(changes)

    @precondition(lambda self: not self.on_their_way)
    @rule()
    def save(self) -> None:
        self.snapshot = rows_of(self.model.items())
        self.log.clear()

    @precondition(lambda self: not self.on_their_way)
    @rule()
    def stop(self) -> None:
        changes = self.table.take_changes()
        self.log.append(rows_of(changes.items()))
        loaded = OffsetTable()
        for rows in (self.snapshot, *self.log):
            loaded.replay(changes_of(rows))
        assert contents(loaded) == self.model
        assert [loaded.topics_of(group) for group in ("g", "h")] == [self.table.topics_of(group) for group in ("g", "h")]

    @invariant()
    def is_the_model(self) -> None:
        assert contents(self.table) == self.model
        for group in ("g", "h"):
            assert self.table.topics_of(group) == sorted({place.topic for place in self.model if place.group == group})
        for topic in ("T", "%RETRY%g"):
            assert self.table.groups_of(topic) == sorted({place.group for place in self.model if place.topic == topic})


def contents(table: OffsetTable) -> dict[GroupPartition, int]:
    return {
        GroupPartition(group, topic, number): offset for group, topic, offsets in table for number, offset in offsets.items()
    }


TestLocks: Any = Locks.TestCase
TestLocks.settings = settings(max_examples=50)
TestOffsets: Any = Offsets.TestCase
TestOffsets.settings = settings(max_examples=50)


@given(st.dictionaries(st.builds(GroupPartition, GROUPS, TOPICS, PARTITIONS), OFFSETS))
def test_changes_are_read_as_they_were_written(changes: dict[GroupPartition, int]) -> None:
    """SG-067: the body of a message of METAQ_SYS_OFFSETS."""
    assert changes_of(rows_of(changes.items())) == changes

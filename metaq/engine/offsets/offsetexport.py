"""The progress of all groups, of every kind, and the topics without one, as rows (``metaq.protocol.remoting.offsetrows``).

There may be thousands of groups and partitions. So a look at all of them works for a few milliseconds at a time, a fifth of the
time at most, and reads off the hub what is not in the page cache. All rows of one look carry the same time; each shows the
state when its turn came.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Final, NamedTuple, TypeVar

import gevent

from metaq.engine.context import Context
from metaq.engine.tables.observed import LastGet
from metaq.errors import RegistryUnavailable
from metaq.leases.figures import PlaceFigures
from metaq.message import GroupPartition, TextPosition, TopicPartition
from metaq.protocol.remoting.offsetrows import Kind, OffsetRow, encode_row
from metaq.registry.groupoffsets import GroupOffsetReader
from metaq.store.files.filecache import ColdRead, Read, Run, read_cached, read_through
from metaq.store.queues.consumequeue import ConsumeQueue

T = TypeVar("T")


class Subject(NamedTuple):
    """A group and a topic whose partitions are looked at together; a look takes the subjects in sorted order."""

    kind: str
    group: str
    topic: str


FIRST: Final = Subject("", "", "")
"""The subject before all others."""
SLICE_S: Final = 0.002
"""How long the export works before it lets other greenlets run."""
REST_S: Final = 0.008
"""How long the others then run alone."""
MOST_TIMES: Final = 100_000
"""Store times that are cached from one look to the next, some 25 MB. Without them a row costs four times as much: the files of
thousands of queues are opened again and again."""
DAMAGED: Final = -1
"""Stands for the time of a message that cannot be read."""
LONGEST: Final = 255
"""The longest name of a group that is exported, and where owners' names are cut, in characters: ZooKeeper sets no limit."""


class SubjectRows(NamedTuple):
    """The rows of one subject."""

    subject: Subject
    rows: list[bytes]
    """The rows as ``encode_row`` writes them."""
    problem: str | None = None
    """Why there are no rows of this subject, and of others of its kind."""


class GroupStanding(NamedTuple):
    """The progress of a group in one partition, in the terms of its kind."""

    consumed: int | None = None
    """The queue offset that the group wants next, where its kind counts messages,"""
    position: TextPosition | None = None
    """or the position where its kind counts as the text protocol does."""
    owner: str | None = None


class OffsetExporter:
    """The export of the progress of one broker's groups."""

    def __init__(
        self,
        context: Context,
        leased: Callable[[GroupPartition], PlaceFigures | None],
        in_zookeeper: GroupOffsetReader | None,
        run: Run,
    ) -> None:
        """Create it.

        ``leased`` returns the figures of a partition from which a group leases messages; ``in_zookeeper`` reads what MetaQ's
        consumers keep there, if ZooKeeper is used.
        """
        self._context = context
        self._leased = leased
        self._store = context.store
        self._in_zookeeper = in_zookeeper
        self._read = read_through(run)
        self._times = StoreTimes()
        self._of_zookeeper: frozenset[tuple[str, str]] = frozenset()
        """The groups, with their topics, of ZooKeeper's last answer: while it is silent they do not count as observed ones."""

    def look(self, ts_ms: int, after: Subject = FIRST) -> Iterator[SubjectRows]:
        """Yield the parts of all subjects after one, in their order; other greenlets may run between any two rows.

        ``ts_ms`` is the time of the look, in milliseconds. A look that continues after a subject uses the list of ZooKeeper's
        groups that the look from the start has read. While ZooKeeper does not answer, parts with a ``problem`` and no rows
        stand in for its groups.
        """
        silent = self._list_zookeeper() if after == FIRST else None
        if silent is not None:
            yield SubjectRows(after, [], silent)
        slices = _Slices(self._store.clock.monotonic)
        observed = self._context.observed.table(slices.rest_when_due)
        subjects = self._subjects(observed)
        for subject in sorted(subject for subject in subjects if subject > after and len(subject.group) <= LONGEST):
            if silent is not None and subject.kind == Kind.ZOOKEEPER:
                continue
            try:
                standings = self._standings(subject, observed)
            except RegistryUnavailable as error:
                silent = str(error)
                yield SubjectRows(subject, [], silent)
                continue
            rows = []
            for number, standing in sorted(standings.items()):
                rows.append(encode_row(self._row(subject, number, standing, ts_ms)))
                slices.rest_when_due()
            yield SubjectRows(subject, rows)

    def _subjects(self, observed: Iterable[tuple[str, str]]) -> list[Subject]:
        """Return all subjects, with the groups that ZooKeeper has listed last."""
        zookeeper = self._of_zookeeper
        groups = [Subject(Kind.REMOTING, *names) for names in self._remoting()]
        groups += [Subject(Kind.ZOOKEEPER, *names) for names in zookeeper]
        groups += [Subject(Kind.OBSERVED, *names) for names in observed if names not in zookeeper]
        read = {group.topic for group in groups}
        topics = (topic.name for topic in self._context.topics.of_users())
        return groups + [Subject(Kind.TOPIC, "", topic) for topic in topics if topic not in read]

    # -- groups -------------------------------------------------------------------------------------------------------

    def _remoting(self) -> set[tuple[str, str]]:
        """Return the groups, each with a topic in which it has offsets or to which its members subscribe.

        Groups that broadcast are left out, since their members keep their offsets themselves, and so are groups of tools.
        """
        context = self._context
        found = {(group, topic) for group, topic, _ in context.offsets}
        for group in context.clients.consumer_groups():
            if not group.broadcasts:
                found.update((group.name, topic) for topic in group.subscriptions)
        return {(group, topic) for group, topic in found if not context.groups.is_system(group)}

    def _list_zookeeper(self) -> str | None:
        """Read the list of ZooKeeper's groups; return why that failed, or ``None``."""
        if self._in_zookeeper is not None:
            try:
                self._of_zookeeper = frozenset(self._in_zookeeper.groups())
            except RegistryUnavailable as error:
                return str(error)
        return None

    def _standings(
        self, subject: Subject, observed: Mapping[tuple[str, str], Mapping[int, LastGet]]
    ) -> dict[int, GroupStanding]:
        """Return the group's standing by partition, none when the topic is gone; may raise ``RegistryUnavailable``."""
        context, (kind, group, name) = self._context, subject
        topic = context.topics.get(name)
        if topic is None:
            return {}
        if kind == Kind.OBSERVED:  # only the partitions that it has asked for: the text protocol has no subscriptions
            asked = observed[group, name].items()
            return {number: GroupStanding(None, each.position, context.observed.owner(each)) for number, each in asked}
        found = {}
        if kind == Kind.ZOOKEEPER:
            assert self._in_zookeeper is not None
            found = {number: GroupStanding(None, *each) for number, each in self._in_zookeeper.of(group, name).items()}
        elif kind == Kind.REMOTING:
            online, offsets = context.clients.consumer_group(group), context.offsets.of(group, name)
            for number in range(topic.read_partitions):
                owner = None if online is None else online.reader(name, number)
                found[number] = GroupStanding(offsets.get(number), None, owner)
        return {number: found.get(number, GroupStanding()) for number in range(topic.read_partitions)}

    # -- partitions ---------------------------------------------------------------------------------------------------

    def _row(self, subject: Subject, number: int, standing: GroupStanding, ts_ms: int) -> OffsetRow:
        kind, group, topic = subject
        consumed, position, owner = standing
        queue = self._store.queues.get(TopicPartition(topic, number))
        least = most = 0
        times: tuple[int | None, int | None, int | None] = None, None, None
        if queue is not None:
            if position is not None:
                consumed = self.read_now(partial(self._ordinal, queue, position))
            least = self.read_now(partial(self._least, queue))
            most = queue.readable
            following = most if consumed is None else max(consumed, least)
            times = self.stored(queue, following), self.stored(queue, least), self.stored(queue, most - 1)
        place = ts_ms, self._context.settings.broker_name, group, kind, topic, number
        owner = None if owner is None else owner[:LONGEST]
        row = OffsetRow(*place, consumed, least, most, *times, owner, self._store.settings.retention.keep_ms)
        leased = self._leased(GroupPartition(group, topic, number)) if kind == Kind.REMOTING else None
        if leased is None:
            return row
        return row._replace(lag=leased.lag, in_flight=leased.in_flight, delayed=leased.delayed)

    def _ordinal(self, queue: ConsumeQueue, position: TextPosition, read: Read) -> int:
        return self._store.locate(queue, position, read)[0]

    def _least(self, queue: ConsumeQueue, read: Read) -> int:
        return self._store.first(queue, read)[0]

    def stored(self, queue: ConsumeQueue, ordinal: int) -> int | None:
        """Return the store time of a message in milliseconds; ``None`` when there is no such message, or it is damaged."""
        if not queue.base <= ordinal < queue.readable:
            return None
        place = queue.topic, queue.partition, ordinal
        known = self._times.get(place)
        if known is None:
            found = self.read_now(partial(self._store.reader.store_time, queue, ordinal))
            known = DAMAGED if found is None else found  # remembered, too: each new read would count and log the damage again
            self._times.put(place, known)
        return None if known == DAMAGED else known

    def read_now(self, find: Callable[[Read], T]) -> T:
        """Call ``find`` with reads from the page cache only, and again with reads from the disk if that does not suffice."""
        try:
            return find(read_cached)
        except ColdRead:
            return find(self._read)


class StoreTimes:
    """A cache of the store times of messages, in two generations: the old one is dropped when the young one is full."""

    def __init__(self) -> None:
        self._young: dict[tuple[str, int, int], int] = {}
        self._old: dict[tuple[str, int, int], int] = {}

    def get(self, place: tuple[str, int, int]) -> int | None:
        """Return the cached store time of a place (topic, partition and ordinal), or ``None``."""
        found = self._young.get(place)
        if found is None:
            found = self._old.get(place)
            if found is not None:
                self.put(place, found)
        return found

    def put(self, place: tuple[str, int, int], time_ms: int) -> None:
        self._young[place] = time_ms
        if len(self._young) >= MOST_TIMES // 2:
            self._old, self._young = self._young, {}


class _Slices:
    """Time slices of a long computation, after each of which other greenlets run."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._began = monotonic()

    def rest_when_due(self) -> None:
        if self._monotonic() - self._began >= SLICE_S:
            gevent.sleep(REST_S)
            self._began = self._monotonic()

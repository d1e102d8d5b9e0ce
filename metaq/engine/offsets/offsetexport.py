"""How far all groups are, of whichever kind, as rows (``metaq.protocol.remoting.offsetrows``).

There may be thousands of groups and partitions, so a look at all of them works for a few milliseconds at a time, a fifth of the
time at most, and what is not in the page cache is read off the hub. The rows of one look have one time; each is as it was when
its turn came.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Final, NamedTuple, TypeVar

import gevent

from metaq.engine.context import Context
from metaq.engine.tables.observed import Asked
from metaq.errors import RegistryUnavailable
from metaq.message import TextPosition, TopicPartition
from metaq.protocol.remoting.offsetrows import Kind, OffsetRow, encode_row
from metaq.registry.groupoffsets import GroupOffsets
from metaq.store.files.filecache import ColdRead, Read, Run, read_cached, read_through
from metaq.store.queues.consumequeue import ConsumeQueue

T = TypeVar("T")


class Subject(NamedTuple):
    """What is looked at as a whole, in this order: a group in the partitions of a topic."""

    kind: str
    group: str
    topic: str


FIRST: Final = Subject("", "", "")
"""Before all others."""
SLICE_S: Final = 0.002
"""How long others wait while rows are made, and"""
REST_S: Final = 0.008
"""what they have for themselves then."""
MOST_TIMES: Final = 100_000
"""Store times that are kept from one look to the next, some 25 MB. Without them a row costs four times as much: the files of
thousands of queues are opened again and again."""
DAMAGED: Final = -1
"""Stands for the time of a message that cannot be read."""
LONGEST: Final = 255
"""Characters of a group that is exported, and of an owner that is told: ZooKeeper has room for anything."""


class Part(NamedTuple):
    """What there is to say of one subject."""

    subject: Subject
    rows: list[bytes]
    """Each as ``encode_row`` writes it."""
    problem: str | None = None
    """Why there are no rows, of it and of others of its kind."""


class Standing(NamedTuple):
    """A group in one partition, as its kind knows it."""

    consumed: int | None = None
    """The ordinal that comes next, where it is known as such,"""
    position: TextPosition | None = None
    """or as what the text protocol counts."""
    owner: str | None = None


class OffsetExport:
    """Looks at the groups of one broker."""

    def __init__(self, context: Context, in_zookeeper: GroupOffsets | None, run: Run) -> None:
        """``in_zookeeper`` is what MetaQ's consumers keep there."""
        self._context = context
        self._store = context.store
        self._in_zookeeper = in_zookeeper
        self._read = read_through(run)
        self._times = StoreTimes()
        self._of_zookeeper: frozenset[tuple[str, str]] = frozenset()
        """Groups with their topics, when it last answered: while it does not, they are not taken for observed ones."""

    def look(self, ts_ms: int, after: Subject = FIRST) -> Iterator[Part]:
        """All subjects behind one, in their order; may wait between any two rows. ``ts_ms`` is the time of the look.

        A look that goes on where another has stopped takes ZooKeeper's groups from the list of that.
        """
        subjects = [Subject(Kind.REMOTING, *names) for names in self._remoting()]
        silent = self._list_zookeeper() if after == FIRST else None
        if silent is not None:
            yield Part(after, [], silent)
        else:
            subjects += [Subject(Kind.ZOOKEEPER, *names) for names in self._of_zookeeper]
        slices = _Slices(self._store.clock.monotonic)
        observed = self._context.observed.table(slices.rest_when_due)
        subjects += [Subject(Kind.OBSERVED, *names) for names in observed if names not in self._of_zookeeper]
        for subject in sorted(subject for subject in subjects if subject > after and len(subject.group) <= LONGEST):
            if silent is not None and subject.kind == Kind.ZOOKEEPER:
                continue
            try:
                standings = self._standings(subject, observed)
            except RegistryUnavailable as error:
                silent = str(error)
                yield Part(subject, [], silent)
                continue
            rows = []
            for number, standing in sorted(standings.items()):
                rows.append(encode_row(self._row(subject, number, standing, ts_ms)))
                slices.rest_when_due()
            yield Part(subject, rows)

    # -- groups -------------------------------------------------------------------------------------------------------

    def _remoting(self) -> set[tuple[str, str]]:
        """Groups with the topics that they have offsets of, or that their members subscribe to.

        Not those that broadcast, whose members keep their offsets themselves, nor those of tools.
        """
        context = self._context
        found = {(group, topic) for group, topic, _ in context.offsets}
        for group in context.clients.consumer_groups():
            if not group.broadcasts:
                found.update((group.name, topic) for topic in group.subscriptions)
        return {(group, topic) for group, topic in found if not context.groups.is_system(group)}

    def _list_zookeeper(self) -> str | None:
        """Why ZooKeeper's groups are not known now; ``None`` when they are."""
        if self._in_zookeeper is not None:
            try:
                self._of_zookeeper = frozenset(self._in_zookeeper.groups())
            except RegistryUnavailable as error:
                return str(error)
        return None

    def _standings(self, subject: Subject, observed: Mapping[tuple[str, str], Mapping[int, Asked]]) -> dict[int, Standing]:
        """By partition; none when the topic is gone. ``RegistryUnavailable``."""
        context, (kind, group, name) = self._context, subject
        topic = context.topics.get(name)
        if topic is None:
            return {}
        if kind == Kind.OBSERVED:  # which others it wants, nobody knows
            asked = observed[group, name].items()
            return {number: Standing(None, each.position, context.observed.owner(each)) for number, each in asked}
        found = {}
        if kind == Kind.ZOOKEEPER:
            assert self._in_zookeeper is not None
            found = {number: Standing(None, *each) for number, each in self._in_zookeeper.of(group, name).items()}
        else:
            online, offsets = context.clients.consumer_group(group), context.offsets.of(group, name)
            for number in range(topic.read_partitions):
                owner = None if online is None else online.reader(name, number)
                found[number] = Standing(offsets.get(number), None, owner)
        return {number: found.get(number, Standing()) for number in range(topic.read_partitions)}

    # -- partitions ---------------------------------------------------------------------------------------------------

    def _row(self, subject: Subject, number: int, standing: Standing, ts_ms: int) -> OffsetRow:
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
        return OffsetRow(*place, consumed, least, most, *times, owner, self._store.settings.retention.keep_ms)

    def _ordinal(self, queue: ConsumeQueue, position: TextPosition, read: Read) -> int:
        return self._store.locate(queue, position, read)[0]

    def _least(self, queue: ConsumeQueue, read: Read) -> int:
        return self._store.first(queue, read)[0]

    def stored(self, queue: ConsumeQueue, ordinal: int) -> int | None:
        """When a message was stored; ``None`` when there is none, or it is damaged."""
        if not queue.base <= ordinal < queue.readable:
            return None
        place = queue.topic, queue.partition, ordinal
        known = self._times.get(place)
        if known is None:
            found = self.read_now(partial(self._store.reader.store_time, queue, ordinal))
            known = DAMAGED if found is None else found  # read again, it would be counted and logged again
            self._times.put(place, known)
        return None if known == DAMAGED else known

    def read_now(self, find: Callable[[Read], T]) -> T:
        """What is found in memory, else on the disk."""
        try:
            return find(read_cached)
        except ColdRead:
            return find(self._read)


class StoreTimes:
    """When messages were stored: those that were asked for lately, two generations of them."""

    def __init__(self) -> None:
        self._young: dict[tuple[str, int, int], int] = {}
        self._old: dict[tuple[str, int, int], int] = {}

    def get(self, place: tuple[str, int, int]) -> int | None:
        """``place`` is topic, partition and ordinal."""
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
    """Lets others go on each time that the caller has worked for a while."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._began = monotonic()

    def rest_when_due(self) -> None:
        if self._monotonic() - self._began >= SLICE_S:
            gevent.sleep(REST_S)
            self._began = self._monotonic()

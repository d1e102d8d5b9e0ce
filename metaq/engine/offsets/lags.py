"""Lags: how many messages groups have not consumed yet, by their offsets or their leases."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from metaq.engine.context import Context
from metaq.leases.figures import PlaceFigures
from metaq.message import GroupPartition, TopicPartition
from metaq.store.files.filecache import Rest
from metaq.store.queues.consumequeue import ConsumeQueue

T = TypeVar("T")


class Lags:
    """Reads the lags of one broker's groups. ``rest`` is called between the steps, to let other greenlets run."""

    def __init__(self, context: Context, leases: Callable[[GroupPartition], PlaceFigures | None]) -> None:
        """Prepare. ``leases`` returns the figures of leases in a partition; ``None`` when nothing is leased there."""
        self._context = context
        self._leases = leases

    def pairs(self, rest: Rest) -> Iterator[tuple[str, str]]:
        """Yield the groups with the topics in which they have offsets, except the groups of tools."""
        pairs = with_rests(self._context.offsets.pairs(), rest)
        return ((group, topic) for group, topic in pairs if not self._context.groups.is_system(group))

    def behind(self, group: str, topic: str, rest: Rest) -> Iterator[tuple[ConsumeQueue, int]]:
        """Yield the partitions in which a group has lag, each with the group's next ordinal."""
        for number, offset in with_rests(list(self._context.offsets.of(group, topic).items()), rest):
            queue = self._context.store.queues.get(TopicPartition(topic, number))
            if queue is not None and max(offset, queue.first) < queue.readable:
                yield queue, max(offset, queue.first)

    def of(self, group: str, topic: str, rest: Rest) -> int:
        """Return the messages of a topic that a group has not consumed yet."""
        return sum(self._in(group, queue, ordinal) for queue, ordinal in self.behind(group, topic, rest))

    def _in(self, group: str, queue: ConsumeQueue, ordinal: int) -> int:
        figures = self._leases(GroupPartition(group, queue.topic, queue.partition))
        return queue.readable - ordinal if figures is None else figures.lag


def with_rests(things: Iterable[T], rest: Rest) -> Iterator[T]:
    """Yield all things, and let other greenlets run after each."""
    for each in things:
        yield each
        rest()

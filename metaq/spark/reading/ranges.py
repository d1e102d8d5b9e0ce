"""Which messages a read takes, and how tasks share them. Pure: the driver looks what partitions hold, this decides.

Spark numbers the partitions of a topic over all brokers, 0 … n − 1 in the order of (broker name, queue). A query that runs for
months must not mix them up when a broker comes or goes, so its offsets hold the queues behind the numbers, and new queues get
new numbers. What a checkpoint holds::

    {"orders": {"0": 12, "1": 40},                                    next offset of each partition, as for Kafka
     "#queues": {"orders": [["broker-a", 0, 1], ["broker-b", 0, 1]]}}   runs: broker, first queue, count; no topic has a #
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, Final, NamedTuple

from metaq.errors import ConfigError
from metaq.message import MessageQueue, TopicPartition
from metaq.spark.reading.options import EARLIEST, LATEST, Place

QUEUES: Final = "#queues"
SHOWN: Final = 10
"""Ranges that one line names."""
WORTH_A_TASK: Final = 20_000
"""Messages: a task costs Spark 35 to 100 ms, in which one reads a hundred thousand."""


class Span(NamedTuple):
    """What a partition holds."""

    least: int
    """Offset of the oldest message, or ``most``."""
    most: int
    """The offset that the next message will have."""


class Range(NamedTuple):
    """Consecutive messages of one partition."""

    partition: TopicPartition
    begin: int
    end: int
    """Behind the last one."""

    @property
    def size(self) -> int:
        """How many they are; none when it ends before it begins."""
        return max(0, self.end - self.begin)


class Loss(NamedTuple):
    """Messages that should be read and are not there."""

    partition: TopicPartition
    begin: int
    end: int
    why: str

    def __str__(self) -> str:
        return f"{self.partition} offsets {self.begin} to {self.end - 1} ({self.end - self.begin}): {self.why}"


Spans = Mapping[TopicPartition, Span]
Offsets = Mapping[TopicPartition, int]
Layout = Mapping[str, tuple[MessageQueue, ...]]
"""The queue of each partition number, by topic."""


class Position(NamedTuple):
    """Where a streaming query stands."""

    offsets: Offsets
    """Next offsets."""
    layout: Layout


# -- positions of a streaming query -------------------------------------------------------------------------------------


def encode_position(position: Position) -> dict[str, Any]:
    """As above. Equal positions become equal text, by which Spark sees that nothing is new."""
    offsets: dict[str, Any] = {}
    for (topic, partition), offset in sorted(position.offsets.items()):
        offsets.setdefault(topic, {})[str(partition)] = offset
    queues = {topic: list(_runs(position.layout[topic])) for topic in sorted(position.layout)}
    return {**offsets, QUEUES: queues}


def decode_position(found: Mapping[str, Any]) -> Position:
    """``ConfigError`` for a checkpoint that another source wrote."""
    try:
        layout = {
            topic: tuple(MessageQueue(topic, broker, first + at) for broker, first, count in runs for at in range(count))
            for topic, runs in found[QUEUES].items()
        }
        offsets = {
            TopicPartition(topic, int(partition)): int(offset)
            for topic, row in found.items()
            if topic != QUEUES
            for partition, offset in row.items()
        }
        if all(partition < len(layout[topic]) for topic, partition in offsets):
            return Position(offsets, layout)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"the checkpoint's offsets {found} are not those of a metaq stream: {error!r}") from error
    raise ConfigError(f"the checkpoint's offsets {found} have more partitions than queues")


def _runs(queues: Sequence[MessageQueue]) -> Iterable[list[Any]]:
    """Neighbours that count up on one broker."""
    numbered = enumerate(queues)
    for _, group in groupby(numbered, key=lambda item: (item[1].broker_name, item[1].partition - item[0])):
        run = [queue for _, queue in group]
        yield [run[0].broker_name, run[0].partition, len(run)]


def extended(layout: Layout, found: Layout) -> dict[str, tuple[MessageQueue, ...]]:
    """A layout with the queues that are new, which get the numbers behind."""
    return {
        topic: (*layout.get(topic, ()), *sorted(set(found.get(topic, ())) - set(layout.get(topic, ()))))
        for topic in sorted({*layout, *found})
    }


# -- beginnings and ends --------------------------------------------------------------------------------------------------


def resolve(place: Place, spans: Spans, at_time: Callable[[TopicPartition, int], int]) -> dict[TopicPartition, int]:
    """The offset of a place in each partition; explicit ones are not compared with what is there.

    ``at_time`` finds the first message stored at a time or later, and is asked only if the place is by time. ``ConfigError``
    for a table that leaves out partitions, or names others.
    """
    if place.everywhere is None:
        named = {TopicPartition(topic, partition) for topic, row in place.table.items() for partition in row}
        if strangers := named - spans.keys():
            raise ConfigError(f"{place.option}: {_some(strangers)} is not read; there are {_some(spans)}")
        if left_out := spans.keys() - named:
            raise ConfigError(
                f"{place.option}: {_some(left_out)} is left out; name all partitions, -2 is earliest and -1 latest"
                if not place.by_time
                else f"{place.option}: {_some(left_out)} is left out; name all partitions"
            )
    offsets = {}
    for partition, span in spans.items():
        number = place.table[partition.topic][partition.partition] if place.everywhere is None else place.everywhere
        if place.by_time:
            number = at_time(partition, number)
        offsets[partition] = {EARLIEST: span.least, LATEST: span.most}.get(number, number)
    return offsets


def refuse_late(place: Place, offsets: Offsets, spans: Spans) -> None:
    """``ConfigError`` when there is no message at the starting time or later, unless options want the end then."""
    late = [partition for partition, offset in offsets.items() if offset >= spans[partition].most]
    if late:
        advice = "startingOffsetsByTimestampStrategy=latest begins there at the end"
        raise ConfigError(f"{place.option}: {_some(late)} has no message stored then or later; {advice}")


def refuse_crossed(starting: Place, ending: Place, begins: Offsets, ends: Offsets) -> None:
    """``ConfigError`` when a batch ends before it begins, and not because of times or of what is there."""
    if starting.by_time or ending.by_time:
        return
    for partition in sorted(begins):
        if begins[partition] > ends[partition] and starting.everywhere is None and ending.everywhere is None:
            crossed = f"{partition} begins at {begins[partition]} and ends at {ends[partition]}"
            raise ConfigError(f"{starting.option}, {ending.option}: {crossed}")


def _some(partitions: Collection[TopicPartition]) -> str:
    shown = ", ".join(map(str, sorted(partitions)[:SHOWN]))
    return shown if len(partitions) <= SHOWN else f"{shown} and {len(partitions) - SHOWN} more"


# -- data loss ------------------------------------------------------------------------------------------------------------


def kept(wanted: Iterable[Range], spans: Spans) -> tuple[list[Range], list[Loss]]:
    """What of the ranges is there, and what is not.

    A partition without a span is not there at all. Nothing is read twice to make up for what is lost: a partition that ends
    before a range begins gives nothing.
    """
    left: list[Range] = []
    losses: list[Loss] = []
    for partition, begin, end in wanted:
        span = spans.get(partition)
        if end < begin:
            # the messages up to ``end`` may be others than those that were read
            losses.append(Loss(partition, end, begin, "its offsets went back; what is stored there now is not read"))
        elif span is None:
            if begin < end:
                losses.append(Loss(partition, begin, end, "its topic, or its broker, is not there any more"))
        else:
            first, behind = min(max(begin, span.least), end), max(min(end, span.most), begin)
            if begin < first:
                losses.append(Loss(partition, begin, first, f"they have aged out; the oldest that is kept is {span.least}"))
            if behind < end:
                losses.append(Loss(partition, behind, end, f"the partition ends at {span.most}"))
            if first < behind:
                left.append(Range(partition, first, behind))
    return left, losses


def beyond(begins: Offsets, spans: Spans) -> list[Loss]:
    """What would have to be there, were these the offsets to begin at."""
    return [
        Loss(key, spans[key].most, begin, f"the partition ends at {spans[key].most}, before reading begins")
        for key, begin in sorted(begins.items())
        if begin > spans[key].most
    ]


def told(losses: Sequence[Loss]) -> str:
    """Losses in one line."""
    shown = "; ".join(map(str, losses[:SHOWN]))
    return shown if len(losses) <= SHOWN else f"{shown}; and {len(losses) - SHOWN} ranges more"


# -- sharing --------------------------------------------------------------------------------------------------------------


def limited(begins: Offsets, ends: Offsets, most: int) -> dict[TopicPartition, int]:
    """Ends no more than ``most`` messages behind the begins, in proportion to what waits in each partition.

    Each partition that has messages gets one at least, so none starves. With fewer messages than such partitions they take
    turns: each turn moves the sum of the begins, which says whose turn it is.
    """
    waiting = {key: ends[key] - begins.get(key, 0) for key in sorted(ends) if ends[key] > begins.get(key, 0)}
    total = sum(waiting.values())
    if total <= most:
        return dict(ends)
    result = {key: begins.get(key, 0) if key in waiting else end for key, end in ends.items()}
    keys = list(waiting)
    turn = sum(begins.values()) % len(keys)
    keys = keys[turn:] + keys[:turn]
    for key in keys[:most]:
        result[key] += 1
    spare = most - len(keys)
    if spare > 0:
        rest, taken, seen = total - len(keys), 0, 0
        for key in keys:
            seen += waiting[key] - 1
            part = spare * seen // rest - taken  # at most what waits, and all parts make ``spare``
            result[key] += part
            taken += part
    return result


def task_count(messages: int, parallelism: int, wished: int | None) -> int:
    """How many tasks are worth their cost: up to two for each that can run at a time; a wish (minPartitions) counts more."""
    worth = min(2 * parallelism, -(-messages // WORTH_A_TASK))
    return max(1, min(messages, max(worth, wished or 0)))


def shared(ranges: Sequence[Range], count: int) -> list[list[Range]]:
    """The ranges in ``count`` tasks, equal but for one message. Their order stays, and large ranges are cut.

    There are as many tasks, none of them empty, unless there are fewer messages.
    """
    total = sum(one.size for one in ranges)
    count = min(count, total)
    tasks: list[list[Range]] = [[] for _ in range(count)]
    done = number = 0
    for partition, begin, end in ranges:
        at = begin
        while at < end:
            until = min(end, at + total * (number + 1) // count - done)
            tasks[number].append(Range(partition, at, until))
            done += until - at
            at = until
            if done == total * (number + 1) // count:
                number += 1
    return tasks


# -- filters --------------------------------------------------------------------------------------------------------------


class Bounds(NamedTuple):
    """What a column may hold."""

    among: frozenset[Any] | None = None
    """``None``: anything."""
    low: int | None = None
    high: int | None = None
    """Behind the last one."""

    def both(self, other: "Bounds") -> "Bounds":
        """What satisfies this one and another one."""
        among = [bounds.among for bounds in (self, other) if bounds.among is not None]
        lows = [bounds.low for bounds in (self, other) if bounds.low is not None]
        highs = [bounds.high for bounds in (self, other) if bounds.high is not None]
        return Bounds(frozenset.intersection(*among) if among else None, max(lows, default=None), min(highs, default=None))

    def admit(self, value: Any) -> bool:
        """Whether a value is among them."""
        if self.among is not None and value not in self.among:
            return False
        return (self.low is None or value >= self.low) and (self.high is None or value < self.high)

    def clip(self, begin: int, end: int) -> tuple[int, int]:
        """The part of a range that can have such values, perhaps an empty one."""
        low, high = self.low, self.high
        if self.among is not None:
            inside = [value for value in self.among if begin <= value < end]
            begin, end = (min(inside), max(inside) + 1) if inside else (begin, begin)
        begin = begin if low is None else max(begin, low)
        return begin, end if high is None else max(begin, min(end, high))


ANY: Final = Bounds()


def narrowed(ranges: Iterable[Range], topic: Bounds, partition: Bounds, offset: Bounds) -> list[Range]:
    """What of the ranges can satisfy filters on these columns."""
    clipped = (
        Range(where, *offset.clip(begin, end))
        for where, begin, end in ranges
        if topic.admit(where.topic) and partition.admit(where.partition)
    )
    return [one for one in clipped if one.size]

"""The messages that a read takes, and how tasks share them.

This module does no I/O: the driver looks up what partitions hold, and these functions decide.

Spark numbers the partitions of a topic over all brokers, 0 … n − 1 in the order of (broker name, queue). A query that runs for
months must not mix them up when a broker comes or goes, so its offsets record the queue of each number, and new queues get new
numbers. A checkpoint holds::

    {"orders": {"0": 12, "1": 40},                                    next offset of each partition, as for Kafka
     "#queues": {"orders": [["broker-a", 0, 1], ["broker-b", 0, 1]]},   runs: broker, first queue, count; no topic has a #
     "#begins": {"orders": {"1": 30}}}      where partitions begin that came later; without an entry at 0, and left out if empty
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import groupby
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from metaq.errors import ConfigError
from metaq.message import MessageQueue, TopicPartition
from metaq.spark.reading.options import EARLIEST, LATEST, Place

QUEUES: Final = "#queues"
BEGINS: Final = "#begins"
SHOWN: Final = 10
"""Ranges that one line names."""
WORTH_A_TASK: Final = 20_000
"""Messages: a task costs Spark 35 to 100 ms, the time in which one reads a hundred thousand."""


class Span(NamedTuple):
    """The offsets that a partition holds."""

    least: int
    """Offset of the oldest message; ``most`` when there is none."""
    most: int
    """The offset that the next message will have."""


class Range(NamedTuple):
    """Consecutive messages of one partition."""

    partition: TopicPartition
    begin: int
    end: int
    """The offset after the last one."""

    @property
    def size(self) -> int:
        """The number of messages; 0 when the range ends before it begins."""
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
"""The queues of each topic, in the order of their partition numbers."""


class Position(NamedTuple):
    """The progress of a streaming query."""

    offsets: Offsets
    """The next offset of each partition."""
    layout: Layout
    begins: Offsets = MappingProxyType({})
    """The first offset of partitions that came after the query began; 0 for those that are not here."""


# -- positions of a streaming query -------------------------------------------------------------------------------------


def encode_position(position: Position) -> dict[str, Any]:
    """Return a position as it stands in a checkpoint.

    Equal positions become equal text, by which Spark sees that there are no new messages.
    """
    queues = {topic: list(_runs(position.layout[topic])) for topic in sorted(position.layout)}
    begins = {BEGINS: _encode_offsets(position.begins)} if position.begins else {}
    return {**_encode_offsets(position.offsets), QUEUES: queues, **begins}


def decode_position(found: Mapping[str, Any]) -> Position:
    """Parse a position from a checkpoint. ``ConfigError`` for one that another source wrote."""
    try:
        layout = {
            topic: tuple(MessageQueue(topic, broker, first + at) for broker, first, count in runs for at in range(count))
            for topic, runs in found[QUEUES].items()
        }
        offsets = _decode_offsets({topic: row for topic, row in found.items() if topic not in {QUEUES, BEGINS}})
        if all(partition < len(layout[topic]) for topic, partition in offsets):
            return Position(offsets, layout, _decode_offsets(found.get(BEGINS, {})))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"the checkpoint's offsets {found} are not those of a metaq stream: {error!r}") from error
    raise ConfigError(f"the checkpoint's offsets {found} have more partitions than queues")


def _encode_offsets(offsets: Offsets) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for (topic, partition), offset in sorted(offsets.items()):
        rows.setdefault(topic, {})[str(partition)] = offset
    return rows


def _decode_offsets(rows: Mapping[str, Any]) -> dict[TopicPartition, int]:
    return {
        TopicPartition(topic, int(partition)): int(offset) for topic, row in rows.items() for partition, offset in row.items()
    }


def _runs(queues: Sequence[MessageQueue]) -> Iterable[list[Any]]:
    """Yield runs of queues with consecutive numbers on one broker: broker, first queue, count."""
    numbered = enumerate(queues)
    for _, group in groupby(numbered, key=lambda item: (item[1].broker_name, item[1].partition - item[0])):
        run = [queue for _, queue in group]
        yield [run[0].broker_name, run[0].partition, len(run)]


def extended(layout: Layout, found: Layout) -> dict[str, tuple[MessageQueue, ...]]:
    """Return a layout with new queues appended, so known ones keep their numbers."""
    return {
        topic: (*layout.get(topic, ()), *sorted(set(found.get(topic, ())) - set(layout.get(topic, ()))))
        for topic in sorted({*layout, *found})
    }


# -- beginnings and ends --------------------------------------------------------------------------------------------------


def resolve_offsets(place: Place, spans: Spans, at_time: Callable[[TopicPartition, int], int]) -> dict[TopicPartition, int]:
    """Return the offset of a place in each partition; explicit offsets are not compared with the messages there.

    ``at_time`` finds the first message stored at a time or later, and is called only for a place by time. ``ConfigError`` for a
    table that leaves out partitions, or names others.
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


def named(place: Place) -> list[Range]:
    """Return the messages before the offsets that a place names, of each partition; none for a place by time."""
    if place.by_time:
        return []
    return [
        Range(TopicPartition(topic, partition), 0, offset)
        for topic, row in place.table.items()
        for partition, offset in row.items()
        if offset not in {EARLIEST, LATEST}
    ]


def reached(place: Place, offsets: Offsets, spans: Spans) -> Spans:
    """Return spans that go up to the offsets of a place by time: partitions may have grown before these were found."""
    if not place.by_time:
        return spans
    return {partition: span._replace(most=max(span.most, offsets[partition])) for partition, span in spans.items()}


def refuse_late(place: Place, offsets: Offsets, spans: Spans) -> None:
    """Raise ``ConfigError`` for partitions without a message at the starting time or later."""
    late = [partition for partition, offset in offsets.items() if offset >= spans[partition].most]
    if late:
        advice = "startingOffsetsByTimestampStrategy=latest starts there at the end"
        raise ConfigError(f"{place.option}: {_some(late)} has no message stored then or later; {advice}")


def refuse_crossed(starting: Place, ending: Place, begins: Offsets, ends: Offsets) -> None:
    """Raise ``ConfigError`` when the options' own offsets make a batch end before it begins.

    A begin after the end that comes from times, or from the messages there, is no error.
    """
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
    """Return the parts of the ranges that are there, and those that are lost.

    A partition without a span is gone altogether. No message is read twice to make up for a loss: a partition that ends
    before a range begins gives none.
    """
    left: list[Range] = []
    losses: list[Loss] = []
    for partition, begin, end in wanted:
        span = spans.get(partition)
        if end < begin:
            # the messages before ``end`` may not be the ones that were read under these offsets
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
    """Return as losses the messages before these beginnings that the partitions have never reached."""
    return [
        Loss(key, spans[key].most, begin, f"the partition ends at {spans[key].most}, before reading begins")
        for key, begin in sorted(begins.items())
        if begin > spans[key].most
    ]


def told(losses: Sequence[Loss]) -> str:
    """Return losses as one line."""
    shown = "; ".join(map(str, losses[:SHOWN]))
    return shown if len(losses) <= SHOWN else f"{shown}; and {len(losses) - SHOWN} ranges more"


# -- sharing --------------------------------------------------------------------------------------------------------------


def starts(waiting: int, idle_s: float, least: int, longest_s: float) -> bool:
    """Return whether a micro-batch starts: ``least`` messages wait, or some do and the last one began ``longest_s`` ago."""
    return waiting >= least or (waiting > 0 and idle_s >= longest_s)


def limited(begins: Offsets, ends: Offsets, spans: Spans, most: int) -> dict[TopicPartition, int]:
    """Return ends at most ``most`` messages after the begins in all, in proportion to each partition's lag.

    Messages that have aged out do not count. Each partition that has messages gets at least one, so none starves. When ``most``
    is less than the number of such partitions, they take turns: the sum of the begins, which grows with each batch, chooses
    where to start.
    """
    begins = {key: max(begins.get(key, 0), spans[key].least if key in spans else 0) for key in sorted(ends)}
    waiting = {key: ends[key] - begin for key, begin in begins.items() if ends[key] > begin}
    total = sum(waiting.values())
    if total <= most:
        return dict(ends)
    result = {key: begins[key] if key in waiting else end for key, end in ends.items()}
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
            part = spare * seen // rest - taken  # never more than the partition's lag; all parts add up to ``spare``
            result[key] += part
            taken += part
    return result


def task_count(messages: int, parallelism: int, wished: int | None) -> int:
    """Return how many tasks are worth their cost: up to two for each processor, or ``wished`` (minPartitions) if more."""
    worth = min(2 * parallelism, -(-messages // WORTH_A_TASK))
    return max(1, min(messages, max(worth, wished or 0)))


def shared(ranges: Sequence[Range], count: int) -> list[list[Range]]:
    """Return the ranges divided among ``count`` tasks, equal to within one message; their order stays, large ones are cut.

    No task is empty: with fewer messages than ``count``, there are fewer tasks.
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
    """The values that filters allow in a column."""

    among: frozenset[Any] | None = None
    """``None`` for any."""
    low: int | None = None
    high: int | None = None
    """The value after the last one."""

    def both(self, other: "Bounds") -> "Bounds":
        """Return the values that both allow."""
        among = [bounds.among for bounds in (self, other) if bounds.among is not None]
        lows = [bounds.low for bounds in (self, other) if bounds.low is not None]
        highs = [bounds.high for bounds in (self, other) if bounds.high is not None]
        return Bounds(frozenset.intersection(*among) if among else None, max(lows, default=None), min(highs, default=None))

    def admit(self, value: Any) -> bool:
        """Return whether a value is allowed."""
        if self.among is not None and value not in self.among:
            return False
        return (self.low is None or value >= self.low) and (self.high is None or value < self.high)

    def clip(self, begin: int, end: int) -> tuple[int, int]:
        """Return the part of a range that can have such values, perhaps an empty one."""
        low, high = self.low, self.high
        if self.among is not None:
            inside = [value for value in self.among if begin <= value < end]
            begin, end = (min(inside), max(inside) + 1) if inside else (begin, begin)
        begin = begin if low is None else max(begin, low)
        return begin, end if high is None else max(begin, min(end, high))


ANY: Final = Bounds()


def narrowed(ranges: Iterable[Range], topic: Bounds, partition: Bounds, offset: Bounds) -> list[Range]:
    """Return the parts of the ranges that can satisfy filters on these columns."""
    clipped = (
        Range(where, *offset.clip(begin, end))
        for where, begin, end in ranges
        if topic.admit(where.topic) and partition.admit(where.partition)
    )
    return [one for one in clipped if one.size]

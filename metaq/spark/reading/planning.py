"""The plan of a read: its topics, and how they are shared among tasks."""

import os
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Final

from pyspark.sql.datasource import InputPartition

from metaq.errors import ConfigError
from metaq.message import MessageQueue, TopicPartition
from metaq.spark.reading.brokers import Brokers, MessageOrigin, TopicQueues
from metaq.spark.reading.options import ReadOptions, Topics
from metaq.spark.reading.ranges import (
    Bounds,
    Range,
    Spans,
    beyond,
    kept,
    named,
    narrowed,
    reached,
    refuse_crossed,
    refuse_late,
    resolve_offsets,
    shared,
    task_count,
)
from metaq.spark.reading.tasks import Part, Task, report_losses

CLOCK_SLACK: Final = timedelta(seconds=10)
"""How far a broker's clock may have stepped back.

Offsets are found by time as if it never did, and filters must not miss a row.
"""


def named_origin(options: ReadOptions) -> MessageOrigin:
    """Return the origin that the options name: brokers, or a store folder."""
    if options.path:
        from metaq.spark.reading.folders import StoreFolder  # noqa: PLC0415 - brings the store's modules

        return StoreFolder(options.path)
    return Brokers(options.servers, options.login)


def chosen_topics(origin: MessageOrigin, topics: Topics) -> dict[str, TopicQueues]:
    """Return the topics of a read that are there now. ``RouteNotFound`` for a topic that is named and does not exist."""
    names = topics.names or tuple(topics.assigned)
    if topics.pattern:
        names = tuple(name for name in origin.names() if re.fullmatch(topics.pattern, name))
    return {name: origin.topic(name) for name in names}


def refuse_absent(topics: Topics, found: Mapping[str, TopicQueues]) -> None:
    """Raise ``ConfigError`` for a pattern without a match, or a partition that a topic does not have."""
    if not found:
        raise ConfigError(f"subscribePattern: no topic matches {topics.pattern!r}")
    for name, numbers in topics.assigned.items():
        if max(numbers) >= len(found[name].queues):
            count = len(found[name].queues)
            raise ConfigError(f"assign: topic {name} has no partition {max(numbers)}; it has {count}, from 0 on")


def is_chosen(topics: Topics, partition: TopicPartition) -> bool:
    """Return whether a partition is read at all; ``assign`` leaves out some."""
    return not topics.assigned or partition.partition in topics.assigned.get(partition.topic, ())


def plan_batch(origin: MessageOrigin, options: ReadOptions, bounds: Mapping[str, Bounds]) -> list[InputPartition]:
    """Return the tasks of a batch."""
    topics = chosen_topics(origin, options.topics)
    refuse_absent(options.topics, topics)
    layout = {name: topic.queues for name, topic in topics.items()}
    origin.await_brokers({queue.broker_name for queues in layout.values() for queue in queues})

    def at_time(partition: TopicPartition, time_ms: int) -> int:
        return origin.at_time(layout[partition.topic][partition.partition], time_ms)

    starting, ending = options.starting, options.ending
    assert starting is not None
    assert ending is not None
    given = [one for one in (*named(starting), *named(ending)) if is_chosen(options.topics, one.partition)]
    found = origin.shown(given, layout)
    spans: Spans = {key: span for key, span in found.items() if is_chosen(options.topics, key)}
    begins = resolve_offsets(starting, spans, at_time)
    spans = reached(starting, begins, spans)
    ends = resolve_offsets(ending, spans, at_time)
    spans = reached(ending, ends, spans)
    if starting.by_time and not options.latest_if_late:
        refuse_late(starting, begins, spans)
    refuse_crossed(starting, ending, begins, ends)
    wanted = [Range(key, begins[key], max(begins[key], ends[key])) for key in sorted(spans)]
    ranges, losses = kept(wanted, spans)
    report_losses(beyond(begins, spans) + losses, fail=options.fail_on_data_loss)
    ranges = narrowed(ranges, bounds["topic"], bounds["partition"], bounds["offset"])
    ranges = _narrowed_by_time(ranges, bounds["timestamp"], at_time)
    return tasks_of(ranges, layout, {name: topic.addresses for name, topic in topics.items()}, options)


def _narrowed_by_time(ranges: Iterable[Range], bounds: Bounds, at_time: Callable[[TopicPartition, int], int]) -> list[Range]:
    """Return the parts of the ranges that may have been stored in this time, which is in microseconds."""
    slack = CLOCK_SLACK // timedelta(microseconds=1)
    low = min(bounds.among) if bounds.among else bounds.low
    high = max(bounds.among) + 1 if bounds.among else bounds.high
    found = []
    for partition, begin, end in ranges:
        first = begin if low is None else max(begin, at_time(partition, max(0, (low - slack) // 1000)))
        behind = end if high is None else min(end, at_time(partition, max(0, (high + slack) // 1000)))
        if first < behind:
            found.append(Range(partition, first, behind))
    return found


def tasks_of(
    ranges: list[Range],
    layout: Mapping[str, tuple[MessageQueue, ...]],
    addresses: Mapping[str, Mapping[str, tuple[str, ...]]],
    options: ReadOptions,
) -> list[InputPartition]:
    """Return the ranges as tasks, at least one.

    Planning runs in a process beside the driver that does not know Spark's parallelism; this machine's processors stand in
    for it.
    """
    messages = sum(one.size for one in ranges)
    count = task_count(messages, os.cpu_count() or 1, options.min_partitions)
    tasks: list[InputPartition] = []
    for share in shared(ranges, count):
        queues = [layout[one.partition.topic][one.partition.partition] for one in share]
        found = [addresses[queue.topic].get(queue.broker_name, ()) for queue in queues]
        tasks.append(Task([Part(*row) for row in zip(share, queues, found, strict=True)]))
    return tasks or [Task(())]

"""The data source ``metaq`` of Spark's Python API, and its batch reads.

Spark makes these objects in processes beside the driver (to learn the schema, to plan) and in workers (to read), and pickles
them on the way: they hold options only, and connect where they need to.
"""

import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.types import StructType

from metaq.errors import ConfigError
from metaq.message import MessageQueue, TopicPartition
from metaq.spark.source.brokers import Brokers, Origin, Topic
from metaq.spark.source.login import with_password
from metaq.spark.source.options import ReadOptions, Topics, read_options
from metaq.spark.source.ranges import (
    ANY,
    Bounds,
    Range,
    beyond,
    kept,
    narrowed,
    refuse_crossed,
    refuse_late,
    resolve,
    shared,
    task_count,
)
from metaq.spark.source.tasks import Part, Task, plain_errors, read_task, report

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger(__name__)

NAME: Final = "metaq"
COLUMNS: Final = (
    "key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp, timestampType int, tag string"
)
HEADERS: Final = ", headers array<struct<key: string, value: binary>>"
ERROR: Final = ", error string"
CLOCK_SLACK: Final = timedelta(seconds=10)
"""How far a broker's clock may have stepped back: offsets are found by time as if it never did, filters must not miss a row."""
_PUSHED: Final = frozenset({"topic", "partition", "offset", "timestamp"})
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class MetaqDataSource(DataSource):
    """``spark.read.format("metaq")``, and the same of ``readStream``, ``write`` and ``writeStream``."""

    def __init__(self, options: dict[str, str]) -> None:
        """On the driver, whose environment may have the password: workers, and streams, get it with what is pickled."""
        super().__init__(with_password(options))

    @classmethod
    def name(cls) -> str:
        """What ``format`` is told."""
        return NAME

    def schema(self) -> str:
        """Of a read, in SQL's words: a worker cannot parse them into types. ``ConfigError`` for options that cannot be read."""
        with plain_errors():
            options = read_options(self.options)
            return COLUMNS + HEADERS * options.headers + ERROR * options.errors

    def reader(self, schema: StructType) -> DataSourceReader:
        """For a batch."""
        with plain_errors():
            options = self.read_options(schema).for_batch()
        return FilteringReader(options) if options.pushdown else BatchReader(options)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """For a streaming query, which looks at its options when it begins: Spark would hide an error that is raised here."""
        from metaq.spark.source.stream import StreamReader  # noqa: PLC0415 - streams know this module

        return StreamReader(self, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        """For a batch."""
        from metaq.spark.source.sink import BatchWriter  # noqa: PLC0415 - no reader needs it

        with plain_errors():
            return BatchWriter(self.options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        """For a streaming query."""
        from metaq.spark.source.sink import StreamWriter  # noqa: PLC0415

        with plain_errors():
            return StreamWriter(self.options, schema, overwrite)

    def read_options(self, schema: StructType) -> ReadOptions:
        """What a read with these columns is to do. ``ConfigError``, also for columns of the user's own."""
        options = read_options(self.options)
        wanted = [column.split(" ")[0] for column in COLUMNS.split(", ")]
        wanted += ["headers"] * options.headers + ["error"] * options.errors
        if schema.fieldNames() != wanted:
            raise ConfigError(f"the columns are {', '.join(wanted)}; a read cannot have a schema of its own")
        return options


class BatchReader(DataSourceReader):
    """Reads what is there when the plan is made."""

    def __init__(self, options: ReadOptions) -> None:
        self.options = options
        self.bounds: dict[str, Bounds] = dict.fromkeys(_PUSHED, ANY)

    def partitions(self) -> list[InputPartition]:
        """The tasks; never none, for which Spark would make one of its own."""
        with plain_errors():
            origin = origin_of(self.options)
            try:
                return plan_batch(origin, self.options, self.bounds)
            finally:
                origin.close()

    def read(self, partition: InputPartition) -> Iterator["pa.RecordBatch"]:
        """In a worker."""
        return read_task(partition, self.options)


class FilteringReader(BatchReader):
    """Reads less where the query's own conditions allow. Spark refuses it unless its setting for that is on."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Take conditions on topic, partition, offset and timestamp; those that Spark must still look at are returned."""
        for condition in filters:
            column, bounds = _bounds(condition)
            if bounds is not None:
                self.bounds[column] = self.bounds[column].both(bounds)
            if bounds is None or column == "timestamp":
                yield condition


def _bounds(condition: Filter) -> tuple[str, Bounds | None]:
    """What a condition says of a column; ``None`` when it is not understood."""
    column = ".".join(getattr(condition, "attribute", ()))
    if column not in _PUSHED:
        return column, None
    if isinstance(condition, IsNotNull):
        return column, ANY
    values = condition.value if isinstance(condition, In) else (getattr(condition, "value", None),)
    if column == "topic":
        known = isinstance(condition, EqualTo | In) and all(isinstance(value, str) for value in values)
        return column, Bounds(among=frozenset(values)) if known else None
    convert = _micros if column == "timestamp" else _whole
    numbers = [convert(value) for value in values]
    whole = [number for number in numbers if number is not None]
    if not whole or len(whole) != len(numbers):
        return column, None
    value = whole[0]
    makers: dict[type[Filter], Callable[[], Bounds]] = {
        EqualTo: lambda: Bounds(among=frozenset(whole)),
        In: lambda: Bounds(among=frozenset(whole)),
        GreaterThan: lambda: Bounds(low=value + 1),
        GreaterThanOrEqual: lambda: Bounds(low=value),
        LessThan: lambda: Bounds(high=value),
        LessThanOrEqual: lambda: Bounds(high=value + 1),
    }
    make = makers.get(type(condition))
    return column, None if make is None else make()


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _micros(value: Any) -> int | None:
    if not isinstance(value, datetime):
        return None
    return ((value if value.tzinfo else value.replace(tzinfo=UTC)) - _EPOCH) // timedelta(microseconds=1)


# -- planning -------------------------------------------------------------------------------------------------------------


def origin_of(options: ReadOptions) -> Origin:
    """Who is asked."""
    if options.path:
        from metaq.spark.source.folders import StoreFolder  # noqa: PLC0415 - brings the store's modules, which brokers' readers need not

        return StoreFolder(options.path)
    return Brokers(options.servers, options.login)


def chosen_topics(origin: Origin, topics: Topics) -> dict[str, Topic]:
    """The topics of a read that are there. ``RouteNotFound`` for one that is named and is not."""
    names = topics.names or tuple(topics.assigned)
    if topics.pattern:
        names = tuple(name for name in origin.names() if re.fullmatch(topics.pattern, name))
        if not names:
            raise ConfigError(f"subscribePattern: no topic matches {topics.pattern!r}")
    found = {name: origin.topic(name) for name in names}
    for name, numbers in topics.assigned.items():
        if max(numbers) >= len(found[name].queues):
            count = len(found[name].queues)
            raise ConfigError(f"assign: topic {name} has no partition {max(numbers)}; it has {count}, from 0 on")
    return found


def is_chosen(topics: Topics, partition: TopicPartition) -> bool:
    """Whether a partition is read at all; ``assign`` leaves out some."""
    return not topics.assigned or partition.partition in topics.assigned.get(partition.topic, ())


def plan_batch(origin: Origin, options: ReadOptions, bounds: Mapping[str, Bounds]) -> list[InputPartition]:
    """The tasks of a batch."""
    topics = chosen_topics(origin, options.topics)
    layout = {name: topic.queues for name, topic in topics.items()}
    origin.await_brokers({queue.broker_name for queues in layout.values() for queue in queues})
    spans = {key: span for key, span in origin.spans(layout).items() if is_chosen(options.topics, key)}

    def at_time(partition: TopicPartition, time_ms: int) -> int:
        return origin.at_time(layout[partition.topic][partition.partition], time_ms)

    starting, ending = options.starting, options.ending
    assert starting is not None
    assert ending is not None
    begins = resolve(starting, spans, at_time)
    ends = resolve(ending, spans, at_time)
    if starting.by_time and not options.latest_if_late:
        refuse_late(starting, begins, spans)
    refuse_crossed(starting, ending, begins, ends)
    wanted = [Range(key, begins[key], max(begins[key], ends[key])) for key in sorted(spans)]
    ranges, losses = kept(wanted, spans)
    report(beyond(begins, spans) + losses, fail=options.fail_on_data_loss)
    ranges = narrowed(ranges, bounds["topic"], bounds["partition"], bounds["offset"])
    ranges = _narrowed_by_time(ranges, bounds["timestamp"], at_time)
    return tasks_of(ranges, layout, {name: topic.addresses for name, topic in topics.items()}, options)


def _narrowed_by_time(ranges: Iterable[Range], bounds: Bounds, at_time: Callable[[TopicPartition, int], int]) -> list[Range]:
    """What of the ranges can be stored in this time, in microseconds."""
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
    """The ranges as tasks, one at least. Planning runs beside the driver, which says nothing of Spark's parallelism."""
    messages = sum(one.size for one in ranges)
    count = task_count(messages, os.cpu_count() or 1, options.min_partitions)
    tasks: list[InputPartition] = []
    for share in shared(ranges, count):
        queues = [layout[one.partition.topic][one.partition.partition] for one in share]
        found = [addresses[queue.topic].get(queue.broker_name, ()) for queue in queues]
        tasks.append(Task([Part(*row) for row in zip(share, queues, found, strict=True)]))
    return tasks or [Task(())]

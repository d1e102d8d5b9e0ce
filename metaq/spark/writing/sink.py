"""The sink of the format ``metaq``: rows become messages, at least once.

Columns are those of Spark's Kafka sink, and ``tag``: ``value`` is needed; ``key``, ``tag``, ``headers``, ``topic`` and
``partition`` are optional, and may be null in a row. A task that failed, or a micro-batch that a crash kept from its commit, is
written again with the same property METAQ_WRITE (``metaq.spark.writing.packing``); ``metaq.spark.writing.repeats`` drops the
repeats.
"""

import logging
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import ArrayType, BinaryType, DataType, IntegerType, StringType, StructField, StructType

from metaq.client.client import connect
from metaq.client.connecting.transport import may_pass
from metaq.client.message import SendStatus
from metaq.client.sending.producer import Producer
from metaq.errors import BadRequest, ClientError, ConfigError
from metaq.message import MessageQueue
from metaq.spark.login import NOBODY, PASSWORD, TLS_CA, USER, Login
from metaq.spark.reading.options import SERVERS, GivenOptions
from metaq.spark.reading.tasks import PATIENCE_S, PAUSE_S, plain_errors
from metaq.spark.versions import DataSourceStreamArrowWriter
from metaq.spark.writing.packing import java_hashes, pack, written_keys

logger = logging.getLogger(__name__)

TOPIC: Final = "topic"
OF_SPARK: Final = ("checkpointLocation", "queryName")
"""Options of Spark's own that it passes on."""
WRITING: Final = (SERVERS, USER, PASSWORD, TLS_CA, TOPIC, *OF_SPARK)

_TEXT: Final = (StringType, BinaryType)
_COLUMNS: Final[Mapping[str, tuple[type[DataType], ...]]] = {
    "value": _TEXT,
    "key": _TEXT,
    "tag": (StringType,),
    "headers": (ArrayType,),
    TOPIC: (StringType,),
    "partition": (IntegerType,),
}
_HEADERS: Final = "array<struct<key:string,value:binary>>"
_OF_READING: Final = frozenset({"offset", "timestamp", "timestampType", "error"})
"""Further columns of a read, which a write ignores."""
_MOST_ROWS: Final = 512
"""Limit of one request. Twice as many rows cost a fifth more here: blocks of more than 128 KiB are new memory each time."""
_MOST_BYTES: Final = 256 * 1024
"""Limit of one request: the broker takes 1.5 µs a message, and does nothing else meanwhile."""
_FLIGHTS: Final = 2
"""Requests of a task that are on their way at a time: one that the broker handles, and one that is there when it has."""
_ANY: Final = -1
"""In place of a partition's number: the producer chooses one."""

T = TypeVar("T")


class PackedBatch(NamedTuple):
    """Messages that are sent together."""

    data: memoryview
    messages: int


class Target(NamedTuple):
    """The destination of a write."""

    servers: str
    topic: str
    """The topic of all rows; empty when each row names its own."""
    login: Login = NOBODY


def target(options: Mapping[str, str], schema: StructType, *, overwrite: bool) -> Target:
    """Return the destination that a write's options name, after a check of its columns. ``ConfigError``."""
    given = GivenOptions(options, WRITING)
    servers = given.text(SERVERS)
    if not servers:
        raise ConfigError(f"{SERVERS} (host:port of registries, or zk://host:port) is required")
    if overwrite:
        raise ConfigError('a topic can only be appended to; write .mode("append"), or outputMode("append") of a stream')
    found = Target(servers, given.text(TOPIC), given.login(servers))
    _check_columns(schema, found.topic)
    return found


def look(to: Target) -> None:
    """Look up the topic. ``RouteNotFound`` when no registry answers, or no broker takes messages of the topic."""
    with connect(to.servers, **to.login.for_client()) as client:
        if to.topic:
            client.producer().queues(to.topic)
        else:
            client.admin().brokers()


def _check_columns(schema: StructType, topic: str) -> None:
    fields = {field.name: field for field in schema.fields}
    if "value" not in fields:
        raise ConfigError(f"the column value is required, of type string or binary; there are {', '.join(fields) or 'none'}")
    if not topic and TOPIC not in fields:
        raise ConfigError("give the option topic, or a column topic")
    if unknown := fields.keys() - _COLUMNS.keys() - _OF_READING:
        raise ConfigError(f"the column {min(unknown)} is unknown; there are {', '.join(_COLUMNS)}")
    for name, types in _COLUMNS.items():
        if name in fields and not _is_right(fields[name], types):
            wanted = " or ".join(_HEADERS if kind is ArrayType else kind().simpleString() for kind in types)
            raise ConfigError(f"the column {name} is {fields[name].dataType.simpleString()}; write it as {wanted}")


def _is_right(field: StructField, types: tuple[type[DataType], ...]) -> bool:
    if not isinstance(field.dataType, types):
        return False
    if not isinstance(field.dataType, ArrayType):
        return True
    pair = field.dataType.elementType
    if not isinstance(pair, StructType) or pair.fieldNames() != ["key", "value"]:
        return False
    return isinstance(pair["key"].dataType, StringType) and isinstance(pair["value"].dataType, _TEXT)


# -- the writers ------------------------------------------------------------------------------------------------------


@dataclass
class Written(WriterCommitMessage):
    """The result of one task."""

    rows: int
    unsure: int
    """Rows among them that are stored, but not as safely as the broker is configured to store them (``SendStatus``)."""


class BatchWriter(DataSourceArrowWriter):
    """The writer of one DataFrame. Its tasks share the write's id, which is made here, on the driver."""

    def __init__(self, options: Mapping[str, str], schema: StructType, overwrite: bool) -> None:
        """Check options, columns and topic. Errors as from ``target`` and ``look``."""
        self._target = target(options, schema, overwrite=overwrite)
        look(self._target)
        self._write = f"{uuid.uuid4()}/0"

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        with plain_errors():
            return send(iterator, self._target, f"{self._write}/{_task().partitionId()}")

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        _report(messages)


class StreamWriter(DataSourceStreamArrowWriter):
    """The writer of a streaming query's micro-batches."""

    def __init__(self, options: Mapping[str, str], schema: StructType, overwrite: bool) -> None:
        """Check options, columns and topic. Errors as from ``target`` and ``look``, except those that are retriable.

        Spark makes a writer for every batch, so brokers may be away for a while.
        """
        self._target = target(options, schema, overwrite=overwrite)
        try:
            look(self._target)
        except ClientError as error:
            if not error.retriable:
                raise
            logger.warning("brokers do not answer, tasks wait for them reason=%s", error)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        task = _task()
        query, batch = task.getLocalProperty("sql.streaming.queryId"), task.getLocalProperty("streaming.sql.batchId")
        with plain_errors():
            return send(iterator, self._target, f"{query}/{batch}/{task.partitionId()}")

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        _report(messages)


def _task() -> TaskContext:
    task = TaskContext.get()
    assert task is not None, "Spark writes in tasks"
    return task


def _report(messages: Iterable[WriterCommitMessage | None]) -> None:
    written = [message for message in messages if isinstance(message, Written)]
    if unsure := sum(message.unsure for message in written):
        logger.warning("written less safely than the broker is set up for rows=%s of=%s", unsure, sum(m.rows for m in written))


# -- sending ----------------------------------------------------------------------------------------------------------


def send(batches: Iterable[pa.RecordBatch], to: Target, write: str) -> Written:
    """Send the rows of one task, and wait until the broker has stored them; ``write`` is QUERY/BATCH/PARTITION of METAQ_WRITE.

    Rows for one partition keep their order. While ``_FLIGHTS`` requests are on their way, the next rows are packed. Requests to
    brokers that are away, or no masters now, are repeated for ``PATIENCE_S``. Errors as from ``Producer.send`` and ``pack``.
    """
    rows = unsure = 0
    with connect(to.servers, **to.login.for_client()) as client, client.producer() as producer, _flights() as pool:
        flying: list[Future[int]] = []
        for batch in batches:
            packed = pack(batch, write, rows)
            unsure += _landed(flying)
            for topic, places in _by_topic(batch, to.topic):
                messages, mine = (packed, batch) if places is None else (packed.take(places), batch.take(places))
                flying += [pool.submit(series) for series in _series_of(producer, topic, messages, mine)]
            rows += len(batch)
        unsure += _landed(flying)
    return Written(rows, unsure)


@contextmanager
def _flights() -> Iterator[ThreadPoolExecutor]:
    """Yield the threads that send; after an error, what they have not begun is left out."""
    pool = ThreadPoolExecutor(_FLIGHTS, "metaq-write")
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _landed(flying: list[Future[int]]) -> int:
    """Wait until all is stored, and empty the list. Return how many messages are stored less safely than configured."""
    unsure = sum(one.result() for one in flying)
    flying.clear()
    return unsure


def _by_topic(batch: pa.RecordBatch, topic: str) -> Iterator[tuple[str, pa.Array | None]]:
    """Yield each topic with the numbers of its rows; ``None`` for all rows."""
    if not len(batch):
        return
    if topic:
        yield topic, None
        return
    column = batch.column(TOPIC)
    if column.null_count:
        raise BadRequest("a row's topic is null, and there is no option topic")
    names = pc.unique(column).to_pylist()
    for name in names:
        yield name, None if len(names) == 1 else pc.indices_nonzero(pc.equal(column, name))


def _series_of(
    producer: Producer, topic: str, messages: pa.LargeBinaryArray, rows: pa.RecordBatch
) -> Iterator[Callable[[], int]]:
    """Yield calls that send the messages of a topic, each the requests for a partition, and return as ``_landed``.

    Messages for any partition need no order: there are as many calls for them as requests at a time.
    """
    queues = _patiently(partial(producer.queues, topic))
    numbers = _partitions(rows, queues, topic)
    order = np.argsort(numbers, kind="stable")
    if numbers.min() != numbers.max():
        messages, numbers = messages.take(pa.array(order)), numbers[order]
    ends = np.frombuffer(messages.buffers()[1], np.int64)[messages.offset : messages.offset + len(messages) + 1]
    data = memoryview(messages.buffers()[2])
    borders = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(messages)]
    series: dict[tuple[int, int], list[PackedBatch]] = {}
    for turn, (first, end) in enumerate(_requests(ends, borders)):
        number = int(numbers[first])
        lane = turn % _FLIGHTS if number == _ANY else 0
        series.setdefault((number, lane), []).append(PackedBatch(data[ends[first] : ends[end]], end - first))
    for (number, _), requests in series.items():
        yield partial(_send_series, producer, topic, requests, None if number == _ANY else queues[number])


def _send_series(producer: Producer, topic: str, requests: Iterable[PackedBatch], queue: MessageQueue | None) -> int:
    """Send requests one after the other. Return how many messages are stored less safely than configured."""
    unsure = 0
    for data, count in requests:
        results = _patiently(partial(producer.send_packed, topic, bytes(data), count, queue=queue))
        if results[0].status is not SendStatus.SEND_OK:
            unsure += count
    return unsure


def _patiently(send: Callable[[], T]) -> T:
    """Return the result of a call, repeated while its server is away or no master; so a request can be stored twice."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return send()
        except ClientError as error:
            if not may_pass(error) or time.monotonic() >= deadline:
                raise
            logger.warning("not sent, tried again reason=%s", error)
        time.sleep(PAUSE_S)


def _requests(ends: np.ndarray[Any, np.dtype[np.int64]], borders: list[int]) -> Iterator[tuple[int, int]]:
    """Yield the first message of each request and the one after its last; the messages' bytes are between ``ends``."""
    for first, last in pairwise(borders):
        while first < last:
            fitting = int(np.searchsorted(ends, ends[first] + _MOST_BYTES, side="right")) - 1
            end = min(last, first + _MOST_ROWS, max(first + 1, fitting))
            yield first, end
            first = end  # noqa: PLW2901 - what is left of these


def _partitions(rows: pa.RecordBatch, queues: tuple[MessageQueue, ...], topic: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the partition of each row: the one that it names, else the one of its key (as for ``ordering_key``), else any."""
    keys = written_keys(rows)
    chosen = np.where(np.array(pc.is_valid(keys)), np.abs(java_hashes(keys)) % len(queues), _ANY)
    if "partition" not in rows.schema.names:
        return chosen
    named = rows.column("partition")
    numbers = np.array(pc.fill_null(named, _ANY), np.int64)
    given = np.array(pc.is_valid(named))
    if ((numbers[given] < 0) | (numbers[given] >= len(queues))).any():
        shown = sorted(set(numbers[given].tolist()) - set(range(len(queues))))[:5]
        raise BadRequest(f"topic {topic} has partitions 0 to {len(queues) - 1}, but rows are for {', '.join(map(str, shown))}")
    return np.where(given, numbers, chosen)

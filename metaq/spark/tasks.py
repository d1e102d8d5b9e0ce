"""What one task reads, in a worker: pieces of partitions, fetched from brokers or cut from a store folder."""

import contextlib
import gc
import logging
import os
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from pyspark.sql.datasource import InputPartition

from metaq.client.bulk import BulkConnection
from metaq.errors import ConnectionFailed, DataLost, MetaqError, OffsetOutOfRange, RequestTimeout
from metaq.message import MessageQueue, TopicPartition
from metaq.protocol.bulk import Bulk
from metaq.spark.columns import missing, record_batches
from metaq.spark.options import ReadOptions
from metaq.spark.ranges import Loss, Range, told

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger(__name__)

MOST_BYTES: Final = 8 * 1024 * 1024
"""Of one fetch: what a worker holds of the log, whatever it reads."""
MOST_MESSAGES: Final = 1 << 20
TIMEOUT_S: Final = 30.0
PATIENCE_S: Final = 60.0
"""How long a broker may be gone, with its slaves, before the task fails."""
PAUSE_S: Final = 0.2

_connections: Final[dict[str, BulkConnection]] = {}
"""Spark uses a worker for many tasks and queries, one at a time."""
_settled: Final[list[bool]] = []


class Piece(NamedTuple):
    """A range, and who has it."""

    range: Range
    queue: MessageQueue
    addresses: tuple[str, ...] = ()
    """The master's and its slaves'; none for a store folder."""


class Task(InputPartition):
    """The pieces that one task reads, one behind the other."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        super().__init__(tuple(pieces))

    @property
    def pieces(self) -> tuple[Piece, ...]:
        found: tuple[Piece, ...] = self.value
        return found


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """Show what metaq raises as one sentence, without the call stack of a process that users do not know.

    Spark formats an error in the process that raised it, which then ends; the variable is Spark's own way to say how.
    """
    try:
        yield
    except MetaqError:
        os.environ["SPARK_HIDE_TRACEBACK"] = "1"
        raise


def read_task(task: InputPartition, options: ReadOptions) -> Iterator["pa.RecordBatch"]:
    """The rows of a task, in order within each partition."""
    assert isinstance(task, Task)
    _settle()
    with plain_errors():
        for piece in task.pieces:
            partition = piece.range.partition
            for bulk in _fetched(piece, fail=options.fail_on_data_loss):
                yield from record_batches(
                    bulk, partition.topic, partition.partition, until=piece.range.end, headers=options.headers
                )


def report(losses: Sequence[Loss], *, fail: bool) -> None:
    """Tell what is lost: by ``DataLost`` (failOnDataLoss), or in one line of the log."""
    if losses and fail:
        advice = "start elsewhere (a new checkpoint, startingOffsets), or let failOnDataLoss=false go on without them"
        raise DataLost(f"messages are lost: {told(losses)}. Either {advice}")
    if losses:
        logger.warning("messages are lost and left out (failOnDataLoss=false): %s", told(losses))


def _settle() -> None:
    """Once in a worker: Spark collects garbage after every task, which takes 15 ms less without what all tasks share."""
    if not _settled:
        _settled.append(True)
        gc.collect()
        gc.freeze()


def _fetched(piece: Piece, *, fail: bool) -> Iterator[Bulk]:
    """All that is there of a piece; what is not is told."""
    partition, at, end = piece.range
    deadline = time.monotonic() + PATIENCE_S
    while at < end:
        try:
            bulk = _fetch(piece, at, end)
        except OffsetOutOfRange as moved:
            least = moved.least if moved.least > at else end
            why = f"they have aged out; the oldest that is kept is {moved.least}"
            why = why if moved.least > at else f"the partition ends at {moved.most}"
            report([Loss(partition, at, min(least, end), why)], fail=fail)
            at = least
            continue
        if not bulk.units:
            # a slave that is behind, or a master that has lost what the driver saw
            if time.monotonic() > deadline:
                report([Loss(partition, at, end, f"the partition ends at {bulk.most}")], fail=fail)
                return
            time.sleep(PAUSE_S)
            continue
        _tell_missing(partition, bulk, end, fail=fail)
        yield bulk
        at = bulk.next
        deadline = time.monotonic() + PATIENCE_S


def _tell_missing(partition: TopicPartition, bulk: Bulk, end: int, *, fail: bool) -> None:
    why = "damaged or lost in the broker's log; metaq verify tells more"
    report([Loss(partition, gap.start, gap.stop, why) for gap in missing(bulk, end)], fail=fail)


def _fetch(piece: Piece, at: int, end: int) -> Bulk:
    """From the master, or a slave while it cannot be reached."""
    queue = piece.queue
    deadline = time.monotonic() + PATIENCE_S
    while True:
        for address in piece.addresses:
            try:
                connection = _connections.get(address) or BulkConnection(address, TIMEOUT_S)
                _connections[address] = connection
                most = min(end - at, MOST_MESSAGES)
                return connection.fetch(queue.topic, queue.partition, at, most_messages=most, most_bytes=MOST_BYTES)
            except (ConnectionFailed, RequestTimeout) as error:
                _connections.pop(address, None)
                logger.info("fetch failed address=%s reason=%s", address, error)
                failure = error
        if time.monotonic() > deadline:
            raise failure
        time.sleep(PAUSE_S)

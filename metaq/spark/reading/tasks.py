"""The work of one task, in a worker: parts of partitions, fetched from brokers or cut from a store folder."""

import contextlib
import gc
import logging
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from pyspark.sql.datasource import InputPartition

from metaq.client.consuming.bulk import BulkConnection
from metaq.errors import AgedOut, ConnectionFailed, DataLost, MetaqError, OffsetOutOfRange, RequestTimeout
from metaq.message import MessageQueue, TopicPartition
from metaq.protocol.remoting.bulk import Bulk, BulkFetch
from metaq.protocol.remoting.headers import Int32
from metaq.spark.login import Login
from metaq.spark.reading.checking import intact_piece
from metaq.spark.reading.columns import Piece, Shape, missing, piece_of, record_batches
from metaq.spark.reading.options import ReadOptions
from metaq.spark.reading.ranges import Loss, Range, told

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger(__name__)

MOST_BYTES: Final = 8 * 1024 * 1024
"""Limit of one fetch, and so of the log's bytes that a worker holds."""
MOST_MESSAGES: Final = 1 << 20
TIMEOUT_S: Final = 30.0
PATIENCE_S: Final = 60.0
"""How long a broker may be away, with its slaves, before the task fails."""
PAUSE_S: Final = 0.2
AVOIDED_S: Final = 30.0
"""How long an address that could not be connected to is tried after the others, as long as these have the messages."""

_connections: Final[dict[tuple[str, Login], BulkConnection]] = {}
"""Spark uses a worker for many tasks and queries, one at a time; a connection belongs to one user."""
_failed: Final[dict[tuple[str, Login], float]] = {}
"""When an address failed, without an answer since: each try at a host that has vanished takes ``TIMEOUT_S``."""
_settled: Final[list[bool]] = []


class Part(NamedTuple):
    """A range, and the brokers that have it."""

    range: Range
    queue: MessageQueue
    addresses: tuple[str, ...] = ()
    """The master's and its slaves'; none for a store folder."""


class Task(InputPartition):
    """The parts that one task reads, one after the other."""

    def __init__(self, parts: Sequence[Part]) -> None:
        super().__init__(tuple(parts))

    @property
    def parts(self) -> tuple[Part, ...]:
        found: tuple[Part, ...] = self.value
        return found


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """Show a metaq error as one sentence, without the stack trace of a process that users do not know.

    Spark formats an error in the process that raised it, which then ends. The environment variable is Spark's own switch
    for this.
    """
    try:
        yield
    except MetaqError:
        os.environ["SPARK_HIDE_TRACEBACK"] = "1"
        raise


def read_task(task: InputPartition, options: ReadOptions) -> Iterator["pa.RecordBatch"]:
    """Yield the rows of a task, in order within each partition."""
    assert isinstance(task, Task)
    _settle()
    shape = Shape(options.headers, options.errors, options.most_inflated)
    with plain_errors():
        for part in task.parts:
            partition, _, end = part.range
            for piece in _cut(part, options) if options.path else _fetched(part, options):
                why = "damaged or lost in the broker's log; run metaq verify"
                gaps = [Loss(partition, gap.start, gap.stop, why) for gap in missing(piece, end)]
                report_losses(gaps, fail=options.fail_on_data_loss)
                yield from record_batches(piece, *partition, shape, until=end)
                del piece  # as in ``_fetched``


def report_losses(losses: Sequence[Loss], *, fail: bool) -> None:
    """Report losses: raise ``DataLost`` (failOnDataLoss), or log one line."""
    if losses and fail:
        advice = "start elsewhere (a new checkpoint, startingOffsets), or continue without them (failOnDataLoss=false)"
        raise DataLost(f"messages are lost: {told(losses)}. Either {advice}")
    if losses:
        logger.warning("messages are lost and left out, as failOnDataLoss says losses=%s", told(losses))


def _settle() -> None:
    """Freeze the objects that all tasks share, once in a worker.

    Spark collects garbage after every task, which takes 15 ms less without them.
    """
    if not _settled:
        _settled.append(True)
        gc.collect()
        gc.freeze()


def _fetched(part: Part, options: ReadOptions) -> Iterator[Piece]:
    """Yield the messages of a part that are there, and report the others."""
    login, fail = options.login, options.fail_on_data_loss
    partition, at, end = part.range
    deadline = time.monotonic() + PATIENCE_S
    while at < end:
        try:
            bulk = _fetch(part, at, end, login, verified=False)
            key = TopicPartition(part.queue.topic, part.queue.partition)
            piece = piece_of(bulk) if bulk.verified else intact_piece(bulk, key)
            if piece is None:  # once more, verified: the broker marks the damaged ones, and reports them
                bulk = _fetch(part, at, bulk.next, login, verified=True)
                piece = piece_of(bulk)
        except OffsetOutOfRange as moved:
            least = moved.least if moved.least > at else end
            why = f"they have aged out; the oldest that is kept is {moved.least}"
            why = why if moved.least > at else f"the partition ends at {moved.most}"
            report_losses([Loss(partition, at, min(least, end), why)], fail=fail)
            at = least
            continue
        if not bulk.units:
            # a slave that has not copied the messages yet, or a new master whose replicas have not reported them
            if time.monotonic() > deadline:
                hidden = f"{partition} offsets {at} to {end - 1}"
                raise ConnectionFailed(
                    f"broker {part.queue.broker_name} has not shown {hidden} within {PATIENCE_S:.0f} s; "
                    f"the partition ends at {bulk.most} there. Run the query again: its plan finds out if they are lost"
                )
            for address in part.addresses:  # any may have them, also one that failed
                _failed.pop((address, login), None)
            time.sleep(PAUSE_S)
            continue
        yield piece
        at = bulk.next
        del bulk, piece  # so that the next fetch uses their memory, which is in the processor's cache
        deadline = time.monotonic() + PATIENCE_S


def _fetch(part: Part, at: int, end: int, login: Login, *, verified: bool) -> Bulk:
    """Fetch from the master, or from a slave while the master cannot be reached; the next fetch is sent ahead."""
    if not part.addresses:
        raise ConnectionFailed(
            f"broker {part.queue.broker_name} had no address at its registry when the read was planned; run it again"
        )
    deadline = time.monotonic() + PATIENCE_S
    while True:
        for address in _in_turn(part.addresses, login):
            kept = _connections.get((address, login))
            try:
                connection = kept or BulkConnection(address, TIMEOUT_S, login.access())
                _connections[address, login] = connection
                bulk = connection.fetch(_wanted(part, at, end, verified=verified))
                _failed.pop((address, login), None)
                if bulk.units and bulk.next < end and not verified:
                    connection.prefetch(_wanted(part, bulk.next, end, verified=False))
                return bulk
            except (ConnectionFailed, RequestTimeout) as error:
                _connections.pop((address, login), None)
                if kept is None:  # else the broker may only have been restarted since
                    _failed[address, login] = time.monotonic()
                logger.info("fetch failed address=%s reason=%s", address, error)
                failure = error
        if time.monotonic() > deadline:
            raise failure
        time.sleep(PAUSE_S)


def _in_turn(addresses: Sequence[str], login: Login) -> list[str]:
    """Return addresses in their order, but after them those that have failed in the last ``AVOIDED_S``, the latest last."""
    since = time.monotonic() - AVOIDED_S
    return sorted(addresses, key=lambda address: max(since, _failed.get((address, login), since)))


def _wanted(part: Part, at: int, end: int, *, verified: bool) -> BulkFetch:
    queue, most = part.queue, Int32(min(end - at, MOST_MESSAGES))
    return BulkFetch(queue.topic, Int32(queue.partition), at, most, Int32(MOST_BYTES), verified)


def _cut(part: Part, options: ReadOptions) -> Iterator[Piece]:
    """Yield the messages of a part from a store folder, and report those that aged out meanwhile."""
    from metaq.spark.reading.disk import Folder  # noqa: PLC0415 - brings the store's modules, which brokers' readers need not

    partition, at, end = part.range
    folder = Folder(Path(options.path))
    while at < end:
        try:
            for piece in folder.pieces(*partition, at, end, verify=options.verify):
                at = piece.first + len(piece.sizes)
                yield piece
        except AgedOut as gone:
            least = min(gone.least, end)
            why = "they aged out while the folder was read, but none do from a copy of it"
            report_losses([Loss(partition, at, least, why)], fail=options.fail_on_data_loss)
            at = least

"""Streaming reads: where a query begins, how far a micro-batch goes, and which messages have aged out meanwhile.

Spark keeps one ``StreamReader`` for a query, in a process beside the driver, and calls its methods one at a time. The form of
the offsets that it stores is in ``metaq.spark.reading.ranges``.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from metaq.errors import ClientError, RouteNotFound
from metaq.message import MessageQueue, TopicPartition
from metaq.spark.reading.brokers import Brokers, TopicQueues
from metaq.spark.reading.options import ReadOptions
from metaq.spark.reading.planning import chosen_topics, is_chosen, tasks_of
from metaq.spark.reading.ranges import (
    Layout,
    Loss,
    Position,
    Range,
    Span,
    Spans,
    beyond,
    decode_position,
    encode_position,
    extended,
    kept,
    limited,
    refuse_late,
    resolve_offsets,
)
from metaq.spark.reading.tasks import plain_errors, read_task, report_losses

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger(__name__)

HOLD_S: Final = 1.0
"""How long Spark waits for news until it learns that there are none; otherwise it would ask 70 times a second."""
LOOK_S: Final = 0.1
"""Time between two looks for news during ``HOLD_S``."""
ROUTES_S: Final = 10.0
"""Time between two looks for new topics and partitions."""
LOST: Final = "#lost"
"""Key in the latest offset that Spark reports: how many messages this run of the query has left out, by partition."""


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A streaming read. Spark pickles it before the first call, so it connects later."""

    def __init__(self, read_options: Callable[[], ReadOptions]) -> None:
        self._read_options = read_options
        self._connected: Brokers | None = None
        self._topics: dict[str, TopicQueues] = {}
        self._looked = 0.0
        self._target: Position | None = None
        self._unpinned: dict[str, Any] | None = None
        self._latest: dict[str, Any] | None = None
        self._lost: dict[tuple[TopicPartition, int], int] = {}

    @cached_property
    def options(self) -> ReadOptions:
        """The options, read at the first use. ``ConfigError`` for options that a streaming query cannot have."""
        with plain_errors():
            return self._read_options().for_stream()

    # -- what Spark asks, in this order -----------------------------------------------------------------------------

    def prepareForTriggerAvailableNow(self) -> None:
        """Fix the end of the query: messages that come later are not read."""
        with plain_errors():
            layout = self._layout({})
            self._target = Position({key: span.most for key, span in self._spans(layout).items()}, layout)

    def initialOffset(self) -> dict[str, Any]:
        """Return where a new query begins.

        Spark does not record it. A beginning that would be another later (latest, or a time) is recorded as the end of an empty
        batch.
        """
        with plain_errors():
            place = self.options.starting
            assert place is not None
            layout = self._layout({})
            spans = self._spans(layout)
            begins = resolve_offsets(place, spans, lambda key, time_ms: self._brokers.at_time(_queue(layout, key), time_ms))
            if place.by_time and not self.options.latest_if_late:
                refuse_late(place, begins, spans)
            report_losses(beyond(begins, spans), fail=self.options.fail_on_data_loss)
            begins = {key: min(begin, spans[key].most) for key, begin in begins.items()}
            found = encode_position(Position(begins, layout))
            if not place.stands:
                self._unpinned = found
            return found

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return how many messages a micro-batch may have."""
        most = self.options.max_offsets
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Return where the next micro-batch ends; ``start`` when no message comes within ``HOLD_S``."""
        with plain_errors():
            unpinned, self._unpinned = self._unpinned, None
            if unpinned == start:
                return start
            position = decode_position(start)
            deadline = time.monotonic() + HOLD_S
            while True:
                spans = self._spans(self._layout(position.layout))
                ends = self._ends(position, spans)
                if encode_position(ends) != start or self._target is not None or time.monotonic() >= deadline:
                    break
                time.sleep(LOOK_S)
            if isinstance(limit, ReadMaxRows):
                ends = Position(limited(position.offsets, ends.offsets, limit.max_rows), ends.layout)
            self._remember(kept(_between(position, ends), spans)[1])  # Spark asks for a batch's progress before its plan
            return encode_position(ends)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Return the tasks of a micro-batch, the same ones when it is planned again after a crash."""
        with plain_errors():
            before, after = decode_position(start), decode_position(end)
            moved = _between(before, after)
            queues = {one.partition: _queue(after.layout, one.partition) for one in moved}
            self._brokers.await_brokers({queue.broker_name for queue in queues.values()})
            ranges, losses = kept(moved, self._brokers.spans({topic: after.layout[topic] for topic, _ in queues}))
            report_losses(losses, fail=self.options.fail_on_data_loss)
            self._remember(losses)
            self._look(ranges)
            addresses = {name: topic.addresses for name, topic in self._topics.items()}
            return tasks_of(ranges, after.layout, addresses, self.options)

    def read(self, partition: InputPartition) -> Iterator["pa.RecordBatch"]:
        """Return the rows of one task; runs in a worker."""
        return read_task(partition, self.options)

    def commit(self, end: dict[str, Any]) -> None:
        """Commit offsets of the group: all messages before ``end`` are done.

        Spark calls this only when the next batch begins; ``GroupOffsets`` commits at once.
        """
        if self.options.group:
            position = decode_position(end)
            offsets = {_queue(position.layout, key): offset for key, offset in position.offsets.items()}
            try:
                self._brokers.commit(self.options.group, offsets)
            except ClientError as error:
                logger.warning("offsets not committed group=%s reason=%s", self.options.group, error)

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Return the latest ends that were seen, and what was lost, for the query's progress."""
        if self._latest is None or not self._lost:
            return self._latest
        lost: dict[str, dict[str, int]] = {}
        for ((topic, partition), _), count in sorted(self._lost.items()):
            row = lost.setdefault(topic, {})
            row[str(partition)] = row.get(str(partition), 0) + count
        return {**self._latest, LOST: lost}

    # -- looking ------------------------------------------------------------------------------------------------------

    @property
    def _brokers(self) -> Brokers:
        if self._connected is None:
            self._connected = Brokers(self.options.servers, self.options.login)
        return self._connected

    def _layout(self, known: Layout) -> dict[str, tuple[MessageQueue, ...]]:
        """Return the queues of the partition numbers, with new ones appended."""
        if not self._topics or time.monotonic() - self._looked > ROUTES_S:
            self._refresh()
        return extended(known, {name: topic.queues for name, topic in self._topics.items()})

    def _refresh(self) -> None:
        try:
            self._topics.update(chosen_topics(self._brokers, self.options.topics))
        except RouteNotFound as error:
            if not self._topics or self.options.fail_on_data_loss:
                raise
            logger.warning("topics not looked up reason=%s", error)
        self._looked = time.monotonic()

    def _look(self, ranges: list[Range]) -> None:
        """Look up the addresses of planned topics: after a restart a batch may be planned before any other call."""
        if any(one.partition.topic not in self._topics for one in ranges):
            self._refresh()

    def _spans(self, layout: Layout) -> dict[TopicPartition, Span]:
        found = self._brokers.spans(layout)
        return {key: span for key, span in found.items() if is_chosen(self.options.topics, key)}

    def _ends(self, start: Position, spans: Spans) -> Position:
        """Return all that is there, up to the target if there is one. A partition that does not answer keeps its offset."""
        layout = self._layout(start.layout)
        ends = {**start.offsets, **{key: span.most for key, span in spans.items()}}
        if self._target is not None:
            targets = {_queue(self._target.layout, key): offset for key, offset in self._target.offsets.items()}
            begins = start.offsets
            ends = {key: max(begins.get(key, 0), min(end, targets.get(_queue(layout, key), 0))) for key, end in ends.items()}
        self._latest = encode_position(Position(ends, layout))
        return Position(ends, layout)

    def _remember(self, losses: list[Loss]) -> None:
        """Count losses, each once, however often a batch is planned."""
        self._lost.update({(loss.partition, loss.begin): loss.end - loss.begin for loss in losses})


def _between(start: Position, end: Position) -> list[Range]:
    """Return the messages between two positions; a new partition is read from its beginning."""
    wanted = [Range(key, start.offsets.get(key, 0), offset) for key, offset in sorted(end.offsets.items())]
    return [one for one in wanted if one.begin != one.end]


def _queue(layout: Mapping[str, tuple[MessageQueue, ...]], partition: TopicPartition) -> MessageQueue:
    return layout[partition.topic][partition.partition]

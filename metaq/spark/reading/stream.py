"""Streaming reads: where a query begins, how far a micro-batch goes, and which messages have aged out meanwhile.

Spark keeps one reader for a query, in a process beside the driver, and calls its methods one at a time. What it asks differs
with its version: ``metaq.spark.reading.limitedstream`` and ``metaq.spark.reading.plainstream`` answer. The form of the offsets
that it stores is in ``metaq.spark.reading.ranges``.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from metaq.errors import ClientError, ConfigError, RouteNotFound
from metaq.message import MessageQueue, TopicPartition
from metaq.spark.reading.brokers import PATIENCE_S, Brokers, TopicQueues
from metaq.spark.reading.options import ReadOptions
from metaq.spark.reading.planning import chosen_topics, is_chosen, refuse_absent, tasks_of
from metaq.spark.reading.ranges import (
    Layout,
    Loss,
    Offsets,
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
    reached,
    refuse_late,
    resolve_offsets,
    starts,
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
NOWHERE: Final = Position({}, {})
"""The progress of a query of which nothing is known."""


class StreamReader(DataSourceStreamReader):
    """A streaming read, as all versions of Spark have it. Spark pickles it before the first call: so it connects later."""

    def __init__(self, read_options: Callable[[], ReadOptions]) -> None:
        self._read_options = read_options
        self._connected: Brokers | None = None
        self._topics: dict[str, TopicQueues] = {}
        self._looked = 0.0
        self._initial: dict[str, Any] | None = None
        self._target: Position | None = None
        self._latest: dict[str, Any] | None = None
        self._below: dict[TopicPartition, float] = {}
        """Since when partitions have ended before the next micro-batch begins."""
        self._lost: dict[tuple[TopicPartition, int], int] = {}
        self._triggered = -math.inf
        """When the last micro-batch began that had messages; the first one waits for none."""

    @cached_property
    def options(self) -> ReadOptions:
        """The options, read at the first use. ``ConfigError`` for options that a streaming query cannot have."""
        with plain_errors():
            return self._read_options().for_stream()

    def initialOffset(self) -> dict[str, Any]:
        """Return where a new query begins. Spark asks again when it plans the first batch, and gets the same place."""
        with plain_errors():
            if self._initial is None:
                self._initial = encode_position(self._beginning(NOWHERE)[0])
            return self._initial

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Return the tasks of a micro-batch, the same ones when it is planned again after a crash."""
        with plain_errors():
            before, after = decode_position(start), decode_position(end)
            moved = _between(before, after)
            queues = {one.partition: _queue(after.layout, one.partition) for one in moved}
            self._brokers.await_brokers({queue.broker_name for queue in queues.values()})
            ranges, losses = kept(moved, self._brokers.shown(moved, {topic: after.layout[topic] for topic, _ in queues}))
            report_losses(losses, fail=self.options.fail_on_data_loss)
            self._remember(losses)
            self._look({(one.partition.topic, queues[one.partition].broker_name) for one in ranges})
            if strange := sorted({one.partition.topic for one in ranges} - self._topics.keys()):
                raise ConfigError(
                    f"the checkpoint is of a query that also reads {', '.join(strange)}: subscribe to that again, "
                    f"or begin with a new checkpointLocation"
                )
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

    # -- where micro-batches begin and end ----------------------------------------------------------------------------

    def _beginning(self, known: Position) -> tuple[Position, Spans]:
        """Return where a new query begins, and what the partitions hold, once they show all before that and what is known.

        Queues that are known keep their numbers.
        """
        place = self.options.starting
        assert place is not None
        layout = self._layout(known.layout)

        def at_time(partition: TopicPartition, time_ms: int) -> int:
            return self._brokers.at_time(_queue(layout, partition), time_ms)

        found = self._spans(layout, known.offsets)
        begins = resolve_offsets(place, found, at_time)
        spans = reached(place, begins, found)
        if beyond(begins, spans):
            spans = self._spans(layout, begins)
            begins = resolve_offsets(place, spans, at_time)
        if place.by_time and not self.options.latest_if_late:
            refuse_late(place, begins, spans)
        report_losses(beyond(begins, spans), fail=self.options.fail_on_data_loss)
        return Position({key: min(begin, spans[key].most) for key, begin in begins.items()}, layout), spans

    def _begun(self, end: dict[str, Any]) -> dict[str, Any]:
        """Return where a query's first batch begins that is planned again after a crash: Spark does not record it.

        A batch that began at the latest offsets was empty. Other places are looked up again, in the partitions of the batch, as
        soon as their brokers are there and show its end. Where a place is after the end by now, what follows the end is left to
        the next batch.
        """
        assert self.options.starting is not None
        if self.options.starting.is_latest:
            return end
        after = decode_position(end)
        self._brokers.await_brokers({queue.broker_name for queues in after.layout.values() for queue in queues})
        begins, _ = self._beginning(after)
        offsets = {key: min(offset, after.offsets.get(key, offset)) for key, offset in begins.offsets.items()}
        return encode_position(begins._replace(offsets=offsets))

    def _next(self, start: dict[str, Any], *, least: int | None, most: int | None) -> dict[str, Any]:
        """Return where the next micro-batch ends; ``start`` when none begins within ``HOLD_S``.

        Args:
            start: where it begins.
            least: how many messages it waits for, ``maxTriggerDelay`` at most.
            most: how many it may have.
        """
        position = decode_position(start)
        deadline = time.monotonic() + HOLD_S
        while True:
            spans = self._spans(self._layout(position.layout))
            ends = self._ends(position, spans)
            if least is None:
                due = encode_position(ends) != start
            else:
                waiting = sum(abs(one.end - one.begin) for one in _between(position, ends))  # offsets may have gone back
                due = starts(waiting, time.monotonic() - self._triggered, least, self.options.max_delay_s)
            if due or self._target is not None or time.monotonic() >= deadline:
                break
            time.sleep(LOOK_S)
        if not due:
            return start
        self._triggered = time.monotonic()
        if most is not None:
            ends = ends._replace(offsets=limited(position.offsets, ends.offsets, spans, most))
        self._remember(kept(_between(position, ends), spans)[1])  # Spark asks for a batch's progress before its plan
        return encode_position(ends)

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
        """Look up the topics again. Known ones stay: the brokers that have them may be away for a while."""
        try:
            found = chosen_topics(self._brokers, self.options.topics)
            if not self._topics:
                refuse_absent(self.options.topics, found)
            self._topics.update(found)
        except RouteNotFound as error:
            if not self._topics or self.options.fail_on_data_loss:
                raise
            logger.warning("topics not looked up reason=%s", error)
        self._looked = time.monotonic()

    def _look(self, planned: set[tuple[str, str]]) -> None:
        """Look up topics whose brokers have no address: the query, or a broker, may have started after the last look."""
        if planned - {(name, broker) for name, topic in self._topics.items() for broker in topic.addresses}:
            self._refresh()

    def _spans(self, layout: Layout, least: Offsets = MappingProxyType({})) -> dict[TopicPartition, Span]:
        found = self._brokers.shown([Range(key, 0, offset) for key, offset in least.items()], layout)
        return {key: span for key, span in found.items() if is_chosen(self.options.topics, key)}

    def _ends(self, start: Position, spans: Spans) -> Position:
        """Return all that is there, up to the target if there is one. A partition that does not answer keeps its offset.

        So does one that ends before it, for ``PATIENCE_S``: a new master may hide messages.

        The begins of new partitions are part of the position, so that a batch is the same when it is planned again.
        """
        layout = self._layout(start.layout)
        new = {key: span.least for key, span in spans.items() if key not in start.offsets}
        now = time.monotonic()
        below = [key for key, span in spans.items() if span.most < start.offsets.get(key, 0)]
        self._below = {key: self._below.get(key, now) for key in below}
        hidden = {key: start.offsets[key] for key, since in self._below.items() if now - since < PATIENCE_S}
        ends = {**start.offsets, **{key: span.most for key, span in spans.items()}, **hidden}
        if self._target is not None:
            targets = {_queue(self._target.layout, key): offset for key, offset in self._target.offsets.items()}
            begins = {**start.offsets, **new}
            ends = {key: max(begins[key], min(end, targets.get(_queue(layout, key), 0))) for key, end in ends.items()}
        position = Position(ends, layout, {**start.begins, **{key: least for key, least in new.items() if least}})
        self._latest = encode_position(position)
        return position

    def _remember(self, losses: list[Loss]) -> None:
        """Count losses, each once, however often a batch is planned."""
        self._lost.update({(loss.partition, loss.begin): loss.end - loss.begin for loss in losses})


def _between(start: Position, end: Position) -> list[Range]:
    """Return the messages between two positions; a new partition is read from its beginning."""
    begins = {**end.begins, **start.offsets}
    wanted = [Range(key, begins.get(key, 0), offset) for key, offset in sorted(end.offsets.items())]
    return [one for one in wanted if one.begin != one.end]


def _queue(layout: Mapping[str, tuple[MessageQueue, ...]], partition: TopicPartition) -> MessageQueue:
    return layout[partition.topic][partition.partition]

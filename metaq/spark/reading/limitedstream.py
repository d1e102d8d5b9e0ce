"""Streaming reads for PySpark from ``LIMITS`` on: Spark tells where each micro-batch begins, and whether it has a limit."""

from typing import Any, Final

from pyspark.sql.datasource import InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)

from metaq.spark.reading.ranges import Position
from metaq.spark.reading.stream import StreamReader
from metaq.spark.reading.tasks import plain_errors

LOST: Final = "#lost"
"""Key in the latest offset that Spark reports: how many messages this run of the query has left out, by partition."""


class LimitedStreamReader(StreamReader, SupportsTriggerAvailableNow):
    """A streaming read. The methods stand in the order in which Spark calls them."""

    _new = True
    """Whether this reader has neither given nor planned a batch."""
    _again: dict[str, Any] | None = None
    """The end of a batch that this reader planned before it gave one: an earlier reader gave it, before a crash."""

    def prepareForTriggerAvailableNow(self) -> None:
        """Fix the end of the query: messages that come later are not read."""
        with plain_errors():
            layout = self._layout({})
            self._target = Position({key: span.most for key, span in self._spans(layout).items()}, layout)

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return how many messages a micro-batch has: Spark's limits hold one number, so the most goes before the least."""
        if self.options.max_offsets is not None:
            return ReadMaxRows(self.options.max_offsets)
        return ReadAllAvailable() if self.options.min_offsets is None else ReadMinRows(self.options.min_offsets)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Return where the next micro-batch ends; ``start`` when there is none for now.

        Spark does not record where a query begins. A beginning that would be another later (latest, or a time) is recorded as
        the end of an empty batch.

        Trigger.Once asks for all, and Trigger.AvailableNow for what is there now: neither waits for more.
        """
        with plain_errors():
            assert self.options.starting is not None
            new, self._new = self._new, False
            if new and start == self._initial and not self.options.starting.stands:
                return start
            waits = self._target is None and not isinstance(limit, ReadAllAvailable)
            least = self.options.min_offsets if waits else None
            return self._next(start, least=least, most=limit.max_rows if isinstance(limit, ReadMaxRows) else None)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Return the tasks of a micro-batch.

        If a query's first batch is planned again after a crash, the query may begin elsewhere by now, or a broker may have been
        away as Spark asked where.
        """
        if self._new:
            self._new, self._again = False, end
        with plain_errors():
            if start != end == self._again and start == self._initial:
                start = self._begun(end)
        return super().partitions(start, end)

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Return the latest ends that were seen, and what was lost, for the query's progress."""
        if self._latest is None or not self._lost:
            return self._latest
        lost: dict[str, dict[str, int]] = {}
        for ((topic, partition), _), count in sorted(self._lost.items()):
            row = lost.setdefault(topic, {})
            row[str(partition)] = row.get(str(partition), 0) + count
        return {**self._latest, LOST: lost}

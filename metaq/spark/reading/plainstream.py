"""Streaming reads for PySpark 4.0 and 4.1, which do not tell where a micro-batch begins, nor how much it may have.

The reader knows that from its last answer, and after a restart from what Spark says then: it plans the range from the latest
offset of its checkpoint to that offset, before it asks for the next one.
"""

import time
from typing import Any

from pyspark.sql.datasource import InputPartition

from metaq.spark.reading.ranges import Position, encode_position, limited
from metaq.spark.reading.stream import NOWHERE, StreamReader
from metaq.spark.reading.tasks import plain_errors


class PlainStreamReader(StreamReader):
    """A streaming read. A new query is asked for the end of its first micro-batch before it is asked for the beginning."""

    _end: dict[str, Any] | None = None

    def latestOffset(self) -> dict[str, Any]:  # type: ignore[override]
        """Return where the next micro-batch ends, which is where it begins when there is none for now."""
        with plain_errors():
            if self._end is None:
                self._end = self._first_end()
            else:
                self._end = self._next(self._end, least=self.options.min_offsets, most=self.options.max_offsets)
            return self._end

    def initialOffset(self) -> dict[str, Any]:
        """Return where a new query begins. After a restart, Spark asks for that to plan the first batch again."""
        if self._initial is None and self._end is not None:
            with plain_errors():
                self._initial = self._begun(self._end)
        return super().initialOffset()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Return the tasks of a micro-batch."""
        self._end = end
        return super().partitions(start, end)

    def _first_end(self) -> dict[str, Any]:
        """Return the end of a new query's first batch, which is found together with its beginning.

        So ``latest`` is the same place in both, and stays in the checkpoint as the end of an empty batch.
        """
        begins, spans = self._beginning(NOWHERE)
        self._initial = encode_position(begins)
        ends = {key: spans[key].most for key in begins.offsets}
        if self.options.max_offsets is not None:
            ends = limited(begins.offsets, ends, spans, self.options.max_offsets)
        if ends != begins.offsets:
            self._triggered = time.monotonic()
        return encode_position(Position(ends, begins.layout))

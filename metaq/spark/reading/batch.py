"""Batch reads: the messages that are stored when the plan is made."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import DataSourceReader, InputPartition

from metaq.spark.reading.options import ReadOptions
from metaq.spark.reading.planning import named_origin, plan_batch
from metaq.spark.reading.ranges import ANY, Bounds
from metaq.spark.reading.tasks import plain_errors, read_task

if TYPE_CHECKING:
    import pyarrow as pa

PUSHED: Final = frozenset({"topic", "partition", "offset", "timestamp"})
"""Columns whose conditions reduce what is read."""


class BatchReader(DataSourceReader):
    """A batch read of the messages that are stored when the plan is made."""

    def __init__(self, options: ReadOptions) -> None:
        self.options = options
        self.bounds: dict[str, Bounds] = dict.fromkeys(PUSHED, ANY)

    def partitions(self) -> list[InputPartition]:
        """Return the tasks, at least one: for an empty list Spark would make a task of its own."""
        with plain_errors():
            origin = named_origin(self.options)
            try:
                return plan_batch(origin, self.options, self.bounds)
            finally:
                origin.close()

    def read(self, partition: InputPartition) -> Iterator["pa.RecordBatch"]:
        """Return the rows of one task; runs in a worker."""
        return read_task(partition, self.options)

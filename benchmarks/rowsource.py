"""A naive Spark source for comparison: one row per message, decoded in Python, over the same bulk fetches."""

import sys
from collections.abc import Iterator
from datetime import UTC, datetime

from pyspark import cloudpickle
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from metaq.client.consuming.bulk import BulkConnection
from metaq.protocol import record as layout
from metaq.protocol.properties import KEYS, parse
from metaq.protocol.remoting.bulk import UNIT_SIZE, BulkFetch
from metaq.protocol.remoting.headers import Int32
from metaq.spark.source import COLUMNS

Row = tuple[bytes | None, bytes, str, int, int, datetime, int, str | None]
FETCH_BYTES = 8 * 1024 * 1024

# workers cannot import the benchmarks; a module is pickled by its name, a struct of it not at all
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # type: ignore[no-untyped-call]


class Rows(DataSource):
    """The format ``rows``. Options: ``address`` of the broker, ``topic``, and ``ends``, the end of each partition by commas."""

    @classmethod
    def name(cls) -> str:
        return "rows"

    def schema(self) -> str:
        return COLUMNS

    def reader(self, schema: StructType) -> DataSourceReader:
        return Reader(self.options["address"], self.options["topic"], [int(end) for end in self.options["ends"].split(",")])


class Reader(DataSourceReader):
    """A task for each partition."""

    def __init__(self, address: str, topic: str, ends: list[int]) -> None:
        self.address = address
        self.topic = topic
        self.ends = ends

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(number) for number in range(len(self.ends))]

    def read(self, partition: InputPartition) -> Iterator[Row]:
        number, at = partition.value, 0
        with BulkConnection(self.address, 30.0) as connection:
            while at < self.ends[number]:
                bulk = connection.fetch(BulkFetch(self.topic, Int32(number), at, Int32(1 << 20), Int32(FETCH_BYTES)))
                start = 0
                for unit in range(0, len(bulk.units), UNIT_SIZE):
                    size = int.from_bytes(bulk.units[unit + 8 : unit + 12])
                    yield row_of(bulk.records[start : start + size], self.topic, number)
                    start += size
                at = bulk.next


def row_of(record: memoryview, topic: str, partition: int) -> Row:
    """The columns of one message, as the source ``metaq`` has them."""
    head = layout.HEADER.unpack_from(record)
    body_end = layout.HEADER_SIZE + head[-1]
    properties = parse(bytes(record[body_end + 1 + len(topic) + 2 :]).decode())
    key = properties.get(KEYS, "").partition(" ")[0].encode() or None
    body = bytes(record[layout.HEADER_SIZE : body_end])
    stored = datetime.fromtimestamp(head[10] / 1000, UTC)
    return key, body, topic, partition, head[5], stored, 1, properties.get(layout.TAGS)

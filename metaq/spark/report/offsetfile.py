"""Rows of offsets as a Parquet file, for ``metaq.spark.report.history`` and any other reader of Parquet."""

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import BinaryIO, Final

import pyarrow as pa
import pyarrow.parquet as pq

from metaq.protocol.remoting.offsetrows import OffsetRow

_TIME: Final = pa.timestamp("us", "UTC")
SCHEMA: Final = pa.schema(
    [
        pa.field("ts", _TIME, nullable=False),
        pa.field("broker", pa.string(), nullable=False),
        pa.field("group", pa.string(), nullable=False),
        pa.field("kind", pa.string(), nullable=False),
        pa.field("topic", pa.string(), nullable=False),
        pa.field("partition", pa.int32(), nullable=False),
        pa.field("consumed", pa.int64()),
        pa.field("minimum", pa.int64(), nullable=False),
        pa.field("maximum", pa.int64(), nullable=False),
        pa.field("consumed_ts", _TIME),
        pa.field("minimum_ts", _TIME),
        pa.field("maximum_ts", _TIME),
        pa.field("owner", pa.string()),
        pa.field("retention_ms", pa.int64()),
        pa.field("lag", pa.int64()),
        pa.field("in_flight", pa.int64()),
        pa.field("delayed", pa.int64()),
    ]
)
ROW_GROUP: Final = 100_000
"""Rows that are held in memory, about 60 MB."""


def write_parquet(rows: Iterable[OffsetRow], out: BinaryIO) -> int:
    """Write all rows. Return how many there were."""
    count = 0
    with pq.ParquetWriter(out, SCHEMA, compression="zstd") as writer:
        source = iter(rows)
        while portion := list(islice(source, ROW_GROUP)):
            writer.write_table(pa.table(list(map(_column, SCHEMA, zip(*portion, strict=True))), schema=SCHEMA))
            count += len(portion)
    return count


def _column(field: pa.Field, values: Sequence[object]) -> pa.Array:
    if field.type == _TIME:  # rows have milliseconds
        return pa.array(values, pa.timestamp("ms", "UTC")).cast(_TIME)
    return pa.array(values, field.type)

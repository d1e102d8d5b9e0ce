"""A driver that is killed: a streaming query that keeps each batch as one file, whole or not at all.

``python -m tests.spark.restart_driver SERVERS TOPIC FOLDER MOST [now]``; with ``now`` it ends when it has read what is there.
"""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from tests.spark.conftest import QUIET

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def keep(batch: "DataFrame", number: int, folder: Path) -> None:
    """A file of its own for each time that the batch is read, so that a second time can be compared with the first."""
    times = len(list(folder.glob(f"{number:06d}-*.parquet")))
    beside = folder / "unfinished"
    pq.write_table(batch.select("partition", "offset", "value").toArrow(), beside)
    beside.replace(folder / f"{number:06d}-{times}.parquet")


def main() -> None:
    servers, topic, name, most, *now = sys.argv[1:]
    os.environ["PYSPARK_PYTHON"] = sys.executable
    folder = Path(name)
    batches = folder / "batches"
    batches.mkdir(parents=True, exist_ok=True)
    builder = SparkSession.builder.master("local[2]").config("spark.sql.warehouse.dir", str(folder / "warehouse"))
    for key, value in QUIET.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()  # nothing is registered: Spark finds pyspark_metaq
    options = {"metaq.bootstrap.servers": servers, "subscribe": topic, "startingOffsets": "earliest"}
    frame = spark.readStream.format("metaq").options(**options).option("maxOffsetsPerTrigger", most).load()
    writer = frame.writeStream.foreachBatch(lambda batch, number: keep(batch, number, batches))
    writer = writer.option("checkpointLocation", str(folder / "checkpoint"))
    (writer.trigger(availableNow=True) if now else writer).start().awaitTermination()


if __name__ == "__main__":
    main()

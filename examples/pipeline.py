"""Revenue of shops by the minute: topic payments → windowed sums → topic revenue → Parquet.

    metaq topic create payments 4 && metaq topic create revenue 1
    metaq message send payments '{"shop": "north", "cents": 1999, "at": "2026-03-14T09:26:53Z"}'
    metaq message send payments '{"shop": "north", "cents": 500, "at": "2026-03-14T09:30:00Z"}'
    python examples/pipeline.py 127.0.0.1:9876 revenue --once

Two queries, each with a checkpoint of its own. The first writes a window to the topic when no payment of it is expected any
more: two minutes of event time later, which here is what the second payment brings. It can be killed at any moment, and then
may write windows again that it had written. So the second one, whose Parquet files are part of what Spark commits, keeps each
key once: Parquet has each window exactly once.
"""  # noqa: INP001 - a program, in no package

import argparse
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming.query import StreamingQuery

from metaq.spark.session import session

PAYMENT = "shop string, cents bigint, at timestamp"
REVENUE = "shop string, minute timestamp, payments bigint, cents bigint"
MESSAGES_A_BATCH = 250_000
LATE = "2 minutes"
"""How much later than a newer payment one may come and still count."""
REPEATED = "1 hour"
"""How much later than the first one a repeat of a window may come and still be noticed."""


def revenue(payments: DataFrame) -> DataFrame:
    """Sums as messages: key SHOP@MINUTE, value JSON. What is no payment is left out."""
    parsed = (
        payments.select(f.from_json(f.col("value").cast("string"), PAYMENT).alias("p")).select("p.*").where("at is not null")
    )
    minutes = parsed.withWatermark("at", LATE).groupBy("shop", f.window("at", "1 minute").alias("w"))
    sums = minutes.agg(f.count("*").alias("payments"), f.sum("cents").alias("cents"))
    key = f.concat_ws("@", "shop", f.date_format("w.start", "yyyy-MM-dd'T'HH:mm"))
    value = f.to_json(f.struct("shop", f.col("w.start").alias("minute"), "payments", "cents"))
    return sums.select(key.alias("key"), value.alias("value"))


def read(spark: SparkSession, registry: str, topic: str) -> DataFrame:
    """A topic from its beginning; a query with a checkpoint goes on where it was."""
    stream = spark.readStream.format("metaq").option("metaq.bootstrap.servers", registry).option("subscribe", topic)
    return stream.option("startingOffsets", "earliest").option("maxOffsetsPerTrigger", MESSAGES_A_BATCH).load()


def start(sums: DataFrame, folder: Path, name: str, *, once: bool, **options: str) -> StreamingQuery:
    """Start a query that continues until it is stopped, or with ``once`` until it has read what is there."""
    writer = (
        sums.writeStream.queryName(name).option("checkpointLocation", str(folder / "checkpoints" / name)).options(**options)
    )
    writer = writer.format("metaq" if "topic" in options else "parquet").outputMode("append")
    return (writer.trigger(availableNow=True) if once else writer.trigger(processingTime="10 seconds")).start()


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Payments by shop and minute, from topic payments to topic revenue and Parquet."
    )
    parser.add_argument("registry", help="HOST:PORT of a registry, or zk://HOST:PORT")
    parser.add_argument("folder", type=Path, help="where checkpoints and Parquet files go")
    parser.add_argument("--once", action="store_true", help="end when everything that is there now is done")
    given = parser.parse_args()
    spark = session("revenue", settings={"spark.sql.shuffle.partitions": "4"})
    to_topic = {"metaq.bootstrap.servers": given.registry, "topic": "revenue"}
    payments = read(spark, given.registry, "payments")
    first = start(revenue(payments), given.folder, "sums", once=given.once, **to_topic)
    if given.once:
        first.awaitTermination()
    written = read(spark, given.registry, "revenue").withWatermark("timestamp", REPEATED)
    rows = written.dropDuplicatesWithinWatermark(["key"]).select(f.from_json(f.col("value").cast("string"), REVENUE).alias("r"))
    second = start(rows.select("r.*"), given.folder, "files", once=given.once, path=str(given.folder / "parquet"))
    if given.once:
        second.awaitTermination()
    else:
        spark.streams.awaitAnyTermination()


if __name__ == "__main__":
    main()

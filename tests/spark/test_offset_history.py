"""The history that Spark's reports are made of: what brokers record of their groups, and what is exported of it."""

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from metaq.client import connect
from metaq.message import HISTORY_TOPIC
from metaq.protocol.remoting.offsetrows import OffsetRow
from metaq.spark.report.history import SCHEMA, read_files, read_topic
from tests.support.admin import connect as connect_remoting
from tests.support.admin import create_topic, send
from tests.support.broker import BrokerProcess, wait_until
from tests.support.cli import Cli
from tests.support.consumer import Consumer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.partner("java")

DEADLINE_S: Final = 60.0
RECORDS: Final = 3
TIMES: Final = ("ts", "consumed_ts", "minimum_ts", "maximum_ts")


def rows_of(history: "DataFrame") -> list[OffsetRow]:
    """In the order of the export, with times in milliseconds."""
    from pyspark.sql import functions as f

    numbers = [f.unix_millis(name).alias(name) if name in TIMES else f.col(name) for name in SCHEMA.fieldNames()]
    return sorted((OffsetRow(*row) for row in history.select(numbers).collect()), key=order)


def order(row: OffsetRow) -> tuple[object, ...]:
    return row.ts, row.kind, row.group, row.topic, row.partition


def test_the_history_as_spark_reads_it(spark: "SparkSession", tmp_path: Path) -> None:
    """SG-055, SG-067: from the topic, from Parquet and from JSON lines: the same rows, none missing, none changed."""
    flags = ("--offset-export-interval-ms", "200")
    with BrokerProcess(tmp_path / "data", *flags) as broker, connect(broker.registry) as client:
        with connect_remoting(broker) as admin, Consumer(broker, "billing") as consumer:
            create_topic(admin, "orders", write=3, read=3)
            send(admin, "orders", b"a", b"b", b"c", partition=1)
            consumer.commit("orders", 2, partition=1)
        export = client.admin().offset_export()

        def recorded() -> list[OffsetRow]:
            return list(export.history(datetime.fromtimestamp(0, UTC)))

        wait_until(lambda: len({row.ts for row in recorded()}) >= RECORDS, DEADLINE_S, f"{RECORDS} records")
        broker.terminate()
        broker.flags = ("--offset-export-interval-ms", "0")
        broker.restart(same_port=True)
        expected = sorted(recorded(), key=order)
        assert len(expected) >= 3 * RECORDS
        assert rows_of(read_topic(spark, broker.registry, HISTORY_TOPIC)) == expected
        cli, files = Cli(broker.registry), [tmp_path / "history.parquet", tmp_path / "history.jsonl"]
        for file, form in zip(files, ("parquet", "jsonl"), strict=True):
            cli.run("offsets", "export", "--from", "1h", "--format", form, "--out", str(file))
            assert rows_of(read_files(spark, str(file))) == expected

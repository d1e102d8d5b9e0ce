"""The history that Spark's reports are made of: what brokers record of their groups, and what is exported of it."""

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from metaq.client import connect
from metaq.message import HISTORY_TOPIC
from metaq.protocol.remoting.offsetrows import OffsetRow
from metaq.spark.login import NOBODY
from metaq.spark.reading.limitedstream import LimitedStreamReader
from metaq.spark.reading.options import read_options
from metaq.spark.reading.tasks import Task
from metaq.spark.report.history import SCHEMA, _options, read_files, read_topic
from tests.spark.topics import clients
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


def test_samples_that_are_gone_do_not_stop_a_report(tmp_path: Path) -> None:
    """MQ-116: it goes on with those that are kept, however long it did not run."""
    with BrokerProcess(tmp_path / "data") as broker, clients(broker) as (client, text):

        def record(count: int) -> None:
            client.admin().create_topic("samples", 1)
            text.put_many("samples", [b"{}"] * count, partition=0)

        record(5)
        options = {**_options(broker.registry, "samples", NOBODY), "startingOffsets": "earliest"}
        readers = [LimitedStreamReader(lambda: read_options(options)) for _ in range(2)]
        start = readers[0].initialOffset()
        client.admin().delete_topic("samples")
        record(4)
        (task,) = readers[1].partitions(start, readers[1].latestOffset(start, ReadAllAvailable()))
        assert isinstance(task, Task)
        assert [part.range[1:] for part in task.parts] == [(5, 9)]
        for reader in readers:
            assert reader._connected is not None
            reader._connected.close()


@pytest.mark.slow
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

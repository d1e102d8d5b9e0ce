"""The required speed of the Spark source: beside Parquet, a source that decodes row by row, and its own reads from disk."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import metaq as client_library
from benchmarks.bench import Bench
from benchmarks.figures import Check, MeasurementError, Spread, ratio, spread
from benchmarks.peers import Level, Server, metaq
from benchmarks.programs import LoadPlan, run_load
from benchmarks.report import Report, Table, number, of_rounds

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROUNDS = 5
BODY_BYTES = 100
PARTITIONS = 4
PUTS_A_SECOND = 50_000
LEAST_OF_PACE = 0.95
"""A load that reaches less of the rate that it was to keep was no such load."""

PARQUET, SOURCE, ROWS, DISK = "Parquet", "metaq", "row by row", "metaq, straight from disk"
WRITE = "metaq, written from Parquet"
TOPIC, WRITTEN, STREAMED = "read", "written", "bench"
SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.log.level": "ERROR",
    "spark.driver.memory": "2g",
    "spark.sql.streaming.numRecentProgressUpdates": "10000",
}
Rates = Mapping[str, Sequence[float]]
"""Rows a second of each round, by what was measured."""


def run(bench: Bench) -> Report:
    rounds, messages = bench.rounds(ROUNDS), 200_000 if bench.quick else 4_000_000
    seconds = 5.0 if bench.quick else 20.0
    rates: defaultdict[str, list[float]] = defaultdict(list)
    behind: list[float] = []
    system = metaq(Level.MEMORY)
    if bench.usable(system):
        with bench.fresh_folder() as folder, system.running(folder / "server") as server, spark_session(folder) as spark:
            tables = bench.attempt("messages to read", lambda: fill(spark, server, folder, messages))
            for turn in range(1, rounds + 1 if tables else 1):
                for name, frame in (tables or {}).items():
                    rate = bench.attempt(f"{name}, round {turn}", partial(rows_a_second, frame, messages))
                    rates[name] += [] if rate is None else [rate]
                    bench.console.print(f"{name}: {number(rate)} rows/s", highlight=False)
                late = bench.attempt(f"stream, round {turn}", lambda: seconds_behind(spark, server, folder, seconds))
                behind += [] if late is None else [late]
    settings = {
        "rounds": f"{rounds} in turn; figures are medians, ratios those of two medians",
        "Spark": f"local[*], heap {SETTINGS['spark.driver.memory']}",
        "read": f"{messages:,} messages of {BODY_BYTES} B with a key in {PARTITIONS} partitions, all columns, into noop",
        "Parquet": "the same rows and columns, not compressed",
        "row by row": "the same bulk fetches, verified by the broker; tuples made in Python",
        "stream": f"{PUTS_A_SECOND:,} puts of {BODY_BYTES} B a second for {seconds} s; how much longer the query needs",
    }
    cells = [{"what": name, "rows_per_second": found} for name, found in rates.items()]
    return Report("spark", settings, [table(rates, behind)], checks(rates, behind), cells, bench.notes, bench.failures)


def checks(rates: Rates, behind: Sequence[float]) -> list[Check]:
    found: dict[str, Spread | None] = {name: spread(rates.get(name, ())) for name in (PARQUET, SOURCE, ROWS, DISK, WRITE)}
    written = found[WRITE]
    late = spread(behind)
    return [
        Check("batch read: of the same rows from Parquet", ratio(found[SOURCE], found[PARQUET]), "at least", 0.4, 0.6),
        Check("batch read: of a source that decodes row by row", ratio(found[SOURCE], found[ROWS]), "at least", 2.0),
        Check("straight from disk: of the same rows from Parquet", ratio(found[DISK], found[PARQUET]), "at least", 0.55, 0.8),
        Check("write from Parquet", written.median if written else None, "at least", 200_000, 400_000, "rows/s"),
        Check(
            f"stream of {PUTS_A_SECOND:,} puts/s: behind at the end", late.median if late else None, "at most", 3.0, unit="s"
        ),
    ]


def table(rates: Rates, behind: Sequence[float]) -> Table:
    base = spread(rates.get(PARQUET, ()))
    rows = []
    for name in (PARQUET, SOURCE, DISK, ROWS, WRITE):
        rate = spread(rates.get(name, ()))
        rows.append([name, of_rounds(rate), number(ratio(rate, base), 2)])
    return Table("Spark", ["", "rows/s", "of Parquet"], [*rows, ["stream, seconds behind", of_rounds(spread(behind), 1), "-"]])


@contextmanager
def spark_session(folder: Path) -> Iterator["SparkSession"]:
    """One for all rounds: its first job costs seconds."""
    from benchmarks.rowsource import Rows  # noqa: PLC0415 - half a second that other suites do not need
    from metaq.spark.session import session  # noqa: PLC0415

    spark = session("benchmarks", settings={**SETTINGS, "spark.local.dir": str(folder)})
    spark.dataSource.register(Rows)
    try:
        yield spark
    finally:
        spark.stop()


def fill(spark: "SparkSession", server: Server, folder: Path, messages: int) -> dict[str, Callable[[], "DataFrame | None"]]:
    """Store the messages, and the same rows as Parquet; what reads each of them, and what writes them anew."""
    registry = f"127.0.0.1:{server.registry_port}"
    with client_library.connect(registry) as client:
        for topic in (TOPIC, WRITTEN):
            client.admin().create_topic(topic, PARTITIONS)
        (broker,) = client.admin().masters()
        columns = ("concat('key', id % 1000) key", f"lpad(string(id), {BODY_BYTES}, 'x') value")
        made = str(folder / "made")
        spark.range(messages).selectExpr(*columns).write.parquet(made)
        write(spark.read.parquet(made), registry, TOPIC)
        ends = ",".join(str(queue.end) for queue in client.admin().queues(TOPIC))
    same = str(folder / "same")
    reader(spark, "metaq", {"metaq.bootstrap.servers": registry}).write.option("compression", "none").parquet(same)
    remote = {"address": broker.address, "topic": TOPIC, "ends": ends}
    return {
        PARQUET: lambda: spark.read.parquet(same),
        SOURCE: lambda: reader(spark, "metaq", {"metaq.bootstrap.servers": registry}),
        DISK: lambda: reader(spark, "metaq", {"path": str(folder / "server" / "data")}),
        ROWS: lambda: spark.read.format("rows").options(**remote).load(),
        WRITE: lambda: write(spark.read.parquet(made), registry, WRITTEN),
    }


def reader(spark: "SparkSession", source: str, options: Mapping[str, str]) -> "DataFrame":
    return spark.read.format(source).options(subscribe=TOPIC, **options).load()


def write(rows: "DataFrame", registry: str, topic: str) -> None:
    rows.write.format("metaq").option("metaq.bootstrap.servers", registry).option("topic", topic).mode("append").save()


def rows_a_second(make: Callable[[], "DataFrame | None"], messages: int) -> float:
    """Rows a second from planning until all rows are there; a frame is read into nothing."""
    from pyspark.errors import PySparkException  # noqa: PLC0415

    begun = time.monotonic()
    try:
        frame = make()
        if frame is not None:
            frame.write.format("noop").mode("overwrite").save()
    except PySparkException as error:
        raise MeasurementError(str(error)[-2000:]) from error
    return messages / (time.monotonic() - begun)


def seconds_behind(spark: "SparkSession", server: Server, folder: Path, seconds: float) -> float:
    """How long a stream needs after the last of many puts until it has all messages."""
    registry = f"127.0.0.1:{server.registry_port}"
    with client_library.connect(registry) as client:

        def stored() -> int:
            return sum(queue.end for queue in client.admin().queues(STREAMED))

        run_load("metaq-put", server.port, LoadPlan(1, 1, BODY_BYTES, 0.1, 0.0))  # makes the topic, which has to be there
        options = {"metaq.bootstrap.servers": registry, "subscribe": STREAMED, "startingOffsets": "latest"}
        stream = spark.readStream.format("metaq").options(**options).load()
        checkpoint = str(folder / f"checkpoint-{time.monotonic_ns()}")
        query = stream.writeStream.format("noop").option("checkpointLocation", checkpoint).start()
        try:
            _await(lambda: query.lastProgress is not None, 60.0, "the query runs")
            before = stored()
            plan = LoadPlan(4, 100, BODY_BYTES, seconds, 0.0, rate=PUTS_A_SECOND)
            load = run_load("metaq-put", server.port, plan)
            ended = time.monotonic()
            if load.messages_per_second < LEAST_OF_PACE * PUTS_A_SECOND:
                raise MeasurementError(f"only {load.messages_per_second:,.0f} puts/s were made")
            wanted = stored() - before

            def done() -> bool:
                return sum(int(progress["numInputRows"]) for progress in query.recentProgress) >= wanted

            _await(done, 120.0, f"the query has {wanted:,} messages")
            return time.monotonic() - ended
        finally:
            query.stop()


def _await(condition: Callable[[], bool], seconds: float, what: str) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > limit:
            raise MeasurementError(f"not within {seconds} s: {what}")
        time.sleep(0.05)

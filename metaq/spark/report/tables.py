"""The tables of the offset report, made from a history of offsets and written as Parquet.

========== ==================================================================================================================
table      a row for
========== ==================================================================================================================
series     each partition of each group, and each bucket of time: offsets at its last sample, ``lag``, ``lag_s``,
           ``consumed_per_s``, ``produced_per_s``
over_time  each group, topic and bucket of time: the same
partitions each partition of each group, at its last sample
groups     each group and topic, likewise; ``gini`` of the lag over partitions: 0 for even, near 1 for all in one;
           ``retention_used``: the age of the next message, as a share of the age at which messages are deleted; ``kept``: the
           messages in the topic. Topics without a group are of the kind ``topic``, here and in all tables, and have no lag
members    each owner in a group and topic
topics     each partition of each topic: its ``messages`` in the last day, and their ``gini``, ``median``, ``largest`` and
           ``total`` over the topic
========== ==================================================================================================================

``lag`` counts messages; ``in_flight`` and ``delayed`` are those of them that consumers lease, and that were given back with a
delay, null for groups that do not lease messages. ``finished`` is ``maximum`` less ``lag``: for others the same as
``consumed``. ``lag_s`` is the age of the next one, in seconds. Rates are messages a second, ``_per_s``. ``drain_s``: time until
the lag is gone, null for never. ``waiting_s``: how long there have been messages that are not delayed and the group has not
finished any. ``unowned_s``: how long the partition has had no owner; 0 where messages are leased. ``runway_s``: time until
retention deletes messages that the group has not consumed, null for never. ``lost``: messages that it has already deleted so.

A sample each minute for weeks makes millions of rows. They are only read, never sorted: three passes aggregate them by hash
(into buckets, into rates of the last hour, and into the time since a group has moved). The aggregates are over numbers only,
because Spark sorts all rows for an aggregate of strings. Everything else is computed from the first tables, which are small.
"""

import statistics
from collections.abc import Callable
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as f

from metaq.errors import ConfigError
from metaq.spark.report.history import SERIES

MOST_BUCKETS: Final = 300
USUAL_INTERVAL_S: Final = 60.0
"""The time between two samples of a history that has only one."""
WIDTHS_S: Final = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200, 86_400)
RATES_S: Final = 3600
"""Current rates are those of the last hour."""
SKEW_S: Final = 86_400
"""Skew is that of the last day's messages."""
LATE: Final = 1.02
"""Samples come some milliseconds later each time. Up to this share a bucket may be narrower than they are apart: once in a
while it has none, but buckets of twice the width would lose every other sample."""
GAP_SAMPLES: Final = 5
"""A pause between samples of at least this many intervals is a gap."""
CURRENT_SAMPLES: Final = 3
"""A series whose last sample is older than this many intervals has ended: its group or topic was deleted."""

_NUMBERS: Final = ["consumed", "minimum", "maximum", "consumed_ts", "retention_ms", "lag", "in_flight", "delayed", "finished"]
_GROUP: Final = ["group", "kind", "topic"]


class ExportGap(NamedTuple):
    """A time in which a broker exported no offsets."""

    broker: str
    since: datetime
    until: datetime


class Sampling(NamedTuple):
    """The times at which samples were taken."""

    first: datetime
    last: datetime
    interval_s: float
    """Time between two samples."""
    width_s: int
    """Width of a bucket of time in the tables."""
    gaps: list[ExportGap]


def sample_times(history: DataFrame) -> Sampling:
    """Return the times at which samples were taken; ``ConfigError`` when there are none."""
    times: dict[str, list[datetime]] = {}
    # all rows of one sample of a broker have the same time
    for row in history.select("broker", "ts").distinct().orderBy("ts").toArrow().to_pylist():
        times.setdefault(row["broker"], []).append(row["ts"])
    if not times:
        raise ConfigError(
            "the history has no samples; check that offset_export_interval_ms is set and that this time has passed once"
        )
    first, last = min(of_broker[0] for of_broker in times.values()), max(of_broker[-1] for of_broker in times.values())
    pauses = [pause for of_broker in times.values() for pause in _pauses(of_broker)]
    interval_s = statistics.median(pauses) if pauses else USUAL_INTERVAL_S
    width_s = width_for((last - first).total_seconds(), interval_s)
    gaps = [gap for broker, of_broker in times.items() for gap in _gaps(broker, [*of_broker, last], interval_s)]
    return Sampling(first, last, interval_s, width_s, gaps)


def width_for(span_s: float, interval_s: float) -> int:
    """Return the width of a bucket for a history of this length: as fine as its samples, and at most ``MOST_BUCKETS``."""
    least_s = max(interval_s / LATE, span_s / MOST_BUCKETS)
    return next((width for width in WIDTHS_S if width >= least_s), WIDTHS_S[-1])


def _pauses(times: list[datetime]) -> list[float]:
    return [(after - before).total_seconds() for before, after in pairwise(times)]


def _gaps(broker: str, times: list[datetime], interval_s: float) -> list[ExportGap]:
    return [
        ExportGap(broker, *pair) for pair in pairwise(times) if (pair[1] - pair[0]).total_seconds() >= GAP_SAMPLES * interval_s
    ]


def write_tables(history: DataFrame, sampling: Sampling, out: Path, written: Callable[[], None]) -> None:
    """Write each table as a folder ``NAME.parquet`` in ``out``, replacing an earlier one. Call ``written`` after each."""
    spark = history.sparkSession
    # Spark's default is a format of 96 bits that other programs read as local time
    spark.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")

    def write(name: str, table: DataFrame) -> DataFrame:
        """Write a table and return it as read back, so the tables made from it compute nothing twice."""
        path = str(out / f"{name}.parquet")
        table.write.mode("overwrite").parquet(path)
        written()
        return spark.read.schema(table.schema).parquet(path)

    history = history.where(f.col("ts").isNotNull() & f.col("maximum").isNotNull())
    history = history.withColumn("finished", f.coalesce(f.col("maximum") - f.col("lag"), f.col("consumed")))
    series = write("series", _with_rates(_buckets(history, sampling.width_s)))
    write("over_time", _over_time(series))
    partitions = write("partitions", _partitions(history, series, sampling))
    write("groups", _groups(partitions))
    write("members", _members(partitions))
    write("topics", _topics(series, sampling.last - timedelta(seconds=SKEW_S)))


def _seconds(later: Column, earlier: Column) -> Column:
    return (f.unix_micros(later) - f.unix_micros(earlier)) / 1e6


def _latest(*names: str) -> list[Column]:
    return [f.max_by(name, "ts").alias(name) for name in names]


def _lags() -> dict[str, Column]:
    # a group that leases messages finishes them in any order
    lag = f.coalesce(f.col("lag"), _not_below_0(f.col("maximum") - f.col("consumed")))
    age = _not_below_0(_seconds(f.col("ts"), f.col("consumed_ts")))
    return {"lag": lag, "lag_s": f.when(lag == 0, 0.0).otherwise(age)}


def _not_below_0(value: Column) -> Column:
    # `greatest` alone makes 0 of null
    return f.when(value.isNotNull(), f.greatest(value, f.lit(0)))


def _buckets(history: DataFrame, width_s: int) -> DataFrame:
    at = (f.floor(f.unix_seconds("ts") / width_s) * width_s).cast("timestamp").alias("at")
    return history.groupBy(*SERIES, at).agg(*_latest(*_NUMBERS), f.max("ts").alias("ts")).withColumns(_lags())


def _with_rates(buckets: DataFrame) -> DataFrame:
    order = Window.partitionBy(*SERIES).orderBy("at")
    passed_s = _seconds(f.col("ts"), f.lag("ts").over(order))

    def rate(offset: str) -> Column:
        # when a group's offset was set back, its rate is 0
        return _not_below_0((f.col(offset) - f.lag(offset).over(order)) / passed_s)

    return buckets.withColumns({"consumed_per_s": rate("finished"), "produced_per_s": rate("maximum")})


def _over_time(series: DataFrame) -> DataFrame:
    sums = [f.sum(name).alias(name) for name in ("lag", "consumed_per_s", "produced_per_s")]
    return series.groupBy("at", *_GROUP).agg(*sums, f.max("lag_s").alias("lag_s"))


def _partitions(history: DataFrame, series: DataFrame, sampling: Sampling) -> DataFrame:
    ended = sampling.last - timedelta(seconds=CURRENT_SAMPLES * sampling.interval_s)
    last = series.groupBy(*SERIES).agg(*_latest(*_NUMBERS), f.max("ts").alias("ts"), _deleted_per_s())
    last = last.where(f.col("ts") >= f.lit(ended)).withColumns(_lags())
    rates = _rates(history.where(f.col("ts") >= f.lit(sampling.last - timedelta(seconds=RATES_S))))
    joined = last.join(rates, SERIES, "left").join(_standing(history, last), SERIES, "left")
    gain = f.col("consumed_per_s") - f.col("produced_per_s")
    return joined.withColumns(
        {
            "drain_s": f.when(f.col("lag") == 0, 0.0).when(gain > 0, f.col("lag") / gain),
            "runway_s": _runway_s(),
            "lost": _not_below_0(f.col("minimum") - f.col("consumed")),
        }
    ).drop("deleted_per_s", "time_rate")


def _deleted_per_s() -> Column:
    passed_s = _seconds(f.max("ts"), f.min("ts"))
    return f.when(passed_s > 0, (f.max("minimum") - f.min("minimum")) / passed_s).alias("deleted_per_s")


def _rates(recent: DataFrame) -> DataFrame:
    """Return the rates of the last hour.

    ``time_rate`` is how many seconds of messages were consumed in a second: at 1, the distance to retention stays the same.
    """
    # a group that has consumed everything has reached the present
    reached = f.coalesce(f.col("consumed_ts"), f.when(f.col("consumed") >= f.col("maximum"), f.col("ts")))
    passed_s = _seconds(f.max("ts"), f.min("ts"))

    def rate(offset: str) -> Column:
        grown = f.max_by(offset, "ts") - f.min_by(offset, "ts")
        return f.when(passed_s > 0, _not_below_0(grown / passed_s))

    return (
        recent.withColumn("reached", reached)
        .groupBy(*SERIES)
        .agg(
            rate("finished").alias("consumed_per_s"),
            rate("maximum").alias("produced_per_s"),
            f.when(passed_s > 0, _seconds(f.max_by("reached", "ts"), f.min_by("reached", "ts")) / passed_s).alias("time_rate"),
        )
    )


def _runway_s() -> Column:
    """Return the time until retention reaches the group.

    It is computed by age where that is known, else by how fast messages were deleted so far, which goes in steps of a file.
    """
    kept_s = f.col("retention_ms") / 1000 - f.col("lag_s")
    by_age = f.when(f.col("time_rate") < 1, _not_below_0(kept_s) / (1 - f.col("time_rate")))
    closing = f.col("deleted_per_s") - f.col("consumed_per_s")
    by_count = f.when(closing > 0, _not_below_0(f.col("consumed") - f.col("minimum")) / closing)
    has_age = kept_s.isNotNull() & f.col("time_rate").isNotNull()
    return f.when(f.col("lag") > 0, f.when(has_age, by_age).otherwise(by_count))


def _standing(history: DataFrame, last: DataFrame) -> DataFrame:
    """Return how long each series has been as at its last sample, and who owned it then."""
    ends = f.broadcast(last.select(*SERIES, f.col("finished").alias("last_finished"), f.col("ts").alias("last_ts")))
    joined = history.join(ends, SERIES)
    delayed = f.coalesce(f.col("delayed"), f.lit(0))  # nobody can consume these yet
    moved = (f.col("finished") != f.col("last_finished")) | (f.col("finished") + delayed >= f.col("maximum"))
    owned = f.col("owner").isNotNull() | f.col("lag").isNotNull()  # who leases messages owns no partition
    started = f.min("ts")
    last_ts = f.max("last_ts")
    standing = joined.groupBy(*SERIES).agg(
        _seconds(last_ts, f.coalesce(f.max(f.when(moved, f.col("ts"))), started)).alias("waiting_s"),
        _seconds(last_ts, f.coalesce(f.max(f.when(owned, f.col("ts"))), started)).alias("unowned_s"),
    )
    owners = joined.where("ts = last_ts").select(*SERIES, "owner").dropDuplicates(SERIES)
    return standing.join(owners, SERIES)


def _groups(partitions: DataFrame) -> DataFrame:
    ranked = partitions.withColumn("rank", f.row_number().over(Window.partitionBy(*_GROUP).orderBy(f.asc_nulls_last("lag"))))
    sized = ranked.withColumn("size", f.count("lag").over(Window.partitionBy(*_GROUP)))
    share = (2 * f.col("rank") - f.col("size") - 1) * f.col("lag")
    gain = f.col("consumed_per_s") - f.col("produced_per_s")
    return (
        sized.groupBy(*_GROUP)
        .agg(
            f.count("partition").alias("partitions"),
            f.count_distinct("owner").alias("owners"),
            f.count("owner").alias("owned"),
            *(f.sum(name).alias(name) for name in ("lag", "in_flight", "delayed")),
            *(f.sum(name).alias(name) for name in ("consumed_per_s", "produced_per_s", "lost")),
            *(f.max(name).alias(name) for name in ("lag_s", "waiting_s")),
            f.sum(f.col("maximum") - f.col("minimum")).alias("kept"),
            f.min("runway_s").alias("runway_s"),
            f.max(f.col("lag_s") * 1000 / f.col("retention_ms")).alias("retention_used"),
            f.when(f.sum("lag") > 0, f.sum(share) / (f.max("size") * f.sum("lag"))).alias("gini"),
        )
        .withColumn("drain_s", f.when(f.col("lag") == 0, 0.0).when(gain > 0, f.col("lag") / gain))
    )


def _members(partitions: DataFrame) -> DataFrame:
    sums = [f.sum(name).alias(name) for name in ("lag", "consumed_per_s")]
    return partitions.groupBy(*_GROUP, "owner").agg(f.count("partition").alias("partitions"), *sums)


def _topics(series: DataFrame, since: datetime) -> DataFrame:
    place = ["topic", "broker", "partition"]
    grown = (f.max("maximum") - f.min("maximum")).alias("messages")
    counted = series.where(f.col("at") >= f.lit(since)).groupBy(*place).agg(grown)
    topic = Window.partitionBy("topic")
    ranked = counted.withColumns(
        {
            "rank": f.row_number().over(topic.orderBy("messages")),
            "size": f.count("messages").over(topic),
            "total": f.sum("messages").over(topic),
        }
    )
    share = f.sum((2 * f.col("rank") - f.col("size") - 1) * f.col("messages")).over(topic)
    return ranked.withColumns(
        {
            "gini": f.when(f.col("total") > 0, share / (f.col("size") * f.col("total"))),
            "median": f.percentile("messages", 0.5).over(topic),
            "largest": f.max("messages").over(topic),
        }
    ).drop("rank")

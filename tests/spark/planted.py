"""A history of offsets with known problems: four are planted among healthy groups with noise.

========= ======== ========== =============================================================================================
group     topic    partitions what it does
========= ======== ========== =============================================================================================
billing   orders   8          healthy, but partition 3 has not moved for 90 minutes, though its consumer is there
shipping  orders   8          healthy; one partition is without owner in the last sample, as while a group rebalances
mailer    parcels  6          healthy, but nobody has owned partition 4 for 70 minutes
analytics clicks   12         healthy; producers send most of the topic to partition 5
archive   audit    4          reads half as fast as the topic grows; retention reaches it two hours after the end
ledger    payments 4          healthy; a MetaQ group
probe     payments 4          healthy; a group of the text protocol, so nobody owns anything
sleeper   quiet    2          has everything; nothing has been sent for hours
========= ======== ========== =============================================================================================
"""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

Array = npt.NDArray[Any]

END: Final = datetime(2026, 3, 14, 18, 0, tzinfo=UTC)
BROKER: Final = "east"
SAMPLE_S: Final = 60
STUCK_S: Final = 90 * 60
UNOWNED_S: Final = 70 * 60
RISK_S: Final = 2 * 3600
RETENTION_S: Final = 72 * 3600

SCHEMA: Final = pa.schema(
    [
        ("ts", pa.timestamp("us", "UTC")),
        ("broker", pa.string()),
        ("group", pa.string()),
        ("kind", pa.string()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("consumed", pa.int64()),
        ("minimum", pa.int64()),
        ("maximum", pa.int64()),
        ("consumed_ts", pa.timestamp("us", "UTC")),
        ("minimum_ts", pa.timestamp("us", "UTC")),
        ("maximum_ts", pa.timestamp("us", "UTC")),
        ("owner", pa.string()),
        ("retention_ms", pa.int64()),
    ]
)


class Topic(NamedTuple):
    """A topic's producers: the mean messages per second of each partition, and when they stop."""

    name: str
    rates: list[float]
    retention_s: float = RETENTION_S
    silent_s: float = 0.0
    """Nothing was sent in so many seconds before the end."""


class Log:
    """One partition: how much is in it at a second, and when an offset was stored."""

    def __init__(self, topic: Topic, rate: float, seconds: Array, random: np.random.Generator) -> None:
        """``seconds``: of the samples, the last is 0."""
        # long before the first sample, so that consumers have something to be behind with
        self._grid = np.arange(seconds[0] - 12 * 3600, 1.0, SAMPLE_S)
        sent = random.poisson(rate * SAMPLE_S, len(self._grid)) * (self._grid <= -topic.silent_s)
        self._total = 1_000_000 + np.cumsum(sent).astype(float)
        self.retention_s = topic.retention_s

    def end(self, at: Array) -> Array:
        total: Array = np.floor(np.interp(at, self._grid, self._total))
        return total

    def stored(self, offsets: Array) -> Array:
        # an offset that several seconds share, as in a pause, was stored at the first of them
        total, first = np.unique(self._total, return_index=True)
        return np.interp(offsets, total, self._grid[first])

    def begin(self, at: Array) -> Array:
        """Retention deletes files of an hour."""
        return self.end(np.floor((at - self.retention_s) / 3600) * 3600)


class Reading(NamedTuple):
    """The progress of a group in a partition."""

    group: str
    kind: str
    topic: str
    partition: int
    log: Log
    consumed: Array
    owners: list[str | None]


def _columns(reading: Reading, seconds: Array, end: datetime) -> pa.Table:
    log, count, end_us = reading.log, len(seconds), int(end.timestamp() * 1e6)
    minimum, maximum = log.begin(seconds), log.end(seconds)

    def times(offsets: Array, known: Array) -> pa.Array:
        stored = end_us + (log.stored(offsets) * 1e6).astype("int64")
        return pa.array(stored, pa.int64(), mask=~known).cast(pa.timestamp("us", "UTC"))

    everywhere = np.ones(count, bool)
    columns = [
        pa.array(end_us + (seconds * 1e6).astype("int64")).cast(pa.timestamp("us", "UTC")),
        *([value] * count for value in (BROKER, reading.group, reading.kind, reading.topic, reading.partition)),
        *(offsets.astype("int64") for offsets in (reading.consumed, minimum, maximum)),
        times(reading.consumed, reading.consumed < maximum),
        times(minimum, everywhere),
        times(maximum - 1, everywhere),
        reading.owners,
        [int(log.retention_s * 1000)] * count,
    ]
    return pa.table(columns, schema=SCHEMA)


def _healthy(log: Log, seconds: Array, random: np.random.Generator) -> Array:
    """A few seconds behind, never back."""
    return np.maximum.accumulate(log.end(seconds - random.gamma(2.0, 3.0, len(seconds))))


def _readings(seconds: Array, random: np.random.Generator) -> Iterator[Reading]:
    topics = [
        Topic("orders", [20.0] * 8),
        Topic("parcels", [3.0] * 6),
        Topic("clicks", [8.0, 7, 9, 8, 8, 130, 7, 8, 9, 8, 7, 8]),
        Topic("audit", [5.0] * 4, retention_s=6 * 3600),
        Topic("payments", [0.2] * 4),
        Topic("quiet", [1.0] * 2, silent_s=5 * 3600),
    ]
    logs = {
        (topic.name, partition): Log(topic, rate, seconds, random)
        for topic in topics
        for partition, rate in enumerate(topic.rates)
    }
    groups = [
        ("billing", "remoting", "orders", 3),
        ("shipping", "remoting", "orders", 2),
        ("mailer", "remoting", "parcels", 3),
        ("analytics", "remoting", "clicks", 4),
        ("archive", "remoting", "audit", 2),
        ("ledger", "zookeeper", "payments", 2),
        ("probe", "observed", "payments", 0),
        ("sleeper", "remoting", "quiet", 1),
    ]
    for group, kind, topic_name, members in groups:
        for (name, partition), log in logs.items():
            if name != topic_name:
                continue
            consumed = _healthy(log, seconds, random)
            owners: list[str | None] = [f"{group}-{partition % members}" if members else None] * len(seconds)
            if (group, partition) == ("billing", 3):
                consumed = np.where(seconds > -STUCK_S, log.end(np.array(-STUCK_S)), consumed)
            if (group, partition) == ("mailer", 4):
                consumed = np.where(seconds > -UNOWNED_S, log.end(np.array(-UNOWNED_S)), consumed)
                owners = [None if second > -UNOWNED_S else owner for second, owner in zip(seconds, owners, strict=True)]
            if (group, partition) == ("shipping", 6):
                owners[-1] = None
            if group == "archive":
                # half a second of messages in a second; at the end the next one has RISK_S / 2 to live
                consumed = log.end(np.minimum(seconds, RISK_S / 2 - log.retention_s + 0.5 * seconds))
            yield Reading(group, kind, topic_name, partition, log, consumed, owners)


def planted(*, minutes: int = 360, end: datetime = END, seed: int = 1) -> pa.Table:
    """A sample a minute of so many minutes, the last at ``end``."""
    random = np.random.default_rng(seed)
    seconds = np.arange(-minutes * SAMPLE_S, 1, SAMPLE_S).astype(float)
    return pa.concat_tables([_columns(reading, seconds, end) for reading in _readings(seconds, random)])


def plant(folder: Path, *, minutes: int = 360, seed: int = 1) -> Path:
    """The history as a Parquet file in ``folder``."""
    path = folder / "history.parquet"
    pq.write_table(planted(minutes=minutes, seed=seed), path)
    return path

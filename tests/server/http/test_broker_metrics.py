"""The findings of a scrape, which runs in steps so that others may go on in between, and leaves out what fails."""

import gc
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, Final, cast

import pytest

from metaq.engine.context import Context
from metaq.engine.figures.counters import Counters
from metaq.engine.figures.history import History
from metaq.engine.figures.metrics import Family, Metric
from metaq.engine.figures.statistics import Statistics
from metaq.engine.offsets.offsetexport import OffsetExporter
from metaq.engine.reading.hold import Holds
from metaq.engine.role import NoReplicas
from metaq.engine.tables.observed import Observed
from metaq.engine.tables.offsets import OffsetTable
from metaq.errors import DiskFailed
from metaq.message import TopicPartition
from metaq.protocol.text.commands import Get
from metaq.server.http import metrics
from metaq.server.http.brokermetrics import BrokerMetrics
from metaq.store.files.disk import RealDisk
from metaq.store.files.filecache import FileCache, run_here
from metaq.store.queues.consumequeue import ConsumeQueue
from tests.support.manualclock import ManualClock

GROUPS: Final = 40
PARTITIONS: Final = 128
MOST_STEPS: Final = 4 * PARTITIONS
"""Lines of Python from one rest to the next: what was put to the partitions of one topic is summed up at once, some 0.1 ms for
a thousand. There are ten times as many pairs of group and partition, and sessions."""


class Store:
    """Partitions whose messages are as old as their place; one may be damaged."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.queues: dict[TopicPartition, ConsumeQueue] = {}
        self.log = SimpleNamespace(begin=0, end=500, segments=())
        self.durable_end, self.messages_put, self.syncs = 500, 0, 0
        self.indexing = SimpleNamespace(behind=0, paused=None, index=SimpleNamespace(files=(), damaged=0))
        self.reader = self
        self.damaged = 0
        self.broken: set[int] = set()
        self.disk = self
        self.directory = Path("nowhere")
        self.failure: DiskFailed | None = None
        self.files = files = FileCache(RealDisk(), 1)
        for number in range(PARTITIONS):
            queue = ConsumeQueue("t", number, Path("nowhere"), files, 160, b"", 0)
            queue.publish(10, 1000)
            self.queues[TopicPartition("t", number)] = queue

    def store_time(self, queue: ConsumeQueue, ordinal: int, read: object) -> int | None:
        if queue.partition in self.broken:
            self.damaged += 1
            return None
        return 1000 + ordinal

    def record_at_offset(self, log_offset: int, read: object) -> None:
        self.damaged += 1

    def usage(self, directory: Path) -> SimpleNamespace:
        if self.failure is not None:
            raise self.failure
        return SimpleNamespace(available=7, ratio=0.5)

    def check_healthy(self) -> None:
        """It is."""

    check_master = check_writable = check_healthy


class Bench:
    """The measured parts of a broker with many groups, partitions and sessions."""

    def __init__(self) -> None:
        clock = ManualClock(60_000)
        self.store = Store(clock)
        statistics = Statistics(self.store.queues, clock, Counters())
        statistics.begin()
        offsets, observed = OffsetTable(), Observed(clock.monotonic)
        for group in range(GROUPS):
            for partition in range(PARTITIONS):
                offsets.reset(f"g{group}", "t", partition, 3)
                observed.asked(Get("t", f"r{group}", partition, 10, 1, "1", 0), ("10.0.0.7", 4711))
                statistics.got(f"g{group}", f"t{partition}", 1, 1)
        nobody = SimpleNamespace(is_system=lambda group: False, consumer_groups=list, consumer_group=lambda group: None)
        parts = {
            "store": self.store,
            "statistics": statistics,
            "offsets": offsets,
            "observed": observed,
            "counters": Counters(),
        }
        memory = SimpleNamespace(held=0, evicted=0)
        sessions = {object() for _ in range(GROUPS * PARTITIONS)}
        endpoint: Any = SimpleNamespace(sessions=sessions, connections=len(sessions), memory=memory)
        context: Any = SimpleNamespace(**parts, groups=nobody, clients=nobody, replicas=NoReplicas())
        unused: Any = SimpleNamespace(cold_reads=0, waiting=0)
        timers: Any = SimpleNamespace(pending=0, late_ms=0, delivered=0, cancelled=0, dropped=0, recurring=0, runs_dropped=0)
        dedupe: Any = SimpleNamespace(duplicates=0, waiting=0, behind_bytes=0, index_bytes=0)
        leases: Any = SimpleNamespace(of=lambda place: None)
        export = OffsetExporter(cast(Context, context), leases.of, None, run_here)
        self.metrics = BrokerMetrics(
            context,
            endpoint,
            unused,
            Holds(),
            unused,
            dict,
            unused,
            timers,
            dedupe,
            leases,
            export,
            lambda: None,
            None,
            run_here,
            History(),
        )

    def find(self, part: str, rest: Callable[[], None] = lambda: None) -> dict[Metric, list[object]]:
        found: Iterator[Family] = getattr(self.metrics, part)(rest)
        return {metric: list(samples) for metric, samples in found}


@pytest.mark.parametrize("part", ["_messages", "_lags", "_ages_of_lags", "_readers", "_reads"])
def test_others_go_on_after_every_few_steps(part: str) -> None:
    """E-01: however many groups, partitions and connections there are, and also within what becomes one sample."""
    bench, steps, longest = Bench(), 0, 0

    def rest() -> None:
        nonlocal steps, longest
        steps, longest = 0, max(longest, steps)

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal steps
        steps += frame.f_code is not rest.__code__
        return trace

    before = sys.gettrace()
    gc.disable()  # what it would call are no steps of ours
    sys.settrace(trace)
    try:
        found = getattr(bench.metrics, part)(rest)
        samples = {metric: _taken(values, rest) for metric, values in found}
    finally:
        sys.settrace(before)
        gc.enable()
    assert sum(samples.values()) > 0
    assert max(longest, steps) < MOST_STEPS


def _taken(samples: Any, rest: Callable[[], None]) -> int:
    """How many there are, taken as a scrape takes them."""
    count = 0
    for _ in samples:
        count += 1
        rest()
    return count


def test_what_is_found() -> None:
    """E-01: the same as without rests."""
    bench = Bench()
    assert bench.find("_lags")[metrics.LAG][0] == (("g0", "t"), 7 * PARTITIONS)
    assert bench.find("_ages_of_lags")[metrics.LAG_AGE][0] == (("g0", "t"), (60_000 - 1003) / 1000)
    assert bench.find("_readers")[metrics.READER_LAG][0] == (("r0", "t"), 990 * PARTITIONS)
    assert bench.find("_reads")[metrics.CONNECTIONS][2] == (("none_yet",), GROUPS * PARTITIONS)


def test_a_damaged_message_is_counted_once_however_often_it_is_scraped() -> None:
    """E-01: what rises then is what readers find."""
    bench = Bench()
    bench.store.broken.add(5)
    first = bench.find("_ages_of_lags"), bench.find("_age_of_log")
    assert bench.store.damaged == 2  # one that groups lag behind, and the first one of the log
    for _ in range(3):
        assert (bench.find("_ages_of_lags"), bench.find("_age_of_log")) == first
    assert bench.store.damaged == 2
    assert first[1][metrics.OLDEST] == [((), 0.0)]


def test_what_was_written_is_counted_from_the_opening_of_the_store() -> None:
    """E-01: as every counter."""
    bench = Bench()
    assert bench.find("_log")[metrics.WRITTEN] == [((), 0)]
    bench.store.log.end += 100
    assert bench.find("_log")[metrics.WRITTEN] == [((), 100)]


def test_a_source_that_fails_takes_only_its_own_metrics_away(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """E-01: which is said once, until it is another reason; afterwards they are back."""
    bench = Bench()
    for part in ("_answers", "_leased", "_leases", "_sizes", "_transactions", "_replicas"):  # they need a whole broker
        monkeypatch.setattr(BrokerMetrics, part, lambda self, rest: iter(()))
    lost = {metrics.DISK_FREE, metrics.DISK_USED}

    def names() -> set[Metric]:
        return {metric for metric, _ in bench.metrics.families(lambda: None)}

    whole = names()
    assert lost < whole
    with caplog.at_level(logging.WARNING):
        for reason in ("no answer", "no answer", "none at all"):
            bench.store.failure = DiskFailed(reason)
            assert names() == whole - lost
    said = [record.getMessage() for record in caplog.records]
    assert said == ["metrics left out part=disk reason=no answer", "metrics left out part=disk reason=none at all"]
    bench.store.failure = None
    assert names() == whole

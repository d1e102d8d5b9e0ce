"""Statistics over time windows, on a manual clock."""

from pathlib import Path

import pytest

from metaq.engine.figures import statistics
from metaq.engine.figures.counters import Counters
from metaq.engine.figures.statistics import DAY_MS, OTHERS, SAMPLE_S, Statistics
from metaq.engine.tables.observed import LONGEST_GROUP
from metaq.message import TopicPartition
from metaq.protocol.remoting.adminbodies import Rates
from metaq.protocol.text.messages import HEADER_SIZE_TEXT
from metaq.store.files.disk import RealDisk
from metaq.store.files.filecache import FileCache
from metaq.store.queues.consumequeue import ConsumeQueue
from tests.support.manualclock import ManualClock

MIDNIGHT_MS = 20_000 * DAY_MS


class Bench:
    """Statistics over queues of which the test says what was put."""

    def __init__(self, now_ms: int = MIDNIGHT_MS) -> None:
        self.clock = ManualClock(now_ms)
        self.counters = Counters()
        self.queues: dict[TopicPartition, ConsumeQueue] = {}
        self.put("before", 100, 10)  # by the process before this one
        self.statistics = Statistics(self.queues, self.clock, self.counters)
        self.statistics.begin()

    def put(self, topic: str, messages: int, size: int, partition: int = 0) -> None:
        """So many messages with bodies of ``size`` bytes."""
        key = TopicPartition(topic, partition)
        queue = self.queues.get(key)
        if queue is None:
            files = FileCache(RealDisk(), 1)
            queue = self.queues[key] = ConsumeQueue(topic, partition, Path("nowhere"), files, 160, b"", 0)
        text_end = queue.readable_text_end + messages * (HEADER_SIZE_TEXT + size)
        queue.publish(queue.readable + messages, text_end)

    def wait(self, seconds: float) -> None:
        """Let time pass, and sample as the broker does."""
        for _ in range(round(seconds / SAMPLE_S)):
            self.clock.advance(SAMPLE_S)
            self.statistics.sample(lambda: None)

    def rates(self, name: str, key: str) -> Rates:
        rates = self.statistics.rates(name, key)
        assert rates is not None
        return rates


def test_windows_forget() -> None:
    """SG-086: what was put leaves the minute after 60 to 70 s, the hour after 60 to 70 min, the day after 24 to 25 h."""
    bench = Bench()
    bench.put("t", 40, 5)
    bench.put("t", 20, 5, partition=1)
    bench.clock.advance(5)
    now = bench.rates("TOPIC_PUT_NUMS", "t")
    assert [rate.sum for rate in now] == [60, 60, 60]
    assert now.minute.per_second == 12.0
    bench.wait(60)
    assert [rate.sum for rate in bench.rates("TOPIC_PUT_NUMS", "t")] == [60, 60, 60]
    bench.wait(10)
    assert [rate.sum for rate in bench.rates("TOPIC_PUT_NUMS", "t")] == [0, 60, 60]
    bench.wait(70 * 60)
    assert [rate.sum for rate in bench.rates("TOPIC_PUT_NUMS", "t")] == [0, 0, 60]
    bench.wait(22 * 3600)
    assert [rate.sum for rate in bench.rates("TOPIC_PUT_NUMS", "t")] == [0, 0, 60]
    bench.wait(3 * 3600)
    assert [rate.sum for rate in bench.rates("TOPIC_PUT_NUMS", "t")] == [0, 0, 0]


def test_rates_in_steady_state() -> None:
    """SG-086: ten messages of eight bytes a second are that in every window, by message and by byte."""
    bench = Bench()
    for _ in range(200):
        bench.put("t", 100, 8)
        bench.wait(10)
    numbers, sizes = bench.rates("TOPIC_PUT_NUMS", "t"), bench.rates("TOPIC_PUT_SIZE", "t")
    assert [rate.per_second for rate in numbers] == pytest.approx([10, 10, 10])
    assert [rate.per_second for rate in sizes] == pytest.approx([80, 80, 80])
    assert [rate.average for rate in sizes] == pytest.approx([8, 8, 8])
    assert numbers.minute.sum == 600
    assert bench.statistics.put_per_second() == pytest.approx((10, 10, 10))


def test_only_this_process_counts() -> None:
    """SG-086: what was stored before is no rate, and a topic that was never put to has none."""
    bench = Bench()
    assert bench.statistics.rates("TOPIC_PUT_NUMS", "before") is None
    assert bench.statistics.rates("TOPIC_PUT_NUMS", "never") is None
    assert bench.statistics.rates("NO_SUCH_NAME", "before") is None
    bench.put("before", 3, 10)
    assert bench.rates("TOPIC_PUT_SIZE", "before").minute.sum == 30


def test_groups() -> None:
    """SG-086: what groups get and send back, by topic@group; in all what a deleted group got stays."""
    bench = Bench()
    bench.statistics.got("g", "t", 3, 300)
    bench.statistics.got("g", "t", 1, 100)
    bench.statistics.sent_back("g", "t")
    assert bench.rates("GROUP_GET_NUMS", "t@g").minute.sum == 4
    assert bench.rates("GROUP_GET_SIZE", "t@g").minute.average == 100
    assert bench.rates("SNDBCK_PUT_NUMS", "t@g").minute.sum == 1
    bench.wait(10)
    assert bench.statistics.got_per_second("g", "t") == pytest.approx(0.4)
    bench.statistics.forget(group="g")
    assert bench.statistics.rates("GROUP_GET_NUMS", "t@g") is None
    assert bench.rates("BROKER_GET_NUMS", "DefaultCluster").minute.sum == 4


def test_internal_topics_are_no_puts_of_clients() -> None:
    """SG-086: what waits at a delay level is counted by its topic, but not in all."""
    bench = Bench()
    bench.put("SCHEDULE_TOPIC_XXXX", 5, 1)
    bench.put("t", 2, 1)
    assert bench.rates("TOPIC_PUT_NUMS", "SCHEDULE_TOPIC_XXXX").minute.sum == 5
    assert bench.rates("BROKER_PUT_NUMS", "DefaultCluster").minute.sum == 2


def test_keys_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """SG-086: group names that nobody has heard of cannot fill the memory; their messages count in all."""
    monkeypatch.setattr(statistics, "MOST_KEYS", 3)
    bench = Bench()
    for number in range(10):
        bench.statistics.got(f"g{number}", "t", 1, 1)
        bench.statistics.sent_back(f"g{number}", "t")
    assert bench.statistics.rates("GROUP_GET_NUMS", "t@g2") is not None
    assert bench.statistics.rates("GROUP_GET_NUMS", "t@g3") is None
    assert bench.statistics.rates("SNDBCK_PUT_NUMS", "t@g3") is None
    assert bench.statistics.got_in_all().messages == 10


def test_what_is_not_counted_one_by_one_is_in_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """E-01: pairs beyond the limit, groups with names of any length, and what was deleted, as one row."""
    monkeypatch.setattr(statistics, "MOST_KEYS", 2)
    bench = Bench()
    groups = ["short", "g" * LONGEST_GROUP, "g" * (LONGEST_GROUP + 1), "late"]
    for group in groups:
        bench.statistics.got(group, "t", 1, 10)
    found = dict(bench.statistics.got_by_group())
    assert list(found) == [("t", groups[0]), ("t", groups[1]), (OTHERS, OTHERS)]
    assert found[OTHERS, OTHERS] == (2, 20)
    bench.statistics.forget(group="short")
    found = dict(bench.statistics.got_by_group())
    assert (found[OTHERS, OTHERS].messages, bench.statistics.got_in_all().messages) == (3, 4)


def test_a_group_that_is_forgotten_while_groups_are_listed() -> None:
    """E-01: others go on between any two."""
    bench = Bench()
    for group in ("one", "two", "three"):
        bench.statistics.got(group, "t", 1, 10)
    rows = bench.statistics.got_by_group()
    assert next(rows)[0] == ("t", "one")
    bench.statistics.forget(group="two")
    bench.statistics.got("four", "t", 1, 10)
    assert [key for key, _ in rows] == [("t", "three"), (OTHERS, OTHERS)]


def test_days() -> None:
    """SG-086: totals as of the last two midnights, in UTC."""
    bench = Bench(MIDNIGHT_MS - 60_000)
    bench.put("t", 7, 1)
    bench.statistics.got("g", "t", 2, 2)
    bench.wait(70)
    assert (bench.statistics.put_by_day.yesterday.messages, bench.statistics.put_by_day.today.messages) == (0, 7)
    bench.put("t", 1, 1)
    bench.wait(DAY_MS / 1000)
    assert (bench.statistics.put_by_day.yesterday.messages, bench.statistics.put_by_day.today.messages) == (7, 8)
    assert bench.statistics.got_by_day.today.messages == 2

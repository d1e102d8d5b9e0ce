"""The contents of the offset report, without Spark: findings of rows, numbers as words, and the scales of its charts."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from metaq.spark.report.charts import Heat, Line, LineChart, draw_heat, draw_lines, level, level_ends, time_ticks, value_axis
from metaq.spark.report.findings import Limits, OffsetFinding, find
from metaq.spark.report.tables import MOST_BUCKETS, width_for
from metaq.spark.report.wording import clock, count, duration, listed, percent, rate, short_count

LAST = datetime(2026, 3, 14, 18, 0, tzinfo=UTC)
LIMITS = Limits(still_s=600.0, risk_s=86_400.0)
HEALTHY: dict[str, Any] = {
    "broker": "east",
    "group": "billing",
    "name": "billing",
    "kind": "remoting",
    "topic": "orders",
    "partition": 0,
    "lag": 5,
    "lag_s": 3.0,
    "lost": 0,
    "consumed_per_s": 9.9,
    "produced_per_s": 10.0,
    "waiting_s": 60.0,
    "unowned_s": 0.0,
    "owner": "c-1",
    "runway_s": None,
    "retention_ms": 6 * 3_600_000,
}


def found(*partitions: dict[str, Any], owned: int = 1) -> list[OffsetFinding]:
    """Return the findings for healthy partitions with these differences."""
    rows = [{**HEALTHY, **changes} for changes in partitions]
    groups = [{"name": "billing", "topic": "orders", "owned": owned}]
    return find(rows, groups, [], [], LIMITS, LAST)


def only(*partitions: dict[str, Any], owned: int = 1) -> OffsetFinding:
    (finding,) = found(*partitions, owned=owned)
    return finding


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"lag": 0, "waiting_s": 90_000.0, "owner": None, "unowned_s": 90_000.0},
        {"waiting_s": 599.0},
        {"owner": None, "unowned_s": 60.0},
        {"kind": "observed", "owner": None, "unowned_s": 90_000.0},
        {"runway_s": 90_000.0},
        {"lag_s": 5000.0, "consumed_per_s": 10.5},
        {"lag": None, "lag_s": None, "lost": None, "consumed_per_s": None, "waiting_s": 90_000.0},
    ],
)
def test_nothing_is_wrong(changes: dict[str, Any]) -> None:
    """P18: groups at the end, that move, rebalance, have no members, are not at risk, catch up, or are not known."""
    assert found(changes) == []


def test_a_stuck_partition_is_named_with_its_owner() -> None:
    """P18."""
    one = only({"partition": 3, "lag": 107_696, "waiting_s": 5400.0})
    assert (one.severity, one.kind, one.partitions, one.lag) == ("problem", "stuck", ["east/3"], 107_696)
    assert one.since == LAST - timedelta(minutes=90)
    assert one.sentence == (
        "billing has not moved in partition 3 of orders on east since 16:30 (1 h 30 min), though c-1 owns it; "
        "107,696 messages wait."
    )


def test_partitions_with_the_same_trouble_are_one_finding() -> None:
    """P18: and each partition is in one finding only, of its first trouble."""
    stuck = [
        {"partition": partition, "broker": broker, "waiting_s": 900.0} for broker, partition in (("e", 1), ("e", 2), ("w", 1))
    ]
    one, other = found(*stuck, {"partition": 7, "owner": None, "unowned_s": 900.0, "waiting_s": 900.0})
    assert (one.kind, one.partitions) == ("unowned", ["east/7"])
    assert (other.kind, other.partitions) == ("stuck", ["e/1", "e/2", "w/1"])
    assert "in orders, partitions 1 and 2 on e and partition 1 on w since" in other.sentence


def test_a_group_without_any_consumer_is_a_warning() -> None:
    """P18: a partition that only this one owner misses is a problem."""
    absent = {"owner": None, "unowned_s": 7200.0, "waiting_s": 7200.0}
    one = only(absent, {**absent, "partition": 1}, owned=0)
    assert (one.severity, one.sentence) == (
        "warning",
        "billing has had no consumer of orders since 16:00 (2 h); 10 messages wait.",
    )
    assert only(absent, owned=1).severity == "problem"


def test_retention() -> None:
    """P18: what will be lost, and what has been."""
    soon = only({"runway_s": 7200.0, "lag": 90_000, "consumed_per_s": 5.0})
    assert (soon.severity, soon.left_s) == ("problem", 7200.0)
    assert soon.sentence == (
        "billing will begin to lose messages of orders in 2 h: it consumes 5/s of the 10/s that are sent to "
        "partition 0 of orders on east, which are kept for 6 h."
    )
    assert only({"runway_s": 80_000.0}).severity == "warning"
    lost = only({"lost": 1234, "runway_s": 0.0})
    assert (lost.kind, lost.severity) == ("lost", "problem")
    assert lost.sentence.startswith("billing has lost 1,234 messages of orders: ")


def test_a_group_that_falls_behind() -> None:
    """P18."""
    one = only({"lag_s": 1500.0, "consumed_per_s": 8.0})
    assert (one.severity, one.kind) == ("warning", "behind")
    assert "25 min behind" in one.sentence
    assert "8/s of the 10/s" in one.sentence


def test_gaps_in_the_history() -> None:
    """P18: one finding a broker, with the longest."""
    gaps = [("east", LAST - timedelta(hours=5), LAST - timedelta(hours=3)), ("east", LAST - timedelta(minutes=9), LAST)]
    (one,) = find([], [], [], gaps, LIMITS, LAST)
    assert one.sentence == "east exported no offsets 2 times, the longest from 13:00 to 15:00 (2 h)."
    assert one.key == "gap///east"


def test_the_worst_comes_first() -> None:
    """P18."""
    kinds = [
        one.kind
        for one in found(
            {"partition": 0, "lag_s": 1500.0, "consumed_per_s": 8.0},
            {"partition": 1, "waiting_s": 900.0},
            {"partition": 2, "runway_s": 80_000.0},
            {"partition": 3, "lost": 1},
        )
    ]
    assert kinds == ["lost", "stuck", "retention", "behind"]


def test_words() -> None:
    """P18."""
    assert [duration(seconds) for seconds in (0, 0.4, 59, 60, 5400, 86_399, 100_000, 1e6)] == [
        "0 s", "less than 1 s", "59 s", "1 min", "1 h 30 min", "24 h", "1 d 4 h", "11 d",
    ]  # fmt: skip
    assert [count(number) for number in (0, 999_999, 1_310_000)] == ["0", "999,999", "1.31 M"]
    assert [short_count(number) for number in (0, 5.698, 999, 1000, 107_696, 2e9)] == ["0", "5.7", "1 k", "1 k", "110 k", "2 G"]
    assert [rate(number) for number in (0, 1250, 20.06, 0.01, 0.0005)] == ["0/s", "1,250/s", "20.1/s", "0.6/min", "1.8/h"]
    assert [percent(share) for share in (0, 0.004, 0.598, 1)] == ["0 %", "less than 1 %", "60 %", "100 %"]
    assert (listed(["1"]), listed(["1", "2"]), listed(list("1234567"))) == ("1", "1 and 2", "1, 2, 3, 4 and 3 more")
    assert (clock(LAST, LAST), clock(LAST, LAST + timedelta(days=1))) == ("18:00", "Mar 14, 18:00")


@pytest.mark.parametrize("largest", [0.0, 0.4, 1.0, 7.0, 999.0, 12_345.0, 5e7, 8e11])
@pytest.mark.parametrize("logarithmic", [False, True])
def test_an_axis_holds_all_values_and_few_ticks(largest: float, *, logarithmic: bool) -> None:
    """P18."""
    axis = value_axis([0.0, largest], logarithmic=logarithmic)
    shares = [axis.share(tick) for tick in axis.ticks]
    assert 0 <= axis.share(largest) <= 1
    assert shares == sorted(set(shares))
    assert shares[0] == 0
    assert shares[-1] <= 1
    assert 2 <= len(shares) <= 9


@pytest.mark.parametrize(
    ("span_s", "interval_s", "width_s"),
    [(60, 1.0, 1), (60, 1.003, 1), (60, 1.5, 2), (3600, 1.0, 15), (3600, 60.02, 60), (86_400, 60.0, 300), (0, 60.0, 60)],
)
def test_buckets_are_as_fine_as_the_samples(span_s: float, interval_s: float, width_s: int) -> None:
    """19.1: and not more than a page has room for."""
    assert width_for(span_s, interval_s) == width_s
    assert span_s / width_s <= MOST_BUCKETS


def test_times_on_an_axis_are_round() -> None:
    """P18: any span has a few, and midnight is a day."""
    start = datetime(2026, 3, 13, 12, 0, tzinfo=UTC).timestamp()
    assert [label for _, label in time_ticks(start, start + 86_400)] == ["12:00", "15:00", "18:00", "21:00", "Mar 14", "03:00", "06:00", "09:00", "12:00"]  # noqa: E501  # fmt: skip
    assert [label for _, label in time_ticks(start - 1, start + 58)][:3] == ["12:00", "12:00:10", "12:00:20"]
    for span_s in (5, 60, 600, 3600, 86_400, 7 * 86_400, 60 * 86_400):
        assert 1 <= len(time_ticks(start + 7, start + 7 + span_s)) <= 10


def test_levels_of_a_heat_map_end_where_the_legend_says() -> None:
    """P18."""
    ends = level_ends(90_000.0)
    assert [level(end * 0.999, 90_000.0) for end in ends] == [1, 2, 3, 4, 5, 6]
    assert (level(0, 90_000.0), level(None, 90_000.0), level(90_000.0, 90_000.0)) == (0, 0, 6)


def test_names_in_charts_are_text() -> None:
    """P18: whatever a group calls itself."""
    name = "<img src=x onerror=alert(1)>'\"&"
    lines = draw_lines(LineChart(name, "", [0.0, 60.0], [Line(name, [1.0, None], 0), Line(name, [2.0, 3.0], None)], str))
    heat = draw_heat(Heat(name, "", [0.0, 60.0], [name], [[1.0, None]], str))
    for svg in (lines, heat):
        assert "<img" not in svg
        assert svg.count("<svg") == 1

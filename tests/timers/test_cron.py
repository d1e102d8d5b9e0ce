"""Schedules, against a slow reading of the same expressions that looks at each minute."""

from datetime import UTC, datetime, timedelta
from typing import Final
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metaq.errors import BadRequest
from metaq.timers.cron import parse_schedule

MINUTE_MS: Final = 60_000
ZONES: Final = ("UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kolkata", "Africa/Casablanca")
RANGES: Final = ((0, 59), (0, 23), (1, 31), (1, 12), (0, 7))


def at(text: str, zone: str = "UTC") -> int:
    return round(datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).timestamp() * 1000)


def times(expression: str, begin: str, count: int, zone: str = "UTC") -> list[str]:
    """The next times, in UTC."""
    schedule, now_ms, found = parse_schedule(expression, zone), at(begin), []
    for _ in range(count):
        now_ms = schedule.next(now_ms)
        found.append(datetime.fromtimestamp(now_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M"))
    return found


def has(field: str, value: int, low: int, high: int) -> bool:
    """Whether a field of numbers holds a value, read one by one."""
    for part in field.split(","):
        span, _, step = part.partition("/")
        begin, _, end = span.partition("-")
        first, last = (low, high) if span == "*" else (int(begin), int(end or begin))
        if first <= value <= last and (value - first) % int(step or 1) == 0:
            return True
    return False


def matches(expression: str, wall: datetime) -> bool:
    minute, hour, day, month, weekday = expression.split()
    if not (has(minute, wall.minute, 0, 59) and has(hour, wall.hour, 0, 23) and has(month, wall.month, 1, 12)):
        return False
    number = wall.isoweekday()  # 7 is Sunday, which 0 is too
    in_week = has(weekday, number, 0, 7) or (number == 7 and has(weekday, 0, 0, 7))
    in_month = has(day, wall.day, 1, 31)
    return in_month and in_week if "*" in (day[0], weekday[0]) else in_month or in_week


def slow_next(expression: str, zone: str, after_ms: int, most: int) -> int | None:
    """The next time, by looking at each of the following minutes as a clock on the wall shows it."""
    place = ZoneInfo(zone)
    shown = datetime.fromtimestamp(after_ms // MINUTE_MS * 60, place).replace(tzinfo=None)
    seen = max(shown, datetime.fromtimestamp(after_ms // MINUTE_MS * 60 - 3 * 3600, place).replace(tzinfo=None))
    for back in range(1, 3 * 60):  # what came before counts, if the clock was set back since
        seen = max(seen, datetime.fromtimestamp((after_ms // MINUTE_MS - back) * 60, place).replace(tzinfo=None))
    for ahead in range(1, most):
        now_ms = (after_ms // MINUTE_MS + ahead) * MINUTE_MS
        wall = datetime.fromtimestamp(now_ms // 1000, place).replace(tzinfo=None)
        while seen < wall:  # one minute, or those that the clock left out and the one after
            seen += timedelta(minutes=1)
            if matches(expression, seen):
                return now_ms
    return None


def fields(low: int, high: int) -> st.SearchStrategy[str]:
    value = st.integers(low, high)
    span = st.tuples(value, value).map(lambda pair: f"{min(pair)}-{max(pair)}")
    stepped = st.tuples(st.one_of(span, st.just("*")), st.integers(1, 20)).map(lambda pair: f"{pair[0]}/{pair[1]}")
    part = st.one_of(value.map(str), span, stepped)
    return st.one_of(st.just("*"), st.lists(part, min_size=1, max_size=3).map(",".join))


def expressions() -> st.SearchStrategy[str]:
    return st.tuples(*(fields(*bounds) for bounds in RANGES)).map(" ".join)


moments = st.one_of(
    st.integers(at("2020-01-01"), at("2030-01-01")),
    st.sampled_from(
        ("2026-03-29 01:00", "2026-10-25 01:00", "2026-03-08 07:00", "2026-11-01 06:00", "2026-04-04 15:00")
    ).flatmap(lambda text: st.integers(at(text) - 7_200_000, at(text) + 7_200_000)),
)


@settings(max_examples=100, deadline=None)
@given(expressions(), st.sampled_from(ZONES), moments)
def test_it_finds_what_looking_at_each_minute_finds(expression: str, zone: str, now_ms: int) -> None:
    """E-13: within some days; in zones with summer time, half an hour of it, and two changes around a month."""
    try:
        schedule = parse_schedule(expression, zone)
    except BadRequest as error:
        assert "never comes" in str(error)
        assert slow_next(expression, zone, now_ms, 3 * 1440) is None
        return
    found, expected = schedule.next(now_ms), slow_next(expression, zone, now_ms, 3 * 1440)
    assert found == expected or (expected is None and found >= now_ms + 3 * 1440 * MINUTE_MS - MINUTE_MS)


def test_names_aliases_and_intervals() -> None:
    assert times("30 9 * jan-MAR mon,Wed", "2026-03-29", 3) == ["2026-03-30 09:30", "2027-01-04 09:30", "2027-01-06 09:30"]
    assert times("@hourly", "2026-01-01 00:30", 2) == ["2026-01-01 01:00", "2026-01-01 02:00"]
    assert times("@weekly", "2026-01-01", 1) == times("0 0 * * 7", "2026-01-01", 1) == ["2026-01-04 00:00"]
    assert times("@every 90m", "2026-01-01", 2, "Europe/Berlin") == ["2026-01-01 01:30", "2026-01-01 03:00"]
    assert parse_schedule("@every 2s", "UTC").next(5) == 2005


def test_days_as_in_vixies_cron() -> None:
    """E-13: either day matches, but both must when one of them begins with a star."""
    assert times("0 0 13 * 5", "2026-02-01", 3) == ["2026-02-06 00:00", "2026-02-13 00:00", "2026-02-20 00:00"]
    assert times("0 0 13 * */5", "2026-02-01", 2) == ["2026-02-13 00:00", "2026-03-13 00:00"]
    assert times("0 0 29 2 *", "2096-03-01", 1) == ["2104-02-29 00:00"]
    assert times("0 0 29 2 */7", "2072-01-01", 2) == ["2088-02-29 00:00", "2128-02-29 00:00"]


def test_hours_that_do_not_exist_or_come_twice() -> None:
    """E-13: the next minute that exists; once, the first time."""
    zone = "Europe/Berlin"
    assert times("30 2 * * *", "2026-03-28 12:00", 2, zone) == ["2026-03-29 01:00", "2026-03-30 00:30"]
    assert times("*/20 2,3 * * *", "2026-03-29 00:30", 2, zone) == ["2026-03-29 01:00", "2026-03-29 01:20"]
    assert times("30 2 * * *", "2026-10-24 12:00", 2, zone) == ["2026-10-25 00:30", "2026-10-26 01:30"]
    assert times("0 0 * * *", "2011-12-29 12:00", 2, "Pacific/Apia") == ["2011-12-30 10:00", "2011-12-31 10:00"]


@pytest.mark.parametrize(
    ("expression", "sentence"),
    [
        ("", "has 0 fields"),
        ("* * * *", "has 4 fields"),
        ("60 * * * *", "the minute '60' is not from 0 to 59"),
        ("* * 0 * *", "the day '0' is not from 1 to 31"),
        ("* * * smarch *", "the month 'smarch' is not from 1 to 12, or jan/feb"),
        ("* * * * 5-2", "ends before it begins"),
        ("5/10 * * * *", "after \\* or a range"),
        ("*/0 * * * *", "a step is a number from 1 on"),
        ("1,,2 * * * *", "the minute '' is not"),
        ("0 0 30 2 *", "never comes: none of its months has 30 days"),
        ("0 0 31 4,6,feb */2", "never comes"),
        ("@every", "is not an interval"),
        ("@every 0s", "is not an interval"),
        ("@every 4000d", "is not an interval"),
        ("@fortnightly", "has 1 fields"),
        ("* " * 200, "longer than 200"),
    ],
)
def test_what_is_no_schedule(expression: str, sentence: str) -> None:
    with pytest.raises(BadRequest, match=sentence):
        parse_schedule(expression, "UTC")


@pytest.mark.parametrize("zone", ["Mars/Olympus", "", "../../etc/passwd", "Europe", "/etc/localtime", "a\0b"])
def test_what_is_no_time_zone(zone: str) -> None:
    with pytest.raises(BadRequest, match="does not know the time zone"):
        parse_schedule("* * * * *", zone)

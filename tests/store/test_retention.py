"""Retention: the files that it deletes, and when it reports that there is no room."""

from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.store.files.disk import Usage
from metaq.store.log.retention import FORCED_AT_ONCE, HOUR_MS, Plan, RetentionRules, SegmentAge, plan, room_refusal

GIB: Final = 1024**3
RULES: Final = RetentionRules()
DAY_MS: Final = 24 * HOUR_MS
NOON: Final = 1_400_000_000_000 // DAY_MS * DAY_MS + 12 * HOUR_MS
FOUR: Final = NOON - 8 * HOUR_MS


def disk(ratio: float, available: int = GIB) -> Usage:
    """A disk with so much room, so full."""
    return Usage(round(available * ratio / (1 - ratio)), available)


def ages(now_ms: int, *hours: float) -> list[SegmentAge]:
    """Segments that were closed so many hours ago, the oldest first."""
    return [SegmentAge(number * GIB, now_ms - round(age * HOUR_MS)) for number, age in enumerate(hours)]


def test_expired_segments_go_at_their_hour() -> None:
    """SG-045: 72 hours, at four o'clock."""
    segments = ages(FOUR, 100, 73, 72, 71.9, 1)
    assert plan(segments, FOUR, disk(0.5), RULES) == Plan([0, GIB, 2 * GIB], None)


@pytest.mark.parametrize(("minutes", "due"), [(-1, False), (0, True), (59, True), (60, False), (8 * 60, False)])
def test_only_within_that_hour(minutes: int, due: bool) -> None:
    now = FOUR + minutes * 60_000
    assert plan(ages(now, 100), now, disk(0.5), RULES).delete == ([0] if due else [])


def test_hour_and_age_are_settings() -> None:
    rules = RetentionRules(keep_ms=HOUR_MS, hour=12)
    assert plan(ages(NOON, 2, 1, 0.5), NOON, disk(0.5), rules).delete == [0, GIB]
    assert plan(ages(FOUR, 2, 1, 0.5), FOUR, disk(0.5), rules).delete == []


def test_the_log_loses_only_its_oldest_end() -> None:
    """A segment whose clock ran ahead keeps what is behind it, though that is expired."""
    assert plan(ages(FOUR, 100, -5, 90), FOUR, disk(0.5), RULES).delete == [0]


@pytest.mark.parametrize(("ratio", "due"), [(0.74, False), (0.75, True), (0.84, True)])
def test_above_the_clean_watermark_expired_segments_go_at_any_hour(ratio: float, due: bool) -> None:
    """SG-046."""
    assert plan(ages(NOON, 100, 80, 1), NOON, disk(ratio), RULES) == Plan([0, GIB] if due else [], None)


@pytest.mark.parametrize("now", [NOON, FOUR])
def test_above_the_force_watermark_young_segments_go_a_few_at_a_time(now: int) -> None:
    """SG-047."""
    young = ages(now, *[1.0] * 15)
    oldest = [segment.base for segment in young[:FORCED_AT_ONCE]]
    assert plan(young, now, disk(0.85), RULES) == Plan(oldest, None)
    assert plan(young[:3], now, disk(0.89), RULES) == Plan(oldest[:3], None)
    assert plan(young, now, disk(0.84), RULES).delete == []


def test_above_the_refuse_watermark_puts_are_refused() -> None:
    """SG-048: the error names the ratio, the limit and the setting."""
    assert room_refusal(disk(0.89), RULES) is None
    assert room_refusal(disk(0.90), RULES) == "the disk is 90.0% full, the limit is 90% (refuse_ratio)"
    full = plan(ages(NOON, 1), NOON, disk(0.95), RULES)
    assert full.delete == [0]
    assert full.refuse == "the disk is 95.0% full, the limit is 90% (refuse_ratio)"


def test_a_large_disk_with_room_is_not_full() -> None:
    """A ratio alone would refuse puts with a hundred gigabytes free."""
    roomy = disk(0.99, RULES.ample_free_bytes)
    assert plan(ages(NOON, 100), NOON, roomy, RULES) == Plan([], None)
    scarce = disk(0.99, RULES.ample_free_bytes - 1)
    assert plan(ages(NOON, 100), NOON, scarce, RULES).delete == [0]
    assert room_refusal(scarce, RULES) is not None


def test_a_small_disk_with_little_room_is_full() -> None:
    """Below the absolute limit puts are refused whatever the ratio."""
    limit = RULES.least_free_bytes
    assert room_refusal(disk(0.1, limit), RULES) is None
    refusal = f"{limit - 1} bytes are free, fewer than {limit} (least_free_bytes)"
    assert room_refusal(disk(0.1, limit - 1), RULES) == refusal
    assert room_refusal(Usage(0, 0), RULES) == f"0 bytes are free, fewer than {limit} (least_free_bytes)"


hours = st.lists(st.floats(-10, 200), max_size=25)


@given(hours, st.integers(0, 10 * DAY_MS), st.floats(0, 0.999), st.integers(0, 20 * GIB))
def test_what_goes_is_always_the_oldest_end(drawn: list[float], later: int, ratio: float, available: int) -> None:
    now = NOON + later
    segments = ages(now, *drawn)
    usage = disk(ratio, available)
    decision = plan(segments, now, usage, RULES)
    count = len(decision.delete)
    assert decision.delete == [segment.base for segment in segments[:count]]
    assert decision.refuse == room_refusal(usage, RULES)
    young = [segment for segment in segments[:count] if now - segment.closed_ms < RULES.keep_ms]
    if young:
        assert usage.ratio >= RULES.force_ratio
        assert count <= FORCED_AT_ONCE

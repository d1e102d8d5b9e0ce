"""Times and lengths of time as people type them."""

from datetime import UTC, datetime, timedelta

import click
import pytest

from metaq.cli.times import SpanOption, When


def test_lengths_of_time() -> None:
    """19.1: the same parser as for settings; without a unit nobody knows what is meant."""
    assert SpanOption().convert("90s", None, None) == timedelta(seconds=90)
    assert SpanOption().convert("250ms", None, None) == timedelta(milliseconds=250)
    assert SpanOption().convert("1.5h", None, None) == timedelta(minutes=90)
    for wrong in ("90", "1.5", "2M", "", "-3h", "999999999999999d", "soon"):
        with pytest.raises(click.BadParameter, match="is no length of time; write 90s, 15m, 3h or 2d"):
            SpanOption().convert(wrong, None, None)


def test_times_in_the_past() -> None:
    """19.1: a length of time ago, a date, or Unix milliseconds."""
    for text in ("90m", "90m ago"):
        before = datetime.now(UTC)
        found = When().convert(text, None, None)
        assert before <= found + timedelta(minutes=90) <= datetime.now(UTC)
    assert When().convert("1700000000000", None, None) == datetime.fromtimestamp(1_700_000_000, UTC)
    assert When().convert("2026-01-31T12:00Z", None, None) == datetime(2026, 1, 31, 12, tzinfo=UTC)
    for wrong in ("90", "999999999999999d", "yesterday"):
        with pytest.raises(click.BadParameter, match="is no time"):
            When().convert(wrong, None, None)

"""Sizes and lengths of time as people write them."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from metaq.config import FIELDS, load
from metaq.errors import ConfigError
from metaq.quantities import BYTES, HOURS, MILLISECONDS, Unit, unit_of

NUMBERS = st.integers(0, (1 << 63) - 1)
HOUR_FLOATS = st.floats(0, 1e9, allow_nan=False)


@pytest.mark.parametrize(
    ("unit", "text", "number"),
    [
        (BYTES, "4096", 4096),
        (BYTES, "64K", 65536),
        (BYTES, "64KiB", 65536),
        (BYTES, "1G", 1 << 30),
        (BYTES, "1.5G", 3 << 29),
        (BYTES, "2T", 2 << 40),
        (MILLISECONDS, "250", 250),
        (MILLISECONDS, "250ms", 250),
        (MILLISECONDS, "1.5s", 1500),
        (MILLISECONDS, "15m", 900_000),
        (MILLISECONDS, "12h", 43_200_000),
        (MILLISECONDS, "3d", 259_200_000),
        (HOURS, "72", 72),
        (HOURS, "3d", 72),
        (HOURS, "90m", 1.5),
    ],
)
def test_what_a_text_means(unit: Unit, text: str, number: float) -> None:
    """19.1: with a unit, or plain in the unit of the setting."""
    assert unit.parse(text) == number


@given(NUMBERS)
@example(0)
@example(1 << 30)
def test_what_is_printed_is_read(number: int) -> None:
    """19.1: every number of bytes and of milliseconds."""
    for unit in (BYTES, MILLISECONDS):
        text = unit.write(number)
        assert unit.parse(text) == number
        assert len(text) <= len(str(number)) + 2


@given(HOUR_FLOATS)
@example(5e-324)
@example(1e-5)
@example(0.1)
def test_hours_are_printed_and_read(number: float) -> None:
    """19.1: the setting is a float, and stays the same to its last bit."""
    assert float(HOURS.parse(HOURS.write(number))) == number


@given(NUMBERS, st.sampled_from([(BYTES, 1024**3, "G"), (MILLISECONDS, 3_600_000, "h"), (HOURS, 24, "d")]))
def test_a_number_with_a_unit_is_that_many_units(number: int, case: tuple[Unit, int, str]) -> None:
    """19.1: or it is refused, when it does not fit."""
    unit, factor, suffix = case
    if number * factor < 1 << 63:
        assert unit.parse(f"{number}{suffix}") == number * factor
    else:
        with pytest.raises(ValueError, match="does not fit into 64 bits"):
            unit.parse(f"{number}{suffix}")


@given(st.sampled_from([BYTES, MILLISECONDS, HOURS]), st.text(max_size=12))
def test_whatever_is_typed_is_read_or_refused_with_the_form(unit: Unit, text: str) -> None:
    """19.1: never any other error."""
    try:
        assert unit.parse(text) >= 0
    except ValueError as error:
        assert f"write {unit.form}" in str(error)


@pytest.mark.parametrize(
    ("setting", "text", "reason"),
    [
        ("segment_bytes", "1GB", "'1GB' is no size; write a number of bytes, or 64K, 512M, 1G, 2T (K is 1024)"),
        ("segment_bytes", "512m", "'512m' is no size; write "),
        ("segment_bytes", "1 G", "'1 G' is no size; write "),
        ("segment_bytes", "-1G", "'-1G' is no size; write "),
        ("segment_bytes", "1h", "'1h' is no size; write "),
        ("segment_bytes", "0.3K", "'0.3K' is not a whole number; write "),
        ("segment_bytes", "9999999T", "'9999999T' does not fit into 64 bits; write "),
        ("segment_bytes", "1K", "'1K' must be at least 4K"),
        ("segment_bytes", "65G", "'65G' must be at most 64G"),
        ("idle_timeout_ms", "5M", "'5M' is no length of time; write a number of milliseconds, or 250ms, 90s, 15m, 12h, 3d"),
        ("idle_timeout_ms", "1h30m", "'1h30m' is no length of time; write "),
        ("idle_timeout_ms", "0.5ms", "'0.5ms' is not a whole number; write "),
        ("keep_hours", "1w", "'1w' is no length of time; write a number of hours, or 90m, 12h, 3d"),
        ("keep_hours", "0d", "'0d' must be more than 0"),
        ("idle_timeout_ms", "9" * 5000, f"'{'9' * 39}… is no length of time; write "),
    ],
)
def test_what_is_refused(tmp_path: Path, setting: str, text: str, reason: str) -> None:
    """19.1: in the file, in the environment and as a flag with the same words; it names the setting and where it was set."""
    file = tmp_path / "broker.yaml"
    file.write_text(f"{setting}: '{text}'\n")
    variable, flag = f"METAQ_{setting.upper()}", "--" + setting.replace("_", "-")
    sources: tuple[tuple[Callable[[], Any], str], ...] = (
        (lambda: load(file, {}, {}), f"({file}:1)"),
        (lambda: load(None, {variable: text}, {}), f"({variable})"),
        (lambda: load(None, {}, {setting: text}), f"({flag})"),
    )
    for read, origin in sources:
        with pytest.raises(ConfigError) as failed:
            read()
        assert str(failed.value).startswith(f"{setting}: {reason}")
        assert origin in str(failed.value)


def test_settings_take_units_wherever_they_are_set(tmp_path: Path) -> None:
    """19.1: file, environment and flags."""
    file = tmp_path / "broker.yaml"
    file.write_text("segment_bytes: 1G\ntopics:\n  made: {dedupe_window_ms: 1d}\n")
    settings = load(file, {"METAQ_KEEP_HOURS": "3d"}, {"idle_timeout_ms": "250ms"})
    assert (settings.segment_bytes, settings.keep_hours, settings.idle_timeout_ms) == (1 << 30, 72.0, 250)
    assert settings.topics["made"].dedupe_window_ms == 86_400_000


def test_every_size_and_length_has_its_unit() -> None:
    """19.1: an hour of the day is no length of time."""
    named = {name for name in FIELDS if re.search(r"_(bytes|ms|hours)$", name)}
    assert {name for name in FIELDS if unit_of(name) is not None} == named
    assert unit_of("delete_hour") is None

"""The rings of the history, and its points: what is kept, what a point says, and how much memory they take."""

import sys
from typing import Final

import pytest

from metaq.engine.figures.history import LAG_SAMPLES, MOST_GROUPS, SAMPLES, Figures, History, Ring
from metaq.server.services.operating.history import in_points, lag_of

STEP_MS: Final = 10_000
MOST_BYTES: Final = 200_000


def filled(samples: int) -> History:
    """A history whose sample with number n has n puts a second, and a stall of n."""
    history = History()
    for number in range(samples):
        history.add(number * STEP_MS, Figures(put_per_second=number, longest_stall_seconds=number))
    return history


def lags(history: History, group: str, since_ms: int = 0) -> tuple[list[int], list[int]]:
    """The times and the lags of a group."""
    found = lag_of(history, group, since_ms)
    return found.times_ms, found.lag


@pytest.mark.parametrize("samples", [0, 1, 7, SAMPLES, SAMPLES + 1, 3 * SAMPLES + 5])
def test_every_sample_of_the_last_hours(samples: int) -> None:
    """E-32: no sample is lost or in another place, whatever came before."""
    points = in_points(filled(samples), 0, SAMPLES)
    kept = list(range(max(0, samples - SAMPLES), samples))
    assert points.figures["put_per_second"] == kept
    assert points.times_ms == [number * STEP_MS for number in kept]
    assert points.figures.keys() == set(Figures._fields)


@pytest.mark.parametrize("most", [2, 3, 7, 100, 360])
@pytest.mark.parametrize("samples", [1, 100, SAMPLES, SAMPLES + 77])
def test_fewer_points(samples: int, most: int) -> None:
    """E-32: a rate is the mean of its samples; of stalls a chart hides none; the newest point ends now."""
    points = in_points(filled(samples), 0, most)
    assert 1 <= len(points.times_ms) <= most
    assert points.times_ms[-1] == (samples - 1) * STEP_MS
    ends = [time_ms // STEP_MS for time_ms in points.times_ms]
    begins = [max(0, samples - SAMPLES), *(end + 1 for end in ends)]
    assert points.figures["longest_stall_seconds"] == ends
    assert points.figures["put_per_second"] == pytest.approx(
        [(begin + end) / 2 for begin, end in zip(begins, ends, strict=False)], rel=1e-6
    )


def test_old_points_stay_the_same() -> None:
    """E-32: with each new sample only the ends of a chart change."""
    history = filled(1000)
    before = in_points(history, 0, 100)
    history.add(1000 * STEP_MS, Figures())
    after = in_points(history, 0, 100)
    assert before.times_ms[1:-1] == after.times_ms[1 : len(before.times_ms) - 1]


def test_from_a_time_on() -> None:
    """E-32: only samples since then."""
    assert in_points(filled(10), 7 * STEP_MS, 100).figures["put_per_second"] == [7, 8, 9]
    assert in_points(filled(10), 99 * STEP_MS, 100).times_ms == []


def test_memory_is_bounded() -> None:
    """E-32: full rings of figures and groups."""
    history = filled(2 * SAMPLES)
    for minute in range(2 * LAG_SAMPLES):
        history.add_lags(minute, {f"group {number}": number for number in range(10 * MOST_GROUPS)})
    rings = [history.times, history.lag_times, *history.rings, *history.lags.values()]
    assert len(history.lags) == MOST_GROUPS
    assert all(isinstance(ring, Ring) for ring in rings)
    assert sum(ring._kept.itemsize * len(ring._kept) for ring in rings) < MOST_BYTES
    assert sum(sys.getsizeof(ring._kept) for ring in rings) < 1.2 * MOST_BYTES


def test_the_groups_that_lag_most() -> None:
    """E-32: a group with a higher lag takes the place of the one that lagged least; a lag of the past counts."""
    history, low = History(), {f"low {number}": 2 for number in range(MOST_GROUPS - 1)}
    history.add_lags(0, {"once": 1000, **low})
    history.add_lags(1, {"once": 0, "high": 50, "even": 2, **low})
    assert lags(history, "once") == ([0, 1], [1000, 0])
    assert lags(history, "high") == ([1], [50])
    assert lags(history, "even") == ([], [])
    assert len(history.lags) == MOST_GROUPS
    history.add_lags(2, {"high": 51})
    assert lags(history, "high", 1) == ([1, 2], [50, 51])
    assert lags(history, "high", 2) == ([2], [51])


def test_the_longest_stall_between_two_samples() -> None:
    """E-32: not the last one, and not one of an earlier sample."""
    history = History()
    for seconds in (0.1, 0.3, 0.2):
        history.stalled(seconds)
    assert (history.take_longest_stall(), history.take_longest_stall()) == (0.3, 0.0)

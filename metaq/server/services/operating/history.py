"""The history of this broker: its figures over the last hours, for charts."""

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta

from metaq.engine.figures.history import LAG_SAMPLES, SAMPLES, Figures, History
from metaq.server.access.permissions import Action
from metaq.server.services.call import Call
from metaq.server.services.rows import Input, Name, Output, UnixMs

HOURS = 6
MINUTE_MS = 60_000
MOST_POINTS = 720
"""5 ms of work."""
_MEANS = frozenset(name for name in Figures._fields if name.endswith("_per_second")) | {"processor_ratio"}
"""Of several samples in one point, these have the mean; of the others the highest counts, which a chart must not hide."""


class HistoryQuery(Input, frozen=True):
    """The length of the history that is wanted, and its detail."""

    minutes: Annotated[int, Meta(ge=1, le=HOURS * 60, description="Up to now.")] = HOURS * 60
    points: Annotated[
        int,
        Meta(ge=2, le=MOST_POINTS, description="The most points. One has the mean of rates, the highest of others."),
    ] = 360


class FiguresHistory(Output, frozen=True):
    """Figures over time: each list has one number for each point."""

    times_ms: Annotated[list[UnixMs], Meta(description="When each point ends.")]
    figures: Annotated[dict[str, list[float]], Meta(description="By name; docs/rest.md says what each is.")]


class LagHistoryQuery(Input, frozen=True):
    """The length of the history that is wanted."""

    minutes: Annotated[int, Meta(ge=1, le=HOURS * 60, description="Up to now.")] = HOURS * 60


class LagHistory(Output, frozen=True):
    """The lag of a group over time."""

    group: str
    times_ms: list[UnixMs]
    lag: list[int]


def show_history(call: Call, query: HistoryQuery) -> FiguresHistory:
    """Return the figures of this broker over the last hours, one point each 10 s or longer."""
    call.demand(Action.INSPECT)
    return in_points(call.interior.lasting.history, _since(call, query.minutes), query.points)


def show_lag_history(call: Call, group: Name, query: LagHistoryQuery) -> LagHistory:
    """Return the lag of a group over the last hours, one point a minute; empty for a group that lagged less than 32 others."""
    call.demand(Action.INSPECT, group)
    return lag_of(call.interior.lasting.history, group, _since(call, query.minutes))


def _since(call: Call, minutes: int) -> int:
    return call.context.store.clock.now_ms() - minutes * MINUTE_MS


def in_points(history: History, since_ms: int, most: int) -> FiguresHistory:
    """Return the samples from a time on in at most so many points."""
    times = history.times.newest(SAMPLES)
    count = sum(time_ms >= since_ms for time_ms in times)
    width = 1 if count <= most else -(-count // max(1, most - 1))  # one point more when the first one is cut
    first = history.times.count - count
    cuts = [*range(-first % width or width, count, width), count] if count else []  # old points stay the same
    spans = list(zip([0, *cuts], cuts, strict=False))
    figures = {
        name: _summed(ring.newest(count), spans, mean=name in _MEANS)
        for name, ring in zip(Figures._fields, history.rings, strict=True)
    }
    newest = times[len(times) - count :]
    return FiguresHistory(times_ms=[int(newest[end - 1]) for _, end in spans], figures=figures)


def lag_of(history: History, group: str, since_ms: int) -> LagHistory:
    """Return the lag of one group from a time on; no points when it is not among those that are kept."""
    ring = history.lags.get(group)
    values = () if ring is None else ring.newest(LAG_SAMPLES)
    times = history.lag_times.newest(len(values))
    kept = [(int(time_ms), int(lag)) for time_ms, lag in zip(times, values, strict=True) if time_ms >= since_ms]
    return LagHistory(group=group, times_ms=[time_ms for time_ms, _ in kept], lag=[lag for _, lag in kept])


def _summed(values: Sequence[float], spans: Sequence[tuple[int, int]], *, mean: bool) -> list[float]:
    """Return one number for each span, with the digits that single precision has."""
    parts = (values[begin:end] for begin, end in spans)
    return [float(f"{sum(part) / len(part) if mean else max(part):.7g}") for part in parts]

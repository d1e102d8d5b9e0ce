"""The history of this broker: its figures over the last hours, for charts."""

from typing import Annotated

from msgspec import Meta

from metaq.server.access.permissions import Action
from metaq.server.services.call import Call
from metaq.server.services.rows import Input, Name, Output, UnixMs

HOURS = 6
MINUTE_MS = 60_000


class HistoryQuery(Input, frozen=True):
    """The length of the history that is wanted, and its detail."""

    minutes: Annotated[int, Meta(ge=1, le=HOURS * 60, description="Up to now.")] = HOURS * 60
    points: Annotated[
        int, Meta(ge=2, le=2160, description="The most points; one has the mean of rates, and the highest of other figures.")
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
    now_ms = call.context.store.clock.now_ms()
    points = call.interior.history.points(now_ms - query.minutes * MINUTE_MS, query.points)
    return FiguresHistory(times_ms=points.times_ms, figures=points.figures)


def show_lag_history(call: Call, group: Name, query: LagHistoryQuery) -> LagHistory:
    """Return the lag of a group over the last hours, one point a minute; empty for a group that lagged less than 32 others."""
    call.demand(Action.INSPECT, group)
    now_ms = call.context.store.clock.now_ms()
    points = call.interior.history.lag_of(group, now_ms - query.minutes * MINUTE_MS)
    return LagHistory(group=group, times_ms=points.times_ms, lag=points.lag)

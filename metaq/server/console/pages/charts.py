"""Charts of the last hours. ``charts.js`` draws what ``/charts/data`` has; below each stand the newest and highest values."""

from typing import Any, Final, NamedTuple

from metaq.server.console.visit import PageData, PageView, Route, Visit, link
from metaq.server.services.operating.history import (
    FiguresHistory,
    HistoryQuery,
    LagHistory,
    LagHistoryQuery,
    show_history,
    show_lag_history,
)

SPANS: Final = {15: "15 minutes", 60: "1 hour", 360: "6 hours"}
"""The times that a chart can have, in minutes."""
DEFAULT_SPAN: Final = 60


class ChartLine(NamedTuple):
    """A line of a chart."""

    figure: str
    label: str


class Chart(NamedTuple):
    """A chart."""

    title: str
    unit: str
    """``number``, ``size``, ``ratio`` or ``seconds``: how values are written."""
    lines: tuple[ChartLine, ...]

    @property
    def series(self) -> str:
        """The lines, as ``charts.js`` reads them."""
        return "|".join(f"{line.figure}:{line.label}" for line in self.lines)


CHARTS: Final = (
    Chart("Messages a second", "number", (ChartLine("put_per_second", "stored"), ChartLine("got_per_second", "given"))),
    Chart("Messages that wait for groups", "number", (ChartLine("lag", "lag of all groups"),)),
    Chart("Bytes a second", "size", (ChartLine("put_bytes_per_second", "stored"), ChartLine("got_bytes_per_second", "given"))),
    Chart("Longest delay of the event loop", "seconds", (ChartLine("longest_stall_seconds", "stall"),)),
    Chart("Processor", "ratio", (ChartLine("processor_ratio", "of one processor"),)),
    Chart("Disk", "ratio", (ChartLine("disk_used_ratio", "used"),)),
    Chart("Log", "size", (ChartLine("log_bytes", "size"),)),
    Chart("Connections", "number", (ChartLine("connections", "open"), ChartLine("gets_waiting", "waiting gets"))),
    Chart("Messages on their way", "number", (ChartLine("leases_open", "leased"), ChartLine("timers_pending", "delayed"))),
    Chart("Puts refused a second", "number", (ChartLine("refused_per_second", "refused"),)),
    Chart("What a slave lacks", "size", (ChartLine("replica_lag_bytes", "most of all slaves"),)),
)
LAG: Final = Chart("Lag over the last hours", "number", (ChartLine("lag", "lag"),))
"""Of one group."""


class Extremes(NamedTuple):
    """The newest and the highest value of a line, which stand below its chart."""

    label: str
    newest: float
    highest: float


def extremes(chart: Chart, history: FiguresHistory) -> list[Extremes]:
    """Return the newest and the highest values of a chart; none while there is no sample."""
    found = [(line.label, history.figures[line.figure]) for line in chart.lines]
    return [Extremes(label, values[-1], max(values)) for label, values in found if values]


def drawn(visit: Visit, charts: tuple[Chart, ...], minutes: int) -> dict[str, Any]:
    """Return the values with which ``chart_figures.html`` shows charts of this broker."""
    history = show_history(visit.call, HistoryQuery(minutes=minutes))
    return {"minutes": minutes, "spans": SPANS, "charts": [(chart, extremes(chart, history)) for chart in charts]}


def drawn_lag(visit: Visit, group: str) -> dict[str, Any]:
    """Return the values with which ``chart_figure.html`` shows the lag of a group."""
    lag = show_lag_history(visit.call, group, LagHistoryQuery()).lag
    extremes = [Extremes("lag", lag[-1], max(lag))] if lag else []
    return {"chart": LAG, "extremes": extremes, "data": link("charts", "groups", group)}


def _charts(visit: Visit) -> dict[str, Any]:
    return drawn(visit, CHARTS, visit.asked(HistoryQuery, minutes=visit.query.get("minutes") or DEFAULT_SPAN).minutes)


def _data(visit: Visit) -> FiguresHistory:
    return show_history(visit.call, visit.asked(HistoryQuery))


def _lag_data(visit: Visit) -> LagHistory:
    return show_lag_history(visit.call, visit.path["group"], visit.asked(LagHistoryQuery))


ROUTES: Final[tuple[Route, ...]] = (
    PageView("/charts", "charts.html", _charts),
    PageData("/charts/data", _data),
    PageData("/charts/groups/{group}", _lag_data),
)

"""The charts of the offset report as SVG, without scripts or colours of their own.

Colours are classes (``s0`` … ``s7`` of a line, ``h0`` … ``h6`` of a heat map, ``quiet``), for which the page has a light and a
dark form; `metaq.spark.report.pictures` draws the same charts as PNG. A chart of lines carries its data as text, for the page's
tooltips::

    <svg data-chart='{"from":left,"to":right,"times":[…],"lines":[{"name":…,"class":…,"values":[…]}]}'>
"""

import html
import json
import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Final, NamedTuple

from metaq.spark.report.wording import DAY, HOUR, MINUTE

COLOURS: Final = 8
LEVELS: Final = 7

_STEPS_S: Final = (
    *(n * size for size in (1, MINUTE) for n in (1, 2, 5, 10, 15, 30)),
    *(n * HOUR for n in (1, 2, 3, 6, 12)),
    *(n * DAY for n in (1, 2, 7, 14, 28)),
)
_NICE_TIMES: Final = (1, 10, MINUTE, 10 * MINUTE, HOUR, 6 * HOUR, DAY, 7 * DAY, 28 * DAY)
_LABEL: Final = 15
"""Height of a label, in pixels."""

Say = Callable[[float], str]
Value = float | None
Place = Callable[[float], float]


class Line(NamedTuple):
    """One value at each of the chart's times."""

    name: str
    values: Sequence[Value]
    colour: int | None
    """A number below ``COLOURS``; ``None`` for one of the many that are as they should be."""
    dashed: bool = False


class LineChart(NamedTuple):
    """Lines over time. Values are 0 or more."""

    title: str
    note: str
    times: Sequence[float]
    """Unix seconds."""
    lines: Sequence[Line]
    say: Say
    """Formats a value for the axis."""
    logarithmic: bool = False
    seconds: bool = False
    """Values are seconds, so the axis has minutes and hours."""


class Heat(NamedTuple):
    """A row of coloured cells for each name, a column for each time."""

    title: str
    note: str
    times: Sequence[float]
    names: Sequence[str]
    values: Sequence[Sequence[Value]]
    say: Say


class Bar(NamedTuple):
    """A value and the text after it."""

    name: str
    value: float
    text: str
    marked: bool = False


class Bars(NamedTuple):
    """Horizontal bars, as long as their values."""

    title: str
    note: str
    bars: Sequence[Bar]
    whole: float | None = None
    """The value of a bar as wide as the chart; by default the largest."""


Chart = LineChart | Heat | Bars


class Axis(NamedTuple):
    """A scale of values from 0 to ``top``."""

    top: float
    ticks: list[float]
    logarithmic: bool

    def share(self, value: float) -> float:
        """Return the place of a value: 0 at the bottom, 1 at the top."""
        return math.log1p(value) / math.log1p(self.top) if self.logarithmic else value / self.top


def value_axis(values: Sequence[float], *, logarithmic: bool, seconds: bool = False) -> Axis:
    """Return an axis for values, with about five ticks."""
    largest = max((value for value in values if math.isfinite(value)), default=0.0) or 1.0
    if logarithmic:
        nice = list(map(float, _NICE_TIMES)) if seconds else [10.0**exponent for exponent in range(16)]
        ticks = nice[: next((at for at, tick in enumerate(nice) if tick >= largest), len(nice) - 1) + 1]
        top = max(largest, ticks[-1] if ticks[-1] < largest * 3 else largest * 1.2)
        shown = [tick for tick in ticks if tick <= top]
        return Axis(top, [0.0, *shown[:: max(1, round(len(shown) / 6))]], logarithmic=True)
    step = 10.0 ** math.floor(math.log10(largest / 4))
    step *= next(factor for factor in (1, 2, 2.5, 5, 10) if largest / (step * factor) <= 4.5)
    return Axis(max(largest * 1.05, step), [step * n for n in range(int(largest * 1.05 / step) + 1)], logarithmic=False)


def time_ticks(first: float, last: float, most: int = 9) -> list[tuple[float, str]]:
    """Return round times with their labels: the day at midnight, else the time, with seconds if it has any."""
    step = next((step for step in _STEPS_S if (last - first) / step <= most), _STEPS_S[-1])
    start = math.ceil(first / step) * step
    ticks = [start + step * n for n in range(int((last - start) / step) + 1)] if start <= last else []
    return [(tick, _time_label(tick)) for tick in ticks]


def _time_label(at: float) -> str:
    when = datetime.fromtimestamp(at, UTC)
    if at % DAY == 0:
        return f"{when:%b} {when.day}"
    return f"{when:%H:%M}" if at % MINUTE == 0 else f"{when:%H:%M:%S}"


def level(value: Value, top: float) -> int:
    """Return the colour of a heat map's cell: 0 for no messages, the others on a logarithmic scale up to ``top``."""
    if value is None or value <= 0:
        return 0
    return 1 + min(LEVELS - 2, int(math.log1p(value) / math.log1p(top) * (LEVELS - 1)))


def level_ends(top: float) -> list[float]:
    """Return the upper end of each level but the first."""
    return [math.expm1(math.log1p(top) * n / (LEVELS - 1)) for n in range(1, LEVELS)]


# -- SVG --------------------------------------------------------------------------------------------------------------


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" class="{kind}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _time(x: float, right: float, y: float, label: str) -> str:
    """Return the label of a time below its place; at the right end, before it."""
    return _text(x, y, label, "tick", "end" if x > right - 20 else "middle")


def _svg(width: float, height: float, label: str, inside: list[str], data: object = None) -> str:
    attributes = f'viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{html.escape(label)}"'
    if data is not None:
        written = html.escape(json.dumps(data, separators=(",", ":")), quote=False).replace("'", "&#39;")
        attributes += f" data-chart='{written}'"
    return f"<svg {attributes}>{''.join(inside)}</svg>"


def _path(times: Sequence[float], values: Sequence[Value], x: Place, y: Place) -> str:
    """Return a line with holes where there is no value."""
    steps, pen = [], "M"
    for time, value in zip(times, values, strict=True):
        if value is None:
            pen = "M"
        else:
            steps.append(f"{pen}{x(time):.1f} {y(value):.1f}")
            pen = "L"
    return "".join(steps)


def draw_lines(chart: LineChart, width: float = 1080, height: float = 300, *, labelled: bool = True) -> str:
    """Return an SVG of lines; with ``labelled`` the coloured ones have their names at their ends."""
    left, right, top, bottom = 64.0, (width - 190.0 if labelled else width - 12.0), 12.0, height - 26.0
    first, last = chart.times[0], max(chart.times[-1], chart.times[0] + 1)
    axis = value_axis(
        [value for line in chart.lines for value in line.values if value is not None],
        logarithmic=chart.logarithmic,
        seconds=chart.seconds,
    )

    def x(at: float) -> float:
        return left + (at - first) / (last - first) * (right - left)

    def y(value: float) -> float:
        return bottom - axis.share(value) * (bottom - top)

    inside = []
    for tick in axis.ticks:
        inside.append(f'<path class="grid" d="M{left:.0f} {y(tick):.1f}H{right:.0f}"/>')
        inside.append(_text(left - 8, y(tick) + 4, chart.say(tick), "tick", "end"))
    for at, label in time_ticks(first, last, 9 if labelled else 5):
        inside.append(_time(x(at), right, bottom + 18, label))
    for line in sorted(chart.lines, key=lambda line: line.colour is not None):
        kind = "quiet" if line.colour is None else f"line s{line.colour}"
        dash = ' stroke-dasharray="5 4"' if line.dashed else ""
        path = _path(chart.times, line.values, x, y)
        inside.append(f'<path class="{kind}"{dash} d="{path}"><title>{html.escape(line.name)}</title></path>')
    if labelled:
        inside += _end_labels(chart, right, y, top, bottom)
    data = {
        "from": left,
        "to": right,
        "times": [round(at) for at in chart.times],
        "lines": [
            {
                "name": line.name,
                "class": "quiet" if line.colour is None else f"s{line.colour}",
                "values": [None if value is None else chart.say(value) for value in line.values],
            }
            for line in chart.lines
            if line.colour is not None
        ],
    }
    return _svg(width, height, f"{chart.title}. {chart.note}", inside, data)


def _end_labels(chart: LineChart, right: float, y: Place, top: float, bottom: float) -> list[str]:
    """Return names at the ends of the coloured lines, moved apart where they would cover each other."""
    ends = []
    for line in chart.lines:
        known = [value for value in line.values if value is not None]
        if line.colour is not None and known:
            ends.append((y(known[-1]), line))
    ends.sort(key=lambda end: end[0])
    places: list[float] = []
    for place, _ in ends:
        places.append(max(place, places[-1] + _LABEL) if places else max(place, top + 4))
    for at in reversed(range(len(places))):
        places[at] = min(places[at], bottom - (len(places) - 1 - at) * _LABEL)
    return [
        f'<path class="leader" d="M{right:.0f} {end:.1f}L{right + 8:.0f} {place:.1f}"/>'
        + _text(right + 12, place + 4, shortened(line.name, 24), f"name s{line.colour}")
        for place, (end, line) in zip(places, ends, strict=True)
    ]


def shortened(name: str, most: int) -> str:
    """Return a name in at most so many letters."""
    return name if len(name) <= most else f"{name[: most - 1]}…"


def draw_heat(chart: Heat, width: float = 1080) -> str:
    """Return an SVG of a heat map with its legend."""
    left, right, top = 110.0, width - 12.0, 6.0
    cell_height = max(6.0, min(22.0, 420.0 / max(1, len(chart.names))))
    cell_width = (right - left) / max(1, len(chart.times))
    bottom = top + cell_height * len(chart.names)
    highest = max((value or 0.0 for row in chart.values for value in row), default=0.0) or 1.0
    levels = [[level(value, highest) for value in row] for row in chart.values]
    inside = []
    for number in range(LEVELS):
        cells = []
        for place, row_levels in enumerate(levels):
            cells += _runs(row_levels, number, left, cell_width, top + place * cell_height, cell_height)
        if cells:
            inside.append(f'<path class="h{number}" d="{"".join(cells)}"/>')
    every = max(1, math.ceil(_LABEL / cell_height))
    for place, name in enumerate(chart.names):
        if place % every == 0:
            y = top + (place + 0.5) * cell_height + 4
            inside.append(_text(left - 8, y, shortened(name, 15), "tick", "end"))
    first, last = chart.times[0], max(chart.times[-1], chart.times[0] + 1)
    for at, label in time_ticks(first, last):
        inside.append(_time(left + (at - first) / (last - first) * (right - left), right, bottom + 16, label))
    inside += _legend(chart, highest, left, bottom + 32)
    return _svg(width, bottom + 50, f"{chart.title}. {chart.note}", inside)


def _runs(levels: list[int], number: int, left: float, width: float, y: float, height: float) -> list[str]:
    """Return rectangles of neighbouring cells of one level, with a thin gap between rows."""
    rectangles, start = [], None
    for column, found in enumerate([*levels, -1]):
        if found == number and start is None:
            start = column
        elif found != number and start is not None:
            wide = (column - start) * width
            rectangles.append(f"M{left + start * width:.1f} {y:.1f}h{wide:.1f}v{height - 1:.1f}h-{wide:.1f}z")
            start = None
    return rectangles


def _legend(chart: Heat, highest: float, left: float, y: float) -> list[str]:
    ends = ["none", *(f"≤ {chart.say(end)}" for end in level_ends(highest))]
    parts = []
    for number, text in enumerate(ends):
        x = left + number * 112
        parts.append(f'<rect class="h{number}" x="{x:.0f}" y="{y:.0f}" width="16" height="12" rx="2"/>')
        parts.append(_text(x + 22, y + 10, text, "tick"))
    return parts


def draw_bars(chart: Bars, width: float = 520) -> str:
    """Return an SVG of bars."""
    left, right, height = 130.0, width - 150.0, 24.0
    whole = chart.whole or max((bar.value for bar in chart.bars), default=0.0) or 1.0
    inside = []
    for place, bar in enumerate(chart.bars):
        y = place * height + 4
        wide = min(1.0, bar.value / whole) * (right - left)
        inside.append(_text(left - 8, y + 13, shortened(bar.name, 17), "tick", "end"))
        inside.append(f'<rect class="track" x="{left:.0f}" y="{y:.0f}" width="{right - left:.0f}" height="16" rx="3"/>')
        kind = "bar marked" if bar.marked else "bar"
        inside.append(f'<rect class="{kind}" x="{left:.0f}" y="{y:.0f}" width="{max(wide, 1.5):.1f}" height="16" rx="3"/>')
        inside.append(_text(right + 8, y + 13, bar.text, "value"))
    return _svg(width, len(chart.bars) * height + 8, f"{chart.title}. {chart.note}", inside)


def draw_spark(values: Sequence[Value], colour: int | None) -> str:
    """Return an SVG of a line as small as a word, without axes."""
    highest = max((value for value in values if value is not None), default=0.0) or 1.0
    step = 118.0 / max(1, len(values) - 1)
    kind = "quiet" if colour is None else f"line s{colour}"
    path = _path(range(len(values)), values, lambda at: 1 + at * step, lambda value: 25 - value / highest * 22)
    return f'<svg class="spark" viewBox="0 0 120 28" aria-hidden="true"><path class="{kind}" d="{path}"/></svg>'

"""The report's charts as PNG for mails and chats, drawn by matplotlib (the extra ``report``)."""

import hashlib
import re
import shutil
from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from metaq.spark.report.charts import LEVELS, Bars, Chart, Heat, LineChart, level, level_ends, shortened, time_ticks, value_axis
from metaq.spark.report.contents import Contents

FOLDER: Final = "pictures"
_INK: Final = "#1b2430"
_QUIET: Final = "#b6c0cb"
_BAR, _MARKED = "#7d9cc4", "#c4352b"
_COLOURS: Final = ("#c4352b", "#2a6fdb", "#c46a00", "#7a4bd1", "#0c7f80", "#b8327a", "#3b8030", "#55657a")
_HEAT: Final = ("#eef2f6", "#fdebd3", "#fcd2a2", "#f7ab64", "#e67c33", "#bb471c", "#7f1d1d")
_DPI: Final = 110
_MOST_LETTERS: Final = 40
"""Letters of a name beside a chart, which needs the room; above it there is twice as much."""
_MOST_BYTES: Final = 80
"""Bytes of a file's name: file systems take 255, and groups may be called anything."""


def draw_pictures(contents: Contents, out: Path) -> list[Path]:
    """Draw one file for each chart into the folder ``pictures``, replacing those of an earlier report. Return their paths.

    They are ``lag.png``, ``behind.png``, ``rates-…``, ``waiting-…``, ``skew-…`` and ``retention.png``.
    """
    folder = out / FOLDER
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    charts: list[tuple[str, Chart]] = [
        ("lag", contents.lag),
        ("behind", contents.age),
        *((f"rates-{chart.title}", chart) for chart in contents.rates),
        *((f"waiting-{chart.title}", chart) for chart in contents.heats),
        *((f"skew-{chart.title}", chart) for chart in contents.skew),
        *([("retention", contents.retention)] if contents.retention else []),
    ]
    written: dict[str, Path] = {}
    for title, chart in charts:
        name = _file_name(title, written)
        written[name] = folder / f"{name}.png"
        _draw(chart).savefig(written[name], dpi=_DPI)
    return list(written.values())


def _file_name(title: str, taken: Collection[str]) -> str:
    """Return a name without ending for a picture. One that is cut, or would be taken, ends with a digest of the title."""
    whole = re.sub(r"[^\w.-]+", "-", title)
    name = whole.encode()[:_MOST_BYTES].decode(errors="ignore")
    if name == whole and name not in taken:
        return name
    return f"{name}-{hashlib.sha256(title.encode()).hexdigest()[:8]}"


def _draw(chart: Chart) -> Figure:
    rows = len(chart.bars) if isinstance(chart, Bars) else len(chart.names) if isinstance(chart, Heat) else 0
    with mpl.rc_context({"font.size": 9, "axes.edgecolor": _QUIET, "text.color": _INK, "axes.labelcolor": _INK}):
        figure = Figure(figsize=(10, max(3.4, 1.4 + 0.24 * rows)), layout="constrained")
        axes = figure.add_subplot()
        # names of groups are not formulas: $ is a letter
        title = shortened(chart.title, 2 * _MOST_LETTERS)
        axes.set_title(title, loc="left", parse_math=False, fontsize=13, fontweight="bold", color=_INK)
        axes.spines[["top", "right"]].set_visible(False)
        if isinstance(chart, LineChart):
            _lines(axes, chart)
        elif isinstance(chart, Heat):
            _heat(axes, chart)
        else:
            _bars(axes, chart)
    return figure


def _time_axis(axes: Axes, times: Sequence[float]) -> None:
    ticks = time_ticks(times[0], times[-1])
    axes.set_xticks([at for at, _ in ticks], [label for _, label in ticks])
    begin, end = (datetime.fromtimestamp(at, UTC) for at in (times[0], times[-1]))
    axes.set_xlabel(f"{begin:%Y-%m-%d %H:%M} to {end:%Y-%m-%d %H:%M} UTC", fontsize=8)


def _lines(axes: Axes, chart: LineChart) -> None:
    known = [value for line in chart.lines for value in line.values if value is not None]
    axis = value_axis(known, logarithmic=chart.logarithmic, seconds=chart.seconds)
    for line in sorted(chart.lines, key=lambda line: line.colour is not None):
        # matplotlib leaves a hole at each nan
        shares = [float("nan") if value is None else axis.share(value) for value in line.values]
        colour = _QUIET if line.colour is None else _COLOURS[line.colour]
        width = 1.0 if line.colour is None else 1.8
        axes.plot(chart.times, shares, color=colour, linewidth=width, linestyle="--" if line.dashed else "-")
        if line.colour is not None:
            axes.annotate(
                shortened(line.name, _MOST_LETTERS), (chart.times[-1], shares[-1]), (6, 0), textcoords="offset points",
                color=colour, va="center", fontweight="bold", parse_math=False,
            )  # fmt: skip
    axes.set_yticks([axis.share(tick) for tick in axis.ticks], [chart.say(tick) for tick in axis.ticks])
    axes.set_ylim(0, 1.02)
    axes.grid(axis="y", color="#e9edf1")
    _time_axis(axes, chart.times)


def _heat(axes: Axes, chart: Heat) -> None:
    highest = max((value or 0.0 for row in chart.values for value in row), default=0.0) or 1.0
    levels = [[level(value, highest) for value in row] for row in chart.values]
    step = chart.times[1] - chart.times[0] if len(chart.times) > 1 else 60.0
    place = (chart.times[0], chart.times[-1] + step, len(chart.names) - 0.5, -0.5)
    image = axes.imshow(
        levels, aspect="auto", interpolation="nearest", cmap=ListedColormap(_HEAT), vmin=-0.5, vmax=LEVELS - 0.5, extent=place
    )
    _name_rows(axes, chart.names)
    axes.hlines([row + 0.5 for row in range(len(chart.names) - 1)], place[0], place[1], color="white", linewidth=0.8)
    bar = axes.figure.colorbar(image, ax=axes, ticks=range(LEVELS), pad=0.01)
    bar.ax.set_yticklabels(["none", *(f"≤ {chart.say(end)}" for end in level_ends(highest))])
    _time_axis(axes, chart.times)


def _name_rows(axes: Axes, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), [shortened(name, _MOST_LETTERS) for name in names], parse_math=False)


def _bars(axes: Axes, chart: Bars) -> None:
    whole = chart.whole or max((bar.value for bar in chart.bars), default=0.0) or 1.0
    places = range(len(chart.bars))
    axes.barh(places, [bar.value for bar in chart.bars], color=[_MARKED if bar.marked else _BAR for bar in chart.bars])
    for place, bar in enumerate(chart.bars):
        axes.annotate(bar.text, (bar.value, place), (5, 0), textcoords="offset points", va="center", fontsize=8)
    _name_rows(axes, [bar.name for bar in chart.bars])
    axes.invert_yaxis()
    axes.set_xlim(0, whole * 1.15)
    axes.set_xticks([])
    axes.set_xlabel(chart.note, fontsize=8)

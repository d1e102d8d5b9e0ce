"""Templates filled with values. Every value is escaped; times, sizes and counts are written as people read them."""

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import gevent
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from metaq.server.console.visit import link

TEMPLATES: Final = Path(__file__).parent / "templates"
SLICE_S: Final = 0.002
"""How long other greenlets wait while a page is written, and"""
REST_S: Final = 0.001
"""how long they then run, at least."""
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")
_SPANS: Final = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))


class Renderer:
    """Fills templates."""

    def __init__(self, **names: Any) -> None:
        """Prepare. ``names`` are what every template knows."""
        self._templates = Environment(
            loader=FileSystemLoader(TEMPLATES),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            auto_reload=False,
        )
        self._templates.filters.update(number=number, size=size, time=written_time, span=span, ago=ago, plural=plural)
        self._templates.globals.update(link=link, **names)

    def fill(self, template: str, values: Mapping[str, Any]) -> str:
        """Return a filled template. Others run meanwhile."""
        pieces = []
        began = time.monotonic()
        for piece in self._templates.get_template(template).generate(values):
            pieces.append(piece)
            if time.monotonic() - began > SLICE_S:
                gevent.sleep(REST_S)
                began = time.monotonic()
        return "".join(pieces)


def number(value: float) -> str:
    """Return a number with separators of thousands; one below 100 that is no integer with a decimal."""
    return f"{value:,.1f}" if isinstance(value, float) and abs(value) < 100 and value != int(value) else f"{value:,.0f}"


def plural(count: int, one: str, many: str = "") -> str:
    """Return a count with its noun."""
    return f"{count:,} {one if count == 1 else many or f'{one}s'}"


def size(count: float) -> str:
    """Return a number of bytes in the unit that suits it."""
    for unit in _UNITS:
        if count < 1024 or unit == _UNITS[-1]:
            break
        count /= 1024
    return f"{count:,.0f} {unit}" if unit == "B" or count >= 100 else f"{count:,.1f} {unit}"


def written_time(time_ms: int | None) -> Markup | str:
    """Return a time in UTC, to the millisecond; a dash when there is none, and the number when no calendar has it."""
    if time_ms is None:
        return "–"
    try:
        moment = datetime.fromtimestamp(time_ms / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return str(time_ms)
    shown = moment.strftime("%Y-%m-%d %H:%M:%S") + f".{moment.microsecond // 1000:03}"
    return Markup('<time datetime="{}">{}</time>').format(moment.isoformat(timespec="milliseconds"), shown)


def span(seconds: float) -> str:
    """Return a length of time in its two largest units."""
    left = int(seconds)
    parts: list[str] = []
    for unit_s, name in _SPANS:
        if left >= unit_s or (unit_s == 1 and not parts):
            parts.append(f"{left // unit_s} {name}")
            left %= unit_s
        elif parts:
            break
    return " ".join(parts[:2])


def ago(time_ms: int | None, now_ms: int) -> str:
    """Return how long ago a time was; a dash when there is none."""
    if time_ms is None:
        return "–"
    return f"{span((now_ms - time_ms) / 1000)} ago" if time_ms <= now_ms else f"in {span((time_ms - now_ms) / 1000)}"

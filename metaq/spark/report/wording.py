"""Numbers in words, as people read them."""

from collections.abc import Sequence
from datetime import datetime
from typing import Final

MINUTE: Final = 60
HOUR: Final = 3600
DAY: Final = 86_400
NAMED: Final = 5
"""Of many partitions, at most this many are named."""
_UNITS: Final = ((DAY, "d", HOUR, "h"), (HOUR, "h", MINUTE, "min"), (MINUTE, "min", 1, "s"))


def duration(seconds: float) -> str:
    """Return ``2 d 4 h``, ``1 h 30 min`` or ``45 s``: at most two units, and one from ten of it on."""
    for size, name, smaller, smaller_name in _UNITS:
        if seconds >= size:
            whole, rest = divmod(round(seconds / smaller), size // smaller)
            return f"{whole} {name}" if rest == 0 or whole >= 10 else f"{whole} {name} {rest} {smaller_name}"
    return f"{seconds:.0f} s" if seconds >= 1 or seconds == 0 else "less than 1 s"


def count(value: float) -> str:
    """Return ``107,696``, and from a million on ``1.31 M``."""
    for size, name in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= size:
            return f"{value / size:.3g} {name}"
    return f"{value:,.0f}"


def short_count(value: float) -> str:
    """Return a number for an axis, to two digits: ``100``, ``20 k``, ``1.3 M``."""
    for size, name in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= size * 0.995:
            return f"{float(f'{value / size:.2g}'):g}{name}"
    return f"{float(f'{value:.2g}'):g}"


def rate(per_s: float) -> str:
    """Return ``20.1/s`` or ``1,250/s``; below one in ten seconds, a rate per minute or hour."""
    if per_s >= 100:
        return f"{per_s:,.0f}/s"
    if per_s >= 0.1 or per_s == 0:
        return f"{per_s:.3g}/s"
    return f"{per_s * MINUTE:.2g}/min" if per_s * MINUTE >= 0.1 else f"{per_s * HOUR:.2g}/h"


def percent(share: float) -> str:
    return f"{share * 100:.0f} %" if share >= 0.01 or share == 0 else "less than 1 %"


def clock(at: datetime, beside: datetime) -> str:
    """Return ``16:30`` on the day of ``beside``, ``Mar 9, 16:30`` on another."""
    return f"{at:%H:%M}" if at.date() == beside.date() else f"{at:%b} {at.day}, {at:%H:%M}"


def listed(names: Sequence[str]) -> str:
    """Return ``1``, ``1 and 2``, ``1, 2 and 9 more``."""
    if len(names) > NAMED:
        names = [*names[: NAMED - 1], f"{len(names) - NAMED + 1} more"]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"

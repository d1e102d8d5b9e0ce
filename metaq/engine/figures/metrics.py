"""Metrics, and their form for Prometheus (text format 0.0.4).

::

    # HELP metaq_held_pulls Gets and pulls that wait for a message.
    # TYPE metaq_held_pulls gauge
    metaq_held_pulls 3
    # HELP metaq_messages_in_total Messages that can be read, put since the start.
    # TYPE metaq_messages_in_total counter
    metaq_messages_in_total{topic="orders"} 17
    # HELP metaq_send_seconds …
    # TYPE metaq_send_seconds histogram
    metaq_send_seconds_bucket{le="0.001"} 12
    metaq_send_seconds_bucket{le="+Inf"} 13
    metaq_send_seconds_sum 0.0231
    metaq_send_seconds_count 13

Except for histograms nothing here counts by itself: the values are read from the broker's state when they are asked for.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from itertools import accumulate
from typing import Final, NamedTuple

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_ESCAPED: Final = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


class MetricKind(StrEnum):
    """The Prometheus type of a metric, which says how its values may be used."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Metric(NamedTuple):
    """One metric. Its unit is a word of its help, and ends its name where it is a base unit (seconds, bytes, ratio)."""

    name: str
    kind: MetricKind
    unit: str
    help: str
    labels: tuple[str, ...] = ()


class Histogram:
    """A histogram of durations in seconds, since it was created."""

    __slots__ = ("_bounds", "_counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        """Create it with rising ``bounds``; durations longer than the last one are counted, too."""
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        """The sum of all observed durations."""

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self.total += seconds

    def buckets(self) -> Iterator[tuple[str, int]]:
        """Return each bound as text, and how many durations did not exceed it; ``+Inf`` comes last."""
        return zip((*map(_number, self._bounds), "+Inf"), accumulate(self._counts), strict=True)


Sample = tuple[tuple[str, ...], float | Histogram]
"""The values of the labels, in their order, and the measured value."""
Family = tuple[Metric, Iterable[Sample]]
"""A metric and all of its samples, which may be generated while they are written."""


def write(families: Iterable[Family], rest: Callable[[], None]) -> Iterator[str]:
    """Yield the text of all metrics, in pieces of whole lines; ``rest`` is called after each sample."""
    for metric, samples in families:
        yield f"# HELP {metric.name} {_escaped_help(metric.help)}\n# TYPE {metric.name} {metric.kind}\n"
        for values, measured in samples:
            yield _sample(metric, values, measured)
            rest()


def _sample(metric: Metric, values: tuple[str, ...], measured: float | Histogram) -> str:
    pairs = [f'{label}="{value.translate(_ESCAPED)}"' for label, value in zip(metric.labels, values, strict=True)]
    if not isinstance(measured, Histogram):
        return f"{metric.name}{_braces(pairs)} {_number(measured)}\n"
    count, lines = 0, []
    for bound, count in measured.buckets():
        limit = f'le="{bound}"'
        lines.append(f"{metric.name}_bucket{_braces([*pairs, limit])} {count}\n")
    lines.append(f"{metric.name}_sum{_braces(pairs)} {_number(measured.total)}\n")
    lines.append(f"{metric.name}_count{_braces(pairs)} {count}\n")
    return "".join(lines)


def _braces(pairs: list[str]) -> str:
    return "{" + ",".join(pairs) + "}" if pairs else ""


def _number(value: float) -> str:
    return repr(value) if isinstance(value, float) else str(int(value))


def _escaped_help(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")

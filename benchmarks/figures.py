"""Measured figures and the conclusions from them. Pure: no process, no clock, no file."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import ceil
from statistics import median
from typing import Literal

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, NonNegativeInt


class MeasurementError(Exception):
    """A figure could not be taken; the text says of what and why."""


class Latencies(BaseModel):
    """Latencies of one run in microseconds, each off by at most 1.6 %."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    p50_us: NonNegativeFloat
    p99_us: NonNegativeFloat
    p999_us: NonNegativeFloat
    max_us: NonNegativeFloat
    messages: NonNegativeInt
    messages_per_second: NonNegativeFloat
    seconds: NonNegativeFloat
    rate_wanted: NonNegativeInt


class Load(Latencies):
    """The line that `load` prints. `bytes` and `mb_per_second` (10⁶) count the bodies of whole messages.

    `batch` is how many messages a request brings or asks for; 0 for plain puts.
    """

    protocol: str
    connections: NonNegativeInt
    in_flight: NonNegativeInt
    body_bytes: NonNegativeInt
    block_bytes: NonNegativeInt
    batch: NonNegativeInt
    requests: NonNegativeInt
    bytes: NonNegativeInt
    mb_per_second: NonNegativeFloat
    wraps: NonNegativeInt
    errors: NonNegativeInt
    first_error: str


class SyncLoop(Latencies):
    """The line that `limits fdatasync` prints."""

    record_bytes: NonNegativeInt
    syncs: NonNegativeInt


@dataclass(frozen=True)
class Spread:
    """The median of several rounds and how far they lay apart."""

    median: float
    low: float
    high: float
    rounds: int


def spread(values: Sequence[float]) -> Spread | None:
    """Summarise one figure's rounds; None when no round could be measured."""
    return Spread(median(values), min(values), max(values), len(values)) if values else None


def ratio(ours: Spread | None, theirs: Spread | None) -> float | None:
    """Divide the medians; None when either is missing or theirs is 0."""
    if ours is None or theirs is None or theirs.median == 0:
        return None
    return ours.median / theirs.median


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that the given share (0 to 1) of all values does not exceed."""
    return sorted(values)[max(0, ceil(share * len(values)) - 1)]


class Verdict(Enum):
    """The verdict of a bound on a figure. A must that was not measured is not held."""

    HELD = "pass"
    MISSED = "FAIL"
    REACHED = "reached"
    NOT_REACHED = "not reached"
    NOT_MEASURED = "not measured"
    NONE = "-"


@dataclass(frozen=True)
class Check:
    """One line of the requirements: `must` holds, `aim` is tried for; either may be absent."""

    name: str
    measured: float | None
    sense: Literal["at least", "at most"]
    must: float | None = None
    aim: float | None = None
    unit: str = ""

    def _within(self, bound: float) -> bool:
        assert self.measured is not None
        return self.measured >= bound if self.sense == "at least" else self.measured <= bound

    @property
    def must_verdict(self) -> Verdict:
        if self.must is None:
            return Verdict.NONE
        if self.measured is None:
            return Verdict.NOT_MEASURED
        return Verdict.HELD if self._within(self.must) else Verdict.MISSED

    @property
    def aim_verdict(self) -> Verdict:
        if self.aim is None:
            return Verdict.NONE
        if self.measured is None:
            return Verdict.NOT_MEASURED
        return Verdict.REACHED if self._within(self.aim) else Verdict.NOT_REACHED

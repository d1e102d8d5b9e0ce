"""Retention: deciding which segments to delete, and whether there is room to write.

The functions here are pure: the caller asks the clock and the disk, and deletes the files.

==========  =====================================  ==========================================
watermark   default of used ÷ (used + available)   then
==========  =====================================  ==========================================
clean       75 %                                   expired segments go at any hour
force       85 %                                   the oldest segments go whether expired or not, a few at a time
refuse      90 %                                   no more puts until there is room again
==========  =====================================  ==========================================

A ratio alone would refuse writes with a hundred gigabytes free on a large disk, so a watermark applies only while less
than ``ample_free_bytes`` are available. Below ``least_free_bytes`` puts are refused at any ratio.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, NamedTuple

from metaq.store.files.disk import Usage

FORCED_AT_ONCE: Final = 10
HOUR_MS: Final = 3_600_000


@dataclass(frozen=True, slots=True)
class RetentionRules:
    """The settings of retention. Ratios are between 0 and 1."""

    keep_ms: int = 72 * HOUR_MS
    hour: int = 4
    """The hour of the day, UTC, in which expired segments are deleted."""
    clean_ratio: float = 0.75
    force_ratio: float = 0.85
    refuse_ratio: float = 0.90
    ample_free_bytes: int = 10 * 1024**3
    least_free_bytes: int = 64 * 1024**2


class SegmentAge(NamedTuple):
    """The age of a full segment, which is never the one being written to."""

    base: int
    closed_ms: int
    """Store time of the first record after it, in milliseconds."""


class Plan(NamedTuple):
    """The decision of retention."""

    delete: list[int]
    """Base offsets of the segments to delete, oldest first."""
    refuse: str | None
    """Why puts are refused; ``None`` when they are accepted."""
    due_before: int | None = None
    """Log offset before which everything was due, deleted or not. ``delete_expired`` fills it in."""


def passed(usage: Usage, ratio: float, rules: RetentionRules) -> bool:
    """Return whether disk usage has passed a watermark that applies."""
    return usage.ratio >= ratio and usage.available < rules.ample_free_bytes


def room_refusal(usage: Usage, rules: RetentionRules) -> str | None:
    """Return why there is no room for puts; ``None`` when there is."""
    if usage.available < rules.least_free_bytes:
        return f"{usage.available} bytes are free, fewer than {rules.least_free_bytes} (least_free_bytes)"
    if passed(usage, rules.refuse_ratio, rules):
        return f"the disk is {usage.ratio:.1%} full, the limit is {rules.refuse_ratio:.0%} (refuse_ratio)"
    return None


def plan(
    segments: Sequence[SegmentAge], now_ms: int, usage: Usage, rules: RetentionRules, *, at_any_hour: bool = False
) -> Plan:
    """Return which of ``segments``, given in the order of the log, are to be deleted, and whether puts are refused.

    With ``at_any_hour`` expired segments are due whatever the hour.
    """
    due = at_any_hour or passed(usage, rules.clean_ratio, rules)
    if passed(usage, rules.force_ratio, rules):
        doomed = [segment.base for segment in segments[:FORCED_AT_ONCE]]
    elif due or datetime.fromtimestamp(now_ms / 1000, UTC).hour == rules.hour:
        doomed = []
        for segment in segments:
            if now_ms - segment.closed_ms < rules.keep_ms:
                break  # segments are deleted from the oldest on, without gaps
            doomed.append(segment.base)
    else:
        doomed = []
    return Plan(doomed, room_refusal(usage, rules))

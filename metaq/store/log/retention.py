"""What to delete, and whether there is room to write. Pure: the caller looks at clock and disk, and unlinks.

==========  =====================================  ==========================================
watermark   default of used ÷ (used + available)   then
==========  =====================================  ==========================================
clean       75 %                                   expired segments go at any hour
force       85 %                                   the oldest segments go whether expired or not, a few at a time
refuse      90 %                                   no more puts until there is room again
==========  =====================================  ==========================================

A ratio alone would refuse writes with a hundred gigabytes free on a large disk, so a watermark counts only while less
than ``ample_free_bytes`` are available. Below ``least_free_bytes`` puts are refused whatever the ratio.
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
    """Settings; ratios between 0 and 1."""

    keep_ms: int = 72 * HOUR_MS
    hour: int = 4
    """Hour of the day, UTC, in which expired segments go."""
    clean_ratio: float = 0.75
    force_ratio: float = 0.85
    refuse_ratio: float = 0.90
    ample_free_bytes: int = 10 * 1024**3
    least_free_bytes: int = 64 * 1024**2


class SegmentAge(NamedTuple):
    """A full segment, never the one that is written to."""

    base: int
    closed_ms: int
    """Store time of the first record behind it."""


class Plan(NamedTuple):
    """What retention decided."""

    delete: list[int]
    """Base offsets, oldest first."""
    refuse: str | None
    """Why puts are refused, or ``None``."""
    due_before: int | None = None
    """Log offset before which everything was due, deleted or not; filled in when it is done."""


def passed(usage: Usage, ratio: float, rules: RetentionRules) -> bool:
    """Whether a watermark counts."""
    return usage.ratio >= ratio and usage.available < rules.ample_free_bytes


def room_refusal(usage: Usage, rules: RetentionRules) -> str | None:
    """Why there is no room for puts, or ``None`` when there is."""
    if usage.available < rules.least_free_bytes:
        return f"{usage.available} bytes are free, fewer than {rules.least_free_bytes} (least_free_bytes)"
    if passed(usage, rules.refuse_ratio, rules):
        return f"the disk is {usage.ratio:.1%} full, the limit is {rules.refuse_ratio:.0%} (refuse_ratio)"
    return None


def plan(
    segments: Sequence[SegmentAge], now_ms: int, usage: Usage, rules: RetentionRules, *, at_any_hour: bool = False
) -> Plan:
    """Decide; ``segments`` are in order of their base."""
    due = at_any_hour or passed(usage, rules.clean_ratio, rules)
    if passed(usage, rules.force_ratio, rules):
        doomed = [segment.base for segment in segments[:FORCED_AT_ONCE]]
    elif due or datetime.fromtimestamp(now_ms / 1000, UTC).hour == rules.hour:
        doomed = []
        for segment in segments:
            if now_ms - segment.closed_ms < rules.keep_ms:
                break  # the log loses its oldest end only
            doomed.append(segment.base)
    else:
        doomed = []
    return Plan(doomed, room_refusal(usage, rules))

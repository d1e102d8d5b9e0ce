"""Figures of timers, for stats."""

from metaq.engine.timers.timers import Timers


def figures(timers: Timers) -> dict[str, object]:
    """Return values by name."""
    return {
        "timers_pending": timers.pending,
        "timers_late_ms": timers.late_ms,
        "timers_parked": timers.parked,
        "timers_delivered": timers.delivered,
        "timers_cancelled": timers.cancelled,
        "timers_dropped": timers.dropped,
        "timers_moved": timers.moved,
        "timers_recurring": timers.recurring,
        "timers_runs_dropped": timers.runs_dropped,
        "timer_index": "reading the log" if timers.is_reading else "yes" if timers.is_used else "unused",
        "timer_index_waiting": timers.waiting,
        "timer_index_packed": timers.packed,
    }

"""PURE: the arguments by which a queue was declared, and the time for which a task is meant."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

MAX_PRIORITY: Final = "x-max-priority"
EXPIRES: Final = "x-expires"
DELIVERY_LIMIT: Final = "x-delivery-limit"
MOST_DELIVERIES: Final = 1_000_000
"""The deliveries of a message unless the queue says otherwise: a prefetched message that a worker gives back was delivered."""
MOST_LEASE_MS: Final = 30 * 24 * 3_600_000
"""The longest time for which a task may run without coming again; brokers alone allow 12 hours."""


class QueueTerms(NamedTuple):
    """A queue as it was declared."""

    is_temporary: bool
    """It has no topic: it belongs to the process that declares it, and reads the topics of its exchanges."""
    auto_delete: bool
    levels: int
    """The levels of priority, 1 for none."""
    deliveries: int
    """How often a message is delivered before it becomes a dead letter."""
    expires_s: float
    """For so long a temporary queue waits for the next connection when there is none."""


class SendTerms(NamedTuple):
    """The terms on which a message is sent."""

    priority: int | None
    """``None`` for that of a message without one, which is 0 and cheaper to send."""
    due: datetime | None
    """When it is delivered; ``None`` for at once."""
    once: str
    """The id under which it is stored once, however often it is sent."""
    is_transient: bool
    """Nobody waits until it is stored: events, and remote control."""


def terms_of(*, durable: bool, exclusive: bool, auto_delete: bool, arguments: Mapping[str, Any] | None) -> QueueTerms:
    """Return the terms of a queue. Those that vanish with their consumer are temporary: replies, events, remote control."""
    arguments = arguments or {}
    is_temporary = exclusive or (auto_delete and (not durable or EXPIRES in arguments))
    levels = int(arguments.get(MAX_PRIORITY) or 0) + 1
    deliveries = int(arguments.get(DELIVERY_LIMIT) or MOST_DELIVERIES)
    expires_s = 0.0 if exclusive else int(arguments.get(EXPIRES) or 0) / 1000
    return QueueTerms(is_temporary, auto_delete, levels, deliveries, expires_s)


def due_of(headers: Mapping[str, Any], now: datetime) -> datetime | None:
    """Return the time for which Celery has planned a task, if it is in the future; without a zone it is UTC, as in Celery.

    A text that is no time is left to the worker, which reports it with the task's id.
    """
    eta = headers.get("eta")
    if not isinstance(eta, str):
        return None
    try:
        due = datetime.fromisoformat(eta)
    except ValueError:
        return None
    due = due.replace(tzinfo=UTC) if due.tzinfo is None else due
    return due if due > now else None

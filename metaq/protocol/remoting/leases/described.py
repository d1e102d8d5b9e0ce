"""The description of the records in an answer to a pop (``metaq.protocol.remoting.leases.pop`` has its form)."""

from collections.abc import Sequence
from typing import NamedTuple

from metaq.protocol.remoting.leases.receipts import OWN


class PoppedQueue(NamedTuple):
    """The messages of one queue in an answer."""

    queue: int
    offsets: Sequence[int]
    """At least one, in the order of the body."""
    times: Sequence[int] | None = None
    """The number of earlier deliveries of each message, for clients that asked for order."""


class Description(NamedTuple):
    """The fields of an answer that describe its records."""

    start_offset_info: str
    msg_offset_info: str
    order_count_info: str | None


def describe_popped(popped: Sequence[PoppedQueue]) -> Description:
    """Return the fields for the queues of an answer, in the order of its body. ``ValueError`` when a queue comes twice."""
    if len({part.queue for part in popped}) != len(popped):
        raise ValueError(f"a queue comes twice among {[part.queue for part in popped]}: clients would drop the answer")
    counts = [entry for part in popped if part.times is not None for entry in _counts(part.queue, part.offsets, part.times)]
    return Description(
        ";".join([f"{OWN} {part.queue} {min(part.offsets)}" for part in popped]),
        ";".join([f"{OWN} {part.queue} {','.join([str(offset) for offset in part.offsets])}" for part in popped]),
        ";".join(counts) or None,
    )


def _counts(queue: int, offsets: Sequence[int], times: Sequence[int]) -> list[str]:
    fewest = min(times)
    own = [f"{OWN} qo{queue}%{offset} {count}" for offset, count in zip(offsets, times, strict=True) if count > fewest]
    return [f"{OWN} {queue} {fewest}", *own]

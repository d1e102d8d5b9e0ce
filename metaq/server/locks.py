"""Queues that one client of a group has for itself, to consume them in order (specs: remoting protocol, section 3.2.7).

A lock lasts ``LOCK_S`` from when it was last taken; clients renew theirs every 20 seconds. The table reads no clock: every
call says what time it is, in monotonic seconds.
"""

from collections.abc import Iterable
from typing import Final, NamedTuple

from metaq.message import MessageQueue

LOCK_S: Final = 60.0
MOST_LOCKS: Final = 200_000
"""Of all groups together, some 60 MB; beyond it nobody gets another one."""


class _Lock(NamedTuple):
    """Who has a queue, and until when."""

    client_id: str
    until_s: float


class QueueLocks:
    """The locks of all groups."""

    def __init__(self) -> None:
        self._locks: dict[tuple[str, MessageQueue], _Lock] = {}

    def __len__(self) -> int:
        return len(self._locks)

    def lock(self, group: str, client_id: str, queues: Iterable[MessageQueue], now_s: float) -> list[MessageQueue]:
        """Take, or keep, those of ``queues`` that nobody else has, as far as there is room; return them."""
        taken = [queue for queue in queues if self.holder(group, queue, now_s) in (None, client_id)]
        if len(self._locks) + len(taken) > MOST_LOCKS:
            self.expire(now_s)
            room = MOST_LOCKS - len(self._locks)
            kept = [queue for queue in taken if (group, queue) in self._locks]
            taken = kept + [queue for queue in taken if (group, queue) not in self._locks][:room]
        self.give(group, client_id, taken, now_s)
        return taken

    def give(self, group: str, client_id: str, queues: Iterable[MessageQueue], now_s: float) -> None:
        """Have a client hold queues, whoever held them before."""
        self._locks.update(((group, queue), _Lock(client_id, now_s + LOCK_S)) for queue in queues)

    def unlock(self, group: str, client_id: str, queues: Iterable[MessageQueue]) -> None:
        """Give back those of ``queues`` that the client has."""
        for queue in queues:
            held = self._locks.get((group, queue))
            if held is not None and held.client_id == client_id:
                del self._locks[group, queue]

    def holder(self, group: str, queue: MessageQueue, now_s: float) -> str | None:
        """The client that has a queue."""
        held = self._locks.get((group, queue))
        return None if held is None or held.until_s <= now_s else held.client_id

    def expire(self, now_s: float) -> None:
        """Forget the locks that have run out."""
        for key in [key for key, held in self._locks.items() if held.until_s <= now_s]:
            del self._locks[key]

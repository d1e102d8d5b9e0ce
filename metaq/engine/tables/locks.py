"""Locks that give one client of a group a queue to itself, in order (specs: remoting protocol, section 3.2.7).

A lock lasts ``LOCK_S`` from when it was last taken; clients renew theirs every 20 seconds. The table reads no clock: each call
passes the time, in monotonic seconds.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Final, NamedTuple

from metaq.message import MessageQueue

LOCK_S: Final = 60.0
MOST_LOCKS: Final = 200_000
"""The most locks of all groups together, some 60 MB; beyond it no new lock is granted."""
MOST_OF_ONE: Final = MOST_LOCKS // 8
"""The most locks of one owner, whatever groups and clients it names: so it cannot use up the room of the others."""
EXPIRE_S: Final = 1.0
"""The least pause between two searches for expired locks when there is no room: a search takes 20 ms."""
NOBODY: Final = ""
"""The owner of a lock that was loaded from the log."""


class _Lock(NamedTuple):
    """The holder of a queue, and the time until which it holds it."""

    client_id: str
    until_s: float
    owner: str
    """The identity that asked for it, of a kind that a client cannot choose freely."""


class QueueLocks:
    """The locks of all groups."""

    def __init__(self) -> None:
        self._locks: dict[tuple[str, MessageQueue], _Lock] = {}
        self._owned: Counter[str] = Counter()
        self._expired_s = 0.0

    def __len__(self) -> int:
        return len(self._locks)

    def lock(
        self, group: str, client_id: str, queues: Iterable[MessageQueue], now_s: float, owner: str = NOBODY
    ) -> list[MessageQueue]:
        """Lock or renew the ``queues`` that no other client holds, as far as there is room for ``owner``; return those."""
        taken = [queue for queue in dict.fromkeys(queues) if self.holder(group, queue, now_s) in (None, client_id)]
        new = sum((group, queue) not in self._locks for queue in taken)
        if new > self._room(owner) and now_s >= self._expired_s + EXPIRE_S:
            self.expire(now_s)
        room, granted = self._room(owner), []
        for queue in taken:
            if (group, queue) not in self._locks:
                room -= 1
                if room < 0:
                    continue
            granted.append(queue)
        self.give(group, client_id, granted, now_s, owner)
        return granted

    def _room(self, owner: str) -> int:
        return min(MOST_LOCKS - len(self._locks), MOST_OF_ONE - self._owned[owner])

    def give(self, group: str, client_id: str, queues: Iterable[MessageQueue], now_s: float, owner: str = NOBODY) -> None:
        """Have a client hold queues from ``now_s`` on, whoever held them before."""
        for queue in queues:
            self._drop((group, queue))
            self._locks[group, queue] = _Lock(client_id, now_s + LOCK_S, owner)
            self._owned[owner] += 1

    def _drop(self, key: tuple[str, MessageQueue]) -> None:
        held = self._locks.pop(key, None)
        if held is not None:
            self._owned[held.owner] -= 1
            if not self._owned[held.owner]:
                del self._owned[held.owner]

    def unlock(self, group: str, client_id: str, queues: Iterable[MessageQueue]) -> list[MessageQueue]:
        """Release those of ``queues`` that the client holds; return them."""
        given = [
            queue
            for queue in dict.fromkeys(queues)
            if (held := self._locks.get((group, queue))) is not None and held.client_id == client_id
        ]
        for queue in given:
            self._drop((group, queue))
        return given

    def holder(self, group: str, queue: MessageQueue, now_s: float) -> str | None:
        """Return the id of the client that holds a queue now, or ``None``."""
        held = self._locks.get((group, queue))
        return None if held is None or held.until_s <= now_s else held.client_id

    def expire(self, now_s: float) -> None:
        """Remove the locks that have run out."""
        self._expired_s = now_s
        for key in [key for key, held in self._locks.items() if held.until_s <= now_s]:
            self._drop(key)

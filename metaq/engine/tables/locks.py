"""Queues that one client of a group has for itself, to consume them in order (specs: remoting protocol, section 3.2.7).

A lock lasts ``LOCK_S`` from when it was last taken; clients renew theirs every 20 seconds. The table reads no clock: every
call says what time it is, in monotonic seconds.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Final, NamedTuple

from metaq.message import MessageQueue

LOCK_S: Final = 60.0
MOST_LOCKS: Final = 200_000
"""Of all groups together, some 60 MB; beyond it nobody gets another one."""
MOST_OF_ONE: Final = MOST_LOCKS // 8
"""Of whoever asks, whatever group and client it names: no other group is locked out by that."""
EXPIRE_S: Final = 1.0
"""Pause between two looks for locks that have run out, where there is no room: one takes 20 ms."""
NOBODY: Final = ""
"""Who asked for a lock that was found in the log."""


class _Lock(NamedTuple):
    """Who has a queue, and until when."""

    client_id: str
    until_s: float
    owner: str
    """Who asked for it, as far as nobody can choose that."""


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
        """Take, or keep, those of ``queues`` that nobody else has, as far as there is room for ``owner``; return them."""
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
        """Have a client hold queues, whoever held them before."""
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
        """Give back those of ``queues`` that the client has; return them."""
        given = [
            queue
            for queue in dict.fromkeys(queues)
            if (held := self._locks.get((group, queue))) is not None and held.client_id == client_id
        ]
        for queue in given:
            self._drop((group, queue))
        return given

    def holder(self, group: str, queue: MessageQueue, now_s: float) -> str | None:
        """The client that has a queue."""
        held = self._locks.get((group, queue))
        return None if held is None or held.until_s <= now_s else held.client_id

    def expire(self, now_s: float) -> None:
        """Forget the locks that have run out."""
        self._expired_s = now_s
        for key in [key for key, held in self._locks.items() if held.until_s <= now_s]:
            self._drop(key)

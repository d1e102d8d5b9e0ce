"""What all connections together make a process hold, and who has to go when that is too much.

One account, in bytes: commands whose ends have not come, commands that wait because their client does not read, requests whose
answers are owed, puts that wait for the disk, and answers that were not taken yet. A session counts what it holds as it
receives and sends, once for all that came together and in grains of 4 KiB, so an account costs nothing a message.

Beyond ``max_connections_bytes`` connections are closed until an eighth of the room is free: those first whose bytes times the
seconds for which their client has kept them waiting are the most. A put on its way counts for little, since it has just begun;
one that never ends counts more every second. Strangers go before all who have logged in, but for those that keep no more than
a person at a keyboard does. Puts and requests that the broker itself has yet to answer close nobody.

To read no more from anybody would not do: what never ends would stay, and all others would wait for it.
"""

import logging
from collections.abc import Callable, Iterable
from typing import Final, Protocol

logger = logging.getLogger(__name__)

MODEST_BYTES: Final = 4096
"""Of a stranger that is treated like those who have logged in: ten thousand of them keep 40 MB."""
BEGUN_S: Final = 0.001
"""That bytes count for at least: of two that have just begun to wait the larger one goes."""
FREE_SHARE: Final = 8


class Holder(Protocol):
    """A connection."""

    @property
    def kept_waiting(self) -> tuple[int, float]:
        """Bytes that only the client can release, and the monotonic time since which it has released none."""
        ...

    @property
    def is_stranger(self) -> bool:
        """Whether nobody has logged in."""
        ...

    def close(self) -> None: ...


class Memory:
    """The account."""

    def __init__(self, holders: Iterable[Holder], now: Callable[[], float]) -> None:
        """``holders`` are all connections at any time, ``now`` reads their clock."""
        self._holders = holders
        self._now = now
        self._making_room = False
        self.most = 0
        self.held = 0
        """Bytes, by all connections."""
        self.evicted = 0
        """Connections that were closed for room, since the start."""

    def change(self, more: int) -> None:
        """A connection holds more, or less."""
        self.held += more
        if more > 0 and self.held > self.most and not self._making_room:
            self._making_room = True
            try:
                self._make_room()
            finally:
                self._making_room = False

    def _make_room(self) -> None:
        before, closed = self.held, 0
        for holder in sorted(self._holders, key=self._weight, reverse=True):
            if self.held <= self.most - self.most // FREE_SHARE or not holder.kept_waiting[0]:
                break
            closed += 1
            holder.close()
        if closed:
            self.evicted += closed
            logger.warning(
                "connections closed for room count=%d held_bytes=%d freed_bytes=%d hint=%s",
                *(closed, before, before - self.held),
                "they kept commands unfinished or answers unread; setting: max_connections_bytes",
            )

    def _weight(self, holder: Holder) -> tuple[bool, float]:
        size, since = holder.kept_waiting
        return holder.is_stranger and size > MODEST_BYTES, size * (self._now() - since + BEGUN_S)

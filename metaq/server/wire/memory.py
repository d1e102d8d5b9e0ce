"""The memory that all connections together hold, and the choice of those to close when that is too much.

There is one account, in bytes. It counts incomplete commands, commands that wait because their client does not read, requests
whose answers are owed, puts that wait for the disk, and answers that clients have not read yet. A session reports what it holds
as it receives and sends: once for everything that arrived together, and only changes of 4 KiB or more. So the account adds
almost nothing to the cost of a message.

Beyond ``max_connections_bytes``, connections are closed until an eighth of the limit is free. Those go first whose weight is
highest: bytes times the seconds for which the client has kept them waiting. A put in transit weighs little, since it has just
begun; one that never ends weighs more every second. Connections that have not logged in are closed before all others, except
those that hold no more than a person at a keyboard would. Puts and requests that the broker itself has yet to answer do not
count against a connection.

Rejected: to stop reading from all connections. Incomplete commands would stay, and all other clients would wait for them.
"""

import logging
from collections.abc import Callable, Iterable
from typing import Final, Protocol

logger = logging.getLogger(__name__)

MODEST_BYTES: Final = 4096
"""Bytes up to which a connection that has not logged in is treated like those that have: ten thousand of them keep 40 MB."""
BEGUN_S: Final = 0.001
"""The least time that bytes count for: of two connections that have just begun to wait, the larger one is closed."""
FREE_SHARE: Final = 8


class Holder(Protocol):
    """A connection."""

    @property
    def kept_waiting(self) -> tuple[int, float]:
        """The bytes that only the client can release, and the monotonic time since which it has released none."""
        ...

    @property
    def is_stranger(self) -> bool:
        """True when the client has not logged in."""
        ...

    def close(self) -> None: ...


class Memory:
    """The account of the bytes that all connections hold."""

    def __init__(self, holders: Iterable[Holder], now: Callable[[], float]) -> None:
        """Make an account. ``holders`` always contains all connections; ``now`` reads their clock."""
        self._holders = holders
        self._now = now
        self._making_room = False
        self.most = 0
        self.held = 0
        """Bytes held by all connections."""
        self.evicted = 0
        """Connections closed to make room, since the start."""

    def change(self, more: int) -> None:
        """Add to the account what a connection holds more, or less when negative. May close connections, the caller's too."""
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
                closed,
                before,
                before - self.held,
                "they kept commands unfinished or answers unread; setting: max_connections_bytes",
            )

    def _weight(self, holder: Holder) -> tuple[bool, float]:
        size, since = holder.kept_waiting
        return holder.is_stranger and size > MODEST_BYTES, size * (self._now() - since + BEGUN_S)

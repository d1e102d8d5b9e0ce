"""Branches that take messages: in memory, with limits and deadlines. Both tables have them, of XA and of local transactions.

This module reads no clock: callers pass seconds of any monotonic one.
"""

from collections.abc import Hashable
from heapq import heappop, heappush
from typing import Final, Generic, NamedTuple, TypeVar

from metaq.tx.xacodes import XaCode, XaError

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

_STALE_KEPT: Final = 1024


class Counts(NamedTuple):
    """The numbers of branches that a table holds now."""

    open: int
    prepared: int
    heuristic: int
    oldest_open_s: float | None
    """When the oldest open branch began, by the clock of ``begin``; ``None`` without one."""


class Room:
    """Limits of branches, and the bytes that all open ones hold; several tables may share one."""

    __slots__ = ("max_branch_bytes", "max_branches", "max_open_transaction_bytes", "max_timeout_s", "open_bytes")

    def __init__(
        self, *, max_branches: int, max_branch_bytes: int, max_open_transaction_bytes: int, max_timeout_s: float
    ) -> None:
        """Set the limits. ``max_branches``: of one table, with undecided ones. Longer timeouts become ``max_timeout_s``."""
        self.max_branches = max_branches
        self.max_branch_bytes = max_branch_bytes
        self.max_open_transaction_bytes = max_open_transaction_bytes
        self.max_timeout_s = max_timeout_s
        self.open_bytes = 0

    def take_limits(self, other: "Room") -> None:
        """Adopt the limits of another room; what exceeds one of them stays, but cannot grow."""
        self.max_branches, self.max_branch_bytes = other.max_branches, other.max_branch_bytes
        self.max_open_transaction_bytes, self.max_timeout_s = other.max_open_transaction_bytes, other.max_timeout_s

    def check_branches(self, count: int) -> None:
        """Raise ``XaError`` (RMERR) when a table that has ``count`` branches may not have another."""
        if count >= self.max_branches:
            raise XaError(
                XaCode.RMERR,
                f"{count} transactions are open or undecided, the limit is {self.max_branches} (max_branches); "
                "decide those that are prepared, or try again later",
            )

    def check_bytes(self, held: int, size: int) -> None:
        """Raise ``XaError`` (RMERR) when a branch that holds ``held`` bytes may not take ``size`` more."""
        if held + size > self.max_branch_bytes:
            raise XaError(
                XaCode.RMERR,
                f"{size} bytes more than {held} in one transaction are over the limit of {self.max_branch_bytes} "
                "(max_branch_bytes); the message was not stored; commit the transaction or roll it back",
            )
        if self.open_bytes + size > self.max_open_transaction_bytes:
            raise XaError(
                XaCode.RMERR,
                f"{size} bytes more than {self.open_bytes} in all open transactions are over the limit of "
                f"{self.max_open_transaction_bytes} (max_open_transaction_bytes); the message was not stored; try again later",
            )


class OpenBranch(Generic[T]):
    """A branch that takes messages."""

    __slots__ = ("_room", "began_s", "held", "messages", "number")

    def __init__(self, room: Room, number: int, began_s: float) -> None:
        self._room = room
        self.number = number
        self.began_s = began_s
        self.messages: list[T] = []
        self.held = 0

    def put(self, message: T, size: int) -> None:
        """Add a message of ``size`` bytes. ``XaError`` (RMERR) when that would exceed a limit; the branch stays open."""
        room, held = self._room, self.held + size
        if held > room.max_branch_bytes or room.open_bytes + size > room.max_open_transaction_bytes:
            room.check_bytes(self.held, size)
        self.held = held
        room.open_bytes += size
        self.messages.append(message)


class OpenBranches(Generic[K, T]):
    """Branches whose messages are in memory, and their deadlines."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._branches: dict[K, OpenBranch[T]] = {}
        self._deadlines: list[tuple[float, int, K]] = []
        """A heap of (seconds, number of the branch, key); entries may outlive their branches."""
        self._begun = 0

    def __len__(self) -> int:
        return len(self._branches)

    def __contains__(self, key: K) -> bool:
        return key in self._branches

    def begin(self, key: K, now_s: float, timeout_s: float) -> None:
        """Open a branch that does not exist yet; it expires after ``timeout_s``, never when that is 0."""
        self._begun += 1
        self._branches[key] = OpenBranch(self._room, self._begun, now_s)
        if timeout_s <= 0:
            return
        heappush(self._deadlines, (now_s + min(timeout_s, self._room.max_timeout_s), self._begun, key))
        if len(self._deadlines) > 2 * len(self._branches) + _STALE_KEPT:
            self._forget_stale()

    def _forget_stale(self) -> None:
        """Drop the entries of ended branches.

        Each short transaction leaves one until its deadline: 20,000 a second for a minute would be some 150 MB.
        """
        self._deadlines = sorted(entry for entry in self._deadlines if self._is_current(entry))

    def _is_current(self, entry: tuple[float, int, K]) -> bool:
        """Return whether the branch of this entry is open; one of the same name may have followed it."""
        branch = self._branches.get(entry[2])
        return branch is not None and branch.number == entry[1]

    def get(self, key: K) -> OpenBranch[T] | None:
        """Return an open branch; ``None`` when there is none."""
        return self._branches.get(key)

    def close(self, key: K) -> list[T]:
        """End a branch; return the messages that it held."""
        branch = self._branches.pop(key)
        self._room.open_bytes -= branch.held
        return branch.messages

    def due(self, now_s: float) -> list[K]:
        """Return the branches whose timeout has passed, each only once: a busy one will not be open when its step has ended."""
        due: list[K] = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            entry = heappop(self._deadlines)
            if self._is_current(entry):
                due.append(entry[2])
        return due

    @property
    def oldest_s(self) -> float | None:
        """The time at which the oldest branch began; ``None`` without one."""
        return next((branch.began_s for branch in self._branches.values()), None)

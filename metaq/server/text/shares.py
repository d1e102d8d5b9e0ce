"""Partitions that belong to one subscription each: even shares, dealt anew when a member or a partition comes or goes.

The members in the order of their names, and of their arrival, get partition 0, 1, 2 … in turn. Members beyond the number of
partitions get none. A partition that a member has asked for is that member's, and is not dealt.
"""

from collections.abc import Callable
from typing import Generic, TypeVar

M = TypeVar("M")


class Shares(Generic[M]):
    """The members of one group that own partitions of one topic."""

    def __init__(self, count: Callable[[], int]) -> None:
        """Begin without members; ``count`` returns the number of partitions."""
        self.members: dict[M, tuple[str, int, int | None]] = {}
        """Name, arrival and the partition that was asked for, by member."""
        self.former: dict[int, set[M]] = {}
        """Members that owned a partition before, and may have messages of it out. Whoever finds out otherwise removes them."""
        self._arrivals = 0
        self._count = count
        self._dealt: dict[M, tuple[int, ...]] = {}
        self._dealt_count = -1  # members have come or gone since
        self._told: dict[M, tuple[int, ...]] = {}

    def add(self, member: M, name: str, partition: int | None) -> M | None:
        """Add a member; return the one whose partition it takes over, which is no member any more."""
        replaced = None
        if partition is not None:
            replaced = next((other for other, (_, _, own) in self.members.items() if own == partition), None)
            if replaced is not None:
                del self.members[replaced]
        self._arrivals += 1
        self.members[member] = name, self._arrivals, partition
        self._dealt_count = -1
        return replaced

    def remove(self, member: M) -> None:
        """Remove a member, if it is one."""
        if self.members.pop(member, None) is not None:
            self._dealt_count = -1

    def of(self, member: M) -> tuple[int, ...]:
        """Return the partitions that belong to a member."""
        return self._deal().get(member, ())

    def moved(self) -> list[M]:
        """Return the members whose partitions are not those of the last call."""
        before, self._told = self._told, self._deal()
        return [member for member, mine in self._told.items() if before.get(member) != mine]

    def _deal(self) -> dict[M, tuple[int, ...]]:
        """Return the partitions of each member. They are dealt once after a change: a member asks each time it is woken."""
        count = self._count()
        if count == self._dealt_count:
            return self._dealt
        before, members = self._dealt, self.members
        self._dealt_count = count
        self._dealt = {member: (own,) for member, (_, _, own) in members.items() if own is not None}
        taken = {own for (own,) in self._dealt.values()}
        free = [partition for partition in range(count) if partition not in taken]
        others = sorted([member for member in members if member not in self._dealt], key=lambda member: members[member][:2])
        for at, member in enumerate(others):
            self._dealt[member] = tuple(free[at :: len(others)])
        for member in members:
            for partition in set(before.get(member, ())).difference(self._dealt[member]):
                self.former.setdefault(partition, set()).add(member)
        return self._dealt

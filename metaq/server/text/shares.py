"""Partitions that belong to one subscription each: even shares, dealt anew when a member comes or goes.

The members in the order of their names, and of their arrival, get partition 0, 1, 2 … in turn. Members beyond the number of
partitions get none. A partition that a member has asked for is that member's, and is not dealt.
"""

from typing import Generic, TypeVar

M = TypeVar("M")


class Shares(Generic[M]):
    """The members of one group that own partitions of one topic."""

    def __init__(self) -> None:
        self.members: dict[M, tuple[str, int, int | None]] = {}
        """Name, arrival and the partition that was asked for, by member."""
        self._arrivals = 0

    def add(self, member: M, name: str, partition: int | None) -> M | None:
        """Add a member; return the one whose partition it takes over, which is no member any more."""
        replaced = None
        if partition is not None:
            replaced = next((other for other, (_, _, own) in self.members.items() if own == partition), None)
            if replaced is not None:
                del self.members[replaced]
        self._arrivals += 1
        self.members[member] = name, self._arrivals, partition
        return replaced

    def remove(self, member: M) -> None:
        """Remove a member, if it is one."""
        self.members.pop(member, None)

    def of(self, member: M, count: int) -> list[int]:
        """Return the partitions, of ``count``, that belong to a member."""
        if member not in self.members:
            return []
        asked = self.members[member][2]
        if asked is not None:
            return [asked]
        taken = {own for _, _, own in self.members.values() if own is not None}
        free = [partition for partition in range(count) if partition not in taken]
        dealt = [other for other, (_, _, own) in self.members.items() if own is None]
        dealt.sort(key=lambda other: self.members[other][:2])
        return free[dealt.index(member) :: len(dealt)]

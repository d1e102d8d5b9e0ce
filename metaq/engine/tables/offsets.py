"""The table of consumer offsets: group and topic → partition → the queue offset that the group wants next.

An offset only moves forward: a commit that comes late, or is from before a failover, takes nothing back. Only ``reset``, for
administrators, sets any value. The table is in memory only; ``metaq.engine.offsets.offsetlog`` makes it durable.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, Protocol

from metaq.message import GroupPartition, QueueOffset

logger = logging.getLogger(__name__)

RESET_STANDS_S: Final = 60.0
"""How long a reset overrides commits of members that have not received it yet: a Java client waits ten seconds before it acts
on a reset, and commits its old offsets meanwhile."""
GONE: Final = -1
"""Stands in changes for an offset that was removed."""


class OffsetOwner(Protocol):
    """The leases, which decide on the offsets of the groups that lease messages."""

    def given(self, place: GroupPartition) -> QueueOffset | None:
        """Return the offset of the first message that a group was never given; ``None`` where it leases none."""
        ...

    def commits(self, place: GroupPartition, offset: int) -> bool:
        """Return whether a consumer's own commit counts."""
        ...

    def reset(self, place: GroupPartition, offset: int) -> None:
        """Take over an offset that an administrator sets."""
        ...

    def forget(self, group: str, topic: str) -> None:
        """Take over that a group has no offsets in a topic any more."""
        ...


class OffsetTable:
    """All consumer offsets of this broker."""

    def __init__(self) -> None:
        self._offsets: dict[tuple[str, str], dict[int, int]] = {}
        self._topics: dict[str, set[str]] = {}  # of each group, those in which it has offsets
        self._changed: dict[GroupPartition, None] = {}
        self._resets: dict[GroupPartition, float] = {}  # until when each stands
        self.version = 0
        """A number that rises with every change."""
        self.owner: OffsetOwner | None = None
        """Set once, when the leases are known."""

    # -- asking -------------------------------------------------------------------------------------------------------

    def get(self, group: str, topic: str, partition: int) -> QueueOffset | None:
        """Return the offset that a group has committed in a partition, or ``None``."""
        offset = self._offsets.get((group, topic), {}).get(partition)
        return None if offset is None else QueueOffset(offset)

    def given(self, group: str, topic: str, partition: int) -> QueueOffset | None:
        """Return the offset of the first message that a group was never given: behind its own offset if it leases messages."""
        given = None if self.owner is None else self.owner.given(GroupPartition(group, topic, partition))
        return self.get(group, topic, partition) if given is None else given

    def of(self, group: str, topic: str) -> Mapping[int, int]:
        """Return the offsets of a group in a topic, by partition."""
        return self._offsets.get((group, topic), {})

    def pairs(self) -> list[tuple[str, str]]:
        """Return all pairs of group and topic that have offsets."""
        return list(self._offsets)

    def topics_of(self, group: str) -> list[str]:
        """Return the topics in which a group has offsets, sorted."""
        return sorted(self._topics.get(group, ()))

    def groups_of(self, topic: str) -> list[str]:
        """Return the groups that have offsets in a topic, sorted."""
        return sorted(group for group, name in self._offsets if name == topic)

    def __iter__(self) -> Iterator[tuple[str, str, Mapping[int, int]]]:
        """Iterate over all entries: group, topic, and offsets by partition."""
        return ((group, topic, offsets) for (group, topic), offsets in self._offsets.items())

    # -- changing -----------------------------------------------------------------------------------------------------

    def commit(self, group: str, topic: str, partition: int, offset: int, now_s: float) -> None:
        """Take a client's commit: it only moves the offset forward; a negative offset is ignored. ``now_s`` is monotonic."""
        if offset < 0:
            return
        place = GroupPartition(group, topic, partition)
        known = self._offsets.get((group, topic), {}).get(partition, GONE)
        if offset == known:
            self._resets.pop(place, None)
        elif self._resets and self._resets.get(place, now_s) > now_s:
            logger.info(
                "commit ignored, its sender has not heard of the reset group=%s topic=%s partition=%d offset=%d reset_to=%d",
                *place,
                offset,
                known,
            )
        elif offset < known:
            logger.info(
                "commit of a lower offset ignored group=%s topic=%s partition=%d offset=%d known=%d", *place, offset, known
            )
        elif self.owner is None or self.owner.commits(place, offset):
            self._resets.pop(place, None)
            self._set(place, offset)

    def reset(self, group: str, topic: str, partition: int, offset: int, now_s: float | None = None) -> None:
        """Set an offset to any value, on an administrator's request.

        With ``now_s``, the monotonic time, the reset overrides members that have not received it: their commits are ignored
        until a member has asked for the new offset or committed it, or ``RESET_STANDS_S`` have passed.
        """
        place = GroupPartition(group, topic, partition)
        if self.owner is not None:
            self.owner.reset(place, offset)
        if now_s is not None:
            self._resets[place] = now_s + RESET_STANDS_S
        self._set(place, offset)

    def lead(self, group: str, topic: str, partition: int, offset: int) -> None:
        """Take over the offset that follows from the leases of a group: once it moves on, a reset need not be protected."""
        place = GroupPartition(group, topic, partition)
        if offset > self._offsets.get((group, topic), {}).get(partition, GONE):
            self._resets.pop(place, None)
            self._set(place, offset)

    def taken_up(self, group: str, topic: str, partition: int) -> None:
        """Note that a member has asked for its offset and goes on from there: a reset need not be protected any more."""
        if self._resets:
            self._resets.pop(GroupPartition(group, topic, partition), None)

    def remove(self, group: str) -> None:
        """Remove all offsets of a group."""
        self._remove([(group, topic) for topic in self.topics_of(group)])

    def remove_topic(self, topic: str) -> None:
        """Remove all offsets in a topic."""
        self._remove([key for key in self._offsets if key[1] == topic])

    def _remove(self, keys: Iterable[tuple[str, str]]) -> None:
        for group, topic in keys:
            if self.owner is not None:
                self.owner.forget(group, topic)
            for partition in self._dropped(group, topic):
                place = GroupPartition(group, topic, partition)
                self._resets.pop(place, None)
                self._changed[place] = None
                self.version += 1

    def _set(self, place: GroupPartition, offset: int) -> None:
        self._kept(place.group, place.topic)[place.partition] = offset
        self._changed[place] = None
        self.version += 1

    def _kept(self, group: str, topic: str) -> dict[int, int]:
        """Return the offsets of a group in a topic, to which one will be added when there is none."""
        offsets = self._offsets.get((group, topic))
        if offsets is None:
            offsets = self._offsets[group, topic] = {}
            self._topics.setdefault(group, set()).add(topic)
        return offsets

    def _dropped(self, group: str, topic: str) -> dict[int, int]:
        """Return the offsets of a group in a topic, which are kept no longer."""
        topics = self._topics[group]
        topics.remove(topic)
        if not topics:
            del self._topics[group]
        return self._offsets.pop((group, topic))

    # -- keeping ------------------------------------------------------------------------------------------------------

    @property
    def changed(self) -> bool:
        """True when there are changes to take."""
        return bool(self._changed)

    def take_changes(self) -> dict[GroupPartition, int]:
        """Return the offsets that changed since the last call, with their present values; ``GONE`` for removed ones."""
        changed, self._changed = self._changed, {}
        return {place: self.of(place.group, place.topic).get(place.partition, GONE) for place in changed}

    def give_back(self, changes: Iterable[GroupPartition]) -> None:
        """Have the next ``take_changes`` return these places again: their changes were not stored."""
        self._changed.update(dict.fromkeys(changes))

    def replay(self, changes: Mapping[GroupPartition, int]) -> None:
        """Apply stored changes, in the order in which they were stored."""
        for place, offset in changes.items():
            offsets = self._kept(place.group, place.topic)
            if offset == GONE:
                offsets.pop(place.partition, None)
            else:
                offsets[place.partition] = offset
            if not offsets:
                self._dropped(place.group, place.topic)

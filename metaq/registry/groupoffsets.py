"""The offsets and owners that MetaQ's consumers keep in ZooKeeper for one broker's partitions (``metaq.registry.paths``)."""

import logging
from collections.abc import Iterator
from typing import NamedTuple

from metaq.errors import BadRequest
from metaq.message import TextPosition
from metaq.registry.paths import Layout, decode_offset, parse_partition
from metaq.registry.session import ZooKeeperSession
from metaq.registry.zookeeper import AT_ONCE

logger = logging.getLogger(__name__)


class GroupProgress(NamedTuple):
    """The progress of a group in one partition."""

    position: TextPosition | None
    """The position that it reads next; ``None`` when it has stored none, or none that can be understood."""
    owner: str | None
    """The consumer that owns the partition."""


class GroupOffsetReader:
    """A reader of the groups' offsets and owners in ZooKeeper; its methods wait for the answers."""

    def __init__(self, session: ZooKeeperSession, layout: Layout, broker: int) -> None:
        """Create it for the partitions of the broker with the number ``broker``."""
        self._session = session
        self._layout = layout
        self._broker = broker

    def groups(self) -> Iterator[tuple[str, str]]:
        """Yield pairs of a group and a topic in which it stores offsets or owns partitions.

        Raises ``RegistryUnavailable`` when ZooKeeper does not answer.
        """
        layout, children = self._layout, self._session.children
        for group in children(layout.groups):
            topics = {*children(layout.offsets(group)), *children(layout.owned(group))}
            yield from ((group, topic) for topic in sorted(topics))

    def of(self, group: str, topic: str) -> dict[int, GroupProgress]:
        """Return a group's progress in a topic, by partition of this broker; may raise ``RegistryUnavailable``."""
        layout = self._layout
        positions = {number: _position(data) for number, data in self._partitions(layout.progress(group, topic))}
        owners = {
            number: data.decode(errors="replace") or None for number, data in self._partitions(layout.owners(group, topic))
        }
        return {number: GroupProgress(positions.get(number), owners.get(number)) for number in positions.keys() | owners.keys()}

    def _partitions(self, folder: str) -> Iterator[tuple[int, bytes]]:
        """Yield the numbers of this broker's partitions under a path, each with the data of its node."""
        numbers = {}
        for name in self._session.children(folder):
            try:
                broker, number = parse_partition(name)
            except BadRequest:
                continue  # a foreign node, which no MetaQ consumer would read
            if broker == self._broker:
                numbers[number] = f"{folder}/{name}"
        paths = list(numbers.values())
        found = [node for at in range(0, len(paths), AT_ONCE) for node in self._session.get_all(paths[at : at + AT_ONCE])]
        yield from ((number, node.data) for number, node in zip(numbers, found, strict=True) if node is not None)


def _position(data: bytes) -> TextPosition | None:
    try:
        return TextPosition(decode_offset(data)[1])
    except BadRequest as error:
        logger.warning("offset in zookeeper not understood reason=%s", error)
        return None

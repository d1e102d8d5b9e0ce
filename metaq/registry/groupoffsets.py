"""What MetaQ's consumers keep in ZooKeeper about the partitions of one broker (``metaq.registry.paths``)."""

import logging
from collections.abc import Iterator
from typing import NamedTuple

from metaq.errors import BadRequest
from metaq.message import TextPosition
from metaq.registry.paths import Layout, decode_offset, parse_partition
from metaq.registry.session import Session
from metaq.registry.zookeeper import AT_ONCE

logger = logging.getLogger(__name__)


class Progress(NamedTuple):
    """A group in one partition."""

    position: TextPosition | None
    """What it will read next; ``None`` when it has stored nothing, or nothing that can be read."""
    owner: str | None
    """The consumer that has the partition."""


class GroupOffsets:
    """Reads them, and waits for each answer."""

    def __init__(self, session: Session, layout: Layout, broker: int) -> None:
        """``broker`` is the number of the one whose partitions are meant."""
        self._session = session
        self._layout = layout
        self._broker = broker

    def groups(self) -> Iterator[tuple[str, str]]:
        """Groups, each with the topics of which it stores offsets or owns partitions. ``RegistryUnavailable``."""
        layout, children = self._layout, self._session.children
        for group in children(layout.groups):
            topics = {*children(layout.offsets(group)), *children(layout.owned(group))}
            yield from ((group, topic) for topic in sorted(topics))

    def of(self, group: str, topic: str) -> dict[int, Progress]:
        """By partition of this broker. ``RegistryUnavailable``."""
        layout = self._layout
        positions = {number: _position(data) for number, data in self._partitions(layout.progress(group, topic))}
        owners = {
            number: data.decode(errors="replace") or None for number, data in self._partitions(layout.owners(group, topic))
        }
        return {number: Progress(positions.get(number), owners.get(number)) for number in positions.keys() | owners.keys()}

    def _partitions(self, folder: str) -> Iterator[tuple[int, bytes]]:
        """The numbers of those that are this broker's, with what stands there."""
        numbers = {}
        for name in self._session.children(folder):
            try:
                broker, number = parse_partition(name)
            except BadRequest:
                continue  # somebody else's node: nothing that a MetaQ consumer would read
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

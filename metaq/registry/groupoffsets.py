"""What MetaQ's consumers keep in ZooKeeper about the partitions of one broker (``metaq.registry.paths``)."""

import logging
from collections.abc import Iterator
from typing import NamedTuple

from metaq.errors import BadRequest
from metaq.message import TextPosition
from metaq.registry.paths import Layout, decode_offset, parse_partition
from metaq.registry.session import Session

logger = logging.getLogger(__name__)


class Progress(NamedTuple):
    """A group in one partition."""

    position: TextPosition | None
    """What it will read next; ``None`` when it has stored nothing, or nothing that can be read."""
    owner: str | None
    """The consumer that has the partition."""


class GroupOffsets:
    """Reads them, one request after the other: some 2,000 a second, and it waits for each."""

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
        positions = {number: self._position(path) for number, path in self._partitions(layout.progress(group, topic))}
        owners = {number: self._owner(path) for number, path in self._partitions(layout.owners(group, topic))}
        return {number: Progress(positions.get(number), owners.get(number)) for number in positions.keys() | owners.keys()}

    def _partitions(self, folder: str) -> Iterator[tuple[int, str]]:
        for name in self._session.children(folder):
            try:
                broker, number = parse_partition(name)
            except BadRequest:
                continue  # somebody else's node: nothing that a MetaQ consumer would read
            if broker == self._broker:
                yield number, f"{folder}/{name}"

    def _position(self, path: str) -> TextPosition | None:
        node = self._session.get(path)
        try:
            return None if node is None else TextPosition(decode_offset(node.data)[1])
        except BadRequest as error:
            logger.warning("offset in zookeeper not understood path=%s reason=%s", path, error)
            return None

    def _owner(self, path: str) -> str | None:
        node = self._session.get(path)
        return None if node is None else node.data.decode(errors="replace") or None

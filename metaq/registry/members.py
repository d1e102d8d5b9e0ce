"""The live brokers, read from the nodes under ``BROKERS`` in ZooKeeper whenever one of them comes, changes or goes."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from metaq.clock import Clock
from metaq.errors import BadRequest
from metaq.registry.paths import BROKERS, BrokerNode, RegisteredReplica, decode_broker_node, parse_member
from metaq.registry.zookeeper import ZooKeeper

logger = logging.getLogger(__name__)

LEVELS: Final = 3
"""The levels of nodes under ``BROKERS``: cluster, broker name, replica."""
GRACE_SESSIONS: Final = 2
"""How many session times other brokers may take to register again after ZooKeeper was down or has lost its data."""


@dataclass(slots=True)
class _Place:
    """A watched node, and the watched nodes under it."""

    unwatch: Callable[[], None]
    under: dict[str, "_Place"] = field(default_factory=dict)


class Members:
    """The live brokers in ZooKeeper. The keeper of ``ZooKeeper`` notes changes; any thread or greenlet may call ``nodes``."""

    def __init__(self, zookeeper: ZooKeeper, clock: Clock, changed: Callable[[], None]) -> None:
        """Create it; ``changed`` is called after the start and after every change.

        The caller is the keeper or another task, so ``changed`` has to be quick.
        """
        self._zookeeper = zookeeper
        self._monotonic = clock.monotonic
        self._changed = changed
        self._root: _Place | None = None
        self._here: dict[RegisteredReplica, BrokerNode] = {}
        self._gone: dict[RegisteredReplica, tuple[BrokerNode, float]] = {}
        """Nodes that are gone, each with the time until which it still counts as live."""

    def start(self) -> None:
        self._root = self._watched(BROKERS, 0)

    def stop(self) -> None:
        if self._root is not None:
            self._forget(BROKERS, self._root)
            self._root = None

    def nodes(self) -> Mapping[RegisteredReplica, BrokerNode]:
        """Return the live brokers, and those that went when ZooKeeper had just come back: they may register again soon."""
        now = self._monotonic()
        nodes = {member: node for member, (node, until) in list(self._gone.items()) if now < until}
        nodes.update(list(self._here.items()))
        return nodes

    def _watched(self, path: str, level: int) -> _Place:
        place = _Place(lambda: None)
        look = partial(self._read, path) if level == LEVELS else partial(self._list, path, level, place)
        place.unwatch = self._zookeeper.watch(path, look)
        return place

    def _list(self, path: str, level: int, place: _Place) -> None:
        names = self._zookeeper.children(path)
        for name in names:
            if name not in place.under:
                place.under[name] = self._watched(f"{path}/{name}", level + 1)
        for name in place.under.keys() - set(names):
            self._forget(f"{path}/{name}", place.under.pop(name))
        self._changed()

    def _forget(self, path: str, place: _Place) -> None:
        place.unwatch()
        for name, under in place.under.items():
            self._forget(f"{path}/{name}", under)
        if path.count("/") == BROKERS.count("/") + LEVELS:
            self._leave(path)

    def _read(self, path: str) -> None:
        found = self._zookeeper.get(path)
        if found is None:
            self._leave(path)
        else:
            try:
                member, node = parse_member(path), decode_broker_node(found.data)
            except BadRequest as error:
                logger.warning("broker in zookeeper not understood path=%s reason=%s", path, error)
                return
            self._here[member] = node
            self._gone.pop(member, None)
        self._changed()

    def _leave(self, path: str) -> None:
        try:
            member = parse_member(path)
        except BadRequest:
            return  # it was never counted
        node = self._here.pop(member, None)
        if node is None:
            return
        until = self._zookeeper.connected_at + GRACE_SESSIONS * self._zookeeper.session_s
        self._gone[member] = node, until
        if until > self._monotonic():
            self._zookeeper.after(until - self._monotonic(), self._changed)

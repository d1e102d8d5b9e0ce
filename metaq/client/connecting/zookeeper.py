"""Registries that are found through ZooKeeper, where every registered broker gives the address of one."""

from collections.abc import Callable, Sequence
from typing import Final

from metaq.clock import SystemClock
from metaq.registry.members import Members
from metaq.registry.zookeeper import ZooKeeper

SESSION_MS: Final = 10_000
"""A client stores nothing in ZooKeeper, so this is only the time after which it leaves a silent server for another one."""


class ZooKeeperRegistries:
    """A watcher that calls ``use`` with the registries, now and after every change, from a thread of its own."""

    def __init__(self, hosts: str, use: Callable[[Sequence[str]], None]) -> None:
        """Prepare the session without connecting; ``BadRequest`` when ``hosts`` cannot be read."""
        clock = SystemClock()
        self._use = use
        self._zookeeper = ZooKeeper(hosts, SESSION_MS, clock)
        self._members = Members(self._zookeeper, clock, self._changed)

    def start(self) -> None:
        """Begin to connect; returns at once."""
        self._members.start()
        self._zookeeper.start()

    def close(self) -> None:
        """End the session."""
        self._zookeeper.stop()

    def _changed(self) -> None:
        found = sorted({node.registry for node in self._members.nodes().values() if node.registry is not None})
        if found:  # an empty list is not passed on: the registries known before may still answer
            self._use(found)

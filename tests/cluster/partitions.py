"""Partitions under load: the master and ZooKeeper, its slaves or its clients do not hear each other, or only one way.

``python -m tests.cluster.partitions --seed 7 --rounds 30`` runs the life of one group; see ``tests.cluster.failovers``.
"""

import time
from collections.abc import Callable
from typing import Final

from tests.cluster.life import CLIENTS, Fault, Life
from tests.cluster.lives import main, run_lives
from tests.cluster.promised import PROMISED
from tests.crash.command import Result
from tests.support.group import Member
from tests.support.proxy import Direction, Proxy

ROUNDS: Final = 30
"""In one life."""
LONG_S: Final = 5.0
"""At most, of what no new master ends: longer than a replica may lag."""


class Partitions(Life):
    """A life whose faults hit the connections between processes."""

    proxied = True
    clients = (*CLIENTS, *PROMISED)

    def faults(self) -> dict[Fault, int]:
        return {
            self.from_zookeeper: 6,
            self.from_slaves: 4,
            self.from_both: 6,
            self.zookeeper_one_way: 4,
            self.slaves_one_way: 3,
            self.from_slaves_for_long: 4,
            self.from_one_slave: 3,
            self.one_slave_one_way: 3,
            self.from_clients: 2,
            self.slave_from_zookeeper: 2,
            self.connections_cut: 2,
        }

    def _part(self) -> tuple[Member, float]:
        self.counts["partitions"] += 1
        return self.group.wait_master(), self.fault_begins()

    def from_zookeeper(self) -> float:
        """The master writes until its lease ends; its slaves elect another one."""
        return self._until_replaced(lambda master: self.group.ways[master.number].zookeeper.partition())

    def zookeeper_one_way(self) -> float:
        """It is not heard, or it hears nothing."""
        direction = self._direction()
        return self._until_replaced(lambda master: self.group.ways[master.number].zookeeper.drop(direction))

    def from_both(self) -> float:
        """Only clients reach the master: nothing that it takes may be acknowledged."""

        def part(master: Member) -> None:
            ways = self.group.ways[master.number]
            for proxy in (*ways.slaves.values(), ways.zookeeper):
                proxy.partition()

        return self._until_replaced(part)

    def _until_replaced(self, part: Callable[[Member], None]) -> float:
        master, began = self._part()
        part(master)
        self.wait_new_master()
        if self.rng.random() < 0.5:
            self.pass_time(self.rng.uniform(0, 2.0))
        return began

    def from_slaves(self) -> float:
        """It mostly stays the master: too short to be replaced."""
        return self._until_healed(lambda proxy: proxy.partition())

    def slaves_one_way(self) -> float:
        """They hear nothing, or their reports do not arrive."""
        direction = self._direction()
        return self._until_healed(lambda proxy: proxy.drop(direction))

    def from_slaves_for_long(self) -> float:
        """Both ways or one: it lets another one be master, or goes on if it is enough by itself."""
        way: Callable[[Proxy], None] = self.rng.choice(
            (Proxy.partition, lambda proxy: proxy.drop("up"), lambda proxy: proxy.drop("down"))
        )
        master, began = self._part()
        for proxy in self.group.ways[master.number].slaves.values():
            way(proxy)
        if self.least > 1:
            self.wait_new_master()
        else:
            self.wait_acknowledged(began + 0.5)
        return began

    def _until_healed(self, part: Callable[[Proxy], None]) -> float:
        master, _ = self._part()
        for proxy in self.group.ways[master.number].slaves.values():
            part(proxy)
        self.pass_time(self.rng.uniform(0.5, LONG_S))
        return self._heal()

    def from_one_slave(self) -> float:
        """Puts wait until it is not in sync any more; the other slave goes on."""
        return self._without_one(lambda proxy: proxy.partition())

    def one_slave_one_way(self) -> float:
        """It hears nothing, or its reports do not arrive."""
        direction = self._direction()
        return self._without_one(lambda proxy: proxy.drop(direction))

    def _without_one(self, part: Callable[[Proxy], None]) -> float:
        master, began = self._part()
        slave = self.slaves(master)[0]
        part(self.group.ways[master.number].slaves[slave.number])
        self.pass_time(self.rng.uniform(0, 0.5))
        self.wait_acknowledged(time.monotonic())
        return began

    def from_clients(self) -> float:
        """The replicas notice nothing; a client's answer is lost, or its request, or both."""
        master, _ = self._part()
        way = self.group.ways[master.number].clients
        self.rng.choice((way.partition, lambda: way.drop("up"), lambda: way.drop("down")))()
        self.pass_time(self.rng.uniform(0.5, LONG_S))
        return self._heal()

    def slave_from_zookeeper(self) -> float:
        """It goes on following its master."""
        master, began = self._part()
        self.group.ways[self.slaves(master)[0].number].zookeeper.partition()
        self.pass_time(self.rng.uniform(0.5, LONG_S))
        return began

    def connections_cut(self) -> float:
        """All of the master, in the middle of whatever they say."""
        master, began = self._part()
        for proxy in self.group.ways[master.number].all():
            proxy.cut(self.rng.choice((0, 1, 100, 5000)), self._direction())
        self.pass_time(self.rng.uniform(0.1, 2.0))
        self.group.heal()
        self.wait_acknowledged(time.monotonic())
        return began

    def _heal(self) -> float:
        self.group.heal()
        healed = time.monotonic()
        self.wait_acknowledged(healed)
        return healed

    def _direction(self) -> Direction:
        return self.rng.choice(("up", "down"))


def run(seed: int, count: int) -> Result:
    """Make at least ``count`` partitions."""
    return run_lives(Partitions, "partitions", "partitions", seed, count, ROUNDS)


if __name__ == "__main__":
    main(Partitions, "partitions", ROUNDS)

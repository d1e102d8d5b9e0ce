"""Power cuts under load: of single replicas, of two and of all at once, at random moments, with every kind of loss.

Data that no sync has covered is lost: all of it, sectors at random, or only the middle (``tests.support.powercuts``). The
machine is back at once, within its session with ZooKeeper, or after another master was elected. At REPLICA nothing that was
acknowledged is lost while one replica that held it keeps its power, at DISK+REPLICA nothing at all.

``python -m tests.cluster.powercuts --seed 7 --rounds 12`` runs the life of one group; see ``tests.cluster.failovers``.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Final

from metaq.client import TextClient
from metaq.message import TopicPartition
from tests.cluster.history import PARTITIONS
from tests.cluster.life import Campaign, Fault, Life
from tests.cluster.lives import main, run_lives
from tests.cluster.load import LOST
from tests.crash.command import Result
from tests.support.group import Member
from tests.support.powercuts import HOWS, PoweredMember, cut_power

ROUNDS: Final = 12
"""In one life."""
UNIT: Final = "power cuts"


class PowerCuts(Life):
    """A life whose faults hit machines."""

    kind: ClassVar[type[Member]] = PoweredMember
    flags: ClassVar[tuple[str, ...]] = (
        "--zookeeper-session-ms",
        "2000",
        "--segment-bytes",
        "1048576",
        "--max-body-bytes",
        "65536",
        # small: a sync of a replica that was killed copies each file whole, and 420 MB take seconds
        "--index-slots",
        "1000",
        "--index-entries",
        "20000",
    )
    durabilities: ClassVar[tuple[str, ...]] = ("replica", "disk+replica")

    def __init__(self, seed: int, folder: Path, zookeeper: str, campaign: Campaign | None = None) -> None:
        super().__init__(seed, folder, zookeeper, campaign)
        self.on_disk = self.durability == "disk+replica"

    def faults(self) -> dict[Fault, int]:
        weights: dict[Fault, int] = {self.master_loses_power: 6, self.slave_loses_power: 4, self.two_lose_power: 4}
        weights |= {self.slave_loses_power_and_master_is_killed: 3}
        return weights | ({self.all_lose_power: 4} if self.on_disk else {})

    def master_loses_power(self) -> float:
        """A slave is elected, or it is back itself before its session is over."""
        master = self.group.wait_master()
        began = self.fault_begins()
        self._cut([master])
        self._back_at_once()
        self.wait_new_master()
        return began

    def two_lose_power(self) -> float:
        """The master and a slave, at once: the third has everything."""
        master = self.group.wait_master()
        return self._until_back([master, self.slaves(master)[0]])

    def slave_loses_power_and_master_is_killed(self) -> float:
        """Cut a slave's power and kill the master, which keeps what is in its page cache."""
        master = self.group.wait_master()
        slave = self.slaves(master)[0]
        return self._until_back([slave], master)

    def all_lose_power(self) -> float:
        """Everything that was acknowledged is on their disks."""
        return self._until_back(list(self.group.members.values()))

    def slave_loses_power(self) -> float:
        """The others go on without it, or it is back before they notice."""
        slave = self.slaves(self.group.wait_master())[0]
        began = self.fault_begins()
        self._cut([slave])
        self._back_at_once()
        self.wait_acknowledged(began + 0.1)
        return began

    def _until_back(self, members: Sequence[Member], *killed: Member) -> float:
        """Those that are left may be too few: puts are acknowledged again when the others are back."""
        self.fault_begins()
        for member in killed:
            member.kill()
        self._cut(members)
        self.group.heal()
        healed = time.monotonic()
        self.wait_new_master()
        return healed

    def _cut(self, members: Sequence[Member]) -> None:
        """At one moment, as far as these can tell: all are dead before the first is back."""
        for member in members:
            member.kill()
        for member in members:
            how = self.rng.choice(HOWS)
            self.counts["sectors lost"] += cut_power(member, self.rng, how)
            self.counts[f"losing {how}"] += 1
        self.counts[UNIT] += 1

    def _back_at_once(self) -> None:
        """With even chances; else at the end of the round."""
        if self.rng.random() < 0.5:
            self.group.heal()
            self.counts["back at once"] += 1

    def last_fault(self) -> None:
        """At REPLICA what is lost when all lose power nobody knows; what is left is whole, and the same on all of them."""
        if self.on_disk:
            return
        self.doing = "all lose power"
        self._cut(list(self.group.members.values()))
        self.history.may_be_lost()
        self.group.heal()
        self.wait(self.group.whole, "all replicas are in sync again")
        for partition in PARTITIONS:
            self.wait(lambda partition=partition: self._put(partition), "a put is acknowledged")  # type: ignore[misc]

    def _put(self, partition: TopicPartition) -> bool:
        """One message to whoever is the master now; false when that does not acknowledge it."""
        master = self.group.wait_master()
        number, body = self.history.send(partition)
        try:
            with TextClient(master.host, master.port) as client:
                self.history.stored(number, client.put(partition.topic, body, partition=partition.partition).id)
        except LOST:
            self.history.unknown(number, answered=False)
            return False
        return True


def run(seed: int, count: int) -> Result:
    """Cut the power at least ``count`` times."""
    return run_lives(PowerCuts, "powercuts", UNIT, seed, count, ROUNDS)


if __name__ == "__main__":
    main(PowerCuts, "powercuts", ROUNDS)

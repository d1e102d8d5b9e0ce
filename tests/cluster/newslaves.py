"""New slaves under load: each copies the log while all goes on, is promoted, and the other two are killed.

``python -m tests.cluster.newslaves --seed 7 --rounds 5`` runs the life of one group; see ``tests.cluster.failovers``.
"""

import shutil
import time
from typing import Final

from metaq.protocol.remoting.codes import Request
from tests.cluster.life import CLIENTS, Fault, Life
from tests.cluster.lives import main, run_lives
from tests.cluster.promised import PROMISED
from tests.crash.command import Result
from tests.support.group import Member

ROUNDS: Final = 5
"""In one life."""
UNIT: Final = "new slaves promoted"


class NewSlaves(Life):
    """A life in which a slave is replaced by an empty one, again and again."""

    clients = (*CLIENTS, *PROMISED)

    def faults(self) -> dict[Fault, int]:
        return {self.others_killed: 3, self.handed_over_then_others_killed: 2, self.killed_while_it_copies: 1}

    def others_killed(self) -> float:
        """It is elected because nobody else is left."""
        return self._without_others(self._new_slave())

    def handed_over_then_others_killed(self) -> float:
        """It is promoted by an order."""
        slave = self._new_slave()
        self.fault_begins()
        self.group.wait_master().order(Request.HAND_OVER, replica=slave.number)
        self.wait_new_master()
        return self._without_others(slave)

    def killed_while_it_copies(self) -> float:
        """It goes on, or begins anew, and is promoted all the same."""
        slave = self._new_slave(is_killed=True)
        return self._without_others(slave)

    def _new_slave(self, *, is_killed: bool = False) -> Member:
        """Replace a slave by an empty one of its number, and wait until it is in sync."""
        slave = self.slaves(self.group.wait_master())[0]
        slave.kill()
        self.wait(lambda: not self._in_sync(slave), "the group knows that the slave is gone")
        shutil.rmtree(slave.data)
        if is_killed:
            slave.launch()
            self.pass_time(self.rng.uniform(0.3, 1.5))
            slave.kill()
        self.group.heal()
        self.wait(self.group.whole, "the new slave is in sync")
        return slave

    def _in_sync(self, slave: Member) -> bool:
        master = self.group.master()
        look = None if master is None else master.look()
        return look is None or slave.number in look["in_sync"]

    def _without_others(self, slave: Member) -> float:
        """Kill the others, and have them back when the new one is the master."""
        self.fault_begins()
        for member in self.group.members.values():
            if member is not slave:
                member.kill()
        self.wait(lambda: (look := slave.look()) is not None and look["role"] == "master", "the new slave is the master")
        if self.least == 1:
            self.wait_acknowledged(time.monotonic())
        self.counts[UNIT] += 1
        self.group.heal()
        healed = time.monotonic()
        self.wait_acknowledged(healed)
        return healed


def run(seed: int, count: int) -> Result:
    """Promote at least ``count`` new slaves."""
    return run_lives(NewSlaves, "newslaves", UNIT, seed, count, ROUNDS)


if __name__ == "__main__":
    main(NewSlaves, "newslaves", ROUNDS)

"""Failovers under load: the master is killed, stopped, or hands over; slaves are killed.

``python -m tests.cluster.failovers --seed 7 --rounds 30`` runs the life of one group. A failure names the seed. A seed draws
the same faults and the same load again, but not the same instants, as processes are not deterministic.
"""

import time
from typing import Final

from metaq.protocol.remoting.codes import Request
from tests.cluster.life import CLIENTS, Fault, Life
from tests.cluster.lives import main, run_lives
from tests.cluster.promised import PROMISED
from tests.crash.command import Result, expect

ROUNDS: Final = 30
"""In one life."""


class Failovers(Life):
    """A life whose faults hit processes."""

    clients = (*CLIENTS, *PROMISED)

    def faults(self) -> dict[Fault, int]:
        return {self.kill_master: 14, self.kill_two_masters: 2, self.stop_master: 3, self.hand_over: 3, self.kill_slave: 2}

    def kill_master(self) -> float:
        """SIGKILL; it comes back later."""
        master = self.group.wait_master()
        began = self.fault_begins()
        master.kill()
        self.counts["masters killed"] += 1
        self.wait_new_master()
        return began

    def kill_two_masters(self) -> float:
        """The next one, too, in its first moments; both come back at once, and somebody has everything."""
        self.fault_begins()
        for _ in range(2):
            master = self.group.wait_master()
            master.kill()
            self.counts["masters killed"] += 1
        self.group.heal()
        healed = time.monotonic()
        self.wait_new_master()
        return healed

    def stop_master(self) -> float:
        """SIGSTOP for longer than its session: what it is asked meanwhile it must not take when it goes on."""
        master = self.group.wait_master()
        began = self.fault_begins()
        master.pause()
        self.wait_new_master()
        master.go_on()
        self.wait_acknowledged(time.monotonic())
        return began

    def hand_over(self) -> float:
        """By an operator's order: no put fails whose client tries again where it is told to."""
        master = self.group.wait_master()
        before, epoch = self.history.outcomes_unknown, self.history.epoch
        began = self.fault_begins()
        chosen = self.slaves(master)[0]
        master.order(Request.HAND_OVER, replica=chosen.number)
        self.wait_new_master()
        more = self.history.outcomes_unknown - before
        expect(not more, "no put fails when a master hands over", more, self.history.counts)
        elected = self.group.elected(epoch)
        expect(elected[0] is chosen, "the chosen one is the next master", chosen.number, [one.number for one in elected])
        return began

    def kill_slave(self) -> float:
        """The others go on without it."""
        slave = self.slaves(self.group.wait_master())[0]
        began = self.fault_begins()
        slave.kill()
        self.counts["slaves killed"] += 1
        self.wait_acknowledged(began + 0.1)
        return began


def run(seed: int, count: int) -> Result:
    """Kill at least ``count`` masters."""
    return run_lives(Failovers, "failovers", "masters killed", seed, count, ROUNDS)


if __name__ == "__main__":
    main(Failovers, "failovers", ROUNDS)

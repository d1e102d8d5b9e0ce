"""Elections among replicas that lose power, against a model: no acknowledged message is lost while one in sync has it.

The elections and the in-sync set are real; ZooKeeper is a table of nodes, a log is a list. Each next event is drawn: messages,
copies, reports, frames that come late, kills, power cuts, restarts within the session, sessions that expire, answers that get
lost. A master may find out only while it opens its log anew that some of it is gone. After each step every replica in sync that
is not suspect has to hold everything that was acknowledged. Only when all of them are suspect may a master lack some of it, and
then it has the longest log.

Replay one case: ``python -m tests.cluster.suspects --seed N``.
"""

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from metaq.errors import ChangeUnknown, Fenced, RegistryUnavailable
from metaq.registry.session import CheckVersion, CreateNode, DeleteNode, Operation, SetData, Znode
from metaq.replication.election import Election
from metaq.replication.insync import InSync
from metaq.replication.nodes import ReplicaGroupState, ReplicaLog
from tests.crash.command import Result, expect, main, run_until
from tests.crash.driver import case

NUMBERS: Final = (1, 2, 3)
GROUP: Final = "/metaq/groups/c/b"
SESSION_S: Final = 4.0
MINIMUM: Final = 2
STEPS: Final = 700
POWER_CUT: Final = "the power failed"
DAMAGE: Final = "no record to keep"


class Entry(NamedTuple):
    """A message, or the begin of an epoch."""

    epoch: int
    replica: int
    number: int


class Tree:
    """ZooKeeper's nodes: data, version and session."""

    def __init__(self) -> None:
        self.nodes: dict[str, tuple[bytes, int, int]] = {}
        self.sessions = 0

    def expire(self, session: int) -> None:
        self.nodes = {path: node for path, node in self.nodes.items() if node[2] != session}

    def commit(self, operations: Sequence[Operation], session: int) -> bool:
        nodes = dict(self.nodes)
        for operation in operations:
            found = nodes.get(operation.path)
            if isinstance(operation, CreateNode):
                if found is not None:
                    return False
                nodes[operation.path] = operation.data, 0, session if operation.ephemeral else 0
                continue
            if found is None or operation.version not in (-1, found[1]):
                return False
            if isinstance(operation, SetData):
                nodes[operation.path] = operation.data, found[1] + 1, found[2]
            elif isinstance(operation, DeleteNode):
                del nodes[operation.path]
            else:
                assert isinstance(operation, CheckVersion)
        self.nodes = nodes
        return True


class ZooKeeper:
    """One process's session."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._tree = world.tree
        self.connected = True
        self.heard_at = world.now
        self.kept: tuple[str, Callable[[], bytes]] | None = None
        self.unsettled = True
        self.begin()

    def begin(self) -> None:
        self._tree.sessions += 1
        self.session = self._tree.sessions
        self.unsettled = True

    @property
    def leased_session(self) -> int:
        return self.session

    @property
    def lease_end(self) -> float:
        return self.heard_at + SESSION_S * 2 / 3

    def _check(self) -> None:
        if not self.connected:
            raise RegistryUnavailable("not connected")

    def get(self, path: str) -> Znode | None:
        self._check()
        found = self._tree.nodes.get(path)
        return None if found is None else Znode(found[0], found[1])

    def children(self, path: str) -> list[str]:
        self._check()
        return sorted(name.rpartition("/")[2] for name in self._tree.nodes if name.startswith(f"{path}/"))

    def make(self, path: str, data: bytes = b"") -> bool:
        return self.commit([CreateNode(path, data)])

    def commit(self, operations: Sequence[Operation]) -> bool:
        self._check()
        lost = self._world.rng.random()
        if lost < 0.02:
            raise ChangeUnknown("not done, and not known")
        done = self._tree.commit(operations, self.session)
        if lost < 0.04:
            raise ChangeUnknown("done, and not known")
        return done

    def touch(self, path: str) -> None:
        self.unsettled = True

    def settle(self) -> None:
        """Write the kept node again, if it is due, as the keeper of a real connection does some time later."""
        if self.connected and self.unsettled and self.kept is not None:
            path, data = self.kept
            self._tree.nodes[path] = data(), 0, self.session
            self.unsettled = False


class Machine:
    """A replica: its log, and its process, if any."""

    def __init__(self, world: "World", number: int) -> None:
        self.world, self.number = world, number
        self.log: list[Entry] = []
        self.synced = 0
        self.suspect: str | None = None
        self.process: Process | None = None

    def epoch(self) -> int:
        return max((entry.epoch for entry in self.log), default=1)

    def describe(self) -> ReplicaLog:
        return ReplicaLog(self.epoch(), len(self.log), self.suspect or (None if self.log else "its log is empty"))

    def kill(self) -> None:
        if self.process is not None:
            self.process.leave()
            self.world.dead.append((self.process.zookeeper.session, self.process.zookeeper.heard_at))
            self.process = None

    def cut_power(self) -> None:
        self.kill()
        self.lose(POWER_CUT)

    def lose(self, reason: str) -> None:
        """Some of what was not synced is gone."""
        if len(self.log) > self.synced:
            del self.log[self.world.rng.randrange(self.synced, len(self.log) + 1) :]
        self.suspect = self.suspect or reason

    def start(self) -> None:
        self.process = Process(self)


class Process:
    """From a start to a kill."""

    def __init__(self, machine: Machine) -> None:
        self.machine, world = machine, machine.world
        self.zookeeper = ZooKeeper(world)
        self.election = Election(
            self.zookeeper,  # type: ignore[arg-type]
            "c/b",
            machine.number,
            f"h:{machine.number}",
            log=machine.describe,
            elected=lambda *elected: setattr(self, "wanted", elected),
            deposed=lambda: setattr(self, "wanted", None),
            moved=lambda address: None,
            monotonic=lambda: world.now,
        )
        self.zookeeper.kept = f"{GROUP}/replicas/{machine.number}", self.election._describe
        self.wanted: Any = ()
        self.in_sync: InSync | None = None
        self.epoch = 0
        """Of a master: the one that it was elected for."""
        self.waiting: list[Entry] = []
        self.follows: Process | None = None
        self.joined: InSync | None = None
        self.frames: list[tuple[frozenset[int], int]] = []

    def change(self) -> None:
        """Take the role that is wanted."""
        wanted, self.wanted = self.wanted, ()
        if wanted == ():
            return
        self.leave()
        self.in_sync, self.waiting = None, []
        if wanted is not None:
            epoch, eligible, stood = wanted
            self.epoch = epoch
            machine, world = self.machine, self.machine.world
            if world.faults and world.rng.random() < 0.05:
                machine.lose(DAMAGE)
            if machine.suspect is not None and (stood.suspect is None or stood.is_longer(machine.describe())):
                self.election.give_up()
                return
            machine.log.append(Entry(epoch, machine.number, world.number()))
            machine.suspect = None
            self.in_sync = InSync(
                own=machine.number,
                minimum=MINIMUM,
                lag_s=3.0,
                monotonic=lambda: world.now,
                own_end=lambda: len(machine.log),
                agree=partial(self.agree, epoch),
                changed=lambda: None,
                eligible=eligible,
            )

    def agree(self, epoch: int, in_sync: frozenset[int]) -> bool:
        """Have a set agreed on; a slave goes on meanwhile, as while a real master waits for ZooKeeper."""
        agreed, world = self.election.agree(epoch, in_sync), self.machine.world
        slave = world.machines[world.rng.choice(NUMBERS)]
        if world.faults and slave.process is not None and slave.process.joined is self.in_sync:
            if world.rng.random() < 0.3:
                slave.cut_power()
                slave.start()
            assert slave.process is not None
            slave.process.election.master = self.election.master
            slave.process.follow()
        return agreed

    def put(self) -> None:
        if self.in_sync is not None and self.election.leading:
            try:
                self.election.check(self.epoch)
            except Fenced:
                return
            entry = Entry(self.machine.epoch(), self.machine.number, self.machine.world.number())
            self.machine.log.append(entry)
            self.waiting.append(entry)

    def acknowledge(self) -> None:
        if self.in_sync is not None:
            held = set(self.machine.log[: self.in_sync.held_end])
            self.machine.world.acknowledged |= {entry for entry in self.waiting if entry in held}
            self.waiting = [entry for entry in self.waiting if entry not in held]

    def leave(self) -> None:
        """The connection to the master ends."""
        joined, self.follows, self.joined, self.frames = self.joined, None, None, []
        if joined is not None:
            joined.left(self.machine.number)

    def follow(self) -> None:
        """Connect, or copy some more of the master's log, and report."""
        if self.in_sync is not None:
            return
        world, log, master = self.machine.world, self.machine.log, self.follows
        if master is not None and (
            master.in_sync is not self.joined or world.machines[master.machine.number].process is not master
        ):
            self.leave()
            return
        if master is None:
            address = self.election.master_address
            other = None if address is None else world.machines[address[1]].process
            if other is None or other.in_sync is None or self.machine.epoch() > other.machine.epoch():
                return
            theirs = other.machine.log
            same = next(
                (at for at, (ours, its) in enumerate(zip(log, theirs, strict=False)) if ours != its), min(len(log), len(theirs))
            )
            del log[same:]
            self.machine.synced = min(self.machine.synced, same)
            if not log:
                self.machine.suspect = self.machine.suspect or "its log was empty"
            self.follows, self.joined = other, other.in_sync
            other.in_sync.joined(self.machine.number, "", "", len(log))
            return
        assert master.in_sync is not None
        log += master.machine.log[len(log) : len(log) + world.rng.randrange(6)]
        if world.rng.random() < 0.8:
            master.in_sync.reported(self.machine.number, len(log))
        if world.rng.random() < 0.6:
            self.frames.append((master.in_sync.members, len(log)))

    def hear(self) -> None:
        """The next of the master's frames, which comes after what was sent of the log before it."""
        if self.frames and len(self.machine.log) >= self.frames[0][1]:
            members, _ = self.frames.pop(0)
            if self.machine.number in members:
                self.machine.suspect = None


class World:
    """Machines, ZooKeeper and a clock."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.tree = Tree()
        self.dead: list[tuple[int, float]] = []
        self.acknowledged: set[Entry] = set()
        self.lost: set[Entry] = set()
        self.machines = {number: Machine(self, number) for number in NUMBERS}
        self.faults = True
        self._numbers = 0
        self._state: ReplicaGroupState | None = None

    def number(self) -> int:
        self._numbers += 1
        return self._numbers

    def step(self) -> None:
        rng, faults = self.rng, self.faults
        self.now += rng.random() * 0.2
        machine = self.machines[rng.choice(NUMBERS)]
        if machine.process is None:
            if not faults or rng.random() < 0.15:
                machine.start()
        elif faults and rng.random() < 0.025:
            rng.choice((machine.kill, machine.cut_power, machine.cut_power))()
            if rng.random() < 0.15:  # all at once
                for other in self.machines.values():
                    other.cut_power()
            if rng.random() < 0.5:  # back within its session
                machine.start()
        else:
            self.work(machine, machine.process)
        self.expire()
        self.check()

    def work(self, machine: Machine, process: Process) -> None:
        zookeeper, rng, faults = process.zookeeper, self.rng, self.faults
        if faults and rng.random() < 0.01:
            zookeeper.connected = False
        elif not zookeeper.connected and rng.random() < (0.1 if faults else 1.0):
            zookeeper.connected = True
        if zookeeper.connected:
            zookeeper.heard_at = self.now
        for work in rng.sample(
            (process.put, process.put, process.follow, process.follow, process.hear, process.acknowledge), 4
        ):
            work()
        if rng.random() < 0.5:
            process.change()
        if rng.random() < 0.5:
            zookeeper.settle()
        if rng.random() < 0.05:
            machine.synced = len(machine.log)
        try:
            if process.in_sync is not None:
                process.in_sync.tick()
            if zookeeper.connected:
                process.election._look()
        except RegistryUnavailable:
            pass

    def expire(self) -> None:
        for session, heard_at in list(self.dead):
            if self.now - heard_at > SESSION_S and (not self.faults or self.rng.random() < 0.1):
                self.tree.expire(session)
                self.dead.remove((session, heard_at))
        for machine in self.machines.values():
            if machine.process is not None and self.now - machine.process.zookeeper.heard_at > SESSION_S:
                self.tree.expire(machine.process.zookeeper.session)
                machine.process.zookeeper.begin()

    def master(self) -> Machine | None:
        """The one that all follow, and that has everything."""
        found = [machine for machine in self.machines.values() if machine.process and machine.process.in_sync]
        if len(found) != 1 or found[0].process is None or found[0].process.in_sync is None:
            return None
        return found[0] if found[0].process.in_sync.members == frozenset(NUMBERS) else None

    def check(self) -> None:
        """Check what has to hold at every moment."""
        found = self.tree.nodes.get(f"{GROUP}/state")
        if found is None or not found[0]:
            return
        before, state = self._state, ReplicaGroupState.decode(found[0])
        self._state = state
        if before is not None and state.epoch != before.epoch:
            master = self.machines[state.master]
            assert state.master in before.in_sync, (before, state)
            if master.suspect is not None:
                suspects = [self.machines[number] for number in before.in_sync]
                assert all(other.suspect is not None for other in suspects), (before, [other.describe() for other in suspects])
                assert not any(other.describe().is_longer(master.describe()) for other in suspects)
                self.lost |= self.acknowledged.difference(master.log)
        for number in state.in_sync:
            machine = self.machines[number]
            if machine.suspect is None and machine.log:
                missing = self.acknowledged - self.lost - set(machine.log)
                assert not missing, (number, state, sorted(missing)[:5], machine.describe())


def one_case(seed: int) -> dict[str, int]:
    """Faults for a while; then there is a master that all follow, and that has everything."""
    world = World(seed)
    with case("tests.cluster.suspects", seed):
        for _ in range(STEPS):
            world.step()
        world.faults = False
        for _ in range(10 * STEPS):
            world.step()
            if world.master() is not None:
                break
        master = world.master()
        expect(master is not None, "all follow a master in the end", *(each.describe() for each in world.machines.values()))
        assert master is not None
        missing = world.acknowledged - world.lost - set(master.log)
        expect(not missing, "it has what was acknowledged", *sorted(missing)[:5])
    return {"cases": 1, "acknowledged": len(world.acknowledged), "lost when all had lost power": len(world.lost)}


def run(seed: int, count: int) -> Result:
    """So many cases."""
    return run_until(one_case, "cases", seed, count, "elections of replicas that lose power")


if __name__ == "__main__":
    main(one_case)

"""Replicas of a broker as real processes, and how their logs compare."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from metaq.protocol.remoting.codes import Request
from metaq.store.log.segments import is_segment_name
from metaq.store.messagestore import LOG, QUEUES
from tests.support.admin import ask, ask_body, connect
from tests.support.broker import BrokerProcess, wait_until
from tests.support.ports import free_ports
from tests.support.proxy import Proxy

DEADLINE_S: Final = 60.0
ROLE_CHANGES: Final = (OSError, AssertionError)
"""What a request meets while a replica closes and opens its broker: lost connections, and answers that say so."""


class ReplicaProcess(BrokerProcess):
    """One replica. It keeps its ``replication`` address from one start to the next."""

    def __init__(self, data: Path, number: int, master: str, *flags: str, durability: str) -> None:
        """A slave of the ``master`` at HOST:PORT, or with an empty one the master itself."""
        super().__init__(data, *flags, durability=durability)
        self.number = number
        self._master = master

    def own_flags(self) -> list[str]:
        role = "slave" if self._master else "master"
        flags = ["--role", role, "--master", self._master, "--replica-number", str(self.number)]
        return [*super().own_flags(), *flags, "--replication-listen", self.replication or f"127.0.0.1:{free_ports(1)[0]}"]

    def follow(self, master: str) -> None:
        """Start as a slave of the master at HOST:PORT."""
        self._master = master
        self.start()

    def status(self) -> dict[str, Any]:
        """Return the replica's status (30020)."""
        with connect(self) as client:
            found: dict[str, Any] = ask_body(client, Request.REPLICA_STATUS)
            return found

    def stands(self, **expected: object) -> bool:
        """Return whether the status (30020) has these values; ``False`` while a change of role keeps it from answering."""
        try:
            status = self.status()
        except ROLE_CHANGES:
            return False
        return all(status[name] == value for name, value in expected.items())

    def wait_for(self, **expected: object) -> None:
        """Wait until 30020 says so."""
        wait_until(lambda: self.stands(**expected), DEADLINE_S, f"replica {self.number} stands as {expected}; see {self.log}")

    def promote(self) -> None:
        """Make it the master, and wait until it is. One that was in sync knows so a moment after its master."""
        self.wait_for(suspect=None)
        with connect(self) as client:
            ask(client, Request.CHANGE_ROLE, role="master")
        self.wait_for(role="master")

    def demote(self, master: str) -> None:
        """Make it a slave of the master at HOST:PORT, and wait until it is."""
        with connect(self) as client:
            ask(client, Request.CHANGE_ROLE, role="slave", master=master)
        self.wait_for(role="slave")

    def pause(self) -> None:
        """SIGSTOP: it does nothing, but its connections stay."""
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def wait_problem(self, words: str) -> None:
        """Wait until 30020 names a problem with these words."""

        def named() -> bool:
            try:
                return words in (self.status()["problem"] or "")
            except ROLE_CHANGES:
                return False

        wait_until(named, DEADLINE_S, f"replica {self.number} says {words!r}; see {self.log}")


PATIENT: Final = ("--replica-lag-ms", "15000", "--replica-timeout-ms", "30000")
"""Where no slave is lost: a machine that stands still for a while puts none out of sync."""


class Cluster(contextlib.ExitStack):
    """The replicas of one broker, whose folders are in one; all end with the ``with`` block."""

    def __init__(self, folder: Path, *flags: str, durability: str = "replica") -> None:
        """``flags`` are for all replicas."""
        super().__init__()
        self.folder = folder
        # a slave that is lost is out of sync before a put that waits for it is answered
        self.flags = ("--replica-lag-ms", "5000", "--replica-timeout-ms", "15000", *flags)
        self.durability = durability

    def add(self, number: int, master: str = "", *flags: str, kind: type[ReplicaProcess] = ReplicaProcess) -> ReplicaProcess:
        """A new replica, started: the slave of the master at HOST:PORT, or the master."""
        data = self.folder / f"replica{number}"
        return self.enter_context(kind(data, number, master, *self.flags, *flags, durability=self.durability))

    def pair(self) -> tuple[ReplicaProcess, ReplicaProcess]:
        """A master, 1, and a slave, 2, in sync."""
        master = self.add(1)
        slave = self.add(2, master.replication)
        master.wait_for(in_sync=[1, 2])
        slave.wait_for(suspect=None)
        return master, slave

    def proxied_pair(self) -> tuple[ReplicaProcess, ReplicaProcess, Proxy]:
        """The same, with a proxy between them."""
        master = self.add(1)
        proxy = self.proxy(master)
        slave = self.add(2, proxy.address)
        master.wait_for(in_sync=[1, 2])
        slave.wait_for(suspect=None)
        return master, slave, proxy

    def proxy(self, master: ReplicaProcess) -> Proxy:
        """One before a master's replication port."""
        host, _, port = master.replication.rpartition(":")
        return self.enter_context(Proxy(host, int(port)))


def wait_caught_up(master: ReplicaProcess, slave: ReplicaProcess) -> int:
    """Wait until a slave is in sync and knows it, has all of its master's log and shows it; the log's end."""
    end = 0

    def caught_up() -> bool:
        nonlocal end
        try:
            ours, theirs = master.status(), slave.status()
        except ROLE_CHANGES:
            return False
        end = ours["end"]
        same = all(theirs[name] == end for name in ("end", "readable_end"))
        return same and slave.number in ours["in_sync"] and theirs["suspect"] is None

    wait_until(caught_up, DEADLINE_S, f"replica {slave.number} has caught up with {master.number}; see {slave.log}")
    return end


def log_pieces(data: Path, start: int, end: int) -> Iterator[bytes]:
    """The log of a data folder from one log offset to another, file by file."""
    bases = sorted(int(path.name) for path in (data / LOG).iterdir() if is_segment_name(path.name))
    for base, following in zip(bases, [*bases[1:], end], strict=True):
        first, behind = max(start, base), min(end, following)
        if first < behind:
            with (data / LOG / f"{base:020d}").open("rb") as file:
                file.seek(first - base)
                yield file.read(behind - first)


def check_prefix(master: ReplicaProcess, slave: ReplicaProcess) -> None:
    """The slave's log is the master's, byte for byte, from where both begin to where the slave's ends. Both run."""
    theirs = slave.status()
    ours = master.status()
    assert theirs["end"] <= ours["end"], (theirs, ours)
    compare_logs(master.data, slave.data, max(ours["begin"], theirs["begin"]), theirs["end"])


def compare_logs(ours: Path, theirs: Path, start: int, end: int) -> None:
    """Two logs hold the same bytes."""
    at = start
    for one, other in zip(*(log_pieces(data, start, end) for data in (ours, theirs)), strict=True):
        assert len(one) == len(other), f"of the files of {at} one log has {len(one)} bytes, the other {len(other)}"
        if one != other:
            inside = next(at for at, (left, right) in enumerate(zip(one, other, strict=True)) if left != right)
            shown = slice(inside, inside + 40)
            raise AssertionError(f"the logs differ at {at + inside}: {one[shown]!r} and {other[shown]!r}")
        at += len(one)
    assert at == end


def queue_files(data: Path) -> dict[str, bytes]:
    """The files of all queues of a stopped broker."""
    root = data / QUEUES
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}

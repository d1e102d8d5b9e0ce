"""Three replicas that elect their master through a real ZooKeeper, on request with a proxy in each connection."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple

import orjson

from metaq.protocol.remoting.codes import Request
from tests.support.admin import ask, ask_body
from tests.support.broker import BrokerProcess, wait_until
from tests.support.cluster import ROLE_CHANGES, ReplicaProcess
from tests.support.detour import DETOURS
from tests.support.ports import hold_port
from tests.support.proxy import Proxy
from tests.support.remoting import RemotingClient

REPLICAS: Final = (1, 2, 3)
SESSION_MS: Final = 4000
WHOLE_DEADLINE_S: Final = 60.0
ANSWER_S: Final = 1.0
"""After which a replica is taken for stopped."""
LOOK_S: Final = 0.02
ELECTED: Final = re.compile(r" elected epoch=(\d+)\n")


class Member(ReplicaProcess):
    """One of the three. Its ports are given, and stay the same."""

    def __init__(self, data: Path, number: int, ports: tuple[int, int], *flags: str, durability: str) -> None:
        """``ports``: for clients, and for slaves."""
        super().__init__(data, number, "", *flags, durability=durability)
        self.host, self.port = "127.0.0.1", ports[0]
        self._listen = self.address
        self.replication = f"127.0.0.1:{ports[1]}"
        self.stopped = False
        """By SIGSTOP."""

    def own_flags(self) -> list[str]:
        flags = ["--role", "elected", "--replica-number", str(self.number), "--replication-listen", self.replication]
        return [*BrokerProcess.own_flags(self), *flags]

    def order(self, code: int, /, **fields: object) -> None:
        """Send an operator's request, which must succeed."""
        with RemotingClient(self.host, self.port) as client:
            ask(client, code, **fields)

    def look(self) -> dict[str, Any] | None:
        """Return the replica's status (30020); ``None`` when it is not running, or does not answer soon."""
        if not self.running or self.stopped:
            return None
        try:
            with RemotingClient(self.host, self.port, timeout_s=ANSWER_S) as client:
                found: dict[str, Any] = ask_body(client, Request.REPLICA_STATUS)
                return found
        except ROLE_CHANGES:
            return None

    def pause(self) -> None:
        super().pause()
        self.stopped = True

    def go_on(self) -> None:
        super().go_on()
        self.stopped = False


class DetouredMember(Member):
    """One that reaches the other ones through proxies."""

    program: ClassVar[tuple[str, ...]] = ("tests.support.detour",)


class Ways(NamedTuple):
    """The proxies of one replica."""

    slaves: dict[int, Proxy]
    """By which each of the others reaches it as its slave."""
    zookeeper: Proxy
    """By which it reaches ZooKeeper."""
    clients: Proxy
    """By which clients reach it."""

    def all(self) -> Iterator[Proxy]:
        yield from (*self.slaves.values(), self.zookeeper, self.clients)


class Group(contextlib.ExitStack):
    """The replicas of one broker, from entering the ``with`` block, where all are in sync, until leaving it."""

    def __init__(
        self,
        folder: Path,
        zookeeper: str,
        *flags: str,
        proxied: bool = False,
        seed: int = 0,
        durability: str = "replica",
        kind: type[Member] = Member,
    ) -> None:
        """``zookeeper`` is HOST:PORT, with proxies that of one server."""
        super().__init__()
        self.members: dict[int, Member] = {}
        self.ways: dict[int, Ways] = {}
        flags = ("--zookeeper-session-ms", str(SESSION_MS), *flags)
        for number in REPLICAS:
            own_ports, server = (self._hold_port(), self._hold_port()), zookeeper
            if proxied:
                ways = self.ways[number] = Ways(
                    {other: self._proxy(own_ports[1], seed) for other in REPLICAS if other != number},
                    self._proxy(int(zookeeper.rpartition(":")[2]), seed),
                    self._proxy(own_ports[0], seed),
                )
                kind, server = DetouredMember, ways.zookeeper.address
            own_flags = ("--zookeeper", server, *flags)
            self.members[number] = kind(folder / f"replica{number}", number, own_ports, *own_flags, durability=durability)
        if proxied:
            for slave in REPLICAS:
                to = {self.members[n].replication: ways.slaves[slave].address for n, ways in self.ways.items() if n != slave}
                (folder / DETOURS.format(slave)).write_bytes(orjson.dumps(to))

    def _proxy(self, port: int, seed: int) -> Proxy:
        return self.enter_context(Proxy("127.0.0.1", port, seed=seed))

    def _hold_port(self) -> int:
        """A free port, where a replica can listen whenever it starts."""
        return int(self.enter_context(hold_port()).getsockname()[1])

    def __enter__(self) -> "Group":
        for member in self.members.values():
            self.callback(member.kill)
            member.launch()
        try:
            for member in self.members.values():
                member.wait_ready()
            self.wait_whole()
        except BaseException:
            self.close()
            raise
        return self

    def ports(self) -> dict[int, int]:
        """Where clients reach each replica on loopback."""
        return {n: self.ways[n].clients.port if n in self.ways else member.port for n, member in self.members.items()}

    def master(self) -> Member | None:
        """The one that says so; of several the newest."""
        found = [
            (look["epoch"], number)
            for number, member in self.members.items()
            if (look := member.look()) is not None and look["role"] == "master"
        ]
        return self.members[max(found)[1]] if found else None

    def wait_master(self) -> Member:
        """The master, waited for."""
        found: list[Member | None] = [None]

        def look() -> bool:
            found[0] = self.master()
            return found[0] is not None

        wait_until(look, WHOLE_DEADLINE_S, "the group has a master", LOOK_S)
        assert found[0] is not None
        return found[0]

    def elected(self, epoch: int) -> list[Member]:
        """Return the members elected after an epoch, in order of their epochs, as far as they have logged it."""
        said = {int(found[1]): member for member in self.members.values() for found in ELECTED.finditer(member.stderr())}
        return [said[number] for number in sorted(said) if number > epoch]

    def whole(self) -> bool:
        """Return whether all replicas are in sync, have one master, are in its epoch, and could be the next one.

        A slave that was killed when the master had just taken it in is in sync, and after its restart suspect for a moment.
        """
        looks = {number: member.look() for number, member in self.members.items()}
        known = [look for look in looks.values() if look is not None]
        masters = [look for look in known if look["role"] == "master"]
        return (
            len(known) == len(REPLICAS)
            and len(masters) == 1
            and masters[0]["in_sync"] == list(REPLICAS)
            and all(look["epoch"] == masters[0]["epoch"] for look in known)
            and all(look["suspect"] is None for look in known if look is not masters[0])
        )

    def wait_whole(self) -> None:
        """Wait until all are in sync."""
        wait_until(self.whole, WHOLE_DEADLINE_S, f"all replicas are in sync; see {self.members[1].log.parent}", LOOK_S)

    def heal(self) -> None:
        """Everything gets through again, and every process runs."""
        for ways in self.ways.values():
            for proxy in ways.all():
                proxy.heal()
        for member in self.members.values():
            if member.stopped:
                member.go_on()
        gone = [member for member in self.members.values() if not member.running]
        for member in gone:
            member.launch()
        for member in gone:
            member.wait_ready()

    def stderr(self, size: int = 3000) -> str:
        """The ends of what the replicas have written to standard error."""
        return "\n".join(f"replica {number}:\n{member.stderr()[-size:]}" for number, member in self.members.items())

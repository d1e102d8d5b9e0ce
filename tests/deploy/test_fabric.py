"""A cluster's life: deployed, restarted under load, upgraded, rolled back."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from tests.deploy.conftest import SECOND
from tests.deploy.load import Load
from tests.deploy.ports import broker_ports
from tests.support.fab import Fab
from tests.support.sshd import SshHost
from tests.support.zookeeper import ZooKeeperProcess

pytestmark = [pytest.mark.partner("sshd", "java"), pytest.mark.timeout(1800)]

NAMES: Final = ("a", "b", "c")
SETTINGS: Final = {"broker_name": "orders", "role": "elected", "durability": "replica", "segment_bytes": 32 * 1024**2}
SESSION_MS: Final = 4000


class Machines:
    """Three machines with a replica each, beside a ZooKeeper."""

    def __init__(self, folder: Path, hosts: dict[str, SshHost], zookeeper: str) -> None:
        self.hosts = hosts
        self.fab = Fab(folder / "cluster.yaml")
        self._zookeeper = zookeeper
        self.brokers: dict[str, dict[str, Any]] = {
            host.name: {"data": str(host.home / "data"), "replica_number": number, **ports.settings()}
            for number, (host, ports) in enumerate(zip(hosts.values(), broker_ports(len(hosts)), strict=True), 1)
        }

    @property
    def registry(self) -> str:
        """The registry addresses of all three brokers."""
        return ";".join(broker["registry_listen"] for broker in self.brokers.values())

    def configure(self, wheels: Path, **settings: Any) -> None:
        """Set the wheels and the settings of the next deployment."""
        hosts = {name: host.settings(broker=self.brokers[name]) for name, host in self.hosts.items()}
        zookeeper = {"zookeeper": self._zookeeper, "zookeeper_session_ms": SESSION_MS}
        given = {**SETTINGS, **zookeeper, **settings}
        self.fab.configure(hosts, package=str(wheels), settings=given, start_deadline_s=120, keep_releases=2)

    def move(self) -> None:
        """Have all listen elsewhere for text clients, which is where fab asks."""
        for broker, ports in zip(self.brokers.values(), broker_ports(len(self.brokers)), strict=True):
            broker.update(ports.settings("listen"))

    def roles(self) -> list[str]:
        """Return the roles of all replicas, sorted, as ``fab status`` shows them."""
        rows = [line.split() for line in self.fab.run("status").splitlines()[1:]]
        return sorted(row[4] for row in rows)

    def releases(self) -> list[set[str]]:
        """Return the names of the releases that each machine keeps."""
        return [{path.name for path in (host.home / "metaq" / "releases").iterdir()} for host in self.hosts.values()]

    def current(self) -> set[str]:
        """The releases that are current somewhere."""
        return {(host.home / "metaq" / "current").readlink().name for host in self.hosts.values()}


@contextmanager
def machines(folder: Path, python: Path) -> Iterator[Machines]:
    with ExitStack() as stack:
        zookeeper = stack.enter_context(ZooKeeperProcess(folder / "zookeeper"))
        hosts = {name: stack.enter_context(SshHost(folder, name, python)) for name in NAMES}
        yield Machines(folder, hosts, zookeeper.address)


@pytest.mark.slow
def test_a_life(tmp_path: Path, python: Path, wheels: Path, second_wheels: Path) -> None:
    """E-18: deploy, restart and upgrade under load without a failed send, roll back; and nothing is lost in the end.

    The second release listens elsewhere: each broker is asked where it listens now, and restarted behind its master's back.
    """
    with machines(tmp_path, python) as cluster:
        fab = cluster.fab
        cluster.configure(wheels)
        plan = fab.run("deploy", "--dry-run")
        assert "a: start broker" in plan and plan.endswith("nothing was changed on any host\n")
        assert not any(list(host.home.iterdir()) for host in cluster.hosts.values())

        assert "runs on 3 hosts" in fab.run("deploy")
        assert cluster.roles() == ["master", "slave", "slave"]
        (first,) = cluster.current()
        with Load(cluster.registry) as load:
            load.wait_sent(100)
            said = fab.run("restart")
            assert said.count(": restart broker") == 3 and said.count(": hand over orders") == 1

            cluster.move()
            cluster.configure(second_wheels, max_hold_ms=20_000)
            assert cluster.roles() == ["master", "slave", "slave"]
            assert "a: broker.max_hold_ms: from None to 20000" in fab.run("upgrade-check")
            said = fab.run("deploy")
            assert said.count(": restart broker") == 3 and said.count(": hand over orders") == 1
            (second,) = cluster.current()
            assert second.startswith(SECOND) and SECOND in fab.run("status")
            assert "broker serves" not in fab.run("deploy")  # it runs already

            said = fab.run("rollback")
            assert said.count(": restart broker") == 3 and said.count(": hand over orders") == 1
            assert cluster.current() == {first}
            assert "not all hosts have the release before this one" in fab.refused("rollback")
            assert all(kept == {first, second} for kept in cluster.releases())
            load.wait_sent(100)
        load.check()
        fab.run("stop")
        assert "stopped" in fab.run_any("status").output
        assert "metaq.server.daemon stopped" in fab.run("logs", "--on", "b", "--lines", "3")
        fab.run("start")
        assert cluster.roles() == ["master", "slave", "slave"]
        load.check()

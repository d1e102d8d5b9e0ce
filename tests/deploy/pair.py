"""Two machines with an unreplicated broker each, for what needs no group of replicas."""

import contextlib
import random
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from tests.support.fab import Fab
from tests.support.sshd import SshHost
from tests.support.zookeeper import free_ports

SMALL: Final = 32 * 1024**2


def adjacent_ports(count: int) -> list[int]:
    """Ports that are free, as the one above each is: that of metrics and health, unless a setting says otherwise.

    They are below those that the kernel chooses: it would give the one above to the next connection that anybody makes.
    """
    found: list[int] = []
    with ExitStack() as stack:
        while len(found) < count:
            port = random.SystemRandom().randrange(20_000, 32_000, 2)
            with contextlib.suppress(OSError):
                for wanted in (port, port + 1):
                    stack.enter_context(socket.create_server(("127.0.0.1", wanted)))
                found.append(port)
    return found


class Pair:
    """Hosts a and b; nothing is deployed yet."""

    def __init__(self, folder: Path, hosts: list[SshHost], wheels: Path) -> None:
        self.hosts = hosts
        self.fab = Fab(folder / "cluster.yaml")
        self._wheels = wheels
        self.ports = {host.name: [port, *free_ports(2)] for host, port in zip(hosts, adjacent_ports(len(hosts)), strict=True)}

    def configure(self, wheels: Path | None = None, of_all: dict[str, Any] | None = None, **of_b: Any) -> None:
        """Write cluster.yaml; what is given is of host b, or of the deployment."""
        hosts = {host.name: host.settings(broker=self.broker(host)) for host in self.hosts}
        hosts["b"].update(of_b)
        self.fab.configure(hosts, package=str(wheels or self._wheels), start_deadline_s=60, **(of_all or {}))

    def broker(self, host: SshHost, **others: Any) -> dict[str, Any]:
        """Its settings."""
        names = ("listen", "remoting_listen", "registry_listen")
        addresses = {name: f"127.0.0.1:{port}" for name, port in zip(names, self.ports[host.name], strict=True)}
        return {"data": str(host.home / "data"), "broker_name": host.name, "segment_bytes": SMALL, **addresses, **others}

    def untouched(self) -> bool:
        """Whether no host has anything of ours."""
        return not any((host.home / "metaq").exists() for host in self.hosts)

    def status(self) -> dict[str, list[str]]:
        """The words of ``fab status`` by host; each has one service."""
        return {line.split()[0]: line.split() for line in self.fab.run_any("status").output.splitlines()}

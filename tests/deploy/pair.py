"""Two machines with an unreplicated broker each, for tests that need no group of replicas."""

from pathlib import Path
from typing import Any, Final

from tests.deploy.ports import broker_ports
from tests.support.fab import Fab
from tests.support.sshd import SshHost

SMALL: Final = 32 * 1024**2


class Pair:
    """Hosts a and b; nothing is deployed yet."""

    def __init__(self, folder: Path, hosts: list[SshHost], wheels: Path) -> None:
        self.hosts = hosts
        self.fab = Fab(folder / "cluster.yaml")
        self._wheels = wheels
        self.ports = {host.name: ports for host, ports in zip(hosts, broker_ports(len(hosts)), strict=True)}

    def configure(self, wheels: Path | None = None, of_all: dict[str, Any] | None = None, **of_b: Any) -> None:
        """Write cluster.yaml; what is given is of host b, or of the deployment."""
        hosts = {host.name: host.settings(broker=self.broker(host)) for host in self.hosts}
        hosts["b"].update(of_b)
        self.fab.configure(hosts, package=str(wheels or self._wheels), start_deadline_s=60, **(of_all or {}))

    def broker(self, host: SshHost, **others: Any) -> dict[str, Any]:
        """Its settings; that of metrics is left to the default."""
        addresses = self.ports[host.name].settings("listen", "remoting_listen", "registry_listen")
        return {"data": str(host.home / "data"), "broker_name": host.name, "segment_bytes": SMALL, **addresses, **others}

    def untouched(self) -> bool:
        """Return whether no host has a ``metaq`` folder."""
        return not any((host.home / "metaq").exists() for host in self.hosts)

    def status(self) -> dict[str, list[str]]:
        """The words of ``fab status`` by host; each has one service."""
        return {line.split()[0]: line.split() for line in self.fab.run_any("status").output.splitlines()}

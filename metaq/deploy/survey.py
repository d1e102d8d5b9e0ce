"""The checks before a deployment: every host is looked at before any host is changed."""

import contextlib
import json
import sys
import sysconfig
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, Self

from metaq.deploy.cluster import COMMANDS, Cluster, Host, Kind, Service, installed
from metaq.deploy.machine import Machine
from metaq.deploy.processes import Processes, Systemd, processes_of
from metaq.deploy.releases import Releases
from metaq.deploy.wheels import Release
from metaq.errors import ConfigError, DeployFailed

LEAST_PYTHON: Final = [3, 11]
MIB: Final = 1024**2
ENVIRONMENT_BYTES: Final = 40 * MIB
"""Room for a release beside the files of its wheels: bytecode, scripts."""


class Node(NamedTuple):
    """A machine, and the facts that a look at it has found."""

    machine: Machine
    facts: Mapping[str, Any]
    processes: Processes
    releases: Releases
    services: tuple[Service, ...]
    """The services that it is to run."""

    @property
    def host(self) -> Host:
        return self.machine.host

    @property
    def current(self) -> str:
        """The release that is started there next; empty before the first."""
        return str(self.facts["current"])

    @property
    def previous(self) -> str:
        """The release that a rollback goes to; empty without one."""
        return str(self.facts["previous"])

    def runs(self, kind: Kind) -> str:
        """Return the release from which a service's process was started; empty without a process."""
        return self.releases.of(self.processes.look(kind).pid) if self.current else ""

    def of_release(self, name: str) -> "Node":
        """Return the node with the services of a release, whatever the file has by now.

        ``DeployFailed`` when the release has none there.
        """
        services = tuple(service for kind in COMMANDS if (service := self.installed(name, kind)))
        if not services:
            raise self.machine.fail(f"{name} has no service there; deploy first")
        return self._replace(services=services)

    def present(self, kind: Kind) -> Service | None:
        """Return a service as its process was started; without a process, as the current release has it.

        ``None`` for a service that is in neither.
        """
        return self.installed(self.runs(kind) or self.current, kind)

    def installed(self, name: str, kind: Kind) -> Service | None:
        """Return a service as a release has it; ``None`` when the release lacks it.

        It is asked as today's admin, whose name may have changed; without one as the release's.
        """
        text = self.facts["configurations"].get(name, {}).get(kind, "")
        if not text:
            return None
        try:
            return installed(self.host.name, kind, text, self.host.services[0].admin or self.about(name)["admin"])
        except ConfigError as error:
            raise self.machine.fail(f"the {kind} of {name}: {error}") from error

    def about(self, name: str) -> dict[str, Any]:
        """Return what was recorded when a release was installed: ``format``, ``admin``, and ``features`` by fab of today."""
        about: dict[str, Any] = json.loads(self.facts["complete"][name])
        return about

    @classmethod
    def look(cls, machine: Machine) -> Self:
        """Ask a machine; ``DeployFailed`` when it cannot be reached, or cannot do what its settings require."""
        host = machine.host
        data = [str(service.settings.data) for service in host.services]
        addresses = [(name, port) for service in host.services for _, name, port in service.addresses()]
        facts = machine.probe({"folder": machine.folder, "data": data, "addresses": addresses, "user": host.settings.user})
        return cls(machine, facts, processes_of(machine, facts), Releases(machine), host.services)


@contextlib.contextmanager
def surveyed(hosts: Sequence[Host]) -> Iterator[list[Node]]:
    """Reach all hosts; ``DeployFailed`` names all that cannot be reached, and why."""
    with contextlib.ExitStack() as stack:
        nodes, problems = [], []
        for host in hosts:
            try:
                machine = Machine(host)
                stack.callback(machine.close)
                nodes.append(Node.look(machine))
            except DeployFailed as error:
                problems.append(str(error))
        refuse(problems)
        yield nodes


def refuse(problems: Sequence[str]) -> None:
    """Raise ``DeployFailed`` with all problems, if there are any."""
    if problems:
        raise DeployFailed("\n".join((*problems, "nothing was changed on any host")))


def problems_of(cluster: Cluster, nodes: Sequence[Node], release: Release) -> list[str]:
    """Return every reason not to begin, each with its host."""
    problems = []
    for node in nodes:
        found = [*_of_python(node), *_of_user(node), *_of_room(node, release), *_of_ports(node)]
        problems += [f"{node.host.name}: {problem}" for problem in found]
    return [*problems, *_of_units(nodes), *problems_of_formats(nodes, release.format, release.features)]


def problems_of_formats(nodes: Sequence[Node], ours: int, known: Collection[str] | None) -> list[str]:
    """Return the data folders with another format than a release reads, or a feature that it does not, each with its host.

    ``known``: the features that it reads; ``None``: these are not recorded.
    """
    problems = []
    for where, identity in _identities(nodes):
        theirs, unknown = identity["format"], set(identity.get("features", ())).difference(known or ())
        if theirs != ours:
            problems.append(f"{where} has format {theirs}, and this release reads {ours}; run one that reads {theirs}")
        elif known is not None and unknown:
            problems.append(f"{where} has the feature {min(unknown)}, which this release does not read; run one that does")
    return problems


def warn_of_features(nodes: Sequence[Node], name: str, say: Callable[[str], None]) -> None:
    """Name the data folders with features of which it is not recorded whether a release reads them."""
    if "features" not in nodes[0].about(name):
        for where, identity in _identities(nodes):
            if features := identity.get("features"):
                reason = f"whether {name} reads these is not recorded: it may refuse the folder"
                say(f"{where} has {', '.join(features)}; {reason}")


def _identities(nodes: Sequence[Node]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield host and path of each data folder that a broker has written, and what its ``store.json`` says."""
    for node in nodes:
        for service in node.services:
            if text := node.facts["formats"][str(service.settings.data)]:
                yield f"{node.host.name}: {service.settings.data}", json.loads(text)


def _of_units(nodes: Sequence[Node]) -> Iterator[str]:
    """Yield a problem for each host with a service whose unit is that of another host, on the same machine."""
    seen: dict[tuple[str, int, Kind], str] = {}
    for node in nodes:
        name, settings = node.host.name, node.host.settings
        for service in node.services if isinstance(node.processes, Systemd) else ():
            first = seen.setdefault((settings.address, settings.ssh_port, service.kind), name)
            if first != name:
                reason = f"systemd of that machine runs the {service.kind} of {first} as metaq-{service.kind}"
                yield f"{name}: {reason}; set processes to supervisor"


def _of_python(node: Node) -> Iterator[str]:
    theirs, platform = node.facts["python"], node.facts["platform"]
    name, ours = node.host.settings.python, list(sys.version_info[:2])
    if theirs < LEAST_PYTHON:
        yield f"{name} is {_dotted(theirs)}, and metaq needs {_dotted(LEAST_PYTHON)} or newer; install one, and set python"
    elif (theirs, platform) != (ours, sysconfig.get_platform()):
        yield (
            f"{name} is {_dotted(theirs)} for {platform}, and the wheels made here are for {_dotted(ours)} and "
            f"{sysconfig.get_platform()}; deploy from a machine like it, or set python to a {_dotted(ours)}"
        )


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))


def _of_user(node: Node) -> Iterator[str]:
    if node.facts["user_problem"]:
        yield node.facts["user_problem"]
    elif node.host.settings.user and not node.facts["root"]:
        yield f"only root can run services as {node.host.settings.user}; set ssh_user to root, or no user"


def _of_room(node: Node, release: Release) -> Iterator[str]:
    """Yield a problem for each disk with too little room.

    A release needs its wheels twice packed and once unpacked; a new data folder two segments of the log.
    """
    needed: dict[int, int] = {}
    home = node.facts["home"]
    if release.name not in node.facts["releases"]:
        needed[home["device"]] = 2 * release.size() + release.unpacked() + ENVIRONMENT_BYTES
    for service, data in zip(node.services, node.facts["data"], strict=True):
        if data["empty"] and service.kind == "broker":
            room = 2 * service.settings.segment_bytes + service.settings.least_free_bytes
            needed[data["device"]] = needed.get(data["device"], 0) + room
    seen = set()
    for folder in (home, *node.facts["data"]):
        if folder["problem"]:
            yield folder["problem"]
        elif folder["free"] < needed.get(folder["device"], 0) and folder["device"] not in seen:
            seen.add(folder["device"])
            need = needed[folder["device"]]
            yield f"disk full: {folder['path']} has {folder['free'] // MIB} MiB free, and {need // MIB} MiB are needed"


def _of_ports(node: Node) -> Iterator[str]:
    own: set[int] = set()
    for kind in COMMANDS:  # also one that the file no longer has: it is stopped before another service starts
        if node.runs(kind) and (present := node.present(kind)):
            own |= {port for _, _, port in present.addresses()}
    reasons = {(host, port): reason for host, port, reason in node.facts["taken"] if reason and port not in own}
    for service in node.services:
        for name, host, port in service.addresses():
            if (host, port) in reasons:
                yield f"{service.kind}.{name}: cannot listen on {host}:{port}: {reasons[host, port]}"

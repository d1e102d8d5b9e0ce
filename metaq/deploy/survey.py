"""Whether a deployment can be done: everything is looked at on every host before anything is changed on any."""

import contextlib
import json
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, Self

from metaq.deploy.cluster import FAST_PORT_BELOW, Cluster, Host, Service
from metaq.deploy.machine import Machine
from metaq.deploy.processes import RUNNING, STARTING, Processes, processes_of
from metaq.deploy.releases import Releases
from metaq.deploy.wheels import Release
from metaq.errors import DeployFailed
from metaq.store.recovery import FORMAT_VERSION

LEAST_PYTHON: Final = [3, 11]
MIB: Final = 1024**2
ENVIRONMENT_BYTES: Final = 40 * MIB
"""Of a release, beside what its wheels hold: bytecode, scripts."""


class Node(NamedTuple):
    """A machine, and what a look at it has shown."""

    machine: Machine
    facts: Mapping[str, Any]
    processes: Processes
    releases: Releases

    @property
    def host(self) -> Host:
        return self.machine.host

    @property
    def current(self) -> str:
        """The release that runs there, or would; empty before the first."""
        return str(self.facts["current"])

    def runs(self, service: Service) -> bool:
        """Whether its process is there, serving or not yet."""
        return bool(self.current) and self.processes.state(service.kind) in (RUNNING, STARTING)

    def present(self, kind: str) -> dict[str, Any]:
        """The settings that a service was deployed with."""
        lines = self.facts["configuration"][kind].splitlines()
        return {name: json.loads(value) for name, _, value in (line.partition(": ") for line in lines)}

    @classmethod
    def look(cls, machine: Machine) -> Self:
        """Ask a machine; ``DeployFailed`` when it cannot be reached, or cannot do what its settings say."""
        host = machine.host
        data = [str(service.settings.data) for service in host.services]
        addresses = [(name, port) for service in host.services for _, name, port in service.addresses()]
        facts = machine.probe({"folder": machine.folder, "data": data, "addresses": addresses, "user": host.settings.user})
        return cls(machine, facts, processes_of(machine, facts), Releases(machine))


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
    """``DeployFailed`` with all of them, when there is any."""
    if problems:
        raise DeployFailed("\n".join((*problems, "nothing was changed on any host")))


def problems_of(cluster: Cluster, nodes: Sequence[Node], release: Release) -> list[str]:
    """Every reason not to begin, with its host."""
    problems = []
    for node in nodes:
        found = [*_of_python(node), *_of_user(node), *_of_room(node, release), *_of_ports(node), *_of_formats(node)]
        problems += [f"{node.host.name}: {problem}" for problem in found]
    return problems


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
    """A release needs its wheels twice, packed and not; a new data folder two segments of the log."""
    needed: dict[int, int] = {}
    home = node.facts["home"]
    if release.name not in node.facts["releases"]:
        needed[home["device"]] = 2 * release.size() + release.unpacked() + ENVIRONMENT_BYTES
    for service, data in zip(node.host.services, node.facts["data"], strict=True):
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
    for service in node.host.services:
        if node.runs(service):
            texts = [str(value).rpartition(":")[2] for value in node.present(service.kind).values()]
            ports = {int(text) for text in texts if text.isdecimal()}
            own |= ports | {port - FAST_PORT_BELOW for port in ports}
    reasons = {(host, port): reason for host, port, reason in node.facts["taken"] if reason and port not in own}
    for service in node.host.services:
        for name, host, port in service.addresses():
            if (host, port) in reasons:
                yield f"{service.kind}.{name}: cannot listen on {host}:{port}: {reasons[host, port]}"


def _of_formats(node: Node) -> Iterator[str]:
    for service, text in zip(node.host.services, node.facts["formats"], strict=True):
        theirs = json.loads(text)["format"] if text else FORMAT_VERSION
        if theirs > FORMAT_VERSION:
            yield f"{service.settings.data} has format {theirs}, and this metaq reads {FORMAT_VERSION}; deploy a newer one"

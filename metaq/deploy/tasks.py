"""The tasks of ``fabfile.py``; each raises ``DeployFailed`` or ``ConfigError`` with the host and the reason."""

import contextlib
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from metaq.deploy.cluster import COMMANDS, Cluster, Host, Kind
from metaq.deploy.health import look
from metaq.deploy.machine import Machine
from metaq.deploy.processes import RUNNING, STARTING, Systemd
from metaq.deploy.rolling import Roll, Say
from metaq.deploy.survey import Node, problems_of, problems_of_formats, refuse, surveyed, warn_of_features
from metaq.deploy.wheels import Release, build
from metaq.errors import DeployFailed

COLUMNS: Final = "{:<12} {:<9} {:<9} {:<24} {:<7} {:<6} {}"
MIB: Final = 1024**2


def deploy(cluster: Cluster, say: Say, *, dry_run: bool = False) -> None:
    """Install a release on all hosts, then start or restart each service that runs another one, one at a time."""
    with tempfile.TemporaryDirectory(prefix="metaq-release-") as folder, surveyed(cluster.hosts) as nodes:
        release = build(cluster, Path(folder))
        roll = Roll(nodes, cluster.settings.start_deadline_s, say)
        refuse([*problems_of(cluster, nodes, release), *roll.obstacles(), *roll.unwhole()])
        if dry_run:
            for line in plan(nodes, release):
                say(line)
            say("nothing was changed on any host")
            return
        for node in nodes:
            if release.name not in node.facts["releases"]:
                say(f"{node.host.name}: install {release.name}")
                node.releases.install(release, cluster.settings.admin, supervisor=not isinstance(node.processes, Systemd))
            node.releases.mark_newest(release, cluster.settings.admin)
        previous = _remember(nodes, release.name)
        _go_over(roll, nodes, release.name)
        for node in nodes:
            known = [*node.facts["releases"], release.name]
            used = {release.name, previous or node.previous, *(node.runs(kind) for kind in COMMANDS)} & set(known)
            for name in node.releases.prune(known, used, cluster.settings.keep_releases):
                say(f"{node.host.name}: deleted {name}")
        say(f"{release.name} runs on {len(nodes)} hosts")


def rollback(cluster: Cluster, say: Say, *, to: str = "") -> None:
    """Go back to the release that ran everywhere before this one, or to ``to``, with the configuration of that release."""
    with surveyed(cluster.hosts) as nodes:
        kept = [name for name in nodes[0].facts["releases"] if all(name in node.facts["releases"] for node in nodes)]
        before = {node.previous for node in nodes if node.previous}  # a host that was new in this release has none
        name = to or (before.pop() if len(before) == 1 else "")
        if name not in kept:
            lacking = ", ".join(node.host.name for node in nodes if name not in node.facts["releases"])
            which = f"{name}; it is not on {lacking}" if name else "before this one"
            raise DeployFailed(f"not all hosts have the release {which}; all have: {', '.join(kept) or 'none'}")
        nodes[:] = [node.of_release(name) for node in nodes]
        roll = Roll(nodes, cluster.settings.start_deadline_s, say)
        about = nodes[0].about(name)
        refuse([*problems_of_formats(nodes, about["format"], about.get("features")), *roll.obstacles()])
        warn_of_features(nodes, name, say)
        if to:
            _remember(nodes, name)
        _go_over(roll, nodes, name)
        if not to:
            for node in nodes:
                node.releases.forget()
        say(f"{name} runs on {len(nodes)} hosts")


def _remember(nodes: Sequence[Node], name: str) -> str:
    """Record the release that runs everywhere, if it is not ``name``, as the one to roll back to. Return it, or an empty name.

    While hosts differ, a deployment is unfinished: the release from before that one stays the one to go back to. A host that
    has had none yet is new, and has no say.
    """
    old = [node for node in nodes if node.current]
    runs = {node.runs(service.kind) or node.current for node in old for service in node.services}
    runs |= {node.current for node in old}
    if len(runs) != 1 or runs == {name}:
        return ""
    (before,) = runs
    for node in old:
        node.releases.remember(before)
    return before


def _go_over(roll: Roll, nodes: Sequence[Node], name: str) -> None:
    """Make all services run one release."""

    def change(node: Node) -> None:
        node.releases.make_data_folders(node.services)
        node.releases.switch(name)
        node.processes.install(node.services)

    started = roll.start(change)
    rest = [(node, service) for node in nodes for service in node.services if service not in started]
    roll.restart(change, [service for node, service in rest if node.runs(service.kind) != name])
    for node in nodes:  # also where all services ran this release already
        change(node)


def plan(nodes: Sequence[Node], release: Release) -> list[str]:
    """Return what a deployment would do, host by host."""
    lines = []
    for node in nodes:
        name, manager = node.host.name, type(node.processes).__name__.lower()
        if release.name in node.facts["releases"]:
            lines.append(f"{name}: has {release.name} already")
        else:
            lines.append(f"{name}: upload {release.size() // MIB} MiB, install {release.name} in {node.machine.folder}")
        if node.current != release.name:
            lines.append(f"{name}: switch from {node.current or 'nothing'} to {release.name}; {manager} runs it")
        for service in node.services:
            runs = node.runs(service.kind)
            if not runs:
                lines.append(f"{name}: start {service.kind}, data in {service.settings.data}")
            elif runs != release.name:
                lines.append(f"{name}: restart {service.kind}, which is of {runs}, one at a time, slaves first")
    return lines


def upgrade_check(cluster: Cluster, say: Say) -> None:
    """Print what a deployment would change. ``DeployFailed`` with everything that prevents one now."""
    with tempfile.TemporaryDirectory(prefix="metaq-release-") as folder, surveyed(cluster.hosts) as nodes:
        release = build(cluster, Path(folder))
        for node in nodes:
            say(f"{node.host.name}: from {node.current or 'nothing'} to {release.name}")
            for service in node.services:
                present, given = node.present(service.kind), service.given
                for key in sorted({*present.given, *given}) if present else ():
                    if present and present.given.get(key) != given.get(key):
                        say(f"{node.host.name}: {service.kind}.{key}: from {present.given.get(key)} to {given.get(key)}")
        roll = Roll(nodes, cluster.settings.start_deadline_s, say)
        refuse([*problems_of(cluster, nodes, release), *roll.obstacles(), *roll.unwhole()])
        say("ready to deploy")


def start(cluster: Cluster, say: Say, hosts: Sequence[Host]) -> None:
    """Start services that do not run, and wait until they serve."""
    with surveyed(hosts) as nodes:
        complete = len(hosts) == len(cluster.hosts)
        Roll(_as_deployed(nodes), cluster.settings.start_deadline_s, say, complete=complete).start(lambda node: None)


def stop(cluster: Cluster, say: Say, hosts: Sequence[Host]) -> None:
    """Stop services that run: slaves, then masters, then registries."""
    with surveyed(hosts) as nodes:
        Roll(_as_deployed(nodes), cluster.settings.start_deadline_s, say).stop()


def restart(cluster: Cluster, say: Say) -> None:
    """Restart everything, one at a time; where masters are elected, clients see no outage."""
    with surveyed(cluster.hosts) as found:
        nodes = _as_deployed(found)
        roll = Roll(nodes, cluster.settings.start_deadline_s, say)
        refuse([*roll.obstacles(), *roll.unwhole()])
        started = roll.start(lambda node: None)
        rest = [service for node in nodes for service in node.services if service not in started]
        roll.restart(lambda node: None, rest)


def _as_deployed(nodes: Sequence[Node]) -> list[Node]:
    """Return the nodes with the services of their current release, even if the file has changed since.

    ``DeployFailed`` for a host without a release.
    """
    refuse([f"{node.host.name}: has no release; deploy one first" for node in nodes if not node.current])
    return [node.of_release(node.current) for node in nodes]


def status(cluster: Cluster, say: Say, hosts: Sequence[Host]) -> bool:
    """Print a line for each service of the file, and of what is deployed. Return whether all is well."""
    say(COLUMNS.format("host", "service", "process", "release", "role", "epoch", "health"))
    well, nodes = True, []
    with contextlib.ExitStack() as stack:
        for host in hosts:
            try:
                machine = Machine(host)
                stack.callback(machine.close)
                nodes.append(Node.look(machine))
                for kind in COMMANDS:
                    well &= _status_of(nodes[-1], kind, say)
            except DeployFailed as error:
                well = False
                say(COLUMNS.format(host.name, "-", "unknown", "-", "-", "-", str(error).partition(": ")[2]))
        if well and len(hosts) == len(cluster.hosts):
            problems = Roll(_as_deployed(nodes), 0, say).unwhole()
            for problem in problems:
                say(problem)
            well = not problems
    return well


def _status_of(node: Node, kind: Kind, say: Say) -> bool:
    """Print the line of one service, if the file or what is deployed has it. Return whether it is well, or not there at all."""
    present = node.present(kind)
    if present is None:
        wanted = any(service.kind == kind for service in node.services)
        if wanted:
            say(COLUMNS.format(node.host.name, kind, "absent", "none", "-", "-", "not deployed"))
        return not wanted
    process, found = node.processes.look(kind), look(node.machine, present)
    state, health = process.state, found.problem or "serves"
    if found.answers and state == STARTING:
        state = RUNNING
    if found.answers and state != RUNNING:
        health = "answers, but its service manager does not know it"
    release = node.releases.of(process.pid) or node.current
    if release != node.current:
        health += f"; {node.current} is current: deploy again, or restart it"
    epoch = found.stats.get("epoch", "-")
    say(COLUMNS.format(node.host.name, kind, state, release, found.role or "-", epoch, health))
    return found.answers and state == RUNNING and release == node.current


def logs(say: Say, hosts: Sequence[Host], lines: int) -> None:
    """Print the ends of the services' logs."""
    with surveyed(hosts) as nodes:
        for node in _as_deployed(nodes):
            for service in node.services:
                for line in node.processes.log(service.kind, lines).splitlines():
                    say(f"{node.host.name} {service.kind}: {line}")

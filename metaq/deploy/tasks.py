"""What ``fabfile.py`` offers. Each raises ``DeployFailed`` or ``ConfigError`` with the host and the reason."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from metaq.deploy.cluster import Cluster, Host
from metaq.deploy.health import look
from metaq.deploy.machine import Machine
from metaq.deploy.processes import RUNNING, Systemd
from metaq.deploy.rolling import Roll, Say
from metaq.deploy.survey import Node, problems_of, refuse, surveyed
from metaq.deploy.wheels import Release, build
from metaq.errors import DeployFailed

COLUMNS: Final = "{:<12} {:<9} {:<9} {:<24} {:<7} {:<6} {}"
MIB: Final = 1024**2


def deploy(cluster: Cluster, say: Say, *, dry_run: bool = False) -> None:
    """Install a release on all hosts, then start or restart what is there, one at a time."""
    with tempfile.TemporaryDirectory(prefix="metaq-release-") as folder, surveyed(cluster.hosts) as nodes:
        release = build(cluster, Path(folder))
        roll = Roll(nodes, cluster.settings.start_deadline_s, say)
        refuse([*problems_of(cluster, nodes, release), *roll.problems()])
        if dry_run:
            for line in plan(nodes, release):
                say(line)
            say("nothing was changed on any host")
            return
        for node in nodes:
            if release.name not in node.facts["releases"]:
                say(f"{node.host.name}: install {release.name}")
                node.releases.install(release, supervisor=not isinstance(node.processes, Systemd))
            node.releases.mark_newest(release.name)
        _go_over(roll, nodes, release.name)
        for node in nodes:
            for name in node.releases.prune(node.facts, release.name, cluster.settings.keep_releases):
                say(f"{node.host.name}: deleted {name}")
        say(f"{release.name} runs on {len(nodes)} hosts")


def rollback(cluster: Cluster, say: Say, *, to: str = "") -> None:
    """Go back to the release before the newest, or to a named one, with the configuration that it had."""
    with surveyed(cluster.hosts) as nodes:
        known = [node.facts["releases"] for node in nodes]
        kept = [name for name in known[0] if all(name in names for names in known)]
        name = to or (kept[-2] if len(kept) > 1 else "")
        if not name or name not in kept:
            raise DeployFailed(f"no release {to or 'before the newest'} on all hosts; there are: {', '.join(kept) or 'none'}")
        roll = Roll(nodes, cluster.settings.start_deadline_s, say)
        _go_over(roll, nodes, name)
        say(f"{name} runs on {len(nodes)} hosts")


def _go_over(roll: Roll, nodes: Sequence[Node], name: str) -> None:
    """Have everything run one release."""

    def change(node: Node) -> None:
        node.releases.switch(name)
        node.processes.install(node.host.services)

    started = roll.start(change, mend=True)
    old = [service for node in nodes if node.current != name for service in node.host.services if service not in started]
    roll.restart(change, old)


def plan(nodes: Sequence[Node], release: Release) -> list[str]:
    """What a deployment would do, host by host."""
    lines = []
    for node in nodes:
        name, manager = node.host.name, type(node.processes).__name__.lower()
        if release.name in node.facts["releases"]:
            lines.append(f"{name}: has {release.name} already")
        else:
            lines.append(f"{name}: upload {release.size() // MIB} MiB, install {release.name} in {node.machine.folder}")
        if node.current != release.name:
            lines.append(f"{name}: switch from {node.current or 'nothing'} to {release.name}; {manager} runs it")
        for service in node.host.services:
            if not node.runs(service):
                lines.append(f"{name}: start {service.kind}, data in {service.settings.data}")
            elif node.current != release.name:
                lines.append(f"{name}: restart {service.kind}, one at a time, slaves first")
    return lines


def upgrade_check(cluster: Cluster, say: Say) -> None:
    """Whether a deployment could begin now, and what it would change; ``DeployFailed`` with all that is in the way."""
    with tempfile.TemporaryDirectory(prefix="metaq-release-") as folder, surveyed(cluster.hosts) as nodes:
        release = build(cluster, Path(folder))
        for node in nodes:
            say(f"{node.host.name}: from {node.current or 'nothing'} to {release.name}")
            for service in node.host.services:
                present, given = node.present(service.kind), service.given
                for key in sorted({*present, *given}):
                    if present and present.get(key) != given.get(key):
                        say(f"{node.host.name}: {service.kind}.{key}: from {present.get(key)} to {given.get(key)}")
        roll = Roll(nodes, cluster.settings.start_deadline_s, say)
        refuse([*problems_of(cluster, nodes, release), *roll.problems()])
        say("ready to deploy")


def start(cluster: Cluster, say: Say, hosts: Sequence[Host]) -> None:
    """Start what does not run, and wait until it serves."""
    with surveyed(hosts) as nodes:
        _need_release(nodes)
        complete = len(hosts) == len(cluster.hosts)
        Roll(nodes, cluster.settings.start_deadline_s, say, complete=complete).start(lambda node: None)


def stop(cluster: Cluster, say: Say, hosts: Sequence[Host]) -> None:
    """Stop what runs, in order."""
    with surveyed(hosts) as nodes:
        _need_release(nodes)
        Roll(nodes, cluster.settings.start_deadline_s, say).stop()


def restart(cluster: Cluster, say: Say) -> None:
    """Restart everything, one at a time; clients notice nothing where masters are elected."""
    with surveyed(cluster.hosts) as nodes:
        _need_release(nodes)
        roll = Roll(nodes, cluster.settings.start_deadline_s, say)
        refuse(roll.problems())
        started = roll.start(lambda node: None, mend=True)
        rest = [service for node in nodes for service in node.host.services if service not in started]
        roll.restart(lambda node: None, rest)


def _need_release(nodes: Sequence[Node]) -> None:
    refuse([f"{node.host.name}: has no release; deploy one first" for node in nodes if not node.current])


def status(cluster: Cluster, say: Say, hosts: Sequence[Host]) -> bool:
    """Print a line for each service; whether all is well."""
    say(COLUMNS.format("host", "service", "process", "release", "role", "epoch", "health"))
    well, nodes = True, []
    for host in hosts:
        try:
            machine = Machine(host)
            node = Node.look(machine)
            nodes.append(node)
            for service in host.services:
                state = node.processes.state(service.kind) if node.current else "absent"
                found = look(machine, service) if node.current else None
                state = RUNNING if found and found.answers else state
                health = "not deployed" if found is None else (found.problem or "serves")
                role, epoch = (found.role, found.stats.get("epoch", "")) if found else ("", "")
                well = well and found is not None and found.answers
                say(COLUMNS.format(host.name, service.kind, state, node.current or "none", role or "-", epoch or "-", health))
        except DeployFailed as error:
            well = False
            say(COLUMNS.format(host.name, "-", "unknown", "-", "-", "-", str(error).partition(": ")[2]))
    if well and len(hosts) == len(cluster.hosts):
        problems = Roll(nodes, 0, say).problems()
        for problem in problems:
            say(problem)
        well = not problems
    for node in nodes:
        node.machine.close()
    return well


def logs(say: Say, hosts: Sequence[Host], lines: int) -> None:
    """Print the ends of what the services have written."""
    with surveyed(hosts) as nodes:
        _need_release(nodes)
        for node in nodes:
            for service in node.host.services:
                for line in node.processes.log(service.kind, lines).splitlines():
                    say(f"{node.host.name} {service.kind}: {line}")

"""Rolling starts, stops and restarts of services: one at a time, so that replicas keep serving clients during a restart."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from metaq.address import parse_address
from metaq.deploy.cluster import COMMANDS, Service
from metaq.deploy.health import LOOK_S, ReplicaGroup, groups_of, look
from metaq.deploy.processes import DOWN, FAILED, RUNNING, STOPPED
from metaq.deploy.survey import Node
from metaq.errors import DeployFailed

LOG_LINES: Final = 5

Say = Callable[[str], None]
Change = Callable[[Node], None]
"""A change on a machine before one of its services is started or restarted; it may be made twice."""


class Roll:
    """The services of some machines in their order: registries first, then groups of replicas, in each the slaves first.

    A service is asked by the settings that its process was started with, until the roll starts it with its new ones.
    """

    def __init__(self, nodes: Sequence[Node], deadline_s: float, say: Say, *, complete: bool = True) -> None:
        """Take the services of ``nodes``. ``complete``: these are all hosts, so that groups of replicas can be whole."""
        self._complete = complete
        self._nodes = {service: node for node in nodes for service in node.services}
        self._present = {service: node.present(service.kind) or service for service, node in self._nodes.items()}
        self._deadline_s = deadline_s
        self._say = say
        brokers = [(service, node.machine) for service, node in self._nodes.items() if service.kind == "broker"]
        self.groups = groups_of(brokers, self._present)
        self.registries = [service for service in self._nodes if service.kind == "registry"]

    def obstacles(self) -> list[str]:
        """Return what prevents a roll.

        These are services that run and do not answer, and groups where a service would change between having users and not.
        """
        down, problems = self._find_down()
        for group in self.groups:
            running = [service for service in group.members if service not in down]
            if len(group.members) > 1 and any(
                self._has_users(service) != bool(service.settings.users_file) for service in running
            ):
                problems.append(
                    f"{running[0].host}: replicas with users and without do not follow one another: stop all of "
                    f"{running[0].settings.broker_name} (fab stop), then go on"
                )
        return problems

    def unwhole(self) -> list[str]:
        """Return the problems of groups whose members all answer but are not all in sync: no member of these may be stopped."""
        looks = [(group, group.looks()) for group in self.groups]
        serving = [(group, found) for group, found in looks if all(look.answers for look in found.values())]
        return [problem for group, found in serving if (problem := group.problem(found))]

    def start(self, change: Change) -> set[Service]:
        """Start services that do not run, one at a time, and return them.

        It returns when they serve and, in a complete roll, their groups are whole. ``DeployFailed`` for a service that runs and
        does not answer: stopping it is left to a person who knows why.
        """
        down, problems = self._find_down()
        if problems:
            raise DeployFailed("\n".join(problems))
        changed: set[str] = set()
        for service in down:
            node = self._nodes[service]
            if node.host.name not in changed:  # else a supervisord may have started this one, too: it is left running
                changed.add(node.host.name)
                for other in down:
                    if self._nodes[other] is node:
                        node.processes.stop(other.kind)  # one in a restart loop has its next try with the change
                change(node)
            self._say(f"{node.host.name}: start {service.kind}")
            self._start_one(service)
        for group in self.groups:
            if self._complete and any(service in down for service in group.members):
                group.wait_whole(self._deadline_s)
        return set(down)

    def restart(self, change: Change, services: Iterable[Service]) -> None:
        """Restart services, one at a time. ``DeployFailed`` at the first that does not come back; it names the rest."""
        pending = [service for service in self._ordered() if service in set(services)]
        try:
            for service in [service for service in pending if service.kind == "registry"]:
                self._restart_one(service, change)
                pending.remove(service)
            for group in self.groups:
                self._restart_group(group, change, pending)
        except DeployFailed as error:
            rest = ", ".join(map(str, pending))
            raise DeployFailed(f"{error}\nstopped here; still to do: {rest}") from error

    def stop(self) -> None:
        """Stop slaves, then masters, then registries, so that no needless election takes place."""
        for group in self.groups:
            looks = group.looks()
            for service in sorted(group.members, key=lambda service: looks[service].role == "master"):
                self._stop_one(service)
        for service in self.registries:
            self._stop_one(service)

    def _has_users(self, service: Service) -> bool:
        return bool(self._present[service].settings.users_file)

    def _find_down(self) -> tuple[list[Service], list[str]]:
        """Return the services that do not run, in starting order, and the reasons why some cannot be judged."""
        down, problems = [], []
        for service in self._ordered():
            try:
                if self._is_down(service):
                    down.append(service)
            except DeployFailed as error:
                problems.append(str(error))
        return down, problems

    def _is_down(self, service: Service) -> bool:
        """Return whether the process manager says that it does not run, after waiting for one that starts.

        ``DeployFailed`` when its port contradicts the manager.
        """
        node, kind, end = self._nodes[service], service.kind, time.monotonic() + self._deadline_s
        if not node.current:
            return True
        while True:
            before = node.processes.look(kind).state
            found = look(node.machine, self._present[service])
            settled = before == node.processes.look(kind).state  # else its state changed during the question
            if settled and before in DOWN:
                if found.answers and (other := self._in_place_of(service)):
                    reason = f"the {other} that runs answers at the address of the {kind}, which does not run"
                    raise node.machine.fail(f"{reason}: `fab stop --on {node.host.name}`, then this task again")
                if found.answers:
                    reason = f"{kind} answers, but its service manager says that it has {before}"
                    raise node.machine.fail(f"{reason}: end that process, then `fab start --on {node.host.name}`")
                return True
            if found.answers:
                return False
            if (settled and before == RUNNING) or time.monotonic() > end:
                reason = f"{kind} is {before} and does not answer: {found.problem}"
                raise node.machine.fail(f"{reason}; `fab logs` may say why. `fab stop --on {node.host.name}` stops it")
            time.sleep(LOOK_S)

    def _in_place_of(self, service: Service) -> str:
        """Return the kind of the other service of its machine that runs and has its port; empty when there is none."""
        node, port = self._nodes[service], parse_address(self._present[service].asked_at).port
        for kind in COMMANDS:
            if kind != service.kind and node.processes.look(kind).state not in DOWN:
                other = node.present(kind)
                if other is not None and port in {taken for _, _, taken in other.addresses()}:
                    return kind
        return ""

    def _ordered(self) -> list[Service]:
        return [*self.registries, *(service for group in self.groups for service in group.members)]

    def _restart_group(self, group: ReplicaGroup, change: Change, pending: list[Service]) -> None:
        while own := [service for service in group.members if service in pending]:
            master = group.master(group.wait_whole(self._deadline_s))
            slaves = [service for service in own if service is not master]
            if not slaves and group.is_elected and master is not None:
                self._say(f"{master.host}: hand over {master.settings.broker_name}")
                now = group.hand_over(master, self._deadline_s)
                self._say(f"{now.host}: is master now")
                continue
            self._restart_one((slaves or own)[0], change)
            group.wait_whole(self._deadline_s)
            pending.remove((slaves or own)[0])

    def _restart_one(self, service: Service, change: Change) -> None:
        node = self._nodes[service]
        self._say(f"{node.host.name}: restart {service.kind}")
        change(node)
        node.processes.stop(service.kind)
        self._start_one(service)

    def _stop_one(self, service: Service) -> None:
        node = self._nodes[service]
        if node.processes.look(service.kind).state not in (STOPPED, FAILED):
            self._say(f"{node.host.name}: stop {service.kind}")
            node.processes.stop(service.kind)

    def _start_one(self, service: Service) -> None:
        """Start a service and wait until it serves. ``DeployFailed`` with the end of its log when it does not in time."""
        node, end = self._nodes[service], time.monotonic() + self._deadline_s
        self._present[service] = service
        node.processes.start(service.kind)
        while not (found := look(node.machine, service)).answers:
            failed = node.processes.look(service.kind).state == FAILED
            if failed or time.monotonic() > end:
                reason = "does not start" if failed else f"does not serve after {self._deadline_s:.0f} s: {found.problem}"
                said = node.processes.log(service.kind, LOG_LINES).strip()
                raise node.machine.fail(f"{service.kind} {reason}; the end of its log:\n{said}")
            time.sleep(LOOK_S)
        self._say(f"{node.host.name}: {service.kind} serves")

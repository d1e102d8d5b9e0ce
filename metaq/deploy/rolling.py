"""One service at a time: started, stopped, or restarted behind the back of clients."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from metaq.deploy.cluster import Service
from metaq.deploy.health import LOOK_S, Group, groups_of, look
from metaq.deploy.processes import FAILED
from metaq.deploy.survey import Node
from metaq.errors import DeployFailed

LOG_LINES: Final = 5

Say = Callable[[str], None]
Change = Callable[[Node], None]
"""What is done on a machine before one of its services is started or restarted; may be done twice."""


class Roll:
    """The services of some machines: registries first, then groups of replicas, each one its slaves first."""

    def __init__(self, nodes: Sequence[Node], deadline_s: float, say: Say, *, complete: bool = True) -> None:
        """``complete``: these are all hosts, so that groups of replicas can be whole."""
        self._complete = complete
        self._nodes = {service: node for node in nodes for service in node.host.services}
        self._deadline_s = deadline_s
        self._say = say
        self.groups = groups_of((s, node.machine) for s, node in self._nodes.items() if s.kind == "broker")
        self.registries = [service for service in self._nodes if service.kind == "registry"]

    def problems(self) -> list[str]:
        """Groups that serve, and are not whole: no member of such a one may be stopped."""
        looks = [(group, group.looks()) for group in self.groups]
        serving = [(group, found) for group, found in looks if all(look.answers for look in found.values())]
        return [problem for group, found in serving if (problem := group.problem(found))]

    def start(self, change: Change, *, mend: bool = False) -> set[Service]:
        """Start what does not run; returns what was started, when it serves and, of a complete roll, all groups are whole.

        With ``mend`` also what runs and does not answer, after it was stopped: it may be failing again and again.
        """
        stopped = [service for service in self._ordered() if not self._serves(service, mend=mend)]
        for service in stopped:
            node = self._nodes[service]
            node.processes.stop(service.kind)
            change(node)
            self._say(f"{node.host.name}: start {service.kind}")
            node.processes.start(service.kind)
        for service in stopped:
            self._wait_serving(service)
        for group in self.groups:
            if self._complete and any(service in stopped for service in group.members):
                group.wait_whole(self._deadline_s)
        return set(stopped)

    def restart(self, change: Change, services: Iterable[Service]) -> None:
        """Restart services, one at a time; ``DeployFailed`` at the first that does not come back, and names the rest."""
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
        """Slaves, then masters, then registries: nobody is elected for nothing."""
        for group in self.groups:
            looks = group.looks()
            for service in sorted(group.members, key=lambda service: looks[service].role == "master"):
                self._stop_one(service)
        for service in self.registries:
            self._stop_one(service)

    def _serves(self, service: Service, *, mend: bool) -> bool:
        node = self._nodes[service]
        return node.runs(service) and (not mend or look(node.machine, service).answers)

    def _ordered(self) -> list[Service]:
        return [*self.registries, *(service for group in self.groups for service in group.members)]

    def _restart_group(self, group: Group, change: Change, pending: list[Service]) -> None:
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
        node.processes.start(service.kind)
        self._wait_serving(service)

    def _stop_one(self, service: Service) -> None:
        node = self._nodes[service]
        if node.runs(service):
            self._say(f"{node.host.name}: stop {service.kind}")
            node.processes.stop(service.kind)

    def _wait_serving(self, service: Service) -> None:
        node, end = self._nodes[service], time.monotonic() + self._deadline_s
        while not (found := look(node.machine, service)).answers:
            failed = node.processes.state(service.kind) == FAILED
            if failed or time.monotonic() > end:
                reason = "does not start" if failed else f"does not serve after {self._deadline_s:.0f} s: {found.problem}"
                said = node.processes.log(service.kind, LOG_LINES).strip()
                raise node.machine.fail(f"{service.kind} {reason}; the end of its log:\n{said}")
            time.sleep(LOOK_S)
        self._say(f"{node.host.name}: {service.kind} serves")

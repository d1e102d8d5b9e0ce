"""The health of services, asked on their own machines, over their own ports, by the metaq that is installed there."""

import json
import shlex
import time
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from metaq.deploy.cluster import ELECTED, Service
from metaq.deploy.machine import Machine
from metaq.errors import DeployFailed

LOOK_S: Final = 0.3
ANSWER_S: Final = 60


class Look(NamedTuple):
    """A service's answer about its state."""

    answers: bool
    problem: str
    """Why it does not answer, or does not follow its master."""
    stats: Mapping[str, Any]

    @property
    def role(self) -> str:
        """``master`` or ``slave``; empty without replicas."""
        return str(self.stats.get("role", ""))

    def holds_in_sync(self, replica: int) -> bool:
        """Return whether this master counts a slave as in sync."""
        return self.stats.get(f"slave_{replica}_in_sync") == "yes"


def metaq(machine: Machine) -> str:
    """Return the command on that machine."""
    return f"{machine.folder}/current/venv/bin/metaq"


def look(machine: Machine, service: Service) -> Look:
    """Ask a service for its state."""
    command = f"{metaq(machine)}{service.login} stats --json --broker {shlex.quote(service.asked_at)}"
    code, output, errors = machine.attempt(command, deadline_s=ANSWER_S)
    if code:
        return Look(False, errors.strip().removeprefix("metaq: ") or f"metaq stats ended with {code}", {})
    stats = json.loads(output)
    following = str(stats.get("following", "yes"))
    return Look(True, "" if following == "yes" else f"does not follow its master: {following}", stats)


class ReplicaGroup:
    """The replicas of one broker, or a broker without any."""

    def __init__(self, members: Mapping[Service, Machine], present: Mapping[Service, Service]) -> None:
        """Take the members with their machines.

        ``present`` has each member's settings as it runs now: until its restart it is asked where it listens now.
        """
        self.members = members
        self._present = present

    def looks(self) -> dict[Service, Look]:
        """Ask all members for their states."""
        return {service: look(machine, self._present[service]) for service, machine in self.members.items()}

    def master(self, looks: Mapping[Service, Look]) -> Service | None:
        """Return the member that says it is the master; ``None`` when none does, or several do."""
        masters = [service for service, found in looks.items() if found.role == "master"]
        return masters[0] if len(masters) == 1 else None

    def problem(self, looks: Mapping[Service, Look]) -> str:
        """Return the first reason why the group is not whole; empty when all members serve, and all slaves are in sync."""
        for service, found in looks.items():
            if not found.answers:
                return f"{service.host}: does not answer: {found.problem}"
        replicas = [service for service in looks if self._present[service].has_replicas]
        if not replicas:
            return ""
        masters = [service for service in replicas if looks[service].role == "master"]
        if len(masters) != 1:
            names = ", ".join(service.host for service in masters) or "none"
            return f"{replicas[0].host}: {replicas[0].settings.broker_name} has not one master: {names}"
        for service in replicas:
            number = self._present[service].settings.replica_number
            if service is not masters[0] and not looks[masters[0]].holds_in_sync(number):
                return f"{service.host}: its replica is not in sync. {looks[service].problem}".rstrip(". ")
        return ""

    def wait_whole(self, deadline_s: float) -> dict[Service, Look]:
        """Wait until the group is whole; ``DeployFailed`` with its problem when it is not in time."""
        end = time.monotonic() + deadline_s
        while problem := self.problem(looks := self.looks()):
            if time.monotonic() > end:
                raise DeployFailed(f"{problem} (waited {deadline_s:.0f} s)")
            time.sleep(LOOK_S)
        return looks

    def hand_over(self, master: Service, deadline_s: float) -> Service:
        """Have another replica elected while the master lives. Return the new master when the group is whole again."""
        machine, present = self.members[master], self._present[master]
        words = ("cluster", "handover", present.settings.broker_name, "--yes", "--registry", present.registries)
        machine.run(f"{metaq(machine)}{present.login} {shlex.join(words)}", what="the hand-over")
        looks = self.wait_whole(deadline_s)
        now = self.master(looks)
        if now is None or now is master:
            raise machine.fail("it handed over and became master again: the other replicas cannot take over")
        return now

    @property
    def is_elected(self) -> bool:
        """True when another replica can take over without a pause."""
        return len(self.members) > 1 and all(self._present[service].settings.role == ELECTED for service in self.members)


def groups_of(members: Iterable[tuple[Service, Machine]], present: Mapping[Service, Service]) -> list[ReplicaGroup]:
    """Return the brokers grouped by name, in the order of the file."""
    found: dict[tuple[str, str], dict[Service, Machine]] = {}
    for service, machine in members:
        found.setdefault(service.group, {})[service] = machine
    return [ReplicaGroup(group, present) for group in found.values()]

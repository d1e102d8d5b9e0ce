"""A roll's reactions to the reports of managers and brokers, in states that real ones are in for moments only."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

import pytest

from metaq.deploy.cluster import Cluster, Kind, Service
from metaq.deploy.processes import ServiceState
from metaq.deploy.rolling import Roll
from metaq.deploy.survey import Node
from metaq.errors import DeployFailed
from tests.support.fab import Fab

NAMES: Final = ("a", "b", "c")
DEADLINE_S: Final = 30


class Player:
    """A machine, its manager and its broker in one: says what it is told to; ``seen`` is what all of them were made to do."""

    current = "old"

    def __init__(self, service: Service, present: Service, seen: list[str]) -> None:
        self.service = service
        self.services = (service,)
        self._present = present
        self._seen = seen
        self.machine = self.processes = self.host = self
        self.folder = "/opt/metaq"
        self.name = service.host
        self.states = ["running"]
        """One after the other; the last one stays."""
        self.answers_at = present.asked_at
        self.asked_as = present.login

    def present(self, kind: Kind) -> Service:
        return self._present

    def attempt(self, command: str, *, deadline_s: float) -> tuple[int, str, str]:
        if not command.endswith(f"{self.asked_as} stats --json --broker {self.answers_at}"):
            return 3, "", "metaq: nobody answers"
        stats: Mapping[str, Any] = {"role": "master" if self.name == "a" else "slave", "slave_2_in_sync": "yes"}
        return 0, json.dumps({**stats, "slave_3_in_sync": "yes"}), ""

    def look(self, kind: Kind) -> ServiceState:
        return ServiceState(self.states[0] if len(self.states) == 1 else self.states.pop(0), 0)

    def stop(self, kind: Kind) -> None:
        self._seen.append(f"stop {self.name}")

    def start(self, kind: Kind) -> None:
        self._seen.append(f"start {self.name}")
        self.states, self.answers_at, self.asked_as = ["running"], self.service.asked_at, self.service.login

    def log(self, kind: Kind, lines: int) -> str:
        return ""

    def fail(self, reason: object) -> DeployFailed:
        return DeployFailed(f"{self.name}: {reason}")


class Supervised:
    """A machine with a registry and a broker, whose supervisord starts both when it is started."""

    current = "old"

    def __init__(self, services: tuple[Service, ...]) -> None:
        self.services = services
        self.seen: list[str] = []
        self.machine = self.processes = self.host = self
        self.folder = "/opt/metaq"
        self.name = "a"
        self.states: dict[Kind, str] = {"registry": "stopped", "broker": "stopped"}

    def present(self, kind: Kind) -> Service:
        return next(service for service in self.services if service.kind == kind)

    def attempt(self, command: str, *, deadline_s: float) -> tuple[int, str, str]:
        (kind,) = (service.kind for service in self.services if command.endswith(f" --broker {service.asked_at}"))
        return (0, "{}", "") if self.states[kind] == "running" else (3, "", "metaq: nobody answers")

    def look(self, kind: Kind) -> ServiceState:
        return ServiceState(self.states[kind], 0)

    def stop(self, kind: Kind) -> None:
        if self.states[kind] != "stopped":
            self.seen.append(f"stop {kind}")
            self.states[kind] = "stopped"

    def start(self, kind: Kind) -> None:
        self.seen += [f"start {kind}"] if self.states[kind] == "stopped" else []
        self.states = dict.fromkeys(self.states, "running")

    def fail(self, reason: object) -> DeployFailed:
        return DeployFailed(f"{self.name}: {reason}")


class Stage:
    """Three replicas, which run with other settings than they are to have."""

    def __init__(self, folder: Path, **to_have: Any) -> None:
        self.seen: list[str] = []
        present, wanted = (self._services(folder, **changes) for changes in ({}, to_have))
        self.players = {name: Player(wanted[name], present[name], self.seen) for name in NAMES}
        self.roll = Roll([cast(Node, player) for player in self.players.values()], DEADLINE_S, self.seen.append)

    def _services(self, folder: Path, **settings: Any) -> dict[str, Service]:
        fab = Fab(folder / "cluster.yaml")
        broker = {"data": "/data", "replication_listen": "127.0.0.1:10914", **settings}
        hosts = {
            name: {"address": name, "broker": {**broker, "replica_number": number}}
            for number, name in enumerate(NAMES, start=1)
        }
        fab.configure(hosts, admin="ops")
        return {host.name: host.services[0] for host in Cluster.read(fab.file).hosts}


@pytest.mark.parametrize("change", [{"listen": "127.0.0.1:8200"}, {"max_topics": 7}])
def test_what_serves_elsewhere_serves(tmp_path: Path, change: dict[str, Any]) -> None:
    """E-18: and is not started, wherever it is to listen; then it is asked there."""
    stage = Stage(tmp_path, **change)
    assert [*stage.roll.obstacles(), *stage.roll.unwhole()] == []
    assert stage.roll.start(lambda node: None) == set() and stage.seen == []
    stage.roll.restart(lambda node: None, [player.service for player in stage.players.values()])
    assert [line for line in stage.seen if line.startswith("start ")] == ["start b", "start c", "start a"]


def test_what_is_down_is_started_one_at_a_time(tmp_path: Path) -> None:
    """E-18: the next one when the first serves; what starts or stops is waited for."""
    stage = Stage(tmp_path, listen="127.0.0.1:8200")
    for player, states in zip(
        stage.players.values(), (["failed"], ["restarting"], ["starting", "starting", "stopped"]), strict=True
    ):
        player.states, player.answers_at = states, "nowhere"
    assert stage.roll.obstacles() == []
    stage.roll.start(lambda node: stage.seen.append("change"))
    each = [
        ["stop {0}", "change", "{0}: start broker", "start {0}", "{0}: broker serves"][i].format(n)
        for n in NAMES
        for i in range(5)
    ]
    assert stage.seen == each


def test_what_was_started_beside_another_is_not_stopped(tmp_path: Path) -> None:
    """E-18: a broker that recovers would begin anew; one that failed again and again before has its try with what is new."""
    fab = Fab(tmp_path / "cluster.yaml")
    services = {"registry": {"data": "/registry"}, "broker": {"data": "/data", "registries": "127.0.0.1:9876"}}
    fab.configure({"a": {"address": "a", **services}})
    machine = Supervised(Cluster.read(fab.file).hosts[0].services)
    for state, stopped in (("stopped", []), ("restarting", ["stop broker"])):
        machine.states = {"registry": "stopped", "broker": state}
        machine.seen.clear()
        roll = Roll([cast(Node, machine)], DEADLINE_S, lambda _: None)
        assert len(roll.start(lambda node: machine.seen.append("change"))) == 2
        assert machine.seen == [*stopped, "change", "start registry"]


def test_what_runs_and_does_not_answer_is_left_alone(tmp_path: Path) -> None:
    """E-18: and everything else, too."""
    stage = Stage(tmp_path)
    stage.players["b"].answers_at = "nowhere"
    stage.players["c"].states = ["stopped"]
    expected = [
        "b: broker is running and does not answer: nobody answers; `fab logs` may say why. `fab stop --on b` stops it",
        "c: broker answers, but its service manager says that it has stopped: end that process, then `fab start --on c`",
    ]
    assert stage.roll.obstacles() == expected
    with pytest.raises(DeployFailed) as error:
        stage.roll.start(lambda node: None)
    assert str(error.value).splitlines() == expected and stage.seen == []


def test_users_come_to_all_replicas_at_once(tmp_path: Path) -> None:
    """E-05, E-18: those with users and those without do not follow one another; a group that is stopped may change."""
    stage = Stage(tmp_path, users_file="/etc/users.yaml")
    (said,) = stage.roll.obstacles()
    assert said.startswith("a: replicas with users and without do not follow one another: stop all of metaq (fab stop)")
    for player in stage.players.values():
        player.states, player.answers_at = ["stopped"], "nowhere"
    assert stage.roll.obstacles() == []
    assert len(stage.roll.start(lambda node: None)) == 3

"""The survey of a machine: what is there, and what is in the way of a release; on this machine, without SSH."""

import json
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from metaq.deploy.cluster import Cluster, ClusterSettings, Host
from metaq.deploy.processes import Systemd
from metaq.deploy.survey import Node, problems_of, problems_of_formats, warn_of_features
from metaq.deploy.tasks import rollback, status
from metaq.deploy.wheels import Release
from metaq.errors import DeployFailed
from tests.deploy.systems import Systems
from tests.support.fab import Fab

RELEASE: Final = "0.1.0-1"
LATER: Final = "0.1.0-2"
REGISTRY: Final = {"data": "/srv/registry", "registry_listen": "127.0.0.1:19876"}
BROKER: Final = {"data": "/var/lib/metaq", "registries": "127.0.0.1:19876"}


def release_at(home: Path, name: str, **services: Mapping[str, Any]) -> None:
    """Make a release of a host that has these services."""
    folder = home / "releases" / name
    (folder / "conf").mkdir(parents=True)
    for kind, given in services.items():
        text = "".join(f"{key}: {json.dumps(value)}\n" for key, value in given.items())
        (folder / "conf" / f"{kind}.yaml").write_text(text)
    (folder / "complete").write_text(json.dumps({"format": 1, "admin": ""}))


@contextmanager
def running(release: Path) -> Iterator[int]:
    """The id of a process that was started of a release."""
    with subprocess.Popen([str(release / "venv" / "bin" / "python"), "60"], executable="/bin/sleep") as process:
        try:
            yield process.pid
        finally:
            process.kill()


def answering(home: Path, states: Mapping[str, str], **stats: str) -> None:
    """Have the supervisor of a folder report these states, and all services of its releases answer with ``stats``."""
    said = "".join(f"*'(\"{kind}\")'*) echo {state} ;;\n" for kind, state in states.items())
    manager = home / "supervisor" / "venv" / "bin"
    answer = f"echo {shlex.quote(json.dumps(stats))}\n"
    for program, text in (
        (manager / "python", f'case "$2" in\n{said}esac\n'),
        (manager / "supervisorctl", ""),
        *((release / "venv" / "bin" / "metaq", answer) for release in (home / "releases").iterdir()),
    ):
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(f"#!/bin/sh\n{text}")
        program.chmod(0o755)
    (home / "supervisor" / "complete").touch()


def test_the_data_of_a_kept_release_however_its_path_is_written(systems: Systems, tmp_path: Path) -> None:
    """E-18: a slash too many, which cluster.yaml may have by now or not, is no other folder."""
    kept = tmp_path / "metaq" / "releases" / RELEASE
    (kept / "conf").mkdir(parents=True)
    (kept / "conf" / "broker.yaml").write_text(f"data: {json.dumps(f'{tmp_path}//old/')}\n")
    (kept / "complete").write_text(json.dumps({"format": 1, "admin": ""}))
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "store.json").write_text('{"format": 99}')

    host = systems.host(folder=str(tmp_path / "metaq"), broker={"data": str(tmp_path / "new")}, registry=None, user="")
    node = Node.look(systems.machine(host)).of_release(RELEASE)
    (problem,) = problems_of_formats([node], 1, ())
    assert problem.startswith(f"a: {tmp_path / 'old'} has format 99")


def test_data_with_features_that_a_release_does_not_read(systems: Systems, tmp_path: Path) -> None:
    """E-18: such a broker would not start; the record of what a release reads lasts, and one of an older fab has none."""
    data, home = tmp_path / "data", tmp_path / "metaq" / "releases" / RELEASE
    data.mkdir()
    home.mkdir(parents=True)
    (data / "store.json").write_text('{"format": 1, "features": ["sundials", "timers"]}')
    host = systems.host(folder=str(tmp_path / "metaq"), broker={"data": str(data)}, registry=None, user="")
    for features, problems in (
        (("timers",), [f"a: {data} has the feature sundials, which this release does not read; run one that does"]),
        (("sundials", "timers"), []),
    ):
        release = Release(RELEASE, "0.1.0", "", 1, features, tmp_path)
        Node.look(systems.machine(host)).releases.mark_newest(release, "")
        node = Node.look(systems.machine(host))
        about = node.about(RELEASE)
        assert problems_of_formats([node], about["format"], about["features"]) == problems
    assert problems_of_formats([node], 1, None) == []
    said: list[str] = []
    warn_of_features([node], RELEASE, said.append)
    assert said == []
    (home / "complete").write_text(json.dumps({"format": 1, "admin": ""}))
    warn_of_features([Node.look(systems.machine(host))], RELEASE, said.append)
    assert said == [f"a: {data} has sundials, timers; whether {RELEASE} reads these is not recorded: it may refuse the folder"]


def test_two_brokers_on_one_machine_need_units_of_their_own(systems: Systems, tmp_path: Path) -> None:
    """E-18: systemd has one metaq-broker; a registry beside a broker has its own, and so has another machine."""
    first = systems.host(folder=str(tmp_path / "one"), broker={"data": str(tmp_path / "data")}, registry=None, user="")
    common = {"folder": str(tmp_path / "two"), "user": ""}
    second = systems.host(**common, broker={"data": str(tmp_path / "other")}, registry=None)
    registry = systems.host(**common, registry={"data": str(tmp_path / "registry")}, broker=None)
    elsewhere = systems.host(**common, broker={"data": str(tmp_path / "other")}, registry=None, ssh_port=2222)
    release = Release("0.1.0-2", "0.1.0", "", 1, (), tmp_path)
    cluster = Cluster(ClusterSettings(hosts={"none": None}), ())

    def problems(*hosts: Host) -> list[str]:
        found = []
        for host, name in zip(hosts, "ab", strict=True):
            node = Node.look(systems.machine(Host(name, host.settings, host.services)))
            node = node._replace(processes=Systemd(node.machine))
            found.append(node._replace(facts={**node.facts, "taken": []}))
        return problems_of(cluster, found, release)

    (problem,) = problems(first, second)
    assert problem == "b: systemd of that machine runs the broker of a as metaq-broker; set processes to supervisor"
    assert problems(first, registry) == problems(first, elsewhere) == []


def test_a_link_that_leads_nowhere(systems: Systems, tmp_path: Path) -> None:
    """E-18: no folder can be made there, nor below; whoever reads that is told which link."""
    link = tmp_path / "link"
    link.symlink_to("/nowhere/at/all")
    host = systems.host(folder=str(link), broker={"data": str(link / "data")}, registry=None, user="")
    facts = Node.look(systems.machine(host)).facts
    expected = f"{link} is a link to /nowhere/at/all, which does not exist; create it, or remove the link"
    assert [facts["home"]["problem"], facts["data"][0]["problem"]] == [expected, expected]


def test_the_services_of_a_release_whatever_the_file_has_now(systems: Systems, tmp_path: Path) -> None:
    """E-18: a rollback brings back one that the file has lost, and does without one that it has got since."""
    home = tmp_path / "metaq"
    release_at(home, RELEASE, broker=BROKER, registry=REGISTRY)
    release_at(home, LATER, broker=BROKER)
    (home / "releases" / "none" / "conf").mkdir(parents=True)
    (home / "releases" / "none" / "complete").write_text("{}")
    for others in ({"registry": None}, {"broker": None, "registry": REGISTRY}, {"registry": REGISTRY}):
        node = Node.look(systems.machine(systems.host(folder=str(home), user="", **others)))
        assert [service.kind for service in node.of_release(RELEASE).services] == ["registry", "broker"]
        assert [service.kind for service in node.of_release(LATER).services] == ["broker"]
        with pytest.raises(DeployFailed, match="a: none has no service there; deploy first"):
            node.of_release("none")


def test_the_ports_of_a_service_that_the_file_has_lost(systems: Systems, tmp_path: Path) -> None:
    """E-18: it is stopped before another one is started, which may listen there; another process is not."""
    home = tmp_path / "metaq"
    release_at(home, RELEASE, registry=REGISTRY)
    (home / "current").symlink_to(f"releases/{RELEASE}")
    broker = {"data": "/var/lib/metaq", "registry_listen": REGISTRY["registry_listen"]}
    host = systems.host(folder=str(home), user="", registry=None, broker=broker)
    cluster = Cluster(ClusterSettings(hosts={"none": None}), ())

    def problems() -> list[str]:
        node = Node.look(systems.machine(host))
        node = node._replace(processes=Systemd(node.machine))
        node = node._replace(facts={**node.facts, "taken": [["127.0.0.1", 19876, "Address already in use"]]})
        return problems_of(cluster, [node], Release(LATER, "0.1.0", "", 1, (), tmp_path))

    (problem,) = problems()
    assert problem == "a: broker.registry_listen: cannot listen on 127.0.0.1:19876: Address already in use"
    with running(home / "releases" / RELEASE) as pid:
        (systems.folder / "metaq-registry").write_text(f"ActiveState=active\nSubState=running\nMainPID={pid}\n")
        assert problems() == []


@pytest.mark.parametrize("form", ["{0}/metaq", "{0}//metaq/", "/{0}/metaq", "//{0}/./metaq"])
def test_a_process_is_of_its_release_however_the_folder_is_written(systems: Systems, tmp_path: Path, form: str) -> None:
    """E-18: a slash too many in cluster.yaml does not make it another installation's."""
    home = tmp_path / "metaq"
    release_at(home, RELEASE, broker=BROKER)
    (home / "current").symlink_to(f"releases/{RELEASE}")
    node = Node.look(systems.machine(systems.host(folder=form.format(tmp_path), user="", registry=None, broker=BROKER)))
    for started_as in (home, Path(f"/{home}")):  # a path keeps two slashes in front
        with running(started_as / "releases" / RELEASE) as pid:
            assert node.releases.of(pid) == RELEASE
    with running(tmp_path / home.relative_to("/") / "releases" / RELEASE) as pid:
        assert node.releases.of(pid) == ""


def test_the_status_of_a_service_that_the_file_has_lost(
    systems: Systems, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E-18: it runs until the next deployment, and has a line; all is well only if it is, too, and its replicas."""
    home = tmp_path / "metaq"
    release_at(home, RELEASE, broker={**BROKER, "replication_listen": "127.0.0.1:18130"}, registry=REGISTRY)
    (home / "current").symlink_to(f"releases/{RELEASE}")
    host = systems.host(folder=str(home), user="", processes="supervisor", broker=None, registry=REGISTRY)
    cluster = Cluster(ClusterSettings(hosts={"none": None}), (host,))
    monkeypatch.setattr("metaq.deploy.tasks.Machine", systems.machine)
    with running(home / "releases" / RELEASE) as pid:
        for broker, role, well, more in (
            ("RUNNING", "master", True, []),
            ("RUNNING", "slave", False, ["a: metaq has not one master: none"]),
            ("FATAL", "master", False, []),
        ):
            answering(home, {"registry": f"RUNNING {pid}", "broker": f"{broker} {pid}"}, role=role)
            said: list[str] = []
            assert status(cluster, said.append, [host]) is well
            state = "running" if broker == "RUNNING" else "failed"
            rows = [line.split()[:4] for line in said[1:3]]
            assert rows == [["a", "registry", "running", RELEASE], ["a", "broker", state, RELEASE]]
            assert said[3:] == more


def test_the_release_to_go_back_to_when_a_host_is_new(
    systems: Systems, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E-18: it is the one that the others ran; the new host, which lacks it, is named."""
    homes = {name: tmp_path / name / "metaq" for name in ("old", "new")}
    hosts = {}
    for name, home in homes.items():
        broker = {"data": str(tmp_path / name / "data"), "broker_name": name}
        for release in (RELEASE, LATER) if name == "old" else (LATER,):
            release_at(home, release, broker=broker)
        hosts[name] = {"address": name, "folder": str(home), "processes": "supervisor", "broker": broker}
    (homes["old"] / "current").symlink_to(f"releases/{RELEASE}")
    (homes["old"] / "previous").symlink_to("releases/0.0.9-1")
    fab = Fab(tmp_path / "cluster.yaml")
    fab.configure(hosts)
    cluster = Cluster.read(fab.file)
    monkeypatch.setattr("metaq.deploy.tasks.Machine", systems.machine)
    monkeypatch.setattr("metaq.deploy.survey.Machine", systems.machine)
    said: list[str] = []
    with running(homes["old"] / "releases" / RELEASE) as pid:
        answering(homes["old"], {"broker": f"RUNNING {pid}"})
        answering(homes["new"], {"broker": "STOPPED 0"})
        rollback(cluster, said.append, to=LATER)
    assert said[-1] == f"{LATER} runs on 2 hosts"
    assert (homes["old"] / "previous").readlink() == Path("releases") / RELEASE
    assert not (homes["new"] / "previous").exists()
    reason = f"not all hosts have the release {RELEASE}; it is not on new; all have: {LATER}"
    with pytest.raises(DeployFailed, match=f"^{re.escape(reason)}$"):
        rollback(cluster, said.append)


def test_a_registry_that_the_broker_has_taken_over(systems: Systems, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """E-18: a release with both starts when nothing has the registry's port; the process to stop for that is named."""
    home = tmp_path / "metaq"
    both = {"broker": {**BROKER, "data": str(tmp_path / "data")}, "registry": {**REGISTRY, "data": str(tmp_path / "registry")}}
    merged = {"data": str(tmp_path / "data"), "registry_listen": REGISTRY["registry_listen"]}
    release_at(home, RELEASE, **both)
    release_at(home, LATER, broker=merged)
    (home / "current").symlink_to(f"releases/{LATER}")
    host = systems.host(folder=str(home), user="", processes="supervisor", broker=merged, registry=None)
    cluster = Cluster(ClusterSettings(hosts={"none": None}), (host,))
    monkeypatch.setattr("metaq.deploy.survey.Machine", systems.machine)
    held = "the broker that runs answers at the address of the registry, which does not run: `fab stop --on a`, then this task"
    unknown = "registry answers, but its service manager says that it has stopped: end that process"
    with running(home / "releases" / LATER) as pid:
        for broker, reason in ((f"RUNNING {pid}", held), ("STOPPED 0", unknown)):
            answering(home, {"registry": "STOPPED 0", "broker": broker})
            with pytest.raises(DeployFailed, match=f"^a: {re.escape(reason)}"):
                rollback(cluster, lambda _: None, to=RELEASE)

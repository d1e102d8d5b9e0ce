"""A deployment relies on what runs, as its manager and its own process report, not on what was written last."""

import os
import signal
import zipfile
from pathlib import Path

import pytest

from tests.deploy.conftest import SECOND
from tests.deploy.pair import Pair
from tests.deploy.ports import broker_ports
from tests.support.broker import wait_until
from tests.support.sshd import SshHost
from tests.support.users import ADMIN, write_users

pytestmark = [pytest.mark.partner("sshd"), pytest.mark.timeout(1200)]

END_S = 60.0


def pid(host: SshHost) -> int:
    """Return the process id of the host's broker."""
    return int(host.supervisor("pid", "broker"))


def link(host: SshHost, release: str) -> None:
    """Have `current` lead to a release, as after a deployment that was interrupted."""
    current = host.home / "metaq" / "current"
    current.unlink()
    current.symlink_to(f"releases/{release}")


@pytest.mark.slow
def test_a_release_is_what_its_process_was_started_of(pair: Pair, second_wheels: Path) -> None:
    """E-18: a deployment that was interrupted between its switch and its restart is finished by the next one.

    The ports of metrics are the default ones, in use by the brokers themselves. A rollback goes to what ran before, whatever
    was installed last, and never to what cannot read the data.
    """
    a, b = pair.hosts
    pair.fab.run("deploy")
    first = (a.home / "metaq" / "current").readlink().name
    pair.configure(second_wheels)
    pair.fab.run("deploy")
    second = (a.home / "metaq" / "current").readlink().name

    link(b, first)
    assert SECOND in " ".join(pair.status()["b"]) and f"{first} is current" in " ".join(pair.status()["b"])
    before = pid(a), pid(b)
    said = pair.fab.run("deploy")
    assert "restart" not in said and (b.home / "metaq" / "current").readlink().name == second
    assert (pid(a), pid(b)) == before

    pair.configure()
    for host in pair.hosts:
        link(host, first)
    assert f"b: restart broker, which is of {second}" in pair.fab.run("deploy", "--dry-run")
    said = pair.fab.run("deploy")
    assert "a: restart broker" in said and "b: restart broker" in said
    assert [row[3] for row in (pair.status()["a"], pair.status()["b"])] == [first, first]

    identity = b.home / "data" / "store.json"
    text = identity.read_text()
    identity.write_text(text.replace('"format": 1', '"format": 99').replace('"format":1', '"format":99'))
    for words in (("deploy",), ("rollback", "--to", second)):
        said = pair.fab.refused(*words)
        assert f"b: {b.home / 'data'} has format 99, and this release reads 1" in said and "nothing was changed" in said
    identity.write_text(f'{text.rstrip()[:-1]},"features":["sundials"]}}')
    for words in (("deploy",), ("rollback", "--to", second)):
        assert f"b: {b.home / 'data'} has the feature sundials, which this release does not read" in pair.fab.refused(*words)
    identity.write_text(text)
    pair.fab.run("rollback", "--to", second)
    assert "runs on 2 hosts" in pair.fab.run("rollback")
    assert pair.status()["b"][3] == first


@pytest.mark.slow
def test_what_runs_and_does_not_answer_is_not_stopped(pair: Pair) -> None:
    """E-18: nor what answers, and is not known to what should look after it: somebody has to look."""
    a, b = pair.hosts
    pair.fab.run("deploy")
    hung = pid(b)
    os.kill(hung, signal.SIGSTOP)
    try:
        pair.configure(broker=pair.broker(b, max_topics=77))
        said = pair.fab.refused("deploy")
        assert "b: broker is running and does not answer" in said and "fab stop --on b" in said, said
        assert "nothing was changed on any host" in said
        assert pid(b) == hung
    finally:
        os.kill(hung, signal.SIGCONT)
    assert "b: restart broker" in pair.fab.run("deploy")

    orphan, manager = pid(a), int(a.supervisor("pid"))
    os.kill(manager, signal.SIGKILL)
    wait_until(lambda: a.supervisor("pid", "broker").strip() != str(orphan), END_S, "supervisord is gone")
    assert "answers, but its service manager does not know it" in " ".join(pair.status()["a"])
    assert pair.fab.run_any("status").code == 1
    assert "a: broker answers, but its service manager says that it has stopped: end that process" in pair.fab.refused("start")
    os.kill(orphan, signal.SIGTERM)
    wait_until(lambda: not Path(f"/proc/{orphan}").exists(), END_S, "the broker ends")
    assert "a: start broker" in pair.fab.run("start")
    assert pair.fab.run_any("status").code == 0


@pytest.mark.slow
def test_users_come_and_go(pair: Pair, tmp_path: Path) -> None:
    """E-05, E-18: a broker is asked as one of its users while it has some, and where it listens until it listens elsewhere."""
    b = pair.hosts[1]
    users = write_users(tmp_path / "users.yaml")
    pair.fab.run("deploy")
    (elsewhere,) = broker_ports(1)
    with_users = pair.broker(b, users_file=str(users), **elsewhere.settings("listen"))
    pair.configure(of_all={"admin": ADMIN.name}, broker=with_users)
    assert pair.status()["b"][-1] == "serves"
    assert "b: restart broker" in pair.fab.run("deploy")
    assert pair.fab.run_any("status").code == 0
    pair.configure()
    assert pair.status()["b"][-1] == "serves"
    assert "b: restart broker" in pair.fab.run("deploy")
    assert "b: restart broker" in pair.fab.run("rollback")
    assert pair.fab.run_any("status").code == 0


@pytest.mark.slow
def test_only_what_changes_is_touched(pair: Pair) -> None:
    """E-18: a service that is none any more is stopped and forgotten; what only its manager's file says of a broker waits.

    A broker that supervisord starts beside the registry is not started twice. A rollback has the services of its release.
    """
    b = pair.hosts[1]
    (ports,) = broker_ports(1)
    registry = {"data": str(b.home / "registry"), **ports.settings("registry_listen")}
    pair.configure(registry=registry)
    pair.fab.run("deploy")
    log = (b.home / "metaq" / "supervisor" / "supervisord.log").read_text()
    assert [log.count(f"spawned: '{kind}'") for kind in ("registry", "broker")] == [1, 1]
    configuration = b.home / "metaq" / "supervisor" / "supervisord.conf"
    configuration.write_text(configuration.read_text().replace("[program:broker]\n", "[program:broker]\npriority=5\n"))
    b.supervisor("update")
    wait_until(lambda: " serves" in pair.fab.run_any("status", "--on", "b").output.splitlines()[2], END_S, "the broker serves")
    before = pid(b)
    pair.fab.run("deploy")
    assert pid(b) == before and "priority" not in configuration.read_text()

    pair.configure()
    assert "b: restart broker" in pair.fab.run("deploy")
    assert "no such" in b.supervisor("status", "registry")
    assert pair.fab.run_any("status").code == 0
    without = (b.home / "metaq" / "current").readlink().name

    assert "b: start registry" in pair.fab.run("rollback")
    assert "no such" not in b.supervisor("status", "registry")
    assert "b: stop registry" in pair.fab.run("stop")
    pair.configure(registry=registry)
    pair.fab.run("rollback", "--to", without)
    assert "no such" in b.supervisor("status", "registry")
    pair.configure()
    assert pair.fab.run_any("status").code == 0


@pytest.mark.slow
def test_a_release_that_does_not_run_is_none(pair: Pair, wheels: Path, tmp_path: Path) -> None:
    """E-18: one whose command cannot be called never gets to be one; others can read what is installed, and no settings."""
    a, b = pair.hosts
    pair.fab.run("deploy")
    home = b.home / "metaq" / "current"
    for folder in (home.parent, home.parent / "releases", home, home / "conf", home / "venv", home / "venv" / "bin"):
        assert folder.stat().st_mode & 0o777 == 0o755, folder
    assert (home / "conf" / "broker.yaml").stat().st_mode & 0o777 == 0o600
    assert (b.home / "data").stat().st_mode & 0o777 == 0o750

    broken = tmp_path / "broken"
    broken.mkdir()
    for wheel in wheels.iterdir():
        if wheel.name.startswith("metaq_broker"):
            with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(broken / wheel.name, "w") as copy:
                for name in source.namelist():
                    copy.writestr(
                        name, "raise ImportError('broken')\n" if name == "metaq/cli/__init__.py" else source.read(name)
                    )
        else:
            (broken / wheel.name).symlink_to(wheel)
    pair.configure(broken)
    before = pid(a), pid(b)
    said = pair.fab.refused("deploy")
    assert "a: installing metaq-broker" in said and "ImportError: broken" in said
    assert (pid(a), pid(b)) == before and len(list((a.home / "metaq" / "releases").iterdir())) == 1


@pytest.mark.slow
def test_a_jump_host_has_to_be_known(pair: Pair, tmp_path: Path) -> None:
    """E-05: as the host itself; b is reached through a."""
    a, b = pair.hosts
    given = a.settings()
    home = tmp_path / "home"
    (home / ".ssh").mkdir(parents=True)
    jump = f"{given['ssh_user']}@127.0.0.1:{given['ssh_port']}"
    (home / ".ssh" / "config").write_text(
        f"Host localhost\n  ProxyJump {jump}\nHost 127.0.0.1\n  IdentityFile {given['ssh_key']}\n"
    )
    line = Path(b.settings()["known_hosts"]).read_text().replace("127.0.0.1", "localhost")
    known = tmp_path / "known"
    known.write_text(line)
    pair.fab.environment["HOME"] = str(home)
    pair.configure(address="localhost", known_hosts=str(known))
    said = " ".join(pair.status()["b"])
    assert "not found in known_hosts" in said and "127.0.0.1" in said
    known.write_text(line + Path(given["known_hosts"]).read_text())
    assert "not deployed" in " ".join(pair.status()["b"])

"""systemd as it is told and asked, by a stub of its commands: machines with systemd and root are rare among those that test."""

import os
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest

from metaq.deploy.cluster import Cluster, Host
from metaq.deploy.machine import COMMAND_S, Machine
from metaq.deploy.processes import Process, Supervisor, Systemd, processes_of
from metaq.errors import DeployFailed
from tests.support.fab import Fab

SYSTEMCTL: Final = """\
#!/bin/sh
echo "$*" >> {folder}/told
for unit; do :; done
case $1 in
    show) cat {folder}/$unit 2>/dev/null || printf 'ActiveState=inactive\\nSubState=dead\\nMainPID=0\\n' ;;
    start) printf 'ActiveState=active\\nSubState=running\\nMainPID=77\\n' > {folder}/$unit ;;
    stop) [ -e {folder}/$unit ] && rm {folder}/$unit ;;
esac
"""
JOURNALCTL: Final = """\
#!/bin/sh
echo "the journal: $*"
"""


class LocalMachine(Machine):
    """This one, without SSH: commands run in a shell, those of systemd are stubs in ``stubs``."""

    def __init__(self, host: Host, stubs: Path) -> None:
        super().__init__(host)
        self._stubs = stubs

    def attempt(self, command: str, *, deadline_s: float = COMMAND_S) -> tuple[int, str, str]:
        path = f"{self._stubs}:{os.environ['PATH']}"
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False, env={"PATH": path})
        return done.returncode, done.stdout, done.stderr


class Systems:
    """A machine whose systemd is a stub; ``told`` is what that was told since the last call."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.units = folder / "units"
        for name, text in (("systemctl", SYSTEMCTL), ("journalctl", JOURNALCTL)):
            stub = folder / "bin" / name
            stub.parent.mkdir(exist_ok=True)
            stub.write_text(text.format(folder=folder))
            stub.chmod(0o755)
        self.units.mkdir()

    def host(self, **others: Any) -> Host:
        """One with a broker and a registry, or with what is given."""
        services = {"broker": {"data": "/var/lib/metaq", "registries": "10.0.0.1:9876"}, "registry": {"data": "/srv/registry"}}
        fab = Fab(self.folder / "cluster.yaml")
        fab.configure({"a": {"address": "10.0.0.1", "user": "metaq", **services, **others}})
        return Cluster.read(fab.file).hosts[0]

    def machine(self, host: Host) -> LocalMachine:
        """It."""
        return LocalMachine(host, self.folder / "bin")

    def told(self) -> list[str]:
        file = self.folder / "told"
        lines = file.read_text().splitlines() if file.exists() else []
        file.unlink(missing_ok=True)
        return [line for line in lines if not line.startswith("show")]


@pytest.fixture
def systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Systems:
    found = Systems(tmp_path)
    monkeypatch.setattr("metaq.deploy.processes.UNITS", str(found.units))
    return found


def test_units_are_made_and_taken_away(systems: Systems) -> None:
    """E-18: one for each service of the host; another folder's is somebody else's."""
    both = systems.host()
    Systemd(systems.machine(both)).install(both.services)
    assert {file.name for file in systems.units.iterdir()} == {"metaq-broker.service", "metaq-registry.service"}
    text = (systems.units / "metaq-broker.service").read_text()
    assert "ExecStart=/opt/metaq/current/venv/bin/metaq serve --config /opt/metaq/current/conf/broker.yaml\n" in text
    assert "User=metaq\n" in text and "StateDirectory=metaq\n" in text
    assert systems.told() == ["daemon-reload", "enable --quiet metaq-registry metaq-broker"]

    alone = systems.host(registry=None)
    Systemd(systems.machine(alone)).install(alone.services)
    assert {file.name for file in systems.units.iterdir()} == {"metaq-broker.service"}
    assert systems.told() == ["disable --now --quiet metaq-registry", "daemon-reload", "enable --quiet metaq-broker"]

    other = systems.host(broker=None, folder="/opt/other")
    Systemd(systems.machine(other)).install(other.services)
    assert {file.name for file in systems.units.iterdir()} == {"metaq-broker.service", "metaq-registry.service"}
    assert systems.told() == ["daemon-reload", "enable --quiet metaq-registry"]


def test_started_looked_at_and_stopped(systems: Systems) -> None:
    """E-18: what does not run is not stopped; what waits for its next try is."""
    systemd = Systemd(systems.machine(systems.host()))
    assert systemd.look("broker") == Process("stopped", 0)
    systemd.stop("broker")
    assert systems.told() == []
    systemd.start("broker")
    assert systems.told() == ["reset-failed metaq-broker", "start --no-block metaq-broker"]
    assert systemd.look("broker") == Process("running", 77)
    systemd.stop("broker")
    assert systems.told() == ["stop metaq-broker"]
    state = systems.folder / "metaq-broker"
    for active, sub, expected in (
        ("activating", "start", "starting"),
        ("activating", "auto-restart", "restarting"),
        ("deactivating", "stop-sigterm", "stopping"),
        ("failed", "failed", "failed"),
    ):
        state.write_text(f"ActiveState={active}\nSubState={sub}\nMainPID=5\n")
        assert systemd.look("broker").state == expected
    state.write_text("ActiveState=activating\nSubState=auto-restart\nMainPID=0\n")
    systemd.stop("broker")
    assert systems.told() == ["stop metaq-broker"]
    state.write_text("ActiveState=odd\nSubState=x\nMainPID=0\n")
    with pytest.raises(DeployFailed, match="a: metaq-broker is odd, says systemd"):
        systemd.look("broker")
    assert systemd.log("broker", 7) == "the journal: --no-pager -u metaq-broker -n 7 -o cat\n"


@pytest.mark.parametrize(
    ("wanted", "root", "expected"),
    [("auto", True, Systemd), ("systemd", True, Systemd), ("auto", False, Supervisor), ("supervisor", True, Supervisor)],
)
def test_which_one_a_host_gets(systems: Systems, wanted: str, root: bool, expected: type) -> None:
    """E-18: systemd, where it runs and may be told."""
    machine = systems.machine(systems.host(processes=wanted))
    assert isinstance(processes_of(machine, {"systemd": True, "root": root, "open_files": 1024}), expected)
    if wanted == "systemd":
        with pytest.raises(DeployFailed, match="systemd needs ssh_user root"):
            processes_of(machine, {"systemd": True, "root": False, "open_files": 1024})

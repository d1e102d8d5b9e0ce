"""Commands and queries to systemd, received by a stub: few test machines have both systemd and root."""

import re

import pytest

from metaq.deploy.processes import ServiceState, Supervisor, Systemd, processes_of
from metaq.errors import DeployFailed
from tests.deploy.systems import Systems


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


def test_the_unit_of_another_installation_is_left_alone(systems: Systems) -> None:
    """E-18: neither written over nor stopped, as it is somebody else's service; a slash too many is no other folder."""
    first = systems.host(registry=None)
    Systemd(systems.machine(first)).install(first.services)
    Systemd(systems.machine(first)).start("broker")
    unit = systems.units / "metaq-broker.service"
    text = unit.read_text()
    systems.told()

    both = systems.host(folder="/opt/other")
    second = Systemd(systems.machine(both))
    reason = f"a: {unit} is the unit of another installation, not of /opt/other; set processes to supervisor"
    with pytest.raises(DeployFailed, match=re.escape(reason)):
        second.install(both.services)
    assert [unit] == list(systems.units.iterdir()) and unit.read_text() == text
    with pytest.raises(DeployFailed, match=re.escape(reason)):
        second.stop("broker")
    assert systems.told() == []

    same = systems.host(folder="/opt//metaq/", registry=None)
    for written in ("/opt/metaq", "//opt/metaq"):
        unit.write_text(text.replace("=/opt/metaq", f"={written}"))
        Systemd(systems.machine(same)).start("broker")
        Systemd(systems.machine(same)).stop("broker")
        Systemd(systems.machine(same)).install(same.services)
        assert systems.told()[-3:] == ["stop metaq-broker", "daemon-reload", "enable --quiet metaq-broker"]


def test_started_looked_at_and_stopped(systems: Systems) -> None:
    """E-18: what does not run is not stopped; what waits for its next try is."""
    systemd = Systemd(systems.machine(systems.host()))
    assert systemd.look("broker") == ServiceState("stopped", 0)
    systemd.stop("broker")
    assert systems.told() == []
    systemd.start("broker")
    assert systems.told() == ["reset-failed metaq-broker", "start --no-block metaq-broker"]
    assert systemd.look("broker") == ServiceState("running", 77)
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

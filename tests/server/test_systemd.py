"""Notifications to systemd, received at a real socket."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from metaq.client import TextClient
from metaq.server.notify import EXTEND_USEC
from tests.support.broker import BrokerFailed, BrokerProcess
from tests.support.cli import Cli
from tests.support.slowstart import SLEEPS_S
from tests.support.systemd import NotifySocket

EXTEND: Final = f"EXTEND_TIMEOUT_USEC={EXTEND_USEC}"
WATCHDOG_USEC: Final = 200_000


def test_a_broker_tells_what_it_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """E-18: opening, ready, alive while it is busy, stopping."""
    with NotifySocket(tmp_path / "notify") as systemd:
        monkeypatch.setenv("NOTIFY_SOCKET", str(systemd.path))
        monkeypatch.setenv("WATCHDOG_USEC", str(WATCHDOG_USEC))
        with BrokerProcess(tmp_path / "data") as broker:
            told = systemd.wait_for("READY=1")
            assert told[:2] == [f"STATUS=opening {tmp_path / 'data'}", EXTEND]
            assert any(line.startswith(f"STATUS=metaq ready listen={broker.address} ") for line in systemd.lines)
            with TextClient(broker.host, broker.port) as client:
                for _ in range(10):
                    client.put_many("busy", [b"x" * 100] * 5_000)
                    systemd.wait_for("WATCHDOG=1")
            assert broker.terminate() == 0
            systemd.wait_for("STOPPING=1")
        assert systemd.lines.count("READY=1") == 1


def test_no_watchdog_where_none_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """E-18: or where another process is asked; an abstract socket is one, too."""
    with NotifySocket(Path(f"\0metaq-{tmp_path.name}")) as systemd:
        monkeypatch.setenv("NOTIFY_SOCKET", "@" + str(systemd.path)[1:])
        monkeypatch.setenv("WATCHDOG_USEC", str(WATCHDOG_USEC))
        monkeypatch.setenv("WATCHDOG_PID", "1")
        with BrokerProcess(tmp_path / "data") as broker:
            systemd.wait_for("READY=1")
            assert broker.terminate() == 0
            systemd.wait_for("STOPPING=1")
        assert "WATCHDOG=1" not in systemd.lines


@pytest.mark.partner("systemd")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), ("metaq serve --data /var/lib/metaq\n", "StateDirectory=metaq\n", "User=metaq\n")),
        (
            ("--data", "/srv/orders", "--user", "o", "--config", "/dev/null"),
            ("--config /dev/null\n", "ReadWritePaths=/srv/orders\n"),
        ),
        (("registry", "--data", "/var/lib/a/b"), ("metaq registry --data /var/lib/a/b\n", "StateDirectory=a/b\n")),
    ],
)
def test_the_unit(tmp_path: Path, words: tuple[str, ...], expected: tuple[str, ...]) -> None:
    """E-18: systemd understands every line of it, and finds the program."""
    text = Cli("").text("systemd", *words)
    for part in (*expected, "Type=notify\n", "LimitNOFILE=65536\n", "WatchdogSec=60\n"):
        assert part in text
    file = tmp_path / "metaq.service"
    file.write_text(text)
    done = subprocess.run(["systemd-analyze", "verify", file], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_unit_needs_absolute_paths() -> None:
    """E-18: since it is started anywhere."""
    assert "data: a unit needs absolute paths" in Cli("").run("systemd", "--data", "data", code=2).stderr


def start(how: str, folder: Path, systemd: NotifySocket) -> "subprocess.Popen[bytes]":
    """A process that starts as slowly as that."""
    command = [sys.executable, "-m", "tests.support.slowstart", how, str(folder / "go")]
    return subprocess.Popen(command, env={"NOTIFY_SOCKET": str(systemd.path)}, stdout=subprocess.DEVNULL)


def test_a_long_recovery_gets_the_time_it_needs(tmp_path: Path) -> None:
    """P40: tables are made of an open store by the thread of the loop, and systemd hears of it all the same."""
    with NotifySocket(tmp_path / "notify") as systemd:
        process = start("works", tmp_path, systemd)
        try:
            assert "READY=1" not in systemd.wait_for(EXTEND, 4)
            (tmp_path / "go").touch()
            systemd.wait_for("READY=1")
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()


def test_who_does_nothing_gets_no_more_time(tmp_path: Path) -> None:
    """P40: a start that hangs is ended by systemd, not put off for ever."""
    with NotifySocket(tmp_path / "notify") as systemd:
        (tmp_path / "go").touch()
        process = start("sleeps", tmp_path, systemd)
        try:
            told = systemd.wait_for("READY=1")
            assert told.count(EXTEND) < SLEEPS_S - 1
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_recovery_ends_when_nobody_wants_it_any_more(tmp_path: Path, number: signal.Signals) -> None:
    """E-18, P40: told to stop, it does not first recover for minutes what it closes then."""
    with NotifySocket(tmp_path / "notify") as systemd:
        process = start("tells", tmp_path, systemd)
        try:
            systemd.wait_for(EXTEND)
            process.send_signal(number)
            assert process.wait(60) == 0
            systemd.wait_for("STOPPING=1")
            assert "READY=1" not in systemd.lines
        finally:
            process.kill()


def test_a_socket_that_is_not_there_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """E-18: as the reason why it does not start."""
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "nobody"))
    with pytest.raises(BrokerFailed, match="NOTIFY_SOCKET: cannot notify systemd at"), BrokerProcess(tmp_path / "data"):
        raise AssertionError("it serves")

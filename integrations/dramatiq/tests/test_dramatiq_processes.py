"""The command `dramatiq`, whose workers are killed, and a broker that is killed: nothing is lost."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import dramatiq
import pytest
from dramatiq_metaq import MetaqBroker
from dramatiq_support import (
    DEADLINE_MS,
    DEADLINE_S,
    broker,
    dead_letters,
    make_broker,
    message_for,
    namespace,
    process,
    working,
)

from tests.docs.examples import ROOT
from tests.support.broker import BrokerProcess, wait_until

__all__ = ["broker", "make_broker", "namespace", "process"]  # fixtures

pytestmark = pytest.mark.slow

PROGRAM: Final = """
import os
import time
from pathlib import Path

import dramatiq
from dramatiq_metaq import MetaqBroker

dramatiq.set_broker(MetaqBroker({address!r}, namespace={namespace!r}, invisible=2))


@dramatiq.actor
def work(name):
    is_first = not any(path.name.startswith("stuck ") for path in Path("begun").iterdir())
    Path("begun", f"{{name}} {{os.getpid()}}").touch()
    while name == "stuck" and is_first and not Path("go on").exists():
        time.sleep(0.01)
    Path("done", str(name)).touch()
"""


class Command:
    """`dramatiq tasks` in a folder of its own, where each task leaves a file when it begins and when it is done."""

    def __init__(self, folder: Path, broker: BrokerProcess, namespace: str) -> None:
        self._folder = folder
        for name in ("begun", "done"):
            (folder / name).mkdir()
        address = f"metaq://{broker.registry}/?timeout_s=30"
        (folder / "tasks.py").write_text(PROGRAM.format(address=address, namespace=namespace), "utf-8")

    def begun(self) -> dict[str, int]:
        """The processes in which tasks have begun last."""
        files = sorted((self._folder / "begun").iterdir(), key=lambda path: path.stat().st_mtime_ns)
        return {path.name.split()[0]: int(path.name.split()[1]) for path in files}

    def done(self) -> set[str]:
        """The tasks that are done."""
        return {path.name for path in (self._folder / "done").iterdir()}

    def go_on(self) -> None:
        """Let the first task of the name "stuck" go on."""
        (self._folder / "go on").touch()

    @contextmanager
    def run(self) -> Iterator["subprocess.Popen[bytes]"]:
        """Run it with two processes of two threads each until the block is left; its log is in the folder."""
        words = [sys.executable, "-m", "dramatiq", "tasks", "--processes", "2", "--threads", "2", "--path", str(self._folder)]
        path = os.pathsep.join([str(ROOT), *sys.path])
        with (self._folder / "log").open("ab") as log:
            running = subprocess.Popen(
                words, cwd=self._folder, env={**os.environ, "PYTHONPATH": path}, stdout=log, stderr=log, start_new_session=True
            )
        try:
            yield running
        finally:
            with suppress(ProcessLookupError):  # it has ended, and so have its workers
                os.killpg(running.pid, signal.SIGKILL)
            running.wait()


@pytest.fixture
def command(tmp_path: Path, process: BrokerProcess, namespace: str) -> Command:
    return Command(tmp_path, process, namespace)


def send(broker: MetaqBroker, *names: str) -> None:
    for name in names:
        broker.enqueue(message_for("default", "work", name))


def test_nothing_is_lost_with_a_killed_worker(broker: MetaqBroker, command: Command) -> None:
    """The command ends when one of its workers is killed. What that had, begun or not, the next one does."""
    names = [str(number) for number in range(40)]
    with command.run() as running:
        send(broker, "stuck", *names[:20])
        wait_until(lambda: "stuck" in command.begun(), DEADLINE_S, "one is being processed")
        os.kill(command.begun()["stuck"], signal.SIGKILL)
        running.wait(DEADLINE_S)
    send(broker, *names[20:])
    with command.run():
        broker.join("default", timeout=DEADLINE_MS)
    assert command.done() == {"stuck", *names}
    assert dead_letters(broker) == []


def test_sigterm_ends_it_in_order(broker: MetaqBroker, command: Command) -> None:
    """Tasks that run are finished, the others come again at once."""
    names = [str(number) for number in range(20)]
    with command.run() as running:
        send(broker, "stuck")
        wait_until(lambda: "stuck" in command.begun(), DEADLINE_S, "one is being processed")
        running.terminate()
        command.go_on()
        assert running.wait(DEADLINE_S) == 0
    assert "stuck" in command.done()
    send(broker, *names)
    with command.run():
        broker.join("default", timeout=DEADLINE_MS)
    assert command.done() == {"stuck", *names}


def test_workers_go_on_after_the_broker_was_killed(tmp_path: Path, namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was sent, what is delayed, what is being processed and what is acked while it is away: all of it is done once."""
    monkeypatch.setattr(dramatiq.worker, "POST_PROCESS_MESSAGE_RETRY_DELAY_SECS", 0.1)
    monkeypatch.setattr(dramatiq.worker, "CONSUMER_RESTART_DELAY_SECS", 0.1)
    seen: list[str] = []
    with BrokerProcess(tmp_path / "data") as process:
        broker = MetaqBroker(f"metaq://{process.registry}/?timeout_s=1", namespace=namespace)

        @dramatiq.actor(broker=broker)
        def work(name: str) -> None:
            if name == "while":
                process.kill()
            seen.append(name)

        work.send_with_options(args=("delayed",), delay=1000)
        work.send("while")
        for number in range(10):
            work.send(str(number))
        with working(broker, threads=1):
            wait_until(lambda: not process.running, DEADLINE_S, "the broker was killed")
            process.restart(same_port=True)
            broker.join("default", timeout=DEADLINE_MS)
            work.send("after")
            broker.join("default", timeout=DEADLINE_MS)
        assert sorted(seen) == sorted(["delayed", "while", "after", *map(str, range(10))])
        broker.close()

"""The commands `dramatiq` and `dramatiq-gevent`, whose workers are killed, and a broker that is killed: nothing is lost."""

import os
import signal
from pathlib import Path
from typing import Final

import dramatiq
import pytest
from dramatiq_metaq import MetaqBroker
from dramatiq_support import DEADLINE_MS, DEADLINE_S, broker, dead_letters, make_broker, message_for, working

from tests.support.broker import BrokerProcess, wait_until
from tests.support.workers import TaskFolder

__all__ = ["broker", "make_broker"]  # fixtures

pytestmark = pytest.mark.slow

FLAGS: Final = ("tasks", "--processes", "2", "--threads", "2")
each_command = pytest.mark.parametrize("command", ["dramatiq", "dramatiq-gevent"])
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


@pytest.fixture
def folder(tmp_path: Path, process: BrokerProcess, namespace: str) -> TaskFolder:
    return TaskFolder(tmp_path, PROGRAM.format(address=f"metaq://{process.registry}/?timeout_s=30", namespace=namespace))


def send(broker: MetaqBroker, *names: str) -> None:
    for name in names:
        broker.enqueue(message_for("default", "work", name))


@each_command
def test_nothing_is_lost_with_a_killed_worker(broker: MetaqBroker, folder: TaskFolder, command: str) -> None:
    """The command ends when one of its workers is killed. What that had, begun or not, the next one does."""
    names = [str(number) for number in range(40)]
    with folder.run(command, *FLAGS) as running:
        send(broker, "stuck", *names[:20])
        wait_until(lambda: "stuck" in folder.begun(), DEADLINE_S, "one is being processed")
        os.kill(folder.begun()["stuck"], signal.SIGKILL)
        running.wait(DEADLINE_S)
    send(broker, *names[20:])
    with folder.run(command, *FLAGS):
        broker.join("default", timeout=DEADLINE_MS)
    assert folder.done() == {"stuck", *names}
    assert dead_letters(broker) == []


@each_command
def test_sigterm_ends_it_in_order(broker: MetaqBroker, folder: TaskFolder, command: str) -> None:
    """Tasks that run are finished, the others come again at once."""
    names = [str(number) for number in range(20)]
    with folder.run(command, *FLAGS) as running:
        send(broker, "stuck")
        wait_until(lambda: "stuck" in folder.begun(), DEADLINE_S, "one is being processed")
        running.terminate()
        folder.go_on()
        assert running.wait(DEADLINE_S) == 0
    assert "stuck" in folder.done()
    send(broker, *names)
    with folder.run(command, *FLAGS):
        broker.join("default", timeout=DEADLINE_MS)
    assert folder.done() == {"stuck", *names}


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

"""The command `taskiq worker`, whose workers are killed, and a broker that is killed: nothing is lost."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import pytest
from taskiq import AsyncTaskiqDecoratedTask
from taskiq_metaq import MetaqBroker
from taskiq_support import DEADLINE_S, broker, process, queue, run, started, until, until_done, working

from tests.docs.examples import ROOT
from tests.support.broker import BrokerProcess

__all__ = ["broker", "process", "queue"]  # fixtures

pytestmark = pytest.mark.slow

PROGRAM: Final = """
import asyncio
import os
from pathlib import Path

from taskiq_metaq import MetaqBroker

broker = MetaqBroker({address!r}, queue={queue!r}, invisible=2)


@broker.task(task_name="work")
async def work(name: str) -> None:
    is_first = not any(path.name.startswith("stuck ") for path in Path("begun").iterdir())
    Path("begun", f"{{name}} {{os.getpid()}}").touch()
    while name == "stuck" and is_first and not Path("go on").exists():
        await asyncio.sleep(0.01)
    Path("done", name).touch()
"""


class Command:
    """`taskiq worker` in a folder of its own, where each task leaves a file when it begins and when it is done."""

    def __init__(self, folder: Path, broker: BrokerProcess, queue: str) -> None:
        self._folder = folder
        for name in ("begun", "done"):
            (folder / name).mkdir()
        address = f"metaq://{broker.registry}/?timeout_s=30"
        (folder / "tasks.py").write_text(PROGRAM.format(address=address, queue=queue), "utf-8")

    def begun(self) -> dict[str, int]:
        """The processes in which tasks have begun."""
        return {path.name.split()[0]: int(path.name.split()[1]) for path in (self._folder / "begun").iterdir()}

    def done(self) -> set[str]:
        """The tasks that are done."""
        return {path.name for path in (self._folder / "done").iterdir()}

    def go_on(self) -> None:
        """Let the first task of the name "stuck" go on."""
        (self._folder / "go on").touch()

    @contextmanager
    def run(self) -> Iterator["subprocess.Popen[bytes]"]:
        """Run it with two processes until the block is left; its log is in the folder."""
        words = [sys.executable, "-m", "taskiq", "worker", "tasks:broker", "--workers", "2", "--max-async-tasks", "2"]
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
def command(tmp_path: Path, process: BrokerProcess, queue: str) -> Command:
    return Command(tmp_path, process, queue)


def work_of(broker: MetaqBroker) -> AsyncTaskiqDecoratedTask[[str], None]:
    """The task of the program, to send it."""

    @broker.task(task_name="work")
    def work(name: str) -> None: ...

    return work


def test_nothing_is_lost_with_a_killed_worker(broker: MetaqBroker, command: Command) -> None:
    """What it had, begun or not, others do; the command starts a new one."""
    names = [str(number) for number in range(40)]
    task = work_of(broker)

    async def work() -> None:
        async with started(broker):
            for name in ("stuck", *names[:20]):
                await task.kiq(name)
            with command.run():
                await until(lambda: "stuck" in command.begun())
                os.kill(command.begun()["stuck"], signal.SIGKILL)
                for name in names[20:]:
                    await task.kiq(name)
                await until_done(broker)
            assert await broker.client.admin().dead_letters(broker.queue) == []

    run(work)
    assert command.done() == {"stuck", *names}


def test_sigterm_ends_it_in_order(broker: MetaqBroker, command: Command) -> None:
    """Tasks that run are finished, the others are left to the next worker."""
    names = [str(number) for number in range(20)]
    task = work_of(broker)

    async def work() -> None:
        async with started(broker):
            with command.run() as running:
                await task.kiq("stuck")
                await until(lambda: "stuck" in command.begun())
                running.terminate()
                command.go_on()
                await asyncio.to_thread(running.wait, DEADLINE_S)
            assert "stuck" in command.done()
            for name in names:
                await task.kiq(name)
            with command.run():
                await until_done(broker)

    run(work)
    assert command.done() == {"stuck", *names}


def test_workers_go_on_after_the_broker_was_killed(tmp_path: Path, queue: str) -> None:
    """What was sent, what is delayed, what runs and what is acked while it is away: all of it is done once."""
    seen: list[str] = []

    async def work(process: BrokerProcess) -> None:
        broker = MetaqBroker(f"metaq://{process.registry}/?timeout_s=60", queue=queue)
        went, is_back = asyncio.Event(), asyncio.Event()

        @broker.task(task_name="work")
        async def one(name: str) -> None:
            if name == "while":
                went.set()
                await is_back.wait()
            seen.append(name)

        async with started(broker), working(broker, at_once=2):
            await one.kicker().with_labels(delay=1).kiq("delayed")
            await one.kiq("while")
            for number in range(10):
                await one.kiq(str(number))
            await went.wait()
            await asyncio.to_thread(process.kill)
            is_back.set()
            await until(lambda: "while" in seen)
            await asyncio.to_thread(process.restart, same_port=True)
            await until(lambda: len(seen) == 12)
            await one.kiq("after")
            await until_done(broker)

    with BrokerProcess(tmp_path / "data") as process:
        run(lambda: work(process))
    assert sorted(seen) == sorted(["delayed", "while", "after", *map(str, range(10))])

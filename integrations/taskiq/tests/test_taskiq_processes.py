"""The command `taskiq worker`, whose workers are killed, and a broker that is killed: nothing is lost."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Final

import pytest
from taskiq import AsyncTaskiqDecoratedTask
from taskiq_metaq import MetaqBroker
from taskiq_support import DEADLINE_S, broker, run, started, until, until_done, working

from tests.support.broker import BrokerProcess
from tests.support.workers import TaskFolder

__all__ = ["broker"]  # a fixture

pytestmark = pytest.mark.slow

COMMAND: Final = ("taskiq", "worker", "tasks:broker", "--workers", "2", "--max-async-tasks", "2")
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


@pytest.fixture
def folder(tmp_path: Path, process: BrokerProcess, namespace: str) -> TaskFolder:
    return TaskFolder(tmp_path, PROGRAM.format(address=f"metaq://{process.registry}/?timeout_s=30", queue=namespace))


def work_of(broker: MetaqBroker) -> AsyncTaskiqDecoratedTask[[str], None]:
    """The task of the program, to send it."""

    @broker.task(task_name="work")
    def work(name: str) -> None: ...

    return work


def test_nothing_is_lost_with_a_killed_worker(broker: MetaqBroker, folder: TaskFolder) -> None:
    """What it had, begun or not, others do; the command starts a new one."""
    names = [str(number) for number in range(40)]
    task = work_of(broker)

    async def work() -> None:
        async with started(broker):
            for name in ("stuck", *names[:20]):
                await task.kiq(name)
            with folder.run(*COMMAND):
                await until(lambda: "stuck" in folder.begun())
                os.kill(folder.begun()["stuck"], signal.SIGKILL)
                for name in names[20:]:
                    await task.kiq(name)
                await until_done(broker)
            assert await broker.client.admin().dead_letters(broker.queue) == []

    run(work)
    assert folder.done() == {"stuck", *names}


def test_sigterm_ends_it_in_order(broker: MetaqBroker, folder: TaskFolder) -> None:
    """Tasks that run are finished, the others are left to the next worker."""
    names = [str(number) for number in range(20)]
    task = work_of(broker)

    async def work() -> None:
        async with started(broker):
            with folder.run(*COMMAND) as running:
                await task.kiq("stuck")
                await until(lambda: "stuck" in folder.begun())
                running.terminate()
                folder.go_on()
                await asyncio.to_thread(running.wait, DEADLINE_S)
            assert "stuck" in folder.done()
            for name in names:
                await task.kiq(name)
            with folder.run(*COMMAND):
                await until_done(broker)

    run(work)
    assert folder.done() == {"stuck", *names}


def test_workers_go_on_after_the_broker_was_killed(tmp_path: Path, namespace: str) -> None:
    """What was sent, what is delayed, what runs and what is acked while it is away: all of it is done once."""
    seen: list[str] = []

    async def work(process: BrokerProcess) -> None:
        broker = MetaqBroker(f"metaq://{process.registry}/?timeout_s=60", queue=namespace)
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

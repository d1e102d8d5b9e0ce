"""Workers of Celery as processes, what sends to them, and the journal that tasks write."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import kombu_metaq  # noqa: F401 - who makes connections before messages has to name the transport
import pytest
from celery import Celery

from tests.support.broker import BrokerProcess, wait_until
from tests.support.workers import WorkerProcess

START_S: Final = 120.0
DONE_S: Final = 120.0
STOP_S: Final = 60.0
POOLS: Final = {"prefork": ("-P", "prefork", "-c", "2"), "gevent": ("-P", "gevent", "-c", "4")}
"""The flags for a small worker of each kind."""


class Journal:
    """The lines that tasks have noted."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    def lines(self) -> list[str]:
        return self.path.read_text("utf-8").splitlines()

    def counts(self) -> Counter[str]:
        return Counter(self.lines())

    def wait_for(self, *lines: str, times: int = 1) -> None:
        """Wait until each line was noted so many times."""
        wait_until(lambda: all(self.counts()[line] >= times for line in lines), DONE_S, f"{lines} in {self.path}")


class Place:
    """The broker, the results and the journal that workers and programs of one test share."""

    def __init__(self, url: str, journal: Journal, results: str = "", **settings: Any) -> None:
        self.url = url
        self.journal = journal
        self.environment = {"BROKER": url, "JOURNAL": str(journal.path), "CELERY_SETTINGS": json.dumps(settings)}
        if results:
            self.environment["BACKEND"] = results
        self.app = Celery("kombu_tasks", broker=url, backend=results or None)
        self.app.conf.update(settings)

    def send(self, task: str, *arguments: Any, **options: Any) -> Any:
        """Send a task of the application by its name, and return its result to come."""
        return self.app.send_task(f"kombu_tasks.{task}", arguments, **options)

    def close(self) -> None:
        self.app.close()


def outcome(result: Any) -> Any:
    """Return what a task has returned, or raise what it has raised.

    Its state is asked for: Celery's client of Redis waits for a message, and misses one that comes before it has subscribed, as
    it does after it has sent a chain or a chord.
    """
    wait_until(result.ready, DONE_S, f"a result of {result}", 0.02)
    return result.get(timeout=DONE_S)


class Worker(WorkerProcess):
    """``celery worker``, or another command, with the tasks of the tests."""

    def __init__(self, place: Place, log: Path, *flags: str, name: str = "one", command: str = "worker") -> None:
        named = ["-n", f"{name}@tests"] if command == "worker" else []
        super().__init__(log, "celery", "-A", "kombu_tasks", command, "-l", "INFO", *named, *flags, **place.environment)

    def text(self) -> str:
        return self.log.read_text("utf-8", errors="replace")

    def wait_ready(self) -> "Worker":
        self.wait_for(" ready.")
        return self

    def wait_for(self, text: str) -> None:
        """Wait until the worker has logged a text."""
        wait_until(lambda: text in self.text() or self.process.poll() is not None, START_S, f"{text!r} in {self.log}")
        assert text in self.text(), self.text()

    def terminate(self) -> int:
        """Let the worker end what it has begun, and return its exit code."""
        self.process.terminate()
        return self.process.wait(STOP_S)


@pytest.fixture
def url(process: BrokerProcess, namespace: str) -> str:
    """A virtual host of the test's own."""
    return f"metaq://{process.registry}/{namespace}"


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "journal")


@pytest.fixture
def workers() -> Iterator[list[Worker]]:
    """The workers that a test appends are killed at its end."""
    started: list[Worker] = []
    yield started
    for worker in started:
        worker.kill()

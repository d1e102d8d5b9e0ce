"""Rates of Celery's tasks on metaq beside Redis, and the tasks that each loses when it is killed.

    PYTHONPATH=. python integrations/kombu/benchmarks/rates.py

Starts each server on this machine, in every round one after the other. A program sends tasks that do nothing, one after the
other; then a worker does them. It prints the medians of the rounds, and of the shares of Redis's rates of the same round. At
the end a program sends until its server is killed with SIGKILL and started again: lost are the tasks whose sends had returned
and that no worker gets. It writes that to ``benchmarks/results``, as ``python -m benchmarks`` does, in six minutes. Broker and
programs run in the form that is installed.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from celery import Celery
from celery import __version__ as celery_version
from kombu.exceptions import OperationalError
from rich.console import Console

from benchmarks.figures import Check
from benchmarks.peers import Level, redis
from benchmarks.report import Report, Table, describe_machine, print_report, save
from tests.support.broker import BrokerProcess, wait_until
from tests.support.ports import free_ports

POOLS: Final = {"prefork": 2, "gevent": 100}
HERE: Final = Path(__file__)
RESULTS: Final = HERE.parents[3] / "benchmarks" / "results"
TASKS: Final = 1_200
ROUNDS: Final = 3
LEAST: Final = 0.7
"""The share of the tasks that a worker does with Redis, its own configuration, that it must do with metaq."""
WORKER_S: Final = 120.0
BEFORE_KILL: Final = 2_000
"""The tasks that are sent before a server is killed."""

app = Celery("rates", broker=os.environ.get("RATES_BROKER"))
app.conf.update(task_ignore_result=True, broker_connection_retry_on_startup=True, broker_transport_options={"timeout": 2})


@app.task
def nothing() -> None:
    """Do nothing."""


@app.task
def clock(path: str) -> None:
    """Write down the time."""
    Path(path).write_text(str(time.time()), "utf-8")


@app.task
def note(path: str, name: str) -> None:
    """Write down a name."""
    with Path(path).open("a", encoding="utf-8") as file:
        file.write(f"{name}\n")


class Metaq(BrokerProcess):
    """A broker of metaq, by the name that Celery has for it."""

    @property
    def url(self) -> str:
        return f"metaq://{self.registry}//"


class Redis:
    """``redis-server`` over a folder, from entering the ``with`` block until leaving it."""

    def __init__(self, folder: Path, *flags: str) -> None:
        port = free_ports(1)[0]
        self.url = f"redis://127.0.0.1:{port}/0"
        self._log = folder / "log"
        self._command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), *flags]

    def __enter__(self) -> "Redis":
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        wait_until(lambda: b"Ready to accept connections" in self._log.read_bytes(), WORKER_S, f"it is ready, see {self._log}")
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def restart(self, *, same_port: bool) -> None:
        self.kill()
        self.__enter__()


Server = Metaq | Redis
SERVERS: Final[dict[str, Callable[[Path], Server]]] = {
    "Redis": Redis,
    "Redis, `appendfsync always`": lambda folder: Redis(folder, "--appendonly", "yes", "--appendfsync", "always"),
    "metaq, `durability: memory`": lambda folder: Metaq(folder / "data", durability="memory"),
    "metaq, `durability: disk`": lambda folder: Metaq(folder / "data", durability="disk"),
}
"""Redis as it is without a configuration comes first: shares are of its rates."""


COLUMNS: Final = ("sent/s", "done/s, prefork", "done/s, gevent")
Rates = tuple[float, float, float]
"""One round of a server, in the order of the columns."""


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=TASKS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    machine = describe_machine(Path(tempfile.gettempdir()), [redis("always", Level.DISK)])
    found: dict[str, list[Rates]] = {name: [] for name in SERVERS}
    for _ in range(arguments.rounds):
        for name, make in SERVERS.items():
            with tempfile.TemporaryDirectory() as folder, make(Path(folder)) as server:
                rates = [rate for pool in POOLS for rate in measured(server.url, pool, arguments.tasks)]
            found[name].append((statistics.mean(rates[::2]), rates[1], rates[3]))
            print(f"{name:30}", *(f"{rate:7.0f}" for rate in found[name][-1]), f"load {os.getloadavg()[0]:.1f}", flush=True)
    made = report(found, {name: lost(make) for name, make in SERVERS.items()}, arguments.tasks)
    print_report(made, Console())
    print(save(made, {**machine, "celery": celery_version}, arguments.out))


def report(found: dict[str, list[Rates]], losses: dict[str, str], tasks: int) -> Report:
    """Return the medians of the rounds, with the shares of the first server's rates in the same rounds."""
    first, *others = found
    shares = {
        (name, column): statistics.median(each[index] / other[index] for each, other in zip(rounds, found[first], strict=True))
        for name, rounds in found.items()
        for index, column in enumerate(COLUMNS)
    }
    rows = [
        [
            name,
            *(
                f"{statistics.median(each[index] for each in rounds):,.0f} ({shares[name, column]:.2f})"
                for index, column in enumerate(COLUMNS)
            ),
            losses[name],
        ]
        for name, rounds in found.items()
    ]
    return Report(
        "celery",
        {
            "rounds": f"{len(found[first])}, all servers in turn in each, started anew; {tasks} tasks that do nothing",
            "figures": f"medians; in brackets the median of the shares of the rate of {first} in the same round",
        },
        [Table("Tasks a second", ["", *COLUMNS, "lost of those sent"], rows)],
        [
            Check(f"{name}, {column}: of {first}", shares[name, column], "at least", must=LEAST, unit="×")
            for name in others
            if name.startswith("metaq")
            for column in COLUMNS[1:]
        ],
        [
            {"server": name, "round": number, **dict(zip(COLUMNS, rates, strict=True))}
            for name, rounds in found.items()
            for number, rates in enumerate(rounds, 1)
        ],
    )


def measured(url: str, pool: str, tasks: int) -> tuple[float, float]:
    """Return the tasks a second that were sent, and done by a worker that begins when all are there."""
    with tempfile.TemporaryDirectory() as folder:
        first, last = Path(folder, "first"), Path(folder, "last")
        with sending(url, pool) as send:
            send(clock, str(first))
            begin = time.monotonic()
            for _ in range(tasks):
                send(nothing)
            sent = tasks / (time.monotonic() - begin)
            send(clock, str(last))
        with working(url, pool, Path(folder, "log")):
            wait_until(lambda: last.exists() and bool(last.read_text("utf-8")), WORKER_S, "all is done", 0.05)
        return sent, tasks / (float(last.read_text("utf-8")) - float(first.read_text("utf-8")))


def lost(make: Callable[[Path], Server]) -> str:
    """Return how many tasks are lost when a server is killed while a program sends, and how many it had taken."""
    with tempfile.TemporaryDirectory() as folder, make(Path(folder)) as server:
        noted = Path(folder, "noted")
        noted.touch()
        taken: list[str] = []
        try:
            with sending(server.url, "killed", retry=False) as send:
                while True:
                    if len(taken) == BEFORE_KILL:
                        threading.Thread(target=server.kill).start()
                    send(note, str(noted), str(len(taken)))
                    taken.append(str(len(taken)))
        except OperationalError:
            server.restart(same_port=True)
        with working(server.url, "killed", Path(folder, "log"), "gevent"), sending(server.url, "killed") as send:
            send(note, str(noted), "last")
            wait_until(lambda: "last\n" in noted.read_text("utf-8"), WORKER_S, "all is done", 0.05)
            missing = set(taken) - set(noted.read_text("utf-8").splitlines())
        return f"{len(missing):,} of {len(taken):,}"


@contextmanager
def sending(url: str, queue: str, **options: Any) -> Iterator[Callable[..., None]]:
    """A function that sends a task with its arguments, over one connection."""
    app.conf.update(broker_url=url, task_default_queue=queue)
    with app.connection_for_write() as connection, app.amqp.Producer(connection.default_channel) as producer:
        yield lambda task, *arguments: task.apply_async(arguments, producer=producer, queue=queue, **options)


@contextmanager
def working(url: str, queue: str, log: Path, pool: str = "") -> Iterator[None]:
    """A worker of a queue, which has the name of the pool unless that is given."""
    pool = pool or queue
    environment = {**os.environ, "RATES_BROKER": url, "PYTHONPATH": os.pathsep.join([str(HERE.parent), *sys.path])}
    command = [sys.executable, "-m", "celery", "-A", "rates", "worker", "-P", pool, "-c", str(POOLS[pool]), "-Q", queue]
    with log.open("wb") as output:
        worker = subprocess.Popen(command, env=environment, cwd=HERE.parent, stdout=output, stderr=output)
        try:
            yield
        finally:
            worker.terminate()
            worker.wait()


if __name__ == "__main__":
    main()

"""Workers and brokers that are killed: no task is lost, and none runs twice unless its lease has ended. And priorities."""

import os
import signal
from pathlib import Path
from typing import Final

import pytest
from kombu import Queue
from kombu_support import DONE_S, POOLS, Journal, Place, Worker, journal, url, workers

from tests.support.broker import BrokerProcess, wait_until

__all__ = ["journal", "url", "workers"]  # fixtures

pytestmark = pytest.mark.slow

LEASE_S: Final = 3
TASKS: Final = int(os.environ.get("KOMBU_TASKS", "60"))
each_pool = pytest.mark.parametrize("pool", sorted(POOLS))


@each_pool
def test_tasks_of_a_worker_that_is_killed_come_again(
    url: str, journal: Journal, tmp_path: Path, workers: list[Worker], pool: str
) -> None:
    place = Place(url, journal, broker_transport_options={"visibility_timeout": LEASE_S})
    first = Worker(place, tmp_path / "first.log", *POOLS[pool])
    workers.append(first)
    first.wait_ready()
    place.send("dawdle_late", "long", 2.5 * LEASE_S)
    names = [f"short-{number}" for number in range(4)]
    for name in names:
        place.send("dawdle_late", name, 0.1)
    journal.wait_for("begin long", *(f"end {name}" for name in names))
    first.kill()
    second = Worker(place, tmp_path / "second.log", *POOLS[pool])
    workers.append(second)
    journal.wait_for("end long")
    counts = journal.counts()
    assert counts["begin long"] == 2
    assert counts["end long"] == 1
    assert all(counts[f"begin {name}"] <= 2 for name in names)  # an ack may have been on its way
    place.close()


@each_pool
def test_a_task_that_outlasts_its_lease_many_times_runs_once(
    url: str, journal: Journal, tmp_path: Path, workers: list[Worker], pool: str
) -> None:
    # not shorter: on a busy machine a worker may stand still for a second, and its lease then ends
    place = Place(url, journal, broker_transport_options={"visibility_timeout": 3})
    workers += [Worker(place, tmp_path / f"{name}.log", *POOLS[pool], name=name) for name in ("one", "two")]
    for worker in workers:
        worker.wait_ready()
    place.send("dawdle_late", "long", 10.0)
    journal.wait_for("end long")
    assert journal.counts()["begin long"] == 1
    place.close()


def test_a_task_whose_process_is_killed_comes_again(url: str, journal: Journal, tmp_path: Path, workers: list[Worker]) -> None:
    place = Place(url, journal)
    workers.append(Worker(place, tmp_path / "worker.log", "-P", "prefork", "-c", "1"))
    workers[0].wait_ready()
    place.send("suicide", "once")
    journal.wait_for("survived once")
    assert journal.counts()["begin once"] == 2
    place.close()


@each_pool
def test_a_broker_that_is_killed_loses_no_task_and_repeats_none(
    tmp_path: Path, journal: Journal, workers: list[Worker], pool: str
) -> None:
    with BrokerProcess(tmp_path / "data") as broker:
        place = Place(f"metaq://{broker.registry}//", journal)
        workers.append(Worker(place, tmp_path / "worker.log", *POOLS[pool]))
        workers[0].wait_ready()
        names = [f"task-{number}" for number in range(TASKS)]
        for name in names[: TASKS // 2]:
            place.send("mark", name)
        place.send("mark", "later", countdown=2.0)
        broker.restart(same_port=True)
        for name in names[TASKS // 2 :]:
            place.send("mark", name)
        journal.wait_for(*names, "later")
        workers[0].terminate()
        assert set(journal.counts().values()) == {1}
        place.close()


def test_priorities_decide_about_the_order(url: str, journal: Journal, tmp_path: Path, workers: list[Worker]) -> None:
    place = Place(url, journal, worker_prefetch_multiplier=1)
    levels = [0, 9, 3, 6, 9, 0, 3]
    queue = Queue("levels", queue_arguments={"x-max-priority": 9})
    with place.app.connection_for_write() as connection:
        queue(connection.default_channel).declare()
    for number, level in enumerate(levels):
        place.send("mark", f"{level}-{number}", queue="levels", priority=level)
    workers.append(Worker(place, tmp_path / "worker.log", "-P", "solo", "-Q", "levels"))
    wait_until(lambda: len(journal.lines()) == len(levels), DONE_S, "all are done")
    assert journal.lines() == ["9-1", "9-4", "6-3", "3-2", "3-6", "0-0", "0-5"]
    place.close()


def test_a_worker_waits_for_a_broker_that_is_not_there_yet(tmp_path: Path, journal: Journal, workers: list[Worker]) -> None:
    with BrokerProcess(tmp_path / "data") as broker:
        address = broker.registry
        broker.kill()
        place = Place(f"metaq://{address}//", journal)
        workers.append(Worker(place, tmp_path / "worker.log", "-P", "solo"))
        workers[0].wait_for("Cannot connect to metaq://")
        broker.restart(same_port=True)
        workers[0].wait_ready()
        place.send("mark", "here")
        journal.wait_for("here")
        place.close()


def test_a_signal_to_end_lets_a_task_end(url: str, journal: Journal, tmp_path: Path, workers: list[Worker]) -> None:
    place = Place(url, journal)
    worker = Worker(place, tmp_path / "worker.log", "-P", "solo")
    workers.append(worker)
    worker.wait_ready()
    place.send("dawdle_late", "last", 1.0)
    journal.wait_for("begin last")
    worker.process.send_signal(signal.SIGTERM)
    journal.wait_for("end last")
    worker.process.wait(DONE_S)
    with place.app.connection_for_read() as connection:
        assert connection.default_channel.queue_declare("celery", passive=True).message_count == 0
    place.close()

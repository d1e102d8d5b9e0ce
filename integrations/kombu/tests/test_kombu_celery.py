"""Celery's own scenarios: real workers of both kinds of pool on a real broker, with results in Redis."""

import os
import subprocess
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import pytest
from celery import chain, chord, group
from celery.exceptions import TaskRevokedError
from kombu.common import Broadcast
from kombu_support import DONE_S, Journal, Place, Worker, outcome, workers

import metaq
from tests.support.broker import BrokerProcess, wait_until
from tests.support.ports import free_ports

__all__ = ["workers"]  # a fixture

pytestmark = [pytest.mark.slow, pytest.mark.partner("redis-server")]

TASKS: Final = int(os.environ.get("KOMBU_TASKS", "60"))
"""The tasks of a canvas; `make test-long` says 1,000."""
POOLS: Final = {"prefork": ("-P", "prefork", "-c", "2"), "gevent": ("-P", "gevent", "-c", "20")}
QUEUES: Final = ("-Q", "celery,pictures,everyone")


class Shop(Place):
    """A place with one worker, and the broker behind it."""

    def __init__(self, broker: BrokerProcess, folder: Path, pool: str, results: str) -> None:
        super().__init__(f"metaq://{broker.registry}/{pool}", Journal(folder / "journal"), results)
        self.broker = broker
        self.pool = pool
        self.folder = folder
        self.worker = Worker(self, folder / "worker.log", *POOLS[pool], *QUEUES, "-E").wait_ready()

    def signature(self, task: str, *arguments: Any, **options: Any) -> Any:
        return self.app.signature(f"kombu_tasks.{task}", args=arguments, app=self.app, **options)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a Redis that keeps results."""
    port = free_ports(1)[0]
    folder = tmp_path_factory.mktemp("results")
    log = folder / "log"
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    with log.open("wb") as output:
        server = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            wait_until(lambda: b"Ready to accept connections" in log.read_bytes(), DONE_S, f"redis is ready, see {log}")
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            server.kill()
            server.wait()


@pytest.fixture(scope="module", params=sorted(POOLS))
def shop(
    process: BrokerProcess, results: str, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Shop]:
    made = Shop(process, tmp_path_factory.mktemp(request.param), request.param, results)
    yield made
    made.worker.kill()
    made.close()


def test_tasks_are_done_and_results_come(shop: Shop) -> None:
    assert outcome(shop.send("add", 1, 2)) == 3
    added = [shop.send("add", number, 1) for number in range(20)]
    assert [outcome(result) for result in added] == list(range(1, 21))


def test_a_countdown_is_kept_by_the_broker(shop: Shop) -> None:
    begin = time.monotonic()
    later = shop.send("add", 1, 1, countdown=1.5)
    assert outcome(shop.send("add", 2, 2)) == 4
    assert outcome(later) == 2
    assert time.monotonic() - begin >= 1.5


def test_90_days_wait_in_the_broker_and_not_in_a_worker(shop: Shop) -> None:
    far = datetime.now(UTC) + timedelta(days=90)
    shop.send("mark", "far", eta=far)
    with metaq.connect(shop.broker.registry) as client:
        due_ms = [row.due_ms for row in client.admin().timers().pending(shop.broker.address)]
    assert any(abs(due - far.timestamp() * 1000) < 1000 for due in due_ms)
    scheduled = shop.app.control.inspect(timeout=2.0, limit=1).scheduled()
    assert scheduled == {"one@tests": []}


def test_retries_come_with_their_pauses(shop: Shop) -> None:
    assert outcome(shop.send("stumble", f"stumble-{shop.pool}", 3)) == 3
    assert shop.journal.counts()[f"try stumble-{shop.pool}"] == 4


def test_chains_groups_and_chords(shop: Shop) -> None:
    s = shop.signature
    assert outcome(chain(s("add", 1, 2), s("add", 3), s("add", 4)).apply_async()) == 10
    assert outcome(group(s("add", n, n) for n in range(5)).apply_async()) == [0, 2, 4, 6, 8]
    assert outcome(chord([s("add", n, n) for n in range(5)], s("total")).apply_async()) == 20


def test_a_canvas_of_many_tasks_does_each_once(shop: Shop) -> None:
    names = [f"canvas-{shop.pool}-{number}" for number in range(TASKS)]
    done = outcome(group(shop.signature("mark", name) for name in names).apply_async())
    assert done == names
    counts = shop.journal.counts()
    assert {counts[name] for name in names} == {1}


def test_a_task_that_is_revoked_does_not_run(shop: Shop) -> None:
    revoked = shop.send("mark", "revoked", countdown=2.0)
    shop.app.control.revoke(revoked.id)
    with pytest.raises(TaskRevokedError):
        outcome(revoked)
    assert "revoked" not in shop.journal.lines()


def test_rate_limits_hold(shop: Shop) -> None:
    times = sorted(outcome(result) for result in [shop.send("limited", str(n)) for n in range(6)])
    assert times[-1] - times[0] >= 0.7  # 5 a second


def has_queue(shop: Shop, name: str) -> bool:
    """Return whether the worker consumes a queue. It answers a command before it has carried it out."""
    queues = shop.app.control.inspect(timeout=30.0, limit=1).active_queues()["one@tests"]
    return name in {queue["name"] for queue in queues}


def test_remote_control_and_inspection(shop: Shop) -> None:
    control = shop.app.control
    assert control.ping(timeout=30.0, limit=1) == [{"one@tests": {"ok": "pong"}}]
    asked = control.inspect(timeout=30.0, limit=1)
    assert has_queue(shop, "celery")
    assert has_queue(shop, "pictures")
    assert asked.stats()["one@tests"]["broker"]["transport"] == "metaq"
    assert "kombu_tasks.add" in asked.registered()["one@tests"]
    assert control.add_consumer("added", reply=True, timeout=30.0, limit=1)[0]["one@tests"]["ok"]
    assert outcome(shop.send("add", 5, 5, queue="added")) == 10
    assert control.cancel_consumer("added", reply=True, timeout=30.0, limit=1)[0]["one@tests"]["ok"]
    wait_until(
        lambda: "added" not in {queue["name"] for queue in asked.active_queues()["one@tests"]}, DONE_S, "it is cancelled"
    )
    shop.send("mark", "nobody takes it", queue="added")
    assert outcome(shop.send("add", 6, 6)) == 12
    assert "nobody takes it" not in shop.journal.lines()


def test_events_show_workers_and_tasks(shop: Shop) -> None:
    seen: list[str] = []
    with shop.app.connection() as connection:
        receiver = shop.app.events.Receiver(connection, handlers={"*": lambda event: seen.append(event["type"])})
        with receiver.consumer_context() as (own, _, _):
            outcome(shop.send("add", 1, 1))
            while not {"task-received", "task-started", "task-succeeded", "worker-heartbeat"} <= set(seen):
                own.drain_events(timeout=DONE_S)


def test_a_topic_exchange_leads_to_its_queue(shop: Shop) -> None:
    assert outcome(shop.send("add", 7, 7, queue="pictures")) == 14


def test_a_second_worker_meets_the_first_and_both_hear_a_broadcast(shop: Shop, workers: list[Worker]) -> None:
    second = Worker(shop, shop.folder / "second.log", *POOLS[shop.pool], "-Q", "everyone", name="two")
    workers.append(second)
    second.wait_ready()
    assert "mingle: sync with 1 nodes" in second.text()
    shop.worker.wait_for("sync with two@tests")
    shop.send("shout", "to all", queue=Broadcast("everyone"))
    shop.journal.wait_for("to all", times=2)


def test_beat_sends_what_is_due(shop: Shop, workers: list[Worker]) -> None:
    schedule = {"tick": {"task": "kombu_tasks.mark", "schedule": 0.5, "args": ["tick"]}}
    place = Place(shop.url, shop.journal, beat_schedule=schedule)
    workers.append(
        Worker(place, shop.folder / "beat.log", "-s", str(shop.folder / "beat"), "--max-interval", "1", command="beat")
    )
    shop.journal.wait_for("tick", times=3)
    place.close()


def test_a_worker_that_stops_gives_back_what_it_has_not_begun(shop: Shop, workers: list[Worker], tmp_path: Path) -> None:
    place = Place(f"{shop.url}-stop", Journal(tmp_path / "journal"))
    first = Worker(place, tmp_path / "first.log", "-P", shop.pool, "-c", "1", "--prefetch-multiplier", "10")
    workers.append(first)
    first.wait_ready()
    names = [f"stop-{number}" for number in range(5)]
    for name in names:
        place.send("dawdle", name, 0.5)
    place.journal.wait_for("begin stop-0")
    assert first.terminate() == 0
    begun = place.journal.counts()
    second = Worker(place, tmp_path / "second.log", *POOLS[shop.pool])
    workers.append(second)
    place.journal.wait_for(*(f"end {name}" for name in names))
    assert begun["begin stop-4"] == 0
    assert set(place.journal.counts().values()) == {1}
    place.close()

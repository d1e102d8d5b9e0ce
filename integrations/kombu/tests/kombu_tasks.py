"""The Celery application of the tests: where its broker is, and what differs from the defaults, comes from the environment."""

import json
import os
import signal
import time
from typing import Any

from celery import Celery, Task
from kombu import Exchange, Queue
from kombu.common import Broadcast

app = Celery("kombu_tasks", broker=os.environ["BROKER"], backend=os.environ.get("BACKEND"))
app.conf.update(
    broker_connection_retry_on_startup=True,
    result_expires=3600,
    task_queues=[
        Queue("celery"),
        Queue("levels", queue_arguments={"x-max-priority": 9}),
        Queue("pictures", Exchange("media", type="topic"), routing_key="media.#"),
        Broadcast("everyone"),
    ],
    task_routes={"kombu_tasks.shout": {"queue": "everyone", "exchange": "everyone"}},
    **json.loads(os.environ.get("CELERY_SETTINGS", "{}")),
)


def note(line: str) -> None:
    """Append a line to the journal of the test, in one write, which other processes do not mix with theirs."""
    with open(os.environ["JOURNAL"], "a", encoding="utf-8") as journal:
        journal.write(f"{line}\n")


@app.task
def add(left: int, right: int) -> int:
    return left + right


@app.task
def total(numbers: list[int]) -> int:
    return sum(numbers)


@app.task
def mark(name: str) -> str:
    note(name)
    return name


@app.task(acks_late=True, reject_on_worker_lost=True)
def mark_late(name: str) -> None:
    note(name)


@app.task
def shout(name: str) -> None:
    note(name)


@app.task
def dawdle(name: str, seconds: float) -> str:
    note(f"begin {name}")
    time.sleep(seconds)
    note(f"end {name}")
    return name


@app.task(acks_late=True, reject_on_worker_lost=True)
def dawdle_late(name: str, seconds: float) -> str:
    note(f"begin {name}")
    time.sleep(seconds)
    note(f"end {name}")
    return name


@app.task(bind=True, max_retries=5, default_retry_delay=0.2)
def stumble(self: "Task[Any, Any]", name: str, times: int) -> int:
    note(f"try {name}")
    if self.request.retries < times:
        raise self.retry(countdown=0.1 * 2**self.request.retries)
    return int(self.request.retries)


@app.task(rate_limit="5/s")
def limited(name: str) -> float:
    note(name)
    return time.time()


@app.task(acks_late=True, reject_on_worker_lost=True)
def suicide(name: str) -> None:
    """End its own process the first time."""
    note(f"begin {name}")
    with open(os.environ["JOURNAL"], encoding="utf-8") as journal:
        begun = journal.read().splitlines().count(f"begin {name}")
    if begun == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    note(f"survived {name}")

"""Rates of Celery's tasks on metaq beside Redis: tasks that do nothing, sent one by one, then done by one worker.

    python integrations/kombu/benchmarks/rates.py --metaq metaq://localhost:9876// --redis redis://localhost:6379/0

Each broker is used as it is found, so start them on the same machine. A line is one pool on one broker: tasks a second that a
program sends, and that a worker does. The share beside metaq's is of Redis's rate.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from celery import Celery

POOLS: Final = (("prefork", 2), ("gevent", 100))
HERE: Final = Path(__file__)
WORKER_S: Final = 120.0

app = Celery("rates", broker=os.environ.get("RATES_BROKER"))
app.conf.update(task_ignore_result=True, task_default_queue=os.environ.get("RATES_QUEUE", "rates"))


@app.task
def nothing() -> None:
    """Do nothing."""


@app.task
def clock(path: str) -> None:
    """Write down the time."""
    Path(path).write_text(str(time.time()), "utf-8")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--metaq", required=True)
    parser.add_argument("--redis", required=True)
    parser.add_argument("--tasks", type=int, default=10_000)
    arguments = parser.parse_args()
    for pool, concurrency in POOLS:
        rates = {}
        for name, url in (("redis", arguments.redis), ("metaq", arguments.metaq)):
            sent, done = measure(url, pool, concurrency, arguments.tasks)
            rates[name] = sent, done
            print(f"{pool:8} {name:6} sent {sent:7.0f}/s  done {done:7.0f}/s", end="")
            if name == "metaq":
                print(f"  {sent / rates['redis'][0]:.2f}  {done / rates['redis'][1]:.2f}", end="")
            print(flush=True)


def measure(url: str, pool: str, concurrency: int, tasks: int) -> tuple[float, float]:
    """Return the tasks a second that were sent, and done by a worker that begins when all are there."""
    queue = f"rates-{os.getpid()}-{pool}"
    environment = {**os.environ, "RATES_BROKER": url, "RATES_QUEUE": queue, "PYTHONPATH": str(HERE.parent)}
    app.conf.update(broker_url=url, task_default_queue=queue)
    with tempfile.TemporaryDirectory() as folder:
        first, last = Path(folder, "first"), Path(folder, "last")
        with app.connection_for_write() as connection, app.amqp.Producer(connection.default_channel) as producer:
            clock.apply_async((str(first),), producer=producer, queue=queue)
            begin = time.monotonic()
            for _ in range(tasks):
                nothing.apply_async(producer=producer, queue=queue)
            sent = tasks / (time.monotonic() - begin)
            clock.apply_async((str(last),), producer=producer, queue=queue)
        command = [sys.executable, "-m", "celery", "-A", "rates", "worker", "-P", pool, "-c", str(concurrency), "-Q", queue]
        with Path(folder, "log").open("wb") as log:
            worker = subprocess.Popen(command, env=environment, cwd=HERE.parent, stdout=log, stderr=log)
            try:
                until = time.monotonic() + WORKER_S
                while not (last.exists() and last.read_text("utf-8")):
                    if time.monotonic() > until:
                        raise SystemExit(f"not done in {WORKER_S} s:\n{Path(folder, 'log').read_text('utf-8')[-2000:]}")
                    time.sleep(0.05)
                done = tasks / (float(last.read_text("utf-8")) - float(first.read_text("utf-8")))
            finally:
                worker.terminate()
                worker.wait()
    return sent, done


if __name__ == "__main__":
    main()

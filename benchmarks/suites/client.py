"""Sends of our Python client, of one thread: how many a second, and what each costs the client in processor time."""

import importlib
import importlib.util
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.bench import Bench
from benchmarks.figures import Check
from benchmarks.peers import Level, metaq, redis
from benchmarks.report import Report
from benchmarks.rounds import Rounds
from metaq.client import Producer, SendResult, connect

ROUNDS: Final = 7
BODY: Final = bytes(128)
BATCH: Final = 100
"""Messages of a batch, and commands of a pipeline."""
IN_FLIGHT: Final = 1000
"""Asynchronous sends without an answer, at most."""
LINGER_MS: Final = 5
TOPIC: Final = "bench"

Send = Callable[[], int]
"""One step, such as a send or a batch, and how many messages it has sent."""


@dataclass(frozen=True)
class Way:
    """One way to send; must and aim in messages a second."""

    name: str
    must: float | None = None
    aim: float | None = None


WAITING: Final = Way("send that waits", 9_000, 15_000)
ASYNC: Final = Way(f"asynchronous sends, {IN_FLIGHT} in flight", 40_000, 80_000)
LINGERING: Final = Way(f"asynchronous sends that linger {LINGER_MS} ms, {IN_FLIGHT} in flight")
BATCHES: Final = Way(f"batches of {BATCH}", 150_000, 300_000)
WAYS: Final = (WAITING, ASYNC, LINGERING, BATCHES)
XADD: Final = "redis-py, XADD that waits"
PIPELINE: Final = f"redis-py, pipelines of {BATCH} XADD"


def run(bench: Bench) -> Report:
    seconds, warmup = (0.5, 0.1) if bench.quick else (2.0, 0.3)
    rounds = bench.rounds(ROUNDS)
    taken = Rounds(bench, seconds, warmup)
    ours, theirs = bench.usable(metaq(Level.MEMORY)), _can_compare(bench)
    for turn in range(1, rounds + 1):
        bench.console.print(f"round {turn} of {rounds}", highlight=False)
        if ours:
            taken.attempt("metaq's client", lambda: _measure_ours(taken))
        if theirs:
            taken.attempt("redis-py", lambda: _measure_redis(taken))
    settings = {
        "rounds": f"{rounds}; figures are medians",
        "servers": "fresh for each round; metaq at MEMORY, Redis with appendfsync everysec, all else at its default",
        "client": f"one thread, bodies of {len(BODY)} B, {seconds} s for each way after {warmup} s of warm-up",
        "processor time": "of the whole client process, all its threads, user and kernel; not the server's",
        "Kafka": "kafka-python is not compared: it sends nothing without a Kafka broker",
    }
    return Report(
        "client", settings, [taken.table("One client thread")], checks(taken), taken.cells, bench.notes, bench.failures
    )


def checks(taken: Rounds) -> list[Check]:
    """Return the checks of the ways that have a must."""
    return [
        Check(f"Python client, {way.name}, 128 B at MEMORY", taken.median(_rate(way.name)), "at least", way.must, way.aim, "/s")
        for way in WAYS
        if way.must is not None
    ]


def _rate(name: str) -> str:
    return f"{name}, messages/s"


def measure(taken: Rounds, name: str, send: Send) -> None:
    """Take the rate of a way to send and the processor time of a message, after the warm-up."""
    _for(taken.warmup, send)
    began, used = time.perf_counter(), time.process_time()
    messages = _for(taken.seconds, send)
    used, took = time.process_time() - used, time.perf_counter() - began
    taken.add(_rate(name), messages / took)
    taken.add(f"{name}, processor time of a message, µs", 1e6 * used / messages)


def _for(seconds: float, send: Send) -> int:
    messages, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        messages += send()
    return messages


def _measure_ours(taken: Rounds) -> None:
    with (
        taken.bench.fresh_folder() as folder,
        metaq(Level.MEMORY).running(folder / "server") as server,
        connect(f"127.0.0.1:{server.registry_port}") as client,
    ):
        producer = client.producer()
        batch = [BODY] * BATCH
        measure(taken, WAITING.name, lambda: bool(producer.send(TOPIC, BODY)))
        with _window(producer) as send:
            measure(taken, ASYNC.name, send)
        with client.producer(linger_ms=LINGER_MS) as lingering, _window(lingering) as send:
            measure(taken, LINGERING.name, send)
        measure(taken, BATCHES.name, lambda: len(producer.send_batch(TOPIC, batch)))


@contextmanager
def _window(producer: Producer) -> Iterator[Send]:
    """A send that waits for the oldest answer when enough are in flight; all answers are waited for in the end."""
    in_flight: deque[Future[SendResult]] = deque()

    def send() -> int:
        in_flight.append(producer.send_async(TOPIC, BODY))
        if len(in_flight) > IN_FLIGHT:
            in_flight.popleft().result()
        return 1

    yield send
    for future in in_flight:
        future.result()


def _can_compare(bench: Bench) -> bool:
    if importlib.util.find_spec("redis") is None:
        bench.notes.append("redis-py was not measured: pip install redis")
        return False
    return bench.usable(redis("everysec", Level.MEMORY))


def _measure_redis(taken: Rounds) -> None:
    module: Any = importlib.import_module("redis")
    with taken.bench.fresh_folder() as folder, redis("everysec", Level.MEMORY).running(folder / "server") as server:
        client = module.Redis(port=server.port)
        message = {"body": BODY}

        def pipeline() -> int:
            commands = client.pipeline(transaction=False)
            for _ in range(BATCH):
                commands.xadd(TOPIC, message)
            return len(commands.execute())

        measure(taken, XADD, lambda: bool(client.xadd(TOPIC, message)))
        measure(taken, PIPELINE, pipeline)
        client.close()

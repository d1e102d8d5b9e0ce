"""Thousands of topics: how long a broker that has them takes to start, and what it needs of memory and descriptors."""

import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from benchmarks.link import Link
from benchmarks.memory import resting_bytes
from benchmarks.peers import Server, System

PARTITIONS = 8
USE_SECONDS = 120
"""One answer may take so long: thousands of queues get their first file."""


@dataclass(frozen=True)
class Serving:
    """A broker after its start, and again once each partition was put into and read since."""

    started_seconds: float
    started_bytes: int
    used_bytes: int
    used_descriptors: int


@dataclass(frozen=True)
class Topics:
    """One round: seconds until all partitions were used for the first time; after an orderly stop, and after SIGKILL."""

    made_seconds: float
    stopped: Serving
    killed: Serving


def measure_topics(system: System, folder: Path, topics: int) -> Topics:
    """Make so many topics of PARTITIONS partitions with a message in each, then start over them twice."""
    with system.running(folder) as server:
        begun = time.monotonic()
        use(server, topics)
        made_seconds = time.monotonic() - begun
    server = system.start(folder)
    try:
        stopped = _look(server, topics)
        server.kill()
        server = system.start(folder)
        killed = _look(server, topics)
    finally:
        server.stop()
    return Topics(made_seconds, stopped, killed)


def use(server: Server, topics: int) -> None:
    """Put a message into each partition, which makes its topic if need be, and pull it from there."""
    partitions = list(product((f"topic-{number:05d}" for number in range(topics)), range(PARTITIONS)))
    with Link(server.port, USE_SECONDS) as link:
        link.ask_all(link.message(topic, partition, b"x", PARTITIONS) for topic, partition in partitions)
        link.ask_all(link.pull(topic, partition, 0, 0) for topic, partition in partitions)


def _look(server: Server, topics: int) -> Serving:
    started = resting_bytes(server.pid)
    use(server, topics)
    return Serving(server.started_seconds, started, resting_bytes(server.pid), descriptors(server.pid))


def descriptors(pid: int) -> int:
    """How many the process has open."""
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())

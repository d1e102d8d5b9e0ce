"""A metaq master and its slave: how they start and wait for each other, and the processor time that a put costs them."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from benchmarks.figures import MeasurementError
from benchmarks.link import Link
from benchmarks.peers import Level, Server, metaq
from benchmarks.programs import LoadPlan, run_load
from metaq.protocol.remoting.codes import Request

LISTENS = ("--replication-listen", "127.0.0.1:0")
MASTER, SLAVE = 1, 2
CATCH_UP_SECONDS = 60
LOOK_SECONDS = 0.01
_CPUCLOCK_SCHED = 2
"""Of Linux (include/linux/posix-timers.h): the time that the scheduler gave."""


@dataclass(frozen=True)
class Replicas:
    """A master and, where there is one, its slave. All that waits has CATCH_UP_SECONDS."""

    master: Server
    slave: Server | None

    def wait_in_sync(self) -> None:
        """Wait until the slave holds all that the master has, and the master counts on it."""
        if self.slave is None:
            return
        with Link(self.master.port) as link:
            deadline = time.monotonic() + CATCH_UP_SECONDS
            while not in_sync(found := orjson.loads(link.ask(Request.REPLICA_STATUS).body)):
                if time.monotonic() > deadline:
                    raise MeasurementError(f"the slave is not in sync after {CATCH_UP_SECONDS} s: {found}")
                time.sleep(LOOK_SECONDS)


def in_sync(status: dict[str, Any]) -> bool:
    """Return whether a master's status (30020) says that its slave is in sync and lacks nothing."""
    held = [slave["lag_bytes"] for slave in status["slaves"] if slave["replica"] == SLAVE]
    return status["in_sync"] == [MASTER, SLAVE] and held == [0]


@contextmanager
def replicas(level: Level, folder: Path, *, with_slave: bool) -> Iterator[Replicas]:
    """A master in a folder, with a slave in sync; or a broker alone, which takes no slaves."""
    system = metaq(level)
    if not with_slave:
        with system.running(folder / "master") as alone:
            yield Replicas(alone, None)
        return
    with system.running(folder / "master", LISTENS) as master:
        place = ("--master", f"127.0.0.1:{master.replication_port}", "--replica-number", str(SLAVE))
        with system.running(folder / "slave", ("--role", "slave", *place, *LISTENS)) as slave:
            both = Replicas(master, slave)
            both.wait_in_sync()
            yield both


@dataclass(frozen=True)
class Cost:
    """Processor time of one run in microseconds a put, of user and kernel together; the slave's is 0 without one."""

    master_us: float
    slave_us: float


def measure_cost(pair: Replicas, plan: LoadPlan, warmup: int) -> Cost:
    """Put `plan.count` messages after so many that do not count; what the slave does until it has them all is part of it."""
    assert plan.count is not None
    run_load(
        "metaq-put", pair.master.port, LoadPlan(plan.connections, plan.in_flight, plan.body_bytes, plan.seconds, 0.0, warmup)
    )
    pair.wait_in_sync()
    processes = [pair.master.pid, *([pair.slave.pid] if pair.slave else [])]
    before = [processor_seconds(process) for process in processes]
    puts = run_load("metaq-put", pair.master.port, plan).messages
    pair.wait_in_sync()
    spent = [1e6 * (processor_seconds(process) - start) / puts for process, start in zip(processes, before, strict=True)]
    return Cost(spent[0], spent[1] if pair.slave else 0.0)


@contextmanager
def on_one_processor() -> Iterator[None]:
    """Run this process, and what it starts meanwhile, on one processor.

    A slave on the next one would slow its master down where both are threads of the same core: up to 40 % more time for
    the same work, which says nothing of the work.
    """
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def processor_seconds(process: int) -> float:
    """Return the processor time of all threads of a process so far, user and kernel, in seconds.

    It is exact to the nanosecond, while /proc/PID/stat has 1/100 s. The clock's number is the result of
    clock_getcpuclockid(3) for the process on Linux, which Python does not offer.
    """
    return time.clock_gettime((~process << 3) | _CPUCLOCK_SCHED)

"""Sends and batches as Java clients make them: metaq beside RocketMQ, in turn, also by what they cost in processor time."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.bench import Bench, bounded, describe
from benchmarks.figures import Check, Load
from benchmarks.peers import Level, Server, System, metaq
from benchmarks.programs import LoadPlan, run_load
from benchmarks.report import Report
from benchmarks.rocketmq.broker import rocketmq
from benchmarks.rounds import Rounds

ROUNDS: Final = 5
BATCH: Final = 32
BODY_BYTES: Final = 128
JAVA_WARMUP_SECONDS: Final = 15.0
"""Until the Java machine has compiled the way of a send; longer loads measured the same."""
TICKS: Final = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Way:
    """One way to send; must and aim in parts of RocketMQ's rate, and of its rate for each second of processor time."""

    name: str
    protocol: str
    connections: int
    in_flight: int
    batch: int | None = None
    must: float | None = None
    aim: float | None = None
    must_of_processor: float | None = None
    aim_of_processor: float | None = None

    def plan(self, seconds: float, warmup: float) -> LoadPlan:
        return LoadPlan(self.connections, self.in_flight, BODY_BYTES, seconds, warmup, batch=self.batch)


SEND: Final = "remoting-send-keyed"
WAYS: Final = (
    Way("send, 4 × 100", SEND, 4, 100, must=1.4, aim=2.0, must_of_processor=2.5, aim_of_processor=3.5),
    Way("send, 50 × 16", SEND, 50, 16, must=1.1, aim=1.5, must_of_processor=2.5, aim_of_processor=3.5),
    Way(f"batch of {BATCH}, 4 × 10", "remoting-batch-keyed", 4, 10, batch=BATCH, must=1.0, aim=1.5),
)


def run(bench: Bench) -> Report:
    seconds, warmup = (1.0, 0.2) if bench.quick else (3.0, 0.5)
    rounds = bench.rounds(ROUNDS)
    taken = Rounds(bench, seconds, warmup)
    systems = [system for system in (metaq(Level.MEMORY), rocketmq()) if bench.usable(system)]
    for turn in range(1, rounds + 1):
        bench.console.print(f"round {turn} of {rounds}", highlight=False)
        for way in WAYS:
            for system in systems:
                _measure(bench, taken, system, way)
    settings: Mapping[str, str] = {
        "rounds": f"{rounds}, both systems in turn in each; figures are medians, ratios are ratios of medians",
        "seconds a cell": f"{seconds} after {warmup} of warm-up, fresh servers; RocketMQ after {JAVA_WARMUP_SECONDS} s of load",
        "level": "MEMORY, RocketMQ with ASYNC_FLUSH: the page cache has it before the reply",
        "frames": "the same for both: JSON header; KEYS, UNIQ_KEY, WAIT, TAGS; in batches UNIQ_KEY and TAGS of each message",
        "processor time": "of the whole server process, user and system, from before its load until after it",
    }
    tables = [taken.table(f"Sends of {BODY_BYTES} B as Java makes them")]
    return Report("rocketmq", settings, tables, _checks(taken), taken.cells, bench.notes, bench.failures)


def _measure(bench: Bench, taken: Rounds, system: System, way: Way) -> None:
    """Load a fresh server in one way, and take its rate and the processor time that it used."""
    name = f"{way.name}: {system.name}"

    def measure() -> None:
        with bench.fresh_folder() as folder, system.running(folder / "server") as server:
            if system.name == rocketmq().name:
                run_load(way.protocol, server.port, bounded(way.plan(JAVA_WARMUP_SECONDS, 0.0)))
            load, used = _loaded(server, way, way.plan(taken.seconds, taken.warmup))
        taken.note(name, load)
        whole = load.messages * (load.seconds + taken.warmup) / load.seconds  # those of the warm-up count, too
        taken.add(f"{name}, messages/s of processor time", whole / used)

    taken.attempt(f"{name}, {describe(way.plan(taken.seconds, taken.warmup))}", measure)


def _loaded(server: Server, way: Way, plan: LoadPlan) -> tuple[Load, float]:
    """Run one load; return it and the seconds of processor time that the server used meanwhile."""
    before = _processor_seconds(server.pid)
    load = run_load(way.protocol, server.port, bounded(plan))
    return load, _processor_seconds(server.pid) - before


def _processor_seconds(pid: int) -> float:
    """Return the user and system time of all threads of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def _checks(taken: Rounds) -> list[Check]:
    ours, theirs = metaq(Level.MEMORY).name, rocketmq().name
    checks = []
    for way in WAYS:
        for what, must, aim in (
            ("messages/s", way.must, way.aim),
            ("messages/s of processor time", way.must_of_processor, way.aim_of_processor),
        ):
            if must is not None:
                mine, other = (taken.median(f"{way.name}: {name}, {what}") for name in (ours, theirs))
                ratio = mine / other if mine is not None and other else None
                checks.append(Check(f"{way.name}, {what}: of RocketMQ", ratio, "at least", must, aim, "×"))
    return checks

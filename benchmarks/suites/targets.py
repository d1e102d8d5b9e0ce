"""The speed that is required: each figure beside the one it is compared with, in turn, over several rounds."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.bench import Bench, raw
from benchmarks.figures import Check, Load, SyncLoop, ratio, spread
from benchmarks.peers import Level, System, metaq, sendfile_loop
from benchmarks.programs import LoadPlan, run_load, run_sync_loop
from benchmarks.report import Report, Table, middle, of_rounds
from benchmarks.suites.get import hot_log, messages_for

ROUNDS = 5
GET_LOG_BYTES = 256 << 20
GET_BODY_BYTES = 1024
SYNC_RATE = 5000
SYNC_BODY_BYTES = 128
# What a 128-byte message takes in the log with its header, topic and checksum; the sync loop writes as much.
SYNC_RECORD_BYTES = 256
SYNC_CONNECTIONS = 50
SYNC_MUST_TIMES, SYNC_MUST_PLUS_MS = 3, 1.0
SYNC_AIM_TIMES, SYNC_AIM_PLUS_MS = 2, 0.5


@dataclass(frozen=True)
class Goal:
    """Our rate in parts of a peer's."""

    against: str
    must: float | None = None
    aim: float | None = None


@dataclass(frozen=True)
class PutTarget:
    level: Level
    connections: int
    in_flight: int
    goals: tuple[Goal, ...]
    body_bytes: int = 128

    @property
    def name(self) -> str:
        return f"put {self.body_bytes:,} B, {self.level.name}, {self.connections} × {self.in_flight}"


PUT_TARGETS = (
    PutTarget(
        Level.MEMORY,
        4,
        100,
        (Goal("redis everysec", 1.1, 1.5), Goal("nullbroker", 0.5, 0.7), Goal("nats jetstream", must=0.75)),
    ),
    PutTarget(Level.MEMORY, 50, 1, (Goal("redis everysec", 0.7, 1.0),)),
    PutTarget(Level.MEMORY, 4, 100, (Goal("nullbroker", 0.5, 0.8),), 4096),
    PutTarget(Level.MEMORY, 1, 100, (Goal("nullbroker", 1.0, 1.2),), 1024),
    PutTarget(Level.DISK, 50, 16, (Goal("redis always", 0.9, 1.2), Goal("beanstalkd sync", must=5.0))),
    PutTarget(Level.DISK, 50, 1, (Goal("redis always", 0.9, 1.1),)),
)


@dataclass(frozen=True)
class GetTarget:
    """Gets of one size of block, in parts of the sendfile loop's bytes."""

    name: str
    block_bytes: int
    must: float
    aim: float


GET_TARGETS = (
    GetTarget("get 64 KiB blocks, 1 KiB messages, hot, 4 × 4", 64 << 10, 0.4, 0.6),
    GetTarget("get 1 MiB blocks, 1 KiB messages, hot, 4 × 4", 1 << 20, 0.6, 0.8),
)


@dataclass
class Collected:
    """All rounds of all targets: loads by (target, system), and the raw cells in the order they were taken."""

    loads: dict[tuple[str, str], list[Load]]
    loops: dict[str, list[SyncLoop]]
    cells: list[Mapping[str, object]]

    def add(self, target: str, system: str, turn: int, load: Load | None) -> None:
        self.cells.append({"target": target, **raw(system, turn, load)})
        if load:
            self.loads[target, system].append(load)


def run(bench: Bench) -> Report:
    seconds, warmup = (1.0, 0.2) if bench.quick else (3.0, 0.5)
    rounds = bench.rounds(ROUNDS)
    taken = Collected(defaultdict(list), defaultdict(list), [])
    for turn in range(1, rounds + 1):
        bench.console.print(f"round {turn} of {rounds}", highlight=False)
        for target in PUT_TARGETS:
            plan = LoadPlan(target.connections, target.in_flight, target.body_bytes, seconds, warmup)
            for system in _rivals(bench, target):
                taken.add(target.name, system.name, turn, bench.put(system, plan))
        _get_round(bench, taken, turn, seconds, warmup)
        _sync_round(bench, taken, turn, seconds * 2, warmup)
    settings = {
        "rounds": f"{rounds}, all systems in turn in each; figures are medians, ratios are ratios of medians",
        "seconds a cell": f"{seconds} after {warmup} of warm-up, on a fresh server; {seconds * 2} for {SYNC_NAME}",
        "levels": "MEMORY: the page cache has it; DISK: fdatasync'ed before the reply",
    }
    checks = [*_put_checks(taken), *_get_checks(taken), *_sync_checks(taken)]
    tables = [_rates(taken), _sync_table(taken)]
    return Report("targets", settings, tables, checks, taken.cells, bench.notes, bench.failures)


def _rivals(bench: Bench, target: PutTarget) -> list[System]:
    names = {f"metaq {target.level.value}", *(goal.against for goal in target.goals)}
    return [system for system in bench.systems if system.name in names and bench.usable(system)]


SYNC_NAME = f"put {SYNC_BODY_BYTES} B, DISK, {SYNC_RATE:,}/s over {SYNC_CONNECTIONS}"


def _get_round(bench: Bench, taken: Collected, turn: int, seconds: float, warmup: float) -> None:
    """Gets of each size of block, from one log of each system."""
    messages = messages_for(GET_LOG_BYTES, GET_BODY_BYTES)
    for system in (metaq(Level.MEMORY), sendfile_loop(Path("records"))):
        if system.puts and not bench.usable(system):
            continue

        def measure(system: System = system) -> None:
            with hot_log(bench, system, GET_BODY_BYTES, messages) as server:
                for target in GET_TARGETS:
                    plan = LoadPlan(4, 4, GET_BODY_BYTES, seconds, warmup, block_bytes=target.block_bytes)
                    load = run_load(system.gets, server.port, plan)
                    bench.show(f"{system.name}, {target.name}", load)
                    taken.add(target.name, system.name, turn, load)

        bench.attempt(f"{system.name}, gets", measure)


def _sync_round(bench: Bench, taken: Collected, turn: int, seconds: float, warmup: float) -> None:
    disk = metaq(Level.DISK)
    plan = LoadPlan(SYNC_CONNECTIONS, 1, SYNC_BODY_BYTES, seconds, warmup, rate=SYNC_RATE)
    if bench.usable(disk):
        taken.add(SYNC_NAME, disk.name, turn, bench.put(disk, plan))
    for name, rate in (("sync loop", SYNC_RATE), ("sync loop, back to back", 0)):

        def measure(rate: int = rate) -> SyncLoop:
            with bench.fresh_folder() as folder:
                return run_sync_loop(folder, SYNC_RECORD_BYTES, seconds, rate)

        loop = bench.attempt(name, measure)
        taken.cells.append({"target": SYNC_NAME, "system": name, "round": turn, "figures": loop.model_dump() if loop else None})
        if loop:
            taken.loops[name].append(loop)
            bench.console.print(f"{name}: p99 {loop.p99_us / 1000:.2f} ms", highlight=False)


def _put_checks(taken: Collected) -> list[Check]:
    checks = []
    for target in PUT_TARGETS:
        ours = spread([load.messages_per_second for load in taken.loads[target.name, f"metaq {target.level.value}"]])
        for goal in target.goals:
            theirs = spread([load.messages_per_second for load in taken.loads[target.name, goal.against]])
            name = f"{target.name}: of {goal.against}"
            checks.append(Check(name, ratio(ours, theirs), "at least", goal.must, goal.aim, "×"))
    return checks


def _get_checks(taken: Collected) -> list[Check]:
    checks = []
    for target in GET_TARGETS:
        ours, limit = (
            spread([load.mb_per_second for load in taken.loads[target.name, system]])
            for system in ("metaq memory", "sendfile loop")
        )
        name = f"{target.name}: of sendfile"
        checks.append(Check(name, ratio(ours, limit), "at least", target.must, target.aim, "×"))
    return checks


def _sync_checks(taken: Collected) -> list[Check]:
    ours = spread([load.p99_us / 1000 for load in taken.loads[SYNC_NAME, "metaq disk"]])
    bare = spread([loop.p99_us / 1000 for loop in taken.loops["sync loop, back to back"]])
    must, aim = (
        round(times * bare.median + plus_ms, 2) if bare else None
        for times, plus_ms in ((SYNC_MUST_TIMES, SYNC_MUST_PLUS_MS), (SYNC_AIM_TIMES, SYNC_AIM_PLUS_MS))
    )
    bound = f"{SYNC_MUST_TIMES} × that of the sync loop, back to back, + {SYNC_MUST_PLUS_MS:g} ms"
    name = f"{SYNC_NAME}: p99 (must: {bound}; aim: {SYNC_AIM_TIMES} × + {SYNC_AIM_PLUS_MS:g} ms)"
    return [Check(name, ours.median if ours else None, "at most", must, aim, "ms")]


def _rates(taken: Collected) -> Table:
    rows = []
    for (target, system), loads in taken.loads.items():
        if target == SYNC_NAME or not loads:
            continue
        rate = spread([load.messages_per_second for load in loads])
        bandwidth = spread([load.mb_per_second for load in loads])
        p50 = spread([load.p50_us / 1000 for load in loads])
        p99 = spread([load.p99_us / 1000 for load in loads])
        shown = [of_rounds(rate), of_rounds(bandwidth), middle(p50, 2), middle(p99, 2)]
        rows.append([f"{target}: {system}", *shown])
    return Table("Rates, median (lowest to highest round)", ["", "messages/s", "MB/s", "p50 ms", "p99 ms"], rows)


def _sync_table(taken: Collected) -> Table:
    rows = []
    sources: dict[str, list[Load] | list[SyncLoop]] = {
        "metaq disk, open loop": taken.loads[SYNC_NAME, "metaq disk"],
        f"sync loop, {SYNC_RATE:,}/s due, one sync for all that is due": taken.loops["sync loop"],
        "sync loop, one sync a record, back to back": taken.loops["sync loop, back to back"],
    }
    for name, figures in sources.items():
        rate = spread([figure.messages_per_second for figure in figures])
        p50 = spread([figure.p50_us / 1000 for figure in figures])
        p99 = spread([figure.p99_us / 1000 for figure in figures])
        p999 = spread([figure.p999_us / 1000 for figure in figures])
        rows.append([name, of_rounds(rate), of_rounds(p50, 2), of_rounds(p99, 2), of_rounds(p999, 2)])
    columns = ["", "messages/s", "p50 ms", "p99 ms", "p99.9 ms"]
    return Table(f"{SYNC_NAME}: latency", columns, rows)

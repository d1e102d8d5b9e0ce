"""Does a broker with 20 million messages stored take puts as fast as an empty one, and in flat private memory?"""

from collections.abc import Mapping

from benchmarks.bench import Bench, raw
from benchmarks.figures import Check, MeasurementError, ratio, spread
from benchmarks.memory import MEGABYTE, Sampler, drift_bytes, status_bytes
from benchmarks.peers import Level, Server, System, metaq
from benchmarks.programs import LoadPlan, run_load
from benchmarks.report import Report, Table, number, of_rounds
from benchmarks.suites.get import fill

ROUNDS = 7
BODY_BYTES = 128
DRIFT_MUST_MB = 30
FULL, EMPTY = "with the backlog", "empty"


def backlog_messages(quick: bool) -> int:
    return 1_000_000 if quick else 20_000_000


def run(bench: Bench) -> Report:
    messages, rounds = backlog_messages(bench.quick), bench.rounds(ROUNDS)
    plan = LoadPlan(4, 100, BODY_BYTES, seconds=1.0 if bench.quick else 3.0, warmup_seconds=0.5)
    system = metaq(Level.MEMORY)
    rates: dict[str, list[float]] = {FULL: [], EMPTY: []}
    cells: list[Mapping[str, object]] = []
    memory, drift = Table("Private memory", [], []), None
    if bench.usable(system):
        with bench.fresh_folder() as folder, system.running(folder / "server") as full:
            passed = bench.attempt("backlog", lambda: pass_through(bench, system, full, messages))
            if passed:
                memory, drift = passed
            for turn in range(1, rounds + 1 if passed else 1):
                empty_load = bench.put(system, plan)
                full_load = bench.attempt(FULL, lambda: run_load(system.puts, full.port, plan))
                bench.show(FULL, full_load)
                for name, load in ((EMPTY, empty_load), (FULL, full_load)):
                    cells.append(raw(name, turn, load))
                    rates[name] += [load.messages_per_second] if load else []
    ours, empty = spread(rates[FULL]), spread(rates[EMPTY])
    rows = [["empty broker", of_rounds(empty)], [f"{messages:,} messages stored", of_rounds(ours)]]
    checks = [
        Check(f"put rate with {messages:,} stored: of an empty broker's", ratio(ours, empty), "at least", 0.85, 0.95),
        Check(
            f"RssAnon while {messages:,} pass and are read: largest drift",
            drift,
            "at most",
            must=DRIFT_MUST_MB,
            unit="MB",
        ),
    ]
    settings = {
        "rounds": f"{rounds}, alternating, median",
        "puts": f"{BODY_BYTES} B, MEMORY, 4 × 100, {plan.seconds} s after {plan.warmup_seconds} of warm-up",
        "brokers": "one that keeps its backlog and runs on, and a fresh one each round",
    }
    tables = [Table("Put rate", ["", "messages/s"], rows), memory]
    return Report("backlog", settings, tables, checks, cells, bench.notes, bench.failures)


def pass_through(bench: Bench, system: System, server: Server, messages: int) -> tuple[Table, float]:
    """Put all messages and read all of them; returns the samples and the largest drift in MB.

    The drift counts from when the first hundredth has passed and been read: by then every buffer was used once.
    """
    idle, first = status_bytes(server.pid, "RssAnon"), messages // 100
    fill(system, server, BODY_BYTES, first)
    read(system, server, first)
    start = status_bytes(server.pid, "RssAnon")
    rows = [_row("idle", idle, idle), _row("after the first hundredth", start, start)]
    samples: list[int] = []
    with Sampler(server.pid, "RssAnon") as sampler:
        fill(system, server, BODY_BYTES, messages - first)
    rows.append(_row(f"while {messages:,} are put", min(sampler.samples), max(sampler.samples)))
    samples += sampler.samples
    with Sampler(server.pid, "RssAnon") as sampler:
        read(system, server, messages)
    rows.append(_row(f"while {messages:,} are read", min(sampler.samples), max(sampler.samples)))
    samples += sampler.samples
    for row in rows:
        bench.console.print("RssAnon MB:", *row, highlight=False)
    return Table("Private memory (RssAnon)", ["", "lowest MB", "highest MB"], rows), drift_bytes(samples, start) / MEGABYTE


def read(system: System, server: Server, messages: int) -> None:
    """Read the first so many messages of the log from its start, in blocks of 64 KiB."""
    load = run_load(system.gets, server.port, LoadPlan(1, 4, BODY_BYTES, 900.0, 0.0, count=messages))
    if load.messages < messages or load.wraps > 1:  # the gets in flight behind the last message meet the end once
        raise MeasurementError(f"{load.messages:,} of {messages:,} messages were read, {load.wraps} times to the end")


def _row(name: str, low: int, high: int) -> list[str]:
    return [name, number(low / MEGABYTE, 1), number(high / MEGABYTE, 1)]

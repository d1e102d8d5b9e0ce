"""The time until a broker serves again that was killed under full load with 20 million messages stored."""

import random
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks.bench import Bench
from benchmarks.figures import Check, MeasurementError, spread
from benchmarks.peers import Level, System, ask, metaq
from benchmarks.programs import LoadPlan
from benchmarks.report import Report, Table, middle, number
from benchmarks.suites.backlog import BODY_BYTES, backlog_messages
from benchmarks.suites.get import fill

ROUNDS = 5
MUST_SECONDS, AIM_SECONDS = 3.0, 1.0
# The load runs longer than one checkpoint interval (5 s by default), so that the kill meets any moment of it.
LOAD_SECONDS = (6.0, 11.0)
PUT = b"put bench 0 1 0 7\r\nx"


def run(bench: Bench) -> Report:
    messages, rounds = backlog_messages(bench.quick), bench.rounds(ROUNDS)
    seed = random.SystemRandom().getrandbits(32)
    system = metaq(Level.MEMORY)
    cells: list[Mapping[str, object]] = []
    ready: list[float] = []
    if bench.usable(system):
        with bench.fresh_folder() as folder:
            found = bench.attempt("recovery", lambda: crashes(bench, system, folder, messages, rounds, random.Random(seed)))
            ready, cells = found or ([], [])
    rows = [[str(cell["round"]), *(number(float(str(cell[key])), 2) for key in COLUMNS)] for cell in cells]
    slowest, usual = max(ready, default=None), spread(ready)
    checks = [
        Check(
            f"serving again after kill -9 with {messages:,} stored, under full load: slowest round",
            slowest,
            "at most",
            MUST_SECONDS,
            AIM_SECONDS,
            "s",
        )
    ]
    settings = {
        "rounds": f"{rounds}; median {middle(usual, 2)} s",
        "load": f"puts of {BODY_BYTES} B, MEMORY, 4 × 100; killed after {LOAD_SECONDS[0]} to {LOAD_SECONDS[1]} s of it",
        "seed of the moments": str(seed),
        "time": "from starting the process; a first put is acknowledged at `put`",
    }
    table = Table("Seconds from start", ["round", *COLUMNS.values()], rows)
    return Report("recovery", settings, [table], checks, cells, bench.notes, bench.failures)


COLUMNS = {"killed_after_seconds": "killed after s", "ready_seconds": "ready line", "put_seconds": "put"}


def crashes(
    bench: Bench, system: System, folder: Path, messages: int, rounds: int, moments: random.Random
) -> tuple[list[float], list[Mapping[str, object]]]:
    """Fill the store, then kill and restart it again and again; the seconds until it serves, and all figures."""
    cells: list[Mapping[str, object]] = []
    serving = []
    server = system.start(folder / "server")
    try:
        fill(system, server, BODY_BYTES, messages)
        for turn in range(1, rounds + 1):
            moment = moments.uniform(*LOAD_SECONDS)
            plan = LoadPlan(4, 100, BODY_BYTES, seconds=60.0, warmup_seconds=0.0)
            with subprocess.Popen(plan.command(system.puts, server.port), stderr=subprocess.DEVNULL) as load:
                try:
                    time.sleep(moment)
                    if load.poll() is not None:
                        raise MeasurementError("the load ended before the kill")
                    server.kill()
                finally:
                    load.kill()
            begun = time.monotonic()
            server = system.start(folder / "server")
            ask(server.port, PUT, b"result 200")
            put_seconds = time.monotonic() - begun
            serving.append(put_seconds)
            cells.append(
                {
                    "round": turn,
                    "killed_after_seconds": moment,
                    "ready_seconds": server.started_seconds,
                    "put_seconds": put_seconds,
                }
            )
            bench.console.print(f"ready after {server.started_seconds:.2f} s, put after {put_seconds:.2f} s")
    finally:
        server.stop()
    return serving, cells

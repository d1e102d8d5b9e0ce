"""The full counts of the crash proof: ``python -m tests.crash.long [--only NAME] [--fraction F]``.

Prints one row per run and keeps the rows in ``benchmarks/results/crash-proof.md``. A violation ends the run with the command
that replays it. Runs on the faulty disk are spread over the machine's processors; those with real brokers spread themselves.
"""

import argparse
import importlib
import os
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.tested import tree
from metaq.form import FORM
from tests.crash.command import Result

TABLE: Final = Path(__file__).parents[2] / "benchmarks" / "results" / "crash-proof.md"
HEADER: Final = """# The crash proof

`make test-long` wrote this table. A run that finds a violation writes no row and prints the command that replays it; each row
found none. The tree is what `git rev-parse HEAD^{tree}` said of the files that ran; *to be run again* stands where the history
has lost it, or where the run has come to prove more since. What each one does stands at the top of its module in `tests/crash`,
`tests/xa`, `tests/cluster`, `tests/spark` or `tests/mutants`.

| run | cases | seeds | minutes | tree | form | details |
|---|---:|---|---:|---|---|---|
"""
SEEDS_APART: Final = 1_000_000
"""Between the first seeds of the processes of one run."""


class Run(NamedTuple):
    """One row of the table."""

    name: str
    """Of the module in the package."""
    cases: int
    seed: int = 0
    spread: bool = True
    """Over several processes, each with seeds of its own."""
    package: str = "tests.crash"


RUNS: Final = [
    Run("power", 50_000),
    Run("torn", 100_000),
    Run("flips", 20_000),
    Run("full", 500, seed=1, spread=False),
    Run("syncs", 5_000),
    Run("leasesyncs", 3_000),
    Run("halves", 20_000),
    Run("transactions", 200_000),
    Run("ahead", 20_000),
    Run("kills", 2_000, spread=False),
    Run("timers", 2_000, spread=False),
    Run("recurring", 400, spread=False),
    Run("duplicates", 1_000, spread=False),
    Run("leases", 2_000, spread=False),
    Run("garbage", 300_000, spread=False),
    Run("frames", 300_000, spread=False),
    Run("strangers", 1_000_000, spread=False),
    Run("rest", 50_000, spread=False),
    Run("handshakes", 100_000, spread=False),
    Run("turns", 100_000, spread=False),
    Run("consumers", 2_000),
    Run("atomic", 1_000, spread=False, package="tests.xa"),
    Run("suspects", 20_000, package="tests.cluster"),
    Run("failovers", 600, spread=False, package="tests.cluster"),
    Run("partitions", 600, spread=False, package="tests.cluster"),
    Run("newslaves", 50, spread=False, package="tests.cluster"),
    Run("powercuts", 2_000, spread=False, package="tests.cluster"),
    Run("replication_garbage", 100_000, spread=False, package="tests.cluster"),
    Run("fullcopy", 5_000, spread=False, package="tests.cluster"),
    Run("zookeeper", 30, spread=False, package="tests.cluster"),
    Run("restarts", 100, package="tests.spark"),
    Run("expiries", 2_000, spread=False, package="tests.cluster"),
    Run("canvases", 1_000, spread=False),
    Run("mutants", 1_000, spread=False, package="tests.mutants"),  # or as many as there are
]


def execute(run: Run, seed: int, count: int) -> Result:
    """One run in this process."""
    result: Result = importlib.import_module(f"{run.package}.{run.name}").run(seed, count)
    return result


def execute_spread(run: Run, count: int) -> list[Result]:
    """One run, in as many processes as make sense."""
    if not run.spread:
        return [execute(run, run.seed, count)]
    workers = os.cpu_count() or 1
    with ProcessPoolExecutor(workers) as pool:
        parts = [pool.submit(execute, run, run.seed + number * SEEDS_APART, -(-count // workers)) for number in range(workers)]
        return [part.result() for part in parts]


def row(run: Run, results: list[Result], seconds: float, tested: str) -> str:
    """A line of the table; ``tested`` is the tree."""
    cases = sum(result.cases for result in results)
    seeds = ", ".join(f"{result.seeds.start}…{result.seeds.stop - 1}" for result in results)
    details: Counter[str] = Counter()
    for result in results:
        details.update(result.details)
    told = ", ".join(f"{count:,} {name}" for name, count in details.items())
    return f"| {run.name} | {cases:,} | {seeds} | {seconds / 60:.1f} | {tested} | {FORM} | {told} |"


def keep(line: str) -> None:
    """Put a row into the table in place of the one with its name."""
    known = TABLE.read_text("utf-8").splitlines() if TABLE.exists() else []
    rows = {old.split("|")[1].strip(): old for old in known if old.startswith("| ") and not old.startswith("| run ")}
    rows[line.split("|")[1].strip()] = line
    ordered = [rows[run.name] for run in RUNS if run.name in rows]
    TABLE.parent.mkdir(parents=True, exist_ok=True)
    TABLE.write_text(HEADER + "".join(old + "\n" for old in ordered), "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=[run.name for run in RUNS])
    parser.add_argument("--fraction", type=float, default=1.0, help="of the full counts; the table keeps full runs only")
    options = parser.parse_args()
    tested = tree()
    for run in RUNS:
        if options.only in (None, run.name):
            started = time.monotonic()
            results = execute_spread(run, max(1, round(run.cases * options.fraction)))
            line = row(run, results, time.monotonic() - started, tested)
            print(line, flush=True)
            if options.fraction >= 1:
                keep(line)


if __name__ == "__main__":
    main()

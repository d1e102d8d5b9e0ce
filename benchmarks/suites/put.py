"""The put ladder: message size × connections × requests in flight, at both levels, beside the peers."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import product

from benchmarks.bench import Bench, raw
from benchmarks.figures import Load, Spread, ratio, spread
from benchmarks.peers import Level, System
from benchmarks.programs import LoadPlan
from benchmarks.report import Report, Table, middle, number

SIZES = (16, 128, 1024, 4096, 16384, 65536)
CONNECTIONS = (1, 4, 50)
IN_FLIGHT = (1, 16, 100)
ROUNDS = 3

Step = tuple[int, int, int]
Figures = Mapping[tuple[Step, str], Sequence[Load]]


def steps(quick: bool) -> list[Step]:
    """The grid as (body bytes, connections, in flight); the quick one keeps its corners and one common size."""
    if quick:
        return list(product((16, 1024, 65536), (1, 50), (1, 100)))
    return list(product(SIZES, CONNECTIONS, IN_FLIGHT))


def run(bench: Bench) -> Report:
    seconds, warmup = (0.5, 0.1) if bench.quick else (1.5, 0.3)
    rounds, grid = bench.rounds(ROUNDS), steps(bench.quick)
    cells: list[Mapping[str, object]] = []
    tables = []
    for level in Level:
        systems = [system for system in bench.systems if system.puts and system.level is level and bench.usable(system)]
        figures: dict[tuple[Step, str], list[Load]] = defaultdict(list)
        for number_, step in product(range(1, rounds + 1), grid):
            plan = LoadPlan(step[1], step[2], step[0], seconds=seconds, warmup_seconds=warmup)
            for system in systems:
                load = bench.put(system, plan)
                cells.append(raw(system.name, number_, load))
                if load:
                    figures[step, system.name].append(load)
        tables.append(ladder(f"Put, {level.name}: messages per second", systems, grid, figures))
    settings = {"rounds": str(rounds), "seconds a cell": f"{seconds} after {warmup} of warm-up, on a fresh server"}
    return Report("put", settings, tables, raw=cells, notes=bench.notes, failures=bench.failures)


def ladder(title: str, systems: Sequence[System], grid: Sequence[Step], figures: Figures) -> Table:
    """Rates of every system and, for each but the first, the first one's rate in parts of it."""
    first, *others = [system.name for system in systems] or [""]
    columns = ["bytes × connections × in flight", first, "p99 ms"]
    for name in others:
        columns += [name, f"{first.split()[0]} / {name}"]
    rows = []
    for step in grid:
        ours = _rate(figures, step, first)
        p99 = spread([load.p99_us / 1000 for load in figures.get((step, first), [])])
        row = [" × ".join(map(str, step)), middle(ours), middle(p99, 2)]
        for name in others:
            theirs = _rate(figures, step, name)
            row += [middle(theirs), number(ratio(ours, theirs), 2)]
        rows.append(row)
    return Table(title, columns, rows)


def _rate(figures: Figures, step: Step, name: str) -> Spread | None:
    return spread([load.messages_per_second for load in figures.get((step, name), [])])

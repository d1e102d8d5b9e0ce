"""The required speed of replication: puts that wait for a slave, the slave's lag, and what it costs its master."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace

from benchmarks.bench import Bench, raw
from benchmarks.figures import Check, Load, MeasurementError, percentile, spread
from benchmarks.lag import EVERY_SECONDS, Lag, Prober
from benchmarks.peers import Level, metaq
from benchmarks.programs import LoadPlan, run_load
from benchmarks.replicas import Cost, measure_cost, on_one_processor, replicas
from benchmarks.report import Report, Table, of_rounds

ROUNDS = 5
BODY_BYTES = 128
MANY, FEW = (50, 16), (4, 100)
"""Connections and puts in flight on each."""

LAG_MUST_MS = 50
PROBES = 1000
HALF = 0.5
LEAST_OF_PACE = 0.95
"""A load that reaches less of the rate that it was to keep was no half load."""

COST_MUST_PERCENT = 15


@dataclass(frozen=True)
class Safe:
    """Puts that wait for a slave, in parts of the rate of a broker without one."""

    level: Level
    alone: Level
    shape: tuple[int, int]
    must: float | None = None
    aim: float | None = None

    @property
    def name(self) -> str:
        return f"put {BODY_BYTES} B, {self.level.name}, {self.shape[0]} × {self.shape[1]}"

    @property
    def base(self) -> str:
        return f"{self.alone.name} without a slave"


SAFE = (
    Safe(Level.REPLICA, Level.MEMORY, MANY, must=0.4, aim=0.7),
    Safe(Level.REPLICA, Level.MEMORY, FEW),
    Safe(Level.DISK_REPLICA, Level.DISK, MANY),
)
SafeRates = Mapping[str, Sequence[tuple[Load, Load]]]
"""By name of what was measured, of each round with the slave and, right before, without it."""

ALONE, FOLLOWED, WAITING = "no slave", "asynchronous slave", "REPLICA"
WAYS = {ALONE: (Level.MEMORY, False), FOLLOWED: (Level.MEMORY, True), WAITING: (Level.REPLICA, True)}
Costs = Mapping[tuple[int, int], Sequence[Mapping[str, Cost]]]
"""By shape, of each round what each way costs."""


@dataclass(frozen=True)
class Lagging:
    """One round: the full rate with an asynchronous slave, the rate while probing, and what the probes found."""

    full: float
    paced: float
    lag: Lag


@dataclass
class Taken:
    """The measurements of all rounds so far."""

    rates: defaultdict[str, list[tuple[Load, Load]]]
    costs: defaultdict[tuple[int, int], list[Mapping[str, Cost]]]
    lags: list[Lagging]
    cells: list[Mapping[str, object]]


def run(bench: Bench) -> Report:
    rounds = bench.rounds(ROUNDS)
    seconds, warmup = (1.0, 0.2) if bench.quick else (3.0, 0.5)
    puts, probes = (100_000, 200) if bench.quick else (200_000, PROBES)
    taken = Taken(defaultdict(list), defaultdict(list), [], [])
    if bench.usable(metaq(Level.MEMORY)):
        for turn in range(1, rounds + 1):
            bench.console.print(f"round {turn} of {rounds}", highlight=False)
            for safe in SAFE:
                _safe_round(bench, taken, turn, safe, seconds, warmup)
            for shape in (MANY, FEW):
                _cost_round(bench, taken, turn, shape, puts)
            _lag_round(bench, taken, turn, LoadPlan(*MANY, BODY_BYTES, seconds, warmup), probes)
    settings = {
        "rounds": f"{rounds}; figures are medians, a ratio is the median of those of two cells right after each other",
        "replicas": "one master and one slave, processes of this machine over loopback, fresh and in sync for each figure; "
        "every setting at its default but the level, which both have",
        "seconds a cell": f"{seconds} after {warmup} of warm-up",
        "processor time": f"of all threads of the process over {puts:,} puts in a closed loop, until the slave has them all; "
        "all processes on one processor, so that none slows another down as its core's second thread",
        "lag": f"{probes:,} messages, one each {1000 * EVERY_SECONDS:g} ms, of a topic of their own, "
        f"while puts run paced at {HALF:g} of the rate measured before",
    }
    return Report(
        "replication",
        settings,
        [safe_table(taken.rates), cost_table(taken.costs), lag_table(taken.lags)],
        [*safe_checks(taken.rates), *lag_checks(taken.lags), *cost_checks(taken.costs)],
        taken.cells,
        bench.notes,
        bench.failures,
    )


def _rounds(values: Sequence[float], digits: int = 2) -> str:
    return of_rounds(spread(values), digits)


def _median(values: Sequence[float]) -> float | None:
    found = spread(values)
    return found.median if found else None


# -- puts that wait for the slave -------------------------------------------------------------------------------------


def _safe_round(bench: Bench, taken: Taken, turn: int, safe: Safe, seconds: float, warmup: float) -> None:
    loads = []
    plan = LoadPlan(*safe.shape, BODY_BYTES, seconds, warmup)
    for level, with_slave in ((safe.alone, False), (safe.level, True)):

        def measure(level: Level = level, with_slave: bool = with_slave) -> Load:
            with bench.fresh_folder() as folder, replicas(level, folder, with_slave=with_slave) as pair:
                return run_load("metaq-put", pair.master.port, plan)

        name = safe.name if with_slave else f"{safe.base}, {safe.shape[0]} × {safe.shape[1]}"
        load = bench.attempt(name, measure)
        bench.show(name, load)
        taken.cells.append(raw(name, turn, load))
        loads += [load] if load else []
    if len(loads) == 2:
        taken.rates[safe.name].append((loads[1], loads[0]))


def safe_checks(rates: SafeRates) -> list[Check]:
    """Return the checks of what puts that wait for the slave must reach."""
    return [
        Check(f"{safe.name}: of {safe.base}", _of_alone(rates, safe), "at least", safe.must, safe.aim, "×")
        for safe in SAFE
        if (safe.must, safe.aim) != (None, None)
    ]


def _of_alone(rates: SafeRates, safe: Safe) -> float | None:
    return _median([ours.messages_per_second / alone.messages_per_second for ours, alone in rates.get(safe.name, ())])


def safe_table(rates: SafeRates) -> Table:
    rows = []
    for safe in SAFE:
        pairs = rates.get(safe.name, ())
        parts = [ours.messages_per_second / alone.messages_per_second for ours, alone in pairs]
        rows.append(
            [
                safe.name,
                *(_rounds([pair[side].messages_per_second for pair in pairs], 0) for side in (0, 1)),
                _rounds(parts),
                *(
                    _rounds(values)
                    for values in ([ours.p50_us / 1000 for ours, _ in pairs], [o.p99_us / 1000 for o, _ in pairs])
                ),
            ]
        )
    columns = ["", "messages/s", "without a slave, at MEMORY or DISK", "of that", "p50 ms", "p99 ms"]
    return Table("Puts that wait for a slave", columns, rows)


# -- processor time ---------------------------------------------------------------------------------------------------


def _cost_round(bench: Bench, taken: Taken, turn: int, shape: tuple[int, int], puts: int) -> None:
    """Every way to put with one shape of load, right after each other."""
    costs: dict[str, Cost] = {}
    plan = LoadPlan(*shape, BODY_BYTES, 60.0, 0.0, puts)
    for way, (level, with_slave) in WAYS.items():

        def measure(level: Level = level, with_slave: bool = with_slave) -> Cost:
            with on_one_processor(), bench.fresh_folder() as folder, replicas(level, folder, with_slave=with_slave) as pair:
                return measure_cost(pair, plan, puts // 10)

        name = f"processor time, {way}, {shape[0]} × {shape[1]}"
        cost = bench.attempt(name, measure)
        taken.cells.append({"system": name, "round": turn, "figures": asdict(cost) if cost else None})
        if cost:
            costs[way] = cost
            bench.console.print(f"{name}: master {cost.master_us:.2f}, slave {cost.slave_us:.2f} µs a put", highlight=False)
    taken.costs[shape].append(costs)


def _more_percent(costs: Costs, shape: tuple[int, int], way: str) -> list[float]:
    """How much more a put costs the master than without a slave, of each round that has both."""
    pairs = [(found[way], found[ALONE]) for found in costs.get(shape, ()) if {way, ALONE} <= found.keys()]
    return [100 * (ours.master_us / alone.master_us - 1) for ours, alone in pairs]


def cost_checks(costs: Costs) -> list[Check]:
    """Return the checks of what an asynchronous slave may cost its master."""
    return [
        Check(
            f"processor time of the master, {shape[0]} × {shape[1]}: more with an asynchronous slave",
            _median(_more_percent(costs, shape, FOLLOWED)),
            "at most",
            must=COST_MUST_PERCENT,
            unit="%",
        )
        for shape in (MANY, FEW)
    ]


def cost_table(costs: Costs) -> Table:
    rows = []
    for shape in (MANY, FEW):
        for way in WAYS:
            found = [each[way] for each in costs.get(shape, ()) if way in each]
            more = [] if way == ALONE else _more_percent(costs, shape, way)
            figures = (
                _rounds([cost.master_us for cost in found]),
                _rounds(more, 1),
                _rounds([cost.slave_us for cost in found]),
            )
            rows.append([f"{shape[0]} × {shape[1]}, {way}", *figures])
    columns = ["", "master, µs a put", "more than without a slave, %", "slave, µs a put"]
    return Table("Processor time", columns, rows)


# -- lag --------------------------------------------------------------------------------------------------------------


def _lag_round(bench: Bench, taken: Taken, turn: int, plan: LoadPlan, probes: int) -> None:
    def measure() -> Lagging:
        with bench.fresh_folder() as folder, replicas(Level.MEMORY, folder, with_slave=True) as pair:
            assert pair.slave is not None
            full = run_load("metaq-put", pair.master.port, plan)
            pair.wait_in_sync()
            return _probe(pair.master.port, pair.slave.port, full, plan, probes)

    found = bench.attempt("lag", measure)
    if found:
        taken.lags.append(found)
        shown = ", ".join(f"{name} {percentile(found.lag.from_answer_ms, share):.2f} ms" for name, share in SHARES.items())
        bench.console.print(f"lag at {found.paced:,.0f}/s: {shown}", highlight=False)
    taken.cells.append({"system": "lag", "round": turn, "figures": _summary(found) if found else None})


def _probe(master_port: int, slave_port: int, full: Load, plan: LoadPlan, probes: int) -> Lagging:
    """Probe while the load runs at half of the full rate."""
    rate = round(HALF * full.messages_per_second)
    # longer than the probes take, and ended by nothing else
    paced = replace(plan, rate=rate, seconds=probes * EVERY_SECONDS + 2.0)
    with ThreadPoolExecutor(1) as threads, Prober(master_port, slave_port) as prober:
        prober.measure(1)
        running = threads.submit(run_load, "metaq-put", master_port, paced)
        lag = prober.measure(probes)
        if running.done():
            raise MeasurementError(f"the load ended before {probes} messages had been read from the slave")
        load = running.result()
    if load.messages_per_second < LEAST_OF_PACE * rate:
        raise MeasurementError(f"only {load.messages_per_second:,.0f} of {rate:,} puts/s were answered: that is no half load")
    return Lagging(full.messages_per_second, load.messages_per_second, lag)


SHARES = {"p50": 0.5, "p99": 0.99, "slowest": 1.0}


def _summary(found: Lagging) -> dict[str, object]:
    lag = asdict(found.lag)
    shares = {f"{kind} {name}": percentile(lag[kind], share) for kind in lag for name, share in SHARES.items()}
    return {"full": found.full, "paced": found.paced, "messages": len(found.lag.from_answer_ms), **shares}


def lag_checks(lags: Sequence[Lagging]) -> list[Check]:
    """How far behind a slave may be."""
    p99 = _median([percentile(found.lag.from_answer_ms, SHARES["p99"]) for found in lags])
    return [Check("lag of a slave at half of full load, p99", p99, "at most", must=LAG_MUST_MS, unit="ms")]


def lag_table(lags: Sequence[Lagging]) -> Table:
    rows = [
        ["full rate, messages/s", _rounds([found.full for found in lags], 0), "-"],
        ["rate while probing, messages/s", _rounds([found.paced for found in lags], 0), "-"],
    ]
    for name, share in SHARES.items():
        sides = ([found.lag.from_answer_ms for found in lags], [found.lag.from_put_ms for found in lags])
        rows.append([f"{name}, ms", *(_rounds([percentile(values, share) for values in side]) for side in sides)])
    return Table("Lag of an asynchronous slave", ["", "since the put's answer", "since the put was sent"], rows)

"""REST: what a publish costs the broker, and what browsers and publishes cost a load of the text protocol beside them."""

import http.client
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from benchmarks.bench import Bench, raw
from benchmarks.figures import Check, Load, percentile, spread
from benchmarks.peers import Level, Server, free_port, metaq
from benchmarks.programs import LoadPlan, run_load
from benchmarks.replicas import processor_seconds
from benchmarks.report import Report, Table, of_rounds
from benchmarks.restload import (
    BODY_BYTES,
    PUBLISH,
    PUBLISHERS,
    TAILED_RATE,
    TAILED_TOPIC,
    TAILS,
    TOPIC,
    RestFigures,
    figures_of,
    loading,
)

ROUNDS = 5
STREAMS = 100
PUBLISHES = 1000
"""A second."""
SECONDS = 8.0
WARMUP = 0.5
BEGIN_SECONDS = 2.0
"""In which the streams connect, and publishes begin, before the load beside them is measured."""
COST_PUBLISHES = 5000
COST_SECONDS = 60.0
"""The longest that a fifth of them may take."""
MUST_US = 400.0
MUST_RATE, MUST_P99 = 0.95, 1.2
FULL_DISK, FULL_MEMORY, PACED = "full, disk", "full, memory", "5,000/s, disk"
PLANS = {
    FULL_DISK: (Level.DISK, LoadPlan(50, 16, 128, SECONDS, WARMUP)),
    FULL_MEMORY: (Level.MEMORY, LoadPlan(50, 16, 128, SECONDS, WARMUP)),
    PACED: (Level.DISK, LoadPlan(50, 16, 128, SECONDS, WARMUP, rate=5000)),
}
"""The loads of the text protocol: as much as the broker takes, waiting for the disk and not, and a part of it."""


@dataclass(frozen=True)
class Beside:
    """One round: a load alone, the same beside REST at its broker and at another one, and what REST has seen."""

    alone: Load
    beside: Load
    elsewhere: Load
    """Shows what REST takes of the machine: processors, caches and disk, of which only a part is its broker's own work."""
    seen: RestFigures

    @property
    def rate(self) -> float:
        return self.beside.messages_per_second / self.alone.messages_per_second

    @property
    def p99(self) -> float:
        return self.beside.p99_us / self.alone.p99_us

    @property
    def rate_elsewhere(self) -> float:
        return self.elsewhere.messages_per_second / self.alone.messages_per_second

    @property
    def p99_elsewhere(self) -> float:
        return self.elsewhere.p99_us / self.alone.p99_us


Rounds = Mapping[str, Sequence[Beside]]
"""By load."""


def run(bench: Bench) -> Report:
    rounds = bench.rounds(ROUNDS)
    found: defaultdict[str, list[Beside]] = defaultdict(list)
    costs: list[float] = []
    cells: list[Mapping[str, object]] = []
    if bench.usable(metaq(Level.MEMORY)):
        for turn in range(1, rounds + 1):
            bench.console.print(f"round {turn} of {rounds}", highlight=False)
            cost = bench.attempt("the cost of a publish", lambda: _measure_cost(bench))
            if cost is not None:
                costs.append(cost)
                cells.append({"system": "processor time of a publish, µs", "round": turn, "value": cost})
                bench.console.print(f"a publish: {cost:.0f} µs of processor time", highlight=False)
            for name, (level, plan) in PLANS.items():
                one = bench.attempt(name, partial(_measure, bench, level, plan, turn))
                if one is not None:
                    found[name].append(one)
                    cells += [
                        raw(f"{name}, alone", turn, one.alone),
                        raw(f"{name}, beside REST", turn, one.beside),
                        raw(f"{name}, beside REST at another broker", turn, one.elsewhere),
                    ]
                    cells.append({"system": f"{name}, REST", "round": turn, "figures": one.seen.model_dump()})
                    bench.show(f"{name}, alone", one.alone)
                    bench.show(f"{name}, beside REST", one.beside)
                    bench.show(f"{name}, beside REST at another broker", one.elsewhere)
    settings = {
        "rounds": f"{rounds}; figures are medians, ratios those of two loads of one round, the first of them in turn",
        "REST": f"{STREAMS} streams of events, 1 of {TAILS} a tail of {TAILED_RATE} publishes/s, the others live figures; "
        f"{PUBLISHES:,} publishes a second over {PUBLISHERS} connections",
        "text": f"puts of 128 B over 50 connections, 16 in flight: {', '.join(PLANS)}; a fresh broker for each load and round",
        "processor time": f"of all threads of the broker over {COST_PUBLISHES:,} publishes of one connection, at MEMORY",
    }
    tables = [table(found), Table("A publish", ["", "µs"], [["processor time", of_rounds(spread(costs))]])]
    return Report("rest", settings, tables, checks(costs, found), cells, bench.notes, bench.failures)


def checks(costs: Sequence[float], found: Rounds) -> list[Check]:
    """Return the checks of what REST may cost."""
    cost = spread(costs)
    made = [
        Check("processor time of a publish by REST", cost.median if cost else None, "at most", must=MUST_US, unit="µs"),
    ]
    for name in PLANS:
        rates = spread([one.rate for one in found.get(name, ())])
        p99s = spread([one.p99 for one in found.get(name, ())])
        what = f"text puts, {name}, beside {STREAMS} streams and {PUBLISHES:,} publishes/s"
        made.append(Check(f"{what}: rate", rates.median if rates else None, "at least", must=MUST_RATE, unit="×"))
        made.append(Check(f"{what}: p99", p99s.median if p99s else None, "at most", must=MUST_P99, unit="×"))
    return made


def table(found: Rounds) -> Table:
    """The rates and latencies of the text protocol's loads, alone and beside REST."""
    rows = []
    for name in PLANS:
        rounds = found.get(name, ())
        figures = (
            ([one.alone.messages_per_second for one in rounds], 0),
            ([one.beside.messages_per_second for one in rounds], 0),
            ([one.rate for one in rounds], 2),
            ([one.alone.p99_us / 1000 for one in rounds], 2),
            ([one.beside.p99_us / 1000 for one in rounds], 2),
            ([one.p99 for one in rounds], 2),
            ([one.rate_elsewhere for one in rounds], 2),
            ([one.p99_elsewhere for one in rounds], 2),
            ([one.seen.p99_ms for one in rounds], 1),
            ([one.seen.processors for one in rounds], 3),
        )
        rows.append([name, *(of_rounds(spread(values), digits) for values, digits in figures)])
    text = ["text puts", "alone, 1/s", "beside REST, 1/s", "×", "alone, p99 ms", "beside, p99 ms", "×"]
    columns = [*text, "REST elsewhere: rate ×", "p99 ×", "a publish, p99 ms", "REST's own load, processors"]
    return Table("A load of the text protocol beside REST", columns, rows)


def _measure(bench: Bench, level: Level, plan: LoadPlan, turn: int) -> Beside:
    """A load of one broker alone, beside REST, and beside REST at a second broker, in odd rounds alone first."""
    seconds = BEGIN_SECONDS + plan.seconds + plan.warmup_seconds
    with _started(bench, level) as (server, port), _started(bench, level) as (_, other_port):
        run_load("metaq-put", server.port, LoadPlan(plan.connections, plan.in_flight, plan.body_bytes, 2.0))
        alone = run_load("metaq-put", server.port, plan) if turn % 2 else None
        with loading(port, seconds, PUBLISHES, STREAMS) as rest:
            beside = run_load("metaq-put", server.port, plan)
            seen = figures_of(rest, seconds)
        with loading(other_port, seconds, PUBLISHES, STREAMS) as rest:
            elsewhere = run_load("metaq-put", server.port, plan)
            figures_of(rest, seconds)
        return Beside(alone or run_load("metaq-put", server.port, plan), beside, elsewhere, seen)


def _measure_cost(bench: Bench) -> float:
    """Microseconds of processor time that a publish costs; the median of 5 slices."""
    plan = LoadPlan(1, 1, BODY_BYTES, COST_SECONDS, 0.0, count=COST_PUBLISHES // 5, topic=TOPIC)
    with _started(bench, Level.MEMORY) as (server, port):
        slices = []
        for _ in range(6):
            before = processor_seconds(server.pid)
            published = run_load(PUBLISH, port, plan).messages
            slices.append(1e6 * (processor_seconds(server.pid) - before) / published)
        return percentile(slices[1:], 0.5)  # the first one warms up


@contextmanager
def _started(bench: Bench, level: Level) -> Iterator[tuple[Server, int]]:
    """A broker with the topic, and its HTTP port."""
    port = free_port()
    with bench.fresh_folder() as folder, metaq(level).running(folder, ("--http-listen", f"127.0.0.1:{port}")) as server:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        headers = {"Content-Type": "application/json"}
        for topic in (TOPIC, TAILED_TOPIC):
            connection.request("PUT", f"/api/v1/topics/{topic}", b'{"partitions":4}', headers)
            connection.getresponse().read()
        connection.close()
        yield server, port

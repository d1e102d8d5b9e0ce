"""What metrics cost a put in processor time: the HTTP port and its watcher, a scrape each second, what is always counted."""

import re
import threading
import timeit
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks.bench import Bench
from benchmarks.figures import Check, MeasurementError, percentile, spread
from benchmarks.peers import Level, free_port, metaq
from benchmarks.programs import LoadPlan
from benchmarks.replicas import Replicas, measure_cost, on_one_processor
from benchmarks.report import Report, Table, of_rounds
from metaq.client import TextClient
from metaq.clock import SystemClock
from metaq.server.metrics import Histogram
from metaq.server.turn import SEND_BOUNDS

ROUNDS = 9
BODY_BYTES = 128
SHAPES = ((50, 1), (50, 16), (4, 100))
"""Connections and puts in flight on each."""
TOPICS = 200
"""In each broker, for a scrape to have something to tell."""
SCRAPE_SECONDS = 1.0
MUST_PERCENT = 3.0

NONE, PORT, SCRAPED = "no port", "port", "port, a scrape each second"
WAYS = (NONE, PORT, SCRAPED)


@dataclass(frozen=True)
class Cost:
    """One figure of one round. `counting_us` is what the histogram took of it, and `turns` how many it entered for a put."""

    put_us: float
    turns: float
    counting_us: float


Shape = tuple[int, int]
Costs = Mapping[Shape, Sequence[Mapping[str, Cost]]]
"""By shape, of each round what each way costs."""


def run(bench: Bench) -> Report:
    rounds = bench.rounds(ROUNDS)
    puts = 100_000 if bench.quick else 400_000
    costs: defaultdict[Shape, list[Mapping[str, Cost]]] = defaultdict(list)
    cells: list[Mapping[str, object]] = []
    if bench.usable(metaq(Level.MEMORY)):
        with on_one_processor():
            observation_us = measure_observation()
        for turn in range(1, rounds + 1):
            bench.console.print(f"round {turn} of {rounds}", highlight=False)
            for shape in SHAPES:
                costs[shape].append(_round(bench, cells, turn, shape, puts, observation_us))
    settings = {
        "rounds": f"{rounds}; figures are medians, those in percent of two cells right after each other",
        "broker": f"fresh for each figure, at MEMORY, every other setting at its default, with messages in {TOPICS} topics",
        "processor time": f"utime + stime of the broker over {puts:,} puts of {BODY_BYTES} B in a closed loop; "
        "broker, load and scrapes on one processor",
        "always counted": "the histogram of send times, once a turn of the loop: turns a put, by what one costs here",
    }
    return Report("metrics", settings, [table(costs)], checks(costs), cells, bench.notes, bench.failures)


def measure_observation() -> float:
    """Microseconds that a turn of the broker spends on its histogram: two looks at the clock and an entry; the median of 9."""
    clock, histogram = SystemClock(), Histogram(SEND_BOUNDS)

    def observe() -> None:
        began = clock.monotonic()
        histogram.observe(clock.monotonic() - began)

    times = 100_000
    return percentile([1e6 * seconds / times for seconds in timeit.repeat(observe, number=times, repeat=9)], 0.5)


def _round(
    bench: Bench, cells: list[Mapping[str, object]], turn: int, shape: Shape, puts: int, observation_us: float
) -> Mapping[str, Cost]:
    """Every way with one shape of load, right after each other; the first one is another in each round."""
    found: dict[str, Cost] = {}
    first = turn % len(WAYS)
    for way in (*WAYS[first:], *WAYS[:first]):
        name = f"{way}, {shape[0]} × {shape[1]}"
        cost = bench.attempt(name, _measuring(bench, way, LoadPlan(*shape, BODY_BYTES, 60.0, 0.0, puts), observation_us))
        cells.append({"system": name, "round": turn, "figures": vars(cost) if cost else None})
        if cost:
            found[way] = cost
            bench.console.print(f"{name}: {cost.put_us:.2f} µs a put", highlight=False)
    return found


def _measuring(bench: Bench, way: str, plan: LoadPlan, observation_us: float) -> Callable[[], Cost]:
    def measure() -> Cost:
        assert plan.count is not None
        port = free_port()
        place = ("--http-listen", "none" if way == NONE else f"127.0.0.1:{port}")
        with on_one_processor(), bench.fresh_folder() as folder, metaq(Level.MEMORY).running(folder, place) as server:
            with TextClient(port=server.port) as client:
                for topic in range(TOPICS):
                    client.put(f"topic{topic}", b"hello")
            before = 0 if way == NONE else turns_of(port)
            with scraping(port if way == SCRAPED else None):
                put_us = measure_cost(Replicas(server, None), plan, plan.count // 10).master_us
            turns = 0 if way == NONE else (turns_of(port) - before) / (1.1 * plan.count)  # those of the warm-up are in it
        return Cost(put_us, turns, turns * observation_us)

    return measure


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        text: str = answer.read().decode()
        return text


def turns_of(port: int) -> int:
    """Turns of the loop that the broker has entered into its histogram."""
    found = re.search(r"^metaq_send_seconds_count (\d+)$", scrape(port), re.MULTILINE)
    if found is None:
        raise MeasurementError("/metrics has no metaq_send_seconds_count")
    return int(found[1])


@contextmanager
def scraping(port: int | None) -> Iterator[None]:
    """Scrape each second meanwhile, unless there is no port."""
    over = threading.Event()

    def again_and_again() -> None:
        while port is not None and not over.wait(SCRAPE_SECONDS):
            scrape(port)

    thread = threading.Thread(target=again_and_again)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def more_percent(costs: Costs, shape: Shape, way: str) -> list[float]:
    """How much more a put costs than without the port and without counting, of each round that has both."""
    pairs = [(found[way], found[NONE].put_us) for found in costs.get(shape, ()) if {way, NONE} <= found.keys()]
    return [100 * (cost.put_us / (alone_us - cost.counting_us) - 1) for cost, alone_us in pairs]


def checks(costs: Costs) -> list[Check]:
    """What metrics may cost."""
    return [
        Check(
            f"processor time of a put, {shape[0]} × {shape[1]}: more with metrics, {SCRAPED}",
            found.median if (found := spread(more_percent(costs, shape, SCRAPED))) else None,
            "at most",
            must=MUST_PERCENT,
            unit="%",
        )
        for shape in SHAPES
    ]


def table(costs: Costs) -> Table:
    rows = []
    for shape in SHAPES:
        for way in WAYS:
            found = [each[way] for each in costs.get(shape, ()) if way in each]
            more = [] if way == NONE else more_percent(costs, shape, way)
            figures = ([cost.put_us for cost in found], more, [cost.counting_us for cost in found if cost.turns])
            digits = (2, 1, 3)
            rows.append(
                [
                    f"{shape[0]} × {shape[1]}, {way}",
                    *(of_rounds(spread(values), places) for values, places in zip(figures, digits, strict=True)),
                ]
            )
    columns = ["", "µs a put", "more than without, %", "of that always counted, µs"]
    return Table("Processor time of the broker", columns, rows)

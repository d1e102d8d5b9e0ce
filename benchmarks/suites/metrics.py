"""The processor time that metrics cost a put: the HTTP port and its watcher, a scrape each second, what is always counted."""

import re
import threading
import timeit
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from benchmarks.bench import Bench
from benchmarks.figures import Check, MeasurementError, percentile, spread
from benchmarks.peers import Level, Server, free_port, metaq
from benchmarks.programs import LoadPlan, run_load
from benchmarks.replicas import on_one_processor, processor_seconds
from benchmarks.report import Report, Table, of_rounds
from metaq.client import TextClient
from metaq.clock import SystemClock
from metaq.engine.figures.metrics import Histogram
from metaq.engine.turn import SEND_BOUNDS

ROUNDS = 9
SLICES = 6
"""Of the load of a round: ways are compared second by second, since a machine is not as fast in one as in the next."""
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
    puts = 60_000 if bench.quick else 600_000
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
        "rounds": f"{rounds}; figures are medians, those in percent of two brokers of one round",
        "broker": f"fresh for each round, one for each way, loaded in turn in {SLICES} slices; "
        f"at MEMORY, every other setting at its default, with messages in {TOPICS} topics",
        "processor time": f"of all threads of the broker over {puts:,} puts of {BODY_BYTES} B in a closed loop; "
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
    """Every way with one shape of load; nothing when one of them cannot be measured."""
    name = f"{shape[0]} × {shape[1]}"
    found = bench.attempt(name, lambda: _measure(bench, shape, puts // SLICES, turn, observation_us)) or {}
    for way in WAYS:
        cost = found.get(way)
        cells.append({"system": f"{way}, {name}", "round": turn, "figures": vars(cost) if cost else None})
        if cost:
            bench.console.print(f"{way}, {name}: {cost.put_us:.2f} µs a put", highlight=False)
    return found


def _measure(bench: Bench, shape: Shape, slice_puts: int, turn: int, observation_us: float) -> Mapping[str, Cost]:
    """A fresh broker for each way, all on one processor, loaded in turn, each first once in three slices."""
    with on_one_processor(), ExitStack() as stack:
        sides = {way: stack.enter_context(_started(bench, way)) for way in WAYS}
        for side in sides.values():
            side.load(shape, slice_puts)  # which does not count
        turns = {way: side.turns() for way, side in sides.items()}
        seconds = dict.fromkeys(WAYS, 0.0)
        for number in range(turn, turn + SLICES):
            first = number % len(WAYS)
            for way in (*WAYS[first:], *WAYS[:first]):
                seconds[way] += sides[way].load(shape, slice_puts)
        puts = SLICES * slice_puts
        entered = {way: (side.turns() - turns[way]) / puts for way, side in sides.items()}
        return {way: Cost(1e6 * seconds[way] / puts, entered[way], entered[way] * observation_us) for way in WAYS}


@dataclass(frozen=True)
class Side:
    """A broker that is measured. `http_port` is 0 where it has none."""

    server: Server
    http_port: int

    def load(self, shape: Shape, puts: int) -> float:
        """Put so many messages; the processor time in seconds that they cost the broker."""
        before = processor_seconds(self.server.pid)
        run_load("metaq-put", self.server.port, LoadPlan(*shape, BODY_BYTES, 60.0, 0.0, puts))
        return processor_seconds(self.server.pid) - before

    def turns(self) -> int:
        """Turns of the loop that it has entered into its histogram; 0 without a port, where nobody can ask."""
        return turns_of(self.http_port) if self.http_port else 0


@contextmanager
def _started(bench: Bench, way: str) -> Iterator[Side]:
    """A broker with something to tell, scraped where the way says so."""
    port = 0 if way == NONE else free_port()
    place = ("--http-listen", f"127.0.0.1:{port}" if port else "none")
    with bench.fresh_folder() as folder, metaq(Level.MEMORY).running(folder, place) as server:
        with TextClient(port=server.port) as client:
            for topic in range(TOPICS):
                client.put(f"topic{topic}", b"hello")
        with scraping(port if way == SCRAPED else None):
            yield Side(server, port)


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
    """Return the checks of what metrics may cost."""
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

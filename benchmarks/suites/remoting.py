"""The required speed of the remoting protocol: sends beside text puts, pulls, held pulls, and thousands of topics."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from benchmarks.bench import Bench, raw
from benchmarks.consuming import Consumed, consume
from benchmarks.figures import Check, Load, percentile, spread
from benchmarks.holding import Holding, holder, measure_holding
from benchmarks.memory import KILOBYTE, MEGABYTE
from benchmarks.pairs import Race, Sender
from benchmarks.peers import Level, metaq
from benchmarks.programs import LoadPlan, run_load
from benchmarks.report import Report, Table, of_rounds
from benchmarks.suites.get import hot_log, messages_for
from benchmarks.topics import PARTITIONS, Serving, Topics, measure_topics

ROUNDS = 5
TOPIC_ROUNDS = 3
BODY_BYTES = 128
BATCH = 32

PULL_LOG_BYTES = 192 << 20
PULL_BODY_BYTES = 1024
PULL_MUST_MB_PER_SECOND = 400.0
CLIENT_MUST_MB_PER_SECOND = 100.0
# What Java clients ask for, and as much as the broker gives in one answer, which is what our client asks for.
SMALL_PULL, LARGE_PULL = 32, 1024

HELD_PULLS = 1000
HELD_MUST_KB = 12
WAKES = 300
WAKE_MUST_MS = 5

TOPICS = 2000
START_MUST_SECONDS = 5
TOPICS_MUST_MB = 200
# Store files that are open at once by default (max_open_files) and room for everything else, whatever the partitions.
DESCRIPTORS_MUST = 512 + 64


TEXT_PUT = Sender("text put", "metaq-put")
SENDERS = (
    Sender("send, bare", "remoting-send", must=0.4, aim=0.7),
    Sender("send, as Java does", "remoting-send-keyed", must=0.25, aim=0.5),
    Sender(f"batch of {BATCH}, bare", "remoting-batch", 10, BATCH, must=0.9, aim=2.0),
    Sender(f"batch of {BATCH}, as Java does", "remoting-batch-keyed", 10, BATCH, must=0.6, aim=2.0),
)


SENDS = Race(TEXT_PUT, SENDERS, BODY_BYTES)


@dataclass
class Part:
    """The contribution of one part of the suite to the report."""

    table: Table
    checks: list[Check]
    cells: list[Mapping[str, object]] = field(default_factory=list)


def run(bench: Bench) -> Report:
    seconds, warmup = (1.0, 0.2) if bench.quick else (3.0, 0.5)
    rounds = bench.rounds(ROUNDS)
    parts: list[Part] = []
    if bench.usable(metaq(Level.MEMORY)):
        parts = [
            sends(bench, rounds, seconds, warmup),
            pulls(bench, rounds, seconds, warmup),
            held(bench, rounds),
            topics(bench, bench.rounds(TOPIC_ROUNDS)),
        ]
    settings = {
        "rounds": f"{rounds}, {bench.rounds(TOPIC_ROUNDS)} of many topics; figures are medians, "
        "a ratio is the median of those to the text puts right before",
        "broker": "MEMORY, fresh for each figure; the Python client and the load generator pull from the same one",
        "seconds a cell": f"{seconds} after {warmup} of warm-up",
        "as Java does": "JSON header; KEYS, UNIQ_KEY, WAIT and TAGS (in batches UNIQ_KEY and TAGS of each message), all but "
        "WAIT and TAGS different in every message, as are the opaque and the time of birth",
        "bare": "JSON header, empty properties; the opaque and the time of birth differ",
        "held pulls": "each of a partition and on a connection of its own, whose memory is counted too",
    }
    return Report(
        "remoting",
        settings,
        [part.table for part in parts],
        [check for part in parts for check in part.checks],
        [cell for part in parts for cell in part.cells],
        bench.notes,
        bench.failures,
    )


# -- sending ----------------------------------------------------------------------------------------------------------


def sends(bench: Bench, rounds: int, seconds: float, warmup: float) -> Part:
    """All senders, each right after text puts."""
    pairs, cells = SENDS.run(bench, rounds, seconds, warmup)
    return Part(SENDS.table(pairs, f"Sends of {BODY_BYTES} B, MEMORY"), SENDS.checks(pairs), cells)


def _rounds(values: Sequence[float], digits: int = 2) -> str:
    return of_rounds(spread(values), digits)


def _median(values: Sequence[float]) -> float | None:
    found = spread(values)
    return found.median if found else None


# -- pulling ----------------------------------------------------------------------------------------------------------

TEXT_GETS = "text gets of 64 KiB, 4 × 4"
SMALL_PULLS, LARGE_PULLS = (f"pulls of at most {most}, 4 × 1" for most in (SMALL_PULL, LARGE_PULL))
CLIENT = "Python client"


def pulls(bench: Bench, rounds: int, seconds: float, warmup: float) -> Part:
    """Hot messages out of one partition, in turn by the load generator and by our client."""
    system, messages = metaq(Level.MEMORY), messages_for(PULL_LOG_BYTES, PULL_BODY_BYTES)
    plan = LoadPlan(4, 1, PULL_BODY_BYTES, seconds, warmup)
    loads = {
        TEXT_GETS: ("metaq-get", replace(plan, in_flight=4)),
        SMALL_PULLS: ("remoting-pull", replace(plan, batch=SMALL_PULL)),
        LARGE_PULLS: ("remoting-pull", replace(plan, batch=LARGE_PULL)),
    }
    figures: dict[str, list[Load | Consumed]] = defaultdict(list)
    cells: list[Mapping[str, object]] = []
    for turn in range(1, rounds + 1):

        def measure(turn: int = turn) -> None:
            with hot_log(bench, system, PULL_BODY_BYTES, messages) as server:
                for name, (protocol, load_plan) in loads.items():
                    load = run_load(protocol, server.port, load_plan)
                    bench.show(name, load)
                    figures[name].append(load)
                    cells.append(raw(name, turn, load))
                consumed = consume(server, "bench", PULL_BODY_BYTES, seconds, warmup)
            bench.console.print(f"{CLIENT}: {consumed.mb_per_second:,.1f} MB/s", highlight=False)
            figures[CLIENT].append(consumed)
            cells.append({"system": CLIENT, "round": turn, "figures": asdict(consumed)})

        bench.attempt(f"pulls, round {turn}", measure)
    rates = {name: [figure.mb_per_second for figure in figures[name]] for name in (*loads, CLIENT)}
    rows = [
        [name, _rounds(rates[name], 1), _rounds([figure.messages_per_second for figure in figures[name]], 0)] for name in rates
    ]
    checks = [
        Check(LARGE_PULLS, _median(rates[LARGE_PULLS]), "at least", must=PULL_MUST_MB_PER_SECOND, unit="MB/s"),
        Check(f"pulls by the {CLIENT}", _median(rates[CLIENT]), "at least", must=CLIENT_MUST_MB_PER_SECOND, unit="MB/s"),
    ]
    return Part(Table(f"Pulls of {PULL_BODY_BYTES} B, hot", ["", "MB/s", "messages/s"], rows), checks, cells)


# -- held pulls -------------------------------------------------------------------------------------------------------


def held(bench: Bench, rounds: int) -> Part:
    """Many held pulls on a fresh broker in each round, woken one by one."""
    taken: list[Holding] = []
    wakes = 200 if bench.quick else WAKES

    def measure() -> Holding:
        with bench.fresh_folder() as folder, holder().running(folder / "server") as server:
            return measure_holding(server, HELD_PULLS, wakes)

    for _ in range(rounds):
        holding = bench.attempt("held pulls", measure)
        if holding:
            taken.append(holding)
            shown = f"{holding.each_bytes / KILOBYTE:.2f} KB each, slowest {max(holding.wakes_us) / 1000:.2f} ms"
            bench.console.print(f"held pulls: {shown}", highlight=False)
    return Part(
        Table(f"{HELD_PULLS:,} held pulls, {wakes} wake-ups a round", ["", "median of rounds"], _held_rows(taken)),
        held_checks(taken),
        [{"held pulls": HELD_PULLS, "round": turn, **asdict(holding)} for turn, holding in enumerate(taken, 1)],
    )


def _wake_ms(taken: Sequence[Holding], share: float) -> list[float]:
    return [percentile(holding.wakes_us, share) / 1000 for holding in taken]


def _held_rows(taken: Sequence[Holding]) -> list[list[str]]:
    shares = {"wake-up p50, ms": 0.5, "wake-up p99, ms": 0.99, "slowest wake-up, ms": 1.0}
    each = [holding.each_bytes / KILOBYTE for holding in taken]
    return [["KB each", _rounds(each)], *([name, _rounds(_wake_ms(taken, share))] for name, share in shares.items())]


def held_checks(taken: Sequence[Holding]) -> list[Check]:
    each = _median([holding.each_bytes / KILOBYTE for holding in taken])
    slowest = _median(_wake_ms(taken, 1.0))
    return [
        Check(f"each of {HELD_PULLS:,} held pulls, resident", each, "at most", must=HELD_MUST_KB, unit="KB"),
        Check("a message wakes the right pull: slowest of a round", slowest, "at most", must=WAKE_MUST_MS, unit="ms"),
    ]


# -- many topics ------------------------------------------------------------------------------------------------------


def topics(bench: Bench, rounds: int) -> Part:
    """Brokers with many topics, stopped and killed and started again."""
    count = TOPICS // 10 if bench.quick else TOPICS
    taken: list[Topics] = []

    def measure() -> Topics:
        with bench.fresh_folder() as folder:
            return measure_topics(metaq(Level.MEMORY), folder / "server", count)

    for _ in range(rounds):
        found = bench.attempt("many topics", measure)
        if found:
            taken.append(found)
            shown = f"{found.stopped.started_seconds:.2f} and {found.killed.started_seconds:.2f} s"
            bench.console.print(f"many topics: started in {shown}", highlight=False)
    name = f"{count:,} topics × {PARTITIONS} partitions"
    return Part(
        Table(name, ["", "after a stop", "after kill -9"], _topic_rows(taken)),
        topic_checks(name, taken),
        [{"topics": count, "round": turn, **asdict(found)} for turn, found in enumerate(taken, 1)],
    )


def _topic_rows(taken: Sequence[Topics]) -> list[list[str]]:
    sides: list[list[Serving]] = [[found.stopped for found in taken], [found.killed for found in taken]]
    made = _rounds([found.made_seconds for found in taken], 1)
    return [
        ["start, s", *(_rounds([serving.started_seconds for serving in side]) for side in sides)],
        ["resident, started, MB", *(_rounds([serving.started_bytes / MEGABYTE for serving in side], 1) for side in sides)],
        ["resident, all used, MB", *(_rounds([serving.used_bytes / MEGABYTE for serving in side], 1) for side in sides)],
        ["descriptors, all used", *(_rounds([serving.used_descriptors for serving in side], 0) for side in sides)],
        ["before: a message put into and pulled from each partition, s", made, "-"],
    ]


def topic_checks(name: str, taken: Sequence[Topics]) -> list[Check]:
    """Return the checks of many topics; the worse of the two starts of each round counts."""
    pairs = [(found.stopped, found.killed) for found in taken]
    start = _median([max(serving.started_seconds for serving in pair) for pair in pairs])
    resident = _median([max(serving.used_bytes for serving in pair) / MEGABYTE for pair in pairs])
    descriptors = _median([max(serving.used_descriptors for serving in pair) for pair in pairs])
    return [
        Check(f"{name}: start", start, "at most", must=START_MUST_SECONDS, unit="s"),
        Check(f"{name}: resident", resident, "at most", must=TOPICS_MUST_MB, unit="MB"),
        Check(f"{name}: descriptors", descriptors, "at most", must=DESCRIPTORS_MUST),
    ]

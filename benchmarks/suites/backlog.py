"""Does a broker with 100 million messages stored take puts, start and rest as one with 20 million, and as an empty one?"""

import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks.bench import Bench, raw
from benchmarks.figures import Check, MeasurementError, ratio, spread
from benchmarks.memory import MEGABYTE, Sampler, drift_bytes, resting_bytes, status_bytes
from benchmarks.peers import Level, Server, System, metaq
from benchmarks.programs import LoadPlan, run_load
from benchmarks.report import Report, Table, number, of_rounds
from benchmarks.suites.get import fill

ROUNDS = 7
STARTS = 5
BODY_BYTES = 128
DRIFT_MUST_MB = 30
USUAL, TIMES_USUAL = 20_000_000, 5
"""The smaller backlog, and how many times as many messages the larger one has."""
WITHIN = 0.1
"""How much worse a figure may be with the larger backlog."""
MESSAGE_BYTES = 280
"""More than a message of ``BODY_BYTES`` takes on the disk: 260."""
SPARE_BYTES = 6 << 30
"""Segments that are reserved, and what the rounds put."""
LONGEST_S = 1200.0
"""Seconds in which all messages have to be put and read; beyond them the run ends without the larger backlog."""
EMPTY = "empty"


@dataclass
class Stage:
    """The figures of one broker with so many messages stored."""

    messages: int
    rates: list[float] = field(default_factory=list)
    empty_rates: list[float] = field(default_factory=list)
    """Those of a fresh broker, in the same rounds."""
    starts: list[float] = field(default_factory=list)
    """Seconds from starting the process to its ready line, after it was ended in order."""
    idle: list[float] = field(default_factory=list)
    """Resident bytes at rest after each of these starts."""
    private: list[float] = field(default_factory=list)
    """Private bytes at rest after each of these starts."""

    @property
    def name(self) -> str:
        return f"{self.messages:,} messages"

    @property
    def of_empty(self) -> float | None:
        return ratio(spread(self.rates), spread(self.empty_rates))


def backlog_messages(quick: bool) -> int:
    return 1_000_000 if quick else USUAL


def run(bench: Bench) -> Report:
    rounds = bench.rounds(ROUNDS)
    smaller = bench.backlog or backlog_messages(bench.quick)
    stages = [Stage(smaller), Stage(TIMES_USUAL * smaller)]
    plan = LoadPlan(4, 100, BODY_BYTES, seconds=1.0 if bench.quick else 3.0, warmup_seconds=0.5)
    system = metaq(Level.MEMORY)
    cells: list[Mapping[str, object]] = []
    private = Private()
    if bench.usable(system):
        with bench.fresh_folder() as folder:
            growing = Growing(bench, system, folder, plan, rounds, private, cells)
            bench.attempt("backlog", lambda: growing.measure(stages))
    settings = {
        "rounds": f"{rounds}, alternating; {STARTS} starts; figures are medians, ratios those of two medians",
        "puts": f"{BODY_BYTES} B, MEMORY, 4 × 100, {plan.seconds} s after {plan.warmup_seconds} of warm-up",
        "brokers": "one that keeps its backlog and runs on, and a fresh one each round",
        "start": "from starting the process to its ready line, after it was ended in order",
        "memory": "resident and private (RssAnon), at rest after such a start",
    }
    rows = [
        [
            stage.name,
            of_rounds(spread(stage.rates)),
            of_rounds(spread(stage.empty_rates)),
            of_rounds(spread(stage.starts), 2),
            *(of_rounds(spread([value / MEGABYTE for value in values]), 1) for values in (stage.idle, stage.private)),
        ]
        for stage in stages
    ]
    columns = ["", "messages/s", "empty broker's", "start s", "idle MB", "private MB"]
    tables = [Table("With the backlog", columns, rows), private.table()]
    return Report("backlog", settings, tables, checks(stages, private), cells, bench.notes, bench.failures)


def checks(stages: list[Stage], private: "Private") -> list[Check]:
    smaller, larger = stages
    of_smaller = f"with {larger.name}, of that with {smaller.name}"
    shares = [spread([share]) if (share := stage.of_empty) is not None else None for stage in (larger, smaller)]

    def grown(what: str) -> float | None:
        return ratio(spread(getattr(larger, what)), spread(getattr(smaller, what)))

    return [
        *(
            Check(f"put rate with {stage.name} stored: of an empty broker's", stage.of_empty, "at least", 0.85, 0.95)
            for stage in stages
        ),
        Check(f"put rate {of_smaller}", ratio(*shares), "at least", 1 - WITHIN),
        Check(f"start {of_smaller}", grown("starts"), "at most", 1 + WITHIN),
        Check(f"idle memory {of_smaller}", grown("idle"), "at most", 1 + WITHIN),
        Check(f"private memory {of_smaller}", grown("private"), "at most", 1 + WITHIN),
        Check(
            f"RssAnon while {larger.messages:,} pass and are read: largest drift",
            private.drift_mb,
            "at most",
            must=DRIFT_MUST_MB,
            unit="MB",
        ),
    ]


class Private:
    """The private memory of the broker while messages pass through it."""

    def __init__(self) -> None:
        self._rows: list[list[str]] = []
        self._start = 0
        self.drift_mb: float | None = None

    def table(self) -> Table:
        return Table("Private memory (RssAnon)", ["", "lowest MB", "highest MB"], self._rows)

    def begin(self, server: Server) -> None:
        """Take the value that drifts count from, when a hundredth has passed: by then every buffer was used once."""
        self._start = status_bytes(server.pid, "RssAnon")
        self._add("after the first hundredth", [self._start])

    def add(self, what: str, samples: list[int]) -> None:
        self._add(what, samples)
        self.drift_mb = max(self.drift_mb or 0.0, drift_bytes(samples, self._start) / MEGABYTE)

    def _add(self, what: str, samples: list[int]) -> None:
        self._rows.append([what, *(number(value / MEGABYTE, 1) for value in (min(samples), max(samples)))])


@dataclass
class Growing:
    """One broker whose backlog grows from stage to stage, and the figures of each."""

    bench: Bench
    system: System
    folder: Path
    plan: LoadPlan
    rounds: int
    private: Private
    cells: list[Mapping[str, object]]
    until: float = field(default_factory=lambda: time.monotonic() + LONGEST_S)

    def measure(self, stages: list[Stage]) -> None:
        check_room(self.folder, stages[-1].messages)
        server, stored = self.system.start(self.folder / "server"), 0
        try:
            for stage in stages:
                self.pass_through(server, stored, stage.messages)
                stored = stage.messages
                self.put_in_turn(server, stage)
                for _ in range(STARTS):
                    server.stop()
                    server = self.system.start(self.folder / "server")
                    stage.starts.append(server.started_seconds)
                    stage.idle.append(resting_bytes(server.pid))
                    stage.private.append(status_bytes(server.pid, "RssAnon"))
        finally:
            server.stop()

    def pass_through(self, server: Server, stored: int, messages: int) -> None:
        """Put until so many messages are there besides those of rounds, and read them from the first one on."""
        first = max(1, (messages - stored) // 100)
        self.fill(server, first)
        self.read(server, first)
        self.private.begin(server)
        with Sampler(server.pid, "RssAnon") as sampler:
            self.fill(server, messages - stored - first)
        self.private.add(f"until {messages:,} are put", sampler.samples)
        with Sampler(server.pid, "RssAnon") as sampler:
            self.read(server, messages)
        self.private.add(f"while {messages:,} are read", sampler.samples)

    def fill(self, server: Server, messages: int) -> None:
        fill(self.system, server, BODY_BYTES, messages, self.left())

    def read(self, server: Server, messages: int) -> None:
        """Read the first so many messages of the log from its start, in blocks of 64 KiB."""
        load = run_load(self.system.gets, server.port, LoadPlan(1, 4, BODY_BYTES, self.left(), 0.0, count=messages))
        if load.messages < messages or load.wraps > 1:  # the gets in flight behind the last message meet the end once
            raise MeasurementError(f"{load.messages:,} of {messages:,} messages were read, {load.wraps} times to the end")

    def left(self) -> float:
        """Return the seconds left; MeasurementError without any."""
        left = self.until - time.monotonic()
        if left <= 0:
            raise MeasurementError(f"not within {LONGEST_S:.0f} s")
        return left

    def put_in_turn(self, server: Server, stage: Stage) -> None:
        """Measure puts to this broker and to an empty one, in turn."""
        for turn in range(1, self.rounds + 1):
            empty = self.bench.put(self.system, self.plan)
            full = self.bench.attempt(stage.name, partial(run_load, self.system.puts, server.port, self.plan))
            self.bench.show(stage.name, full)
            for name, load, rates in ((EMPTY, empty, stage.empty_rates), (stage.name, full, stage.rates)):
                self.cells.append(raw(name, turn, load))
                rates.extend([load.messages_per_second] if load else [])


def check_room(folder: Path, messages: int) -> None:
    """Raise MeasurementError when the disk has too little room: a full one would end the run after many minutes."""
    needed, free = messages * MESSAGE_BYTES + SPARE_BYTES, shutil.disk_usage(folder).free
    if free < needed:
        raise MeasurementError(f"{messages:,} messages need {needed >> 30} GiB of disk, and {free >> 30} GiB are free (--data)")

"""The get ladder: hot messages in blocks, beside a C sendfile loop that serves the same bytes, and the peers."""

import struct
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path

from benchmarks.bench import Bench, describe, raw
from benchmarks.figures import Load, MeasurementError, ratio, spread
from benchmarks.peers import Server, System, sendfile_loop
from benchmarks.programs import LoadPlan, run_load
from benchmarks.report import Report, Table, middle, number
from benchmarks.suites.put import CONNECTIONS, IN_FLIGHT, SIZES, Step

RECORD_HEADER = struct.Struct(">iIqi")  # length, checksum, id, flag of the text protocol's message encoding
BLOCK_BYTES = 65536
LOG_BYTES = 128 << 20
MOST_MESSAGES = 1_000_000
ROUNDS = 3


def messages_for(log_bytes: int, body_bytes: int) -> int:
    """How many messages make a log of that size, within MOST_MESSAGES: small ones need not be as many bytes."""
    return min(MOST_MESSAGES, log_bytes // (RECORD_HEADER.size + body_bytes))


def write_records(file: Path, body_bytes: int, messages: int) -> None:
    """Write the bytes that a text reader of a partition with these messages would see."""
    body = bytes(33 + i % 90 for i in range(body_bytes))
    record = RECORD_HEADER.pack(body_bytes, zlib.crc32(body) & 0x7FFFFFFF, 1, 0) + body
    many = max(1, (1 << 20) // len(record))
    with file.open("wb") as out:
        for _ in range(messages // many):
            out.write(record * many)
        out.write(record * (messages % many))


@contextmanager
def hot_log(bench: Bench, system: System, body_bytes: int, messages: int) -> Iterator[Server]:
    """A fresh server with these messages, just put into it; the sendfile loop gets them as a file."""
    with bench.fresh_folder() as folder:
        if not system.puts:
            records = folder / "records"
            write_records(records, body_bytes, messages)
            system = sendfile_loop(records)
        with system.running(folder / "server") as server:
            if system.puts:
                fill(system, server, body_bytes, messages)
            yield server


def fill(system: System, server: Server, body_bytes: int, messages: int, seconds: float = 900.0) -> None:
    """Put exactly so many messages."""
    load = run_load(system.puts, server.port, LoadPlan(4, 100, body_bytes, seconds, 0.0, count=messages))
    if load.messages != messages:
        raise MeasurementError(f"only {load.messages:,} of {messages:,} messages were put in {seconds} s")


def get_plan(system: System, step: Step, messages: int, seconds: float, warmup: float) -> LoadPlan:
    """The load of one cell. NATS ends before its last message: a pull beyond it is not answered, it waits."""
    body_bytes, connections, in_flight = step
    block = max(BLOCK_BYTES, RECORD_HEADER.size + body_bytes)
    plan = LoadPlan(connections, in_flight, body_bytes, seconds, warmup, block_bytes=block)
    if system.gets != "nats-pull":
        return plan
    return replace(plan, count=messages - in_flight * (block // (RECORD_HEADER.size + body_bytes)))


def run(bench: Bench) -> Report:
    seconds, warmup = (0.5, 0.1) if bench.quick else (1.0, 0.2)
    sizes, connections, depths = ((1024, 65536), (1, 50), (1, 100)) if bench.quick else (SIZES, CONNECTIONS, IN_FLIGHT)
    rounds = bench.rounds(ROUNDS)
    systems = [sendfile_loop(Path("records")), *bench.storing()]
    figures: dict[tuple[Step, str], list[Load]] = defaultdict(list)
    cells: list[Mapping[str, object]] = []
    for turn, size, system in product(range(1, rounds + 1), sizes, systems):

        def measure(turn: int = turn, size: int = size, system: System = system) -> None:
            messages = messages_for(LOG_BYTES, size)
            with hot_log(bench, system, size, messages) as server:
                for step in product([size], connections, depths):
                    plan = get_plan(system, step, messages, seconds, warmup)
                    load = run_load(system.gets, server.port, plan)
                    bench.show(f"{system.name}, get {describe(plan)}", load)
                    cells.append(raw(system.name, turn, load))
                    figures[step, system.name].append(load)

        bench.attempt(f"{system.name}, get {size} B", measure)
    settings = {
        "rounds": str(rounds),
        "seconds a cell": f"{seconds} after {warmup} of warm-up",
        "block": f"as many whole messages as {BLOCK_BYTES} bytes of text encoding hold, at least one",
        "log": f"{LOG_BYTES >> 20} MiB, at most {MOST_MESSAGES:,} messages, just written by the server that is asked",
        "redis": "XRANGE of the first messages, again and again",
        "beanstalkd": "peek: one message a request, it has no batches",
        "nats": "pulls by a consumer of each connection's own; ends with the last message",
    }
    tables = [get_table(systems, list(product(sizes, connections, depths)), figures)]
    return Report("get", settings, tables, raw=cells, notes=bench.notes, failures=bench.failures)


def get_table(systems: list[System], grid: list[Step], figures: Mapping[tuple[Step, str], list[Load]]) -> Table:
    """MB of bodies per second of every system; metaq's also in parts of the sendfile loop's, which comes first."""
    columns = ["bytes × connections × in flight"]
    for system in systems:
        columns += [system.name, *(["of sendfile"] if system.gets == "metaq-get" and system.puts else [])]
    rows = []
    for step in grid:
        row = [" × ".join(map(str, step))]
        limit = spread([load.mb_per_second for load in figures.get((step, systems[0].name), [])])
        for system in systems:
            rate = spread([load.mb_per_second for load in figures.get((step, system.name), [])])
            row += [middle(rate), *([number(ratio(rate, limit), 2)] if system.gets == "metaq-get" and system.puts else [])]
        rows.append(row)
    return Table("Get, hot: MB of bodies per second", columns, rows)

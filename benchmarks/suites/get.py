"""The get ladder: hot blocks of the log beside a C sendfile loop that serves the same bytes."""

import struct
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import product
from pathlib import Path

from benchmarks.bench import Bench, describe, raw
from benchmarks.figures import Load, MeasurementError, ratio, spread
from benchmarks.peers import Level, Server, System, metaq, sendfile_loop
from benchmarks.programs import LoadPlan, run_load
from benchmarks.report import Report, Table, middle, number
from benchmarks.suites.put import CONNECTIONS, IN_FLIGHT, SIZES

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
    """A fresh broker that holds these messages, lately appended; or the sendfile loop on a file of them."""
    with bench.fresh_folder() as folder:
        if system.protocol == "metaq-get":
            records = folder / "records"
            write_records(records, body_bytes, messages)
            system = sendfile_loop(records)
        with system.running(folder / "server") as server:
            if system.protocol == "metaq-put":
                fill(server, body_bytes, messages)
            yield server


def fill(server: Server, body_bytes: int, messages: int, seconds: float = 900.0) -> None:
    """Put exactly so many messages."""
    load = run_load("metaq-put", server.port, LoadPlan(4, 100, body_bytes, seconds, 0.0, count=messages))
    if load.messages != messages:
        raise MeasurementError(f"only {load.messages:,} of {messages:,} messages were put in {seconds} s")


def run(bench: Bench) -> Report:
    seconds, warmup = (0.5, 0.1) if bench.quick else (1.0, 0.2)
    sizes, connections, depths = ((1024, 65536), (1, 50), (1, 100)) if bench.quick else (SIZES, CONNECTIONS, IN_FLIGHT)
    rounds = bench.rounds(ROUNDS)
    systems = [system for system in map(metaq, Level) if bench.usable(system)]
    systems.append(sendfile_loop(Path("records")))
    figures: dict[tuple[str, int, int, int], list[Load]] = defaultdict(list)
    cells: list[Mapping[str, object]] = []
    for turn, size, system in product(range(1, rounds + 1), sizes, systems):

        def measure(size: int = size, system: System = system, turn: int = turn) -> None:
            with hot_log(bench, system, size, messages_for(LOG_BYTES, size)) as server:
                for many, depth in product(connections, depths):
                    block = max(BLOCK_BYTES, RECORD_HEADER.size + size)
                    plan = LoadPlan(many, depth, size, seconds, warmup, block_bytes=block)
                    load = run_load("metaq-get", server.port, plan)
                    bench.show(f"{system.name}, get {describe(plan)}", load)
                    cells.append(raw(system.name, turn, load))
                    figures[system.name, size, many, depth].append(load)

        bench.attempt(f"{system.name}, get {size} B", measure)
    settings = {
        "rounds": str(rounds),
        "seconds a cell": f"{seconds} after {warmup} of warm-up",
        "block": f"{BLOCK_BYTES} bytes, or one record where that is longer",
        "log": f"{LOG_BYTES >> 20} MiB, at most {MOST_MESSAGES:,} messages, lately written by the server that is asked",
    }
    rows = []
    limit = systems[-1].name
    for size, many, depth in product(sizes, connections, depths):
        row = [f"{size} × {many} × {depth}"]
        base = spread([load.mb_per_second for load in figures[limit, size, many, depth]])
        for system in systems[:-1]:
            loads = figures[system.name, size, many, depth]
            ours = spread([load.mb_per_second for load in loads])
            messages = spread([load.messages_per_second for load in loads])
            row += [middle(ours), middle(messages), number(ratio(ours, base), 2)]
        rows.append([*row, middle(base)])
    columns = ["bytes × connections × in flight"]
    for system in systems[:-1]:
        columns += [f"{system.name} MB/s", "messages/s", "of sendfile"]
    table = Table("Get, hot: MB of whole records per second", [*columns, f"{limit} MB/s"], rows)
    return Report("get", settings, [table], raw=cells, notes=bench.notes, failures=bench.failures)

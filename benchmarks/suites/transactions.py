"""The required speed of transactions over the text protocol: beside plain puts of the same durability."""

from collections.abc import Mapping

from benchmarks.bench import Bench
from benchmarks.pairs import Race, Sender
from benchmarks.peers import Level, metaq
from benchmarks.report import Report

ROUNDS = 5
BODY_BYTES = 128
MESSAGES = 10
"""In one transaction."""

CONNECTIONS = 50
PIPELINING_CONNECTIONS, PIPELINED = 4, 10
NAMES = {"metaq-one-phase": f"one-phase transactions of {MESSAGES}", "metaq-two-phase": f"two-phase transactions of {MESSAGES}"}
MUSTS = {"metaq-one-phase": 0.5, "metaq-two-phase": 0.3}


def race(level: Level, connections: int, in_flight: int, *, required: bool) -> Race:
    """Transactions beside puts, with as many messages in flight."""
    senders = tuple(
        Sender(name, protocol, in_flight, MESSAGES, must=MUSTS[protocol] if required else None)
        for protocol, name in NAMES.items()
    )
    return Race(Sender("text put", "metaq-put", MESSAGES * in_flight), senders, BODY_BYTES, connections, level)


RACES = {
    f"MEMORY, {CONNECTIONS} connections": race(Level.MEMORY, CONNECTIONS, 1, required=True),
    f"DISK, {CONNECTIONS} connections": race(Level.DISK, CONNECTIONS, 1, required=True),
    f"MEMORY, {PIPELINING_CONNECTIONS} connections that do not wait for answers": race(
        Level.MEMORY, PIPELINING_CONNECTIONS, PIPELINED, required=False
    ),
}


def run(bench: Bench) -> Report:
    seconds, warmup = (1.0, 0.2) if bench.quick else (3.0, 0.5)
    rounds = bench.rounds(ROUNDS)
    tables, checks = [], []
    cells: list[Mapping[str, object]] = []
    for title, each in RACES.items():
        if bench.usable(metaq(each.level)):
            pairs, measured = each.run(bench, rounds, seconds, warmup)
            tables.append(each.table(pairs, f"Transactions of {MESSAGES} × {BODY_BYTES} B, {title}"))
            checks += each.checks(pairs)
            cells += measured
    settings = {
        "rounds": f"{rounds}; figures are medians, a ratio is the median of those to the puts right before",
        "broker": "fresh for each figure",
        "in flight": "as many messages as of the puts beside: one transaction of a connection, or ten where they do not wait",
        "seconds a cell": f"{seconds} after {warmup} of warm-up",
        "one-phase": "BEGIN, puts, COMMIT_ONE_PHASE of a local transaction, sent in one go",
        "two-phase": "BEGIN, puts, END, PREPARE, COMMIT_TWO_PHASE of an XA branch, sent in one go",
    }
    return Report("transactions", settings, tables, checks, cells, bench.notes, bench.failures)

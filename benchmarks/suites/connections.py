"""Resident memory of an idle server, and what each idle connection adds to it."""

import socket
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial

from benchmarks.bench import Bench
from benchmarks.figures import Check, MeasurementError
from benchmarks.memory import KILOBYTE, MEGABYTE, resting_bytes
from benchmarks.peers import REPLY_SECONDS, System
from benchmarks.report import Report, Table, number

CONNECTIONS = 5000
IDLE_MUST_MB, IDLE_AIM_MB = 45, 38
EACH_MUST_KB, EACH_AIM_KB = 4, 2


def run(bench: Bench) -> Report:
    many = 1000 if bench.quick else CONNECTIONS
    cells: list[Mapping[str, object]] = []
    rows = []
    for system in bench.storing():
        figures = bench.attempt(f"{system.name}, connections", partial(measure, bench, system, many))
        if figures:
            cells.append({"system": system.name, **figures})
            rows.append([system.name, *(number(figures[key], 2) for key in COLUMNS)])
    ours = next((cell for cell in cells if cell["system"] == "metaq disk"), None)
    checks = [
        Check("idle, resident", _of(ours, "idle_mb"), "at most", IDLE_MUST_MB, IDLE_AIM_MB, "MB"),
        Check("each idle connection", _of(ours, "spoken_kb"), "at most", EACH_MUST_KB, EACH_AIM_KB, "KB"),
    ]
    settings = {
        "connections": f"{many:,}, opened one after the other; `spoken` after one request and reply on each",
        "memory": "VmRSS at rest; what the kernel keeps for sockets is not in it",
    }
    table = Table("Idle memory", ["", *COLUMNS.values()], rows)
    return Report("connections", settings, [table], checks, cells, bench.notes, bench.failures)


COLUMNS = {"idle_mb": "idle MB", "silent_kb": "KB a silent connection", "spoken_kb": "KB a spoken connection"}


def _of(cell: Mapping[str, object] | None, key: str) -> float | None:
    return float(str(cell[key])) if cell else None


def measure(bench: Bench, system: System, many: int) -> dict[str, float]:
    """Idle memory in MB, and in KB what each connection adds before and after it was used."""
    with bench.fresh_folder() as folder, system.running(folder / "server") as server, ExitStack() as opened:
        idle = resting_bytes(server.pid)
        connections = [
            opened.enter_context(socket.create_connection(("127.0.0.1", server.port), REPLY_SECONDS)) for _ in range(many)
        ]
        exchange(connections[-1], system)  # connections are accepted in order: all the others are there too
        silent = resting_bytes(server.pid)
        for connection in connections[:-1]:
            exchange(connection, system)
        spoken = resting_bytes(server.pid)
    each = [(bytes_ - idle) / many / KILOBYTE for bytes_ in (silent, spoken)]
    bench.console.print(f"{system.name}: {idle / MEGABYTE:.1f} MB, {each[0]:.2f} and {each[1]:.2f} KB a connection")
    return {"idle_mb": idle / MEGABYTE, "silent_kb": each[0], "spoken_kb": each[1]}


def exchange(connection: socket.socket, system: System) -> None:
    connection.sendall(system.ping)
    received = b""
    while system.pong not in received:
        part = connection.recv(65536)
        if not part:
            raise MeasurementError(f"the server closed a connection after {received[:200]!r}")
        received += part

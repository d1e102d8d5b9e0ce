"""The required figures of delays, leases, pushes and ids of messages, beside sends and pulls of the same broker."""

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks.bench import Bench
from benchmarks.enginewrites import measure_writes
from benchmarks.figures import Check, percentile
from benchmarks.holding import holder, measure_holding
from benchmarks.leasing import POPPED, allow_many, deduplicate, measure_pushes, open_bytes, seconds_until_pop
from benchmarks.memory import KILOBYTE, MEGABYTE, status_bytes
from benchmarks.parking import (
    DAY_MS,
    INDEX,
    TOPIC,
    drop_from_memory,
    index_bytes,
    is_settled,
    measure_busy_lateness,
    measure_cold_delivery,
    measure_delivery,
    measure_idle_lateness,
    park,
    timer_figures,
    wait_for,
)
from benchmarks.peers import Level, Server, metaq
from benchmarks.programs import LoadPlan, run_load, run_loads
from benchmarks.report import Report
from benchmarks.rounds import Rounds
from benchmarks.suites.get import fill, hot_log, messages_for

ROUNDS = 3
BODY_BYTES, PULLED_BYTES, OPEN_BYTES = 128, 1024, 16
PULL_LOG_BYTES = 192 << 20
WITHIN_MS = 30 * DAY_MS
DELAYS = {"1 s": 1000, "1 h": 3_600_000, "1 year": 365 * DAY_MS}
BESIDE = 20_000
"""Parks a second beside sends, and so many deliveries."""
PACED = 24_500
"""Sends a second beside them: a quarter of those by which the required figures were written. A quarter of what a broker takes
now in windows of 100 would be more than two processors carry one by one, beside the other load generator."""
HELD = 1000
WINDOW_MS = 600_000
ROOM = 10_000
"""Messages beyond those that are leased."""


@dataclass(frozen=True)
class Sizes:
    """How much is measured: the required figures are of more, which takes hours."""

    pending: int = 1_000_000
    due: int = 100_000
    cold: int = 200_000
    opened: int = 990_000
    opened_singly: int = 200_000
    idle: int = 500
    pushes: int = 1000
    wakes: int = 300
    ids: int = 1_000_000


QUICK = Sizes(20_000, 5_000, 20_000, 20_000, 5_000, 100, 100, 100, 10_000)
REQUIRED_PENDING, MANY_PENDING = 20_000_000, 100_000_000


def run(bench: Bench) -> Report:
    seconds, warmup = (1.0, 0.2) if bench.quick else (2.0, 0.4)
    rounds, sizes = bench.rounds(ROUNDS), QUICK if bench.quick else Sizes()
    taken = Rounds(bench, seconds, warmup)
    if bench.usable(metaq(Level.MEMORY)):
        for _ in range(rounds):
            for what, measure in EACH_ROUND.items():
                taken.attempt(what, partial(measure, taken, sizes))
        for what, measure in ONCE.items():
            taken.attempt(what, partial(measure, taken, sizes))
    settings = {
        "rounds": f"{rounds}, one of those with many pending or open; figures are medians, ratios are taken in each round",
        "broker": "MEMORY, every other setting at its default; fresh for each line of figures, one partition",
        "seconds a cell": f"{seconds} after {warmup} of warm-up",
        "sends": f"remoting, {BODY_BYTES} B, 4 × 100; parks and puts with ids are sends with one property",
        "pulls and pops": f"of at most {POPPED} × {PULLED_BYTES} B, hot, 4 × 1; the next pop follows the answers to all acks",
        "nack": f"text, pops of {POPPED} and one nack of all, delivered again at once",
        "gets one by one": "text, one message each, 1 × 100",
    }
    return Report("timers", settings, [taken.table("Figures")], checks(taken, sizes), taken.cells, bench.notes, bench.failures)


# -- delays -----------------------------------------------------------------------------------------------------------

SENDS = LoadPlan(4, 100, BODY_BYTES, 0.0)
PARKS = LoadPlan(4, 100, BODY_BYTES, 0.0, topic=TOPIC, delay_ms=DAY_MS, spread_ms=WITHIN_MS)


@contextmanager
def broker(bench: Bench) -> Iterator[tuple[Server, Path]]:
    with bench.fresh_folder() as folder, metaq(Level.MEMORY).running(folder / "server") as server:
        yield server, folder / "server"


def parks(taken: Rounds, sizes: Sizes) -> None:
    """N-1, N-2, N-3 and N-21: sends, parks, deliveries and puts with ids, in turn on brokers of their own."""
    with broker(taken.bench) as (server, _):
        send = taken.rate("sends", server, "remoting-send", SENDS)
    with broker(taken.bench) as (server, _):
        parked = taken.rate("parks", server, "remoting-park", PARKS)
    taken.add("parks, of sends", parked / send)
    for name, delay_ms in DELAYS.items():
        with broker(taken.bench) as (server, _):
            plan = LoadPlan(4, 100, BODY_BYTES, 0.0, topic=TOPIC, delay_ms=delay_ms)
            rate = taken.rate(f"parks, delay {name}", server, "remoting-park", plan)
        taken.add(f"parks, delay {name}, of parks", rate / parked)
    with broker(taken.bench) as (server, _):
        delivered = taken.add("deliveries, messages/s", measure_delivery(server, sizes.due, BODY_BYTES, parked))
    taken.add("deliveries, of sends", delivered / send)
    with broker(taken.bench) as (server, _):
        deduplicate(server, "once", WINDOW_MS)
        plan = LoadPlan(4, 100, BODY_BYTES, 0.0, topic="once")
        rate = taken.rate("puts with ids", server, "remoting-send-once", plan)
    taken.add("puts with ids, of sends", rate / send)


def before(taken: Rounds, sizes: Sizes) -> None:
    """N-22: sends and pulls, of those of an earlier version."""
    system, bench = metaq(Level.MEMORY), taken.bench
    if bench.before is None:
        return
    count = messages_for(PULL_LOG_BYTES, PULLED_BYTES)
    rates: dict[str, list[float]] = {"sends": [], "pulls": []}
    for name, each in (("now", system), ("before", replace(system, program=bench.before))):
        with bench.fresh_folder() as folder, each.running(folder / "server") as server:
            rates["sends"].append(taken.rate(f"sends, {name}", server, "remoting-send", SENDS))
        with hot_log(bench, each, PULLED_BYTES, count) as server:
            plan = LoadPlan(4, 1, PULLED_BYTES, 0.0, batch=POPPED)
            rates["pulls"].append(taken.rate(f"pulls, {name}", server, "remoting-pull", plan))
    for name, (now, then) in rates.items():
        taken.add(f"{name}, of those before", now / then)


def lateness(taken: Rounds, sizes: Sizes) -> None:
    """N-5, N-6 and N-7: how late deliveries are, idle and under load, and what sends feel of them."""
    with broker(taken.bench) as (server, _):
        late = measure_idle_lateness(server, sizes.idle)
    taken.add("lateness, idle, p99 ms", percentile(late, 0.99))
    half = round((taken.median("deliveries, messages/s") or 0) / 2)
    quarter = round((taken.median("sends, messages/s") or 0) / 4)
    if not half or not quarter:
        return
    seconds = 2 * taken.seconds
    sends = LoadPlan(16, 1, BODY_BYTES, seconds, 1.5, rate=quarter)
    with broker(taken.bench) as (server, _):
        late = measure_busy_lateness(server, half, BODY_BYTES, taken.median("parks, messages/s") or half, sends)
    taken.add("lateness, half of deliveries beside a quarter of sends, p99 ms", percentile(late, 0.99))
    paced = LoadPlan(16, 1, BODY_BYTES, seconds, 1.5, rate=PACED)
    with broker(taken.bench) as (server, _):
        alone = run_load("remoting-send", server.port, paced).p99_us / 1000
    taken.add(f"{PACED:,} sends a second, p99 ms", alone)
    with broker(taken.bench) as (server, _):
        others = LoadPlan(16, 1, BODY_BYTES, seconds, 1.5, topic=TOPIC, rate=BESIDE)
        sent = run_loads(server.port, ("remoting-send", paced), ("remoting-send", others))[0].p99_us / 1000
    taken.add(f"the same beside {BESIDE:,} other sends a second, p99 ms", sent)  # what any second load takes of the machine
    with broker(taken.bench) as (server, _):
        plan = LoadPlan(16, 1, BODY_BYTES, seconds, 1.5, topic=TOPIC, rate=BESIDE, delay_ms=1000)
        beside = run_loads(server.port, ("remoting-send", paced), ("remoting-park", plan))[0].p99_us / 1000
    taken.add(f"the same beside {BESIDE:,} parks and deliveries a second, p99 ms", beside)
    taken.add("the same, of those alone", beside / alone)


def many_pending(taken: Rounds, sizes: Sizes) -> None:
    """N-2, N-8, N-10, N-23 and N-24: a broker with many timers, killed, and without its index."""
    system, bench = metaq(Level.MEMORY), taken.bench
    with bench.fresh_folder() as folder:
        with system.running(folder / "plain") as server:
            fill(system, server, BODY_BYTES, sizes.pending)
            plain_bytes = status_bytes(server.pid, "RssAnon")
            server.kill()
        begun = time.monotonic()
        with system.running(folder / "plain"):
            plain = taken.add("start after a kill without timers, s", time.monotonic() - begun)
        now_ms = time.time_ns() // 1_000_000
        with system.running(folder / "timers") as server:
            park(server, sizes.pending, BODY_BYTES, now_ms + DAY_MS, WITHIN_MS)
            wait_for("the index has all, sorted in", lambda: is_settled(timer_figures(server)))
            taken.add("private memory for the pending, MB", (status_bytes(server.pid, "RssAnon") - plain_bytes) / MEGABYTE)
            rate = taken.rate("parks with many pending", server, "remoting-park", PARKS)
            pending = timer_figures(server)["timers_pending"]
            park(server, 1, BODY_BYTES, time.time_ns() // 1_000_000 + 1500)
            server.kill()
        parked = taken.median("parks, messages/s")
        if parked:
            taken.add("parks with many pending, of parks", rate / parked)
        time.sleep(1.5)
        begun = time.monotonic()
        with system.running(folder / "timers") as server:
            ended = wait_for("the first is delivered", lambda: timer_figures(server)["timers_delivered"] > 0)
            taken.add("start after a kill with timers until the first delivery, beyond that, s", ended - begun - plain)
        taken.add("index, bytes each", index_bytes(folder / "timers") / pending)
        shutil.rmtree(folder / "timers" / "data" / INDEX)
        drop_from_memory(folder / "timers")
        begun = time.monotonic()
        with system.running(folder / "timers") as server:
            ended = wait_for("the index is made again", lambda: timer_figures(server)["timers_pending"] >= pending)
        taken.add("rebuild of the index, µs each", 1e6 * (ended - begun) / pending)


def cold(taken: Rounds, sizes: Sizes) -> None:
    """N-4: deliveries of parks that are on the disk only."""
    rate = taken.median("parks, messages/s")
    if rate:
        with taken.bench.fresh_folder() as folder:
            found = measure_cold_delivery(metaq(Level.MEMORY), folder / "server", sizes.cold, BODY_BYTES, rate)
        taken.add("deliveries, cold, messages/s", found)


def writes(taken: Rounds, sizes: Sizes) -> None:
    """N-9: the engine by itself."""
    with taken.bench.fresh_folder() as folder:
        found = measure_writes(folder / "index", 1.0 if taken.bench.quick else 5.0, BESIDE)
    taken.add("writes of 64 to the index, p99.9 ms", found.p999_ms)


# -- leases -----------------------------------------------------------------------------------------------------------


def pops(taken: Rounds, sizes: Sizes) -> None:
    """N-11 to N-14: pulls and pops of the same log, each pop by a group of its own."""
    count = messages_for(PULL_LOG_BYTES, PULLED_BYTES)
    plan = LoadPlan(4, 1, PULLED_BYTES, 0.0, batch=POPPED)
    with hot_log(taken.bench, metaq(Level.MEMORY), PULLED_BYTES, count) as server:
        allow_many(server, *POPS)
        pull = taken.rate("pulls", server, "remoting-pull", plan)
        for group, (name, protocol) in POPS.items():
            each = LoadPlan(4, 1, PULLED_BYTES, taken.seconds, 0.0, batch=POPPED, group=group)
            if group == "each":
                each = LoadPlan(50, 1, PULLED_BYTES, taken.seconds, 0.0, batch=1, group=group)
            load = run_load(protocol, server.port, each)
            taken.note(name, load)
            taken.add(f"{name}, of pulls", load.messages_per_second / pull)
            send = taken.values["sends, messages/s"]
            if group == "acks" and send:
                taken.add(f"{name}, of sends", load.messages_per_second / send[-1])


POPS = {
    "none": (f"pops of {POPPED}", "remoting-pop"),
    "batch": (f"pops of {POPPED}, one batch of acks", "remoting-pop-ack-batch"),
    "acks": (f"pops of {POPPED}, {POPPED} acks", "remoting-pop-ack"),
    "each": ("pops of 1, ack, 50 connections", "remoting-pop-ack"),
}


def pushes(taken: Rounds, sizes: Sizes) -> None:
    """N-16, N-19 and N-20: nacks, and pushes to a busy and to an idle subscriber."""
    count = messages_for(PULL_LOG_BYTES // 4, BODY_BYTES)
    with hot_log(taken.bench, metaq(Level.MEMORY), BODY_BYTES, count) as server:
        allow_many(server, "nack", "push")
        one = LoadPlan(1, 100, BODY_BYTES, 0.0, block_bytes=BODY_BYTES + 20)
        get = taken.rate("text gets one by one", server, "metaq-get", one)
        load = run_load(
            "metaq-push", server.port, LoadPlan(1, 1, BODY_BYTES, taken.seconds, 0.0, count, batch=100, group="push")
        )
        taken.note("pushes", load)
        taken.add("pushes, of text gets one by one", load.messages_per_second / get)
        taken.rate("nacks", server, "metaq-pop-nack", LoadPlan(4, 1, BODY_BYTES, 0.0, batch=POPPED, group="nack"))
    with broker(taken.bench) as (server, _):
        found = measure_pushes(server, sizes.pushes)
    taken.add("push to an idle subscriber, p99 ms", percentile(found, 0.99) / 1000)


def held(taken: Rounds, sizes: Sizes) -> None:
    """N-15: held pops."""
    with taken.bench.fresh_folder() as folder, holder().running(folder / "server") as server:
        found = measure_holding(server, HELD, sizes.wakes, leased=True)
    taken.add("held pops, KB each", found.each_bytes / KILOBYTE)
    taken.add("held pops, slowest wake-up, ms", max(found.wakes_us) / 1000)


def many_open(taken: Rounds, sizes: Sizes) -> None:
    """N-17 and N-18: brokers with many open messages, one of which is killed."""
    system = metaq(Level.MEMORY)
    with broker(taken.bench) as (server, _):
        fill(system, server, OPEN_BYTES, sizes.opened_singly + ROOM)
        allow_many(server, "single")
        taken.add("open messages of pops of 1, bytes each", open_bytes(server, "single", sizes.opened_singly, OPEN_BYTES, 1))
    with taken.bench.fresh_folder() as folder:
        server = system.start(folder / "server")
        try:
            fill(system, server, OPEN_BYTES, sizes.opened + ROOM)
            allow_many(server, "wide")
            server.kill()
            plain, server = seconds_until_pop(system, folder / "server", "other")
            found = open_bytes(server, "wide", sizes.opened, OPEN_BYTES, POPPED)
            taken.add(f"open messages of pops of {POPPED}, bytes each", found)
            server.kill()
            seconds, server = seconds_until_pop(system, folder / "server", "wide")
            taken.add("start after a kill with many open until the first pop, beyond that without, s", seconds - plain)
        finally:
            server.stop()


def ids(taken: Rounds, sizes: Sizes) -> None:
    """N-21, with many ids known."""
    with broker(taken.bench) as (server, _):
        deduplicate(server, "once", WINDOW_MS)
        plan = LoadPlan(4, 100, BODY_BYTES, 300.0, 0.0, sizes.ids, topic="once")
        run_load("remoting-send-once", server.port, plan)
        more = LoadPlan(4, 100, BODY_BYTES, 0.0, topic="once", first=5 * sizes.ids)
        rate = taken.rate("puts with ids, many known", server, "remoting-send-once", more)
    send = taken.median("sends, messages/s")
    if send:
        taken.add("puts with ids, many known, of sends", rate / send)


Measure = Callable[[Rounds, Sizes], None]
EACH_ROUND: dict[str, Measure] = {"parks": parks, "before": before, "lateness": lateness, "pops": pops, "pushes": pushes}
ONCE: dict[str, Measure] = {
    "many pending": many_pending,
    "cold deliveries": cold,
    "writes": writes,
    "held pops": held,
    "many open": many_open,
    "ids": ids,
}


# -- what is required -------------------------------------------------------------------------------------------------


def checks(taken: Rounds, sizes: Sizes) -> list[Check]:
    """Return the checks; what is required of more timers than are measured is required of each, or of these already."""

    def least(number: str, name: str, must: float, aim: float, unit: str = "×") -> Check:
        return Check(f"{number} {name}", taken.median(name), "at least", must, aim, unit)

    def most(number: str, name: str, must: float, aim: float, unit: str) -> Check:
        return Check(f"{number} {name}", taken.median(name), "at most", must, aim, unit)

    pending = f"({sizes.pending:,} pending)"
    return [
        least("N-1", "parks, of sends", 0.8, 0.9),
        least("N-2", "parks with many pending, of parks", 0.95, 1.0, f"× {pending}"),
        *(least("N-2", f"parks, delay {delay}, of parks", 0.95, 1.0) for delay in DELAYS),
        least("N-3", "deliveries, of sends", 0.4, 0.8),
        least("N-4", "deliveries, cold, messages/s", 15_000, 40_000, ""),
        most("N-5", "lateness, idle, p99 ms", 10, 3, "ms"),
        most("N-6", "lateness, half of deliveries beside a quarter of sends, p99 ms", 100, 30, "ms"),
        most("N-7", "the same, of those alone", 2, 1.3, "×"),
        most("N-8", "start after a kill with timers until the first delivery, beyond that, s", 3, 1, f"s {pending}"),
        most("N-9", "writes of 64 to the index, p99.9 ms", 5, 1, "ms"),
        most("N-10", "rebuild of the index, µs each", 180e6 / REQUIRED_PENDING, 60e6 / REQUIRED_PENDING, f"µs {pending}"),
        least("N-11", f"pops of {POPPED}, of pulls", 0.5, 0.8),
        least("N-12", f"pops of {POPPED}, one batch of acks, of pulls", 0.35, 0.6),
        least("N-13", f"pops of {POPPED}, {POPPED} acks, of sends", 0.7, 1.0),
        least("N-14", "pops of 1, ack, 50 connections, messages/s", 15_000, 25_000, ""),
        most("N-15", "held pops, KB each", 16, 8, "KB"),
        most("N-15", "held pops, slowest wake-up, ms", 5, 2, "ms"),
        least("N-16", "nacks, messages/s", 20_000, 50_000, ""),
        most("N-17", f"open messages of pops of {POPPED}, bytes each", 80, 50, "bytes"),
        most("N-17", "open messages of pops of 1, bytes each", 260, 200, "bytes"),
        most("N-18", "start after a kill with many open until the first pop, beyond that without, s", 5, 2, "s"),
        least("N-19", "pushes, of text gets one by one", 0.5, 0.8),
        most("N-20", "push to an idle subscriber, p99 ms", 2, 0.7, "ms"),
        least("N-21", "puts with ids, of sends", 0.6, 0.8),
        least("N-21", "puts with ids, many known, of sends", 0.6, 0.8, f"× ({sizes.ids:,} known)"),
        least("N-22", "sends, of those before", 0.98, 1.0),
        least("N-22", "pulls, of those before", 0.98, 1.0),
        most("N-23", "private memory for the pending, MB", 160, 110, f"MB {pending}"),
        most("N-24", "index, bytes each", 2e9 / MANY_PENDING, 1.3e9 / MANY_PENDING, f"bytes {pending}"),
    ]

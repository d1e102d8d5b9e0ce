"""Delayed messages: how fast those that are due are delivered, and how late each of them is."""

import json
import os
import selectors
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.figures import MeasurementError
from benchmarks.link import Link
from benchmarks.peers import REPLY_SECONDS, Server, System
from benchmarks.programs import LoadPlan, run_load
from benchmarks.textlink import TextLink
from metaq.protocol import properties
from metaq.protocol.record import decode_record
from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.text.messages import decode_text_messages
from metaq.protocol.text.replies import VALUE
from metaq.protocol.text.writing import write_get

TOPIC = "delayed"
DAY_MS = 86_400_000
DEADLINE_SECONDS = 300
LOOK_SECONDS = 0.01
MARGIN_SECONDS = 1.0
"""Between the last park and the time at which all are due, beside what parking takes when it is slow."""
SLOW = 2.5
"""Times as long as at the rate that was measured."""
EVERY_SECONDS, SHORT_MS = 0.01, 300
GET_BYTES = 1 << 20
TAIL_BYTES = 2000
INDEX = "timerindex"


def timer_figures(server: Server) -> dict[str, int]:
    """What the broker says of its timers."""
    with Link(server.port) as link:
        figures = json.loads(link.ask(Request.TIMER_STATS).body)
    return {name: value for name, value in figures.items() if isinstance(value, int)}


def wait_for(what: str, is_so: Callable[[], bool], seconds: float = DEADLINE_SECONDS) -> float:
    """Wait until something is so; the time of day in seconds (monotonic) at which it was."""
    deadline = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > deadline:
            raise MeasurementError(f"not within {seconds} s: {what}")
        time.sleep(LOOK_SECONDS)
    return time.monotonic()


def park(server: Server, count: int, body_bytes: int, due_ms: int, spread_ms: int = 0) -> None:
    """Park exactly so many messages."""
    plan = LoadPlan(4, 100, body_bytes, DEADLINE_SECONDS, 0.0, count, topic=TOPIC, due_ms=due_ms, spread_ms=spread_ms)
    load = run_load("remoting-park", server.port, plan)
    if load.messages != count:
        raise MeasurementError(f"only {load.messages:,} of {count:,} messages were parked")


def park_for_one_time(server: Server, count: int, body_bytes: int, rate: float) -> float:
    """Park messages that are due at one time, which must be after the last; return it (Unix seconds). `rate` is a guess."""
    due = time.time() + SLOW * count / rate + MARGIN_SECONDS
    park(server, count, body_bytes, round(due * 1000))
    if time.time() > due:
        raise MeasurementError(f"parking {count:,} messages took longer than until they were due")
    return due


def measure_delivery(server: Server, count: int, body_bytes: int, rate: float) -> float:
    """Messages a second, from when all are due until the last is delivered."""
    before = timer_figures(server)["timers_delivered"]
    due = park_for_one_time(server, count, body_bytes, rate)
    time.sleep(max(0.0, due - time.time()))
    begun = time.monotonic()
    ended = wait_for("all are delivered", lambda: timer_figures(server)["timers_delivered"] >= before + count)
    return count / (ended - begun)


def measure_cold_delivery(system: System, folder: Path, count: int, body_bytes: int, rate: float) -> float:
    """Messages a second of a broker that was stopped when they fell due, and whose log is not in memory."""
    with system.running(folder) as server:
        due = park_for_one_time(server, count, body_bytes, rate)
    drop_from_memory(folder)
    time.sleep(max(0.0, due - time.time()))
    with system.running(folder) as server:
        first = wait_for("the first is delivered", lambda: timer_figures(server)["timers_delivered"] > 0)
        already = timer_figures(server)["timers_delivered"]
        ended = wait_for("all are delivered", lambda: timer_figures(server)["timers_delivered"] >= count)
    if already == count:
        raise MeasurementError(f"{count:,} messages are too few: all were delivered at once")
    return (count - already) / (ended - first)


def drop_from_memory(folder: Path) -> None:
    """Have the kernel forget the files' pages. Nobody may have them mapped."""
    os.sync()
    for file in folder.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def index_bytes(folder: Path) -> int:
    """What the files of the index of timers take of the disk."""
    return sum(file.stat().st_size for file in (folder / "data" / INDEX).rglob("*") if file.is_file())


def is_settled(figures: dict[str, int]) -> bool:
    """Has the index all timers, each in its place?"""
    return figures["timer_index_waiting"] == 0 and figures["timer_index_packed"] == 0


# -- lateness ---------------------------------------------------------------------------------------------------------


def measure_idle_lateness(server: Server, count: int) -> list[float]:
    """Milliseconds from when each message is due until a held get returns it; one is parked each EVERY_SECONDS."""
    topic, late = f"{TOPIC}-idle", list[float]()
    with TextLink(server.port) as puts, TextLink(server.port) as gets, selectors.EpollSelector() as selector:
        puts.ask(f"create {topic} 1 1\r\n".encode())
        position, sent, answered = 0, 0, 0
        selector.register(puts, selectors.EVENT_READ)
        selector.register(gets, selectors.EVENT_READ)
        gets.send(write_get(topic, "bench", 0, position, GET_BYTES, 0, 1000 * REPLY_SECONDS))
        next_put = last = time.monotonic()
        while len(late) < count or answered < count:
            now = time.monotonic()
            if now - last > 2 * REPLY_SECONDS:
                raise MeasurementError(f"message {len(late)} was not delivered within {now - last:.0f} s")
            if sent < count and now >= next_put:
                body = b"%d" % (time.time_ns() // 1_000_000 + SHORT_MS)
                puts.send(f"put {topic} 0 {len(body)} 0 at={body.decode()} 2\r\n".encode() + body)
                sent += 1
                next_put += EVERY_SECONDS
            left = next_put - time.monotonic() if sent < count else REPLY_SECONDS
            for key, _ in selector.select(max(0.0, left)):
                if key.fileobj is puts:
                    answered += len(puts.replies())
                    continue
                for reply in gets.replies():
                    arrived, last = time.time() * 1000, time.monotonic()
                    for message in decode_text_messages(reply.body, position) if reply.code == VALUE else ():
                        late.append(arrived - int(bytes(message.body)))
                        position = message.next_position
                    gets.send(write_get(topic, "bench", 0, position, GET_BYTES, 0, 1000 * REPLY_SECONDS))
    return late


def measure_busy_lateness(server: Server, rate: int, body_bytes: int, park_rate: float, sends: LoadPlan) -> list[float]:
    """Milliseconds from when each message is due until it is stored, beside sends; `rate` are due each second.

    All are parked before the first is due.
    """
    seconds = sends.warmup_seconds + sends.seconds
    count = round(rate * seconds)
    begin = time.time() + SLOW * count / park_rate + MARGIN_SECONDS
    park(server, count, body_bytes, round(begin * 1000), round(seconds * 1000))
    if time.time() > begin:
        raise MeasurementError(f"parking {count:,} messages took longer than until they were due")
    time.sleep(max(0.0, begin - time.time()))
    run_load("remoting-send", server.port, sends)
    return stored_lateness(server, TOPIC, round(rate * sends.warmup_seconds))


def stored_lateness(server: Server, topic: str, first: int) -> list[float]:
    """Milliseconds from when each delivered message of a topic was due until it was stored, from an offset on."""
    wait_for("all are delivered", lambda: timer_figures(server)["timers_pending"] == 0)
    late: list[float] = []
    with Link(server.port) as link:
        while True:
            link.send(link.pull(topic, 0, first + len(late), 0))
            answers = link.receive()
            while not answers:
                answers = link.receive()
            if answers[0].code != Response.SUCCESS:
                return late
            body, at = answers[0].body, 0
            while at < len(body):
                record = decode_record(memoryview(body)[at:])
                late.append(record.store_ms - int(properties.parse(record.properties.decode())[properties.TIMER_OUT]))
                at += record.size

"""A load by HTTP: publishes at fixed times, by the load generator, and browsers that follow streams of events, by this process.

``python -m benchmarks.restload PORT SECONDS PUBLISHES_PER_SECOND STREAMS`` prints one line of JSON. As in an open loop, a
publish is due whatever became of those before, and its latency runs from there.
"""

import resource
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from pydantic import BaseModel, NonNegativeFloat, NonNegativeInt

from benchmarks.figures import Load, MeasurementError
from benchmarks.programs import LoadPlan, parse, result_of

PUBLISHERS = 16
"""Connections that publish."""
TOPIC, TAILED_TOPIC = "rest", "rest-tailed"
TAILS = 10
"""Each so many-th stream is a tail; the others are live figures of the broker."""
TAILED_RATE = 10
"""Publishes a second, of all, that are to the topic that is tailed: nobody looks on while hundreds a second pass by."""
BODY_BYTES = 128
PUBLISH = "http-publish"
ANSWER_SECONDS = 15.0
_FULL = 65536


class RestFigures(BaseModel):
    """What a load by HTTP has seen. An event is a row of a stream."""

    published: NonNegativeInt
    events: NonNegativeInt
    streams: NonNegativeInt
    p50_ms: NonNegativeFloat
    p99_ms: NonNegativeFloat
    processors: NonNegativeFloat
    """The processors that the load itself takes."""


def run(port: int, seconds: float, rate: int, streams: int) -> RestFigures:
    """Load a broker by its HTTP port; it has the topics."""
    with ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        for number in range(streams):
            what = f"topics/{TAILED_TOPIC}/tail" if number % TAILS == TAILS - 1 else "broker/live"
            selector.register(_stream(stack, port, what), selectors.EVENT_READ)
        publishers = _publishers(stack, port, seconds, rate)
        before = _processor_seconds()
        events = _follow(selector, time.monotonic() + seconds)
        loads = [result_of(publisher, ANSWER_SECONDS) for publisher in publishers]
        return _figures(loads, events, streams, (_processor_seconds() - before) / seconds)


def _figures(loads: list[Load], events: int, streams: int, processors: float) -> RestFigures:
    """The latencies are those of the first load, which has nearly all publishes."""
    return RestFigures(
        published=sum(load.messages for load in loads),
        events=events,
        streams=streams,
        p50_ms=loads[0].p50_us / 1000 if loads else 0.0,
        p99_ms=loads[0].p99_us / 1000 if loads else 0.0,
        processors=processors,
    )


def _publishers(stack: ExitStack, port: int, seconds: float, rate: int) -> list["subprocess.Popen[str]"]:
    """Start to publish, for so many seconds: one load for each topic."""
    if not rate:
        return []
    plans = [
        LoadPlan(PUBLISHERS - 1, 1, BODY_BYTES, seconds, 0.0, rate=rate - TAILED_RATE, topic=TOPIC),
        LoadPlan(1, 1, BODY_BYTES, seconds, 0.0, rate=TAILED_RATE, topic=TAILED_TOPIC),
    ]
    started = []
    for plan in plans:
        command = plan.command(PUBLISH, port)
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        stack.callback(started[-1].kill)
    return started


def _follow(selector: selectors.BaseSelector, end: float) -> int:
    """Read what comes over the streams until then; return how many events came."""
    events = 0
    while (now := time.monotonic()) < end:
        for key, _ in selector.select(end - now):
            events += _events(key.fileobj)
    return events


def _processor_seconds() -> float:
    """The processor time of this process, and of the publishers that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def _stream(stack: ExitStack, port: int, what: str) -> socket.socket:
    connection = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=ANSWER_SECONDS))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(f"GET /api/v1/{what} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
    begin = connection.recv(_FULL)
    if not begin.startswith(b"HTTP/1.1 200 "):
        raise MeasurementError(f"a stream of events was refused: {begin[:300]!r}")
    return connection


def _events(connection: object) -> int:
    assert isinstance(connection, socket.socket)
    data = connection.recv(_FULL)
    if not data:
        raise MeasurementError("the broker has ended a stream of events")
    return data.count(b"data: ")


@contextmanager
def loading(port: int, seconds: float, rate: int, streams: int) -> Iterator["subprocess.Popen[str]"]:
    """Load in a process of its own meanwhile; `figures_of` waits for what it has seen."""
    command = [sys.executable, "-m", "benchmarks.restload", str(port), str(seconds), str(rate), str(streams)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def figures_of(process: "subprocess.Popen[str]", seconds: float) -> RestFigures:
    """Return what a load has seen that takes so long. A figure in which anything was refused is none: it raises."""
    out, errors = process.communicate(timeout=seconds + 2 * ANSWER_SECONDS)
    if process.returncode:
        raise MeasurementError(errors.strip()[-500:])
    return parse(RestFigures, out)


if __name__ == "__main__":
    _, where, how_long, how_many, followers = sys.argv
    print(run(int(where), float(how_long), int(how_many), int(followers)).model_dump_json())

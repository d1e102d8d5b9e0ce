"""A load by HTTP: publishes at fixed times, and browsers that follow streams of events, in one process with one loop.

``python -m benchmarks.restload PORT SECONDS PUBLISHES_PER_SECOND STREAMS`` prints one line of JSON. As in an open loop, a
publish is due whatever became of those before, and its latency runs from there.
"""

import json
import selectors
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from pydantic import BaseModel, NonNegativeFloat, NonNegativeInt

from benchmarks.figures import MeasurementError, percentile
from benchmarks.programs import parse

PUBLISHERS = 16
"""Connections that publish; each waits for its answer before it sends the next."""
TOPIC, TAILED_TOPIC = "rest", "rest-tailed"
TAILS = 10
"""Each so many-th stream is a tail; the others are live figures of the broker."""
TAILED = 100
"""Each so many-th publish is to the topic that is tailed: nobody looks on while hundreds a second pass by."""
BODY = json.dumps({"body": "x" * 128, "tag": "paid", "keys": ["order-7"]}).encode()
ANSWER_SECONDS = 15.0
LOOK_SECONDS = 0.05
_FULL = 65536


class RestFigures(BaseModel):
    """What a load by HTTP has seen. An event is a row of a stream."""

    published: NonNegativeInt
    refused: NonNegativeInt
    first_refused: str
    events: NonNegativeInt
    streams: NonNegativeInt
    p50_ms: NonNegativeFloat
    p99_ms: NonNegativeFloat


@dataclass
class _Publisher:
    """One connection. `due` is when its publish should have left; 0 while it has none."""

    connection: socket.socket
    due: float = 0.0
    received: bytearray = field(default_factory=bytearray)

    def publish(self, request: bytes, due: float) -> None:
        self.due = due
        self.received.clear()
        self.connection.sendall(request)  # a few hundred bytes always fit

    def answered(self) -> bytes | None:
        """The whole answer, when it is there."""
        self.received += self.connection.recv(_FULL)
        head, end, body = bytes(self.received).partition(b"\r\n\r\n")
        if not end:
            return None
        length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        return head + end + body if len(body) >= length else None


def run(port: int, seconds: float, rate: int, streams: int) -> RestFigures:
    """Load a broker by its HTTP port; it has the topics."""
    with ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        idle = deque(_Publisher(_connected(stack, port)) for _ in range(PUBLISHERS if rate else 0))
        for publisher in idle:
            selector.register(publisher.connection, selectors.EVENT_READ, publisher)
        for number in range(streams):
            what = f"topics/{TAILED_TOPIC}/tail" if number % TAILS == TAILS - 1 else "broker/live"
            selector.register(_stream(stack, port, what), selectors.EVENT_READ, None)
        return _Driver(port, selector, idle).drive(seconds, rate, streams)


class _Driver:
    """Publishes over idle connections what is due, and reads what comes over all."""

    def __init__(self, port: int, selector: selectors.BaseSelector, idle: deque[_Publisher]) -> None:
        self._request, self._tailed = _publish(port, TOPIC), _publish(port, TAILED_TOPIC)
        self._selector = selector
        self._idle = idle
        self._latencies: list[float] = []
        self._refused: list[bytes] = []
        self._events = 0

    def drive(self, seconds: float, rate: int, streams: int) -> RestFigures:
        sent, most, began = 0, round(seconds * rate), time.monotonic()
        end = began + seconds
        while (now := time.monotonic()) < end or (self._answered < sent and now < end + ANSWER_SECONDS):
            while sent < most and self._idle and began + sent / rate <= now:
                request = self._request if sent % TAILED else self._tailed
                self._idle.popleft().publish(request, began + sent / rate)
                sent += 1
            waits = self._idle and sent < most
            self._read(min(LOOK_SECONDS, max(0.0, began + sent / rate - now)) if waits else LOOK_SECONDS)
        if sent != self._answered:
            raise MeasurementError(f"{sent - self._answered} publishes were not answered within {ANSWER_SECONDS} s")
        return RestFigures(
            published=len(self._latencies),
            refused=len(self._refused),
            first_refused=self._refused[0].decode(errors="replace") if self._refused else "",
            events=self._events,
            streams=streams,
            p50_ms=1000 * percentile(self._latencies, 0.5) if self._latencies else 0.0,
            p99_ms=1000 * percentile(self._latencies, 0.99) if self._latencies else 0.0,
        )

    @property
    def _answered(self) -> int:
        return len(self._latencies) + len(self._refused)

    def _read(self, seconds: float) -> None:
        for key, _ in self._selector.select(seconds):
            publisher = key.data
            if publisher is None:
                self._events += _events(key.fileobj)
                continue
            answer = publisher.answered()
            if answer is None:
                continue
            if answer[9:12] == b"200":
                self._latencies.append(time.monotonic() - publisher.due)
            else:
                self._refused.append(answer)
            self._idle.append(publisher)


def _publish(port: int, topic: str) -> bytes:
    head = f"POST /api/v1/topics/{topic}/messages HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(BODY)}\r\n\r\n".encode() + BODY


def _stream(stack: ExitStack, port: int, what: str) -> socket.socket:
    connection = _connected(stack, port)
    connection.sendall(f"GET /api/v1/{what} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
    begin = connection.recv(_FULL)
    if not begin.startswith(b"HTTP/1.1 200 "):
        raise MeasurementError(f"a stream of events was refused: {begin[:300]!r}")
    return connection


def _connected(stack: ExitStack, port: int) -> socket.socket:
    connection = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=ANSWER_SECONDS))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
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
    found = parse(RestFigures, out)
    if found.refused:
        raise MeasurementError(f"{found.refused} publishes were refused, the first: {found.first_refused[:300]}")
    return found


if __name__ == "__main__":
    _, where, how_long, how_many, followers = sys.argv
    print(run(int(where), float(how_long), int(how_many), int(followers)).model_dump_json())

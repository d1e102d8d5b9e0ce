"""A load by HTTP: publishes at fixed times, and browsers that follow streams of events, in one process with one loop.

``python -m benchmarks.restload PORT SECONDS PUBLISHES_PER_SECOND STREAMS`` prints one line of JSON. As in an open loop, a publish
is due whatever became of those before, and its latency runs from there.
"""

import json
import selectors
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from pydantic import BaseModel, NonNegativeFloat, NonNegativeInt

from benchmarks.figures import MeasurementError, percentile
from benchmarks.programs import parse

PUBLISHERS = 16
"""Connections that publish; each waits for its answer before it sends the next."""
TOPIC = "rest"
TAILED = 10
"""Each so many-th stream is a tail of the topic; the others are live figures of the broker."""
BODY = json.dumps({"body": "x" * 128, "tag": "paid", "keys": ["order-7"]}).encode()
ANSWER_SECONDS = 15.0
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
    """Load a broker by its HTTP port; it has the topic."""
    host = f"127.0.0.1:{port}"
    path = f"POST /api/v1/topics/{TOPIC}/messages HTTP/1.1\r\nHost: {host}\r\n"
    request = f"{path}Content-Type: application/json\r\nContent-Length: {len(BODY)}\r\n\r\n".encode() + BODY
    selector = selectors.DefaultSelector()
    idle: deque[_Publisher] = deque()
    for _ in range(PUBLISHERS if rate else 0):
        idle.append(_Publisher(_connected(port)))
        selector.register(idle[-1].connection, selectors.EVENT_READ, idle[-1])
    for number in range(streams):
        what = f"topics/{TOPIC}/tail" if number % TAILED == TAILED - 1 else "broker/live"
        connection = _connected(port)
        connection.sendall(f"GET /api/v1/{what} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        begin = connection.recv(_FULL)
        if not begin.startswith(b"HTTP/1.1 200 "):
            raise MeasurementError(f"a stream of events was refused: {begin[:300]!r}")
        selector.register(connection, selectors.EVENT_READ, None)
    latencies: list[float] = []
    refused: list[bytes] = []
    events, waiting, sent = 0, deque[float](), 0
    began = time.monotonic()
    end, most = began + seconds, round(seconds * rate)
    while (now := time.monotonic()) < end + ANSWER_SECONDS and (now < end or len(latencies) + len(refused) < sent):
        while sent + len(waiting) < most and began + (sent + len(waiting)) / rate <= now:
            waiting.append(began + (sent + len(waiting)) / rate)
        while waiting and idle:
            idle.popleft().publish(request, waiting.popleft())
            sent += 1
        pause = max(0.0, began + (sent + len(waiting)) / rate - now) if sent + len(waiting) < most else 0.05
        for key, _ in selector.select(min(pause, 0.05)):
            publisher = key.data
            if publisher is None:
                events += _events(key.fileobj)
                continue
            answer = publisher.answered()
            if answer is not None:
                latencies.append(time.monotonic() - publisher.due) if answer[9:12] == b"200" else refused.append(answer)
                idle.append(publisher)
    if sent != len(latencies) + len(refused):
        raise MeasurementError(f"{sent - len(latencies) - len(refused)} publishes were not answered within {ANSWER_SECONDS} s")
    return RestFigures(
        published=len(latencies),
        refused=len(refused),
        first_refused=refused[0].decode(errors="replace") if refused else "",
        events=events,
        streams=streams,
        p50_ms=1000 * percentile(latencies, 0.5) if latencies else 0.0,
        p99_ms=1000 * percentile(latencies, 0.99) if latencies else 0.0,
    )


def _connected(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=ANSWER_SECONDS)
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

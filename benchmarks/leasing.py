"""Leases: what the load generator does not measure of them. Pushes to an idle subscriber, open messages, ids of messages."""

import selectors
import time
from pathlib import Path

from benchmarks.figures import MeasurementError
from benchmarks.memory import status_bytes
from benchmarks.peers import Server, System
from benchmarks.programs import LoadPlan, run_load
from benchmarks.textlink import TextLink
from metaq.client import connect
from metaq.client.admin.views import GroupView
from metaq.protocol.text.pushed import Pushed
from metaq.protocol.text.writing import write_put

TOPIC = "bench"
MOST_LEASED = 1_000_000
"""As many as a group may lease of one partition, and a broker in all."""
MANY_TIMES = 1_000_000_000
PUSH_EVERY_SECONDS = 0.005
DEADLINE_SECONDS = 300
POPPED = 32
CONNECTIONS = 4


def allow_many(server: Server, *groups: str) -> None:
    """Let groups lease and give back as much as they like."""
    with connect(f"127.0.0.1:{server.registry_port}") as client:
        for group in groups:
            client.admin().update_group(GroupView(group, max_in_flight=MOST_LEASED, retry_max_times=MANY_TIMES))


def deduplicate(server: Server, topic: str, window_ms: int) -> None:
    """Make a topic that stores a message with the same id only once within the window."""
    with connect(f"127.0.0.1:{server.registry_port}") as client:
        client.admin().create_topic(topic, 1, dedupe_window_ms=window_ms)


def measure_pushes(server: Server, count: int) -> list[float]:
    """Microseconds from handing a put to the kernel to the message at a subscriber that waits for it, one by one."""
    topic, taken = "pushed", list[float]()
    with TextLink(server.port) as puts, TextLink(server.port) as pushes, selectors.EpollSelector() as selector:
        puts.ask(f"create {topic} 1 1\r\n".encode())
        pushes.ask(f"subscribe {topic} subscribers ready=10 2\r\n".encode())
        selector.register(pushes, selectors.EVENT_READ)
        due = time.monotonic()
        for number in range(count):
            time.sleep(max(0.0, due - time.monotonic()))
            due += PUSH_EVERY_SECONDS
            body = b"%d" % number
            request = write_put(topic, 0, 0, body, 3)
            begun = time.perf_counter()
            puts.send(request)
            pushed = _pushed(pushes)
            taken.append((time.perf_counter() - begun) * 1e6)
            if [each.body for each in pushed] != [body]:
                raise MeasurementError(f"message {number} came as {pushed!r}")
            while not puts.replies():
                pass
            pushes.ask(f"ack {pushed[0].head.id} 4\r\n".encode())
    return taken


def _pushed(link: TextLink) -> list[Pushed]:
    found: list[Pushed] = []
    while not found:
        found = [frame for frame in link.receive() if isinstance(frame, Pushed)]
    return found


def lease(server: Server, group: str, messages: int, body_bytes: int, each: int) -> None:
    """Lease at least so many messages, and keep them."""
    connections = CONNECTIONS if each > 1 else 50
    plan = LoadPlan(connections, 1, body_bytes, DEADLINE_SECONDS, 0.0, messages, batch=each, group=group)
    found = run_load("remoting-pop", server.port, plan).messages
    if found < messages:
        raise MeasurementError(f"only {found:,} of {messages:,} messages were leased")


def open_bytes(server: Server, group: str, messages: int, body_bytes: int, each: int) -> float:
    """Private memory of each open message, of pops of `each`."""
    before = status_bytes(server.pid, "RssAnon")
    lease(server, group, messages, body_bytes, each)
    return (status_bytes(server.pid, "RssAnon") - before) / messages


def seconds_until_pop(system: System, folder: Path, group: str) -> tuple[float, Server]:
    """Start a broker on a folder; seconds until it has leased a message, and the broker."""
    begun = time.monotonic()
    server = system.start(folder)
    try:
        with TextLink(server.port) as link:
            link.send(f"pop {TOPIC} {group} 1 wait=10000 1\r\n".encode())
            _pushed(link)
    except BaseException:
        server.stop()
        raise
    return time.monotonic() - begun, server

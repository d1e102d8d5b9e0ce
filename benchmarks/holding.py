"""Pulls and pops that a broker holds for lack of a message: the cost of each, and how soon a message wakes the right one."""

import selectors
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from benchmarks.figures import MeasurementError
from benchmarks.link import Link, succeeded
from benchmarks.memory import resting_bytes
from benchmarks.peers import REPLY_SECONDS, Level, Server, System, metaq
from metaq.protocol.record import decode_record

TOPIC = "BenchmarkTest"
"""Every broker has it, with 1,024 partitions."""
HOLD_MS = 600_000
"""Longer than a measurement takes: no pull is answered because its time is over."""
STRIDE = 389
"""From one woken partition to the next: a prime, so that all take their turn and none twice soon."""
WAKE_EVERY_SECONDS = 0.02
"""So that a round meets the broker's regular work: sweeps each 0.25 s, a checkpoint each 5 s."""


@dataclass(frozen=True)
class Holding:
    """The figures of one round: resident bytes of each held pull, and the latency of each wake-up in microseconds."""

    each_bytes: float
    wakes_us: list[float]


Asked = Callable[[Link, int, int], bytes]
"""The request that is held: of which partition, and from which offset on."""


def _pull(link: Link, partition: int, ordinal: int) -> bytes:
    return link.pull(TOPIC, partition, ordinal, HOLD_MS)


def _pop(link: Link, partition: int, _ordinal: int) -> bytes:
    return link.pop(TOPIC, partition, HOLD_MS)


def holder(settings: Sequence[str] = ()) -> System:
    """Our broker, told to hold pulls as long as HOLD_MS."""
    return metaq(Level.MEMORY, ["--max-hold-ms", str(HOLD_MS), *settings])


def measure_holding(server: Server, pulls: int, wakes: int, *, leased: bool = False) -> Holding:
    """Have the server hold so many pulls, each of a partition and on a connection of its own; then wake so many, one by one.

    Each partition has one message before. What a pull costs includes its connection. A wake-up runs from handing a message to
    the kernel until its pull is answered; a pull of another partition that is answered instead or as well raises. `leased`:
    they are pops, whose leases go on.
    """
    asked = _pop if leased else _pull
    with Link(server.port) as link:
        link.ask_all(link.message(TOPIC, partition, b"before") for partition in range(pulls))
        link.ask_all(asked(link, partition, 0) for partition in range(pulls))
    idle = resting_bytes(server.pid)
    with held_pulls(server, pulls, asked) as links:
        each = (resting_bytes(server.pid) - idle) / pulls
        with Link(server.port) as producer, selectors.EpollSelector() as selector:
            for partition, link in enumerate(links):
                selector.register(link.fileno(), selectors.EVENT_READ, partition)
            ends = [1] * pulls
            taken = []
            due = time.monotonic()
            for turn in range(wakes):
                time.sleep(max(0.0, due - time.monotonic()))
                taken.append(_wake(selector, links, ends, producer, turn * STRIDE % pulls, asked))
                due += WAKE_EVERY_SECONDS
            if selector.select(0):
                raise MeasurementError("a pull was answered for which there is no message")
    return Holding(each, taken)


@contextmanager
def held_pulls(server: Server, pulls: int, asked: Asked) -> Iterator[list[Link]]:
    with ExitStack() as opened:
        links = [opened.enter_context(Link(server.port)) for _ in range(pulls)]
        for partition, link in enumerate(links):
            link.send(asked(link, partition, 1))
        # connections are accepted in order, and each has something to read by then: the others are held when this is answered
        last = opened.enter_context(Link(server.port))
        last.send(last.pull(TOPIC, 0, 0, 0))
        while not last.receive():
            pass
        yield links


def _wake(
    selector: selectors.EpollSelector, links: list[Link], ends: list[int], producer: Link, partition: int, asked: Asked
) -> float:
    """Put one message into a partition whose pull is held; microseconds until that pull is answered. It is held anew."""
    body = b"%d-%d" % (partition, ends[partition])
    request = producer.message(TOPIC, partition, body)
    link = links[partition]
    begun = time.perf_counter()
    producer.send(request)
    answers: list[bytes] = []
    while not answers:
        ready = selector.select(REPLY_SECONDS)
        if [key.data for key, _ in ready] != [partition]:
            raise MeasurementError(f"a message in partition {partition} woke {[key.data for key, _ in ready]}")
        answers = [answer.body for answer in succeeded(link.receive())]
    taken = (time.perf_counter() - begun) * 1e6
    if len(answers) != 1 or bytes(decode_record(answers[0]).body) != body:
        raise MeasurementError(f"the pull of partition {partition} was answered with {answers!r}")
    ends[partition] += 1
    link.send(asked(link, partition, ends[partition]))
    while not succeeded(producer.receive()):
        pass
    return taken

"""The reading ahead of one queue, with brokers and time that the test decides about."""

import threading
import time
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from metaq.client import ReceivedMessage, connect
from metaq.client.connecting.transport import Done, RemotingRequest
from metaq.client.consuming import fetching, push
from metaq.client.consuming.fetching import HOLD_MS, Budget, FetchContext, Fetcher, PulledBatch, subscription_to
from metaq.errors import NotConnected
from metaq.message import MessageQueue, QueueOffset
from metaq.protocol.remoting.codes import JSON, RESPONSE_FLAG, Response
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.testing import InMemoryBroker
from tests.client.test_consumers import DEADLINE_S, FIRST
from tests.support.broker import wait_until

QUEUE = MessageQueue("orders", "a", 0)
QUEUE_HERE = MessageQueue("orders", "memory", 0)


class Reading:
    """A fetcher, what it asks for, and the tasks that it leaves for later; ``step`` runs the next one."""

    def __init__(self) -> None:
        self.tasks: deque[Callable[[], object]] = deque()
        self.pauses: list[float] = []
        self.asked: list[tuple[RemotingRequest, Done]] = []
        self.batches: list[PulledBatch] = []
        self.is_away = False
        routes = SimpleNamespace(address=lambda name, number=0: "a:1", replicas=lambda name: {0: "a:1"}, any_address=str)
        scheduler = SimpleNamespace(run=self.tasks.append, after=self._after)
        core: Any = SimpleNamespace(
            routes=routes,
            scheduler=scheduler,
            transport=SimpleNamespace(submit=self._submit),
            look_for_masters=lambda: None,
            max_inflated_bytes=1 << 20,
        )
        context = FetchContext(core, "billing", self.batches.append, Budget())
        self.fetcher = Fetcher(context, QUEUE, subscription_to("orders", "*", None), QueueOffset(0))

    def _submit(self, address: str, request: RemotingRequest, deadline: float, done: Done) -> None:
        if self.is_away:
            raise NotConnected("away")
        self.asked.append((request, done))

    def _after(self, seconds: float, task: Callable[[], object]) -> None:
        self.pauses.append(seconds)
        self.tasks.append(task)

    def step(self) -> None:
        self.tasks.popleft()()

    def answer(self, code: int, following: int) -> None:
        """Answer the pull without messages."""
        fields = {"nextBeginOffset": str(following), "suggestWhichBrokerId": "0"}
        self.asked.pop()[1](RemotingCommand(code, 1, RESPONSE_FLAG, fields, b"", None, "JAVA", 409, JSON))


def test_a_queue_is_read_again_however_often_that_has_failed() -> None:
    """SG-118: the pauses grow up to a limit; a number beyond all limits would have ended the reading for ever."""
    reading = Reading()
    reading.is_away = True
    reading.fetcher.pull()
    while len(reading.pauses) < 1200:
        assert reading.tasks, "it reads no more"
        reading.step()
    assert all(2.5 <= pause <= 5.0 for pause in reading.pauses[10:])
    reading.is_away = False
    reading.step()
    assert len(reading.asked) == 1


def test_a_pull_that_a_broker_has_held_ends_a_row_of_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    """SG-118: also when there was no message: the next failure is the first one."""
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    reading = Reading()
    reading.is_away = True
    reading.fetcher.pull()
    while len(reading.pauses) < 10:
        reading.step()
    assert reading.pauses[-1] >= 2.5
    reading.is_away = False
    reading.step()
    clock[0] += HOLD_MS / 1000
    reading.answer(Response.PULL_NOT_FOUND, 0)
    reading.answer(Response.PULL_NOT_FOUND, 0)
    assert reading.pauses[10:] == [pytest.approx(0.15, abs=0.05)], "the second one came too soon"


def test_a_listener_that_hangs_does_not_fill_the_memory(
    memory: InMemoryBroker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """SG-118: what is finished after its message must be remembered, so the queue is read on only when that is consumed."""
    monkeypatch.setattr(fetching, "_MOST_MESSAGES", 50)
    monkeypatch.setattr(fetching, "QUEUE_MESSAGES", 100)
    monkeypatch.setattr(push, "_MOST_HELD", 500)
    count, go_on, heard = 2000, threading.Event(), list[int]()

    def listener(message: ReceivedMessage) -> None:
        if message.queue_offset == 0:
            assert go_on.wait(DEADLINE_S)
        heard.append(message.queue_offset)

    memory.create_topic("orders", 1)
    with connect(memory.address) as client:
        for _ in range(0, count, 500):
            client.producer().send_batch("orders", [b"x"] * 500)
        with client.listen("orders", "billing", listener, threads=2, consume_from=FIRST) as consumer:
            wait_until(lambda: QUEUE_HERE in consumer.assignment(), DEADLINE_S, "the queue is taken")
            fetcher = consumer._fetchers[QUEUE_HERE]
            wait_until(lambda: is_held_back(fetcher), DEADLINE_S, "all that was fetched but one is finished")
            assert len(heard) < 500 + 3 * 50
            go_on.set()
            wait_until(lambda: len(heard) == count, DEADLINE_S, "all is consumed")
    assert caplog.text.count("a message takes long, its queue is read no further") == 1
    assert memory.committed("billing", "orders") == {0: count}


def is_held_back(fetcher: Fetcher) -> bool:
    return fetcher._is_held_back and fetcher._in_flight is None and fetcher.buffered == 1

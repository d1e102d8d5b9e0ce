"""Listeners that get several messages at once: all are consumed, or all failed."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any, Final

import pytest

import metaq
import metaq.aio
from metaq.testing import InMemoryBroker
from tests.client.conftest import TIMEOUT_S
from tests.support.broker import wait_until

FIRST: Final = metaq.ConsumeFrom.FIRST
AT_ONCE: Final = metaq.Retry(9, metaq.Backoff(first=0.01))
BODIES: Final = [b"%d" % number for number in range(10)]


def send(client: metaq.Client, bodies: list[bytes]) -> None:
    client.admin().create_topic("orders", 1)
    client.producer().send_batch("orders", bodies)


class Calls:
    """What a listener was called with."""

    def __init__(self, enough: int, fails: Callable[[list[metaq.ReceivedMessage]], bool] = lambda messages: False) -> None:
        self.bodies: list[list[bytes]] = []
        self.times: list[list[int]] = []
        self.done = threading.Event()
        self._enough = enough
        self._fails = fails

    def __call__(self, messages: list[metaq.ReceivedMessage]) -> None:
        self.bodies.append([message.body for message in messages])
        self.times.append([message.reconsume_times for message in messages])
        if sum(map(len, self.bodies)) >= self._enough:
            self.done.set()
        if self._fails(messages):
            raise ValueError("the bank is closed")


@pytest.mark.parametrize("ordered", [False, True])
def test_a_listener_gets_what_is_there(client: metaq.Client, ordered: bool) -> None:
    """In order, and never more than it asked for."""
    send(client, BODIES)
    calls = Calls(len(BODIES))
    with client.listen("orders", "g", calls, consume_from=FIRST, batch_size=4, threads=1, ordered=ordered):
        assert calls.done.wait(TIMEOUT_S)
    assert calls.bodies == [BODIES[:4], BODIES[4:8], BODIES[8:]]


def test_offsets_are_committed_together(new_client: Callable[[], metaq.Client], address: str) -> None:
    """After the end nothing is delivered again."""
    client = new_client()
    send(client, BODIES)
    calls = Calls(len(BODIES))
    with client.listen("orders", "g", calls, consume_from=FIRST, batch_size=100):
        assert calls.done.wait(TIMEOUT_S)
    again = Calls(1)
    with client.listen("orders", "g", again, batch_size=100):
        client.producer().send("orders", b"new")
        assert again.done.wait(TIMEOUT_S)
    assert again.bodies == [[b"new"]]


def test_all_of_a_batch_fail_together(client: metaq.Client) -> None:
    """Each goes back by itself, as one that failed alone; those of other batches do not."""
    send(client, BODIES)
    calls = Calls(len(BODIES), lambda messages: messages[0].body == b"0")
    with client.listen("orders", "g", calls, consume_from=FIRST, batch_size=5, threads=1, max_reconsume_times=0):
        assert calls.done.wait(TIMEOUT_S)
        admin = client.admin()
        wait_until(lambda: len(admin.dead_letters("g")) == 5, TIMEOUT_S, "five dead letters")
    assert [letter.body for letter in admin.dead_letters("g")] == BODIES[:5]
    assert calls.bodies == [BODIES[:5], BODIES[5:]]


def test_an_ordered_batch_is_tried_again_as_it_was(memory: InMemoryBroker) -> None:
    """The same messages, with one more failure, although more have come meanwhile; then those after it."""
    with metaq.connect(memory.address, timeout_s=TIMEOUT_S) as client:
        send(client, BODIES[:2])

        def fails(messages: list[metaq.ReceivedMessage]) -> bool:
            if messages[0].reconsume_times == 0 and messages[0].body == b"0":
                client.producer().send_batch("orders", BODIES[2:5])
                return True
            return messages[0].body == b"0" and messages[0].reconsume_times == 1

        calls = Calls(9, fails)
        with client.listen("orders", "g", calls, consume_from=FIRST, batch_size=3, ordered=True, retry=AT_ONCE):
            assert calls.done.wait(TIMEOUT_S)
    assert calls.bodies == [BODIES[:2], BODIES[:2], BODIES[:2], BODIES[2:5]]
    assert calls.times == [[0, 0], [1, 1], [2, 2], [0, 0, 0]]


def test_an_ordered_batch_is_given_up_together(client: metaq.Client) -> None:
    """After the last time its messages are dead letters, and the queue goes on."""
    send(client, BODIES[:4])
    calls = Calls(4, lambda messages: messages[0].body == b"0")
    with client.listen("orders", "g", calls, consume_from=FIRST, batch_size=2, ordered=True, max_reconsume_times=0):
        assert calls.done.wait(TIMEOUT_S)
    assert calls.bodies == [BODIES[:2], BODIES[2:4]]
    assert [letter.body for letter in client.admin().dead_letters("g")] == BODIES[:2]


@pytest.mark.parametrize("ordered", [False, True])
def test_what_cannot_be_decoded_fails_alone(client: metaq.Client, ordered: bool) -> None:
    """The others of its batch are consumed without it."""
    send(client, [b"1", b"{", b"3"])
    calls = Calls(2)
    with client.listen(
        "orders",
        "g",
        calls,
        consume_from=FIRST,
        batch_size=3,
        deserializer=metaq.JSON,
        max_reconsume_times=0,
        ordered=ordered,
    ):
        assert calls.done.wait(TIMEOUT_S)
        wait_until(lambda: len(client.admin().dead_letters("g")) == 1, TIMEOUT_S, "a dead letter")
    assert calls.bodies == [[b"1", b"3"]]


@pytest.mark.parametrize("wrong", [0, -1, "4", True])
def test_a_wrong_size_is_told(client: metaq.Client, wrong: Any) -> None:
    """At the call."""
    with pytest.raises(metaq.BadRequest, match=r"batch_size is .*; it takes a whole number from 1 on"):
        client.listen("orders", "g", print, batch_size=wrong)


def test_asyncio_has_the_same(client: metaq.Client) -> None:
    """The coroutine function gets the list."""
    send(client, BODIES)

    async def consume() -> list[list[bytes]]:
        found: asyncio.Queue[list[bytes]] = asyncio.Queue()

        async def listen(messages: list[metaq.ReceivedMessage]) -> None:
            await found.put([message.body for message in messages])

        aio = metaq.aio.Client(client)
        async with await aio.listen("orders", "g", listen, consume_from=FIRST, batch_size=6, threads=1):
            return [await found.get(), await found.get()]

    assert asyncio.run(asyncio.wait_for(consume(), TIMEOUT_S)) == [BODIES[:6], BODIES[6:]]

"""How often what failed is tried again, and after which pauses, as a program says it."""

import asyncio
import dataclasses
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import datetime, timedelta
from typing import Any, Final

import pytest

import metaq
import metaq.aio
from metaq.client.connecting.transport import Done, RemotingRequest
from metaq.client.retries import LEVELS_S, level_for
from metaq.engine.schedule import LEVEL_SECONDS
from metaq.protocol.remoting.codes import Request
from metaq.testing import InMemoryBroker
from tests.client.conftest import TIMEOUT_S
from tests.support.broker import wait_until
from tests.support.fakeremoting import FakeRemoting, Reply, route_to

EXACT: Final = metaq.Backoff(first=2.0, factor=3.0, most=10.0, jitter=0.0)
WITHOUT_PAUSE: Final = metaq.Backoff(first=0.0)
WRONG: Final[Any] = "1"


def test_pauses_grow_up_to_a_limit() -> None:
    """By the factor each time, however many failures there were."""
    assert [EXACT.pause_s(failures) for failures in (0, 1, 2, 3, 10_000)] == [2.0, 6.0, 10.0, 10.0, 10.0]
    pauses = [metaq.Backoff(first=8.0, most=8.0, jitter=0.5).pause_s(0) for _ in range(200)]
    assert min(pauses) >= 4.0
    assert max(pauses) <= 8.0
    assert len(set(pauses)) > 100


def test_they_cannot_be_changed() -> None:
    """Threads share them."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        EXACT.first = 1.0  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        metaq.Retry(1).times = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: metaq.Backoff(first=-1), "first is -1 .*; it takes a number of seconds, 0 or more"),
        (lambda: metaq.Backoff(most=0.5), "most is 0.5 .*; it takes a number from 1 on"),
        (lambda: metaq.Backoff(factor=0.5), "factor is 0.5 .*; it takes a number from 1 on"),
        (lambda: metaq.Backoff(jitter=2), "jitter is 2 .*; it takes a number from 0 to 1"),
        (lambda: metaq.Backoff(first=WRONG), r"first is '1' \(str\)"),
        (lambda: metaq.Retry(-1), "times is -1 .*; it takes a whole number from 0 on"),
        (lambda: metaq.Retry(1, WRONG), r"backoff is '1' \(str\); it takes a metaq.Backoff"),
    ],
)
def test_wrong_ones_are_told(make: Callable[[], Any], told: str) -> None:
    """When they are made."""
    with pytest.raises(metaq.BadRequest, match=told):
        make()


def test_the_levels_are_those_of_brokers() -> None:
    """A pause is not shortened by them."""
    assert LEVELS_S == LEVEL_SECONDS
    assert [level_for(seconds) for seconds in (0.0, 1.0, 1.1, 30.0, 7200.0, 1e9)] == [1, 1, 2, 4, 18, 18]


@pytest.fixture(scope="module")
def failing() -> Iterator[tuple[metaq.Client, FakeRemoting]]:
    """A client of one broker that takes nothing."""
    with ExitStack() as stack:
        broker = stack.enter_context(FakeRemoting(send_message_v2=lambda request: Reply(1, remark="full")))
        registry = stack.enter_context(FakeRemoting(get_routeinfo_by_topic=route_to({"a": broker.address}, queues=1)))
        yield stack.enter_context(metaq.connect(registry.address, timeout_s=TIMEOUT_S)), broker


@pytest.mark.parametrize("times", [0, 1, 6])
def test_a_producer_tries_as_often_as_it_is_told(failing: tuple[metaq.Client, FakeRemoting], times: int) -> None:
    """And once more than the times that it tries again; for sends of both kinds."""
    client, broker = failing
    producer = client.producer(retry=metaq.Retry(times, WITHOUT_PAUSE))
    for send in (producer.send, lambda *message: producer.send_async(*message).result(TIMEOUT_S)):
        before = broker.count(Request.SEND_MESSAGE_V2)
        with pytest.raises(metaq.Refused) as failure:
            send("orders", b"")
        assert broker.count(Request.SEND_MESSAGE_V2) - before == times + 1
        assert failure.value.context is not None
        assert failure.value.context.attempt == times + 1


def test_a_listener_has_the_pauses_that_it_is_told(memory: InMemoryBroker) -> None:
    """Rounded up to the levels of brokers; after the last time it is a dead letter."""
    with metaq.connect(memory.address, timeout_s=TIMEOUT_S) as client:
        calls: list[int] = []
        called = threading.Semaphore(0)

        def fail(message: metaq.ReceivedMessage) -> None:
            calls.append(message.reconsume_times)
            called.release()
            raise ValueError

        client.producer().send("orders", b"1")
        retry = metaq.Retry(2, EXACT)  # 2 s and 6 s: the levels of 5 s and 10 s
        with client.listen("orders", "g", fail, consume_from=metaq.ConsumeFrom.FIRST, retry=retry):
            for pause_s in (5.0, 10.0):
                assert called.acquire(timeout=TIMEOUT_S)
                wait_until(lambda: memory.delayed == 1, TIMEOUT_S, "a message that waits")
                memory.advance(pause_s - 0.5)
                assert memory.delayed == 1
                memory.advance(1.0)
            wait_until(lambda: len(memory.dead_letters("g")) == 1, TIMEOUT_S, "a dead letter")
        assert calls == [0, 1, 2]


def test_an_ordered_listener_waits_here(client: metaq.Client) -> None:
    """For exactly as long as it is told; after the last time it gives up."""
    calls: list[int] = []

    def fail(message: metaq.ReceivedMessage) -> None:
        calls.append(message.reconsume_times)
        raise ValueError

    client.producer().send("orders", b"1")
    retry = metaq.Retry(3, WITHOUT_PAUSE)
    with client.listen("orders", "g", fail, consume_from=metaq.ConsumeFrom.FIRST, ordered=True, retry=retry):
        wait_until(lambda: len(client.admin().dead_letters("g")) == 1, TIMEOUT_S, "a dead letter")
    assert calls == [0, 1, 2, 3]


def test_the_pauses_of_an_ordered_listener_begin_with_the_first(client: metaq.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of all others."""
    failures: list[int] = []

    def pause_s(backoff: metaq.Backoff, before: int) -> float:
        failures.append(before)
        return 0.0

    def fail(message: metaq.ReceivedMessage) -> None:
        raise ValueError

    monkeypatch.setattr(metaq.Backoff, "pause_s", pause_s)
    client.producer().send("orders", b"1")
    with client.listen("orders", "g", fail, consume_from=metaq.ConsumeFrom.FIRST, ordered=True, max_reconsume_times=3):
        wait_until(lambda: len(client.admin().dead_letters("g")) == 1, TIMEOUT_S, "a dead letter")
    assert failures == [0, 1, 2]


def test_two_ways_to_say_it_contradict(client: metaq.Client) -> None:
    """At the call, as what is no retry."""
    with pytest.raises(metaq.BadRequest, match="retry and max_reconsume_times contradict each other"):
        client.listen("orders", "g", print, retry=metaq.Retry(1), max_reconsume_times=1)
    wrong: Any = 3
    with pytest.raises(metaq.BadRequest, match=r"retry is 3 \(int\); it takes a metaq.Retry"):
        client.listen("orders", "g", print, retry=wrong)
    with pytest.raises(metaq.BadRequest, match=r"retry is 3 \(int\)"):
        client.producer(retry=wrong)


@pytest.mark.parametrize("awaited", [False, True])
def test_a_handler_of_leases_has_the_pauses_that_it_is_told(memory: InMemoryBroker, awaited: bool) -> None:
    """No shorter ones; after the last time the message is a dead letter."""
    with metaq.connect(memory.address, timeout_s=TIMEOUT_S) as client:
        attempts: list[tuple[int, datetime]] = []
        client.producer().send("orders", b"1")
        retry = metaq.Retry(1, metaq.Backoff(first=40.0, most=40.0, jitter=0.0))

        def fail(message: metaq.LeasedMessage) -> None:
            attempts.append((message.attempt, memory.now))
            raise ValueError

        async def work() -> None:
            async def fail_soon(message: metaq.aio.LeasedMessage) -> None:
                attempts.append((message.attempt, memory.now))
                raise ValueError

            async with await metaq.aio.Client(client).lease_consumer("orders", "g", from_first=True) as consumer:
                running = asyncio.create_task(consumer.run(fail_soon, retry=retry))
                await asyncio.to_thread(watch)
                await consumer.close()
                await running

        def came_again() -> bool:
            memory.advance(10.0)
            return len(attempts) > 1

        def watch() -> None:
            wait_until(lambda: len(attempts) == 1, TIMEOUT_S, "the first attempt")
            wait_until(came_again, TIMEOUT_S, "the second attempt", 0.1)
            wait_until(lambda: len(memory.dead_letters("g")) == 1, TIMEOUT_S, "a dead letter")

        if awaited:
            asyncio.run(asyncio.wait_for(work(), TIMEOUT_S))
        else:
            with client.lease_consumer("orders", "g", from_first=True) as consumer:
                running = threading.Thread(target=lambda: consumer.run(fail, retry=retry))
                running.start()
                watch()
                consumer.close()
                running.join(TIMEOUT_S)
        (first, at), (second, later) = attempts
        assert (first, second) == (1, 2)
        assert later - at >= timedelta(seconds=40)


def test_a_message_that_its_broker_may_have_taken_back_is_not_copied(
    memory: InMemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SG-134: when the answer does not come in time, a copy would come beside it."""
    memory.create_topic("orders", 1)
    usual = memory._take

    def take_silently(session: Any, request: RemotingRequest, done: Done) -> None:
        usual(session, request, (lambda outcome: None) if request.code == Request.CONSUMER_SEND_MSG_BACK else done)

    monkeypatch.setattr(memory, "_take", take_silently)
    with (
        metaq.connect(memory.address) as client,
        client.consumer("orders", "billing", consume_from=metaq.ConsumeFrom.FIRST) as consumer,
    ):
        client.producer().send("orders", b"x")
        message = consumer.receive(TIMEOUT_S)
        assert message is not None
        client._core.timeout_s = 0.1
        with pytest.raises(metaq.RequestTimeout):
            consumer.retry_later(message)
    assert memory.delayed == 1

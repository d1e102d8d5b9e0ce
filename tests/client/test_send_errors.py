"""An error of a send says which message it was, where it went, and at which attempt."""

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import metaq
import metaq.aio
from tests.client.conftest import TIMEOUT_S
from tests.support.broker import BrokerProcess, wait_until
from tests.support.fakeremoting import FakeRemoting, Reply, route_to

TRIES = 3


@pytest.fixture(scope="module")
def failing() -> Iterator[metaq.Client]:
    """A client of two brokers that take nothing, and one, of a topic of its own, that is not there."""
    with ExitStack() as stack:
        full = {"send_message_v2": lambda request: Reply(1, remark="full"), "send_batch_message": lambda request: Reply(1)}
        addresses = {name: stack.enter_context(FakeRemoting(**full)).address for name in ("a", "b")}
        with FakeRemoting() as gone:
            nobody = route_to({"c": gone.address}, queues=1)
        routes = {"orders": route_to(addresses, queues=2), "nobody": nobody}
        registry = FakeRemoting(get_routeinfo_by_topic=lambda request: routes[request.fields["topic"]](request))
        stack.enter_context(registry)
        yield stack.enter_context(metaq.connect(registry.address, timeout_s=TIMEOUT_S))


def noted(error: BaseException) -> str:
    (note,) = error.__notes__
    return note


def test_an_error_names_topic_keys_attempt_and_broker(failing: metaq.Client) -> None:
    """In attributes for programs, and in a note for people."""
    with pytest.raises(metaq.Refused) as failure:
        failing.producer().send("orders", b"", keys=["2003", "2004"])
    context = failure.value.context
    assert context is not None
    broker = context.broker
    assert (context.topic, context.keys) == ("orders", ("2003", "2004"))
    assert broker in {"a", "b"}
    assert context.attempt == TRIES
    (ident,) = context.ids
    sent = f"message {ident} with the keys 2003 2004 to topic orders"
    assert noted(failure.value) == f"while sending {sent}: attempt {TRIES}, at broker {broker}"


def test_an_error_without_an_attempt_says_so() -> None:
    """Nobody was asked: the registry is not there."""
    with FakeRemoting() as gone:
        address = gone.address
    with metaq.connect(address) as client, pytest.raises(metaq.RouteNotFound) as failure:
        client.producer().send("orders", b"")
    assert failure.value.context is not None
    assert failure.value.context.attempt == 0
    assert noted(failure.value).endswith(" to topic orders: no attempt was made")


def test_a_time_out_names_the_broker_that_did_not_answer(tmp_path: Path) -> None:
    """A process that was stopped takes the request and does not answer."""
    with BrokerProcess(tmp_path / "data") as broker, metaq.connect(broker.registry, timeout_s=TIMEOUT_S) as client:
        client.admin().create_topic("orders")
        name = client.producer().send("orders", b"").queue.broker_name
        os.kill(broker.pid, signal.SIGSTOP)
        try:
            with pytest.raises(metaq.RequestTimeout) as failure:
                client.producer().send("orders", b"", keys="2003", timeout_s=1.0)
        finally:
            os.kill(broker.pid, signal.SIGCONT)
        assert failure.value.context is not None
        assert failure.value.context.keys == ("2003",)
        assert (failure.value.context.attempt, failure.value.context.broker) == (1, name)


def test_a_batch_names_its_first_message_and_counts_the_others(failing: metaq.Client) -> None:
    """A note stays short, whatever the batch; the attribute has all ids."""
    with pytest.raises(metaq.Refused) as failure:
        failing.producer().send_batch("orders", [b""] * 50)
    assert failure.value.context is not None
    assert len(set(failure.value.context.ids)) == 50
    assert f"message {failure.value.context.ids[0]} and 49 more to topic orders: attempt" in noted(failure.value)


def test_each_future_of_a_batch_has_its_own(failing: metaq.Client) -> None:
    """Messages that lingered together fail together, and each error names its own message."""
    with failing.producer(linger_ms=20) as producer:
        futures = [producer.send_async("orders", b"", keys=f"k{number}") for number in range(3)]
        errors = [future.exception(timeout=TIMEOUT_S) for future in futures]
    assert all(isinstance(error, metaq.Refused) for error in errors)
    contexts = [error.context for error in errors if isinstance(error, metaq.Refused) and error.context is not None]
    assert [context.keys for context in contexts] == [("k0",), ("k1",), ("k2",)]
    assert len({context.ids for context in contexts}) == 3
    for error, context in zip(errors, contexts, strict=True):
        assert error is not None
        assert error.__notes__ == [str(context), f"message {context.ids[0]}, which was sent in a batch"]


def test_a_message_that_is_not_waited_for(failing: metaq.Client) -> None:
    """Its only attempt is the first."""
    with pytest.raises(metaq.ConnectionFailed) as failure:
        failing.producer().send_oneway("nobody", b"", keys="2005")
    assert failure.value.context is not None
    assert (failure.value.context.attempt, failure.value.context.keys) == (1, ("2005",))


def test_asyncio_has_the_same(failing: metaq.Client) -> None:
    """The error passes through a future."""

    async def fail() -> metaq.Refused:
        producer = metaq.aio.Client(failing).producer()
        with pytest.raises(metaq.Refused) as failure:
            await producer.send("orders", b"", keys="2006")
        return failure.value

    error = asyncio.run(fail())
    assert error.context is not None
    assert error.context.keys == ("2006",)
    assert noted(error) == str(error.context)


def test_a_partition_that_is_gone_costs_one_attempt(tmp_path: Path) -> None:
    """The route is fetched again, as after every refusal that may come from an old one."""
    with BrokerProcess(tmp_path / "data") as broker, metaq.connect(broker.registry, timeout_s=TIMEOUT_S) as client:
        client.admin().create_topic("orders", partitions=8)
        producer = client.producer()
        assert len({producer.send("orders", b"").queue.partition for _ in range(8)}) == 8
        with metaq.connect(broker.registry, timeout_s=TIMEOUT_S) as other:
            other.admin().delete_topic("orders")
            other.admin().create_topic("orders", partitions=1)
            wait_until(lambda: len(other.admin().queues("orders")) == 1, TIMEOUT_S, "the registry knows")
        assert {producer.send("orders", b"").queue.partition for _ in range(8)} == {0}

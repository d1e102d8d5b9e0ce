"""Messages that follow a local transaction, with whole brokers: the one in memory, and processes that are killed."""

import asyncio
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Coroutine, Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest

import metaq.aio
from metaq.client import Client, ConsumeFrom, HalfMessage, Outcome, connect
from metaq.message import LogOffset
from metaq.protocol.ids import OffsetId, encode_offset_id
from metaq.testing import InMemoryBroker
from tests.support.broker import BrokerProcess, wait_until

DEADLINE_S = 60.0
GROUP = "order-desk"
COMMIT, ROLLBACK, UNKNOWN = Outcome.COMMIT, Outcome.ROLLBACK, Outcome.UNKNOWN


# -- the broker in memory ---------------------------------------------------------------------------------------------


def bodies(memory: InMemoryBroker, topic: str = "orders") -> list[bytes]:
    return sorted(message.body for message in memory.messages(topic))


def by_body(message: HalfMessage, argument: object = None) -> Outcome:
    """The outcome that the body names."""
    return Outcome[message.body.decode().upper()]


@pytest.fixture
def client(memory: InMemoryBroker) -> Iterator[Client]:
    with connect(memory.address, timeout_s=DEADLINE_S) as client:
        yield client


def test_only_what_is_committed_is_delivered(memory: InMemoryBroker, client: Client) -> None:
    """RD-105: with the id, tag, keys and properties that it was sent with, in its own topic."""
    found = {"first": ROLLBACK}
    producer = client.transaction_producer(GROUP, by_body, check=lambda message: found.get(message.id, COMMIT))
    sent = producer.send("orders", b"commit", tag="paid", keys="2003", properties={"city": "Kiel"}).sent
    producer.send("orders", b"rollback")
    unknown = producer.send("orders", b"unknown").sent
    wait_until(lambda: len(memory.undecided) == 1, DEADLINE_S, "two are decided")
    (message,) = memory.messages("orders")
    assert (message.id, message.body, message.tag, message.keys) == (sent.id, b"commit", "paid", ("2003",))
    assert (message.properties["city"], message.partition) == ("Kiel", sent.queue.partition)
    assert [half.id for half in memory.undecided] == [unknown.id]
    memory.check_transactions()
    wait_until(lambda: not memory.undecided, DEADLINE_S, "all are decided")
    assert bodies(memory) == [b"commit", b"unknown"]


def test_another_producer_of_the_group_answers(memory: InMemoryBroker, client: Client) -> None:
    """RD-105: when the one that sent is gone; without any, the message waits."""
    with connect(memory.address) as first:
        first.transaction_producer(GROUP, by_body, check=by_body).send("orders", b"unknown")
    memory.check_transactions()
    assert [half.body for half in memory.undecided] == [b"unknown"]
    client.transaction_producer(GROUP, by_body, check=lambda message: COMMIT)

    def decided() -> bool:
        memory.check_transactions()
        return not memory.undecided

    wait_until(decided, DEADLINE_S, "the other one is asked")
    assert bodies(memory) == [b"unknown"]


@pytest.mark.parametrize("closes", [False, True])
def test_producers_of_a_group_are_asked_in_turn(memory: InMemoryBroker, client: Client, closes: bool) -> None:
    """Also when one is closed whose client is not."""
    with connect(memory.address) as first:
        asked: list[bytes] = []

        def check(message: HalfMessage) -> Outcome:
            asked.append(message.body)
            return UNKNOWN

        producer = first.transaction_producer(GROUP, by_body, check=check)
        producer.send("orders", b"unknown")
        if closes:
            producer.close()
        client.transaction_producer(GROUP, by_body, check=lambda message: COMMIT)

        def decided() -> bool:
            memory.check_transactions()
            return not memory.undecided

        wait_until(decided, DEADLINE_S, "the other one is asked")
        assert bodies(memory) == [b"unknown"]
        assert not (closes and asked)


def test_a_stranger_decides_nothing(memory: InMemoryBroker, client: Client) -> None:
    """RD-105: neither another group nor another place."""
    producer = client.transaction_producer(GROUP, by_body, check=by_body)
    stranger = client.transaction_producer("strangers", by_body, check=by_body)
    execution = producer._begin("orders", b"commit")
    with execution:
        execution.decide(COMMIT)
    stranger._end(execution)
    execution.sent = execution.sent._replace(offset_id=encode_offset_id(OffsetId("127.0.0.1", 1, LogOffset(4711))))
    producer._end(execution)
    assert (len(memory.undecided), bodies(memory)) == (1, [])


# -- a broker process -------------------------------------------------------------------------------------------------


@pytest.fixture
def asking(tmp_path: Path) -> Iterator[BrokerProcess]:
    """A broker that asks producers often, and never gives up."""
    flags = ("--check-after-ms", "300", "--check-interval-ms", "300", "--max-checks", "1000000")
    with BrokerProcess(tmp_path / "data", *flags, durability="disk") as broker:
        yield broker
    shutil.rmtree(broker.data)


def received(client: Client, count: int) -> list[bytes]:
    """So many messages of the topic, and that there is no other one."""
    client.producer().send("orders", b"last")
    with client.consumer("orders", "billing", consume_from=ConsumeFrom.FIRST) as consumer:
        messages = [consumer.receive(DEADLINE_S) for _ in range(count + 1)]
        assert sum(view.end for view in client.admin().queues("orders")) == count + 1
    return sorted(message.body for message in messages if message is not None and message.body != b"last")


def test_what_became_of_transactions(asking: BrokerProcess) -> None:
    """RD-105: committed, rolled back, and unknown until the broker has asked; a long body stays compressed."""
    long = b"unknown " * 4096
    checked: list[HalfMessage] = []

    def check(message: HalfMessage) -> Outcome:
        checked.append(message)
        return COMMIT if message.body in {b"commit", long} else ROLLBACK

    with connect(asking.registry, timeout_s=DEADLINE_S) as client:
        producer = client.transaction_producer(GROUP, lambda message, outcome: outcome, check=check)
        sent = [
            producer.send("orders", body, tag="paid", keys="2003", properties={"city": "Kiel"}, argument=outcome)
            for body, outcome in ((b"commit", COMMIT), (b"rollback", ROLLBACK), (long, UNKNOWN), (b"never", UNKNOWN))
        ]
        wait_until(lambda: {message.body for message in checked} >= {long, b"never"}, DEADLINE_S, "both are asked about")
        assert received(client, 2) == [b"commit", long]
        message = next(message for message in checked if message.body == long)
        assert (message.id, message.topic, message.tag, message.keys) == (sent[2].sent.id, "orders", "paid", ("2003",))
        assert message.properties["city"] == "Kiel"


def test_a_producer_is_killed(asking: BrokerProcess) -> None:
    """RD-105: SIGKILL in the middle of a local transaction; another client of the group is asked, that has never sent."""
    program = textwrap.dedent(
        """
        import os, signal, sys, metaq

        def execute(message, argument):
            os.kill(os.getpid(), signal.SIGKILL)

        with metaq.connect(sys.argv[1]) as client:
            producer = client.transaction_producer("order-desk", execute, check=lambda message: metaq.Outcome.UNKNOWN)
            producer.send("orders", b"orphan")
        """
    )
    done = subprocess.run([sys.executable, "-c", program, asking.registry], timeout=DEADLINE_S, check=False)
    assert done.returncode == -signal.SIGKILL
    with connect(asking.registry, timeout_s=DEADLINE_S) as client:
        checked: list[bytes] = []

        def check(message: HalfMessage) -> Outcome:
            checked.append(message.body)
            return COMMIT

        client.transaction_producer(GROUP, by_body, check=check)
        wait_until(lambda: bool(checked), DEADLINE_S, "the survivor is asked")
        assert received(client, 1) == [b"orphan"]


def test_a_broker_is_killed_in_the_middle(asking: BrokerProcess) -> None:
    """RD-105, SG-068: it does not hear the outcome; after its restart it asks, and delivers once what was committed."""
    checked: list[bytes] = []

    def execute(message: HalfMessage, outcome: Outcome) -> Outcome:
        if message.body != b"between":
            asking.kill()
        return outcome

    def check(message: HalfMessage) -> Outcome:
        checked.append(message.body)
        return COMMIT if message.body == b"between" else by_body(message)

    with connect(asking.registry, timeout_s=DEADLINE_S) as client:
        producer = client.transaction_producer(GROUP, execute, check=check)
        for outcome in (COMMIT, ROLLBACK):
            assert producer.send("orders", outcome.name.lower().encode(), argument=outcome).outcome is outcome
            asking.restart(same_port=True)
            producer.send("orders", b"between", argument=COMMIT)  # so that it has a connection again
        wait_until(lambda: set(checked) >= {b"commit", b"rollback"}, DEADLINE_S, "both are asked about")
        assert received(client, 3) == [b"between", b"between", b"commit"]


# -- asyncio ----------------------------------------------------------------------------------------------------------


def run(work: Coroutine[Any, Any, None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await work

    asyncio.run(limited())


def test_coroutines(memory: InMemoryBroker) -> None:
    """RD-105, P44: many local transactions wait for each other and send themselves, on one loop; checks are coroutines."""
    count = 40
    checked: list[bytes] = []

    async def work() -> None:
        loop = asyncio.get_running_loop()
        together = asyncio.Barrier(count)
        async with metaq.aio.connect(memory.address) as client:
            plain = client.producer()

            async def execute(message: HalfMessage, argument: int) -> Outcome:
                assert asyncio.get_running_loop() is loop
                await together.wait()
                await plain.send("copies", message.body)
                if argument == 0:
                    raise ValueError("no such customer")
                return COMMIT if argument % 2 else ROLLBACK

            async def check(message: HalfMessage) -> Outcome:
                assert asyncio.get_running_loop() is loop
                await asyncio.sleep(0)
                checked.append(message.body)
                return COMMIT

            async with client.transaction_producer(GROUP, execute, check=check) as producer:
                sends = (producer.send("orders", b"%02d" % number, argument=number) for number in range(count))
                results = await asyncio.gather(*sends)
                assert isinstance(results[0].error, ValueError)
                while memory.undecided:
                    memory.check_transactions()
                    await asyncio.sleep(0.01)

    run(work())
    assert checked == [b"00"]
    assert bodies(memory) == [b"00", *(b"%02d" % number for number in range(1, count, 2))]
    assert len(bodies(memory, "copies")) == count


def test_a_cancelled_send_goes_on(memory: InMemoryBroker) -> None:
    """RD-105, P44: its local transaction is not torn."""

    async def work() -> None:
        begun, may_end = asyncio.Event(), asyncio.Event()

        async def execute(message: HalfMessage, argument: object) -> Outcome:
            begun.set()
            await may_end.wait()
            return COMMIT

        async def check(message: HalfMessage) -> Outcome:
            raise AssertionError("the local transaction goes on")

        async with metaq.aio.connect(memory.address) as client:
            producer = client.transaction_producer(GROUP, execute, check=check)
            sending = asyncio.ensure_future(producer.send("orders", b"paid 2003"))
            await begun.wait()
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
            assert len(memory.undecided) == 1
            memory.check_transactions()
            may_end.set()
            while memory.undecided:
                await asyncio.sleep(0.01)

    run(work())
    assert bodies(memory) == [b"paid 2003"]


def test_a_local_transaction_that_awaits_what_others_have_cancelled_has_failed(memory: InMemoryBroker) -> None:
    """RD-105, P44: its outcome is unknown, as after any other exception; the send itself was not cancelled."""

    async def work() -> None:
        async def execute(message: HalfMessage, argument: object) -> Outcome:
            paid = asyncio.get_running_loop().create_future()
            paid.cancel()
            await paid
            raise AssertionError("it was cancelled")

        async def check(message: HalfMessage) -> Outcome:
            raise AssertionError("nobody asks")

        async with metaq.aio.connect(memory.address) as client:
            async with client.transaction_producer(GROUP, execute, check=check) as producer:
                result = await producer.send("orders", b"paid 2003")
            assert (result.outcome, type(result.error)) == (UNKNOWN, CancelledError)

    run(work())

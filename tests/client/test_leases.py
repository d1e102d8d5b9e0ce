"""Leased messages: the consumer that leases, against the broker for tests and a real one, with threads."""

import asyncio
import itertools
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from metaq.client import Client, LeaseConsumer, LeasedMessage, OutgoingMessage, connect
from metaq.client.connecting.core import HEARTBEAT_S
from metaq.errors import ClientClosed, ClientError, LeaseLost, SubscriptionInvalid
from metaq.testing import InMemoryBroker
from tests.client.conftest import Connect
from tests.support.broker import BrokerProcess, wait_until

DEADLINE_S = 60.0
SOON_S = 0.3
"""How long a test waits for what must not come."""
GROUP = "billing"


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """One process for all tests of this module, which use topics of their own."""
    folder: Path = tmp_path_factory.mktemp("leases")
    with BrokerProcess(folder / "data") as broker:
        yield broker
    shutil.rmtree(broker.data)  # pytest keeps the folders of failed runs


@pytest.fixture
def process(brokers: BrokerProcess) -> BrokerProcess:
    return brokers


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """A topic of the test's own."""
    name: str = request.node.name
    return "".join(letter if letter.isalnum() else "_" for letter in name)[:100]


Later = Callable[[float], None]


@pytest.fixture
def later(request: pytest.FixtureRequest, address: str) -> Later:
    """Lets time pass, where it does not pass by itself."""
    if not address.startswith("memory"):
        return lambda seconds: None
    memory: InMemoryBroker = request.getfixturevalue("memory")
    return memory.advance


def next_of(consumer: LeaseConsumer) -> LeasedMessage:
    message = consumer.receive(timeout_s=DEADLINE_S)
    assert message is not None, "no message within the deadline"
    return message


def put(client: Client, topic: str, *bodies: str) -> None:
    client.producer().send_batch(topic, [body.encode() for body in bodies])


# -- messages ---------------------------------------------------------------------------------------------------------


def test_each_message_comes_once_when_it_is_acked(client: Client, topic: str) -> None:
    """ES-102: with all that a message has, and the number of its delivery."""
    sent = client.producer().send(topic, b"paid 1", tag="paid", keys="one", properties={"city": "Kiel"})
    put(client, topic, *map(str, range(40)))
    with client.lease_consumer(topic, GROUP, batch=7) as consumer:
        messages = []
        for message in consumer:
            messages.append(message)
            message.ack()
            if len(messages) == 41:
                break
        assert consumer.receive(timeout_s=SOON_S) is None
    (first,) = (message for message in messages if message.id == sent.id)
    assert (first.body, first.topic, first.tag, first.keys) == (b"paid 1", topic, "paid", ("one",))
    assert (first.queue, first.partition, first.queue_offset) == (sent.queue, sent.queue.partition, sent.queue_offset)
    assert (first.properties["city"], first.attempt, first.error) == ("Kiel", 1, None)
    assert Counter(message.body for message in messages if message.id != sent.id) == Counter(b"%d" % n for n in range(40))
    with client.lease_consumer(topic, GROUP) as consumer:
        assert consumer.receive(timeout_s=SOON_S) is None


def test_the_messages_of_a_batch_are_leased_one_by_one(client: Client, topic: str) -> None:
    """ES-102, ES-103: each by its own tag, with its own keys and place; one that is given back comes again alone."""
    bodies = [b"%d" % number for number in range(10)]
    batch = [OutgoingMessage(body, tag=("even", "odd")[int(body) % 2], keys=f"key{int(body)}") for body in bodies]
    sent = client.producer().send_batch(topic, batch)
    with client.lease_consumer(topic, GROUP, tags="even") as consumer:
        leased = sorted([next_of(consumer) for _ in range(5)], key=lambda message: message.queue_offset)
        assert [(message.body, message.tag, message.keys) for message in leased] == [
            (body, "even", (f"key{int(body)}",)) for body in bodies[::2]
        ]
        assert [(message.id, message.queue_offset) for message in leased] == [
            (each.id, each.queue_offset) for each in sent[::2]
        ]
        for message in leased:
            if message.body == b"4":
                message.nack(delay=0)
            else:
                message.ack()
        again = next_of(consumer)
        assert (again.id, again.body, again.attempt) == (leased[2].id, b"4", 2)
        again.ack()
        assert consumer.receive(timeout_s=SOON_S) is None


def test_a_message_that_is_given_back_comes_again(client: Client, topic: str) -> None:
    """ES-103: an ack of the delivery before means nothing, and says why; an ack of what is done does no harm."""
    put(client, topic, "a")
    with client.lease_consumer(topic, GROUP) as consumer:
        before = next_of(consumer)
        before.nack(delay=0)
        again = next_of(consumer)
        assert (again.id, again.attempt) == (before.id, 2)
        for stale in (before.ack, before.nack, before.reject, lambda: before.extend(10)):
            with pytest.raises(LeaseLost, match="given again"):
                stale()
        again.ack()
        again.ack()
        with pytest.raises(LeaseLost, match="done"):
            again.nack()
        assert consumer.receive(timeout_s=SOON_S) is None


def test_a_message_that_is_not_finished_comes_again(client: Client, topic: str, later: Later) -> None:
    """ES-103: when its time is over, also to another consumer of the group."""
    put(client, topic, "a")
    with client.lease_consumer(topic, GROUP, invisible=1) as consumer:
        held = next_of(consumer)
        assert consumer.receive(timeout_s=SOON_S) is None
        later(1)
        assert next_of(consumer).attempt == 2
        with pytest.raises(LeaseLost):
            held.ack()


def test_an_ack_after_the_end_counts_if_nobody_has_it(client: Client, topic: str, address: str, later: Later) -> None:
    put(client, topic, "a")
    with client.lease_consumer(topic, GROUP, invisible=timedelta(seconds=1)) as consumer:
        held = next_of(consumer)
        later(1)
        if not address.startswith("memory"):
            time.sleep(1.1)  # nobody may look before
        held.ack()
        assert consumer.receive(timeout_s=SOON_S) is None


def test_a_rejected_message_is_a_dead_letter(client: Client, topic: str) -> None:
    """ES-103: at once, and it does not come again."""
    put(client, topic, "poison")
    with client.lease_consumer(topic, topic) as consumer:
        message = next_of(consumer)
        message.reject()
        assert consumer.receive(timeout_s=SOON_S) is None
        with pytest.raises(LeaseLost, match="done"):
            message.nack()
    (dead,) = client.admin().dead_letters(topic)
    assert (dead.body, dead.properties["METAQ_DEAD"]) == (b"poison", "rejected")


def test_pauses_grow_and_can_be_chosen(memory: InMemoryBroker) -> None:
    """E-08: 10 s after the first attempt, 30 s after the second; or what the program says."""
    with connect(memory.address) as client:
        put(client, "orders", "a")
        with client.lease_consumer("orders", GROUP) as consumer:
            for attempt, pause_s in ((1, 10), (2, 30), (3, 60)):
                message = next_of(consumer)
                assert message.attempt == attempt
                message.nack()
                memory.advance(pause_s - 1)
                assert consumer.receive(timeout_s=0.05) is None
                memory.advance(1)
            next_of(consumer).nack(timedelta(hours=1))
            memory.advance(3599)
            assert consumer.receive(timeout_s=0.05) is None
            memory.advance(1)
            assert next_of(consumer).attempt == 5


def test_a_lease_is_extended(memory: InMemoryBroker) -> None:
    """ES-103: by the program, counted from now."""
    with connect(memory.address) as client:
        put(client, "orders", "a")
        with client.lease_consumer("orders", GROUP, invisible=20) as consumer:
            message = next_of(consumer)
            memory.advance(15)
            message.extend(timedelta(minutes=2))
            memory.advance(119)
            assert consumer.receive(timeout_s=0.05) is None
            memory.advance(1)
            assert next_of(consumer).attempt == 2


def test_a_reset_by_command_is_obeyed(memory: InMemoryBroker) -> None:
    """By a consumer that waits, too."""
    with connect(memory.address) as client:
        put(client, "orders", "a")
        with client.lease_consumer("orders", GROUP, wait=3 * DEADLINE_S) as consumer:
            next_of(consumer).ack()
            assert consumer.receive(timeout_s=SOON_S) is None
            memory.reset_offsets(GROUP, "orders")
            again = consumer.receive(timeout_s=HEARTBEAT_S / 2)  # the next heartbeat would wake it, too
            assert again is not None
            assert again.body == b"a"


def test_what_always_fails_becomes_a_dead_letter(memory: InMemoryBroker) -> None:
    """ES-103: after 16 deliveries."""
    with connect(memory.address) as client:
        put(client, "orders", "a")
        with client.lease_consumer("orders", GROUP) as consumer:
            for attempt in range(1, 17):
                message = next_of(consumer)
                assert message.attempt == attempt
                message.nack(0)
            assert consumer.receive(timeout_s=0.05) is None
        assert [dead.body for dead in memory.dead_letters(GROUP)] == [b"a"]
        assert set(memory.committed(GROUP, "orders").values()) == {1}


def test_filters(client: Client, topic: str) -> None:
    """ES-102: by tags or by an SQL92 condition; what does not match is passed."""
    producer = client.producer()
    for number in range(12):
        producer.send(topic, str(number).encode(), tag="even" if number % 2 == 0 else "odd", properties={"n": str(number)})
    odd = client.lease_consumer(topic, f"{topic}-tags", tags="odd")
    large = client.lease_consumer(topic, f"{topic}-sql", sql="n >= 3")
    for consumer, expected in ((odd, set(range(1, 12, 2))), (large, set(range(3, 12)))):
        found = [next_of(consumer) for _ in expected]
        assert consumer.receive(timeout_s=SOON_S) is None
        assert {int(message.body) for message in found} == expected


def test_members_share_one_partition(new_client: Connect, topic: str) -> None:
    """MY-010: messages, not partitions, are dealt out."""
    one, other = new_client(), new_client()
    one.admin().create_topic(topic, 1)
    put(one, topic, *map(str, range(6)))
    with one.lease_consumer(topic, GROUP, batch=1) as mine, other.lease_consumer(topic, GROUP, batch=1) as theirs:
        found = [next_of(consumer) for _ in range(3) for consumer in (mine, theirs)]
        assert sorted(message.body for message in found) == [b"%d" % number for number in range(6)]


def test_a_topic_may_come_later(client: Client, topic: str) -> None:
    with client.lease_consumer(topic, GROUP) as consumer:
        assert consumer.receive(timeout_s=0.05) is None
        put(client, topic, "a")
        next_of(consumer).ack()


# -- handlers ---------------------------------------------------------------------------------------------------------


def test_a_handler_is_called_for_each_message(
    client: Client, new_client: Connect, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    """E-08, MY-030: by several threads at once; those that return are acked, before it ends."""
    put(client, topic, *map(str, range(40)))
    working = new_client()
    together, begun = threading.Barrier(4), itertools.count()
    seen: list[bytes] = []
    consumer = working.lease_consumer(topic, GROUP)

    def handle(message: LeasedMessage) -> None:
        if next(begun) < 4:  # the first four are here at once
            together.wait(DEADLINE_S)
        seen.append(message.body)
        if len(set(seen)) == 40:  # on a busy machine one may come twice
            consumer.close()

    consumer.run(handle, concurrency=4)
    working.close()
    assert "not settled" not in caplog.text
    assert sorted(set(seen), key=int) == [b"%d" % number for number in range(40)]
    with client.lease_consumer(topic, GROUP) as consumer:
        assert consumer.receive(timeout_s=SOON_S) is None


@pytest.mark.parametrize("failure", [ValueError, asyncio.CancelledError])
def test_a_handler_that_raises_gets_its_message_again(
    memory: InMemoryBroker, caplog: pytest.LogCaptureFixture, failure: type[BaseException]
) -> None:
    """E-08: after a pause, which grows; one that has said itself what becomes of the message is believed."""
    attempts: list[tuple[bytes, int]] = []
    with connect(memory.address) as client:
        memory.create_topic("orders", 1)
        put(client, "orders", "fails", "rejects", "returns")
        consumer = client.lease_consumer("orders", GROUP)

        def handle(message: LeasedMessage) -> None:
            attempts.append((message.body, message.attempt))
            if message.body == b"rejects":
                message.reject()
                raise failure("rejected")
            if message.body == b"fails" and message.attempt < 3:
                raise failure("not yet")

        running = threading.Thread(target=consumer.run, args=(handle,), kwargs={"concurrency": 1})
        running.start()
        wait_until(lambda: len(attempts) == 3, DEADLINE_S, "all were tried")
        wait_until(lambda: "not yet" in caplog.text, DEADLINE_S, "one has failed")
        while len(attempts) < 5:
            memory.advance(10)
            time.sleep(0.005)
        consumer.close()
        running.join(DEADLINE_S)
        assert not running.is_alive()
    assert sorted(attempts) == [(b"fails", 1), (b"fails", 2), (b"fails", 3), (b"rejects", 1), (b"returns", 1)]
    assert [dead.body for dead in memory.dead_letters(GROUP)] == [b"rejects"]


def test_a_lease_lasts_as_long_as_its_handler(client: Client, topic: str, later: Later) -> None:
    """E-08: it is extended meanwhile, and so are those of messages that wait here."""
    put(client, topic, "long")
    calls: list[int] = []
    consumer = client.lease_consumer(topic, GROUP, invisible=1)

    def handle(message: LeasedMessage) -> None:
        calls.append(message.attempt)
        for _ in range(3):
            time.sleep(0.6)  # of a lease of 1 s
            later(0.4)
        consumer.close()

    consumer.run(handle, concurrency=2)
    assert calls == [1]
    with client.lease_consumer(topic, GROUP, invisible=1) as after:
        assert after.receive(timeout_s=1.2) is None


def test_who_does_not_wait_gets_messages_too(client: Client, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """E-08: each call has the brokers asked for what the next one returns."""
    put(client, topic, "one")
    with client.lease_consumer(topic, GROUP) as consumer:
        holder = consumer._holder
        wait_until(lambda: bool(holder._polls._polls), DEADLINE_S, "the brokers are known")
        planned: list[Callable[[], object]] = []
        with monkeypatch.context() as slow:  # the thread that asks comes only when the call is over
            slow.setattr(client._core.scheduler, "run", planned.append)
            assert consumer.receive(timeout_s=0) is None
        for task in planned:
            task()
        wait_until(lambda: bool(holder._buffer), DEADLINE_S, "it comes")
        message = consumer.receive(timeout_s=0)
        assert message is not None
        message.ack()


def test_what_waits_in_the_consumer_stays_leased(client: Client, new_client: Connect, topic: str, later: Later) -> None:
    client.admin().create_topic(topic, 1)
    put(client, topic, "first", "second")
    with client.lease_consumer(topic, GROUP, invisible=1, batch=2) as consumer:
        next_of(consumer).ack()
        with new_client().lease_consumer(topic, GROUP) as other:
            for _ in range(3):
                later(0.4)
                assert other.receive(timeout_s=0.5) is None
        second = next_of(consumer)
        assert (second.body, second.attempt) == (b"second", 1)
        second.ack()


def test_a_lease_is_kept_as_long_as_the_program_has_its_message(
    client: Client, new_client: Connect, topic: str, later: Later
) -> None:
    """E-08: if it wants that, also after the consumer was closed; a message that it drops comes again."""
    put(client, topic, "done", "dropped")
    other = new_client().lease_consumer(topic, GROUP)
    with client.lease_consumer(topic, GROUP, invisible=1, batch=1, keep=True) as consumer:
        mine = {message.body: message for message in (next_of(consumer), next_of(consumer))}
    for _ in range(3):
        later(0.4)
        assert other.receive(timeout_s=0.5) is None
    mine[b"done"].ack()
    mine.clear()
    later(1)
    again = next_of(other)
    assert (again.body, again.attempt) == (b"dropped", 2)


# -- the end ----------------------------------------------------------------------------------------------------------


def test_what_was_not_begun_is_given_back(client: Client, new_client: Connect, topic: str) -> None:
    """E-08: a consumer that closes leaves nothing leased, but what the program has."""
    client.admin().create_topic(topic, 1)
    put(client, topic, *map(str, range(8)))
    with new_client().lease_consumer(topic, GROUP, batch=8) as consumer:
        mine = next_of(consumer)
    assert consumer.closed
    assert consumer.receive(timeout_s=0.0) is None
    with client.lease_consumer(topic, GROUP) as other:
        found = [next_of(other) for _ in range(7)]
        assert {message.body for message in found} == {b"%d" % number for number in range(8)} - {mine.body}
        mine.ack()  # its client is still there
        assert other.receive(timeout_s=SOON_S) is None


def test_closing_waits_for_handlers(client: Client, topic: str) -> None:
    put(client, topic, "a")
    begun, end = threading.Event(), threading.Event()
    consumer = client.lease_consumer(topic, GROUP)

    def handle(message: LeasedMessage) -> None:
        begun.set()
        assert end.wait(DEADLINE_S)

    running = threading.Thread(target=consumer.run, args=(handle,))
    running.start()
    assert begun.wait(DEADLINE_S)
    closing = threading.Thread(target=consumer.close)
    closing.start()
    closing.join(0.1)
    assert closing.is_alive()
    end.set()
    closing.join(DEADLINE_S)
    running.join(DEADLINE_S)
    assert not closing.is_alive()
    assert not running.is_alive()
    with client.lease_consumer(topic, GROUP) as after:
        assert after.receive(timeout_s=SOON_S) is None


def test_a_handler_may_close_its_client(new_client: Connect, topic: str) -> None:
    """Without waiting for itself."""
    client = new_client()
    put(client, topic, "a")
    consumer = client.lease_consumer(topic, GROUP)
    began = time.monotonic()
    consumer.run(lambda message: client.close())
    assert time.monotonic() - began < 9
    with pytest.raises(ClientClosed):
        consumer.run(print)


def test_a_handler_that_does_not_end_holds_up_nothing_for_ever(
    client: Client, topic: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("metaq.client.leasing.holder.DRAIN_S", 0.2)
    put(client, topic, "a")
    begun, end = threading.Event(), threading.Event()
    consumer = client.lease_consumer(topic, GROUP)

    def handle(message: LeasedMessage) -> None:
        begun.set()
        assert end.wait(DEADLINE_S)

    running = threading.Thread(target=consumer.run, args=(handle,))
    running.start()
    assert begun.wait(DEADLINE_S)
    consumer.close()
    assert "handlers still run" in caplog.text
    end.set()
    running.join(DEADLINE_S)
    assert not running.is_alive()


# -- what is refused --------------------------------------------------------------------------------------------------


def test_a_client_has_one_consumer_of_a_group(memory: InMemoryBroker) -> None:
    with connect(memory.address) as client:
        with pytest.raises(SubscriptionInvalid):
            client.lease_consumer("orders", GROUP, sql="n >")
        with (
            client.lease_consumer("orders", GROUP),
            pytest.raises(ClientError, match=f"already has a consumer of group {GROUP}"),
        ):
            client.lease_consumer("orders", GROUP)
        client.lease_consumer("orders", GROUP).close()

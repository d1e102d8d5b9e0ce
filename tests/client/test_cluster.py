"""Clients of two brokers, one of which dies."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from metaq.client import Client, ConsumeFrom, SendResult, connect, health
from metaq.errors import ClientError
from metaq.message import MessageQueue
from tests.client.test_consumers import Heard
from tests.support.broker import BrokerProcess, RegistryProcess, wait_until

DEADLINE_S = 120.0
TOPIC = "orders"
FIRST_KEY = "\0"
"""Has the hash 0: an ordering key whose messages go to the first partition of all."""


class Pair:
    """A registry, two brokers with the same topic, and a client."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.registry = stack.enter_context(RegistryProcess(folder / "registry"))
        self.brokers = {
            name: stack.enter_context(
                BrokerProcess(folder / name, "--registries", self.registry.address, "--broker-name", name)
            )
            for name in ("a", "b")
        }
        self.client = self.connect(stack)
        admin = self.client.admin()
        wait_until(lambda: len(admin.masters()) == 2, DEADLINE_S, "both brokers are registered")
        admin.create_topic(TOPIC, 2)

    def connect(self, stack: ExitStack) -> Client:
        return stack.enter_context(connect(self.registry.address))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def pair(tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> Pair:
    monkeypatch.setattr(health, "_ISOLATION", ())  # a machine that stands still for a moment makes no broker a slow one
    return Pair(tmp_path, stack)


def queues(*names: str) -> list[MessageQueue]:
    return [MessageQueue(TOPIC, name, partition) for name in names for partition in range(2)]


def test_members_share_the_partitions_of_both_brokers(pair: Pair, stack: ExitStack) -> None:
    """SG-001, SG-008, MQ-001, MQ-007, MQ-018, SG-117, RD-104, SG-129: sends go to all, members share them."""
    producer = pair.client.producer()
    assert sorted({producer.send(TOPIC, b"x").queue for _ in range(8)}) == queues("a", "b")
    members = [pair.connect(stack).consumer(TOPIC, "billing") for _ in range(2)]

    def shared() -> bool:
        own = [[queue for queue in member.assignment() if queue.topic == TOPIC] for member in members]
        return sorted(own) == [queues("a"), queues("b")]

    wait_until(shared, DEADLINE_S, "each member has the partitions of one broker")


def test_the_newest_messages_with_a_key_are_found_on_all_brokers(pair: Pair) -> None:
    """SG-132: whichever brokers have them, the oldest of them first."""
    admin, producer = pair.client.admin(), pair.client.producer()
    found = []
    for number in range(12):
        sent = producer.send(TOPIC, str(number).encode(), keys="order")
        found.append(sent.queue.broker_name)
        while time.time_ns() // 1_000_000 <= sent_ms(pair.client, sent):  # brokers tell the time in milliseconds
            time.sleep(0.001)
    assert {*found[:10]} == {*found[-2:]} == {"a", "b"}
    wait_until(lambda: len(admin.query_by_key(TOPIC, "order")) == 12, DEADLINE_S, "the keys are indexed")
    for most in (1, 2, 3, 5, 12, 64):
        bodies = [int(message.body) for message in admin.query_by_key(TOPIC, "order", most=most)]
        assert bodies == [*range(12)][-most:]


def sent_ms(client: Client, sent: SendResult) -> int:
    """When a message was stored."""
    message = client.admin().query_by_offset_id(sent.offset_id)
    assert message is not None
    return message.store_ms


def test_a_topic_grows_onto_another_broker(pair: Pair) -> None:
    """MQ-019: with as many partitions as its weight, while it is used."""
    admin, producer = pair.client.admin(), pair.client.producer()
    admin.create_topic("growing", 1, broker_names=("a",))
    assert {producer.send("growing", b"x").queue.broker_name for _ in range(4)} == {"a"}
    admin.create_topic("growing", 3, broker_names=("b",))
    names = [producer.send("growing", b"x").queue.broker_name for _ in range(8)]
    assert (names.count("a"), names.count("b")) == (2, 6)


def test_sends_and_consumers_go_on_when_a_broker_dies(pair: Pair, stack: ExitStack) -> None:
    """SG-134, RD-103, P24: the next try is the other broker; what the dead one has comes when it is back."""
    heard = Heard()
    producer = pair.client.producer()
    sent = [producer.send(TOPIC, str(number).encode()).id for number in range(20)]
    with pair.connect(stack).listen(TOPIC, "billing", heard, consume_from=ConsumeFrom.FIRST):
        heard.wait(20)
        pair.brokers["a"].kill()
        results = [producer.send(TOPIC, b"after") for _ in range(20)]
        assert {result.queue.broker_name for result in results} == {"b"}
        sent += [result.id for result in results]
        wait_until(lambda: {message.id for message in heard.messages} >= set(sent), DEADLINE_S, "the living broker is heard")
        pair.brokers["a"].restart(same_port=True)

        def back() -> bool:
            try:
                result = producer.send(TOPIC, b"back", ordering_key=FIRST_KEY)
            except ClientError:
                return False
            sent.append(result.id)
            return result.queue.broker_name == "a"

        wait_until(back, DEADLINE_S, "the broker takes messages again")
        wait_until(lambda: {message.id for message in heard.messages} >= set(sent), DEADLINE_S, "both are heard")

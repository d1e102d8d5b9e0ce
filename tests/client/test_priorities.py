"""Priorities in the client, with the broker in memory and with a real one."""

import asyncio
from datetime import timedelta

import pytest

import metaq.aio
from metaq.client import Client, ConsumeFrom, OutgoingMessage, connect
from metaq.client.admin.views import GroupView
from metaq.errors import BadRequest, Refused
from tests.client.test_pull import read
from tests.support.broker import BrokerProcess, wait_until

DEADLINE_S = 60.0
TOPIC = "orders"


def make(client: Client) -> None:
    client.admin().create_topic(TOPIC, 3, priority=True)


def test_a_message_goes_to_its_level(client: Client) -> None:
    """MY-024, MY-029, MY-034: by each way to send; a consumer sees the priority."""
    make(client)
    with client.producer() as producer:
        assert producer.send(TOPIC, b"1", priority=1).queue.partition == 1
        assert producer.send_async(TOPIC, b"2", priority=9).result(DEADLINE_S).queue.partition == 2
        assert [producer.send(TOPIC, b"0").queue.partition for _ in range(3)] == [0, 0, 0]
        producer.send_oneway(TOPIC, b"2", priority=2)
        batch = [OutgoingMessage(b"1", priority=1), OutgoingMessage(b"1", priority=1)]
        assert [result.queue.partition for result in producer.send_batch(TOPIC, batch)] == [1, 1]
        with pytest.raises(Refused):
            producer.send_batch(TOPIC, [*batch, b"0"])
        producer.send(TOPIC, b"2", priority=2, delay=timedelta(milliseconds=1))
    with client.consumer(TOPIC, "g", consume_from=ConsumeFrom.FIRST) as consumer:
        first = consumer.receive(timeout_s=DEADLINE_S)
        assert first is not None
        assert (first.priority or 0) >= first.partition == int(first.body)


@pytest.mark.parametrize("priority", [-1, 1.5, True, "1", 1024])
def test_what_no_priority_is(client: Client, priority: object) -> None:
    with client.producer() as producer, pytest.raises(BadRequest, match="priority"):
        producer.send(TOPIC, b"x", priority=priority)  # type: ignore[arg-type]


def test_elsewhere_a_priority_means_nothing(client: Client) -> None:
    client.admin().create_topic(TOPIC, 1)
    with client.producer() as producer:
        assert producer.send(TOPIC, b"0", priority=5).queue.partition == 0


def test_consumers_take_the_highest_first(client: Client) -> None:
    """MY-034: of what is fetched when they ask."""
    make(client)
    with client.producer() as producer:
        for number in range(30):
            producer.send(TOPIC, b"%d" % (number % 3), priority=number % 3)
    with client.pull_consumer(TOPIC, by_priority=True) as pull:
        pull.assign(pull.partitions())
        pull.fetch()
        wait_until(lambda: len(pull._inbox._batches) == 3, DEADLINE_S, "all partitions are fetched")
        assert read(pull, 30) == [2] * 10 + [1] * 10 + [0] * 10
    with client.consumer(TOPIC, "g", consume_from=ConsumeFrom.FIRST, by_priority=True) as consumer:
        wait_until(lambda: len(consumer._inbox._batches) == 3, DEADLINE_S, "all partitions are fetched")
        bodies = [consumer.receive(timeout_s=DEADLINE_S) for _ in range(30)]
        assert [message and message.partition for message in bodies] == [2] * 10 + [1] * 10 + [0] * 10


def leased(client: Client, count: int, batch: int) -> list[int]:
    """The partitions of so many messages, in the order in which they come."""
    partitions = []
    with client.lease_consumer(TOPIC, "g", batch=batch, from_first=True) as consumer:
        for _ in range(count):
            message = consumer.receive(timeout_s=DEADLINE_S)
            assert message is not None
            partitions.append(message.partition)
            message.ack()
    return partitions


def test_leases_come_from_the_highest_first(client: Client) -> None:
    make(client)
    with client.producer() as producer:
        for number in range(6):
            producer.send(TOPIC, b"x", priority=number % 3)
    assert leased(client, 6, batch=4) == [2, 2, 1, 1, 0, 0]


def test_elsewhere_partitions_are_leased_from_in_turn(client: Client) -> None:
    client.admin().create_topic(TOPIC, 3)
    with client.producer() as producer:
        sent = [producer.send(TOPIC, b"x").queue.partition for _ in range(6)]
    assert sorted(sent) == [0, 0, 1, 1, 2, 2]
    assert leased(client, 6, batch=1) == [0, 1, 2, 0, 1, 2]


def test_asyncio(process: BrokerProcess) -> None:
    """MY-029: the same names."""

    async def main() -> int:
        async with metaq.aio.connect(process.registry) as client:
            await client.admin().create_topic(TOPIC, 3, priority=True)
            return (await client.producer().send(TOPIC, b"x", priority=2)).queue.partition

    assert asyncio.run(main()) == 2


def test_administration(process: BrokerProcess) -> None:
    """MY-034: settings of topics and groups by typed names; a value that is none is refused before it is sent."""
    with connect(process.registry) as client:
        admin = client.admin()
        admin.create_topic(TOPIC, 3, priority=True, priority_max_wait_ms=5)
        admin.create_topic(TOPIC, 4)
        (view,) = [view for view in admin.all_topic_configs() if view.topic == TOPIC]
        assert (view.priority, view.write_partitions) == (True, 4)
        admin.create_topic(TOPIC, 4, priority=False)
        assert not any(view.priority for view in admin.all_topic_configs())
        group = GroupView("g", priority_factor=50, order="key")
        admin.update_group(group)
        assert group in admin.groups()
        admin.update_group(group._replace(priority_factor=100))
        assert group._replace(priority_factor=100) in admin.groups()
        for wrong in (group._replace(order="topic"), group._replace(priority_factor=101)):
            with pytest.raises(BadRequest):
                admin.update_group(wrong)
        admin.update_group(group._replace(priority_factor=1, order="none"), fields=["order"])
        assert group._replace(priority_factor=100, order="none") in admin.groups()
        with pytest.raises(BadRequest, match="a group has no setting orders; it has consume_enable, "):
            admin.update_group(group, fields=["orders"])

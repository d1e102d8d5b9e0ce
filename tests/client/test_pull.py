"""Reading chosen partitions, with the broker in memory and with a real one."""

from datetime import UTC, datetime, timedelta

import pytest

from metaq.client import Client, PullConsumer
from metaq.errors import BadRequest, ClientClosed, RouteNotFound, RouteProblem
from metaq.message import MessageQueue
from tests.client.test_consumers import send
from tests.support.broker import wait_until

DEADLINE_S = 60.0


def read(consumer: PullConsumer, count: int, max_messages: int = 1000) -> list[int]:
    """The bodies of so many messages."""
    bodies: list[int] = []

    def enough() -> bool:
        bodies.extend(int(message.body) for message in consumer.poll(1.0, max_messages))
        return len(bodies) >= count

    wait_until(enough, DEADLINE_S, f"{count} messages")
    return bodies


def make(client: Client, count: int, partitions: int = 1) -> None:
    client.admin().create_topic("orders", partitions)
    send(client, count)


def test_the_program_decides_where_it_reads(client: Client) -> None:
    """SG-120: from the beginning, from an offset, from the end, in pieces of its own size."""
    make(client, 10)
    with client.pull_consumer("orders") as consumer:
        (queue,) = consumer.partitions()
        consumer.assign([queue])
        assert (consumer.begin_offset(queue), consumer.end_offset(queue), consumer.position(queue)) == (0, 10, 0)
        assert read(consumer, 10) == list(range(10))
        assert (consumer.position(queue), consumer.poll(0.0)) == (10, [])
        consumer.seek(queue, 7)
        assert read(consumer, 1, max_messages=1) == [7]
        assert (consumer.position(queue), read(consumer, 2)) == (8, [8, 9])
        consumer.seek_to_begin()
        assert read(consumer, 3, max_messages=3) == [0, 1, 2]
        consumer.seek_to_end()
        assert consumer.poll(0.2) == []
        client.producer().send("orders", b"10")
        assert read(consumer, 1) == [10]


def test_a_queue_may_be_added_while_another_thread_closes(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """SG-120: closing goes on, and closing again stops that queue, too."""
    make(client, 0, partitions=2)
    consumer = client.pull_consumer("orders")
    for queue in consumer.partitions():
        consumer.read_from(queue, 0)
    added, late = consumer._fetchers.popitem()

    class Meanwhile:
        """The lock for which closing waits while the other thread adds the queue."""

        def __enter__(self) -> None:
            consumer._fetchers[added] = late

        def __exit__(self, *_: object) -> None: ...

    (first,) = consumer._fetchers.values()
    monkeypatch.setattr(first, "_guard", Meanwhile())
    consumer.close()
    assert first.stopped
    consumer.close()
    assert late.stopped


def test_a_queue_that_is_read_already_continues_elsewhere(client: Client) -> None:
    """SG-120: what was fetched for the earlier place does not come beside it."""
    make(client, 5)
    with client.pull_consumer("orders") as consumer:
        (queue,) = consumer.partitions()
        consumer.read_from(queue, 0)
        consumer.fetch()
        wait_until(lambda: bool(consumer._inbox._batches), DEADLINE_S, "it is fetched")
        consumer.read_from(queue, 3)
        assert read(consumer, 2) == [3, 4]
        assert (consumer.position(queue), consumer.poll(0.1)) == (5, [])


def test_an_offset_that_is_not_there(client: Client) -> None:
    """SG-120, SG-085: reading goes on at the end."""
    make(client, 3)
    with client.pull_consumer("orders") as consumer:
        (queue,) = consumer.partitions()
        consumer.assign([queue])
        consumer.seek(queue, 1000)
        wait_until(lambda: consumer.poll(0.1) == [] and consumer.position(queue) == 3, DEADLINE_S, "the end is found")


def test_a_time(client: Client) -> None:
    """SG-120: the first message stored then or later."""
    make(client, 3)
    with client.pull_consumer("orders") as consumer:
        (queue,) = consumer.partitions()
        consumer.assign([queue])
        consumer.seek_to_time(datetime.now(UTC) + timedelta(hours=1))
        assert consumer.position(queue) == consumer.offset_at(queue, datetime.now(UTC) + timedelta(hours=1)) == 3
        consumer.seek_to_time(datetime(2000, 1, 1, tzinfo=UTC))
        assert consumer.position(queue) == 0
        assert read(consumer, 3) == [0, 1, 2]


def test_positions_are_kept_when_the_program_says_so(client: Client) -> None:
    """SG-120, SG-118: committed for a group that has no members."""
    make(client, 8, partitions=2)
    with client.pull_consumer("orders", "reports") as consumer:
        queues = consumer.partitions()
        consumer.assign(queues)
        read(consumer, 8)
        consumer.commit()
        consumer.assign(queues[:1])
        assert consumer.assignment() == queues[:1]
    with client.pull_consumer("orders", "reports") as consumer:
        assert [consumer.committed(queue) for queue in queues] == [4, 4]
        consumer.assign(queues)
        client.producer().send("orders", b"8")
        assert read(consumer, 1) == [8]
        consumer.commit({queues[0]: 6})
        assert consumer.committed(queues[0]) == 6


def test_what_cannot_be_read(client: Client) -> None:
    """P14, SG-120: another topic's partition, one that is not assigned, no topic, a closed consumer."""
    make(client, 1)
    queue = MessageQueue("returns", "metaq", 0)
    consumer = client.pull_consumer("orders")
    with pytest.raises(BadRequest, match="is not a queue of topic orders"):
        consumer.assign([queue])
    with pytest.raises(BadRequest, match="is not assigned"):
        consumer.seek(queue, 0)
    with pytest.raises(RouteNotFound) as error:
        client.pull_consumer("returns").partitions()
    assert error.value.reason is RouteProblem.TOPIC_ABSENT
    consumer.close()
    with pytest.raises(ClientClosed):
        consumer.poll()

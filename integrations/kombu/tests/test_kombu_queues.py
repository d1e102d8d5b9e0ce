"""What is kept for queues at a broker: topics and groups, as they are made, found, emptied and deleted."""

from collections.abc import Callable, Iterator

import pytest
from kombu import Connection, Exchange, Producer, Queue
from kombu.exceptions import ChannelError
from kombu_metaq.names import queue_topic
from kombu_metaq.terms import MOST_DELIVERIES, MOST_LEASE_MS
from kombu_programs import COME_S, Got, connect, in_an_hour, publish
from kombu_support import url

import metaq
from metaq.client.admin.views import GroupView
from tests.support.broker import BrokerProcess, wait_until

__all__ = ["connect", "url"]  # fixtures

LETTERS = Queue("letters")


@pytest.fixture
def topic(url: str) -> str:
    """The topic and the group of the queue of letters."""
    return queue_topic(url.rpartition("/")[2], "letters")


@pytest.fixture
def admin(process: BrokerProcess) -> Iterator[metaq.Admin]:
    """The administration of the broker, without kombu."""
    with metaq.connect(process.registry) as client:
        yield client.admin()


def group_of(admin: metaq.Admin, name: str) -> GroupView:
    return next(view for view in admin.groups() if view.name == name)


# -- groups -----------------------------------------------------------------------------------------------------------


def test_a_queue_whose_topic_is_there_gets_a_group(admin: metaq.Admin, topic: str, connect: Callable[..., Connection]) -> None:
    admin.create_topic(topic, 1)
    LETTERS(connect().default_channel).declare()
    group = group_of(admin, topic)
    assert (group.retry_max_times, group.max_invisible_ms, group.lease_acks) == (MOST_DELIVERIES, MOST_LEASE_MS, "safe")


@pytest.mark.parametrize("low", [GroupView("", max_invisible_ms=MOST_LEASE_MS), GroupView("", retry_max_times=MOST_DELIVERIES)])
def test_a_group_that_is_there_stays_and_low_limits_are_warned_of_once(
    admin: metaq.Admin, topic: str, connect: Callable[..., Connection], low: GroupView, caplog: pytest.LogCaptureFixture
) -> None:
    before = low._replace(name=topic)
    admin.create_topic(topic, 1)
    admin.update_group(before)
    for _ in range(2):
        LETTERS(connect(visibility_timeout=24 * 3600).default_channel).declare()
    assert group_of(admin, topic) == before
    (warning,) = caplog.messages
    assert f"retry_max_times={before.retry_max_times} max_invisible_ms={before.max_invisible_ms} group={topic}" in warning
    assert f"metaq group update '{topic}' --retry-max-times {MOST_DELIVERIES}" in warning


def test_a_group_with_the_limits_of_its_queue_is_not_warned_of(
    admin: metaq.Admin, topic: str, connect: Callable[..., Connection], caplog: pytest.LogCaptureFixture
) -> None:
    admin.create_topic(topic, 1)
    admin.update_group(GroupView(topic, retry_max_times=5))
    Queue("letters", queue_arguments={"x-delivery-limit": 5})(connect().default_channel).declare()
    assert caplog.messages == []


def test_leases_that_a_group_does_not_allow_are_refused_when_they_begin(
    admin: metaq.Admin, topic: str, connect: Callable[..., Connection]
) -> None:
    admin.create_topic(topic, 1)
    admin.update_group(GroupView(topic, retry_max_times=MOST_DELIVERIES, max_invisible_ms=5000))
    too_long = connect(visibility_timeout=5.5)
    with pytest.raises(ValueError, match=r"visibility_timeout is 5\.5 s.* allows leases of 5 s.*max_invisible_ms"):
        Got(too_long, LETTERS)
    publish(too_long, LETTERS, "here")
    assert Got(connect(visibility_timeout=5), LETTERS).wait_for(1) == ["here"]


# -- emptying and deleting --------------------------------------------------------------------------------------------


def delayed(process: BrokerProcess, admin: metaq.Admin, topic: str) -> int:
    """The number of delayed messages of a topic."""
    return [timer.topic for timer in admin.timers().pending(process.address)].count(topic)


def test_a_purge_finishes_what_waits_what_is_delayed_and_what_runs(
    process: BrokerProcess, admin: metaq.Admin, topic: str, connect: Callable[..., Connection]
) -> None:
    first, second = connect(), connect()
    publish(first, LETTERS, "runs")
    running = Got(first, LETTERS, prefetch=1)
    running.wait_for(1)
    publish(second, LETTERS, *range(3))
    publish(second, LETTERS, "later", headers=in_an_hour())
    other = Queue("bills")
    publish(second, other, "not this one", headers=in_an_hour())
    assert LETTERS(second.default_channel).purge() == 4
    assert delayed(process, admin, topic) == 0
    assert delayed(process, admin, topic.replace("letters", "bills")) == 1
    assert sum(view.lag for view in admin.group_lag(topic, topic)) == 0


def test_a_queue_is_deleted_with_its_delayed_tasks(
    process: BrokerProcess, admin: metaq.Admin, topic: str, connect: Callable[..., Connection]
) -> None:
    connection = connect()
    publish(connection, LETTERS, "later", headers=in_an_hour())
    LETTERS(connection.default_channel).delete()
    assert topic not in admin.topics()
    assert delayed(process, admin, topic) == 0


def test_a_queue_that_is_to_be_empty_is_not_deleted_with_a_delayed_task_or_one_that_runs(
    admin: metaq.Admin, topic: str, connect: Callable[..., Connection]
) -> None:
    channel = connect().default_channel
    queue = LETTERS(channel)

    def is_deleted() -> bool:
        queue.delete(if_empty=True)
        return topic not in admin.topics()

    publish(channel.connection.client, LETTERS, "later", headers=in_an_hour())
    assert not is_deleted()
    queue.purge()
    publish(channel.connection.client, LETTERS, "runs")
    running = Got(connect(), LETTERS)
    running.wait_for(1)
    assert not is_deleted()
    running.messages[0].ack()
    wait_until(is_deleted, COME_S, "it is deleted")


def test_a_queue_that_is_to_be_unused_is_not_deleted_while_a_connection_consumes_it(
    admin: metaq.Admin, topic: str, connect: Callable[..., Connection]
) -> None:
    connection, other = connect(), connect()
    queue = LETTERS(connection.default_channel)

    def is_deleted() -> bool:
        queue.delete(if_unused=True)
        return topic not in admin.topics()

    own, others = Got(connection, LETTERS), Got(other, LETTERS)
    assert not is_deleted()
    own.consumer.cancel()
    assert not is_deleted()
    others.consumer.cancel()
    other.release()
    wait_until(is_deleted, COME_S, "it is deleted")


def test_an_exchange_is_deleted_without_its_queues_and_they_can_be_bound_again(connect: Callable[..., Connection]) -> None:
    work = Exchange("work", type="direct")
    queues = [Queue(key, work, routing_key=key) for key in "lr"]
    connection = connect()
    channel = connection.default_channel
    for key in "lr":
        Producer(channel, exchange=work).publish(key, routing_key=key, declare=[*queues])
    work(channel).delete(if_unused=True)
    assert "work" in channel.get_exchanges()
    work(channel).delete()
    assert "work" not in channel.get_exchanges()
    for queue in queues:
        queue(channel).declare()
    for key in "lr":
        Producer(channel, exchange=work).publish(key, routing_key=key)
    assert [Got(connect(), queue).wait_for(2) for queue in queues] == [["l", "l"], ["r", "r"]]


# -- queues that are not there ----------------------------------------------------------------------------------------


def test_a_temporary_queue_that_has_ended_is_declared_again_before_it_is_consumed(
    admin: metaq.Admin, connect: Callable[..., Connection]
) -> None:
    connection = connect()
    news = Exchange("news", type="fanout")
    queue = Queue("reader", news, exclusive=True, durable=False)
    ended = Got(connection, queue, no_ack=True)
    ended.consumer.cancel()
    with pytest.raises(ChannelError, match="NOT_FOUND - no queue 'reader'"):
        ended.consumer.consume()
    assert not [topic for topic in admin.topics() if topic.endswith("|reader")]
    again = Got(connection, queue, no_ack=True)
    Producer(connection.default_channel).publish("heard", exchange=news)
    assert again.wait_for(1) == ["heard"]


def test_a_queue_that_nobody_has_declared_gives_no_messages(
    admin: metaq.Admin, topic: str, connect: Callable[..., Connection]
) -> None:
    with pytest.raises(ChannelError, match="NOT_FOUND - no queue 'letters'"):
        connect().default_channel.basic_get("letters")
    assert topic not in admin.topics()


def test_a_queue_that_was_deleted_is_not_consumed_any_more(
    admin: metaq.Admin, topic: str, connect: Callable[..., Connection]
) -> None:
    connection = connect()
    got = Got(connection, LETTERS)
    LETTERS(connection.default_channel).delete()
    got.drain()
    got.consumer.cancel()
    assert topic not in [group.name for group in admin.groups()]
    assert topic not in admin.topics()

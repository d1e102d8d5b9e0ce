"""kombu's own programs on a broker: queues, exchanges, acks, prefetch, priorities, times."""

import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from celery.contrib.migrate import republish
from kombu import Connection, Exchange, Producer, Queue
from kombu.exceptions import ChannelError, OperationalError
from kombu_metaq.broker import Broker
from kombu_metaq.names import exchange_topic, queue_topic
from kombu_programs import COME_S, LEASE_S, Got, connect, in_an_hour, publish
from kombu_support import url

import metaq
from metaq.client.connecting import core
from tests.support.broker import BrokerProcess, wait_until
from tests.support.users import ADMIN, USERS, write_users

__all__ = ["connect", "url"]  # fixtures


def test_messages_are_consumed_in_order_acked_and_gone(connect: Callable[..., Connection]) -> None:
    queue = Queue("letters")
    connection = connect()
    publish(connection, queue, *range(5))
    assert connection.default_channel.queue_declare("letters", passive=True).message_count == 5
    got = Got(connection, queue)
    assert got.wait_for(5) == [0, 1, 2, 3, 4]
    for message in got.messages:
        assert not message.delivery_info["redelivered"]
        message.ack()
    wait_until(lambda: connection.default_channel.queue_declare("letters").message_count == 0, COME_S, "all are done")
    connection.release()
    assert connect().default_channel.basic_get("letters") is None


def test_what_is_not_acked_comes_again_when_the_channel_is_closed(connect: Callable[..., Connection]) -> None:
    queue = Queue("letters")
    first, second = connect(visibility_timeout=3600), connect()
    publish(first, queue, "a", "b")
    got = Got(first, queue)
    got.wait_for(2)
    got.messages[0].ack()
    first.release()
    again = Got(second, queue)
    assert again.wait_for(1) == ["b"]
    assert again.messages[0].delivery_info["redelivered"]


def test_a_lease_lasts_while_its_consumer_works(connect: Callable[..., Connection]) -> None:
    queue = Queue("letters")
    first, second = connect(), connect()
    publish(first, queue, "slow")
    slow, idle = Got(first, queue), None
    slow.wait_for(1)
    idle = Got(second, queue)
    idle.drain(3 * LEASE_S)
    assert idle.bodies == []
    slow.messages[0].ack()


def test_rejects_come_again_or_become_dead_letters(
    process: BrokerProcess, url: str, connect: Callable[..., Connection]
) -> None:
    queue = Queue("letters")
    connection = connect()
    publish(connection, queue, "again")
    got = Got(connection, queue)
    got.wait_for(1)
    got.messages[0].requeue()
    assert got.wait_for(2) == ["again", "again"]
    got.messages[1].reject()
    group = queue_topic(url.rpartition("/")[2], "letters")
    with metaq.connect(process.registry) as client:
        wait_until(lambda: len(client.admin().dead_letters(group)) == 1, COME_S, "it is a dead letter")


def test_what_kombu_has_not_written_becomes_a_dead_letter(
    process: BrokerProcess, url: str, connect: Callable[..., Connection]
) -> None:
    queue = Queue("letters")
    connection = connect()
    topic = queue_topic(url.rpartition("/")[2], "letters")
    publish(connection, queue, "before")
    with metaq.connect(process.registry) as client:
        client.producer().send(topic, b"[1]")
        publish(connection, queue, "after")
        assert Got(connection, queue, no_ack=True).wait_for(2) == ["before", "after"]
        wait_until(lambda: len(client.admin().dead_letters(topic)) == 1, COME_S, "it is a dead letter")


def test_no_more_messages_are_taken_than_prefetched(connect: Callable[..., Connection]) -> None:
    queue = Queue("letters")
    first, second = connect(), connect()
    publish(first, queue, *range(6))
    few, others = Got(first, queue, prefetch=2), None
    few.wait_for(2)
    few.drain()
    assert few.bodies == [0, 1]
    others = Got(second, queue)
    assert others.wait_for(4) == [2, 3, 4, 5]
    publish(first, queue, "next")
    few.messages[0].ack()
    others.messages.clear()
    end = time.monotonic() + COME_S
    while len(few.messages) < 3 and not others.messages:
        assert time.monotonic() < end
        few.drain()
        others.drain()
    assert [*few.bodies[2:], *others.bodies] == ["next"]


def test_what_comes_of_several_queues_beyond_the_prefetch_goes_to_others(connect: Callable[..., Connection]) -> None:
    queues = [Queue(name) for name in "abc"]
    first, second = connect(), connect()
    for queue in queues:
        queue(first.default_channel).declare()
    one = Got(first, *queues, prefetch=1)
    one.drain()
    for queue in queues:
        publish(first, queue, queue.name)
    one.wait_for(1)
    others = Got(second, *queues)
    end = time.monotonic() + COME_S
    while len(others.messages) < 2:
        assert time.monotonic() < end
        one.drain()
        others.drain()
    assert sorted([*one.bodies, *others.bodies]) == ["a", "b", "c"]


def test_greater_priorities_come_first(connect: Callable[..., Connection]) -> None:
    queue = Queue("levels", max_priority=9)
    connection = connect()
    priorities = [0, 5, 9, 1, 5, 20]
    for number, priority in enumerate(priorities):
        publish(connection, queue, [priority, number], priority=priority)
    got = Got(connection, queue, prefetch=1)
    for count in range(1, len(priorities) + 1):
        got.wait_for(count)
        got.messages[-1].ack()
    assert got.bodies[2:] == [[5, 1], [5, 4], [1, 3], [0, 0]]
    assert sorted(got.bodies[:2]) == [[9, 2], [20, 5]]


def test_a_message_with_an_eta_comes_then_and_not_earlier(connect: Callable[..., Connection]) -> None:
    queue = Queue("letters")
    connection = connect()
    eta = datetime.now(UTC) + timedelta(seconds=2)
    publish(connection, queue, "later", headers={"eta": eta.isoformat()})
    publish(connection, queue, "now")
    got = Got(connection, queue, no_ack=True)
    assert got.wait_for(2) == ["now", "later"]
    assert datetime.now(UTC) >= eta


def test_fanout_reaches_queues_of_other_connections(connect: Callable[..., Connection]) -> None:
    news = Exchange("news", type="fanout")
    readers = [Got(connect(), Queue(f"reader-{n}", news, auto_delete=True, durable=False), no_ack=True) for n in range(2)]
    lasting = Queue("lasting", news)
    sender = connect()
    lasting(sender.default_channel).declare()
    Producer(sender.default_channel).publish("flood", exchange=news, declare=[news])
    assert [reader.wait_for(1) for reader in readers] == [["flood"], ["flood"]]
    assert Got(connect(), lasting).wait_for(1) == ["flood"]


def test_what_kombu_has_not_written_ends_no_reader_of_an_exchange(
    process: BrokerProcess, url: str, connect: Callable[..., Connection], caplog: pytest.LogCaptureFixture
) -> None:
    news = Exchange("news", type="fanout")
    reader = Got(connect(), Queue("reader", news, exclusive=True, durable=False), no_ack=True)
    with metaq.connect(process.registry) as client:
        topic = exchange_topic(url.rpartition("/")[2], "news")
        client.producer().send(topic, b'{"__type__": "decimal", "__value__": "abc"}')
    Producer(connect().default_channel).publish("heard", exchange=news, declare=[news])
    assert reader.wait_for(1) == ["heard"]
    assert "message dropped" in caplog.text


def test_a_queue_that_was_bound_while_the_broker_was_away_hears_its_exchange(tmp_path: Path) -> None:
    news = Exchange("news", type="fanout")
    queue = Queue("reader", news, exclusive=True, durable=False)
    with (
        BrokerProcess(tmp_path / "data") as broker,
        Connection(f"metaq://{broker.registry}//", transport_options={"timeout": 2}) as connection,
    ):
        news(connection.default_channel).declare()
        broker.kill()
        with pytest.raises(connection.connection_errors):
            queue(connection.default_channel).declare()
        broker.restart(same_port=True)
        reader = Got(connection, queue, no_ack=True)
        Producer(connection.default_channel).publish("heard", exchange=news)
        assert reader.wait_for(1) == ["heard"]


def test_a_reader_of_an_exchange_follows_partitions_that_come_later(
    process: BrokerProcess, url: str, connect: Callable[..., Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "ROUTES_S", 0.3)
    news = Exchange("news", type="fanout")
    reader = Got(connect(), Queue("reader", news, exclusive=True, durable=False), no_ack=True)
    topic = exchange_topic(url.rpartition("/")[2], "news")
    with metaq.connect(process.registry) as client:
        client.admin().create_topic(topic, 2)
        wait_until(lambda: len(client.pull_consumer(topic).partitions()) == 2, COME_S, "senders know both partitions")
    producer = Producer(connect().default_channel)
    for number in range(10):
        producer.publish(number, exchange=news, declare=[news])
    assert sorted(reader.wait_for(10)) == list(range(10))


def test_topics_choose_by_patterns(connect: Callable[..., Connection]) -> None:
    media = Exchange("media", type="topic")
    everything = Got(connect(), Queue("all", media, routing_key="#", exclusive=True, durable=False), no_ack=True)
    videos = Queue("videos", media, routing_key="media.*.video")
    sender = connect()
    videos(sender.default_channel).declare()
    producer = Producer(sender.default_channel)
    for key in ("media.a.video", "media.a.text", "media.video"):
        producer.publish(key, exchange=media, routing_key=key, declare=[media])
    assert everything.wait_for(3) == ["media.a.video", "media.a.text", "media.video"]
    got = Got(connect(), videos)
    got.wait_for(1)
    got.drain()
    assert got.bodies == ["media.a.video"]


def test_a_direct_exchange_leads_to_queues_with_its_key(connect: Callable[..., Connection]) -> None:
    work = Exchange("work", type="direct")
    left, right = Queue("left", work, routing_key="l"), Queue("right", work, routing_key="r")
    sender = connect()
    producer = Producer(sender.default_channel, exchange=work)
    for key in "lrl":
        producer.publish(key, routing_key=key, declare=[left, right])
    assert Got(connect(), left).wait_for(2) == ["l", "l"]
    assert Got(connect(), right).wait_for(1) == ["r"]


def test_what_a_connection_has_declared_counts_for_the_next_ones_of_its_process(connect: Callable[..., Connection]) -> None:
    work, media = Exchange("work", type="direct"), Exchange("media", type="topic")
    left, videos = Queue("left", work, routing_key="l"), Queue("videos", media, routing_key="*.video")
    first = connect()
    for queue in (left, videos):
        queue(first.default_channel).declare()
    first.release()
    producer = Producer(connect().default_channel)
    producer.publish("l", exchange="work", routing_key="l")
    producer.publish("v", exchange="media", routing_key="a.video")
    assert Got(connect(), left, videos).wait_for(2) in (["l", "v"], ["v", "l"])


def test_a_temporary_queue_ends_with_the_last_connection_and_can_be_declared_again(
    url: str, connect: Callable[..., Connection]
) -> None:
    news = Exchange("news", type="fanout")
    reader = Queue("reader", news, exclusive=True, durable=False)
    first = connect()
    reader(first.default_channel).declare()
    Producer(first.default_channel).publish("missed", exchange=news)
    first.release()
    second = connect()
    reader(second.default_channel).declare()
    Producer(connect().default_channel).publish("heard", exchange=news)
    got = Got(second, reader, no_ack=True)
    got.wait_for(1)
    got.drain()
    assert got.bodies == ["heard"]


def test_a_reply_queue_gets_what_is_sent_to_its_name_before_it_is_consumed(connect: Callable[..., Connection]) -> None:
    replies = Queue("replies-1", durable=True, auto_delete=True, expires=60)
    replies(connect().default_channel).declare()
    stranger = connect()
    Producer(stranger.default_channel).publish("result", exchange="", routing_key="replies-1")
    got = Got(connect(), replies, no_ack=True)
    assert got.wait_for(1) == ["result"]


def readers(url: str, exchange: str = "") -> list[threading.Thread]:
    """The threads that read an exchange of a virtual host, by default the default one."""
    name = f"metaq-{exchange_topic(url.rpartition('/')[2], exchange)}"
    return [thread for thread in threading.enumerate() if thread.name == name]


def test_a_reply_queue_waits_for_the_next_connection_of_its_process(url: str, connect: Callable[..., Connection]) -> None:
    replies = Queue("replies-1", durable=True, auto_delete=True, expires=60)
    first = connect()
    replies(first.default_channel).declare()
    first.release()
    another_process = f"{url};metaq://127.0.0.1:1/{url.rpartition('/')[2]}"  # as far as what connections share is concerned
    with Connection(another_process) as stranger:
        Producer(stranger.default_channel).publish("result", exchange="", routing_key="replies-1")
    got = Got(connect(), replies, no_ack=True)
    assert got.wait_for(1) == ["result"]
    got.consumer.cancel()
    wait_until(lambda: not readers(url), COME_S, "it ends with its consumer")


def test_a_reply_queue_that_no_connection_consumes_expires(url: str, connect: Callable[..., Connection]) -> None:
    connection = connect()
    Queue("replies-1", durable=True, auto_delete=True, expires=1)(connection.default_channel).declare()
    assert readers(url)
    connection.release()
    wait_until(lambda: not readers(url), COME_S, "nothing is read for it any more")


def test_a_reply_queue_expires_whatever_connections_come_and_others_wait_on(
    url: str, connect: Callable[..., Connection]
) -> None:
    first = connect()
    for name, expires_s in (("unused", 1), ("waiting", 3600)):
        Queue(name, durable=True, auto_delete=True, expires=expires_s)(first.default_channel).declare()
    Queue("own", Exchange("news", type="fanout"), exclusive=True, durable=False)(first.default_channel).declare()
    first.release()
    wait_until(lambda: not readers(url, "news"), COME_S, "an exclusive one does not wait")

    def is_over() -> bool:
        with Connection(url) as another:
            another.default_channel.exchange_declare("jobs")
        return len(readers(url)) == 1

    wait_until(is_over, COME_S, "nothing is read for the one that nobody uses")
    Producer(connect().default_channel).publish("result", exchange="", routing_key="waiting")
    assert Got(connect(), Queue("waiting", durable=True, auto_delete=True, expires=3600), no_ack=True).wait_for(1) == ["result"]


def test_a_reply_queue_that_another_connection_deletes_while_it_is_declared_is_gone(
    url: str, connect: Callable[..., Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    connection, another = connect(), connect()
    replies = Queue("replies-1", durable=True, auto_delete=True, expires=60)
    make_log = Broker.make_log

    def make_and_delete(broker: Broker, topic: str) -> None:
        make_log(broker, topic)
        another.default_channel.queue_delete("replies-1")

    with monkeypatch.context() as patched:
        patched.setattr(Broker, "make_log", make_and_delete)
        replies(connection.default_channel).declare()
    assert not readers(url)
    got = Got(another, replies, no_ack=True)
    Producer(connection.default_channel).publish("result", exchange="", routing_key="replies-1")
    assert got.wait_for(1) == ["result"]
    shared = connection.transport.shared
    for each in (connection, another):
        each.release()
    assert shared.connections == 0


def test_temporary_queues_leave_no_topic_behind(process: BrokerProcess, connect: Callable[..., Connection]) -> None:
    connection = connect()
    got = Got(connection, Queue("gone", Exchange("gossip", type="fanout"), auto_delete=True))
    got.consumer.cancel()
    with metaq.connect(process.registry) as client:
        assert not [topic for topic in client.admin().topics() if topic.endswith("|gone")]
        assert [topic for topic in client.admin().topics() if topic.endswith("|gossip|exchange")]


def test_virtual_hosts_are_apart(process: BrokerProcess, connect: Callable[..., Connection]) -> None:
    queue = Queue("letters")
    publish(connect(), queue, "mine")
    with Connection(f"metaq://{process.registry}/elsewhere") as other:
        publish(other, queue, "theirs")
        assert Got(other, queue, no_ack=True).wait_for(1) == ["theirs"]


def test_queues_can_be_emptied_deleted_and_asked_for(connect: Callable[..., Connection]) -> None:
    queue = Queue("letters")
    connection = connect()
    channel = connection.default_channel
    with pytest.raises(ChannelError, match="NOT_FOUND"):
        channel.queue_declare("letters", passive=True)
    publish(connection, queue, *range(3))
    assert queue(channel).purge() == 3
    publish(connection, queue, "new")
    message = queue(channel).get()
    assert message.payload == "new"
    message.ack()
    queue(channel).delete()
    assert not channel._has_queue("letters")


def test_a_publish_that_is_repeated_is_stored_once(connect: Callable[..., Connection]) -> None:
    queue = Queue("letters")
    connection = connect()
    channel = connection.default_channel
    queue(channel).declare()
    properties = {"delivery_mode": 2}
    for _ in range(2):  # as kombu does after an answer that did not come
        message = channel.prepare_message("once", content_type="text/plain", content_encoding="utf-8", properties=properties)
        channel.basic_publish(message, "", "letters")
    got = Got(connection, queue, no_ack=True)
    got.wait_for(1)
    got.drain()
    assert got.bodies == ["once"]


def test_a_message_that_was_received_can_be_published_again_with_its_properties(connect: Callable[..., Connection]) -> None:
    queue = Queue("letters")
    connection = connect()
    publish(connection, queue, "twice")
    got = Got(connection, queue)
    got.wait_for(1)
    republish(Producer(connection.channel()), got.messages[0], exchange="", routing_key="letters")
    assert got.wait_for(2) == ["twice", "twice"]


def test_no_broker_is_an_error_that_says_so() -> None:
    nowhere = Connection("metaq://127.0.0.1:1//", transport_options={"timeout": 1})
    with nowhere, pytest.raises(OperationalError, match=r"127\.0\.0\.1:1"):
        nowhere.ensure_connection(max_retries=1, interval_start=0)


def test_a_connection_that_fails_leaves_no_thread_behind() -> None:
    before = set(threading.enumerate())
    nowhere = Connection("metaq://127.0.0.1:1//", transport_options={"timeout": 0.5})
    with pytest.raises(OperationalError):
        nowhere.ensure_connection(max_retries=1, interval_start=0)
    wait_until(lambda: set(threading.enumerate()) <= before, COME_S, "the threads of its client end")


def test_several_registries_are_several_urls(process: BrokerProcess, url: str) -> None:
    queue = Queue("letters")
    with Connection(f"metaq://127.0.0.1:1/{url.rpartition('/')[2]};{url}") as connection:
        publish(connection, queue, "found")
        assert Got(connection, queue, no_ack=True).wait_for(1) == ["found"]


def test_a_publish_on_a_channel_that_was_closed_can_be_tried_again(connect: Callable[..., Connection]) -> None:
    """Its error is one after which kombu takes a new channel: it had to connect again to declare the queue of the message."""
    connection = connect()
    channel = connection.channel()
    channel.close()
    with pytest.raises(connection.recoverable_connection_errors, match="was closed"):
        channel.basic_publish(channel.prepare_message("never"), "", "letters")


def test_connections_share_their_state_whichever_registry_they_ask_first(url: str) -> None:
    """kombu goes to the next URL when a connection is lost, and what others of the process have declared still counts."""
    other = f"metaq://127.0.0.1:1/{url.rpartition('/')[2]}"
    with Connection(f"{url};{other}") as one, Connection(f"{other};{url}") as two:
        assert one.transport.shared is two.transport.shared


def test_users_need_rights_to_the_names_of_a_virtual_host(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clerk = '  clerk: {secret: clerk-secret-1, topics: {"shop|*": PUB|SUB|CREATE}, groups: {"shop|*": SUB}}'
    users = write_users(tmp_path / "users.yaml", f"{USERS}{clerk}\n")
    queue, news = Queue("letters"), Exchange("news", type="fanout")
    with BrokerProcess(tmp_path / "data", "--users-file", str(users)) as broker:

        def logged_in(user: str, secret: str, virtual_host: str = "shop") -> Connection:
            return Connection(f"metaq://{user}:{secret}@{broker.registry}/{virtual_host}", transport_options={"timeout": 5})

        with logged_in("clerk", "clerk-secret-1") as connection:
            publish(connection, queue, "allowed")
            assert Got(connection, queue, no_ack=True).wait_for(1) == ["allowed"]
            reader = Got(connection, Queue("reader", news, exclusive=True, durable=False), no_ack=True)
            Producer(connection.default_channel).publish("heard", exchange=news, declare=[news])
            assert reader.wait_for(1) == ["heard"]
            with metaq.connect(broker.registry, user=ADMIN.name, password=ADMIN.secret) as client:
                client.admin().create_topic(queue_topic("shop", "bills"), 1)
            publish(connection, Queue("bills"), "allowed, too", headers=in_an_hour())
            for forbidden in (Queue.purge, Queue.delete):
                with pytest.raises(metaq.Refused, match="clerk may not administer"):
                    forbidden(Queue("bills", channel=connection.default_channel))
        for name in ("letters", "bills"):
            assert f"metaq group update '{queue_topic('shop', name)}'" in caplog.text
        with logged_in("clerk", "clerk-secret-1", "other") as elsewhere, pytest.raises(metaq.Refused, match="clerk may not"):
            publish(elsewhere, queue, "not there")
        with logged_in("clerk", "wrong") as stranger, pytest.raises(metaq.Refused):
            publish(stranger, queue, "never")
        with logged_in(ADMIN.name, ADMIN.secret, "third") as admin:
            publish(admin, queue, "everywhere")

"""Consuming as members of groups, with the broker in memory and with a real one."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from metaq.client import Client, ConsumeFrom, Model, ReceivedMessage, SimpleConsumer, connect
from metaq.errors import BadRequest, ClientClosed, ClientError, SubscriptionInvalid
from metaq.testing import InMemoryBroker
from tests.client.conftest import Connect
from tests.support.broker import BrokerProcess, wait_until

DEADLINE_S = 60.0
FIRST = ConsumeFrom.FIRST


def send(client: Client, count: int, topic: str = "orders", tag: str | None = None) -> list[str]:
    producer = client.producer()
    return [producer.send(topic, str(number).encode(), tag=tag).id for number in range(count)]


def take(consumer: SimpleConsumer, count: int) -> list[ReceivedMessage]:
    found: list[ReceivedMessage] = []
    while len(found) < count:
        message = consumer.receive(timeout_s=DEADLINE_S)
        assert message is not None, f"{len(found)} of {count} messages came"
        found.append(message)
    return found


class Heard:
    """A listener that remembers."""

    def __init__(self) -> None:
        self.messages: list[ReceivedMessage] = []
        self._guard = threading.Lock()

    def __call__(self, message: ReceivedMessage) -> None:
        with self._guard:
            self.messages.append(message)

    def wait(self, count: int) -> list[ReceivedMessage]:
        wait_until(lambda: len(self.messages) >= count, DEADLINE_S, f"{count} messages are heard")
        return list(self.messages)

    @property
    def bodies(self) -> list[bytes]:
        return [message.body for message in self.messages]


# -- iterating --------------------------------------------------------------------------------------------------------


def test_what_was_committed_does_not_come_again(new_client: Connect) -> None:
    """SG-118, SG-078, RD-017: offsets of a group are at the broker; what was not committed comes again."""
    ids = send(new_client(), 20)
    first = new_client()
    with first.consumer("orders", "billing", consume_from=FIRST) as consumer:
        done = {message.id for message in take(consumer, 12)}
        consumer.commit()
        take(consumer, 3)
    first.close()
    with new_client().consumer("orders", "billing", consume_from=FIRST) as consumer:
        again = {message.id for message in take(consumer, 8)}
    assert done | again == set(ids)
    assert not done & again


def test_auto_commit(new_client: Connect) -> None:
    """SG-118: a message is done when the next one is asked for."""
    send(new_client(), 8)
    with new_client().consumer("orders", "billing", consume_from=FIRST, auto_commit=True) as consumer:
        seen = [message.id for message in take(consumer, 5)]
    with new_client().consumer("orders", "billing", consume_from=FIRST) as consumer:
        again = {message.id for message in take(consumer, 4)}
    assert not set(seen[:4]) & again
    assert seen[4] in again


def test_iteration_waits_and_ends_when_the_consumer_is_closed(client: Client) -> None:
    """SG-084: a pull at the end of the partition is held, so new messages come at once."""
    client.producer().send("orders", b"first")
    consumer = client.consumer("orders", "billing", consume_from=FIRST)
    found: list[bytes] = []

    def iterate() -> None:
        found.extend(message.body for message in consumer)

    thread = threading.Thread(target=iterate)
    thread.start()
    wait_until(lambda: found == [b"first"], DEADLINE_S, "the first message")
    client.producer().send("orders", b"second")
    wait_until(lambda: len(found) == 2, DEADLINE_S, "the second message")
    assert consumer.receive(timeout_s=0.0) is None
    consumer.close()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    assert found == [b"first", b"second"]
    with pytest.raises(ClientClosed):
        consumer.commit()


def test_each_group_gets_all_messages(client: Client) -> None:
    """SG-141: one topic, several groups, each at its own place."""
    ids = send(client, 10)
    for group in ("billing", "shipping"):
        with client.consumer("orders", group, consume_from=FIRST) as consumer:
            assert sorted(message.id for message in take(consumer, 10)) == sorted(ids)


def test_tags_choose_messages(client: Client) -> None:
    """SG-131, RD-028, RD-101: tags with the same hash do not slip through: the client compares the text."""
    producer = client.producer()
    for tag in ("Aa", "BB", "paid", None):  # Java hashes the first two alike
        producer.send("orders", (tag or "none").encode(), tag=tag)
    with client.consumer("orders", "billing", tags="BB || paid", consume_from=FIRST) as consumer:
        assert sorted(message.body for message in take(consumer, 2)) == [b"BB", b"paid"]
        assert consumer.receive(timeout_s=0.5) is None


def test_sql_chooses_messages(client: Client) -> None:
    """RD-102: a condition on properties."""
    producer = client.producer()
    for number in range(6):
        producer.send("orders", str(number).encode(), properties={"price": str(number)})
    with client.consumer("orders", "billing", sql="price BETWEEN 2 AND 4 AND NOT (price = 3)", consume_from=FIRST) as consumer:
        assert sorted(message.body for message in take(consumer, 2)) == [b"2", b"4"]
        assert consumer.receive(timeout_s=0.5) is None


def test_one_consumer_of_several_topics(client: Client) -> None:
    """SG-059: one consumer, many topics."""
    send(client, 3, "orders")
    send(client, 2, "returns")
    with client.consumer("orders", "billing", consume_from=FIRST) as consumer:
        consumer.subscribe("returns")
        assert Counter(message.topic for message in take(consumer, 5)) == {"orders": 3, "returns": 2}


def test_a_topic_that_comes_later(client: Client) -> None:
    """P18: a consumer of a topic that is not there yet begins by itself when it is."""
    with client.consumer("orders", "billing", consume_from=FIRST) as consumer:
        (sent,) = send(client, 1)
        assert [message.id for message in take(consumer, 1)] == [sent]


def test_a_client_has_one_consumer_of_a_group(client: Client) -> None:
    """P17: two with different subscriptions would take each other's messages."""
    with client.consumer("orders", "billing"), pytest.raises(ClientError, match="already has a consumer of group billing"):
        client.consumer("returns", "billing")


@pytest.mark.parametrize(("group", "tags"), [("", "*"), ("a b", "*"), ("g" * 121, "*"), ("billing", "||")])
def test_names_and_tags_that_cannot_be(memory: InMemoryBroker, group: str, tags: str) -> None:
    """SG-121: told at once, with what is allowed."""
    with connect(memory.address) as client, pytest.raises((BadRequest, SubscriptionInvalid)):
        client.consumer("orders", group, tags=tags)


def test_sql_that_cannot_be_read(memory: InMemoryBroker) -> None:
    """RD-102: told before any broker is asked."""
    with connect(memory.address) as client:
        with pytest.raises(SubscriptionInvalid):
            client.consumer("orders", "billing", sql="price >")
        with pytest.raises(SubscriptionInvalid):
            client.pull_consumer("orders", sql="(price = 1")


# -- sharing ----------------------------------------------------------------------------------------------------------


def test_members_share_the_partitions(new_client: Connect) -> None:
    """SG-002, SG-123, SG-129, RD-104, MQ-008: one member a partition; who leaves, leaves its own to the others."""
    sender = new_client()
    send(sender, 4)
    consumers = [new_client().consumer("orders", "billing", consume_from=FIRST) for _ in range(2)]

    def shares() -> list[list[int]]:
        return [[queue.partition for queue in consumer.assignment() if queue.topic == "orders"] for consumer in consumers]

    wait_until(lambda: sorted(shares()) == [[0, 1], [2, 3]], DEADLINE_S, "the partitions are shared")
    consumers.pop().close()
    wait_until(lambda: shares() == [[0, 1, 2, 3]], DEADLINE_S, "the rest takes over")


def test_nothing_is_lost_while_members_come_and_go(new_client: Connect) -> None:
    """SG-123, RD-104: every message reaches some listener."""
    heard = Heard()
    sender = new_client()
    ids = send(sender, 40)
    for _ in range(3):
        consumer = new_client().listen("orders", "billing", heard, consume_from=FIRST)
        ids += send(sender, 40)
    consumer.close()
    ids += send(sender, 40)
    wait_until(lambda: {message.id for message in heard.messages} >= set(ids), DEADLINE_S, "every message is heard")


def test_every_member_of_a_broadcast_group_gets_every_message(new_client: Connect, tmp_path: Path) -> None:
    """SG-122, SG-130, SG-118: no sharing, and offsets in a file of each client's own."""
    listeners = [Heard(), Heard()]
    sender = new_client()
    ids = send(sender, 10)
    for number, heard in enumerate(listeners):
        new_client().listen(
            "orders", "news", heard, model=Model.BROADCASTING, consume_from=FIRST, offsets_folder=tmp_path / str(number)
        )
    for heard in listeners:
        assert sorted(message.id for message in heard.wait(10)) == sorted(ids)


def test_a_broadcast_consumer_goes_on_where_it_was(new_client: Connect, tmp_path: Path) -> None:
    """SG-118, SG-130: the local file survives the consumer."""
    sender = new_client()
    for begin in (0, 5):
        heard = Heard()
        ids = send(sender, 5)
        with new_client().listen(
            "orders", "news", heard, model=Model.BROADCASTING, consume_from=FIRST, offsets_folder=tmp_path
        ):
            assert sorted(message.id for message in heard.wait(5)) == sorted(ids), f"from {begin}"


HOLDER = """
import os, sys, time
from pathlib import Path
from metaq.client import ConsumeFrom, Model, connect
client = connect(sys.argv[1])
consumer = client.consumer("orders", "news", model=Model.BROADCASTING, offsets_folder=Path(sys.argv[2]))
if sys.argv[3] == "alone" or os.fork() == 0:
    print("has it", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("how", ["alone", "fork"])
def test_two_broadcast_consumers_never_share_a_file(process: BrokerProcess, tmp_path: Path, how: str) -> None:
    """SG-130: one without a name would miss what the other has had. The lock ends with its process, whatever it has forked."""
    with connect(process.registry) as client:
        send(client, 1)
        command = [sys.executable, "-c", HOLDER, process.registry, str(tmp_path), how]
        holder = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
        assert holder.stdout is not None
        try:
            assert holder.stdout.readline() == b"has it\n"

            def consume(client: Client) -> SimpleConsumer:
                return client.consumer("orders", "news", model=Model.BROADCASTING, consume_from=FIRST, offsets_folder=tmp_path)

            for _ in range(2):
                with pytest.raises(ClientError, match=r"another broadcast consumer uses .*default/news.json; give each client"):
                    consume(client)
            with connect(process.registry, instance="b") as named, consume(named) as consumer:
                take(consumer, 1)
            holder.kill()
            holder.wait()
            with consume(client) as consumer:
                take(consumer, 1)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(holder.pid, signal.SIGKILL)
            holder.wait()
            holder.stdout.close()


# -- listening --------------------------------------------------------------------------------------------------------


def test_a_listener_gets_each_message_once(client: Client) -> None:
    """SG-119, SG-077: called for each message while nothing fails; close commits."""
    heard = Heard()
    ids = send(client, 50)
    with client.listen("orders", "billing", heard, consume_from=FIRST):
        assert sorted(message.id for message in heard.wait(50)) == sorted(ids)
    with client.listen("orders", "billing", heard, consume_from=FIRST):
        ids += send(client, 5)
        assert sorted(message.id for message in heard.wait(55)) == sorted(ids)


@pytest.mark.parametrize("failure", [ValueError, asyncio.CancelledError])
def test_ordered_consumption(client: Client, failure: type[BaseException]) -> None:
    """SG-124, MQ-041: the messages of a partition one after the other, also when one fails; other partitions do not wait."""
    producer = client.producer()
    for number in range(60):
        producer.send("orders", str(number).encode(), ordering_key=str(number % 5))
    heard = Heard()
    failed: list[bytes] = []

    def listener(message: ReceivedMessage) -> None:
        if message.body in {b"7", b"20"} and message.body not in failed:
            failed.append(message.body)
            raise failure("not now")
        heard(message)

    with client.listen("orders", "billing", listener, ordered=True, threads=1, consume_from=FIRST):
        heard.wait(60)
    assert sorted(failed) == [b"20", b"7"]
    for key in range(5):
        of_key = [int(body) for body in heard.bodies if int(body) % 5 == key]
        assert of_key == sorted(of_key)
    assert len(heard.messages) == 60


def test_an_ordered_partition_is_given_up_between_two_messages(new_client: Connect) -> None:
    """SG-124, SG-123: who gets it begins behind the message that was being consumed, and when that is done."""
    producer = new_client().producer()
    queues = {producer.send("orders", str(number).encode(), ordering_key=str(number)).queue for number in range(60)}
    heard, begun, go = Heard(), Heard(), threading.Event()

    def listener(message: ReceivedMessage) -> None:
        begun(message)
        assert go.wait(DEADLINE_S)
        heard(message)

    consumers = [new_client().listen("orders", "billing", listener, ordered=True, threads=len(queues), consume_from=FIRST)]
    begun.wait(len(queues))
    consumers.append(new_client().listen("orders", "billing", listener, ordered=True, consume_from=FIRST))
    wait_until(lambda: len(consumers[0].assignment()) < len(queues), DEADLINE_S, "the other one is to have some")
    assert len(begun.messages) == len(queues), "nobody else has begun with them"
    go.set()
    heard.wait(60)
    wait_until(lambda: all(consumer.assignment() for consumer in consumers), DEADLINE_S, "both have some")
    for consumer in consumers:
        consumer.close()
    assert sorted(int(body) for body in heard.bodies) == list(range(60))
    assert len(begun.messages) == 60


def test_a_listener_runs_in_several_threads(client: Client) -> None:
    """SG-119: as many at a time as there are threads."""
    done = threading.Event()
    together = threading.Barrier(4, action=done.set, timeout=DEADLINE_S)
    send(client, 4)
    with client.listen("orders", "billing", lambda message: together.wait(), threads=4, consume_from=FIRST):
        assert done.wait(DEADLINE_S), "all four at once"


def test_a_slow_listener_is_waited_for_at_the_end(client: Client) -> None:
    """P43: what a listener has begun is finished, and counts, when the consumer closes."""
    begun, finish = threading.Event(), threading.Event()
    finished: list[str] = []

    def listener(message: ReceivedMessage) -> None:
        begun.set()
        finish.wait(DEADLINE_S)
        finished.append(message.id)

    ids = send(client, 1)
    consumer = client.listen("orders", "billing", listener, threads=1, consume_from=FIRST)
    assert begun.wait(DEADLINE_S)
    closing = threading.Thread(target=consumer.close)
    closing.start()
    finish.set()
    closing.join(DEADLINE_S)
    assert finished == ids
    heard = Heard()
    with client.listen("orders", "billing", heard, consume_from=FIRST):
        (later,) = send(client, 1)
        assert [message.id for message in heard.wait(1)] == [later]


def eventually(condition: Callable[[], bool], what: str) -> None:
    wait_until(condition, DEADLINE_S, what)


# -- retries, with a clock that the test moves ------------------------------------------------------------------------


def test_a_message_that_fails_comes_again_and_ends_as_a_dead_letter(memory: InMemoryBroker) -> None:
    """SG-072, SG-073, SG-074, SG-075: 10 s, 30 s, then a dead letter."""
    heard = Heard()

    def listener(message: ReceivedMessage) -> None:
        heard(message)
        raise ValueError("never")

    with connect(memory.address) as client:
        (sent,) = send(client, 1)
        with client.listen("orders", "billing", listener, max_reconsume_times=2, consume_from=FIRST):
            for times, delay in enumerate((10, 30), start=1):
                heard.wait(times)
                eventually(lambda: memory.delayed == 1, "the message is parked")
                memory.advance(delay - 1)
                assert memory.delayed == 1
                memory.advance(1)
            eventually(lambda: len(memory.dead_letters("billing")) == 1, "the dead letter")
    assert [message.reconsume_times for message in heard.messages] == [0, 1, 2]
    assert {(message.id, message.topic) for message in heard.messages} == {(sent, "orders")}
    assert memory.dead_letters("billing")[0].id == sent


def test_an_iterating_consumer_can_have_a_message_later(memory: InMemoryBroker) -> None:
    """SG-073: retry_later."""
    with connect(memory.address) as client:
        (sent,) = send(client, 1)
        with client.consumer("orders", "billing", consume_from=FIRST) as consumer:
            (message,) = take(consumer, 1)
            consumer.retry_later(message, delay_level=5)
            consumer.commit()
            memory.advance(60)
            (again,) = take(consumer, 1)
    assert (again.id, again.reconsume_times, again.topic) == (sent, 1, "orders")


def test_a_delayed_message_comes_when_it_is_due(memory: InMemoryBroker) -> None:
    """SG-119: and not before."""
    with connect(memory.address) as client:
        client.producer().send("orders", b"later", delay_level=3)
        with client.consumer("orders", "billing", consume_from=FIRST) as consumer:
            assert consumer.receive(timeout_s=0.2) is None
            memory.advance(10)
            assert [message.body for message in take(consumer, 1)] == [b"later"]


def test_a_reset_by_command_is_obeyed(memory: InMemoryBroker) -> None:
    """SG-118: consumption goes on at the offset that was commanded."""
    heard = Heard()
    with connect(memory.address) as client:
        send(client, 8)
        with client.listen("orders", "billing", heard, consume_from=FIRST):
            heard.wait(8)
            memory.reset_offsets("billing", "orders")
            heard.wait(16)
    assert set(Counter(message.id for message in heard.messages).values()) == {2}


# -- request and reply ------------------------------------------------------------------------------------------------


def test_a_request_gets_its_reply(new_client: Connect) -> None:
    """SG-004: the reply comes to the very client that asked."""
    asking, answering = new_client(), new_client()
    producer = answering.producer("answers")
    asking.producer().send("sums", b"the topic exists")

    def answer(message: ReceivedMessage) -> None:
        if message.is_request:
            producer.reply(message, str(sum(map(int, message.body.split()))).encode())

    with answering.listen("sums", "adders", answer, consume_from=FIRST):
        replies = [asking.producer("questions").request("sums", f"{number} 1".encode()).body for number in range(5)]
    assert replies == [b"1", b"2", b"3", b"4", b"5"]


def test_the_time_that_a_message_waits_is_short(client: Client) -> None:
    """SG-084: the held pull is answered by the message, long before its time."""
    client.producer().send("orders", b"0")
    with client.consumer("orders", "billing", consume_from=FIRST) as consumer:
        take(consumer, 1)
        for number in range(5):
            began = time.monotonic()
            client.producer().send("orders", str(number).encode())
            take(consumer, 1)
            assert time.monotonic() - began < 14.0


def test_members_beyond_the_partitions_are_idle(new_client: Connect) -> None:
    """MQ-024: with one member more than partitions one has none, until another leaves; one alone has all of them."""
    sender = new_client()
    send(sender, 4)
    consumers = [new_client().consumer("orders", "billing", consume_from=FIRST) for _ in range(5)]

    def sizes() -> list[int]:
        owned = [[queue.partition for queue in consumer.assignment() if queue.topic == "orders"] for consumer in consumers]
        whole = sorted(partition for own in owned for partition in own) == [0, 1, 2, 3]
        return sorted(map(len, owned)) if whole else []

    wait_until(lambda: sizes() == [0, 1, 1, 1, 1], DEADLINE_S, "four have one partition each, the fifth is idle")
    busy = next(consumer for consumer in consumers if any(queue.topic == "orders" for queue in consumer.assignment()))
    consumers.remove(busy)
    busy.close()
    wait_until(lambda: sizes() == [1, 1, 1, 1], DEADLINE_S, "the idle one takes over")
    while len(consumers) > 1:
        consumers.pop().close()
    wait_until(lambda: sizes() == [4], DEADLINE_S, "one has all")

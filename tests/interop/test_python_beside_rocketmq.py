"""The Python client beside RocketMQ's own: Java clients and the admin tool, unmodified, with the same broker."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

import pytest

import metaq
from metaq.client import Client, ConsumeFrom, OutgoingMessage, ReceivedMessage
from tests.interop.clients import ClientProcess, Outgoing
from tests.interop.conftest import Spawn
from tests.interop.mqadmin import AdminTool
from tests.interop.scenarios import create_topic
from tests.support.broker import BrokerProcess, wait_until

pytestmark = [pytest.mark.partner("java", "mvn"), pytest.mark.timeout(900)]

WAIT_S: Final = 120.0
LONG: Final = b"long enough to travel compressed, " * 200
FIRST: Final = ConsumeFrom.FIRST


@pytest.fixture(scope="module")
def program(java_program: tuple[str, ...]) -> tuple[str, ...]:
    return java_program


@pytest.fixture(scope="module")
def tool(broker: BrokerProcess, spawn: Spawn, java_program: tuple[str, ...]) -> AdminTool:
    return AdminTool(spawn(java_program, broker.registry), broker.registry)


@pytest.fixture
def python(broker: BrokerProcess) -> Iterator[Client]:
    with metaq.connect(broker.registry, timeout_s=WAIT_S) as client:
        yield client


def take(consumer: metaq.SimpleConsumer, count: int) -> list[ReceivedMessage]:
    found = [message for _ in range(count) if (message := consumer.receive(WAIT_S)) is not None]
    assert len(found) == count
    return found


def test_python_reads_what_java_sends(client: ClientProcess, broker: BrokerProcess, python: Client) -> None:
    """RD-017, SG-098: bodies, also compressed and in batches, tags, keys, properties and ids."""
    topic = create_topic(client, broker, "java-to-python")
    client.start_producer("jp", "jp")
    own = Outgoing(topic, "grün".encode(), "TagA", ["k1", "k2"], {"city": "Zürich"})
    sent = client.send("jp", own)
    client.send("jp", Outgoing(topic, LONG, "TagB"))
    client.send_batch("jp", [Outgoing(topic, b"b1", "TagC"), Outgoing(topic, b"b2", "TagC")])
    with python.consumer(topic, "jp", consume_from=FIRST) as consumer:
        messages = {message.body: message for message in take(consumer, 4)}
    assert set(messages) == {own.body, LONG, b"b1", b"b2"}
    first = messages[own.body]
    assert (first.tag, first.keys, first.properties["city"]) == ("TagA", ("k1", "k2"), "Zürich")
    assert (first.id, first.offset_id, first.queue_offset, first.partition) == (
        sent.id,
        sent.offset_id,
        sent.offset,
        sent.queue,
    )
    with python.consumer(topic, "jp-tags", tags="TagB || TagC", consume_from=FIRST) as consumer:
        assert {message.body for message in take(consumer, 3)} == {LONG, b"b1", b"b2"}


def test_java_reads_what_python_sends(client: ClientProcess, broker: BrokerProcess, python: Client) -> None:
    """RD-016, SG-098: the same the other way round."""
    topic = create_topic(client, broker, "python-to-java")
    client.start_consumer("pj", "pj", topic)
    producer = python.producer()
    sent = producer.send(topic, "grün".encode(), tag="TagA", keys=["k1", "k2"], properties={"city": "Zürich"})
    producer.send(topic, LONG, tag="TagB")
    producer.send_async(topic, b"async").result(WAIT_S)
    producer.send_oneway(topic, b"one-way")
    producer.send_batch(topic, [b"b1", OutgoingMessage(b"b2", tag="TagC")])
    expected = ["grün".encode(), LONG, b"async", b"one-way", b"b1", b"b2"]
    messages = {message.body: message for message in client.wait_for_bodies("pj", expected)}
    first = messages["grün".encode()]
    assert (first.tag, first.properties["KEYS"], first.properties["city"]) == ("TagA", "k1 k2", "Zürich")
    assert (first.id, first.offset_id) == (sent.id, sent.offset_id)
    assert messages[b"b2"].tag == "TagC"


def test_an_ordering_key_has_one_partition_for_both(client: ClientProcess, broker: BrokerProcess, python: Client) -> None:
    """SG-124: Java and Python choose it by the same hash."""
    topic = create_topic(client, broker, "ordered-by-both")
    client.start_producer("ob", "ob")
    producer = python.producer()
    for key in ("customer-1", "customer-2", "Ärger", "polygenelubricants"):
        of_java = client.send("ob", Outgoing(topic, b"java", ordering_key=key)).queue
        assert producer.send(topic, b"python", ordering_key=key).queue.partition == of_java


def test_a_group_of_both(client: ClientProcess, broker: BrokerProcess, python: Client) -> None:
    """SG-123, RD-104: they share the partitions, and each takes what the other gives up."""
    topic = create_topic(client, broker, "shared-by-both")
    client.start_consumer("sb", "sb", topic)
    heard: list[bytes] = []
    with python.listen(topic, "sb", lambda message: heard.append(message.body), consume_from=FIRST) as consumer:

        def shared() -> bool:
            return len([queue for queue in consumer.assignment() if queue.topic == topic]) == 2

        wait_until(shared, WAIT_S, "each has two of four partitions")
        bodies = [b"both %d" % number for number in range(16)]
        for body in bodies:
            python.producer().send(topic, body)
        wait_until(lambda: {*heard, *client.bodies("sb")} >= set(bodies), WAIT_S, "every message is consumed by one of them")
        assert heard
        assert client.bodies("sb")
    python.producer().send(topic, b"last")
    client.wait_for_bodies("sb", [b"last"])


def test_the_admin_tool_sees_python_consumers(tool: AdminTool, python: Client) -> None:
    """SG-087, SG-088: connections, state, and a message consumed once more by command."""
    heard: list[bytes] = []
    sent = python.producer("pa-producers").send("administered-python", b"once more", tag="TagA")
    with python.listen("administered-python", "pa", lambda message: heard.append(message.body), consume_from=FIRST):
        wait_until(lambda: heard == [b"once more"], WAIT_S, "the message")
        printed = tool.run("consumerConnection", "-g", "pa")
        assert re.search(rf"^{re.escape(python.id)} +127\.0\.0\.1:\d+ +PYTHON", printed, re.MULTILINE), printed
        status = tool.run("consumerStatus", "-g", "pa", "-i", python.id)
        assert re.search(r"PROP_CONSUME_TYPE +: CONSUME_PASSIVELY", status)
        assert re.search(r"^administered-python +metaq +0 ", status, re.MULTILINE), status
        answer = tool.run("queryMsgById", "-g", "pa", "-d", python.id, "-i", sent.offset_id)
        assert "consumeResult=CR_SUCCESS" in answer
        assert heard == [b"once more"] * 2
        tool.run("resetOffsetByTime", "-g", "pa", "-t", "administered-python", "-s", "0")
        wait_until(lambda: len(heard) == 3, WAIT_S, "the message comes again after the reset")

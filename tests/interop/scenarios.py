"""Scenarios that every unmodified RocketMQ client must pass, written once for all of them: subclasses name the client.

A module with such a class defines the fixtures ``program`` (the client's driver) and ``admin`` (a Java driver, which
alone can query messages and reset offsets).
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from pathlib import Path
from typing import Final

import pytest

from tests.interop.clients import ClientError, ClientProcess, Outgoing, Received, Sent
from tests.interop.conftest import Spawn
from tests.support.broker import BrokerProcess, wait_until

LEVELS_MS: Final = [
    *(seconds * 1_000 for seconds in (1, 5, 10, 30)),
    *(minutes * 60_000 for minutes in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 20, 30)),
    *(hours * 3_600_000 for hours in (1, 2)),
]
"""The delays of levels 1 to 18."""
AWAITED_LEVELS: Final = 4
WAIT_S: Final = 120.0
DELAY_TOPIC: Final = "delays"
SCHEDULE_TOPIC: Final = "SCHEDULE_TOPIC_XXXX"


def create_topic(client: ClientProcess, broker: BrokerProcess, topic: str, queues: int = 4) -> str:
    client.call("create_topic", topic=topic, queues=queues, broker=f"{broker.host}:{broker.port}")
    return topic


def numbered(topic: str, count: int, tag: str | None = None) -> list[Outgoing]:
    return [Outgoing(topic, b"%d" % number, tag) for number in range(count)]


def bodies(messages: list[Received] | list[Outgoing]) -> list[bytes]:
    return sorted(message.body for message in messages)


def pull_when_there(client: ClientProcess, group: str, topic: str) -> list[Received]:
    """The topic's messages, once it exists and has one."""
    found: list[Received] = []

    def pulled() -> bool:
        try:
            found.extend(client.pull(group, topic))
        except ClientError:  # no route yet
            return False
        return bool(found)

    wait_until(pulled, WAIT_S, f"a message in {topic}")
    return found


class Scenarios:
    """One test for each thing; the broker, and most of them the client's process, are the module's."""

    @pytest.fixture(scope="module", autouse=True)
    @staticmethod
    def delayed(client: ClientProcess, broker: BrokerProcess) -> list[list[Sent]]:
        """Two messages of each level, the longest first, sent before anything else is tested; by level."""
        create_topic(client, broker, DELAY_TOPIC, queues=1)
        client.start_producer("delays", "delay-producers")
        client.start_consumer("delays", "delay-consumers", DELAY_TOPIC)
        rounds: list[list[Sent]] = [[] for _ in LEVELS_MS]
        for number in (0, 1):
            for level in range(len(LEVELS_MS), 0, -1):
                message = Outgoing(DELAY_TOPIC, b"%d-%d" % (level, number), delay=level)
                rounds[level - 1].append(client.send("delays", message))
        return rounds

    def test_every_way_of_sending(self, client: ClientProcess, broker: BrokerProcess) -> None:
        """SG-126, SG-127, SG-128, SG-076, SG-136, RD-016, RD-022: what was sent, in whatever way, is consumed once."""
        topic = create_topic(client, broker, "ways")
        client.start_producer("ways", "ways-producers")
        client.start_consumer("ways", "ways-consumers", topic)
        synchronous = client.send("ways", Outgoing(topic, b"sync", "TagA", ["k1", "k2"], {"colour": "red"}))
        asynchronous = client.send("ways", Outgoing(topic, "数据".encode()), "async")
        client.send_oneway("ways", Outgoing(topic, b"oneway"))
        batch = client.send_batch("ways", numbered(topic, 3, "batch"))
        assert [sent.status for sent in (synchronous, asynchronous, batch)] == ["SEND_OK"] * 3
        assert len(set(batch.offset_id.split(","))) == 3

        expected = {b"sync", "数据".encode(), b"oneway", b"0", b"1", b"2"}
        messages = {message.body: message for message in client.wait_for_bodies("ways", expected)}
        assert sorted(client.bodies("ways")) == sorted(expected)
        for sent, body in ((synchronous, b"sync"), (asynchronous, "数据".encode())):
            got = messages[body]
            assert (got.id, got.offset_id, got.queue, got.offset) == (sent.id, sent.offset_id, sent.queue, sent.offset)
        first = messages[b"sync"]
        assert (first.topic, first.tag, first.reconsumed) == (topic, "TagA", 0)
        assert first.properties["KEYS"].split() == ["k1", "k2"]
        assert first.properties["colour"] == "red"
        batched = [messages[b"%d" % number] for number in range(3)]
        assert [(got.tag, got.queue, got.offset) for got in batched] == [
            ("batch", batch.queue, batch.offset + number) for number in range(3)
        ]

    def test_topic_is_created_by_the_first_send(self, client: ClientProcess) -> None:
        """SG-065, SG-061, SG-125, RD-015: a topic that nobody created gets the default topic's queues and is consumed."""
        client.start_producer("automatic", "automatic-producers")
        client.send("automatic", Outgoing("automatic", b"first"))
        client.start_consumer("automatic", "automatic-consumers", "automatic")
        client.wait_for_bodies("automatic", [b"first"])

    def test_two_consumers_share_until_one_is_killed(
        self, client: ClientProcess, broker: BrokerProcess, spawn: Spawn, program: tuple[str, ...]
    ) -> None:
        """SG-123, SG-129, SG-089, RD-017, RD-104: the survivor takes over the queues of the dead, and nothing is lost."""
        topic = create_topic(client, broker, "shared")
        client.start_producer("shared", "shared-producers")
        first, second = (spawn(program, broker.registry) for _ in range(2))
        first.start_consumer("first", "sharers", topic)
        second.start_consumer("second", "sharers", topic)

        def both_take_part() -> bool:
            client.send("shared", Outgoing(topic, b"warm-up"))
            return bool(first.messages("first")) and bool(second.messages("second"))

        wait_until(both_take_part, WAIT_S, "messages for both consumers")
        client.call("stream", producer="shared", topic=topic, count=300, pause_ms=5)
        client.wait(lambda: len(client.acknowledged(topic)) >= 20, "20 messages of the stream")
        first.kill()
        later = [Outgoing(topic, b"later %d" % number) for number in range(40)]
        for message in later:
            client.send("shared", message)

        client.wait(lambda: len(client.acknowledged(topic)) == 300, "the whole stream is acknowledged")
        sent = {text.encode() for text in client.acknowledged(topic)}.union(message.body for message in later)
        messages = second.wait_for_bodies("second", sent.difference(first.bodies("first")))
        assert {message.queue for message in messages if message.body.startswith(b"later")} == {0, 1, 2, 3}

    def test_broadcast(self, client: ClientProcess, broker: BrokerProcess) -> None:
        """SG-122, SG-130, SG-118: every consumer of the group is given every message once."""
        topic = create_topic(client, broker, "broadcast")
        client.start_producer("broadcast", "broadcast-producers")
        for name in ("left", "right"):
            client.start_consumer(name, "listeners", topic, broadcast=True)
        messages = numbered(topic, 20)
        for message in messages:
            client.send("broadcast", message)
        for name in ("left", "right"):
            client.wait_for_bodies(name, bodies(messages))
            assert sorted(client.bodies(name)) == bodies(messages)

    def test_tag_filter(self, client: ClientProcess, broker: BrokerProcess) -> None:
        """SG-131, RD-027, RD-028, RD-101: a subscription with two tags gets these two, not the hash of another one."""
        topic = create_topic(client, broker, "tags", queues=1)
        client.start_producer("tags", "tag-producers")
        # "AaAa" and "BBBB" have the same Java hash, so that the broker lets both through and the client does not.
        for number, tag in enumerate(("red", "green", None, "AaAa", "BBBB", "blue", "red")):
            client.send("tags", Outgoing(topic, b"%d" % number, tag))
        client.start_consumer("tags", "tag-consumers", topic, "red || AaAa")
        client.wait_for_bodies("tags", [b"0", b"3", b"6"])
        assert sorted(client.bodies("tags")) == [b"0", b"3", b"6"]

    def test_sql_filter(self, client: ClientProcess, broker: BrokerProcess) -> None:
        """RD-102: a subscription by properties gets the messages for which the expression is true."""
        topic = create_topic(client, broker, "sql", queues=1)
        client.start_producer("sql", "sql-producers")
        rows: list[tuple[str | None, dict[str, str]]] = [
            ("x", {"price": "7", "colour": "red"}),
            ("x", {"price": "5", "colour": "red"}),
            ("x", {"price": "10", "colour": "green"}),
            ("x", {"colour": "red"}),
            ("y", {"price": "10", "colour": "red"}),
            ("x", {"price": "10.5", "colour": "blue"}),
        ]
        for number, (tag, properties) in enumerate(rows):
            client.send("sql", Outgoing(topic, b"%d" % number, tag, properties=properties))
        expression = "TAGS = 'x' AND price > 5 AND (colour IN ('red', 'blue') OR size IS NOT NULL)"
        client.start_consumer("sql", "sql-consumers", topic, expression, sql=True)
        client.wait_for_bodies("sql", [b"0", b"5"])
        assert sorted(client.bodies("sql")) == [b"0", b"5"]

    def test_order_of_each_key(self, client: ClientProcess, broker: BrokerProcess) -> None:
        """SG-124, SG-117: messages of a key lie in one queue, and the ordered consumer gets them in the order of sending."""
        topic = create_topic(client, broker, "ordered")
        client.start_producer("ordered", "ordered-producers")
        client.start_consumer("ordered", "ordered-consumers", topic, orderly=True)
        expected = {key: [b"%s-%d" % (key, number) for number in range(20)] for key in (b"a", b"b", b"c", b"d", b"e", b"f")}
        for number in range(20):
            for key in expected:
                client.send("ordered", Outgoing(topic, expected[key][number], ordering_key=key.decode()))

        messages = client.wait_for_bodies("ordered", [body for sequence in expected.values() for body in sequence])
        got: dict[bytes, list[bytes]] = defaultdict(list)
        queues: dict[bytes, set[int]] = defaultdict(set)
        for message in messages:
            got[message.body[:1]].append(message.body)
            queues[message.body[:1]].add(message.queue)
        assert got == expected
        assert all(len(of_key) == 1 for of_key in queues.values())
        assert len(set.union(*queues.values())) > 1

    def test_failures_lead_to_the_dead_letters(self, client: ClientProcess, broker: BrokerProcess) -> None:
        """SG-072, SG-073, SG-074, SG-075: twice again after a failure, then in the dead-letter topic and nowhere else."""
        topic = create_topic(client, broker, "failing")
        # It would come with the consumer's first heartbeat, but a client looks for new topics only every 30 s.
        create_topic(client, broker, "%RETRY%failers", queues=1)
        client.start_producer("failing", "failing-producers")
        client.start_consumer("failing", "failers", topic, failing=True, max_reconsume_times=2)
        sent = client.send("failing", Outgoing(topic, b"never", "TagA", ["key"]))
        client.wait(lambda: len(client.messages("failing")) >= 3, "three deliveries")

        [dead] = pull_when_there(client, "undertakers", "%DLQ%failers")
        deliveries = client.messages("failing")
        assert [(got.body, got.reconsumed, got.topic) for got in deliveries] == [(b"never", n, topic) for n in range(3)]
        assert [got.id for got in deliveries] == [sent.id] * 3
        assert all(later.at - earlier.at >= LEVELS_MS[0] for earlier, later in itertools.pairwise(deliveries))
        assert (dead.body, dead.tag, dead.id) == (b"never", "TagA", sent.id)
        assert dead.properties["RETRY_TOPIC"] == topic
        assert len(client.messages("failing")) == 3

    def test_pulling(self, client: ClientProcess, broker: BrokerProcess, admin: ClientProcess) -> None:
        """SG-120, SG-077, SG-078: by offset, with a filter, and a group that goes on where it stopped."""
        topic = create_topic(client, broker, "pulled")
        client.start_producer("pulled", "pulled-producers")
        messages = [Outgoing(topic, b"%02d" % number, "even" if number % 2 == 0 else "odd") for number in range(24)]
        for message in messages:
            client.send("pulled", message)

        assert bodies(client.pull("pullers", topic)) == bodies(messages)
        assert bodies(client.pull("pullers", topic, "odd")) == bodies(messages[1::2])
        assert bodies(client.poll("pollers", topic, count=24, seconds=60)) == bodies(messages)

        def stored_offsets() -> int:
            try:
                offsets: dict[str, int] = admin.call("group_offsets", group="pollers", topic=topic)
            except ClientError:  # none yet
                return 0
            return sum(offsets.values())

        # The client sends offsets without waiting for an answer, and the next one asks over another connection.
        wait_until(lambda: stored_offsets() == 24, WAIT_S, "the offsets of the first poll are stored")
        late = Outgoing(topic, b"late")
        client.send("pulled", late)
        assert bodies(client.poll("pollers", topic, count=1, seconds=60)) == [b"late"]

    @pytest.mark.slow
    def test_offsets_are_reset_by_time(self, client: ClientProcess, broker: BrokerProcess, admin: ClientProcess) -> None:
        """SG-078, SG-055, SG-054: a running group goes back to the first message that was stored at that time."""
        topic = create_topic(client, broker, "reset", queues=1)
        client.start_producer("reset", "reset-producers")
        client.start_consumer("reset", "resetters", topic)
        messages = numbered(topic, 10)
        for message in messages[:6]:
            before = time.time_ns() // 1_000_000
            wait_until(lambda since=before: time.time_ns() // 1_000_000 > since, WAIT_S, "the next millisecond")  # type: ignore[misc]
            client.send("reset", message)
        for message in messages[6:]:
            client.send("reset", message)
        got = {message.body: message for message in client.wait_for_bodies("reset", bodies(messages))}
        assert sorted(client.bodies("reset")) == bodies(messages)

        assert admin.call("reset_offsets", topic=topic, group="resetters", timestamp=got[b"5"].stored) == {"0": 5}
        client.wait(lambda: len(client.messages("reset")) >= 15, "the last five messages again")
        assert sorted(client.bodies("reset")) == sorted([*bodies(messages), *bodies(messages[5:])])

    def test_query_by_key_and_by_id(self, client: ClientProcess, broker: BrokerProcess, admin: ClientProcess) -> None:
        """SG-132, RD-106, RD-107: what the client sent is found under its keys, its unique id and its offset id."""
        topic = create_topic(client, broker, "queried")
        client.start_producer("queried", "queried-producers")
        client.send("queried", Outgoing(topic, b"other", keys=["k3"]))
        sent = client.send("queried", Outgoing(topic, b"wanted", "TagA", ["k1", "k2"]))

        def found(key: str) -> list[tuple[bytes, str]]:
            try:
                views = admin.call("query_by_key", topic=topic, key=key)
            except ClientError:  # nothing found
                return []
            return [(Received.read(view).body, Received.read(view).id) for view in views]

        for key in ("k1", "k2"):
            wait_until(lambda key=key: bool(found(key)), WAIT_S, f"the message with key {key}")  # type: ignore[misc]
            assert found(key) == [(b"wanted", sent.id)]
        assert found("k4") == []
        for name in (sent.id, sent.offset_id):
            message = Received.read(admin.call("query_by_id", topic=topic, message_id=name))
            assert (message.body, message.id, message.tag, message.topic) == (b"wanted", sent.id, "TagA", topic)
            assert (message.queue, message.offset) == (sent.queue, sent.offset)

    def test_request_and_reply(self, client: ClientProcess, broker: BrokerProcess) -> None:
        """SG-121, SG-087: a reply reaches the producer that asked, through the broker."""
        topic = create_topic(client, broker, "questions")
        client.start_producer("repliers", "reply-producers")
        client.start_consumer("questions", "answerers", topic, replier="repliers")
        client.start_producer("questions", "question-producers")

        def replied(number: int, seconds: int) -> bool:
            question = Outgoing(topic, b"question %d" % number).view()
            reply: str = client.call("request", producer="questions", message=question, seconds=seconds)
            return reply == str(question["body"])

        def known_to_the_broker() -> bool:
            try:
                return replied(0, seconds=2)
            except ClientError:
                return False

        # The Go producer tells the broker who it is a second after its start, and cannot be replied to before.
        wait_until(known_to_the_broker, WAIT_S, "the first reply")
        assert all(replied(number, seconds=60) for number in (1, 2, 3))

    def test_compressed_bodies(self, client: ClientProcess, broker: BrokerProcess) -> None:
        """SG-098: a body that the client compresses takes less room at the broker and comes back byte for byte."""
        topic = create_topic(client, broker, "compressed")
        client.start_producer("compressed", "compressed-producers")
        client.start_consumer("compressed", "compressed-consumers", topic)
        body = bytes(range(256)) * 400
        client.send("compressed", Outgoing(topic, body))
        [message] = client.wait_for_bodies("compressed", [body])
        assert message.size < len(body) // 10

    @pytest.mark.slow
    def test_killed_broker(self, spawn: Spawn, program: tuple[str, ...], tmp_path: Path) -> None:
        """SG-055, SG-068, SG-134: after SIGKILL in mid-stream both clients go on, with nothing acknowledged lost."""
        with BrokerProcess(tmp_path / "data", durability="disk") as broker:
            client = spawn(program, broker.registry)
            topic = create_topic(client, broker, "killed")
            client.start_producer("killed", "killed-producers")
            client.start_consumer("killed", "killed-consumers", topic)
            client.call("stream", producer="killed", topic=topic, count=400, pause_ms=5)
            client.wait(lambda: len(client.acknowledged(topic)) >= 100, "100 messages of the stream")
            client.wait(lambda: bool(client.messages("killed")), "a message for the consumer")
            broker.kill()
            broker.restart(same_port=True)

            client.wait(lambda: len(client.acknowledged(topic)) == 400, "the whole stream is acknowledged")
            client.wait_for_bodies("killed", [text.encode() for text in client.acknowledged(topic)])
            client.kill()

    @pytest.mark.slow
    def test_delays(self, client: ClientProcess, admin: ClientProcess, delayed: list[list[Sent]]) -> None:
        """SG-075, SG-055: every level is stored in order; those up to 30 s come in that order and not before their time."""
        assert {sent.status for level in delayed for sent in level} == {"SEND_OK"}
        for level, (one, other) in enumerate(delayed, 1):
            assert one.offset < other.offset
            if level > AWAITED_LEVELS:
                stored = Received.read(admin.call("query_by_id", topic=SCHEDULE_TOPIC, message_id=one.offset_id))
                assert (stored.topic, stored.queue, stored.offset) == (SCHEDULE_TOPIC, level - 1, one.offset)
                assert (stored.properties["REAL_TOPIC"], stored.properties["DELAY"]) == (DELAY_TOPIC, str(level))

        awaited = [b"%d-%d" % (level, number) for level in range(1, AWAITED_LEVELS + 1) for number in (0, 1)]
        # Level 5 may have come by now, when other tests ran before this one.
        messages = [message for message in client.wait_for_bodies("delays", awaited) if message.body in awaited]
        arrived = [message.body for message in sorted(messages, key=lambda message: message.offset)]
        assert sorted(arrived, key=lambda body: body[:1]) == awaited  # a stable sort: each level keeps its order
        for message in messages:
            assert message.at - message.born >= LEVELS_MS[int(message.body[:1]) - 1]

"""The serving of connections: one loop for all of them, one codec for all processes, one handler per request code."""

import contextlib
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

import metaq
from metaq.client import TextClient, parse_stats
from metaq.protocol.remoting import fastjson
from metaq.protocol.remoting.codes import COMPACT, JSON, PULL_HAS_SUBSCRIPTION, PULL_SUSPENDS, Request, Response
from metaq.protocol.remoting.headers import Int32, PullMessage, encode_header
from tests.support.admin import ask, ask_body, connect, create_topic, pull, records, send
from tests.support.broker import BrokerProcess, RegistryProcess, wait_until
from tests.support.consumer import Consumer, subscription
from tests.support.remoting import RemotingClient

DEADLINE_S: Final = 60.0
TOPIC: Final = "T"
UNKNOWN: Final = 29_999
POOL_THREADS: Final = 10
"""Of gevent's pool, at most."""
OWN_THREADS: Final = 2
"""That of the loop, and that for syncs."""
EPOLL: Final = "anon_inode:[eventpoll]"


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path / "data") as process:
        yield process


@pytest.fixture
def client(broker: BrokerProcess) -> Iterator[RemotingClient]:
    with connect(broker) as connection:
        create_topic(connection, TOPIC)
        yield connection


def descriptors(broker: BrokerProcess) -> list[str]:
    found = []
    for path in Path(f"/proc/{broker.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            found.append(os.readlink(path))
    return found


def misses(client: TextClient) -> int:
    """Pulls and gets that found nothing."""
    return int(parse_stats(client.stats())["get_miss"])


def pull_fields(*, wanted: int = 32, wait_ms: int = 0) -> dict[str, str]:
    """A pull from the beginning that brings its own subscription."""
    flags = Int32(PULL_HAS_SUBSCRIPTION | (PULL_SUSPENDS if wait_ms else 0))
    return encode_header(PullMessage("g", TOPIC, Int32(0), 0, Int32(wanted), flags, 0, wait_ms, 0, "*", "TAG"))


# -- loop and connections ---------------------------------------------------------------------------------------------


def test_one_loop_serves_every_connection(broker: BrokerProcess) -> None:
    """SG-090, RD-023: 100 clients stay connected, each is answered, and no thread is made for any of them."""
    with ExitStack() as stack:
        clients = [stack.enter_context(connect(broker)) for _ in range(100)]
        create_topic(clients[0], TOPIC)
        for _ in range(2):
            asked = [each.send(Request.GET_MAX_OFFSET, {"topic": TOPIC, "queueId": "0"}) for each in clients]
            answers = [each.response(opaque) for each, opaque in zip(clients, asked, strict=True)]
            assert {(answer.code, answer.fields["offset"]) for answer in answers} == {(Response.SUCCESS, "0")}
        opened = descriptors(broker)
        assert opened.count(EPOLL) == 1
        assert sum(name.startswith("socket:") for name in opened) >= 100
        assert len(list(Path(f"/proc/{broker.pid}/task").iterdir())) <= OWN_THREADS + POOL_THREADS


def test_the_loop_may_be_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """RD-026: epoll unless gevent is told otherwise."""
    monkeypatch.setenv("GEVENT_BACKEND", "poll")
    with BrokerProcess(tmp_path / "data") as broker, connect(broker) as client:
        create_topic(client, TOPIC)
        send(client, TOPIC, b"x")
        assert [bytes(record.body) for record in records(pull(client, TOPIC, 0))] == [b"x"]
        assert EPOLL not in descriptors(broker)


def test_a_burst_waits_in_its_own_connection(tmp_path: Path) -> None:
    """SG-094: requests of a client that does not read wait there, others are served, and each gets its answer."""
    bodies = [bytes([number]) * 60_000 for number in range(16)]
    with (
        BrokerProcess(tmp_path / "data", "--max-unsent-bytes", "65536") as broker,
        connect(broker) as burst,
        connect(broker) as other,
    ):
        create_topic(other, TOPIC)
        send(other, TOPIC, *bodies)
        wanted = pull_fields(wanted=1)
        asked = [
            burst.send(Request.PULL_MESSAGE, {**wanted, "queueOffset": str(number % 16)}) for number in range(320)
        ]  # 19 MB, more than all buffers between two processes hold
        for number in range(50):
            assert send(other, TOPIC, b"x").fields["queueOffset"] == str(16 + number)
        for number, opaque in enumerate(asked):
            (record,) = records(burst.response(opaque))
            assert record.body == bodies[number % 16]


def test_connections_live_without_heartbeats(tmp_path: Path) -> None:
    """SG-099: they are for members of groups; what has never sent one stays, what stops sending them is closed."""
    with (
        BrokerProcess(tmp_path / "data", "--client-expiry-ms", "400", "--client-scan-ms", "20") as broker,
        connect(broker) as plain,
        Consumer(broker, "g") as member,
    ):
        create_topic(plain, TOPIC)
        member.beat(subscription(TOPIC))
        member.wire.wait_closed()
        assert send(plain, TOPIC, b"x").fields["queueOffset"] == "0"


# -- codec and handlers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("serialization", [JSON, COMPACT])
def test_every_process_speaks_the_same(tmp_path: Path, broker: BrokerProcess, serialization: int) -> None:
    """RD-018, RD-021: broker, embedded registry and registry process, in the header form of the request."""
    with RegistryProcess(tmp_path / "registry") as registry:
        answers = []
        for address in (broker.address, broker.registry, registry.address):
            host, _, port = address.rpartition(":")
            with RemotingClient(host, int(port)) as client:
                client.send(UNKNOWN, {"a": "b"}, oneway=True, serialization=serialization)
                answers.append(client.call(UNKNOWN, {"a": "b"}, b"body", serialization=serialization))
        assert len(set(map(repr, answers))) == 1
        assert (answers[0].code, answers[0].serialization) == (Response.REQUEST_CODE_NOT_SUPPORTED, serialization)


def test_each_code_has_its_handler(client: RemotingClient) -> None:
    """RD-025: behind a pull that waits, other codes of the same connection are answered, and so are failures."""
    held = client.send(Request.PULL_MESSAGE, pull_fields(wait_ms=30_000))
    create_topic(client, "U")
    assert client.call(Request.GET_TOPIC_STATS_INFO, {"topic": "nowhere"}).code == Response.TOPIC_NOT_EXIST
    assert client.call(UNKNOWN).code == Response.REQUEST_CODE_NOT_SUPPORTED
    assert send(client, "U", b"other").fields["queueOffset"] == "0"
    assert not client.answered(held)
    send(client, TOPIC, b"awaited")
    assert [bytes(record.body) for record in records(client.response(held))] == [b"awaited"]


# -- pulls ------------------------------------------------------------------------------------------------------------


def test_push_is_pull(broker: BrokerProcess, client: RemotingClient) -> None:
    """SG-077: the broker sends no message by itself; it answers consumers of both types in the same way."""
    found = {}
    for kind in ("CONSUME_PASSIVELY", "CONSUME_ACTIVELY"):
        with Consumer(broker, kind, kind) as consumer:
            beat = json.loads(consumer.heartbeat(subscription(TOPIC)))
            beat["consumerDataSet"][0]["consumeType"] = kind
            ask(consumer.wire, Request.HEART_BEAT, json.dumps(beat).encode())
            send(client, TOPIC, b"x")
            assert consumer.members() == [kind]
            assert {request.code for request in consumer.wire.requests} <= {Request.NOTIFY_CONSUMER_IDS_CHANGED}
            found[kind] = consumer.bodies(TOPIC)
    assert found == {"CONSUME_PASSIVELY": [b"x"], "CONSUME_ACTIVELY": [b"x", b"x"]}


def test_a_pull_that_found_nothing_is_repeated(tmp_path: Path) -> None:
    """SG-080: a push consumer asks again when its hold is over, again and again, until there is a message."""
    heard: list[bytes] = []
    with BrokerProcess(tmp_path / "data", "--max-hold-ms", "100") as broker, connect(broker) as client:
        create_topic(client, TOPIC)
        start = metaq.ConsumeFrom.FIRST
        with (
            metaq.connect(broker.registry) as library,
            library.listen(TOPIC, "g", lambda message: heard.append(message.body), consume_from=start),
            TextClient(broker.host, broker.port) as text,
        ):
            before = misses(text)
            wait_until(lambda: misses(text) >= before + 6, DEADLINE_S, "the consumer asks again and again")
            send(client, TOPIC, b"x")
            wait_until(lambda: heard == [b"x"], DEADLINE_S, "the message is heard")


def test_the_broker_filters_by_the_hash_of_the_tag(broker: BrokerProcess, client: RemotingClient) -> None:
    """SG-027, RD-027, RD-028: of several tags; one with the same hash passes, which is why clients compare the text."""
    for tag in ("AaAa", "BBBB", "C", "D"):
        send(client, TOPIC, tag.encode(), pairs=f"TAGS\x01{tag}\x02")
    with Consumer(broker, "g") as consumer:
        consumer.beat(subscription(TOPIC, "AaAa || C"))
        assert consumer.bodies(TOPIC) == [b"AaAa", b"BBBB", b"C"]


# -- replicas ---------------------------------------------------------------------------------------------------------


def test_a_replica_can_ask_for_every_table(broker: BrokerProcess, client: RemotingClient) -> None:
    """SG-058: topics, consumer offsets, positions of the delay levels, groups: 21, 43, 45 and 201."""
    send(client, TOPIC, b"x", pairs="DELAY\x011\x02")
    with Consumer(broker, "cg") as consumer:
        consumer.beat(subscription(TOPIC))
        wait_until(lambda: consumer.pull(TOPIC).code == Response.SUCCESS, DEADLINE_S, "the delayed message is there")
        assert consumer.commit(TOPIC, 1).code == Response.SUCCESS
    topics = ask_body(client, Request.GET_ALL_TOPIC_CONFIG)
    assert topics["topicConfigTable"][TOPIC]["writeQueueNums"] == 1
    assert topics["dataVersion"]["counter"] >= 1
    assert ask_body(client, Request.GET_ALL_CONSUMER_OFFSET)["offsetTable"][f"{TOPIC}@cg"] == {0: 1}
    assert fastjson.decode(ask(client, Request.GET_ALL_DELAY_OFFSET).body)["offsetTable"] == {1: 1}
    groups = ask_body(client, Request.GET_ALL_SUBSCRIPTIONGROUP_CONFIG)
    assert groups["subscriptionGroupTable"]["cg"]["retryMaxTimes"] == 16

"""The unmodified Java MetaQ client, 1.4.6.2, in direct mode (``serverUrl`` set, no ZooKeeper) against a real broker."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.interop.metaq_java.driver import JavaClient, JavaError, Outgoing, Received, build
from tests.interop.metaq_java.relay import Relay
from tests.support.broker import BrokerProcess

pytestmark = [pytest.mark.partner("java", "mvn"), pytest.mark.timeout(900)]

RECORD_HEADER_BYTES = 20
MAX_INT64 = 2**63 - 1
BODIES: list[tuple[bytes, str | None]] = [
    (b"hello", None),
    (b"hello", "TagA"),
    (b"", None),
    (b"", ""),
    ("数据".encode(), "属性"),
    (bytes(range(256)) + b"\r\nquit\r\n", "binary"),
    (b"x" * 100_000, None),
]


def messages(topic: str) -> list[Outgoing]:
    return [Outgoing(topic, payload, attribute) for payload, attribute in BODIES]


def body_of(message: Outgoing) -> bytes:
    """The body that stands for a message on the wire: its attribute, if any, in front with an int32 length."""
    if message.attribute is None:
        return message.payload
    attribute = message.attribute.encode()
    return len(attribute).to_bytes(4, "big") + attribute + message.payload


def content(received: list[Received]) -> list[tuple[bytes, str | None]]:
    return [(message.payload, message.attribute) for message in received]


@pytest.fixture(scope="module")
def class_path() -> str:
    return build()


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path_factory.mktemp("broker") / "data") as process:
        yield process


@pytest.fixture
def relay(broker: BrokerProcess) -> Iterator[Relay]:
    with Relay(broker.host, broker.port) as relay:
        yield relay


@pytest.fixture
def client(class_path: str, relay: Relay, tmp_path: Path) -> Iterator[JavaClient]:
    with JavaClient(class_path, "127.0.0.1", relay.port, tmp_path / "home") as client:
        yield client


def test_put_returns_id_partition_and_position(client: JavaClient, relay: Relay) -> None:
    """MQ-010, MQ-037, MQ-059, MQ-062, MQ-110: each put succeeds, with a new id and the position of its record."""
    outgoing = messages("java-put")
    sent = [client.put(message) for message in outgoing]

    assert [(result.success, result.error) for result in sent] == [(True, None)] * len(sent)
    assert [result.partition for result in sent] == [0] * len(sent)
    position = 0
    for result, message in zip(sent, outgoing, strict=True):
        assert result.offset == position
        position += RECORD_HEADER_BYTES + len(body_of(message))
    ids = [result.id for result in sent]
    assert 0 not in ids
    assert ids == sorted(set(ids))
    # The client leaves the partition to the broker, and sends a checksum of attribute and payload.
    for message in outgoing:
        body = body_of(message)
        flag = 0 if message.attribute is None else 1
        line = b"put java-put -1 %d %d %d " % (len(body), flag, zlib.crc32(body) & 0x7FFFFFFF)
        assert re.search(re.escape(line) + rb"-\d+\r\n" + re.escape(body), relay.requests), line


def test_answers_carry_the_opaques_of_the_requests(client: JavaClient, relay: Relay) -> None:
    """MQ-057, MQ-058, MQ-062: a line and a body each way, the answer with the client's (negative) opaque."""
    sent = client.put(Outgoing("java-opaque", b"hello"))

    [opaque] = re.findall(rb"put java-opaque -1 5 0 907060870 (-\d+)\r\nhello", relay.requests)
    body = b"%d 0 0" % sent.id
    assert b"result 200 %d %s\r\n%s" % (len(body), opaque, body) in relay.answers


def test_pipelined_puts_are_stored_in_order(client: JavaClient, relay: Relay) -> None:
    """MQ-058: puts in flight together get the answers meant for them, and are stored in the order of sending."""
    outgoing = [Outgoing("java-pipelined", b"message %d" % number) for number in range(300)]
    sent = client.put_pipelined(outgoing)

    assert all(result.success for result in sent)
    received = client.read_all("java-pipelined", max_size=65_536)
    assert [message.payload for message in received] == [message.payload for message in outgoing]
    assert [message.id for message in received] == [result.id for result in sent]
    assert relay.connections == 1


def test_get_returns_what_was_put(client: JavaClient, relay: Relay) -> None:
    """MQ-010, MQ-011, MQ-012, MQ-060, MQ-061: payload and attribute come back byte for byte, with the id of the put."""
    sent = [client.put(message) for message in messages("java-get")]

    received = client.read_all("java-get", max_size=1_000_000)
    assert content(received) == BODIES
    assert [message.id for message in received] == [result.id for result in sent]
    # MQ-061 is called `data` in the manual; every client in use expects `value`.
    assert b"value " in relay.answers
    assert b"data " not in relay.answers


def test_get_makes_progress_with_any_max_size(client: JavaClient) -> None:
    """MQ-060: a size smaller than a message still brings that message, so a reader never stands still."""
    for message in messages("java-small"):
        client.put(message)

    assert content(client.read_all("java-small", max_size=64)) == BODIES


def test_get_where_nothing_is(client: JavaClient, relay: Relay) -> None:
    """MQ-060, MQ-062: end, unknown topic, unknown partition are 404; the largest offset is told the end."""
    sent = client.put(Outgoing("java-nothing", b"only"))
    end = sent.offset + RECORD_HEADER_BYTES + len(b"only")

    assert client.get("java-nothing", end, 1_024) is None
    assert client.get("java-unknown", 0, 1_024) is None
    assert client.get("java-nothing", 0, 1_024, partition=99) is None
    assert len(re.findall(rb"result 404 ", relay.answers)) == 3
    assert client.get("java-nothing", MAX_INT64, 1_024) is None
    assert re.search(rb"result 301 \d+ -\d+\r\n%d(?!\d)" % end, relay.answers)


def test_offset_answers_a_valid_position(client: JavaClient) -> None:
    """MQ-063: an offset at or inside a message leads to a start at or before it, one past the end to the end."""
    sent = [client.put(Outgoing("java-offset", b"%03d" % number)) for number in range(10)]
    starts = [result.offset for result in sent]
    end = starts[-1] + RECORD_HEADER_BYTES + 3

    assert client.offset("java-offset", 0) == 0
    for start in starts:
        inside = client.offset("java-offset", start + 1)
        assert inside in starts and inside <= start
    assert client.offset("java-offset", end) == end
    assert client.offset("java-offset", end + 1_000_000) == end
    with pytest.raises(JavaError, match="MetaClientException"):
        client.offset("java-offset-unknown", 0)


def test_listener_gets_old_and_new_messages(client: JavaClient) -> None:
    """MQ-011, MQ-012, MQ-060: a subscription gets what was there and what comes later, once each and in order."""
    expected = messages("java-listener")
    for message in expected[:4]:
        client.put(message)
    client.subscribe("java-listener", 0, max_size=1_024)
    taken = [client.take("java-listener") for _ in expected[:4]]
    for message in expected[4:]:
        client.put(message)
        taken.append(client.take("java-listener"))

    assert content([message for message in taken if message is not None]) == BODIES


def test_listener_from_the_end(client: JavaClient, relay: Relay) -> None:
    """MQ-060: a subscription from the largest offset learns the end by a 301 and gets only what is put after that."""
    client.put(Outgoing("java-end", b"before"))
    client.subscribe("java-end", MAX_INT64, max_size=1_024)
    relay.wait_for_answer(rb"result 301 ")
    client.put(Outgoing("java-end", b"after"))

    taken = client.take("java-end")
    assert taken is not None and taken.payload == b"after"


@pytest.mark.slow
def test_heartbeat_keeps_an_idle_connection(client: JavaClient, relay: Relay) -> None:
    """MQ-109: after 10 s without traffic the client asks for the version and keeps the connection it has."""
    client.put(Outgoing("java-idle", b"before"))
    heartbeat = relay.wait_for_request(rb"version (-\d+)\r\n")
    relay.wait_for_answer(rb"result 200 \d+ %s\r\n[^\r\n]" % heartbeat[1])

    assert client.put(Outgoing("java-idle", b"after")).success
    assert [message.payload for message in client.read_all("java-idle", 1_024)] == [b"before", b"after"]
    assert relay.connections == 1


def test_statistics(client: JavaClient, broker: BrokerProcess) -> None:
    """MQ-064: the client reads the broker's counters, those of one topic, and the real-time ones."""
    for message in messages("java-stats"):
        client.put(message)

    stats = client.stats()
    assert stats["pid"] == str(broker.pid)
    assert re.fullmatch(r"\d+(\.\d+)+", stats["version"])
    assert int(stats["cmd_put"]) >= len(BODIES)
    assert client.stats("java-stats")["message_count"] == str(len(BODIES))
    assert "realtime_put" in client.stats("realtime")


def test_client_returns_to_a_killed_broker(class_path: str, tmp_path: Path) -> None:
    """MQ-011: after SIGKILL and a new start the client comes back and reads what was acknowledged."""
    data = tmp_path / "data"
    with (
        BrokerProcess(data) as first,
        Relay(first.host, first.port) as relay,
        JavaClient(class_path, "127.0.0.1", relay.port, tmp_path / "home") as client,
    ):
        sent = [client.put(message) for message in messages("java-killed")]
        first.kill()
        with BrokerProcess(data) as second:
            relay.upstream = (second.host, second.port)
            relay.wait_for_connections(2)
            client.step("await_connected")
            received = client.read_all("java-killed", 1_000_000)
            assert content(received) == BODIES
            assert [message.id for message in received] == [result.id for result in sent]
            assert client.put(Outgoing("java-killed", b"later")).offset > sent[-1].offset

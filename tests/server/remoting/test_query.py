"""Queries for single messages: by key, by unique id, by log offset."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from metaq.protocol.ids import decode_offset_id
from metaq.protocol.record import decode_record
from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.protocol.remoting.headers import Int32, QueryMessage, encode_header
from tests.support.broker import BrokerProcess
from tests.support.messages import records, send, send_header, sent
from tests.support.remoting import RemotingClient

TOPIC: Final = "findable"
EVER: Final = (1 << 63) - 1


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path / "data") as process:
        yield process


@pytest.fixture
def client(broker: BrokerProcess) -> Iterator[RemotingClient]:
    with RemotingClient(broker.host, broker.port) as connection:
        yield connection


def query(client: RemotingClient, key: str, begin: int = 0, end: int = EVER, most: int = 32, **more: str) -> RemotingCommand:
    header = encode_header(QueryMessage(TOPIC, key, Int32(most), begin, end))
    return client.call(Request.QUERY_MESSAGE, header | more)


def bodies(answer: RemotingCommand) -> list[bytes]:
    """Return the bodies in an answer that must have found something."""
    assert answer.code == Response.SUCCESS, answer.remark
    found, at = [], 0
    while at < len(answer.body):
        record = decode_record(answer.body[at:])
        found.append(bytes(record.body))
        at += record.size
    return found


def put(client: RemotingClient, body: bytes, pairs: str, topic: str = TOPIC) -> dict[str, str]:
    return sent(client, send(client, send_header(topic, pairs), body))


def test_messages_are_found_by_key(broker: BrokerProcess) -> None:
    """SG-132: by each of their keys and their topic, the newest first; also after a kill."""
    with RemotingClient(broker.host, broker.port) as client:
        put(client, b"1", "KEYS\x01red green\x02UNIQ_KEY\x01U1\x02")
        put(client, b"2", "KEYS\x01green\x02UNIQ_KEY\x01U2\x02")
        put(client, b"3", "KEYS\x01green\x02", topic="other")
    for _ in range(2):
        with RemotingClient(broker.host, broker.port) as client:
            assert bodies(query(client, "red")) == [b"1"]
            answer = query(client, "green")
            assert bodies(answer) == [b"2", b"1"]
            assert int(answer.fields["indexLastUpdateTimestamp"]) > 0
            assert int(answer.fields["indexLastUpdatePhyoffset"]) > 0
            assert bodies(query(client, "U2", _UNIQUE_KEY_QUERY="true")) == [b"2"]
        broker.restart()


def test_the_time_of_a_query_is_that_of_storing(client: RemotingClient) -> None:
    """SG-132, P23: both ends count; a unique id is found whatever time the client guesses from it."""
    put(client, b"x", "KEYS\x01k\x02UNIQ_KEY\x01U\x02")
    (record,) = records(client, TOPIC)
    stored = record.store_ms
    assert bodies(query(client, "k", stored, stored)) == [b"x"]
    for begin, end in ((0, stored - 1), (stored + 1, EVER)):
        assert query(client, "k", begin, end).code == Response.QUERY_NOT_FOUND
        assert bodies(query(client, "U", begin, end, _UNIQUE_KEY_QUERY="true")) == [b"x"]
    nothing = query(client, "nothing")
    assert nothing.code == Response.QUERY_NOT_FOUND
    assert "'nothing'" in (nothing.remark or "")


def test_a_query_has_an_end(client: RemotingClient) -> None:
    """SG-132: as many as are asked for, and never more than 64."""
    for number in range(70):
        put(client, b"%d" % number, "KEYS\x01k\x02")
    assert len(bodies(query(client, "k", most=3))) == 3
    assert len(bodies(query(client, "k", most=1000))) == 64


def test_a_message_is_found_by_its_id(client: RemotingClient) -> None:
    """RD-106: the id says where the message is; where none begins, there is none."""
    place = put(client, b"here", "KEYS\x01k\x02")
    offset = decode_offset_id(place["msgId"]).log_offset
    answer = client.call(Request.VIEW_MESSAGE_BY_ID, {"offset": str(offset)})
    assert bodies(answer) == [b"here"]
    for wrong in (offset + 1, offset - 1, offset + 1_000_000_000, -1):
        answer = client.call(Request.VIEW_MESSAGE_BY_ID, {"offset": str(wrong)})
        assert answer.code == Response.SYSTEM_ERROR
        assert answer.remark == f"there is no message at the log offset {wrong}"

"""Checks before a message of a RocketMQ client is stored, and what is counted."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from metaq.protocol.remoting.codes import COMPACT, Request, Response
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.protocol.remoting.headers import CreateTopic, Int32, encode_header, with_letters
from tests.support.broker import BrokerProcess
from tests.support.messages import records, send, send_header, sent
from tests.support.remoting import RemotingClient

SEND_CODES: Final = (Request.SEND_MESSAGE, Request.SEND_MESSAGE_V2)


@pytest.fixture
def client(tmp_path: Path) -> Iterator[RemotingClient]:
    with BrokerProcess(tmp_path / "data") as broker, RemotingClient(broker.host, broker.port) as connection:
        yield connection


def create(client: RemotingClient, topic: str, permission: int) -> None:
    header = CreateTopic(topic, "TBW102", Int32(2), Int32(2), Int32(permission))
    assert client.call(Request.UPDATE_AND_CREATE_TOPIC, encode_header(header)).code == Response.SUCCESS


def try_send(client: RemotingClient, topic: str, *, partition: int = 0, template: str = "TBW102") -> RemotingCommand:
    header = send_header(topic, partition=partition)._replace(default_topic=template)
    return client.response(send(client, header, b"x"))


def test_a_send_is_checked(client: RemotingClient) -> None:
    """SG-076: the topic's permission, its partitions, its name, and whether it may be made."""
    create(client, "closed", 4)
    create(client, "open", 6)
    assert try_send(client, "closed").code == Response.NO_PERMISSION
    assert try_send(client, "open", partition=2).code == Response.SYSTEM_ERROR
    assert try_send(client, "SCHEDULE_TOPIC_XXXX").code == Response.NO_PERMISSION
    assert try_send(client, "new", template="open").code == Response.TOPIC_NOT_EXIST
    assert try_send(client, "no blanks").code == Response.SYSTEM_ERROR
    assert try_send(client, "open", partition=1).code == Response.SUCCESS
    assert 0 <= int(sent(client, send(client, send_header("open", partition=-1), b"anywhere"))["queueId"]) < 2


@pytest.mark.parametrize("serialization", [0, COMPACT])
@pytest.mark.parametrize("code", SEND_CODES)
def test_a_send_is_stored_and_answered_with_its_place(client: RemotingClient, code: int, serialization: int) -> None:
    """SG-057, SG-076: by names and by letters, in both serializations; what was sent stands in the record."""
    fields = encode_header(send_header("made", "KEYS\x01k\x02WAIT\x01false\x02", partition=3, flag=-7))
    if code == Request.SEND_MESSAGE_V2:
        fields = with_letters(fields)
    for ordinal in range(2):
        answer = client.call(code, fields, b"hello", serialization=serialization)
        assert answer.code == Response.SUCCESS, answer.remark
        assert (answer.fields["queueId"], answer.fields["queueOffset"]) == ("3", str(ordinal))
    first, second = records(client, "made", 3)
    assert (bytes(first.body), first.flag, first.properties) == (b"hello", -7, b"KEYS\x01k\x02")
    assert answer.fields["msgId"] == f"{second.store_host.hex().upper()}{second.log_offset:016X}"
    where = f"{'.'.join(map(str, first.born_host[:4]))}:{int.from_bytes(first.born_host[4:])}"
    assert where == "{}:{}".format(*client.local_address)


def test_what_is_sent_one_way_is_stored_without_an_answer(client: RemotingClient) -> None:
    """SG-076, RD-022: the answer that comes next belongs to the request behind it."""
    fields = with_letters(encode_header(send_header("quiet")))
    quiet = [client.send(Request.SEND_MESSAGE_V2, fields, b"%d" % number, oneway=True) for number in range(3)]
    place = sent(client, send(client, send_header("quiet"), b"last"))
    assert place["queueOffset"] == "3"
    assert not any(client.answered(opaque) for opaque in quiet)

"""Request-reply: the requester gets the reply pushed, the replier gets a result, and replies are stored."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from metaq.protocol.properties import parse
from metaq.protocol.remoting.codes import COMPACT, JSON, Request, Response
from metaq.protocol.remoting.frames import RemotingCommand, encode_response
from metaq.protocol.remoting.headers import PushReply, SendMessage, decode_header, encode_header
from tests.support.broker import BrokerProcess
from tests.support.messages import BORN_MS, pairs_of, records, send, send_header, sent
from tests.support.remoting import RemotingClient

REPLIES: Final = "DefaultCluster_REPLY_TOPIC"
REQUESTER: Final = "10.0.0.9@asks"
PAIRS: Final = f"MSG_TYPE\x01reply\x02CORRELATION_ID\x01c1\x02REPLY_TO_CLIENT\x01{REQUESTER}\x02TTL\x013000\x02"


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path / "data") as process:
        yield process


def connect_requester(broker: BrokerProcess, serialization: int = JSON) -> RemotingClient:
    """A client that the broker knows as a producer."""
    client = RemotingClient(broker.host, broker.port)
    beat = {"clientID": REQUESTER, "producerDataSet": [{"groupName": "asks"}], "consumerDataSet": []}
    assert client.call(Request.HEART_BEAT, body=json.dumps(beat).encode(), serialization=serialization).code == Response.SUCCESS
    return client


def reply_header() -> SendMessage:
    return send_header(REPLIES, PAIRS)._replace(producer_group="answers")


def answer_push(client: RemotingClient, push: RemotingCommand, code: int = 0, remark: str | None = None) -> None:
    client.send_bytes(encode_response(push, code, {}, remark))


@pytest.mark.parametrize("serialization", [JSON, COMPACT])
@pytest.mark.parametrize("code", [Request.SEND_REPLY_MESSAGE, Request.SEND_REPLY_MESSAGE_V2])
def test_a_reply_is_pushed_to_whoever_waits_for_it(broker: BrokerProcess, code: int, serialization: int) -> None:
    """SG-004: Go replies with 324 and names, Java with 325 and letters; the requester gets 326 and has to answer it."""
    with connect_requester(broker, serialization) as requester, RemotingClient(broker.host, broker.port) as replier:
        if code == Request.SEND_REPLY_MESSAGE:
            opaque = replier.send(code, encode_header(reply_header()), b"42")
        else:
            opaque = send(replier, reply_header(), b"42", code)
        push = requester.request(Request.PUSH_REPLY_MESSAGE_TO_CLIENT)
        assert (push.body, push.serialization, push.is_oneway) == (b"42", serialization, False)
        header = decode_header(PushReply, push.fields)
        assert (header.producer_group, header.topic, header.born_timestamp) == ("answers", REPLIES, BORN_MS)
        assert header.born_host == "{}:{}".format(*replier.local_address)
        assert header.store_host == f"127.0.0.1:{broker.port}"
        pairs = parse(header.properties or "")
        assert int(pairs.pop("PUSH_REPLY_TIME")) == header.store_timestamp
        assert pairs == parse(PAIRS)
        assert records(replier, REPLIES) == []
        assert not replier.answered(opaque)
        answer_push(requester, push)
        place = sent(replier, opaque)
        (kept,) = records(replier, REPLIES)
        assert (bytes(kept.body), pairs_of(kept)) == (b"42", parse(PAIRS))
        assert place["msgId"] == f"{kept.store_host.hex().upper()}{kept.log_offset:016X}"
        assert (place["queueId"], place["queueOffset"]) == ("0", "0")


def test_a_reply_that_nobody_takes_is_told_and_kept(broker: BrokerProcess) -> None:
    """SG-004: the requester is not there, refuses, or goes away: 1 and the reason; the reply can still be found."""
    with RemotingClient(broker.host, broker.port) as replier:
        answer = replier.response(send(replier, reply_header(), b"1", Request.SEND_REPLY_MESSAGE_V2))
        assert answer.code == Response.SYSTEM_ERROR
        assert f"{REQUESTER!r} is not connected" in (answer.remark or "")
        with connect_requester(broker) as requester:
            opaque = send(replier, reply_header(), b"2", Request.SEND_REPLY_MESSAGE_V2)
            answer_push(requester, requester.request(Request.PUSH_REPLY_MESSAGE_TO_CLIENT), 1, "no such request")
            answer = replier.response(opaque)
            assert answer.code == Response.SYSTEM_ERROR
            assert (answer.remark or "").endswith("refused the reply with 1: no such request")
            opaque = send(replier, reply_header(), b"3", Request.SEND_REPLY_MESSAGE_V2)
            requester.request(Request.PUSH_REPLY_MESSAGE_TO_CLIENT)
        answer = replier.response(opaque)
        assert answer.code == Response.SYSTEM_ERROR
        assert (answer.remark or "").endswith("did not take the reply")
        assert [bytes(record.body) for record in records(replier, REPLIES)] == [b"1", b"2", b"3"]


def test_replies_need_not_be_kept(tmp_path: Path) -> None:
    """SG-004: without store_replies a reply is handed on, and its id is 0."""
    with (
        BrokerProcess(tmp_path / "data", "--no-store-replies") as broker,
        connect_requester(broker) as requester,
        RemotingClient(broker.host, broker.port) as replier,
    ):
        opaque = send(replier, reply_header(), b"42", Request.SEND_REPLY_MESSAGE_V2)
        answer_push(requester, requester.request(Request.PUSH_REPLY_MESSAGE_TO_CLIENT))
        place = sent(replier, opaque)
        assert (place["msgId"], place["queueId"], place["queueOffset"]) == ("0", "0", "0")
        assert records(replier, REPLIES) == []

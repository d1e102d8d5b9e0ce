"""Delayed messages: when they come, in which order, with which fields, and exactly once through kills."""

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from metaq.protocol.codes import COMPACT, Request, Response
from metaq.protocol.fastjson import decode
from metaq.protocol.properties import parse
from metaq.protocol.record import Record, decode_record
from tests.support.broker import BrokerProcess, wait_until
from tests.support.remoting import RemotingClient

DEADLINE_S: Final = 60.0
TOPIC: Final = "later"


def send(client: RemotingClient, body: bytes, pairs: str, *, topic: str = TOPIC, partition: int = 0, flag: int = 0) -> int:
    """Send without waiting for the answer."""
    fields = {
        **{"a": "pg", "b": topic, "c": "TBW102", "d": "4", "e": str(partition), "f": "0", "g": "1700000000000"},
        **{"h": str(flag), "i": pairs, "j": "0", "k": "false", "m": "false"},
    }
    return client.send(Request.SEND_MESSAGE_V2, fields, body)


def sent(client: RemotingClient, opaque: int) -> dict[str, str]:
    answer = client.response(opaque)
    assert answer.code == Response.SUCCESS, answer.remark
    return answer.fields


def records(client: RemotingClient, topic: str, partition: int = 0, *, wait_ms: int = 0) -> list[Record]:
    """All messages of a partition."""
    found: list[Record] = []
    while True:
        fields = {
            **{"consumerGroup": "cg", "topic": topic, "queueId": str(partition), "queueOffset": str(len(found))},
            **{"maxMsgNums": "1000", "sysFlag": "6", "commitOffset": "0", "suspendTimeoutMillis": str(wait_ms)},
            **{"subscription": "*", "subVersion": "0", "expressionType": "TAG"},
        }
        answer = client.call(Request.PULL_MESSAGE, fields)
        if answer.code in (Response.PULL_NOT_FOUND, Response.TOPIC_NOT_EXIST):
            return found
        assert answer.code == Response.SUCCESS, answer
        at = 0
        while at < len(answer.body):
            record = decode_record(answer.body[at:])
            found.append(record)
            at += record.size


def pairs_of(record: Record) -> dict[str, str]:
    return parse(record.properties.decode())


def test_a_delayed_message_comes_in_its_time_as_it_was_sent(tmp_path: Path) -> None:
    """SG-058 level 1 and 2: the copy is the message sent, delivered to its partition when its level says, and not before."""
    with BrokerProcess(tmp_path / "data") as broker, RemotingClient(broker.host, broker.port) as client:
        asked = time.time() * 1000
        fields = sent(client, send(client, b"five", "DELAY\x012\x02TAGS\x01t\x02KEYS\x01k\x02", partition=3, flag=7))
        assert fields["queueId"] == "3"
        sent(client, send(client, b"one", "DELAY\x011\x02WAIT\x01true", partition=3))
        sent(client, send(client, b"now", "", partition=3))
        wait_until(lambda: len(records(client, TOPIC, 3)) == 3, DEADLINE_S, "all three are there")
        now, one, five = records(client, TOPIC, 3)
        assert [bytes(record.body) for record in (now, one, five)] == [b"now", b"one", b"five"]
        assert one.store_ms >= asked + 1000
        assert five.store_ms >= asked + 5000
        kept = pairs_of(five)
        assert kept.pop("METAQ_SCHEDULED") == "2:0"
        assert kept == {"DELAY": "2", "TAGS": "t", "KEYS": "k", "REAL_TOPIC": TOPIC, "REAL_QID": "3"}
        assert (five.flag, five.born_ms, five.reconsume_times, five.partition) == (7, 1700000000000, 0, 3)
        assert five.born_host == now.born_host
        offsets = client.call(Request.GET_ALL_DELAY_OFFSET, serialization=COMPACT)
        assert decode(offsets.body) == {"offsetTable": {1: 1, 2: 1}}

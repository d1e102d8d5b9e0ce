"""The memory and the time without a break that one client can take are limited; the next request is answered as usual."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from metaq.protocol.remoting import fastjson
from metaq.protocol.remoting.codes import COMPACT, Request, Response
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.protocol.remoting.headers import Int32, KvPair, QueryMessage, encode_header
from tests.support.admin import ask, ask_body, connect, create_topic, fields_of, records, send
from tests.support.broker import BrokerProcess
from tests.support.consumer import Consumer, subscription
from tests.support.remoting import RemotingClient

MIB: Final = 1 << 20
TOPIC: Final = "T"


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path / "data") as process:
        yield process


@pytest.fixture
def client(broker: BrokerProcess) -> Iterator[RemotingClient]:
    with connect(broker) as connection:
        yield connection


def test_an_answer_to_a_query_fits_into_a_frame(client: RemotingClient) -> None:
    """SG-132: the newest messages with the key, as many as clients can take in one answer, and always one."""
    create_topic(client, TOPIC)
    send(client, TOPIC, *[bytes([number]) * (3 * MIB) for number in range(7)], pairs="KEYS\x01large\x02")
    header = QueryMessage(TOPIC, "large", Int32(32), 0, (1 << 63) - 1)
    answer = ask(client, Request.QUERY_MESSAGE, **encode_header(header))
    assert [bytes(record.body)[0] for record in records(answer)] == [6]
    create_topic(client, "U")
    send(client, "U", *[bytes([number]) * (MIB // 2) for number in range(20)], pairs="KEYS\x01large\x02")
    answer = ask(client, Request.QUERY_MESSAGE, **encode_header(header._replace(topic="U")))
    assert [bytes(record.body)[0] for record in records(answer)] == [19, 18, 17, 16, 15, 14, 13]


def test_a_heartbeat_that_never_ends(client: RemotingClient) -> None:
    """SG-087: 60,000 producer groups are no client, and neither are they one after the other."""

    def beat(groups: range) -> RemotingCommand:
        content = {"clientID": "c@1", "producerDataSet": [{"groupName": f"producer-{number}"} for number in groups]}
        return client.call(Request.HEART_BEAT, {}, json.dumps(content).encode())

    for groups, reason in ((range(60_000), "is over the limit of 262144"), (range(257), "are more than 256")):
        refused = beat(groups)
        assert (refused.code, reason in (refused.remark or "")) == (Response.SYSTEM_ERROR, True), refused
    assert client.call(Request.GET_ALL_PRODUCER_INFO).body == b'{"data":{}}'
    assert beat(range(200)).code == Response.SUCCESS
    refused = beat(range(150, 300))
    assert (refused.code, "at most in 256" in (refused.remark or "")) == (Response.SYSTEM_ERROR, True), refused


def test_a_group_with_more_retry_queues_than_a_topic_can_have(broker: BrokerProcess, client: RemotingClient) -> None:
    """SG-074: is refused when it is made, and not when its consumers come."""
    wanted = {"groupName": "g", "retryQueueNums": 1025}
    refused = client.call(Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, {}, json.dumps(wanted).encode())
    assert (refused.code, "retryQueueNums is 1025" in (refused.remark or "")) == (Response.SYSTEM_ERROR, True), refused
    ask(client, Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, json.dumps({**wanted, "retryQueueNums": 1024}).encode())
    with Consumer(broker, "g") as consumer:
        consumer.beat(subscription(TOPIC))
        assert consumer.offset("%RETRY%g", 1023) == 0


def sql_pull(client: RemotingClient, expression: str, offset: int = 0) -> RemotingCommand:
    place = fields_of(consumerGroup="g", topic=TOPIC, queueId=0, queueOffset=offset, commitOffset=0, subVersion=0)
    wanted = fields_of(maxMsgNums=32, sysFlag=4, suspendTimeoutMillis=0, subscription=expression, expressionType="SQL92")
    return client.call(Request.PULL_MESSAGE, {**place, **wanted})


def test_filters_that_take_long(client: RemotingClient) -> None:
    """RD-102: the longer the expression, and the longer the messages, the fewer of them one pull looks at."""
    create_topic(client, TOPIC)
    send(client, TOPIC, *[b"x"] * 900)
    seen = {}
    for terms in (1, 580):  # far apart: how many messages of each are looked at is a matter of this processor
        answer = sql_pull(client, " OR ".join(["a = 1"] * terms)[:4096].removesuffix(" O").removesuffix(" OR"))
        assert answer.code == Response.PULL_RETRY_IMMEDIATELY
        seen[terms] = int(answer.fields["nextBeginOffset"])
    assert 800 >= seen[1] > seen[580] > 1
    ask(client, Request.DELETE_TOPIC_IN_BROKER, topic=TOPIC)
    create_topic(client, TOPIC)
    send(client, TOPIC, *[bytes(MIB)] * 8)
    answer = sql_pull(client, "a = 1", offset=900)
    assert answer.code == Response.PULL_RETRY_IMMEDIATELY
    assert int(answer.fields["nextBeginOffset"]) == 903


class Controlled(BrokerProcess):
    """A broker whose syncs a test controls."""

    program = ("tests.support.controlled",)


def test_changes_of_keys_that_wait_for_the_disk(tmp_path: Path) -> None:
    """SG-103: so many and no more; those that were taken are made when the disk answers again."""
    with Controlled(tmp_path / "data") as broker:
        host, _, port = broker.registry.rpartition(":")
        with RemotingClient(host, int(port)) as client:
            (tmp_path / "stall").touch()
            asked = [
                client.send(Request.PUT_KV_CONFIG, encode_header(KvPair("N", f"k{number}", "v")), serialization=COMPACT)
                for number in range(300)
            ]
            busy = [client.response(opaque).code for opaque in asked[-44:]]
            assert busy == [Response.SYSTEM_BUSY] * 44
            (tmp_path / "stall").unlink()
            assert [client.response(opaque).code for opaque in asked[:-44]] == [Response.SUCCESS] * 256
            table = fastjson.decode(ask(client, Request.GET_KVLIST_BY_NAMESPACE, namespace="N").body)["table"]
            assert len(table) == 256


def test_clients_of_ipv4_on_a_listener_of_ipv6(tmp_path: Path) -> None:
    """SG-087: have the address that they have."""
    flags = ("--allow-public", "--advertise", "127.0.0.1:1")
    with (
        BrokerProcess(tmp_path / "data", *flags, listen="[::]:0") as broker,
        RemotingClient("127.0.0.1", broker.port) as client,
    ):
        beat = {"clientID": "c@1", "producerDataSet": [{"groupName": "p"}]}
        ask(client, Request.HEART_BEAT, json.dumps(beat).encode())
        (connection,) = ask_body(client, Request.GET_PRODUCER_CONNECTION_LIST, producerGroup="p")["connectionSet"]
        assert connection["clientAddr"] == "{}:{}".format(*client.local_address)

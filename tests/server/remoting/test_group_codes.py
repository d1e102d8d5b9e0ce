"""Groups, their members and their offsets by command: what each request does, and when it is refused."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from metaq.message import MessageQueue
from metaq.protocol.remoting import fastjson
from metaq.protocol.remoting.adminbodies import decode_offsets, encode_places
from metaq.protocol.remoting.codes import COMPACT, JSON, Request, Response
from metaq.protocol.remoting.frames import RemotingCommand, encode_response
from tests.support.admin import Refused, ask, ask_body, connect, create_topic, pull, queue, records, send
from tests.support.broker import BrokerProcess
from tests.support.remoting import RemotingClient

TOPIC = "consumed"


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path_factory.mktemp("broker") / "data") as broker, connect(broker) as client:
        create_topic(client, TOPIC, write=2, read=2)
        send(client, TOPIC, b"0", b"1", b"2", b"3", pairs="TAGS\x01TagA")
        yield broker


@pytest.fixture
def client(broker: BrokerProcess) -> Iterator[RemotingClient]:
    with connect(broker) as client:
        yield client


def beat(client: RemotingClient, group: str, client_id: str, *topics: str, expression: str = "*", version: int = 1) -> None:
    """Be a consumer of the group, and a producer of one of the same name."""
    subscriptions = [
        {"topic": topic, "subString": expression, "subVersion": version, "expressionType": "TAG"} for topic in topics
    ]
    consumer: dict[str, Any] = {"groupName": group, "consumeType": "CONSUME_PASSIVELY", "messageModel": "CLUSTERING"}
    consumer |= {"consumeFromWhere": "CONSUME_FROM_FIRST_OFFSET", "subscriptionDataSet": subscriptions}
    body = {"clientID": client_id, "consumerDataSet": [consumer], "producerDataSet": [{"groupName": group}]}
    ask(client, Request.HEART_BEAT, fastjson.encode(body))


def commit(client: RemotingClient, group: str, offset: int, *, topic: str = TOPIC, partition: int = 0) -> None:
    fields: dict[str, Any] = {"consumerGroup": group, "topic": topic, "queueId": partition, "commitOffset": offset}
    ask(client, Request.UPDATE_CONSUMER_OFFSET, **fields)


def committed(client: RemotingClient, group: str, *, topic: str = TOPIC, partition: int = 0) -> int:
    answer = ask(client, Request.QUERY_CONSUMER_OFFSET, consumerGroup=group, topic=topic, queueId=partition)
    return int(answer.fields["offset"])


def answer_to(client: RemotingClient, request: RemotingCommand, body: bytes, code: int = 0, remark: str = "") -> None:
    """Answer a request of the broker as a client does."""
    client.send_bytes(encode_response(request, code, {"from": "client"}, remark, len(body)) + body)


def refuses(code: int, client: RemotingClient, request: int, /, **fields: object) -> str:
    """The remark of a refusal with this code."""
    with pytest.raises(Refused) as refused:
        ask(client, request, **fields)
    assert refused.value.code == code
    return refused.value.remark


def put_group(client: RemotingClient, **row: object) -> None:
    ask(client, Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, fastjson.encode(row))


# -- groups -----------------------------------------------------------------------------------------------------------


def test_group_is_made_shown_and_deleted(client: RemotingClient) -> None:
    """SG-070, SG-069: 200 makes and changes, 352 and 201 show, 207 deletes."""
    put_group(client, groupName="made", retryMaxTimes=3, consumeEnable=False, retryQueueNums=2, brokerId=0)
    row = ask_body(client, Request.GET_SUBSCRIPTIONGROUP_CONFIG, group="made")
    assert (row["retryMaxTimes"], row["consumeEnable"], row["retryQueueNums"]) == (3, False, 2)
    assert (row["consumeFromMinEnable"], row["consumeBroadcastEnable"], row["whichBrokerWhenConsumeSlowly"]) == (True, True, 1)
    put_group(client, groupName="made", retryMaxTimes=4)
    table = ask_body(client, Request.GET_ALL_SUBSCRIPTIONGROUP_CONFIG)
    assert table["subscriptionGroupTable"]["made"]["retryMaxTimes"] == 4
    assert table["dataVersion"]["counter"] > 0  # SG-063
    ask(client, Request.DELETE_SUBSCRIPTIONGROUP, groupName="made")
    refuses(Response.SUBSCRIPTION_GROUP_NOT_EXIST, client, Request.GET_SUBSCRIPTIONGROUP_CONFIG, group="made")


def test_group_refused(client: RemotingClient) -> None:
    """SG-070: bad names, bad values, no group at all; the broker's own groups are not deleted."""
    for body in (b"", b"[]", b"{}", b'{"groupName":"no such*name"}', b'{"groupName":"x","retryMaxTimes":"3"}'):
        with pytest.raises(Refused) as refused:
            ask(client, Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body)
        assert refused.value.code == Response.SYSTEM_ERROR
        assert refused.value.remark
    assert "belongs to the broker" in refuses(1, client, Request.DELETE_SUBSCRIPTIONGROUP, groupName="TOOLS_CONSUMER")


@pytest.mark.parametrize("field", ["removeOffset", "cleanOffset"])
def test_offsets_go_with_a_group(client: RemotingClient, field: str) -> None:
    """SG-067: 207 of 4.9 and of 5.x tools."""
    group = f"leaving-{field}"
    commit(client, group, 3)
    ask(client, Request.DELETE_SUBSCRIPTIONGROUP, groupName=group)
    assert committed(client, group) == 3
    ask(client, Request.DELETE_SUBSCRIPTIONGROUP, groupName=group, **{field: True})
    assert committed(client, group) == 0


def test_group_survives_a_kill(tmp_path: Path) -> None:
    """SG-069, SG-070: what 200 confirmed is there after a kill -9."""
    with BrokerProcess(tmp_path / "data") as broker:
        with connect(broker) as client:
            put_group(client, groupName="durable", retryMaxTimes=5)
        broker.restart()
        with connect(broker) as client:
            assert ask_body(client, Request.GET_SUBSCRIPTIONGROUP_CONFIG, group="durable")["retryMaxTimes"] == 5


# -- connections ------------------------------------------------------------------------------------------------------


def test_connections(broker: BrokerProcess, client: RemotingClient) -> None:
    """SG-087, SG-088: 203 shows consumers and what they want, 204 and 328 producers, with addresses and versions."""
    with connect(broker, language="GO") as other:
        beat(client, "connected", "one@1", TOPIC)
        beat(other, "connected", "two@2", TOPIC)
        shown = ask_body(client, Request.GET_CONSUMER_CONNECTION_LIST, consumerGroup="connected")
        rows = {row["clientId"]: row for row in shown["connectionSet"]}
        host, port = other.local_address
        assert rows["two@2"] == {"clientAddr": f"{host}:{port}", "clientId": "two@2", "language": "GO", "version": 409}
        assert rows["one@1"]["language"] == "JAVA"
        assert (shown["consumeType"], shown["messageModel"]) == ("CONSUME_PASSIVELY", "CLUSTERING")
        assert shown["consumeFromWhere"] == "CONSUME_FROM_FIRST_OFFSET"
        assert shown["subscriptionTable"][TOPIC]["subString"] == "*"
        producers = ask_body(client, Request.GET_PRODUCER_CONNECTION_LIST, producerGroup="connected")["connectionSet"]
        assert {row["clientId"] for row in producers} == {"one@1", "two@2"}
        rows = {row["clientId"]: row for row in ask_body(client, Request.GET_ALL_PRODUCER_INFO)["data"]["connected"]}
        assert rows["two@2"]["remoteIP"] == f"/{host}:{port}"
        assert rows["two@2"]["lastUpdateTimestamp"] > 1_700_000_000_000


def test_nobody_connected(client: RemotingClient) -> None:
    """SG-088: 203 answers 206, 204 answers 1."""
    refuses(Response.CONSUMER_NOT_ONLINE, client, Request.GET_CONSUMER_CONNECTION_LIST, consumerGroup="nobody")
    refuses(Response.SYSTEM_ERROR, client, Request.GET_PRODUCER_CONNECTION_LIST, producerGroup="nobody")
    refuses(Response.SYSTEM_ERROR, client, Request.GET_PRODUCER_CONNECTION_LIST)


def test_who_consumes_what(client: RemotingClient) -> None:
    """SG-132, SG-088: 300, 343 and 345 know the groups that are connected, and those that have offsets."""
    create_topic(client, "looked-at")
    beat(client, "subscribed", "one@1", "looked-at", expression="TagA")
    commit(client, "was-here", 0, topic="looked-at")
    groups = ask_body(client, Request.QUERY_TOPIC_CONSUME_BY_WHO, topic="looked-at")["groupList"]
    assert groups == ["subscribed", "was-here"]
    assert ask_body(client, Request.QUERY_TOPIC_CONSUME_BY_WHO, topic="nowhere")["groupList"] == []
    assert ask_body(client, Request.QUERY_TOPICS_BY_CONSUMER, group="was-here")["topicList"] == ["looked-at"]
    assert ask_body(client, Request.QUERY_TOPICS_BY_CONSUMER, group="subscribed")["topicList"] == ["looked-at"]
    found = ask_body(client, Request.QUERY_SUBSCRIPTION_BY_CONSUMER, group="subscribed", topic="looked-at")
    assert found["subscriptionData"]["tagsSet"] == ["TagA"]
    absent = ask_body(client, Request.QUERY_SUBSCRIPTION_BY_CONSUMER, group="was-here", topic="looked-at")
    assert "subscriptionData" not in absent
    refuses(Response.SYSTEM_ERROR, client, Request.QUERY_TOPICS_BY_CONSUMER)


# -- how far a group is -----------------------------------------------------------------------------------------------


def test_consume_stats(client: RemotingClient) -> None:
    """SG-086, SG-088: 208 says how far a group is in each partition; of topics it was in, or in the one asked for."""
    commit(client, "progressing", 3)
    newest = records(pull(client, TOPIC, 2))[0].store_ms
    stats = ask_body(client, Request.GET_CONSUME_STATS, consumerGroup="progressing")
    assert stats["offsetTable"] == {
        queue(TOPIC, 0): {"brokerOffset": 4, "consumerOffset": 3, "lastTimestamp": newest, "pullOffset": 3},
        queue(TOPIC, 1): {"brokerOffset": 0, "consumerOffset": 0, "lastTimestamp": 0, "pullOffset": 0},
    }
    assert stats["consumeTps"] == 0.0
    assert ask_body(client, Request.GET_CONSUME_STATS, consumerGroup="progressing", topic="nowhere")["offsetTable"] == {}
    assert ask_body(client, Request.GET_CONSUME_STATS, consumerGroup="nobody")["offsetTable"] == {}
    refuses(Response.SYSTEM_ERROR, client, Request.GET_CONSUME_STATS)


def test_left_topics_are_no_lag(client: RemotingClient) -> None:
    """SG-088: what a connected group no longer subscribes to is not shown as behind."""
    create_topic(client, "left")
    commit(client, "moving-on", 0, topic="left")
    beat(client, "moving-on", "one@1", TOPIC)
    table = ask_body(client, Request.GET_CONSUME_STATS, consumerGroup="moving-on")["offsetTable"]
    assert {key.topic for key in table} == {TOPIC}


def test_time_spans(client: RemotingClient) -> None:
    """SG-086: 303 says between which times a partition's messages were stored, and how long the next one waits."""
    commit(client, "timed", 1)
    first, *_, last = (record.store_ms for record in records(pull(client, TOPIC, 0)))
    spans = ask_body(client, Request.QUERY_CONSUME_TIME_SPAN, topic=TOPIC, group="timed")["consumeTimeSpanSet"]
    span = next(row for row in spans if row["messageQueue"] == {"brokerName": "metaq", "queueId": 0, "topic": TOPIC})
    assert (span["minTimeStamp"], span["maxTimeStamp"], span["consumeTimeStamp"]) == (first, last, first)
    assert span["delayTime"] >= 0
    assert len(spans) == 2
    refuses(Response.TOPIC_NOT_EXIST, client, Request.QUERY_CONSUME_TIME_SPAN, topic="nowhere", group="timed")


def test_all_consume_stats(client: RemotingClient) -> None:
    """SG-088: 317 has every group with progress, and how far all are behind together."""
    commit(client, "behind", 1)
    stats = ask_body(client, Request.GET_BROKER_CONSUME_STATS, isOrder=False)
    rows = {group: one for row in stats["consumeStatsList"] for group, one in row.items()}
    [mine] = rows["behind"]
    assert mine["offsetTable"][queue(TOPIC, 0)]["brokerOffset"] == 4
    assert stats["totalDiff"] >= 3
    assert stats["brokerAddr"].startswith("127.0.0.1:")
    assert ask_body(client, Request.GET_BROKER_CONSUME_STATS, isOrder=True)["consumeStatsList"] == []


def test_corrections(client: RemotingClient) -> None:
    """SG-067: 308 compares a group with the slowest of the others."""
    create_topic(client, "compared")
    send(client, "compared", *(b"x",) * 5)
    for group, offset in (("slow", 1), ("middle", 3), ("fast", 5)):
        commit(client, group, offset, topic="compared")
    beyond = (1 << 63) - 1

    def corrected(compared: str, left_out: str = "") -> dict[int, int]:
        fields = {"compareGroup": compared, "topic": "compared", "filterGroups": left_out}
        offsets: dict[int, int] = ask_body(client, Request.QUERY_CORRECTION_OFFSET, **fields)["correctionOffsets"]
        return offsets

    assert corrected("fast") == {0: 1}
    assert corrected("fast", "slow") == {0: 3}
    assert corrected("slow", "slow") == {0: beyond}
    assert corrected("nobody") == {}
    refuses(Response.SYSTEM_ERROR, client, Request.QUERY_CORRECTION_OFFSET, topic="compared")


# -- moving a group ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("serialization", [JSON, COMPACT])
def test_reset(broker: BrokerProcess, client: RemotingClient, serialization: int) -> None:
    """SG-067, SG-087: 222 sets the offsets, answers them, and tells every member, in the words of its language."""
    group = f"reset-{serialization}"
    with connect(broker, language="CPP") as cpp:
        beat(client, group, "java@1", TOPIC)
        beat(cpp, group, "cpp@1", TOPIC)
        commit(client, group, 4)
        expected = {queue(TOPIC, 0): 0, queue(TOPIC, 1): 0}
        fields = {"topic": TOPIC, "group": group, "timestamp": "0", "isForce": "true"}
        answer = client.call(Request.INVOKE_BROKER_TO_RESET_OFFSET, fields, serialization=serialization)
        assert decode_offsets(answer.body) == expected
        told = client.request(Request.RESET_CONSUMER_CLIENT_OFFSET)
        assert told.is_oneway
        assert told.serialization == serialization
        assert decode_offsets(told.body) == expected
        assert told.fields == fields
        rows = fastjson.decode(cpp.request(Request.RESET_CONSUMER_CLIENT_OFFSET).body)["offsetTable"]
        assert {MessageQueue(row["topic"], row["brokerName"], row["queueId"]): row["offset"] for row in rows} == expected
        assert committed(client, group) == 0


def test_reset_to_time_end_and_offset(client: RemotingClient) -> None:
    """SG-067: by time, to the end, to an offset of one partition (5.x); without force never forward."""
    beat(client, "turned-back", "one@1", TOPIC)
    second = records(pull(client, TOPIC, 0))[1].store_ms
    at_second = next(index for index, record in enumerate(records(pull(client, TOPIC, 0))) if record.store_ms >= second)

    def reset(**fields: object) -> int:
        asked = {"topic": TOPIC, "group": "turned-back", "isForce": True, "timestamp": 0, **fields}
        answer = ask(client, Request.INVOKE_BROKER_TO_RESET_OFFSET, **asked)
        told = decode_offsets(client.request(Request.RESET_CONSUMER_CLIENT_OFFSET).body)
        assert told == decode_offsets(answer.body)
        return told[queue(TOPIC, 0)]

    assert reset(timestamp=-1) == 4
    assert reset(timestamp=second) == at_second
    assert reset(queueId=0, offset=3) == 3
    assert committed(client, "turned-back") == 3
    assert reset(timestamp=-1, isForce=False) == 3
    assert committed(client, "turned-back") == 3


def test_reset_of_several_partitions(client: RemotingClient) -> None:
    """SG-067, E-04: a body has an offset for each partition; all or none are set, and each member is told once."""
    beat(client, "spread", "one@1", TOPIC)
    fields = {"topic": TOPIC, "group": "spread", "timestamp": -1, "isForce": True, "queueId": 0, "offset": 1}
    for wrong in (
        b"[]",
        b"{",
        b'{"offsets":{}}',
        b'{"offsets":{"x":1}}',
        b'{"offsets":{"0":"1"}}',
        b'{"offsets":{-1:1}}',
        encode_places({0: 1, 2: 0}),
    ):
        with pytest.raises(Refused, match=r"JSON|partition"):
            ask(client, Request.INVOKE_BROKER_TO_RESET_OFFSET, wrong, **fields)
    with pytest.raises(Refused, match="9 is not between 0 and 0"):
        ask(client, Request.INVOKE_BROKER_TO_RESET_OFFSET, encode_places({0: 3, 1: 9}), **fields)
    assert not any(request.code == Request.RESET_CONSUMER_CLIENT_OFFSET for request in client.requests)
    answer = ask(client, Request.INVOKE_BROKER_TO_RESET_OFFSET, encode_places({0: 3, 1: 0}), **fields)
    told = client.request(Request.RESET_CONSUMER_CLIENT_OFFSET)
    assert decode_offsets(told.body) == decode_offsets(answer.body) == {queue(TOPIC, 0): 3, queue(TOPIC, 1): 0}
    assert committed(client, "spread") == 3
    ask(client, Request.INVOKE_BROKER_TO_RESET_OFFSET, b'{"offsets":{0:2,1:0}}', **fields)
    assert committed(client, "spread") == 2


def test_a_group_that_pops_needs_no_members(client: RemotingClient) -> None:
    """A-09, SG-067: 208 says what such a group was given; 222 by a client 5.x, which sends the offset -1, gives it again."""
    group = "popping"
    ask(client, Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, fastjson.encode({"groupName": group}))
    reset = {"topic": TOPIC, "group": group, "timestamp": 0, "isForce": True, "queueId": -1, "offset": -1}
    refuses(Response.CONSUMER_NOT_ONLINE, client, Request.INVOKE_BROKER_TO_RESET_OFFSET, **reset)
    mode = {"topic": TOPIC, "consumerGroup": group, "mode": "POP", "popShareQueueNum": 0}
    ask(client, Request.SET_MESSAGE_REQUEST_MODE, fastjson.encode(mode))

    def pop() -> RemotingCommand:
        times = {"invisibleTime": 60_000, "pollTime": 0, "bornTime": 0, "initMode": 0}
        return ask(client, Request.POP_MESSAGE, consumerGroup=group, topic=TOPIC, queueId=0, maxMsgNums=3, **times)

    def progress() -> tuple[int, int]:
        row = ask_body(client, Request.GET_CONSUME_STATS, consumerGroup=group, topic=TOPIC)["offsetTable"][queue(TOPIC)]
        return row["consumerOffset"], row["pullOffset"]

    first = pop().body
    assert progress() == (0, 3)
    ask(client, Request.INVOKE_BROKER_TO_RESET_OFFSET, **reset)
    assert progress() == (0, 0)
    assert pop().body == first


def test_reset_refused(broker: BrokerProcess, client: RemotingClient) -> None:
    """SG-067: nobody connected 206, unknown topic, no such partition or offset, clients too old to be told."""
    fields = {"topic": TOPIC, "timestamp": 0, "isForce": True}
    refuses(Response.CONSUMER_NOT_ONLINE, client, Request.INVOKE_BROKER_TO_RESET_OFFSET, group="nobody", **fields)
    beat(client, "refused", "one@1", TOPIC)
    for wrong in ({"topic": "nowhere"}, {"queueId": 7}, {"queueId": 0, "offset": 99}, {"offset": 1}, {"timestamp": "x"}):
        refuses(1, client, Request.INVOKE_BROKER_TO_RESET_OFFSET, group="refused", **{**fields, **wrong})
    body = {"clientID": "old@1", "consumerDataSet": [{"groupName": "too-old"}], "producerDataSet": []}
    old = b'{"code":34,"flag":0,"language":"JAVA","opaque":77,"version":27}'
    beat_body = fastjson.encode(body)
    client.send_bytes((4 + len(old) + len(beat_body)).to_bytes(4) + len(old).to_bytes(4) + old + beat_body)
    assert client.response(77).code == Response.SUCCESS
    assert "27" in refuses(1, client, Request.INVOKE_BROKER_TO_RESET_OFFSET, group="too-old", **fields)


def test_clone(client: RemotingClient) -> None:
    """SG-067: 314 sets a group where another one is, in one topic or in all."""
    create_topic(client, "second")
    send(client, "second", b"x", b"x")
    commit(client, "source", 3)
    commit(client, "source", 1, topic="second")
    ask(client, Request.CLONE_GROUP_OFFSET, srcGroup="source", destGroup="one-topic", topic=TOPIC, offline=True)
    assert committed(client, "one-topic") == 3
    ask(client, Request.CLONE_GROUP_OFFSET, srcGroup="source", destGroup="all-topics", offline=True)
    assert (committed(client, "all-topics"), committed(client, "all-topics", topic="second")) == (3, 1)
    refuses(Response.SYSTEM_ERROR, client, Request.CLONE_GROUP_OFFSET, srcGroup="source")


# -- what is in a queue -----------------------------------------------------------------------------------------------


def test_queue_entries(client: RemotingClient) -> None:
    """SG-088: 321 shows units with places, sizes and tag hashes, and which of them a group's subscription lets pass."""
    fields: dict[str, object] = {"topic": TOPIC, "queueId": 0, "index": 1, "count": 2}
    shown = ask_body(client, Request.QUERY_CONSUME_QUEUE, **fields)
    expected = records(pull(client, TOPIC, 1))[:2]
    assert (shown["minQueueIndex"], shown["maxQueueIndex"]) == (0, 4)
    rows = [(row["physicOffset"], row["physicSize"], row["tagsCode"], row["eval"]) for row in shown["queueData"]]
    assert rows == [(record.log_offset, record.size, 2598919, True) for record in expected]
    beat(client, "elsewhere", "one@1", TOPIC, expression="TagB")
    shown = ask_body(client, Request.QUERY_CONSUME_QUEUE, **fields, consumerGroup="elsewhere")
    assert [row["eval"] for row in shown["queueData"]] == [False, False]
    assert shown["subscriptionData"]["subString"] == "TagB"
    assert "not connected" in ask_body(client, Request.QUERY_CONSUME_QUEUE, **fields, consumerGroup="nobody")["filterData"]
    empty = ask_body(client, Request.QUERY_CONSUME_QUEUE, **{**fields, "queueId": 1})
    assert (empty["maxQueueIndex"], empty["queueData"]) == (0, [])
    refuses(Response.TOPIC_NOT_EXIST, client, Request.QUERY_CONSUME_QUEUE, **{**fields, "topic": "nowhere"})
    refuses(Response.SYSTEM_ERROR, client, Request.QUERY_CONSUME_QUEUE, **{**fields, "queueId": 2})
    refuses(Response.SYSTEM_ERROR, client, Request.QUERY_CONSUME_QUEUE, **{**fields, "count": 0})


# -- questions that clients answer ------------------------------------------------------------------------------------


@pytest.mark.parametrize("serialization", [JSON, COMPACT])
def test_running_info_is_relayed(broker: BrokerProcess, client: RemotingClient, serialization: int) -> None:
    """SG-087, SG-097: 307 reaches the client unchanged, and its answer comes back; other requests go on meanwhile."""
    group = f"running-{serialization}"
    with connect(broker) as consumer:
        beat(consumer, group, "one@1", TOPIC)
        fields = {"consumerGroup": group, "clientId": "one@1", "jstackEnable": "false"}
        opaque = client.send(Request.GET_CONSUMER_RUNNING_INFO, fields, serialization=serialization)
        asked = consumer.request(Request.GET_CONSUMER_RUNNING_INFO)
        assert asked.fields == fields
        assert not client.answered(opaque)
        ask(client, Request.GET_ALL_TOPIC_CONFIG)
        answer_to(consumer, asked, b'{"properties":{}}', remark="of the client")
        answer = client.response(opaque)
        assert (answer.code, answer.body, answer.remark) == (0, b'{"properties":{}}', "of the client")
        assert answer.serialization == serialization


def test_running_info_refused(broker: BrokerProcess, client: RemotingClient) -> None:
    """SG-087: 1 when the client is not connected, 207 when it goes away without an answer."""
    fields = {"consumerGroup": "not-running", "clientId": "one@1", "jstackEnable": "false"}
    refuses(Response.SYSTEM_ERROR, client, Request.GET_CONSUMER_RUNNING_INFO, **fields)
    with connect(broker) as consumer:
        beat(consumer, "not-running", "one@1", TOPIC)
        refuses(Response.SYSTEM_ERROR, client, Request.GET_CONSUMER_RUNNING_INFO, **{**fields, "clientId": "two@2"})
        opaque = client.send(Request.GET_CONSUMER_RUNNING_INFO, fields)
        consumer.request(Request.GET_CONSUMER_RUNNING_INFO)
    assert client.response(opaque).code == Response.CONSUME_MSG_TIMEOUT


def test_consumed_directly(broker: BrokerProcess, client: RemotingClient) -> None:
    """SG-132, SG-087: 309 brings one stored message to one client, and its result back."""
    message_id = send(client, "directly", b"direct").fields["msgId"]
    with connect(broker) as consumer:
        beat(consumer, "direct", "one@1", "directly")
        fields = {"consumerGroup": "direct", "clientId": "one@1", "msgId": message_id}
        opaque = client.send(Request.CONSUME_MESSAGE_DIRECTLY, fields)
        asked = consumer.request(Request.CONSUME_MESSAGE_DIRECTLY)
        assert asked.fields == {**fields, "brokerName": "metaq"}
        assert [record.body for record in records(asked)] == [b"direct"]
        answer_to(consumer, asked, b'{"consumeResult":"CR_SUCCESS"}')
        assert client.response(opaque).body == b'{"consumeResult":"CR_SUCCESS"}'
        missing = message_id[:16] + "00000000000FFFFF"
        refuses(Response.SYSTEM_ERROR, client, Request.CONSUME_MESSAGE_DIRECTLY, **{**fields, "msgId": missing})
        refuses(Response.SYSTEM_ERROR, client, Request.CONSUME_MESSAGE_DIRECTLY, **{**fields, "msgId": "nonsense"})
        del fields["clientId"]
        refuses(Response.SYSTEM_ERROR, client, Request.CONSUME_MESSAGE_DIRECTLY, **fields)


def test_status_of_all_clients(broker: BrokerProcess, client: RemotingClient) -> None:
    """SG-087: 223 asks each client of the group (221), or the one that is named; one that fails is left out."""
    with connect(broker) as one, connect(broker) as two:
        beat(one, "asked", "one@1", TOPIC)
        beat(two, "asked", "two@2", TOPIC)
        opaque = client.send(Request.INVOKE_BROKER_TO_GET_CONSUMER_STATUS, {"topic": TOPIC, "group": "asked"})
        for consumer, offset in ((one, 3), (two, 4)):
            asked = consumer.request(Request.GET_CONSUMER_STATUS_FROM_CLIENT)
            assert asked.fields == {"topic": TOPIC, "group": "asked"}
            body = fastjson.encode({"messageQueueTable": {queue(TOPIC): offset}, "consumerTable": {}})
            answer_to(consumer, asked, body)
        table = fastjson.decode(client.response(opaque).body)["consumerTable"]
        assert table == {"one@1": {queue(TOPIC): 3}, "two@2": {queue(TOPIC): 4}}
        fields = {"topic": TOPIC, "group": "asked", "clientAddr": "two@2"}
        opaque = client.send(Request.INVOKE_BROKER_TO_GET_CONSUMER_STATUS, fields)
        answer_to(two, two.request(Request.GET_CONSUMER_STATUS_FROM_CLIENT), b"", 1, "not now")
        assert fastjson.decode(client.response(opaque).body)["consumerTable"] == {}
    refuses(Response.CONSUMER_NOT_ONLINE, client, Request.INVOKE_BROKER_TO_GET_CONSUMER_STATUS, topic=TOPIC, group="nobody")

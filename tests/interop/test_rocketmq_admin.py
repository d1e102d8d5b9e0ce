"""RocketMQ's admin tool, 4.9.8, against a real broker with real clients."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from metaq.protocol.record import java_hash
from tests.interop.clients import ClientProcess, Outgoing, Sent
from tests.interop.conftest import Spawn
from tests.interop.mqadmin import AdminFailed, AdminTool, run_process
from tests.interop.scenarios import create_topic
from tests.support.broker import BrokerProcess, wait_until

pytestmark = [pytest.mark.partner("java", "mvn"), pytest.mark.timeout(900)]

WAIT_S = 120.0
CLUSTER = "DefaultCluster"
BROKER = "metaq"
TOPIC = "administered"
GROUP = "administered-consumers"
PRODUCERS = "administered-producers"
MESSAGES = 8


@pytest.fixture(scope="module")
def program(java_program: tuple[str, ...]) -> tuple[str, ...]:
    return java_program


@pytest.fixture(scope="module")
def tool(broker: BrokerProcess, spawn: Spawn, java_program: tuple[str, ...]) -> AdminTool:
    return AdminTool(spawn(java_program, broker.registry), broker.registry)


@pytest.fixture(scope="module")
def address(broker: BrokerProcess) -> str:
    return f"{broker.host}:{broker.port}"


@pytest.fixture(scope="module")
def sent(client: ClientProcess, broker: BrokerProcess) -> list[Sent]:
    """A topic with one queue, messages in it, a producer and a consumer that is done with them."""
    create_topic(client, broker, TOPIC, queues=1)
    client.start_producer("administered", PRODUCERS)
    results = [
        client.send("administered", Outgoing(TOPIC, b"body %d" % number, "TagA", [f"key{number}"]))
        for number in range(MESSAGES)
    ]
    client.start_consumer("administered", GROUP, TOPIC)
    client.wait_for_bodies("administered", [b"body %d" % number for number in range(MESSAGES)])
    return results


def eventually(tool: AdminTool, condition: Callable[[str], bool], command: str, *arguments: str) -> str:
    """Repeat the command until it succeeds and its output fulfils the condition; return that output."""
    printed: list[str] = []

    def fulfilled() -> bool:
        try:
            printed.append(tool.run(command, *arguments))
        except AdminFailed as failure:
            printed.append(str(failure))
            return False
        return condition(printed[-1])

    try:
        wait_until(fulfilled, WAIT_S, f"{command} {arguments}")
    except AssertionError:
        raise AssertionError(printed[-1]) from None
    return printed[-1]


def test_an_exception_is_a_failure(tool: AdminTool) -> None:
    """The tool ends well after its own failures, and prints them."""
    with pytest.raises(AdminFailed, match="Exception"):
        tool.run("topicRoute", "-t", "unknown")


def test_cluster_list(tool: AdminTool, address: str) -> None:
    """SG-106, SG-105, SG-088: the cluster's one broker, its address and version."""
    [row] = tool.table("clusterList")
    assert row[:5] == [CLUSTER, BROKER, "0", address, "V4_9_8"]


@pytest.mark.slow
def test_process_of_its_own(broker: BrokerProcess, address: str) -> None:
    """SG-106: as an administrator starts it."""
    assert address in run_process(broker.registry, "clusterList")


def test_topic_list(tool: AdminTool, sent: list[Sent]) -> None:
    """SG-104, SG-060, SG-100: created, system and retry topics."""
    topics = set(tool.run("topicList").split())
    assert topics >= {
        TOPIC,
        f"%RETRY%{GROUP}",
        "TBW102",
        "SELF_TEST_TOPIC",
        "BenchmarkTest",
        "OFFSET_MOVED_EVENT",
        CLUSTER,
        BROKER,
    }


def test_topic_route(tool: AdminTool, address: str, sent: list[Sent]) -> None:
    """SG-113, SG-105: the queues joined with the addresses of their broker."""
    route = tool.route(TOPIC)
    assert route["brokerDatas"] == [{"brokerAddrs": {"0": address}, "brokerName": BROKER, "cluster": CLUSTER}]
    [queues] = route["queueDatas"]
    assert (queues["brokerName"], queues["perm"], queues["readQueueNums"], queues["writeQueueNums"]) == (BROKER, 6, 1, 1)


def test_topic_is_made_changed_and_deleted(tool: AdminTool, address: str) -> None:
    """SG-064, SG-065, SG-104, SG-139: on one broker, then on its cluster, with other queues and permission; then not at all."""
    assert "create topic to" in tool.run("updateTopic", "-b", address, "-t", "made", "-r", "3", "-w", "2")

    def queues() -> tuple[int, int, int]:
        [data] = tool.route("made")["queueDatas"]
        return data["readQueueNums"], data["writeQueueNums"], data["perm"]

    assert queues() == (3, 2, 6)
    tool.run("updateTopic", "-c", CLUSTER, "-t", "made", "-r", "4", "-w", "4", "-p", "4")
    assert queues() == (4, 4, 4)
    assert "success" in tool.run("deleteTopic", "-c", CLUSTER, "-t", "made")
    assert "made" not in tool.run("topicList").split()


def test_topic_status(tool: AdminTool, sent: list[Sent]) -> None:
    """SG-088, SG-086: the offsets of each queue, and when a message came last."""
    [row] = tool.table("topicStatus", "-t", TOPIC)
    assert row[:4] == [BROKER, "0", "0", str(MESSAGES)]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", row[4])


@pytest.mark.slow
def test_consumer_progress(tool: AdminTool, sent: list[Sent]) -> None:
    """SG-067, SG-068, SG-055: the group is where its topic ends, as soon as its offsets have been sent."""

    def done(printed: str) -> bool:
        return any(row.split()[:5] == [TOPIC, BROKER, "0", str(MESSAGES), str(MESSAGES)] for row in printed.splitlines())

    printed = eventually(tool, done, "consumerProgress", "-g", GROUP)
    assert re.search(r"Diff Total: 0\b", printed)
    assert any(line.split()[:1] == [GROUP] for line in tool.run("consumerProgress").splitlines())


def test_connections(tool: AdminTool, sent: list[Sent]) -> None:
    """SG-087, SG-088, SG-089: who consumes what, how, and who produces."""
    consumers = tool.run("consumerConnection", "-g", GROUP)
    assert re.search(r"^\S+@\S+ +127\.0\.0\.1:\d+ +JAVA +V4_9_8", consumers, re.MULTILINE)
    assert re.search(rf"^{TOPIC} +\*", consumers, re.MULTILINE), consumers
    assert "ConsumeType: CONSUME_PASSIVELY" in consumers
    assert "MessageModel: CLUSTERING" in consumers
    assert "ConsumeFromWhere: CONSUME_FROM_FIRST_OFFSET" in consumers
    # A producer tells the broker who it is a second after its start.
    producers = eventually(tool, lambda printed: "JAVA" in printed, "producerConnection", "-g", PRODUCERS, "-t", TOPIC)
    assert re.search(r"\S+@\S+ +127\.0\.0\.1:\d+ +JAVA +V4_9_8", producers)


def test_consumer_status(tool: AdminTool, sent: list[Sent]) -> None:
    """SG-087, SG-097: the broker asks the consumer what it is doing, and passes its answer on."""
    [client_id] = re.findall(r"^(\S+@\S+) ", tool.run("consumerConnection", "-g", GROUP), re.MULTILINE)
    status = tool.run("consumerStatus", "-g", GROUP, "-i", client_id)
    assert re.search(r"PROP_CONSUME_TYPE +: CONSUME_PASSIVELY", status)
    assert re.search(rf"^{TOPIC} +{BROKER} +0 ", status, re.MULTILINE)


def test_messages_are_found(tool: AdminTool, sent: list[Sent]) -> None:
    """SG-132, RD-106, RD-107: by offset id, by key, by unique id and by place."""
    by_id = tool.run("queryMsgById", "-i", sent[3].offset_id)
    assert re.search(rf"Topic: +{TOPIC}$", by_id, re.MULTILINE)
    assert re.search(r"Tags: +\[TagA\]", by_id)
    assert re.search(r"Keys: +\[key3\]", by_id)
    assert re.search(r"Queue Offset: +3$", by_id, re.MULTILINE)
    by_key = eventually(tool, lambda printed: sent[4].id in printed, "queryMsgByKey", "-t", TOPIC, "-k", "key4")
    assert re.search(rf"^{sent[4].id} +0 +4$", by_key, re.MULTILINE)
    assert sent[3].id not in by_key
    by_unique_id = tool.run("queryMsgByUniqueKey", "-t", TOPIC, "-i", sent[5].id)
    assert re.search(r"Keys: +\[key5\]", by_unique_id)
    by_offset = tool.run("queryMsgByOffset", "-t", TOPIC, "-b", BROKER, "-i", "0", "-o", "6")
    assert re.search(r"Keys: +\[key6\]", by_offset)


def test_message_is_consumed_again(tool: AdminTool, client: ClientProcess, sent: list[Sent]) -> None:
    """SG-087, SG-132: the broker passes a stored message to one consumer, and its answer back."""
    [client_id] = re.findall(r"^(\S+@\S+) ", tool.run("consumerConnection", "-g", GROUP), re.MULTILINE)
    before = client.bodies("administered").count(b"body 2")
    answer = tool.run("queryMsgById", "-g", GROUP, "-d", client_id, "-i", sent[2].offset_id)
    assert "consumeResult=CR_SUCCESS" in answer
    again = "the consumer says so, too"
    wait_until(lambda: client.bodies("administered").count(b"body 2") == before + 1, WAIT_S, again)


@pytest.mark.slow
def test_messages_are_printed(tool: AdminTool, sent: list[Sent]) -> None:
    """SG-077, SG-120: the whole topic, read as a pull consumer."""
    printed = tool.run("printMsg", "-t", TOPIC, "-d", "true")
    assert re.findall(r"BODY: (body \d)", printed) == [f"body {number}" for number in range(MESSAGES)]


def test_queue_entries(tool: AdminTool, address: str, sent: list[Sent]) -> None:
    """SG-088: the entries of a queue, with places, sizes and hashes of tags."""
    printed = tool.run("queryCq", "-t", TOPIC, "-q", "0", "-i", "2", "-c", "3", "-b", address)
    assert f"max: {MESSAGES}, min: 0" in printed
    entries = re.findall(
        r"^idx: (\d+)\nConsumeQueueData\{physicOffset=(\d+), physicSize=(\d+), tagsCode=(-?\d+)", printed, re.MULTILINE
    )
    assert [int(index) for index, *_ in entries] == [2, 3, 4]
    assert [int(place) for _, place, *_ in entries] == [int(result.offset_id[16:], 16) for result in sent[2:5]]
    assert {int(code) for *_, code in entries} == {java_hash("TagA")}


def test_broker_status(tool: AdminTool, address: str, sent: list[Sent]) -> None:
    """SG-086, SG-088: version, times and counters."""
    status = dict(re.findall(r"^(\S+) +: (.*)$", tool.run("brokerStatus", "-b", address), re.MULTILINE))
    assert status["brokerVersionDesc"] == "V4_9_8"
    assert int(status["msgPutTotalTodayNow"]) >= MESSAGES
    assert {
        "bootTimestamp",
        "putTps",
        "getTransferedTps",
        "commitLogMaxOffset",
        "commitLogMinOffset",
        "runtime",
    } <= status.keys()


@pytest.mark.slow
def test_statistics(tool: AdminTool, address: str, sent: list[Sent]) -> None:
    """SG-086: what was put and got, by topic and group; how far groups lag behind, over the whole broker."""

    def printed_row(pattern: str) -> Callable[[str], bool]:
        return lambda printed: bool(re.search(f"^{pattern}$", printed, re.MULTILINE))

    counted = printed_row(rf"{TOPIC} +{GROUP} +0 +[\d.]+ +[\d.]+ +{MESSAGES} +{MESSAGES}")
    eventually(tool, counted, "statsAll", "-t", TOPIC)
    level = printed_row(rf"{TOPIC} +{GROUP} +{BROKER} +0 +{MESSAGES} +{MESSAGES} +0 .*")
    assert "Diff Total: " in eventually(tool, level, "brokerConsumeStats", "-b", address)


def test_broker_settings(tool: AdminTool, address: str) -> None:
    """SG-088: settings are read and changed as lines of text."""

    def value(name: str) -> str:
        [found] = re.findall(rf"^{name} += +(.*)$", tool.run("getBrokerConfig", "-b", address), re.MULTILINE)
        return str(found)

    assert value("brokerName") == BROKER
    assert "success" in tool.run("updateBrokerConfig", "-b", address, "-k", "fileReservedTime", "-v", "48")
    assert value("fileReservedTime") == "48"
    with pytest.raises(AdminFailed, match="brokerName cannot be changed"):
        tool.run("updateBrokerConfig", "-b", address, "-k", "brokerName", "-v", "other")


def test_upkeep(tool: AdminTool, address: str, sent: list[Sent], tmp_path: Path) -> None:
    """SG-088, SG-106: what nobody needs is deleted, sending is tried out, and everything is written to files."""
    for command in ("cleanExpiredCQ", "cleanUnusedTopic", "deleteExpiredCommitLog"):
        assert "success" in tool.run(command, "-b", address)
    assert CLUSTER in tool.run("topicClusterList", "-t", TOPIC).split()
    assert tool.run("sendMsgStatus", "-b", BROKER, "-s", "100", "-c", "2").count("SEND_OK") == 2
    eventually(tool, lambda printed: PRODUCERS in printed, "producer", "-b", address)
    for command, file in (("exportMetadata", "metadata"), ("exportConfigs", "configs"), ("exportMetrics", "metrics")):
        tool.run(command, "-c", CLUSTER, "-f", str(tmp_path))
        assert json.loads((tmp_path / f"{file}.json").read_text("utf-8"))


def test_groups_are_made_and_deleted(tool: AdminTool, address: str) -> None:
    """SG-069, SG-070: with their settings, on one broker."""
    made = tool.run("updateSubGroup", "-b", address, "-g", "made-group", "-r", "7")
    assert "success" in made
    assert "retryMaxTimes=7" in made
    assert "success" in tool.run("deleteSubGroup", "-b", address, "-g", "made-group")


def test_offsets_are_set_back_and_copied(tool: AdminTool, client: ClientProcess, broker: BrokerProcess) -> None:
    """SG-067, SG-078: a group that is not connected goes back to a time; another starts where it is."""
    topic = create_topic(client, broker, "copied", queues=1)
    client.start_producer("copied", "copied-producers")
    for number in range(4):
        client.send("copied", Outgoing(topic, b"%d" % number))
    assert len(client.poll("copied-source", topic, count=4, seconds=60)) == 4

    def offset(group: str) -> list[str]:
        rows = tool.table("consumerProgress", "-g", group)
        return [row[4] for row in rows if row[:3] == [topic, BROKER, "0"]]

    # The client sent its offset without waiting for an answer.
    wait_until(lambda: offset("copied-source") == ["4"], WAIT_S, "the offset of the group is stored")
    copied = tool.run("cloneGroupOffset", "-s", "copied-source", "-d", "copied-target", "-t", topic)
    assert "success" in copied
    tool.run("updateTopic", "-c", CLUSTER, "-t", "%RETRY%copied-target", "-r", "1", "-w", "1")
    assert offset("copied-target") == ["4"]
    tool.run("resetOffsetByTime", "-g", "copied-source", "-t", topic, "-s", "0")
    assert offset("copied-source") == ["0"]


def test_registry_is_administered(tool: AdminTool, sent: list[Sent]) -> None:
    """SG-115, SG-139: settings, keys and values, and the permission to write of all queues of a broker."""
    assert re.search(r"^\S+ += ", tool.run("getNamesrvConfig"), re.MULTILINE)
    assert "success" in tool.run("updateKvConfig", "-s", "ORDER_TOPIC_CONFIG", "-k", TOPIC, "-v", f"{BROKER}:1")
    assert "success" in tool.run("deleteKvConfig", "-s", "ORDER_TOPIC_CONFIG", "-k", TOPIC)

    def permission() -> int:
        [queues] = tool.route(TOPIC)["queueDatas"]
        return int(queues["perm"])

    assert "OK" in tool.run("wipeWritePerm", "-b", BROKER)
    assert permission() == 4
    assert "OK" in tool.run("addWritePerm", "-b", BROKER)
    assert permission() == 6

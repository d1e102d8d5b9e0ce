"""Requests of clients and operators that a slave serves, and those that it leaves to its master."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

import pytest

from metaq.client import TextClient
from metaq.client.text.textclient import parse_stats
from metaq.errors import Refused
from metaq.message import TopicPartition
from metaq.protocol.remoting import fastjson
from metaq.protocol.remoting.codes import PULL_COMMITS_OFFSET, PULL_HAS_SUBSCRIPTION, PULL_SUSPENDS, Request, Response
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.protocol.remoting.headers import Int32, decode_header, encode_header
from metaq.protocol.remoting.leases.acks import BatchAck, acks_of, encode_batch_ack
from metaq.protocol.remoting.leases.pop import (
    AckMessage,
    ChangeInvisibleTime,
    Notification,
    PeekMessage,
    PollingInfo,
    PopAnswer,
    PopMessage,
    receipts_of,
)
from metaq.server.replicas.masteronly import CODES
from metaq.store.files.disk import RealDisk
from metaq.store.files.documents import read_document, write_document
from tests.server.remoting.test_priorities import change_attributes, check_attributes, shown_attributes
from tests.support.admin import BROKER, ask, ask_body, connect, create_topic, fields_of, records, send
from tests.support.admin import pull as pull_as
from tests.support.broker import RegistryProcess, wait_until
from tests.support.cluster import PATIENT, Cluster, ReplicaProcess, wait_caught_up
from tests.support.consumer import Consumer, subscription
from tests.support.tls import issue

DEADLINE_S: Final = 60.0
HOT_BYTES: Final = 20_000
GROUP: Final = "billing"
POP: Final = PopMessage(GROUP, "orders", Int32(0), Int32(1), 600_000, 0, Int32(0))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with (
        RegistryProcess(tmp_path / "registry") as registry,
        Cluster(tmp_path, *PATIENT, "--registries", registry.address) as cluster,
    ):
        yield cluster
    for folder in tmp_path.glob("replica?"):
        shutil.rmtree(folder)


def test_a_slave_asks_its_registries_for_the_master(cluster: Cluster) -> None:
    """SG-082, SG-081: it follows whoever is master of its name, also one that comes later or takes the place of another."""
    slave = cluster.add(2, "", "--role", "slave")
    slave.wait_problem("no master is known")
    master = cluster.add(1)
    third = cluster.add(3, "", "--role", "slave")
    master.wait_for(in_sync=[1, 2, 3])
    assert slave.status()["master"] == master.replication
    third.wait_for(suspect=None)
    master.kill()
    third.promote()
    slave.wait_for(master=third.replication)
    third.wait_for(in_sync=[2, 3])


def test_a_slave_becomes_master_though_it_cannot_make_a_topic_of_its_settings(cluster: Cluster, tmp_path: Path) -> None:
    """SG-082: its master has made as many as there may be; it says so, and serves."""
    config = tmp_path / "slave.yaml"
    config.write_text("max_topics: 2\ntopics:\n  wanted: {partitions: 1}\n  orders: {accept_subscribe: false}\n")
    master = cluster.add(1)
    slave = cluster.add(2, "", "--role", "slave", "--config", str(config))
    master.wait_for(in_sync=[1, 2])
    with TextClient(master.host, master.port) as text:
        for topic in ("orders", "more"):
            text.put(topic, b"body")
    table = slave.data / "config" / "topics.json"
    wait_until(lambda: table.exists() and '"more"' in table.read_text(), DEADLINE_S, "the slave has the topics of its master")
    wait_caught_up(master, slave)
    master.kill()
    slave.promote()
    assert "topic of the settings not made topic=wanted reason=there are already 2 topics" in slave.stderr()


def test_what_a_slave_refuses(cluster: Cluster) -> None:
    """SG-083, ES-015: all that its master keeps: messages, offsets, locks, topics, groups and decisions; 14 and 503 say so."""
    _, slave = cluster.pair()
    with connect(slave) as client:
        for code in (*CODES, Request.SEND_MESSAGE_V2):
            fields = fields_of(a="pg", b="TBW102", c="TBW102", d=4, e=0, f=0, g=1700000000000, h=0, j=0, k=False)
            answer = client.call(code, fields)
            assert answer.code == Response.SERVICE_NOT_AVAILABLE and "slave" in (answer.remark or ""), (code, answer)
    with TextClient(slave.host, slave.port) as text, pytest.raises(Refused) as refused:
        text.create("orders", 2)
    assert refused.value.code == 503 and "slave" in refused.value.text


def test_a_slave_leases_nothing_and_ends_no_lease(cluster: Cluster) -> None:
    """ES-015, E-08: puts, pops, pushes, acks and cancels, also of what its master gave: 503 and 14; there they are good."""
    master, slave = cluster.pair()
    fill(master, slave, 2)
    with connect(master) as client:
        popped = client.call(Request.POP_MESSAGE, encode_header(POP))
        receipt = receipts_of(decode_header(PopAnswer, popped.fields), BROKER, [(TopicPartition("orders", 0), 0)])[0]
    (message_id,) = ids(master, "pop orders audit 1")
    handle = said(master, "put orders 0 1 0 delay=600000 1\r\nx")[1].split()[-1]
    wait_caught_up(master, slave)
    ack = AckMessage(GROUP, "orders", Int32(0), str(receipt), receipt.offset)
    change = ChangeInvisibleTime(*ack[:5], invisible_time=1000)
    batch = encode_batch_ack(BatchAck(BROKER, tuple(acks_of(GROUP, "orders", [receipt]))))
    requests: tuple[tuple[Request, dict[str, str], bytes], ...] = (
        (Request.POP_MESSAGE, encode_header(POP), b""),
        (Request.NOTIFICATION, encode_header(Notification(GROUP, "orders", Int32(0), 0, 0)), b""),
        (Request.ACK_MESSAGE, encode_header(ack), b""),
        (Request.ACK_MESSAGE, encode_header(ack._replace(extra_info=str(receipt._replace(token=4711)))), b""),
        (Request.BATCH_ACK_MESSAGE, {}, batch),
        (Request.CHANGE_MESSAGE_INVISIBLETIME, encode_header(change), b""),
        (Request.CHANGE_MESSAGE_INVISIBLETIME, encode_header(change._replace(invisible_time=-1)), b""),
    )
    with connect(slave) as client:
        for code, fields, body in requests:
            answer = client.call(code, fields, body)
            assert answer.code == Response.SERVICE_NOT_AVAILABLE and "slave" in (answer.remark or ""), (code, answer)
    for line in (
        "put orders 0 1 0 1\r\nx",
        "put orders 0 1 0 delay=1000 1\r\nx",
        "pop orders billing 1",
        "pop orders billing wait=1000 1",
        "subscribe orders billing 1",
        f"ack orders audit {message_id} 1",
        f"nack orders audit {message_id} 1",
        f"nack orders audit {message_id} dead 1",
        f"extend orders audit {message_id} 1000 1",
        f"cancel {handle} 1",
    ):
        status, text = said(slave, line)
        assert status == 503 and "slave" in text, (line, status, text)
    assert said(master, f"ack orders audit {message_id} 1") == (200, "1")
    assert said(master, f"cancel {handle} 1") == (200, "cancelled")
    with connect(master) as client:
        ask(client, Request.ACK_MESSAGE, **encode_header(ack))


def test_a_slave_makes_no_group(cluster: Cluster) -> None:
    """SG-083, ES-015: whatever it is asked for in the name of one that its master does not have."""
    master, slave = cluster.pair()
    fill(master, slave, 2)
    stranger = "stranger"
    asked: tuple[tuple[Request, tuple[object, ...]], ...] = (
        (Request.POP_MESSAGE, POP._replace(consumer_group=stranger)),
        (Request.NOTIFICATION, Notification(stranger, "orders", Int32(0), 0, 0)),
        (Request.PEEK_MESSAGE, PeekMessage("orders", Int32(0), Int32(8), stranger)),
        (Request.POLLING_INFO, PollingInfo(stranger, "orders", Int32(0))),
    )
    with Consumer(slave, stranger) as consumer:
        consumer.beat(subscription("orders"))
    with connect(slave) as client:
        assert pull_as(client, "orders", 0, group=stranger).code == Response.SUCCESS
        codes = [client.call(code, encode_header(header)).code for code, header in asked]
        assert codes == [Response.SERVICE_NOT_AVAILABLE] * 2 + [Response.SUCCESS] * 2
        for line in (f"pop orders {stranger} 1", f"subscribe orders {stranger} 1"):
            assert said(slave, line)[0] == 503
        assert stranger.encode() not in ask(client, Request.GET_ALL_SUBSCRIPTIONGROUP_CONFIG).body
        assert stranger.encode() not in ask(client, Request.GET_ALL_TOPIC_CONFIG).body


def test_a_delayed_message_can_be_cancelled_once_its_put_is_answered(cluster: Cluster) -> None:
    """ES-101, E-12: also where the answer waited for replicas."""
    master, _ = cluster.pair()
    for _ in range(5):
        code, placed = said(master, "put orders 0 1 0 delay=600000 1\r\nx")
        assert code == 200
        assert said(master, f"cancel {placed.split()[-1]} 1") == (200, "cancelled")


def test_a_new_slave_shows_nothing_of_deleted_topics(cluster: Cluster) -> None:
    """SG-064, SG-083: it has the table before their messages; in a topic made again, only what is new."""
    cluster.durability = "memory"
    master = cluster.add(1)
    with connect(master) as client:
        create_topic(client, "gone")
        send(client, "gone", *(b"x" * 100_000 for _ in range(50)))
        ask(client, Request.DELETE_TOPIC_IN_BROKER, topic="gone")
    slave = cluster.add(2, master.replication)
    master.wait_for(in_sync=[1, 2])
    wait_caught_up(master, slave)
    with connect(slave) as client:
        assert pull_as(client, "gone", 0).code == Response.TOPIC_NOT_EXIST
        assert "gone" not in ask_body(client, Request.GET_ALL_TOPIC_CONFIG)["topicConfigTable"]
    with connect(master) as client:
        create_topic(client, "gone")
        send(client, "gone", b"new")
    wait_until(lambda: bodies(slave, "gone", 50) == [b"new"], DEADLINE_S, "the slave has the topic made again")
    with connect(slave) as client:
        assert pull_as(client, "gone", 0).fields["nextBeginOffset"] == "50"


def test_a_slave_shows_what_takes_the_places_of_deleted_messages(cluster: Cluster) -> None:
    """SG-064, SG-083: its master has lost the last of them, and says in its table where the new ones begin."""
    master, slave = cluster.pair()
    with connect(master) as client:
        create_topic(client, "gone")
        send(client, "gone", b"old", b"old", b"old")
        ask(client, Request.DELETE_TOPIC_IN_BROKER, topic="gone")
    table = slave.data / "config" / "topics.json"
    wait_until(lambda: '"deleted":{"gone"' in table.read_text(), DEADLINE_S, "the slave has the table")
    wait_caught_up(master, slave)
    assert slave.terminate() == 0
    content, _ = read_document(RealDisk(), table)
    assert content is not None
    write_document(RealDisk(), table, {**content, "deleted": {"gone": {"0": 10}}})  # seven more were there
    slave.start()
    master.wait_for(in_sync=[1, 2])
    with connect(master) as client:
        create_topic(client, "gone")
        send(client, "gone", b"new")
    wait_until(lambda: bodies(slave, "gone", 3) == [b"new"], DEADLINE_S, "the slave shows it")


@pytest.mark.parametrize("flags", [(), ("--cluster-tls-ca",)], ids=["plain", "TLS"])
def test_a_slave_of_a_slave_says_what_is_wrong(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """SG-082, SG-083: with TLS, too, where it would be an error of TLS otherwise."""
    certificates = issue(tmp_path)
    ca = (*flags, str(certificates.authority)) if flags else ()
    with Cluster(tmp_path, *certificates.flags, *ca) as cluster:
        first = cluster.add(1, "127.0.0.1:1")
        cluster.add(2, first.replication).wait_problem("this replica is a slave itself")


@pytest.mark.parametrize("byte", [b"\xff", b" "])
def test_a_damaged_table_of_its_master_keeps_no_slave_away(cluster: Cluster, byte: bytes) -> None:
    """F-BIT, SG-058: the master has made it good from the log, and names the file."""
    master, slave = cluster.pair()
    assert slave.terminate() == master.terminate() == 0
    table = master.data / "config" / "transactions.json"
    data = table.read_bytes()
    table.write_bytes(data[:30] + byte + data[31:])
    master.start()
    slave.start()
    master.wait_for(in_sync=[1, 2])
    assert f"damaged table not sent to slaves file={table}" in master.stderr()


def bodies(broker: ReplicaProcess, topic: str, offset: int) -> list[bytes]:
    """What a pull gives."""
    with connect(broker) as client:
        return [bytes(record.body) for record in records(pull_as(client, topic, offset))]


def said(broker: ReplicaProcess, line: str) -> tuple[int, str]:
    """The code and the text of the reply to a command of the text protocol."""
    with broker.connect() as connection, connection.makefile("rb") as stream:
        connection.sendall(line.encode() + (b"" if line.startswith("put ") else b"\r\n"))
        return read_result(stream)


def read_result(stream: BinaryIO) -> tuple[int, str]:
    word, code, length, _ = stream.readline().decode().split()
    assert word == "result"
    return int(code), stream.read(int(length)).decode()


def ids(broker: ReplicaProcess, pop: str) -> list[str]:
    """The ids of the messages that a pop gives."""
    found = []
    with broker.connect() as connection, connection.makefile("rb") as stream:
        connection.sendall(pop.encode() + b"\r\n")
        while (words := stream.readline().decode().split())[0] == "message":
            stream.read(int(words[1]))
            found.append(words[3])
    return found


def pull_fields(offset: int, *, wait_ms: int = 0, commit: int | None = None) -> dict[str, str]:
    flag = PULL_HAS_SUBSCRIPTION | (PULL_SUSPENDS if wait_ms else 0) | (0 if commit is None else PULL_COMMITS_OFFSET)
    fields = fields_of(consumerGroup=GROUP, topic="orders", queueId=0, queueOffset=offset, maxMsgNums=1, sysFlag=flag)
    return {**fields, **fields_of(commitOffset=commit or 0, suspendTimeoutMillis=wait_ms, subscription="*", subVersion=0)}


def pull(broker: ReplicaProcess, offset: int, *, wait_ms: int = 0, commit: int | None = None) -> RemotingCommand:
    """One pull of a partition that has messages."""
    with connect(broker) as client:
        return client.call(Request.PULL_MESSAGE, pull_fields(offset, wait_ms=wait_ms, commit=commit))


def suggested(broker: ReplicaProcess, offset: int) -> str:
    return pull(broker, offset).fields["suggestWhichBrokerId"]


def fill(master: ReplicaProcess, slave: ReplicaProcess, count: int) -> None:
    """Messages of 1,000 bytes, on both."""
    with connect(master) as client:
        create_topic(client, "orders")
        send(client, "orders", *(b"x" * 1000 for _ in range(count)))
    wait_caught_up(master, slave)
    wait_until(lambda: pull(slave, 0).code == Response.SUCCESS, DEADLINE_S, "the slave has the topic's table")


def test_who_reads_far_behind_is_sent_to_a_slave(cluster: Cluster) -> None:
    """SG-083, SG-071: beyond hot_bytes, while the slave is in sync; it sends readers back, but not to a master that is gone."""
    master = cluster.add(1, "", "--hot-bytes", str(HOT_BYTES))
    slave = cluster.add(2, master.replication, "--hot-bytes", str(HOT_BYTES))
    master.wait_for(in_sync=[1, 2])
    fill(master, slave, 50)
    assert [suggested(master, offset) for offset in (0, 20, 45, 49)] == ["2", "2", "0", "0"]
    assert [suggested(slave, offset) for offset in (0, 20, 45, 49)] == ["2", "2", "0", "0"]
    master.kill()
    slave.wait_for(master="")
    assert suggested(slave, 49) == "2"
    slave.kill()
    master.restart()
    assert suggested(master, 0) == "0"


def test_reading_from_a_slave(cluster: Cluster) -> None:
    """SG-083, SG-058, P09: pulls and heartbeats are answered, held pulls too; no offset is committed or taken back."""
    master, slave = cluster.pair()
    fill(master, slave, 3)
    with Consumer(slave, GROUP) as consumer:
        consumer.call(Request.HEART_BEAT, {}, consumer.heartbeat(subscription("orders")))
        assert consumer.call(Request.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": GROUP}).code == Response.SUCCESS
    with connect(master) as client:
        ask(client, Request.UPDATE_CONSUMER_OFFSET, consumerGroup=GROUP, topic="orders", queueId=0, commitOffset=2)
    assert pull(slave, 1, commit=3).code == Response.SUCCESS

    def offset() -> str | None:
        with connect(slave) as client:
            fields = fields_of(consumerGroup=GROUP, topic="orders", queueId=0, setZeroIfNotFound=False)
            return client.call(Request.QUERY_CONSUMER_OFFSET, fields).fields.get("offset")

    wait_until(lambda: offset() == "2", DEADLINE_S, "the master's offset is there, and not the one of the pull")
    ahead = pull(slave, 9, wait_ms=50)  # as far as a reader may have come at the master
    assert (ahead.code, ahead.fields["nextBeginOffset"], ahead.fields["maxOffset"]) == (Response.PULL_NOT_FOUND, "9", "3")
    with connect(slave) as waiting:
        opaque = waiting.send(Request.PULL_MESSAGE, pull_fields(3, wait_ms=30_000))
        with connect(master) as client:
            send(client, "orders", b"new")
        assert b"new" in waiting.response(opaque).body


def test_numbers(cluster: Cluster) -> None:
    """SG-140, SG-037, ES-015: role, epoch, replicas in sync and lags, in stats and for RocketMQ's tools."""
    master, slave = cluster.pair()
    wait_caught_up(master, slave)

    def numbers(broker: ReplicaProcess) -> dict[str, str]:
        with TextClient(broker.host, broker.port) as client, connect(broker) as wire:
            stats = parse_stats(client.stats())
            table = ask_body(wire, Request.GET_BROKER_RUNTIME_INFO)["table"]
        assert {name: table[name] for name in ("role", "epoch", "in_sync")} == {
            name: stats[name] for name in ("role", "epoch", "in_sync")
        }
        return stats

    ours, theirs = numbers(master), numbers(slave)
    assert ours.items() >= {"slave": "false", "role": "master", "in_sync": "2", "slaves": "1"}.items()
    assert ours.items() >= {"slave_2_in_sync": "yes", "slave_2_lag_bytes": "0", "slave_2_lag_ms": "0"}.items()
    assert theirs.items() >= {"slave": "true", "role": "slave", "in_sync": "2", "master": master.replication}.items()
    assert theirs["epoch"] == ours["epoch"] == str(master.status()["epoch"])


def test_a_master_does_not_wait_without_being_told_to(cluster: Cluster) -> None:
    """MQ-066: below REPLICA a put is answered, and read, although the slave stands still; it catches up."""
    cluster.durability = "memory"
    master, slave = cluster.pair()
    slave.pause()
    with TextClient(master.host, master.port) as client:
        client.put("orders", b"x")
        assert [message.body for message in client.get("orders").messages] == [b"x"]
    slave.go_on()
    wait_caught_up(master, slave)


def test_a_slave_has_the_groups_and_delay_positions_of_its_master(cluster: Cluster) -> None:
    """SG-058: as the same files, a group's settings among them, and how far each delay level has been delivered."""
    master, slave = cluster.pair()
    with connect(master) as client:
        group = {"groupName": "audit", "retryMaxTimes": 7, "consumeEnable": False}
        ask(client, Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, fastjson.encode(group))
        create_topic(client, "orders")
        send(client, "orders", b"later", pairs="DELAY\x011")

    def table(replica: ReplicaProcess, name: str, member: str) -> object:
        file = replica.data / "config" / name
        return fastjson.decode(file.read_bytes()).get(member) if file.exists() else None

    def delivered(replica: ReplicaProcess) -> object:
        levels = table(replica, "delayOffset.json", "offsetTable")
        return levels.get("1") if isinstance(levels, dict) else None

    def settings(replica: ReplicaProcess) -> object:
        groups = table(replica, "subscriptionGroup.json", "subscriptionGroupTable")
        return groups.get("audit") if isinstance(groups, dict) else None

    wait_until(lambda: pull(master, 0).code == Response.SUCCESS, DEADLINE_S, "the master has delivered it")
    assert master.terminate() == 0  # which writes the positions down, as every 10 s
    master.start()
    assert delivered(master) == 1
    wait_until(lambda: delivered(slave) == 1, DEADLINE_S, "the slave knows that")
    wait_until(lambda: settings(slave) == settings(master) is not None, DEADLINE_S, "the slave has the group")
    with connect(slave) as client:
        found = ask_body(client, Request.GET_SUBSCRIPTIONGROUP_CONFIG, group="audit")
        assert (found["retryMaxTimes"], found["consumeEnable"]) == (7, False)


def test_a_slave_has_the_request_modes_of_its_master(cluster: Cluster) -> None:
    """MY-010: it answers 402 and 400 by them."""
    master, slave = cluster.pair()
    with connect(master) as client:
        ask(client, Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, fastjson.encode({"groupName": "audit"}))
        create_topic(client, "orders")
        row = {"topic": "orders", "consumerGroup": "audit", "mode": "POP", "popShareQueueNum": 2}
        ask(client, Request.SET_MESSAGE_REQUEST_MODE, fastjson.encode(row))
    with connect(slave) as client:

        def modes() -> object:
            return ask_body(client, Request.GET_ALL_MESSAGE_REQUEST_MODE)["messageRequestModeMap"]

        wait_until(lambda: modes() == {"orders": {"audit": row}}, DEADLINE_S, "the slave has the modes")


def test_a_slave_has_the_attributes_of_its_master(cluster: Cluster) -> None:
    """MY-034: of topics and of groups; once it is promoted they can be changed there."""
    master, slave = cluster.pair()
    change_attributes(master)
    wait_until(lambda: shown_attributes(slave) == shown_attributes(master), DEADLINE_S, "the slave has the attributes")
    master.kill()
    slave.promote()
    check_attributes(slave)

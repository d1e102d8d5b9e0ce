"""Topics by command: what each request does, and when it is refused."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from metaq.client.text.textclient import TextClient
from metaq.errors import Refused as TextRefused
from metaq.protocol.remoting.codes import COMPACT, Request, Response
from metaq.protocol.remoting.fastjson import decode
from metaq.store.files.disk import RealDisk
from metaq.store.files.documents import read_document, write_document
from tests.support.admin import Refused, ask, ask_body, connect, create_topic, fields_of, pull, queue, records, send
from tests.support.broker import BrokerProcess, wait_until
from tests.support.remoting import RemotingClient

DEADLINE_S = 60.0


@pytest.fixture
def client(broker: BrokerProcess) -> Iterator[RemotingClient]:
    with connect(broker) as client:
        yield client


def route(client: RemotingClient, topic: str) -> tuple[int, int, int] | None:
    """Partitions to read, to write, and permission, as the registry says; ``None`` when it has no such topic."""
    answer = client.call(Request.GET_ROUTEINFO_BY_TOPIC, {"topic": topic})
    if answer.code == Response.TOPIC_NOT_EXIST:
        return None
    [queues] = decode(answer.body)["queueDatas"]
    return queues["readQueueNums"], queues["writeQueueNums"], queues["perm"]


def test_created_changed_and_shown(client: RemotingClient) -> None:
    """SG-064, SG-062, SG-066: 17 is in force, in the table and with the registry when it is answered; 351 and 21 show it."""
    create_topic(client, "made", write=2, read=3)
    assert route(client, "made") == (3, 2, 6)
    row = {"topicName": "made", "readQueueNums": 3, "writeQueueNums": 2, "perm": 6, "topicSysFlag": 0, "order": False}
    row["topicFilterType"] = "SINGLE_TAG"
    assert ask_body(client, Request.GET_TOPIC_CONFIG, topic="made") == row
    before = ask_body(client, Request.GET_ALL_TOPIC_CONFIG)
    assert before["topicConfigTable"]["made"] == row
    create_topic(client, "made", write=4, read=4, perm=4)
    assert route(client, "made") == (4, 4, 4)
    after = ask_body(client, Request.GET_ALL_TOPIC_CONFIG)
    assert after["topicConfigTable"]["made"]["perm"] == 4
    assert after["dataVersion"]["counter"] > before["dataVersion"]["counter"]  # SG-063


def test_all_topics_has_fields_and_both_serializations(client: RemotingClient) -> None:
    """SG-096: 21 has an empty header object, which slaves look into; the compact form is answered in kind."""
    assert client.call(Request.GET_ALL_TOPIC_CONFIG).fields == {}
    answer = client.call(Request.GET_ALL_TOPIC_CONFIG, serialization=COMPACT)
    assert answer.serialization == COMPACT
    assert "TBW102" in decode(answer.body)["topicConfigTable"]


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"topic": "TBW102"}, "belongs to the broker"),
        ({"topic": "SCHEDULE_TOPIC_XXXX"}, "belongs to the broker"),
        ({"topic": "RMQ_SYS_TRANS_HALF_TOPIC"}, "belongs to the broker"),
        ({"topic": "no such*name"}, "characters"),
        ({"topic": "x" * 128}, "longer than"),
        ({"writeQueueNums": "1025"}, "more than"),
        ({"writeQueueNums": "-1"}, "negative"),
        ({"readQueueNums": "x"}, "readQueueNums"),
        ({"perm": "9"}, "perm"),
    ],
)
def test_creation_refused(client: RemotingClient, fields: dict[str, str], word: str) -> None:
    """SG-059, SG-064: bad names, numbers and permissions, and the broker's own topics."""
    usual = {"topic": "refused", "defaultTopic": "TBW102", "readQueueNums": "1", "writeQueueNums": "1", "perm": "6"}
    answer = client.call(Request.UPDATE_AND_CREATE_TOPIC, {**usual, **fields})
    assert answer.code == Response.SYSTEM_ERROR
    assert word in (answer.remark or "")
    assert route(client, "refused") is None


def test_created_by_sending(client: RemotingClient) -> None:
    """SG-065, SG-061: as many partitions as asked for, at most the template's; the registry knows when the send is answered."""
    for asked, made in ((3, 3), (99, 16)):
        topic = f"sent-{asked}"
        fields = fields_of(a="pg", b=topic, c="TBW102", d=asked, e=0, f=0, g=1700000000000, h=0, j=0, k=False)
        ask(client, Request.SEND_MESSAGE_V2, b"x", **fields)
        assert route(client, topic) == (made, made, 6)


def test_table_on_disk(tmp_path: Path) -> None:
    """SG-062, SG-063, SG-064: ``config/topics.json`` in RocketMQ's form has what a request changed when it is answered."""
    with BrokerProcess(tmp_path / "data", "--checkpoint-interval-ms", "3600000") as broker, connect(broker) as client:
        create_topic(client, "on-disk", write=2, read=3)
        table = json.loads((tmp_path / "data" / "config" / "topics.json").read_bytes())
        row = table["topicConfigTable"]["on-disk"]
        expected = {"topicName": "on-disk", "readQueueNums": 3, "writeQueueNums": 2, "perm": 6, "topicFilterType": "SINGLE_TAG"}
        assert row.items() >= {**expected, "topicSysFlag": 0, "order": False}.items()
        assert table["dataVersion"].keys() == {"timestamp", "counter"}
        ask(client, Request.DELETE_TOPIC_IN_BROKER, topic="on-disk")
        assert "on-disk" not in json.loads((tmp_path / "data" / "config" / "topics.json").read_bytes())["topicConfigTable"]


def test_template_by_command(client: RemotingClient) -> None:
    """SG-125, SG-061: a client creates its topic on every broker that has the template."""
    assert route(client, "TBW102") == (16, 16, 7)
    create_topic(client, "by-client", write=8, read=8)
    assert send(client, "by-client", b"x", partition=7).code == Response.SUCCESS


def test_unknown_topic(client: RemotingClient) -> None:
    """SG-088: 17 answers for a topic that does not exist."""
    for code in (Request.GET_TOPIC_CONFIG, Request.GET_TOPIC_STATS_INFO):
        with pytest.raises(Refused, match="does not exist") as refused:
            ask(client, code, topic="nowhere")
        assert refused.value.code == Response.TOPIC_NOT_EXIST


def test_stats_of_a_topic(client: RemotingClient) -> None:
    """SG-088: 202 says where each partition begins and ends, and when its newest message was stored."""
    create_topic(client, "measured", write=2, read=2)
    send(client, "measured", b"a", b"b", partition=1)
    stats = ask_body(client, Request.GET_TOPIC_STATS_INFO, topic="measured")["offsetTable"]
    newest = records(pull(client, "measured", 1, partition=1))[0].store_ms
    assert stats[queue("measured", 0)] == {"minOffset": 0, "maxOffset": 0, "lastUpdateTimestamp": 0}
    assert stats[queue("measured", 1)] == {"minOffset": 0, "maxOffset": 2, "lastUpdateTimestamp": newest}


def test_system_topics(client: RemotingClient) -> None:
    """SG-060: 305 lists the topics that every broker has."""
    topics = ask_body(client, Request.GET_SYSTEM_TOPIC_LIST_FROM_BROKER)["topicList"]
    expected = {"TBW102", "SELF_TEST_TOPIC", "BenchmarkTest", "OFFSET_MOVED_EVENT", "DefaultCluster", "metaq"}
    assert set(topics) >= expected


def test_cleaning(client: RemotingClient) -> None:
    """SG-088: 306, 316 and 329 succeed; what has not expired stays."""
    create_topic(client, "kept")
    send(client, "kept", b"x")
    for code in (Request.CLEAN_EXPIRED_CONSUMEQUEUE, Request.CLEAN_UNUSED_TOPIC, Request.DELETE_EXPIRED_COMMITLOG):
        ask(client, code)
    assert [record.body for record in records(pull(client, "kept", 0))] == [b"x"]


def test_deleted(client: RemotingClient) -> None:
    """SG-064: 215 takes the topic out of table and registry; one that is unknown is fine, the broker's own are not."""
    create_topic(client, "gone")
    send(client, "gone", b"x")
    ask(client, Request.DELETE_TOPIC_IN_BROKER, topic="gone")
    ask(client, Request.DELETE_TOPIC_IN_BROKER, topic="gone")
    assert pull(client, "gone", 0).code == Response.TOPIC_NOT_EXIST
    with pytest.raises(Refused, match="belongs to the broker"):
        ask(client, Request.DELETE_TOPIC_IN_BROKER, topic="TBW102")


def test_deleted_and_made_again(tmp_path: Path) -> None:
    """SG-064: neither after kills nor in a topic of the same name are a deleted topic's messages seen again."""
    with BrokerProcess(tmp_path / "data") as broker:
        with connect(broker) as client:
            create_topic(client, "again", write=2, read=2)
            send(client, "again", b"old", b"old")
            ask(client, Request.DELETE_TOPIC_IN_BROKER, topic="again")
        broker.restart()
        with connect(broker) as client:
            assert "again" not in ask_body(client, Request.GET_ALL_TOPIC_CONFIG)["topicConfigTable"]
            create_topic(client, "again", write=2, read=2)
            stats = ask_body(client, Request.GET_TOPIC_STATS_INFO, topic="again")["offsetTable"]
            assert stats[queue("again")] == {"minOffset": 2, "maxOffset": 2, "lastUpdateTimestamp": 0}
            send(client, "again", b"new")
        broker.restart()
        with connect(broker) as client:
            moved = pull(client, "again", 0)
            assert (moved.code, moved.fields["nextBeginOffset"]) == (Response.PULL_OFFSET_MOVED, "2")
            assert [record.body for record in records(pull(client, "again", 2))] == [b"new"]
        with TextClient(broker.host, broker.port) as text:
            assert [next(text.iterate("again")).body] == [b"new"]


def test_shrunk_topic_stays_so(tmp_path: Path) -> None:
    """SG-064: partitions taken away do not come back with the next start; those made after the last save do."""
    with BrokerProcess(tmp_path / "data", "--checkpoint-interval-ms", "3600000") as broker:
        with connect(broker) as client:
            create_topic(client, "shrinking", write=4, read=4)
            for number in range(4):
                send(client, "shrinking", b"x", partition=number)
            create_topic(client, "shrinking", write=2, read=3)
            send(client, "automatic", b"x", partition=3)
        broker.restart()
        with connect(broker) as client:
            assert route(client, "shrinking") == (3, 2, 6)
            assert route(client, "automatic") == (4, 4, 6)


def test_permissions_are_checked(client: RemotingClient, broker: BrokerProcess) -> None:
    """SG-139: on send and on pull, by both protocols, from the moment that they change."""
    create_topic(client, "guarded")
    send(client, "guarded", b"x")
    create_topic(client, "guarded", perm=4)
    with pytest.raises(Refused, match="perm 4") as refused:
        send(client, "guarded", b"y")
    assert refused.value.code == Response.NO_PERMISSION
    assert [record.body for record in records(pull(client, "guarded", 0))] == [b"x"]
    create_topic(client, "guarded", perm=2)
    assert pull(client, "guarded", 0).code == Response.NO_PERMISSION
    send(client, "guarded", b"y")
    create_topic(client, "guarded", perm=6)
    assert [record.body for record in records(pull(client, "guarded", 0))] == [b"x", b"y"]


def test_topic_that_takes_nothing_any_more(client: RemotingClient, broker: BrokerProcess) -> None:
    """SG-064, SG-139: without partitions to write to there is none to choose, by either protocol."""
    create_topic(client, "closing", write=1, read=1)
    send(client, "closing", b"x")
    create_topic(client, "closing", write=0, read=1)
    with pytest.raises(Refused, match="0 partitions"):
        send(client, "closing", b"y", partition=-1)
    with TextClient(broker.host, broker.port) as text, pytest.raises(TextRefused, match="wrong partition"):
        text.put("closing", b"y")
    assert [record.body for record in records(pull(client, "closing", 0))] == [b"x"]


def test_held_pull_of_a_deleted_topic_ends(client: RemotingClient, broker: BrokerProcess) -> None:
    """SG-084: a consumer that waits is answered when its time is over, and told with its next pull."""
    create_topic(client, "waited-for")
    assert pull(client, "waited-for", 0).code == Response.PULL_NOT_FOUND
    with connect(broker) as other:
        ask(other, Request.DELETE_TOPIC_IN_BROKER, topic="waited-for")
    wait_until(
        lambda: pull(client, "waited-for", 0, wait_ms=50).code == Response.TOPIC_NOT_EXIST, DEADLINE_S, "the topic is gone"
    )


def test_what_takes_the_places_of_deleted_messages_is_not_hidden(tmp_path: Path) -> None:
    """A topic was deleted, a power cut took the last of its messages, and the broker is killed soon after that."""
    path = tmp_path / "data" / "config" / "topics.json"
    with BrokerProcess(tmp_path / "data", durability="memory") as broker:
        with TextClient(broker.host, broker.port) as client:
            for _ in range(3):
                client.put("t", b"deleted")
        assert broker.terminate() == 0
        content, _ = read_document(RealDisk(), path)
        assert content is not None
        del content["topicConfigTable"]["t"]
        write_document(RealDisk(), path, {**content, "deleted": {"t": {"0": 10}}})  # seven more were there
        broker.start()
        kept, _ = read_document(RealDisk(), path)
        assert kept is not None
        assert kept["deleted"] == {"t": {"0": 3}}
        with TextClient(broker.host, broker.port) as client:
            position = client.put("t", b"new", partition=0).position
        broker.kill()
        broker.start()
        with TextClient(broker.host, broker.port) as client:
            assert [message.body for message in client.get("t", partition=0, position=position).messages] == [b"new"]

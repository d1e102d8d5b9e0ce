"""Topics with priorities, as clients of both protocols send to them."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

import pytest

from metaq.protocol.remoting import fastjson
from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.headers import encode_header, with_letters
from metaq.protocol.remoting.sending.batch import BatchItem, encode_batch
from tests.support.admin import ask, ask_body, connect
from tests.support.broker import BrokerProcess, wait_until
from tests.support.halves import COMMIT, HALF_TOPIC, Producer
from tests.support.halves import TOPIC as HALVES
from tests.support.messages import count, pairs_of, records, send, send_header, sent
from tests.support.remoting import RemotingClient
from tests.support.talk import Talk

TOPIC: Final = "alarms"
PRIORITY: Final = "_SYS_MSG_PRIORITY_\x01{}\x02"
DEADLINE_S: Final = 60.0
# the header of 17 as RocketMQ 5.4's updateTopic -a +message.type=PRIORITY sends it
JAVA_CREATE: Final = {
    "topic": TOPIC,
    "defaultTopic": "TBW102",
    "readQueueNums": "3",
    "writeQueueNums": "3",
    "perm": "6",
    "topicFilterType": "SINGLE_TAG",
    "topicSysFlag": "0",
    "order": "false",
    "attributes": "+message.type=PRIORITY",
}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path_factory.mktemp("broker") / "data") as broker, connect(broker) as client:
        ask(client, Request.UPDATE_AND_CREATE_TOPIC, **JAVA_CREATE)
        yield broker


@pytest.fixture
def client(broker: BrokerProcess) -> Iterator[RemotingClient]:
    with connect(broker) as client:
        yield client


def bodies(client: RemotingClient, partition: int) -> list[bytes]:
    return [bytes(record.body) for record in records(client, TOPIC, partition)]


def test_attributes_are_shown_kept_and_refused(tmp_path: Path) -> None:
    """MY-034: 17 as RocketMQ 5.4 sends it; 21 and 351 show them; a change without them, and a restart, leave them."""
    with BrokerProcess(tmp_path / "data") as broker:
        change_attributes(broker)
        broker.restart()
        check_attributes(broker)


def change_attributes(broker: BrokerProcess) -> None:
    with connect(broker) as client:
        ask(client, Request.UPDATE_AND_CREATE_TOPIC, **JAVA_CREATE)
        old = {name: value for name, value in JAVA_CREATE.items() if name != "attributes"}
        ask(client, Request.UPDATE_AND_CREATE_TOPIC, **(old | {"writeQueueNums": "4", "readQueueNums": "4"}))
        for wrong in ("+cleanup.policy=COMPACTION", "message.type=FIFO", "-priority.max.wait.ms", "+message.type=URGENT"):
            answer = client.call(Request.UPDATE_AND_CREATE_TOPIC, JAVA_CREATE | {"attributes": wrong})
            assert answer.code == Response.SYSTEM_ERROR
            assert "attribute" in (answer.remark or "")
        group = {"groupName": "g", "attributes": {"+priority.factor": "50"}}
        ask(client, Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, fastjson.encode(group))


def shown_attributes(broker: BrokerProcess) -> dict[str, object]:
    """The attributes of the topic and of the group that ``change_attributes`` changes; empty without them."""
    with connect(broker) as client:
        shown = {}
        for code, fields in (
            (Request.GET_TOPIC_CONFIG, {"topic": TOPIC}),
            (Request.GET_SUBSCRIPTIONGROUP_CONFIG, {"group": "g"}),
        ):
            answer = client.call(code, fields)
            if answer.code == Response.SUCCESS:
                shown[code.name] = fastjson.decode(answer.body).get("attributes")
        return shown


def check_attributes(broker: BrokerProcess) -> None:
    with connect(broker) as client:
        row = ask_body(client, Request.GET_TOPIC_CONFIG, topic=TOPIC)
        assert (row["writeQueueNums"], row["attributes"]) == (4, {"message.type": "PRIORITY"})
        assert ask_body(client, Request.GET_ALL_TOPIC_CONFIG)["topicConfigTable"][TOPIC] == row
        shown = ask_body(client, Request.GET_SUBSCRIPTIONGROUP_CONFIG, group="g")
        assert shown["attributes"] == {"priority.factor": "50"}
        ask(client, Request.UPDATE_AND_CREATE_TOPIC, **(JAVA_CREATE | {"attributes": "-message.type"}))
        assert "attributes" not in ask_body(client, Request.GET_TOPIC_CONFIG, topic=TOPIC)


def send_several(client: RemotingClient, items: list[tuple[bytes, str]]) -> int:
    """Send a batch of bodies with properties, without waiting."""
    fields = with_letters(encode_header(send_header(TOPIC)._replace(batch=True)))
    return client.send(Request.SEND_BATCH_MESSAGE, fields, encode_batch(BatchItem(0, body, pairs) for body, pairs in items))


def test_the_priority_is_the_partition(client: RemotingClient) -> None:
    """MY-024, MY-029, MY-034: whatever the sender asked for, in runs, too; above the highest it is the highest."""
    before = [count(client, TOPIC, partition) for partition in range(3)]
    asked = [(2, PRIORITY.format(0)), (0, PRIORITY.format(1)), (1, PRIORITY.format(99)), (1, ""), (-1, "KEYS\x01k\x02")]
    opaques = [send(client, send_header(TOPIC, pairs, partition=partition), b"x") for partition, pairs in asked * 2]
    answers = [int(sent(client, opaque)["queueId"]) for opaque in opaques]
    assert answers == [0, 1, 2, 0, 0] * 2
    assert [count(client, TOPIC, partition) - before[partition] for partition in range(3)] == [6, 2, 2]
    assert pairs_of(records(client, TOPIC, 2)[-1])["_SYS_MSG_PRIORITY_"] == "99"


@pytest.mark.parametrize("value", ["-1", "high", "1.0", "9" * 30, "²"])
def test_what_no_priority_is(client: RemotingClient, value: str) -> None:
    answer = client.response(send(client, send_header(TOPIC, PRIORITY.format(value)), b"x"))
    assert (answer.code, "from 0 up" in (answer.remark or "")) == (Response.MESSAGE_ILLEGAL, True)


def test_a_key_wins(client: RemotingClient) -> None:
    """The message stays where its sender puts the key, and its priority goes."""
    fields = sent(client, send(client, send_header(TOPIC, f"__SHARDINGKEY\x01k\x02{PRIORITY.format(2)}", partition=1), b"k"))
    assert fields["queueId"] == "1"
    assert pairs_of(records(client, TOPIC, 1)[-1]) == {"__SHARDINGKEY": "k"}


def test_elsewhere_it_is_a_property(client: RemotingClient) -> None:
    header = partial(send_header, "plain", partition=1)
    sent(client, send(client, header(PRIORITY.format("high")), b"x"))
    sent(client, send(client, header(PRIORITY.format("high")), b"y"))
    assert [pairs_of(record)["_SYS_MSG_PRIORITY_"] for record in records(client, "plain", 1)] == ["high", "high"]


def test_later_messages_go_there_when_their_copy_is_put(tmp_path: Path) -> None:
    """ES-001, MY-034: by a time and by a level; the topic may have changed until then."""
    with BrokerProcess(tmp_path / "data") as broker, connect(broker) as client:
        for pairs in ("TIMER_DELAY_MS\x011500\x02", "DELAY\x011\x02"):
            fields = sent(client, send(client, send_header(TOPIC, pairs + PRIORITY.format(2)), b"later"))
            assert fields["queueId"] == "0"
        sent(client, send(client, send_header(TOPIC, "DELAY\x011\x02" + PRIORITY.format("high"), partition=2), b"bad"))
        ask(client, Request.UPDATE_AND_CREATE_TOPIC, **JAVA_CREATE)
        wait_until(lambda: count(client, TOPIC, 2) == 2, DEADLINE_S, "both are delivered")
        wait_until(lambda: count(client, TOPIC, 0) == 1, DEADLINE_S, "so is the other")
        assert bodies(client, 0) == [b"bad"]


def test_a_half_message_goes_there_when_it_is_committed(broker: BrokerProcess, client: RemotingClient) -> None:
    """MY-034: until then its producer has the partition that it asked for."""
    ask(client, Request.UPDATE_AND_CREATE_TOPIC, **(JAVA_CREATE | {"topic": HALVES}))
    with Producer(broker) as producer:
        begun = producer.half(b"paid", pairs=PRIORITY.format(2), partition=1)
        assert producer.end(begun.end(COMMIT)) == 0
    assert [count(client, HALVES, partition) for partition in range(3)] == [0, 0, 1]


def test_a_half_message_without_a_right_priority_is_refused(broker: BrokerProcess, client: RemotingClient) -> None:
    """MY-034: when it is sent, like other messages: 13, and nothing is undecided; in another topic it is a property."""
    ask(client, Request.UPDATE_AND_CREATE_TOPIC, **(JAVA_CREATE | {"topic": HALVES}))
    with Producer(broker) as producer:
        before = len(records(client, HALF_TOPIC))
        for pairs in (PRIORITY.format("high"), PRIORITY.format("-1"), "DELAY\x011\x02" + PRIORITY.format("1.0")):
            answer = producer.response(producer.start_half(b"bad", pairs=pairs))
            assert (answer.code, "from 0 up" in (answer.remark or "")) == (Response.MESSAGE_ILLEGAL, True)
        assert len(records(client, HALF_TOPIC)) == before
        ask(client, Request.UPDATE_AND_CREATE_TOPIC, **(JAVA_CREATE | {"topic": HALVES, "attributes": "-message.type"}))
        producer.half(b"taken", pairs=PRIORITY.format("high"))


def test_a_batch_has_one_priority(client: RemotingClient) -> None:
    before = count(client, TOPIC, 1)
    one = PRIORITY.format(1)
    assert sent(client, send_several(client, [(b"a", one), (b"b", one)]))["queueId"] == "1"
    assert count(client, TOPIC, 1) == before + 2
    answer = client.response(send_several(client, [(b"a", one), (b"b", "")]))
    assert answer.code == Response.MESSAGE_ILLEGAL


def test_a_text_put_without_priority_has_the_lowest(broker: BrokerProcess, client: RemotingClient) -> None:
    before = count(client, TOPIC, 0)
    with Talk(broker) as talk:
        for number in (2, -1, 0, 2):
            ((status, text),) = talk.ask(f"put {TOPIC} {number} 1 0 1\r\nx".encode())
            assert (status, text.split()[1]) == (200, "0")
        ((status, _),) = talk.ask(f"put {TOPIC} 3 1 0 1\r\nx".encode())
        assert status == 500
    assert count(client, TOPIC, 0) == before + 4


@pytest.mark.parametrize(("priority", "expected"), [(0, "0"), (1, "1"), (7, "2")])
def test_a_text_put_says_its_priority(broker: BrokerProcess, client: RemotingClient, priority: int, expected: str) -> None:
    """MY-024, MY-029: whatever partition it asks for; the reply names the one where it is."""
    before = count(client, TOPIC, int(expected))
    with Talk(broker) as talk:
        ((status, text),) = talk.ask(f"put {TOPIC} -1 1 0 priority={priority} 1\r\nx".encode())
        assert (status, text.split()[1]) == (200, expected)
    assert count(client, TOPIC, int(expected)) == before + 1


@pytest.mark.parametrize(("options", "is_delayed"), [("key=k", False), ("key=k priority=2", False), ("key=k delay=1", True)])
def test_a_text_put_with_a_key_stays_in_its_partition(
    broker: BrokerProcess, client: RemotingClient, options: str, is_delayed: bool
) -> None:
    """MY-029: as one of RocketMQ does; messages with the same key keep their order."""
    before = count(client, TOPIC, 1)
    with Talk(broker) as talk:
        ((status, text),) = talk.ask(f"put {TOPIC} 1 1 0 {options} 1\r\nx".encode())
        assert status == 200 and (is_delayed or text.split()[1] == "1")
    wait_until(lambda: count(client, TOPIC, 1) == before + 1, DEADLINE_S, "it is in its partition")


def test_a_message_with_an_id_is_stored_once_at_the_priority_of_the_first(client: RemotingClient) -> None:
    """MY-029, E-07: answers tell the partition of its priority, whatever a later one with its id asks for, in batches too."""
    topic = "once"
    attributes = "+message.type=PRIORITY,+dedupe.window.ms=600000"
    ask(client, Request.UPDATE_AND_CREATE_TOPIC, **(JAVA_CREATE | {"topic": topic, "attributes": attributes}))

    def put(ident: str, priority: int) -> dict[str, str]:
        header = send_header(topic, f"UNIQ_KEY\x01{ident}\x02{PRIORITY.format(priority)}")
        return sent(client, send(client, header, b"x"))

    def put_batch(priority: int) -> dict[str, str]:
        items = [BatchItem(0, b"x", f"UNIQ_KEY\x01{ident}\x02{PRIORITY.format(priority)}") for ident in ("b1", "b2")]
        header = send_header(topic)._replace(batch=True)
        return sent(client, send(client, header, encode_batch(items), Request.SEND_BATCH_MESSAGE))

    first, batch = put("a", 2), put_batch(1)
    assert (first["queueId"], batch["queueId"]) == ("2", "1")
    assert (put("a", 0), put_batch(0)) == (first, batch)
    assert put("b2", 0)["queueId"] == "1"
    assert [count(client, topic, partition) for partition in range(3)] == [0, 2, 1]

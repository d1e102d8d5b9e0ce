"""Messages sent back by consumers: retry topic, delay levels, dead letters, and what clients publish themselves."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from metaq.protocol.record import Record
from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.headers import Int32
from metaq.protocol.sysflag import TRANSACTION_PREPARED
from tests.support.broker import BrokerProcess, wait_until
from tests.support.messages import count, pairs_of, records, send, send_header, sent
from tests.support.metrics import Values, value
from tests.support.remoting import RemotingClient
from tests.support.slowdisk import Controlled

DEADLINE_S: Final = 60.0
GROUP: Final = "workers"
RETRY: Final = f"%RETRY%{GROUP}"
DEAD: Final = f"%DLQ%{GROUP}"


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path / "data") as process:
        yield process


@pytest.fixture
def client(broker: BrokerProcess) -> Iterator[RemotingClient]:
    with RemotingClient(broker.host, broker.port) as connection:
        yield connection


def put(client: RemotingClient, body: bytes, pairs: str = "") -> Record:
    sent(client, send(client, send_header("work", pairs), body))
    return records(client, "work")[-1]


def send_back(client: RemotingClient, record: Record, **fields: str) -> int:
    """Send a message back; the code of the answer."""
    header = {"offset": str(record.log_offset), "group": GROUP, "delayLevel": "0", "unitMode": "false"}
    return client.call(Request.CONSUMER_SEND_MSG_BACK, header | fields).code


def last(client: RemotingClient, topic: str, count: int) -> Record:
    wait_until(lambda: len(records(client, topic)) == count, DEADLINE_S, f"{count} messages are in {topic}")
    return records(client, topic)[-1]


def test_a_message_sent_back_comes_again_and_again_and_is_given_up(broker: BrokerProcess, client: RemotingClient) -> None:
    """SG-072, SG-073, SG-074: retried as often as the consumer says, then kept as a dead letter, with an alarm."""
    original = put(client, b"hard", "TAGS\x01t\x02UNIQ_KEY\x01ID1\x02")
    record = original
    for times in (1, 2):
        assert send_back(client, record, delayLevel="1", maxReconsumeTimes="2") == Response.SUCCESS
        record = last(client, RETRY, times)
        pairs = pairs_of(record)
        assert record.reconsume_times == times
        assert (bytes(record.body), record.born_ms, record.born_host) == (b"hard", original.born_ms, original.born_host)
        assert (pairs["RETRY_TOPIC"], pairs["TAGS"], pairs["UNIQ_KEY"]) == ("work", "t", "ID1")
        assert pairs["ORIGIN_MESSAGE_ID"] == f"{original.store_host.hex().upper()}{original.log_offset:016X}"
    assert "dead_letter" not in broker.stderr()
    assert send_back(client, record, delayLevel="1", maxReconsumeTimes="2") == Response.SUCCESS
    dead = last(client, DEAD, 1)
    pairs = pairs_of(dead)
    assert (bytes(dead.body), dead.reconsume_times, pairs["RETRY_TOPIC"]) == (b"hard", 3, "work")
    assert "DELAY" not in pairs
    assert f"dead_letter group={GROUP} topic=work id=ID1 reconsume_times=3" in broker.stderr()
    assert len(records(client, RETRY)) == 2


def test_the_level_rises_with_the_tries(client: RemotingClient) -> None:
    """SG-075: without a level of the consumer's own, the copy waits at level 3 + tries; 3 is 10 s."""
    record = put(client, b"slow")
    assert send_back(client, record) == Response.SUCCESS
    parked = records(client, "SCHEDULE_TOPIC_XXXX", 2)[0]
    assert pairs_of(parked)["DELAY"] == "3"
    assert (pairs_of(parked)["REAL_TOPIC"], parked.reconsume_times) == (RETRY, 1)
    assert send_back(client, parked) == Response.SUCCESS
    assert pairs_of(records(client, "SCHEDULE_TOPIC_XXXX", 3)[0])["DELAY"] == "4"


def test_what_cannot_be_retried(client: RemotingClient) -> None:
    """SG-073, SG-074: a negative level gives up at once; a place without a message and an old client's limit are told."""
    record = put(client, b"x")
    assert send_back(client, record, delayLevel="-1") == Response.SUCCESS
    assert last(client, DEAD, 1).reconsume_times == 1
    assert send_back(client, record, offset=str(record.log_offset + 1)) == Response.SYSTEM_ERROR
    assert send_back(client, record, offset="-1") == Response.SYSTEM_ERROR


def test_an_unknown_group_is_refused_where_groups_are_not_created(tmp_path: Path) -> None:
    """SG-073: the group must be known; so it must be for a message that a consumer publishes to the retry topic itself."""
    flags = ("--no-auto-create-groups",)
    with BrokerProcess(tmp_path / "data", *flags) as broker, RemotingClient(broker.host, broker.port) as client:
        record = put(client, b"x")
        assert send_back(client, record) == Response.SUBSCRIPTION_GROUP_NOT_EXIST
        answer = client.response(send(client, send_header(RETRY), b"x"))
        assert answer.code == Response.SUBSCRIPTION_GROUP_NOT_EXIST
        assert RETRY not in json.loads(client.call(Request.GET_ALL_TOPIC_CONFIG).body)["topicConfigTable"]


def test_a_consumer_that_publishes_the_copy_itself(broker: BrokerProcess, client: RemotingClient) -> None:
    """SG-074: a message sent to the retry topic with its counters is delivered again, or is a dead letter."""
    pairs = "RETRY_TOPIC\x01work\x02DELAY\x011\x02UNIQ_KEY\x01ID2\x02"
    header = send_header(RETRY, pairs)._replace(reconsume_times=Int32(2), max_reconsume_times=Int32(3))
    sent(client, send(client, header, b"again"))
    again = last(client, RETRY, 1)
    assert (again.reconsume_times, bytes(again.body)) == (2, b"again")
    sent(client, send(client, header._replace(max_reconsume_times=Int32(2)), b"dead"))
    dead = last(client, DEAD, 1)
    assert (dead.reconsume_times, bytes(dead.body), pairs_of(dead).get("DELAY")) == (2, b"dead", None)
    assert f"dead_letter group={GROUP} topic=work id=ID2" in broker.stderr()


@pytest.mark.parametrize("delay", ["DELAY\x011\x02", ""], ids=["delayed", "at once"])
def test_a_dead_letter_waits_for_no_producer(broker: BrokerProcess, client: RemotingClient, delay: str) -> None:
    """SG-074: some clients keep the mark of a transaction in a retry: nobody would decide it, and it would be lost."""
    pairs = f"RETRY_TOPIC\x01work\x02{delay}UNIQ_KEY\x01ID3\x02TRAN_MSG\x01true\x02PGROUP\x01pg\x02"
    header = send_header(RETRY, pairs, sys_flag=TRANSACTION_PREPARED)
    header = header._replace(reconsume_times=Int32(2), max_reconsume_times=Int32(2))
    answer = sent(client, send(client, header, b"dead"))
    assert not answer.get("transactionId")
    dead = last(client, DEAD, 1)
    assert (bytes(dead.body), "TRAN_MSG" in pairs_of(dead), dead.sys_flag) == (b"dead", False, 0)
    assert value(broker, "metaq_dead_letters_total") == 1
    assert f"dead_letter group={GROUP} topic=work id=ID3" in broker.stderr()
    assert count(client, "RMQ_SYS_TRANS_HALF_TOPIC") == 0


@pytest.mark.parametrize("failing", [False, True])
def test_nothing_is_counted_before_it_is_safe(tmp_path: Path, *, failing: bool) -> None:
    """SG-074, E-01: a retry and a dead letter count when the disk has them, and not at all when it fails."""
    with Controlled(tmp_path / "data") as broker, RemotingClient(broker.host, broker.port) as client:
        record = put(client, b"hard")
        retry = send_header(RETRY, "RETRY_TOPIC\x01work\x02")._replace(reconsume_times=Int32(2), max_reconsume_times=Int32(2))
        fields = {"offset": str(record.log_offset), "group": GROUP, "delayLevel": "-1", "unitMode": "false"}
        broker.stall()
        asked = [client.send(Request.CONSUMER_SEND_MSG_BACK, fields), send(client, retry, b"dead")]
        wait_until(lambda: value(broker, "metaq_waiting_bytes") >= 8, DEADLINE_S, "both wait for the disk")
        assert counted(broker) == (0, 0)
        broker.go_on(failing=failing)
        codes = {client.response(opaque).code for opaque in asked}
        assert (codes == {Response.SUCCESS}) == (not failing)
        assert counted(broker) == ((0, 0) if failing else (1, 2))


def counted(broker: BrokerProcess) -> tuple[float, int]:
    """Return how many messages were sent back, and how many are dead letters; the log has as many alarms as the counter."""
    found = Values(broker)
    dead = found.get("metaq_dead_letters_total")
    assert broker.stderr().count("dead_letter group=") == dead
    return found.get("metaq_messages_sent_back_total"), int(dead)

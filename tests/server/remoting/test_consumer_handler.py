"""Offsets and locks of consumers: the handler alone, in the process of the test (``tests.support.inprocess``)."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from metaq.engine.locklog import LockLog
from metaq.engine.offsets.offsetlog import OffsetLog
from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.headers import Int32, QueryConsumerOffset, QueueOnly, SearchOffset, UpdateConsumerOffset
from metaq.server.remoting.consuming.consumer import ConsumerHandler
from metaq.server.text.put import PutHandler
from metaq.store.files.filecache import run_here
from tests.support.inprocess import Parts, Remoting, Text

TOPIC: Final = "orders"
GROUP: Final = "billing"
FIRST: Final = Int32(0)
MESSAGES: Final = 10


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Parts]:
    """A broker that handles consumers' requests and puts; the first partition holds a message of each second."""
    parts = Parts(tmp_path / "data", topics={TOPIC: {"partitions": 2}})
    locks, offsets = LockLog(parts.context, parts.turns), OffsetLog(parts.context, parts.turns, run_here)
    parts.endpoint.answer(ConsumerHandler(parts.context, parts.later, locks, offsets).requests())
    puts = PutHandler(parts.context, parts.turns).puts
    parts.endpoint.answer_text({}, puts, puts)
    producer = Text(parts)
    for number in range(MESSAGES):
        producer.send(b"put %b 0 1 0 %d\r\nx" % (TOPIC.encode(), number))
        parts.end_turn()
        parts.clock.advance(1.0)
    yield parts
    parts.close()


@pytest.fixture
def client(parts: Parts) -> Remoting:
    return Remoting(parts)


def commit(client: Remoting, offset: int, *, topic: str = TOPIC, partition: int = 0) -> int:
    """Commit an offset; the code of the answer."""
    return client.call(Request.UPDATE_CONSUMER_OFFSET, UpdateConsumerOffset(GROUP, topic, Int32(partition), offset)).code


def committed(client: Remoting) -> int:
    return int(client.call(Request.QUERY_CONSUMER_OFFSET, QueryConsumerOffset(GROUP, TOPIC, FIRST)).fields["offset"])


def test_a_commit_moves_the_offset_forward_only(client: Remoting) -> None:
    assert committed(client) == 0
    assert commit(client, 5) == Response.SUCCESS
    assert commit(client, 3) == Response.SUCCESS
    assert committed(client) == 5


def test_a_group_without_an_offset_may_decide_where_it_begins(client: Remoting) -> None:
    answer = client.call(Request.QUERY_CONSUMER_OFFSET, QueryConsumerOffset(GROUP, TOPIC, FIRST, set_zero_if_not_found=False))
    assert answer.code == Response.QUERY_NOT_FOUND
    assert answer.remark == "the group billing has no offset of orders-0 yet"


def test_an_offset_beyond_the_end_is_taken_back(parts: Parts, client: Remoting) -> None:
    """A power cut took the messages that were consumed: the next commit, of a lower offset, counts."""
    parts.context.offsets.commit(GROUP, TOPIC, 0, MESSAGES + 5, parts.clock.monotonic())
    commit(client, MESSAGES - 1)
    assert committed(client) == MESSAGES - 1


def test_a_commit_needs_a_partition_that_exists(client: Remoting) -> None:
    assert commit(client, 1, topic="unknown") == Response.TOPIC_NOT_EXIST
    assert commit(client, 1, partition=2) == Response.SYSTEM_ERROR


def test_a_replica_that_changes_its_role_takes_no_commit(parts: Parts, client: Remoting) -> None:
    error = parts.store.fence.close("the role of this replica changes; try again")
    assert commit(client, 1) == error.code
    assert committed(client) == 0


def test_the_ends_and_times_of_a_partition(parts: Parts, client: Remoting) -> None:
    queue, began_ms = QueueOnly(TOPIC, FIRST), parts.clock.now_ms() - MESSAGES * 1000
    assert client.call(Request.GET_MIN_OFFSET, queue).fields["offset"] == "0"
    assert client.call(Request.GET_MAX_OFFSET, queue).fields["offset"] == str(MESSAGES)
    assert client.call(Request.GET_EARLIEST_MSG_STORETIME, queue).fields["timestamp"] == str(began_ms)
    assert client.call(Request.GET_EARLIEST_MSG_STORETIME, QueueOnly(TOPIC, Int32(1))).fields["timestamp"] == "-1"
    search = SearchOffset(TOPIC, FIRST, began_ms + 2500)
    assert client.call(Request.SEARCH_OFFSET_BY_TIMESTAMP, search).fields["offset"] == "3"


def test_locks_are_answered_when_they_are_in_the_log(parts: Parts) -> None:
    queues = [{"topic": TOPIC, "brokerName": parts.settings.broker_name, "queueId": number} for number in range(2)]
    bodies = {
        name: json.dumps({"clientId": name, "consumerGroup": GROUP, "mqSet": queues}).encode() for name in ("one@1", "two@1")
    }
    one, two = Remoting(parts), Remoting(parts)
    one.send(Request.LOCK_BATCH_MQ, body=bodies["one@1"])
    two.send(Request.LOCK_BATCH_MQ, body=bodies["two@1"])
    assert one.answers() == []
    parts.end_turn()
    assert [len(json.loads(answer.body)["lockOKMQSet"]) for answer in one.answers()] == [2]
    assert [len(json.loads(answer.body)["lockOKMQSet"]) for answer in two.answers()] == [0]

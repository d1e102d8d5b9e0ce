"""Transactional messages on the wire: half messages, decisions, and what becomes of both through kills."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.headers import Int32
from metaq.protocol.sysflag import TRANSACTION_PREPARED
from tests.engine.test_delay import Controlled
from tests.support.broker import BrokerProcess, wait_until
from tests.support.halves import (
    COMMIT,
    GIVEN_UP,
    GROUP,
    HALF_TOPIC,
    NEVER,
    OP_TOPIC,
    ROLLBACK,
    SNAPSHOT,
    TOPIC,
    UNKNOWN,
    Begun,
    Producer,
    bodies,
)
from tests.support.messages import BORN_MS, count, pairs_of, records, send, send_header, sent
from tests.support.remoting import RemotingClient

DEADLINE_S: Final = 60.0


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path / "data", *NEVER) as process:
        yield process


@pytest.fixture
def producer(broker: BrokerProcess) -> Iterator[Producer]:
    with Producer(broker) as client:
        yield client


def refusal(client: RemotingClient, pairs: str, *, sys_flag: int = 4, body: bytes = b"x") -> int:
    return client.response(send(client, send_header(TOPIC, pairs, sys_flag=sys_flag), body)).code


# -- deciding ---------------------------------------------------------------------------------------------------------


def test_a_half_message_is_seen_when_it_is_committed(producer: Producer) -> None:
    """RD-105: as it was sent, in its partition, without the names of the half topic, and not before."""
    pairs = "TAGS\x01t\x02KEYS\x01k\x02"
    begun = producer.half(b"paid", key="U1", pairs=pairs, partition=3, flag=7)
    assert count(producer, TOPIC, 3) == 0
    [half] = records(producer, HALF_TOPIC)
    assert (half.log_offset, half.queue_offset, half.sys_flag) == (begun.log_offset, begun.ordinal, 0)
    assert (pairs_of(half)["REAL_TOPIC"], pairs_of(half)["REAL_QID"]) == (TOPIC, "3")
    assert producer.end(begun.end(COMMIT)) == Response.SUCCESS
    [message] = records(producer, TOPIC, 3)
    assert (bytes(message.body), message.flag, message.born_ms, message.reconsume_times) == (b"paid", 7, BORN_MS, 0)
    assert message.born_host == half.born_host
    assert message.sys_flag & 0xFF == COMMIT
    own = {"PGROUP": GROUP, "UNIQ_KEY": "U1", "TRAN_PREPARED_QUEUE_OFFSET": str(begun.ordinal)}
    assert pairs_of(message) == {**own, "TAGS": "t", "KEYS": "k"}
    [op] = records(producer, OP_TOPIC)
    assert (bytes(op.body), pairs_of(op)["TAGS"]) == (b"%d" % begun.ordinal, "d")
    found = producer.call(Request.QUERY_MESSAGE, query("k"))
    assert found.code == Response.SUCCESS
    assert found.body.count(b"paid") == 1


def query(key: str) -> dict[str, str]:
    return {"topic": TOPIC, "key": key, "maxNum": "9", "beginTimestamp": "0", "endTimestamp": str(1 << 60)}


def test_what_is_rolled_back_is_never_seen(producer: Producer) -> None:
    """RD-105: the decision is recorded, and nothing else; who does not know changes nothing."""
    begun = producer.half(b"paid")
    assert producer.end(begun.end(UNKNOWN)) == Response.SUCCESS
    assert count(producer, OP_TOPIC) == 0
    assert producer.end(begun.end(ROLLBACK)) == Response.SUCCESS
    assert producer.end(begun.end(COMMIT)) == Response.SYSTEM_ERROR
    assert bodies(producer, OP_TOPIC) == [b"%d" % begun.ordinal]
    assert count(producer, TOPIC) == 0


def test_only_who_means_this_message_decides_it(producer: Producer) -> None:
    """RD-105: with another group, ordinal, log offset or id, or a decision that is none, nothing happens."""
    first, other = producer.half(b"first"), producer.half(b"other")
    end = first.end(COMMIT)
    wrong = [
        end._replace(producer_group="others"),
        end._replace(tran_state_table_offset=other.ordinal),
        end._replace(tran_state_table_offset=other.ordinal + 1),
        end._replace(tran_state_table_offset=-1),
        end._replace(commit_log_offset=other.log_offset),
        end._replace(msg_id=other.key),
        end._replace(commit_or_rollback=Int32(4)),
    ]
    for each in wrong:
        assert producer.end(each) == Response.SYSTEM_ERROR, each
    assert count(producer, OP_TOPIC) == 0
    assert producer.end(end._replace(msg_id=first.offset_id)) == Response.SUCCESS  # what a client without unique ids says
    assert bodies(producer) == [b"first"]


def test_a_late_decision_of_one_message_is_none_of_the_next(producer: Producer) -> None:
    """RD-105: repeated, delayed and contradicting decisions change nothing, also those that come before the first is stored."""
    begun = [producer.half(b"%d" % number) for number in range(8)]
    for half in begun[:4]:
        opaques = [producer.start_end(half.end(decision)) for decision in (COMMIT, COMMIT, ROLLBACK)]
        codes = [producer.response(opaque).code for opaque in opaques]
        assert codes == [Response.SUCCESS, Response.SYSTEM_ERROR, Response.SYSTEM_ERROR]
    for half in begun[:4]:
        for decision in (ROLLBACK, COMMIT):
            assert producer.end(half.end(decision)) == Response.SYSTEM_ERROR
    assert bodies(producer) == [b"0", b"1", b"2", b"3"]
    assert count(producer, OP_TOPIC) == 4
    for half in begun[4:]:
        assert producer.end(half.end(ROLLBACK)) == Response.SUCCESS
    assert count(producer, TOPIC) == 4


def test_one_way_decisions_get_no_answer(producer: Producer) -> None:
    """RD-105: as producers send them, good and bad."""
    begun = producer.half(b"paid")
    for end in (begun.end(COMMIT), begun.end(COMMIT), begun.end(UNKNOWN), begun.end(COMMIT)._replace(producer_group="x")):
        producer.start_end(end, oneway=True)
    wait_until(lambda: count(producer, TOPIC) == 1, DEADLINE_S, "it is committed")
    assert bodies(producer) == [b"paid"]


def test_a_transactional_message_may_be_delayed(producer: Producer) -> None:
    """RD-105, SG-075: its time begins when it is committed."""
    begun = producer.half(b"later", pairs="DELAY\x011\x02", partition=1)
    assert count(producer, "SCHEDULE_TOPIC_XXXX") == 0
    assert producer.end(begun.end(COMMIT)) == Response.SUCCESS
    [parked] = records(producer, "SCHEDULE_TOPIC_XXXX")
    wait_until(lambda: count(producer, TOPIC, 1) == 1, DEADLINE_S, "it is delivered")
    [message] = records(producer, TOPIC, 1)
    assert bytes(message.body) == b"later"
    assert message.store_ms - parked.store_ms >= 1000


# -- sending ----------------------------------------------------------------------------------------------------------


def test_what_could_not_be_committed_is_refused_when_it_is_sent(producer: Producer) -> None:
    """RD-105: bad delays, properties without room for the broker's own, a prepared sysFlag without the property, batches."""
    transactional = f"TRAN_MSG\x01true\x02PGROUP\x01{GROUP}\x02"
    assert refusal(producer, f"{transactional}DELAY\x01soon\x02") == Response.MESSAGE_ILLEGAL
    assert refusal(producer, f"{transactional}TIMER_DELAY_MS\x0110\x02") == Response.MESSAGE_ILLEGAL
    assert refusal(producer, f"{transactional}a\x01{'x' * 32_650}\x02") == Response.MESSAGE_ILLEGAL
    assert refusal(producer, "TRAN_MSG\x01false\x02") == Response.MESSAGE_ILLEGAL
    batch = send(producer, send_header(TOPIC, sys_flag=4), b"x", Request.SEND_BATCH_MESSAGE)
    assert producer.response(batch).code == Response.MESSAGE_ILLEGAL
    producer.call(Request.UPDATE_BROKER_CONFIG, body=b"brokerPermission=4")
    assert refusal(producer, transactional) == Response.NO_PERMISSION
    assert count(producer, HALF_TOPIC) == 0
    assert count(producer, TOPIC) == 0


def test_a_delayed_retry_is_no_half_message(producer: Producer) -> None:
    """RD-105: a consumer that publishes what it could not process decides nothing. Without a delay it is one."""
    again = send_header(TOPIC, "TRAN_MSG\x01true\x02DELAY\x011\x02")._replace(reconsume_times=Int32(1))
    sent(producer, send(producer, again, b"again"))
    assert bodies(producer, "SCHEDULE_TOPIC_XXXX") == [b"again"]
    at_once = send_header(TOPIC, "TRAN_MSG\x01true\x02")._replace(reconsume_times=Int32(1))
    sent(producer, send(producer, at_once, b"half"))
    [half] = records(producer, HALF_TOPIC)
    assert (bytes(half.body), pairs_of(half)["PGROUP"]) == (b"half", "pg")  # of the send's header


def test_senders_cannot_forge_what_is_the_brokers(producer: Producer) -> None:
    """RD-105: METAQ_HALF and the half topics are closed to senders, and plain ends of nothing are refused."""
    begun = producer.half(b"x", pairs="METAQ_HALF\x017:0:0\x02")
    assert "METAQ_HALF" not in pairs_of(records(producer, HALF_TOPIC)[0])
    for topic in (HALF_TOPIC, OP_TOPIC, GIVEN_UP):
        assert producer.response(send(producer, send_header(topic), b"0")).code == Response.NO_PERMISSION
    for group in ("pg\x02METAQ_HALF\x010:0:0", "pg\x01", ""):
        half = send_header(TOPIC, "TRAN_MSG\x01true\x02", sys_flag=TRANSACTION_PREPARED)._replace(producer_group=group)
        assert producer.response(send(producer, half, b"forged")).code == Response.MESSAGE_ILLEGAL
    assert count(producer, HALF_TOPIC) == 1
    assert producer.end(begun.end(COMMIT)) == Response.SUCCESS
    topics = json.loads(producer.call(Request.GET_SYSTEM_TOPIC_LIST_FROM_BROKER).body)["topicList"]
    assert {HALF_TOPIC, OP_TOPIC, GIVEN_UP} <= set(topics)


def test_a_topic_that_was_deleted_meanwhile(producer: Producer) -> None:
    """RD-105: the commit is refused and the message stays undecided; when the topic is made again, it can be committed."""
    begun = producer.half(b"paid")
    assert producer.call(Request.DELETE_TOPIC_IN_BROKER, {"topic": TOPIC}).code == Response.SUCCESS
    assert producer.end(begun.end(COMMIT)) == Response.TOPIC_NOT_EXIST
    assert count(producer, OP_TOPIC) == 0
    sent(producer, send(producer, send_header(TOPIC), b"new"))
    assert producer.end(begun.end(COMMIT)) == Response.SUCCESS
    assert bodies(producer) == [b"new", b"paid"]


# -- kills ------------------------------------------------------------------------------------------------------------


def kill(broker: BrokerProcess) -> None:
    broker.restart()


def stop(broker: BrokerProcess) -> None:
    assert broker.terminate() == 0
    broker.start()


def lose_snapshot(broker: BrokerProcess) -> None:
    assert broker.terminate() == 0
    path = broker.data / SNAPSHOT
    path.unlink()
    path.with_name(f"{path.name}.bak").unlink(missing_ok=True)
    broker.start()


def tear_snapshot(broker: BrokerProcess) -> None:
    assert broker.terminate() == 0
    path = broker.data / SNAPSHOT
    path.write_bytes(path.read_bytes()[:-9])
    path.with_name(f"{path.name}.bak").unlink(missing_ok=True)
    broker.start()
    assert "table of half messages damaged" in broker.stderr()


@pytest.mark.parametrize("again", [kill, stop, lose_snapshot, tear_snapshot])
def test_undecided_ones_outlive_the_broker(broker: BrokerProcess, again: Callable[[BrokerProcess], None]) -> None:
    """RD-105: with or without the snapshot, what is undecided can be decided, and what is decided cannot, start after start."""
    with Producer(broker) as producer:
        begun = [producer.half(b"%d" % number) for number in range(6)]
        assert producer.end(begun[0].end(COMMIT)) == Response.SUCCESS
        assert producer.end(begun[1].end(ROLLBACK)) == Response.SUCCESS
    again(broker)
    with Producer(broker) as producer:
        for half in begun[:2]:
            assert producer.end(half.end(COMMIT)) == Response.SYSTEM_ERROR
        begun.append(producer.half(b"6"))
        assert producer.end(begun[2].end(COMMIT)) == Response.SUCCESS
        assert producer.end(begun[3].end(ROLLBACK)) == Response.SUCCESS
    again(broker)
    with Producer(broker) as producer:
        for half in begun[:4]:
            assert producer.end(half.end(COMMIT)) == Response.SYSTEM_ERROR
        for half in begun[4:]:
            assert producer.end(half.end(COMMIT)) == Response.SUCCESS
        assert bodies(producer) == [b"0", b"2", b"4", b"5", b"6"]


def test_killed_before_the_decision_is_answered(broker: BrokerProcess) -> None:
    """RD-105: it is decided or it is not; decided again after the start, the message is there once in either case."""
    begun: list[Begun] = []
    for number in range(5):
        with Producer(broker) as producer:
            begun.append(producer.half(b"%d" % number))
            producer.start_end(begun[-1].end(COMMIT), oneway=True)
        broker.restart()
        with Producer(broker) as producer:
            decided = count(producer, OP_TOPIC)
            code = producer.end(begun[-1].end(COMMIT))
            assert (code == Response.SUCCESS) == (decided == number)
            assert bodies(producer) == [b"%d" % each for each in range(number + 1)]


class Load:
    """Half messages and decisions without end, and what was answered to them."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self.begun: dict[bytes, Begun] = {}
        self.fates: dict[bytes, int | None] = {}
        """Of those of which a decision was sent; ``None``: the answer got lost."""

    def until_killed(self, broker: BrokerProcess, turn: int) -> None:
        """Send, kill the broker at once or after some answers, and take note of those that came."""
        known = [body for body in self.begun if body not in self.fates]
        decided = sorted(body for body, fate in self.fates.items() if fate is not None)
        with Producer(broker) as producer:
            halves = {body: producer.start_half(body) for body in (b"%d.%d" % (turn, number) for number in range(40))}
            decisions = {body: self._rng.choice((COMMIT, ROLLBACK)) for body in known}
            ends = {body: producer.start_end(self.begun[body].end(decision)) for body, decision in decisions.items()}
            repeated = [producer.start_end(self.begun[body].end(COMMIT)) for body in decided]
            if turn == 0 or self._rng.random() < 0.7:
                awaited = self._rng.choice(sorted(halves))
                self.begun[awaited] = producer.begun(sent(producer, halves.pop(awaited)))
            broker.kill()
            producer.wait_closed()
            for body, opaque in halves.items():
                if producer.answered(opaque):
                    self.begun[body] = producer.begun(sent(producer, opaque))
            for body, opaque in ends.items():
                self.fates[body] = decisions[body] if producer.answered(opaque) else None
                assert not producer.answered(opaque) or producer.response(opaque).code == Response.SUCCESS
            assert all(producer.response(each).code == Response.SYSTEM_ERROR for each in repeated if producer.answered(each))

    def check(self, producer: Producer) -> None:
        """Compare with what is there, and decide the rest."""
        ops, delivered = [int(body) for body in bodies(producer, OP_TOPIC)], bodies(producer)
        assert len(ops) == len(set(ops))
        undecided = [half for half in self.begun.values() if half.ordinal not in ops]
        for body, half in self.begun.items():
            fate = self.fates.get(body, UNKNOWN)
            if fate is not None:
                assert (body in delivered) == (fate == COMMIT)
                assert (half in undecided) == (fate == UNKNOWN)
            code = producer.end(half.end(COMMIT))
            assert code == (Response.SUCCESS if half in undecided else Response.SYSTEM_ERROR)
        at_last = bodies(producer)
        assert len(set(at_last)) == len(at_last) == len(delivered) + len(undecided)


def test_kills_under_load(tmp_path: Path) -> None:
    """RD-105, F-TX: what was answered holds, nothing comes twice, and what is undecided can be decided."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    load = Load(seed)
    with BrokerProcess(tmp_path / "data", *NEVER) as broker:
        for turn in range(6):
            load.until_killed(broker, turn)
            broker.start()
        with Producer(broker) as producer:
            load.check(producer)
    assert load.fates


def test_a_topic_that_a_kill_has_undone(tmp_path: Path) -> None:
    """RD-105: a topic that holds no message yet may be forgotten by a killed broker; a commit makes it again."""
    with BrokerProcess(tmp_path / "data", *NEVER) as broker:
        with Producer(broker) as producer:
            begun = producer.half(b"paid", partition=2)
        broker.kill()
        for name in ("topics.json", "topics.json.bak"):
            (tmp_path / "data" / "config" / name).unlink(missing_ok=True)
        broker.start()
        with Producer(broker) as producer:
            assert producer.end(begun.end(COMMIT)) == Response.SUCCESS
            assert bodies(producer, partition=2) == [b"paid"]


def test_while_a_decision_waits_for_the_disk(tmp_path: Path) -> None:
    """RD-105: at DISK a decision counts when it is durable; another one finds nothing meanwhile, and nobody sees it."""
    flags = (*NEVER, "--sync-timeout-ms", "600000")
    with Controlled(tmp_path / "data", *flags, durability="disk") as broker, Producer(broker) as producer:
        begun = producer.half(b"paid")
        (tmp_path / "stall").touch()
        waiting = producer.start_end(begun.end(COMMIT))
        for decision in (ROLLBACK, COMMIT):
            assert producer.end(begun.end(decision)) == Response.SYSTEM_ERROR
        assert not producer.answered(waiting)
        assert count(producer, TOPIC) == 0
        (tmp_path / "stall").unlink()
        assert producer.response(waiting).code == Response.SUCCESS
        assert bodies(producer) == [b"paid"]


def test_when_the_disk_fails(tmp_path: Path) -> None:
    """RD-105: a decision that may be stored or not is repeated after the next start, and counts once."""
    with Controlled(tmp_path / "data", *NEVER, durability="disk") as broker:
        with Producer(broker) as producer:
            begun, other = producer.half(b"paid"), producer.half(b"other")
            (tmp_path / "fail").touch()
            assert producer.end(begun.end(COMMIT)) not in (Response.SUCCESS, Response.FLUSH_DISK_TIMEOUT)
            assert producer.end(other.end(COMMIT)) == Response.SERVICE_NOT_AVAILABLE
            assert count(producer, TOPIC) == 0
        broker.kill()
        (tmp_path / "fail").unlink()
        broker.start()
        with Producer(broker) as producer:
            producer.end(begun.end(COMMIT))
            assert producer.end(begun.end(COMMIT)) == Response.SYSTEM_ERROR
            assert producer.end(other.end(ROLLBACK)) == Response.SUCCESS
            assert bodies(producer) == [b"paid"]

"""Checks of undecided transactions: the requests to producers, and what happens to messages that are never decided."""

import json
import time
from functools import partial
from pathlib import Path
from typing import Final

import pytest

from metaq.protocol.remoting.codes import Request, Response
from tests.engine.test_delay import Controlled
from tests.support.broker import BrokerProcess, wait_until
from tests.support.halves import (
    COMMIT,
    GIVEN_UP,
    GROUP,
    HALF_TOPIC,
    NEVER,
    ROLLBACK,
    SNAPSHOT,
    TOPIC,
    UNKNOWN,
    Producer,
    bodies,
)
from tests.support.messages import BORN_MS, count, pairs_of, records, send, send_header, sent
from tests.support.metrics import value
from tests.support.remoting import RemotingClient
from tests.support.slowdisk import Controlled as StallingDisk

DEADLINE_S: Final = 60.0
SOON: Final = ("--check-after-ms", "100", "--check-interval-ms", "200")
FOR_EVER: Final = ("--max-checks", "1000000")

# -- check-back -------------------------------------------------------------------------------------------------------


def test_a_producer_is_asked(tmp_path: Path) -> None:
    """RD-105: about the message as it was sent, with all that a client needs to answer, until there is a decision."""
    with BrokerProcess(tmp_path / "data", *SOON, *FOR_EVER) as broker, Producer(broker) as producer:
        begun = producer.half(b"paid", key="U1", pairs="TAGS\x01t\x02", partition=2, flag=5)
        checked = producer.checked()
        unique = ("U1", "U1", begun.offset_id)
        assert checked.header == (begun.ordinal, begun.log_offset, *unique)
        record = checked.record
        assert (record.topic, record.partition, record.queue_offset, record.log_offset) == (
            TOPIC,
            2,
            begun.ordinal,
            begun.log_offset,
        )
        assert (bytes(record.body), record.flag, record.sys_flag, record.born_ms) == (b"paid", 5, 0, BORN_MS)
        assert {"TAGS": "t", "UNIQ_KEY": "U1", "PGROUP": GROUP, "TRAN_MSG": "true"}.items() <= pairs_of(record).items()
        producer.start_end(checked.end(UNKNOWN), oneway=True)
        again = producer.checked()
        assert again.header == checked.header
        assert producer.end(again.end(COMMIT)) == Response.SUCCESS
        assert bodies(producer, partition=2) == [b"paid"]
        for late in (again.end(COMMIT), checked.end(ROLLBACK), begun.end(COMMIT)):
            assert producer.end(late) == Response.SYSTEM_ERROR


def test_any_producer_of_the_group_is_asked(tmp_path: Path) -> None:
    """RD-105: in turns; when one is gone, also through a kill of the broker, the others."""
    with BrokerProcess(tmp_path / "data", *SOON, *FOR_EVER) as broker:
        with Producer(broker, "10.0.0.9@1") as first:
            begun = first.half(b"paid")
            with Producer(broker, "10.0.0.9@2") as second, RemotingClient(broker.host, broker.port) as stranger:
                for producer in (first, second, first, second):
                    producer.checked()
                assert stranger.requests == []
        broker.restart()
        with Producer(broker, "10.0.0.9@3") as third:
            checked = third.checked()
            assert checked.header.tran_state_table_offset == begun.ordinal
            assert third.end(checked.end(ROLLBACK)) == Response.SUCCESS
            assert count(third, TOPIC) == 0


def test_not_before_its_time(tmp_path: Path) -> None:
    """RD-105: a message may say itself how many seconds nobody is to be asked."""
    with BrokerProcess(tmp_path / "data", *SOON, *FOR_EVER) as broker, Producer(broker) as producer:
        patient = producer.half(b"patient", pairs="CHECK_IMMUNITY_TIME_IN_SECONDS\x013600\x02")
        sent_at = time.monotonic()
        briefly = producer.half(b"briefly", pairs="CHECK_IMMUNITY_TIME_IN_SECONDS\x011\x02")
        usual = producer.half(b"usual", pairs="CHECK_IMMUNITY_TIME_IN_SECONDS\x01soon\x02")
        asked: list[int] = []
        while not asked.count(briefly.ordinal):
            asked.append(producer.checked().header.tran_state_table_offset)
        assert time.monotonic() - sent_at >= 1
        while not asked.count(usual.ordinal):
            asked.append(producer.checked().header.tran_state_table_offset)
        assert patient.ordinal not in asked


def test_a_time_of_five_thousand_digits(tmp_path: Path) -> None:
    """RD-105: a time longer than Python converts is as good as the longest; other messages go on, also after a restart."""
    with BrokerProcess(tmp_path / "data", *NEVER) as broker, Producer(broker) as producer:
        endless = producer.half(b"endless", pairs=f"CHECK_IMMUNITY_TIME_IN_SECONDS\x01{'9' * 5000}\x02")
        assert producer.end(producer.half(b"first").end(COMMIT)) == Response.SUCCESS
        second = producer.half(b"second")
        assert broker.terminate() == 0
        broker.start()
        with Producer(broker) as later:
            assert later.end(second.end(COMMIT)) == Response.SUCCESS
            assert later.end(endless.end(COMMIT)) == Response.SUCCESS
            assert bodies(later) == [b"first", b"second", b"endless"]


def given_up(client: RemotingClient) -> bool:
    return count(client, GIVEN_UP) == 1


def test_after_too_many_checks_it_is_given_up_and_may_be_brought_back(tmp_path: Path) -> None:
    """RD-105: then decisions find nothing; 323 makes a half message of it again, known by the same ordinal, asked anew."""
    with BrokerProcess(tmp_path / "data", *SOON, "--max-checks", "2") as broker, Producer(broker) as producer:
        begun = producer.half(b"paid", key="U1", partition=1)
        wait_until(partial(given_up, producer), DEADLINE_S, "it is given up")
        assert len([each for each in producer.requests if each.code == Request.CHECK_TRANSACTION_STATE]) == 2
        producer.requests.clear()
        assert f"given up group=pg topic={TOPIC} id=U1 checks=2 moved_to={GIVEN_UP}" in broker.stderr()
        assert producer.end(begun.end(COMMIT)) == Response.SYSTEM_ERROR
        [kept] = records(producer, GIVEN_UP)
        assert (bytes(kept.body), pairs_of(kept)["REAL_TOPIC"]) == (b"paid", TOPIC)
        place = begun.offset_id[:16] + f"{kept.log_offset:016X}"
        for _ in range(2):
            assert producer.call(Request.RESUME_CHECK_HALF_MESSAGE, {"msgId": place}).code == Response.SUCCESS
        checked = producer.checked()
        assert checked.header == (begun.ordinal, begun.log_offset, "U1", "U1", begun.offset_id)
        assert producer.end(checked.end(COMMIT)) == Response.SUCCESS
        assert producer.end(begun.end(COMMIT)) == Response.SYSTEM_ERROR
        assert bodies(producer, partition=1) == [b"paid"]
        assert count(producer, HALF_TOPIC) == 2
        ids = (
            begun.offset_id,
            place,
            begun.offset_id[:16] + f"{records(producer, TOPIC, 1)[0].log_offset:016X}",
            "7F",
            f"{'7F' * 16}",
        )
        for each in ids:  # decided, decided after it was brought back, no half message, no id, nothing there
            assert producer.call(Request.RESUME_CHECK_HALF_MESSAGE, {"msgId": each}).code == Response.SYSTEM_ERROR
        for again in (broker.restart, broker.terminate):
            again()
            if again == broker.terminate:
                broker.start()
            with Producer(broker) as later:
                assert later.call(Request.RESUME_CHECK_HALF_MESSAGE, {"msgId": place}).code == Response.SYSTEM_ERROR


@pytest.mark.parametrize("failing", [False, True])
def test_nothing_is_reported_as_given_up_before_it_is(tmp_path: Path, *, failing: bool) -> None:
    """RD-105: a decision that the disk does not have leaves the message undecided, and the log says nothing else."""
    body = bytes(10_000)
    with StallingDisk(tmp_path / "data", *SOON, "--max-checks", "1") as broker, Producer(broker) as producer:
        producer.half(body, pairs="CHECK_IMMUNITY_TIME_IN_SECONDS\x011\x02")
        broker.stall()
        wait_until(lambda: value(broker, "metaq_log_unsynced_bytes") > len(body), DEADLINE_S, "it is moved, and not yet synced")
        assert "given up" not in broker.stderr()
        broker.go_on(failing=failing)
        end = "decision not stored" if failing else f"given up group=pg topic={TOPIC}"
        wait_until(lambda: end in broker.stderr(), DEADLINE_S, "it is decided, or not")
        assert ("given up" in broker.stderr()) == (not failing)


def test_checks_count_also_when_nobody_is_there(tmp_path: Path) -> None:
    """RD-105: else messages of a group that never comes back would wait until they age out."""
    flags = (*SOON, "--max-checks", "3")
    with BrokerProcess(tmp_path / "data", *flags) as broker, Producer(broker, beats=False) as producer:
        producer.half(b"paid")
        wait_until(partial(given_up, producer), DEADLINE_S, "it is given up")
        assert producer.requests == []
        assert "checks=3" in broker.stderr()


def test_what_is_too_old_is_given_up(tmp_path: Path) -> None:
    """RD-105: after ``keep_hours``, however often it was asked about, and however long nobody is to be asked."""
    with Controlled(tmp_path / "data", *SOON, *FOR_EVER, durability="disk") as broker:
        with Producer(broker) as producer:
            producer.half(b"paid")
            producer.half(b"patient", pairs="CHECK_IMMUNITY_TIME_IN_SECONDS\x01999999999\x02")
            producer.checked()
        broker.restart_later(73 * 3600)
        with Producer(broker) as producer:
            wait_until(lambda: count(producer, GIVEN_UP) == 2, DEADLINE_S, "both are given up")


def test_a_clock_that_is_set_back_asks_once(tmp_path: Path) -> None:
    """RD-105: at once, as nobody knows its age, and then as often as any other message, not in each round."""
    flags = ("--check-after-ms", "3600000", "--check-interval-ms", "3600000", "--max-checks", "2")
    with Controlled(tmp_path / "data", *flags, durability="disk") as broker:
        with Producer(broker) as producer:
            early = producer.half(b"early")
        broker.restart_later(-7200)
        asked: list[int] = []
        with Producer(broker) as producer:
            for number in range(4):  # each is asked about in a round of its own
                begun = producer.half(b"%d" % number, pairs="CHECK_IMMUNITY_TIME_IN_SECONDS\x011\x02")
                while begun.ordinal not in asked:
                    asked.append(producer.checked().header.tran_state_table_offset)
            assert asked.count(early.ordinal) == 1
            assert producer.end(early.end(COMMIT)) == Response.SUCCESS


def test_counts_of_checks_outlive_an_orderly_stop(tmp_path: Path) -> None:
    """RD-105: they are in the snapshot."""
    with BrokerProcess(tmp_path / "data", *SOON, *FOR_EVER) as broker:
        with Producer(broker) as producer:
            begun = producer.half(b"paid")
            for _ in range(2):
                producer.checked()
        assert broker.terminate() == 0
        snapshot = json.loads((tmp_path / "data" / SNAPSHOT).read_bytes())
        [[ordinal, log_offset, _, checks, _]] = snapshot["halves"]
        assert (ordinal, log_offset, snapshot["ordinal"], snapshot["op"]) == (begun.ordinal, begun.log_offset, 1, 0)
        assert checks >= 2


# -- retention --------------------------------------------------------------------------------------------------------

SMALL: Final = ("--segment-bytes", "65536", "--max-body-bytes", "20000")
OLD_AT_ONCE: Final = ("--keep-hours", "0.0000001", "--clean-ratio", "0.000001", "--ample-free-bytes", str(1 << 60))
OFTEN: Final = ("--retention-interval-ms", "100", "--checkpoint-interval-ms", "100", "--flush-interval-ms", "100")


NOT_FULL: Final = ("--force-ratio", "1", "--refuse-ratio", "1")


def begin_of_log(data: Path) -> int:
    return min(int(path.name) for path in (data / "commitlog").iterdir())


@pytest.mark.parametrize("durability", ["memory", "disk"])
def test_what_is_undecided_outlives_its_segment(tmp_path: Path, durability: str) -> None:
    """RD-105: it is put again before retention deletes it, and is still known by its first place, after a kill too."""
    data = tmp_path / "data"
    with BrokerProcess(data, *NEVER, *SMALL) as broker, Producer(broker) as producer:
        begun = [producer.half(b"%d" % number) for number in range(3)]
        assert producer.end(begun[1].end(ROLLBACK)) == Response.SUCCESS
    with BrokerProcess(data, *NEVER, *SMALL, *OLD_AT_ONCE, *OFTEN, *NOT_FULL, durability=durability) as broker:
        with Producer(broker) as producer:
            for _ in range(3):
                first = begin_of_log(data)
                for _ in range(5):
                    sent(producer, send(producer, send_header("filler"), bytes(19_000)))
                wait_until(partial(lambda before: begin_of_log(data) > before, first), DEADLINE_S, "segments are deleted")
            assert begin_of_log(data) > begun[-1].log_offset
        broker.restart()
        with Producer(broker) as producer:
            assert producer.end(begun[1].end(COMMIT)) == Response.SYSTEM_ERROR
            assert producer.end(begun[0].end(COMMIT)) == Response.SUCCESS
            assert producer.end(begun[2].end(ROLLBACK)) == Response.SUCCESS
            for half in begun:
                assert producer.end(half.end(COMMIT)) == Response.SYSTEM_ERROR
            assert count(producer, TOPIC) == 1

"""Transactions over the text protocol after SIGKILL or a stop of the broker, and what is left of them."""

from itertools import count
from pathlib import Path
from typing import Final

import pytest

from metaq.client.text.textclient import TextClient, parse_stats
from metaq.protocol.remoting.codes import Request
from metaq.protocol.text.replies import ERROR, OK
from tests.support.admin import ask, connect, create_topic
from tests.support.broker import BrokerProcess, wait_until
from tests.support.slowdisk import Controlled
from tests.support.talk import Talk

TOPIC: Final = "orders"
PARTITIONS: Final = 3
DEADLINE_S: Final = 60.0
LEVELS: Final = ("disk", "memory")
_numbers = count(1)


def new_key() -> str:
    return f"XID:3:{next(_numbers):04x}:01:m"


def start(folder: Path, durability: str, *flags: str) -> BrokerProcess:
    return BrokerProcess(folder / "data", "--default-partitions", str(PARTITIONS), *flags, durability=durability)


def fill(talk: Talk, key: str, *bodies: bytes) -> list[int]:
    """Begin a transaction with messages in all partitions; their ids."""
    talk.done(key, "BEGIN")
    return [talk.placed(TOPIC, body, key, partition).id for body in bodies for partition in range(PARTITIONS)]


def everything(talk: Talk) -> list[list[bytes]]:
    return [talk.bodies(TOPIC, partition) for partition in range(PARTITIONS)]


def ids(talk: Talk) -> list[int]:
    found = [talk.messages(TOPIC, partition) for partition in range(PARTITIONS)]
    return [message.id for row in zip(*found, strict=True) for message in row]


@pytest.mark.parametrize("durability", LEVELS)
def test_killed_after_the_vote(tmp_path: Path, durability: str) -> None:
    """MQ-076, MQ-107: branches are listed by the next broker, and decided there as if nothing had happened."""
    decisions = {new_key(): decision for decision in ("COMMIT_TWO_PHASE", "ROLLBACK", "COMMIT_ONE_PHASE")}
    with start(tmp_path, durability) as broker:
        with Talk(broker) as talk:
            sent = {key: fill(talk, key, decision.encode(), b"more") for key, decision in decisions.items()}
            for key in decisions:
                assert talk.transaction(key, "PREPARE") == (OK, "0")
        broker.restart()
        with Talk(broker) as talk:
            assert talk.recover("m") == talk.recover() == sorted(decisions)
            assert everything(talk) == [[]] * PARTITIONS
            for key, decision in decisions.items():
                assert talk.transaction(key, "PREPARE")[1].endswith("Cannot call prepare now.")
                talk.done(key, decision)
                gone = f"XAException:code=-4,msg=XA transaction '{key}' has not been started."
                assert talk.transaction(key, decision) == (ERROR, gone)
            assert talk.recover() == []
        broker.restart()
        with Talk(broker) as talk:
            assert talk.recover() == []
            assert everything(talk) == [[b"COMMIT_TWO_PHASE", b"more", b"COMMIT_ONE_PHASE", b"more"]] * PARTITIONS
            two_phases, _, one_phase = sent.values()
            assert ids(talk) == two_phases + one_phase


@pytest.mark.parametrize("durability", LEVELS)
def test_killed_after_the_answer_to_a_commit(tmp_path: Path, durability: str) -> None:
    """MQ-076, MQ-108: each message is there once, in its place and with its id; nothing is undecided."""
    kinds = ("local", "one phase", "two phases")
    with start(tmp_path, durability) as broker:
        sent: list[int] = []
        for kind in kinds:
            key = "TX:a:1" if kind == "local" else new_key()
            with Talk(broker) as talk:
                sent += fill(talk, key, f"{kind} first".encode(), f"{kind} second".encode())
                if kind == "two phases":
                    talk.done(key, "PREPARE")
                talk.done(key, "COMMIT_TWO_PHASE" if kind == "two phases" else "COMMIT_ONE_PHASE")
                broker.kill()
            broker.restart()
        with Talk(broker) as talk:
            expected = [f"{kind} {name}".encode() for kind in kinds for name in ("first", "second")]
            assert everything(talk) == [expected] * PARTITIONS
            assert ids(talk) == sent
            assert len(set(sent)) == len(sent)
            assert talk.recover() == []


def test_what_has_not_voted_ends_with_the_broker(tmp_path: Path) -> None:
    """MQ-075, MQ-108: after a kill and after a stop nobody knows it, and nothing of it is ever seen."""
    with start(tmp_path, "memory") as broker:
        for stop in (broker.kill, broker.terminate):
            branch, local = new_key(), "TX:a:1"
            with Talk(broker) as talk:
                fill(talk, branch, b"x")
                fill(talk, local, b"x")
                stop()
            broker.restart()
            with Talk(broker) as talk:
                for key, name in ((branch, "XA"), (local, "Local")):
                    code, text = talk.transaction(key, "COMMIT_ONE_PHASE")
                    assert code == ERROR
                    assert text.endswith(f"{name} transaction '{key}' has not been started.")
                assert everything(talk) == [[]] * PARTITIONS
                assert talk.recover() == []


def test_branches_outlive_orderly_stops_and_snapshots(tmp_path: Path) -> None:
    """MQ-107: some decided before a stop, some after it, some after a kill; none is forgotten or made twice."""
    keys = [new_key() for _ in range(9)]
    committed: list[bytes] = []
    with start(tmp_path, "memory") as broker:
        with Talk(broker) as talk:
            for number, key in enumerate(keys):
                fill(talk, key, b"%d" % number)
                talk.done(key, "PREPARE")
        for stop in (broker.terminate, broker.kill, broker.terminate):
            with Talk(broker) as talk:
                assert talk.recover() == sorted(keys)
                kept, dropped, keys = keys[0], keys[1], keys[2:]
                committed.append(b"%d" % (7 - len(keys)))
                talk.done(kept, "COMMIT_TWO_PHASE")
                talk.done(dropped, "ROLLBACK")
            stop()
            broker.restart()
        with Talk(broker) as talk:
            assert talk.recover() == sorted(keys)
            assert everything(talk) == [committed] * PARTITIONS


def test_ids_are_never_given_twice(tmp_path: Path) -> None:
    """MQ-010: they go on falling over kills and stops, also when nothing of the last ones was kept."""
    seen: list[int] = []
    with start(tmp_path, "memory") as broker:
        for stop in (broker.kill, broker.terminate, broker.kill):
            with Talk(broker) as talk:
                seen += fill(talk, "TX:a:1", *[b"x"] * 10)
            stop()
            broker.restart()
    assert all(message_id < 0 for message_id in seen)
    assert seen == sorted(set(seen), reverse=True)


@pytest.mark.slow
def test_retention_does_not_touch_what_is_undecided(tmp_path: Path) -> None:
    """MQ-076, MQ-107: the segments behind a prepared branch go, the branch stays, and commits what it held."""
    key = new_key()
    flags = ("--segment-bytes", "65536", "--max-body-bytes", "8192")
    with start(tmp_path, "memory", *flags) as broker, Talk(broker) as talk:
        sent = fill(talk, key, b"kept")
        talk.done(key, "PREPARE")
        for _ in range(40):
            talk.placed("other", b"x" * 8000)
        broker.terminate()
        broker.flags = (*flags, "--keep-hours", "0.00001")
        broker.restart()
        with Talk(broker) as again, connect(broker) as admin, TextClient(broker.host, broker.port) as client:

            def deleted() -> bool:
                ask(admin, Request.DELETE_EXPIRED_COMMITLOG)
                return int(parse_stats(client.stats())["log_begin"]) > len(sent) * 1000

            wait_until(deleted, DEADLINE_S, "the segment of the branch is deleted")
            assert again.recover() == [key]
            again.done(key, "COMMIT_TWO_PHASE")
            assert everything(again) == [[b"kept"]] * PARTITIONS
            assert ids(again) == sent


def test_a_topic_that_is_deleted_meanwhile(tmp_path: Path) -> None:
    """MQ-076: a vote is a promise: the messages are there after the commit, also when their topic had been deleted."""
    key = new_key()
    with start(tmp_path, "memory") as broker, Talk(broker) as talk, connect(broker) as admin:
        create_topic(admin, TOPIC, write=PARTITIONS, read=PARTITIONS)
        talk.placed(TOPIC, b"old")
        fill(talk, key, b"new")
        talk.done(key, "PREPARE")
        ask(admin, Request.DELETE_TOPIC_IN_BROKER, topic=TOPIC)
        talk.done(key, "COMMIT_TWO_PHASE")
        start_at = talk.messages(TOPIC, 0, 23)
        assert [message.body for message in start_at] == [b"new"]


def test_a_commit_that_waits_for_the_disk(tmp_path: Path) -> None:
    """MQ-058, MQ-076: what was parked is not in memory any more: it is read meanwhile, and nothing overtakes the answer."""
    keys = [new_key() for _ in range(2)]
    with Controlled(tmp_path / "data", "--default-partitions", str(PARTITIONS)) as broker:
        with Talk(broker) as talk:
            for key in keys:
                fill(talk, key, key.encode())
                talk.done(key, "PREPARE")
        (tmp_path / "cold").touch()
        broker.restart()
        with Talk(broker) as talk, Talk(broker) as other:
            answers = talk.ask(
                talk.step(keys[0], "COMMIT_TWO_PHASE"),
                talk.put_of(TOPIC, b"behind", None),
                talk.step(keys[0], "ROLLBACK"),
                talk.step(keys[1], "COMMIT_ONE_PHASE"),
                talk.step("null", "RECOVER"),
            )
            assert [code for code, _ in answers] == [OK, OK, ERROR, OK, OK]
            first, second = keys[0].encode(), keys[1].encode()
            assert everything(other) == [[first, b"behind", second], [first, second], [first, second]]
            assert answers[-1][1] == ""


def test_an_outcome_that_is_late(tmp_path: Path) -> None:
    """MQ-072, MQ-107: −7 when the disk takes too long: what was asked for happens, and RECOVER tells."""
    keys = [new_key() for _ in range(2)]
    flags = ("--default-partitions", str(PARTITIONS), "--sync-timeout-ms", "200")
    with Controlled(tmp_path / "data", *flags) as broker, Talk(broker) as talk:
        for key in keys:
            fill(talk, key, b"x")
        broker.stall()
        late = (ERROR, "XAException:code=-7,msg=stored, but not yet on the disk; ask again, or let recover tell")
        assert talk.transaction(keys[0], "PREPARE") == late
        assert talk.transaction(keys[1], "COMMIT_ONE_PHASE") == late
        assert talk.recover() == [keys[0]]
        broker.go_on()
        wait_until(lambda: everything(talk) == [[b"x"]] * PARTITIONS, DEADLINE_S, "the commit is on the disk")
        assert talk.transaction(keys[0], "COMMIT_TWO_PHASE") in ((OK, ""), late)  # on a slow machine it is late again
        wait_until(lambda: everything(talk) == [[b"x", b"x"]] * PARTITIONS, DEADLINE_S, "this one, too")


def test_a_decision_that_a_power_cut_may_undo(tmp_path: Path) -> None:
    """MQ-072, MQ-076: a manager that asks again must not take a branch for decided that may be prepared after a power cut."""
    kinds = {new_key(): kind for kind in ("COMMIT_TWO_PHASE", "ROLLBACK", "COMMIT_ONE_PHASE")}
    flags = ("--default-partitions", str(PARTITIONS), "--sync-timeout-ms", "500")
    with Controlled(tmp_path / "data", *flags) as broker, Talk(broker) as talk:

        def answers() -> set[tuple[int, str]]:
            return set(talk.ask(*[talk.step(key, kind) for key, kind in kinds.items()]))

        for key, kind in kinds.items():
            fill(talk, key, b"x")
            if kind != "COMMIT_ONE_PHASE":
                talk.done(key, "PREPARE")
        broker.stall()
        late = (ERROR, "XAException:code=-7,msg=stored, but not yet on the disk; ask again, or let recover tell")
        assert answers() == {late}
        doubt = (ERROR, "XAException:code=-7,msg=recent decisions are not as safe as promised yet; ask again")
        assert answers() == {doubt}
        assert talk.transaction("null", "RECOVER") == doubt
        broker.go_on()
        wait_until(lambda: all("code=-4" in text for _, text in answers()), DEADLINE_S, "they are on the disk")
        assert talk.recover() == []


def test_a_decision_that_may_be_there_again(tmp_path: Path) -> None:
    """MQ-072: a manager must not take an operator's decision for forgotten that it would have to forget after a power cut."""
    key = new_key()
    with Controlled(tmp_path / "data", "--sync-timeout-ms", "500") as broker, Talk(broker) as talk, connect(broker) as admin:
        talk.done(key, "BEGIN")
        talk.placed(TOPIC, b"x", key)
        talk.done(key, "PREPARE")
        ask(admin, Request.DECIDE_TRANSACTION, key=key, outcome="rollback")
        broker.stall()
        late = (ERROR, "XAException:code=-7,msg=stored, but not yet on the disk; ask again, or let recover tell")
        assert talk.transaction(key, "FORGET") == late
        doubt = (ERROR, "XAException:code=-7,msg=recent decisions are not as safe as promised yet; ask again")
        assert talk.transaction(key, "FORGET") == doubt
        broker.go_on()
        wait_until(lambda: talk.transaction(key, "FORGET") == (OK, ""), DEADLINE_S, "it is on the disk")
        assert talk.recover() == []


def test_a_step_of_which_nobody_knows_whether_it_is_stored(tmp_path: Path) -> None:
    """MQ-072, MQ-076: after a failed sync only the next start can say what became of a vote or of a commit of one phase."""
    prepared, committed = keys = [new_key() for _ in range(2)]
    with Controlled(tmp_path / "data", "--default-partitions", str(PARTITIONS)) as broker:
        with Talk(broker) as first, Talk(broker) as second, Talk(broker) as other:
            for key in keys:
                fill(other, key, b"x")
            broker.stall()
            first.send(first.step(prepared, "PREPARE"))
            second.send(second.step(committed, "COMMIT_ONE_PHASE"))
            log = tmp_path / "data" / "commitlog" / f"{0:020}"
            wait_until(lambda: all(key.encode() in log.read_bytes() for key in keys), DEADLINE_S, "both wait for the disk")
            broker.go_on(failing=True)
            for talk in (first, second):
                assert b"code=-7,msg=the transaction may be stored or not" in talk.replies(1)[0].body
            doubt = (ERROR, "XAException:code=-7,msg=recent decisions are not as safe as promised yet; ask again")
            assert [other.transaction(key, "ROLLBACK") for key in keys] == [doubt, doubt]
        broker.recover()
        broker.restart()
        with Talk(broker) as talk:
            assert talk.recover() == [prepared]
            assert "code=-4" in talk.transaction(committed, "ROLLBACK")[1]
            assert everything(talk) == [[b"x"]] * PARTITIONS

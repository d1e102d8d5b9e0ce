"""Transactions over the text protocol: the owners of transactions, when messages become visible, and refusals."""

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Final

import pytest

from metaq.client.text.textclient import TextClient, parse_stats
from metaq.protocol.properties import MESSAGE_ID
from metaq.protocol.record import TAGS
from metaq.protocol.text.replies import BAD_REQUEST, ERROR, FORBIDDEN, NOT_FOUND, OK, UNAVAILABLE
from metaq.protocol.text.writing import write_get
from tests.support.broker import BrokerProcess, wait_until
from tests.support.messages import pairs_of, records
from tests.support.remoting import RemotingClient
from tests.support.slowdisk import Controlled
from tests.support.talk import Talk

DEADLINE_S: Final = 60.0
DONE: Final = (OK, "")
_numbers = count(1)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    folder = tmp_path_factory.mktemp("broker")
    configuration = folder / "broker.yaml"
    configuration.write_text("topics:\n  closed: {accept_publish: false}\n  fixed: {partitions: 2}\n", "utf-8")
    flags = ("--config", str(configuration), "--max-body-bytes", "4096", "--transaction-timeout-ms", "60000")
    with BrokerProcess(folder / "data", *flags) as process:
        yield process


@pytest.fixture
def talk(broker: BrokerProcess) -> Iterator[Talk]:
    with Talk(broker) as talk:
        yield talk


@pytest.fixture
def other(broker: BrokerProcess) -> Iterator[Talk]:
    with Talk(broker) as talk:
        yield talk


@pytest.fixture
def topic(broker: BrokerProcess) -> str:
    """One with three partitions that no other test uses."""
    name = f"topic-{next(_numbers)}"
    with TextClient(broker.host, broker.port) as client:
        client.create(name, 3)
    return name


@pytest.fixture
def key() -> str:
    """Return the key of an XA branch that no other test uses."""
    return f"XID:1:{next(_numbers):04x}:01:m"


def not_started(key: str) -> tuple[int, str]:
    return ERROR, f"XAException:code=-4,msg=XA transaction '{key}' has not been started."


def is_gone(talk: Talk, key: str) -> bool:
    """Return whether an open XA branch has ended; it asks by a two-phase commit, which does nothing to an unprepared one."""
    return talk.transaction(key, "COMMIT_TWO_PHASE") == not_started(key)


def statistics(broker: BrokerProcess, item: str = "") -> dict[str, str]:
    with TextClient(broker.host, broker.port) as client:
        return parse_stats(client.stats(item))


# -- whose a transaction is -------------------------------------------------------------------------------------------


def test_a_local_transaction_belongs_to_its_connection(talk: Talk, other: Talk, topic: str) -> None:
    """MQ-108: another connection is told that it has not been started, and may begin one of the same name."""
    key = "TX:127.0.0.1-1795259207346-1:7"
    refusal = (ERROR, f"Local transaction '{key}' has not been started.")
    talk.done(key, "BEGIN")
    mine = talk.placed(topic, b"mine", key)
    assert other.put(topic, b"theirs", key) == refusal
    for command in ("PREPARE", "COMMIT_ONE_PHASE", "COMMIT_TWO_PHASE", "ROLLBACK"):
        assert other.transaction(key, command) == refusal
    other.done(key, "BEGIN")
    other.placed(topic, b"theirs", key)
    talk.done(key, "COMMIT_ONE_PHASE")
    assert [(message.id, message.body) for message in other.messages(topic)] == [(mine.id, b"mine")]
    other.done(key, "ROLLBACK")
    assert talk.bodies(topic) == [b"mine"]


@pytest.mark.parametrize("held", [False, True], ids=["idle", "after a held get"])
def test_a_lost_connection_rolls_its_local_transactions_back(tmp_path: Path, *, held: bool) -> None:
    """MQ-108: what it held is free again, and nothing of it is ever seen."""
    flags = ("--max-branches", "2", "--max-open-transaction-bytes", "3000")
    with BrokerProcess(tmp_path / "data", *flags) as broker, Talk(broker) as next_one:
        with Talk(broker) as lost:
            for key in ("TX:a:1", "TX:a:2"):
                lost.done(key, "BEGIN")
                lost.placed("t", b"x" * 500, key)
            if held:
                lost.send(write_get("t", "g", 0, 0, 1024, 9, 1))
                assert lost.replies(1)[0].code == NOT_FOUND
            assert next_one.transaction("TX:b:1", "BEGIN")[0] == ERROR
        wait_until(lambda: next_one.transaction("TX:b:1", "BEGIN") == DONE, DEADLINE_S, "the transactions end")
        next_one.done("TX:b:2", "BEGIN")
        for key in ("TX:b:1", "TX:b:2"):
            next_one.placed("t", b"y" * 500, key)
            next_one.done(key, "COMMIT_ONE_PHASE")
        assert next_one.bodies("t") == [b"y" * 500] * 2


def test_an_xa_branch_belongs_to_the_broker(broker: BrokerProcess, talk: Talk, topic: str, key: str) -> None:
    """MQ-075: connections come and go between any two steps."""
    sent = []
    for body in (b"1", b"2", b"3"):
        with Talk(broker) as short:
            short.done(key, "BEGIN")
            sent.append(short.placed(topic, body, key).id)
    with Talk(broker) as short:
        assert short.transaction(key, "PREPARE") == (OK, "0")
    with Talk(broker) as short:
        assert short.recover("m").count(key) == 1
        short.done(key, "COMMIT_TWO_PHASE")
    assert [message.id for message in talk.messages(topic)] == sent


def test_a_vote_whose_connection_is_lost(tmp_path: Path) -> None:
    """MQ-072, MQ-076: nobody hears it, the branch is prepared all the same; local commits go through too."""
    key = "XID:1:01:01:m"
    with Controlled(tmp_path / "data") as broker, Talk(broker) as other:
        with Talk(broker) as lost:
            lost.done(key, "BEGIN")
            lost.placed("t", b"voted", key)
            lost.done("TX:a:1", "BEGIN")
            lost.placed("local", b"committed", "TX:a:1")
            broker.stall()
            lost.send(lost.step(key, "PREPARE"))
            wait_until(lambda: other.transaction(key, "FORGET")[0] == ERROR, DEADLINE_S, "the vote arrives")
        broker.go_on()
        wait_until(lambda: other.recover() == [key], DEADLINE_S, "the branch is prepared")
        other.done(key, "COMMIT_TWO_PHASE")
        assert other.bodies("t") == [b"voted"]
        assert other.bodies("local") == []


# -- time -------------------------------------------------------------------------------------------------------------


def test_a_branch_whose_client_died_before_the_vote(broker: BrokerProcess, talk: Talk, topic: str, key: str) -> None:
    """MQ-075, MQ-077: it is rolled back when its time is over; one that has voted stays."""
    voted = key.replace(":01:", ":02:")
    with Talk(broker) as dying:
        steps = []
        for name in (key, voted):
            steps += [dying.step(name, "BEGIN", 1, "m"), dying.put_of(topic, b"x", name)]
        steps.append(dying.step(voted, "PREPARE"))
        dying.send(b"".join(steps))  # at once, however slow the machine is
        replies = dying.replies(len(steps))
        assert [reply.code for reply in replies] == [OK] * len(steps)
        assert replies[-1].body == b"0"
    wait_until(lambda: is_gone(talk, key), DEADLINE_S, "the branch expires")
    assert talk.put(topic, b"late", key) == (ERROR, f"XA transaction '{key}' has not been started.")
    assert talk.transaction(key, "COMMIT_ONE_PHASE") == not_started(key)
    assert voted in talk.recover("m")
    assert talk.bodies(topic) == []
    talk.done(voted, "COMMIT_TWO_PHASE")
    assert talk.bodies(topic) == [b"x"]


def test_a_longer_time_is_cut(tmp_path: Path) -> None:
    """MQ-077, MQ-107, MQ-108: transaction_timeout_ms is the most, whatever a client asks for; only the first BEGIN counts."""
    xa, local, endless = "XID:1:01:01:m", "TX:a:1", "XID:1:02:01:m"
    with BrokerProcess(tmp_path / "data", "--transaction-timeout-ms", "300") as broker, Talk(broker) as talk:
        assert talk.transaction(endless, "BEGIN") == DONE
        for key in (xa, local):
            assert talk.transaction(key, "BEGIN", 3600) == DONE
            assert talk.transaction(key, "BEGIN", 7200) == DONE
        talk.placed("t", b"x", endless)
        wait_until(lambda: is_gone(talk, xa), DEADLINE_S, "the branch expires")
        gone = (ERROR, f"Local transaction '{local}' has not been started.")
        wait_until(lambda: talk.transaction(local, "PREPARE") == gone, DEADLINE_S, "the local one expires")
        talk.done(endless, "COMMIT_ONE_PHASE")
        assert talk.bodies("t") == [b"x"]


# -- what is visible --------------------------------------------------------------------------------------------------


def test_puts_of_others_between(talk: Talk, other: Talk, topic: str, key: str) -> None:
    """MQ-075, MQ-076: they are seen at once; what is committed stands together, in its order, where the commit was."""
    local = "TX:a:1"
    talk.done(local, "BEGIN")
    other.done(key, "BEGIN")
    for number in range(3):
        talk.placed(topic, b"local %d" % number, local)
        other.placed(topic, b"xa %d" % number, key)
        other.placed(topic, b"plain %d" % number)
    plain = [b"plain 0", b"plain 1", b"plain 2"]
    assert other.bodies(topic) == plain
    other.done(key, "PREPARE")
    assert other.bodies(topic) == plain
    talk.placed(topic, b"plain 3")
    talk.done(local, "COMMIT_ONE_PHASE")
    talk.placed(topic, b"plain 4")
    other.done(key, "COMMIT_TWO_PHASE")
    locals_, branch = [b"local 0", b"local 1", b"local 2"], [b"xa 0", b"xa 1", b"xa 2"]
    assert talk.bodies(topic) == [*plain, b"plain 3", *locals_, b"plain 4", *branch]


def test_text_and_binary_readers_see_a_committed_message(broker: BrokerProcess, talk: Talk, topic: str, key: str) -> None:
    """MQ-010, MQ-012, MQ-076: the id of the put's answer, attribute and flag; tag, flag and place for binary readers."""
    sent = []
    for way in ("COMMIT_ONE_PHASE", "COMMIT_TWO_PHASE"):
        talk.done(key, "BEGIN")
        for body, attribute in ((b"a", None), (b"b", "Tag"), ("数据".encode(), "属性"), (b"", "")):
            message_id, partition, position = talk.placed(topic, body, key, 1, attribute)
            assert message_id < 0
            assert (partition, position) == (1, -1)
            sent.append((message_id, 0 if attribute is None else 1, attribute, body))
        if way == "COMMIT_TWO_PHASE":
            talk.done(key, "PREPARE")
        talk.done(key, way)
    found = talk.messages(topic, 1)
    assert [(message.id, message.flag, message.attribute, message.body) for message in found] == sent
    assert [message.position for message in found[1:]] == [message.next_position for message in found[:-1]]
    with RemotingClient(broker.host, broker.port) as client:
        stored = records(client, topic, 1)
    assert [(record.flag, pairs_of(record).get(TAGS), bytes(record.body)) for record in stored] == [
        (flag, attribute or None, body) for _, flag, attribute, body in sent
    ]
    assert [int(pairs_of(record)[MESSAGE_ID]) for record in stored] == [message_id for message_id, *_ in sent]
    assert [record.queue_offset for record in stored] == list(range(len(sent)))
    assert not any("REAL_TOPIC" in pairs_of(record) for record in stored)


def test_the_messages_of_a_transaction_appear_together(talk: Talk, other: Talk, topic: str) -> None:
    """MQ-076: whoever looks at one partition, another and the first again never sees a part of one."""
    at_once, message_bytes = 200, 28
    rounds = looks = 0
    ends = (0, 0, 0)
    while not looks:  # between the first of so many and the last
        frames = b""
        for number in range(rounds, rounds + at_once):
            key = f"TX:a:{number}"
            puts = b"".join(talk.put_of(topic, b"%08d" % number, key, partition) for partition in (0, 1, 2, 0, 1, 2))
            frames += talk.step(key, "BEGIN") + puts + talk.step(key, "COMMIT_ONE_PHASE")
        talk.send(frames)
        begin = ends[2]
        rounds += at_once
        while ends[2] < rounds * 2 * message_bytes:
            first, last = ends[2], [other.end(topic, partition) for partition in (0, 1, 2, 0)]
            assert first <= last[0] <= last[1] <= last[2]
            assert all(end % (2 * message_bytes) == 0 for end in last)
            ends = (last[0], last[1], last[2])
            looks += begin < ends[2] < rounds * 2 * message_bytes
        assert [reply.code for reply in talk.replies(at_once * 8)] == [OK] * at_once * 8
    assert [other.bodies(topic, partition) for partition in (0, 1, 2)] == [
        [b"%08d" % number for number in range(rounds) for _ in (1, 2)]
    ] * 3


def test_everything_in_one_write(talk: Talk, topic: str, key: str) -> None:
    """MQ-058, MQ-108: BEGIN … COMMIT … BEGIN … ROLLBACK … BEGIN without waiting: replies and messages in order."""
    frames = []
    for number, end in enumerate(("COMMIT_ONE_PHASE", "ROLLBACK", "COMMIT_TWO_PHASE")):
        name = f"TX:a:{number}"
        frames += [talk.step(name, "BEGIN"), talk.put_of(topic, b"local %d" % number, name), talk.step(name, end)]
        frames += [talk.put_of(topic, b"plain %d" % number, None), talk.step(key, "BEGIN")]
        frames += [talk.put_of(topic, b"xa %d" % number, key), talk.step(key, "PREPARE")]
        frames += [talk.step(key, end if number else "COMMIT_TWO_PHASE")]
    frames += [talk.step("TX:a:0", "BEGIN"), talk.step("TX:a:0", "ROLLBACK"), talk.step("TX:a:0", "ROLLBACK")]
    talk.send(b"".join(frames))
    replies = talk.replies(len(frames))
    assert [reply.opaque for reply in replies] == [int(frame.split(b"\r\n")[0].split(b" ")[-1]) for frame in frames]
    assert [reply.code for reply in replies] == [OK] * (len(frames) - 1) + [ERROR]
    assert talk.bodies(topic) == [b"local 0", b"plain 0", b"xa 0", b"plain 1", b"local 2", b"plain 2", b"xa 2"]


# -- what is refused --------------------------------------------------------------------------------------------------


def test_puts_that_are_refused(broker: BrokerProcess, talk: Talk, topic: str, key: str) -> None:
    """MQ-059, MQ-110: each with its reason; the transaction stays, and none of them is in it."""
    talk.done(key, "BEGIN")
    before = statistics(broker)
    good = talk.put_of(topic, b"hello", key)
    refused = {
        good.replace(f"{topic} 0 5".encode(), f"{topic} -1 5".encode()): (
            ERROR,
            "Invalid partition for transaction command:-1",
        ),
        good.replace(f"{topic} 0 5".encode(), f"{topic} 9 5".encode()): (ERROR, "wrong partition 9"),
        good.replace(b" 907060870 ", b" 12345 "): (
            ERROR,
            "Checksum failure,message may be corrupted when transfering on networking.",
        ),
        good.replace(topic.encode(), b"closed"): (FORBIDDEN, "topic closed does not accept puts (accept_publish)"),
        good.replace(topic.encode(), b"METAQ_SYS_TRANSACTIONS"): (
            FORBIDDEN,
            "nobody may put to the topic METAQ_SYS_TRANSACTIONS",
        ),
        good.replace(topic.encode(), b"a.b"): (
            BAD_REQUEST,
            "the topic name 'a.b' has characters other than letters, digits, %, |, _ and -",
        ),
        good.replace(b" 5 0 907060870 ", b" 4 1 -1 ")[:-5] + b"\0\0\0\7": (BAD_REQUEST, None),
        good.replace(key.encode(), b"XID:x"): (BAD_REQUEST, None),
    }
    for frame, (code, text) in refused.items():
        ((found, reason),) = talk.ask(frame)
        assert found == code, frame
        assert text is None or reason == text
    after = statistics(broker)
    assert int(after["cmd_put"]) - int(before["cmd_put"]) == len(refused)
    assert int(after["put_failed"]) - int(before["put_failed"]) == len(refused)
    talk.ask(good)
    talk.done(key, "COMMIT_ONE_PHASE")
    assert talk.bodies(topic) == [b"hello"]


def test_topics_that_only_an_administrator_makes(tmp_path: Path) -> None:
    """MQ-006, MQ-059: a put in a transaction creates none then either."""
    with BrokerProcess(tmp_path / "data", "--no-auto-create-topics") as broker, Talk(broker) as talk:
        talk.done("TX:a:1", "BEGIN")
        assert talk.put("unknown", b"x", "TX:a:1") == (ERROR, "The server do not accept topic unknown")
        talk.done("TX:a:1", "COMMIT_ONE_PHASE")


def test_limits(tmp_path: Path) -> None:
    """MQ-107: branches at once, bytes of one, bytes of all; each says what to do, and room that is given back is used."""
    flags = ("--max-branches", "3", "--max-branch-bytes", "4000", "--max-open-transaction-bytes", "6000")
    keys = [f"XID:1:{number:02x}:01:m" for number in range(4)]
    with BrokerProcess(tmp_path / "data", *flags) as broker, Talk(broker) as talk:
        for key in keys[:3]:
            talk.done(key, "BEGIN")
        code, text = talk.transaction(keys[3], "BEGIN")
        assert (code, text[:37]) == (ERROR, "XAException:code=-3,msg=3 transaction")
        assert "the limit is 3 (max_branches)" in text
        talk.placed("t", b"x" * 1500, keys[0])
        _, text = talk.put("t", b"x" * 2000, keys[0])
        assert "the limit of 4000 (max_branch_bytes)" in text
        talk.placed("t", b"y" * 1500, keys[1])
        _, text = talk.put("t", b"x" * 1500, keys[2])
        assert "the limit of 6000 (max_open_transaction_bytes)" in text
        talk.done(keys[1], "ROLLBACK")
        talk.placed("t", b"z" * 1500, keys[2])
        talk.done(keys[0], "PREPARE")
        talk.done(keys[3], "BEGIN")
        talk.placed("t", b"w" * 1500, keys[3])
        assert talk.transaction(keys[1], "BEGIN")[0] == ERROR  # what is prepared counts
        for key in (keys[2], keys[3], keys[0]):
            talk.done(key, "COMMIT_ONE_PHASE")
        assert talk.bodies("t") == [b"z" * 1500, b"w" * 1500, b"x" * 1500]


def test_a_broker_that_cannot_write(tmp_path: Path) -> None:
    """MQ-072, MQ-076: whose outcome is open −7; then a vote is no, a commit of one phase rolls back, each with its code."""
    keys = [f"XID:1:{number:02x}:01:m" for number in range(4)]
    with Controlled(tmp_path / "data") as broker, Talk(broker) as talk:
        for key in keys:
            talk.done(key, "BEGIN")
            talk.placed("t", b"x", key)
        for local in ("TX:a:1", "TX:a:2"):
            talk.done(local, "BEGIN")
            talk.placed("t", b"x", local)
        talk.done(keys[0], "PREPARE")
        broker.stall()
        talk.send(talk.step(keys[1], "COMMIT_ONE_PHASE"))
        broker.go_on(failing=True)
        ((code, _, body),) = talk.replies(1)
        assert (code, body[:24]) == (ERROR, b"XAException:code=-7,msg=")
        assert b"may be stored or not" in body
        for key, command, answer in (
            (keys[2], "PREPARE", "code=104,msg=the branch is rolled back"),
            (keys[3], "COMMIT_ONE_PHASE", "code=104,msg=the branch is rolled back"),
            (keys[0], "COMMIT_TWO_PHASE", "code=-7,msg=the branch stays as it was"),
            (keys[0], "ROLLBACK", "code=-7,msg=the branch stays as it was"),
        ):
            code, text = talk.transaction(key, command)
            assert code == ERROR
            assert text.startswith(f"XAException:{answer}"), text
        code, text = talk.transaction("TX:a:1", "COMMIT_ONE_PHASE")
        assert (code, text[:31]) == (ERROR, "the transaction is rolled back:")
        talk.done("TX:a:2", "ROLLBACK")
        assert talk.put("t", b"x", keys[0])[0] == UNAVAILABLE
        assert talk.recover() == [keys[0]]
        broker.recover()
        broker.restart()
        with Talk(broker) as again:
            assert again.recover() == [keys[0]]
            again.done(keys[0], "COMMIT_TWO_PHASE")
            assert again.bodies("t") in ([b"x"], [b"x", b"x"])  # keys[1] may be stored or not


def test_commits_wait_like_puts(tmp_path: Path) -> None:
    """MQ-040, MQ-108: what waits for the disk counts, whoever put it: beyond max_waiting_bytes nobody puts for now."""
    with Controlled(tmp_path / "data", "--max-waiting-bytes", "2000") as broker, Talk(broker) as talk, Talk(broker) as other:
        talk.done("TX:a:1", "BEGIN")
        for _ in range(4):
            talk.placed("t", b"x" * 600, "TX:a:1")
        other.done("TX:b:1", "BEGIN")
        broker.stall()
        talk.send(talk.step("TX:a:1", "COMMIT_ONE_PHASE"))
        refusal = UNAVAILABLE, "(max_waiting_bytes)"

        def refused() -> bool:
            code, text = other.put("t", b"y", "TX:b:1")
            return code == refusal[0] and refusal[1] in text

        wait_until(refused, DEADLINE_S, "the commit waits for the disk")
        broker.go_on()
        assert talk.replies(1)[0].code == OK
        wait_until(lambda: other.put("t", b"z", "TX:b:1")[0] == OK, DEADLINE_S, "nothing waits any more")
        assert other.bodies("t") == [b"x" * 600] * 4


def test_statistics(tmp_path: Path) -> None:
    """MQ-064: puts count when they are put, messages when they are committed; parked ones are nobody's messages."""
    with BrokerProcess(tmp_path / "data") as broker, Talk(broker) as talk:

        def seen() -> tuple[int, ...]:
            all_, own = statistics(broker), statistics(broker, "t")
            return (
                *(int(all_[name]) for name in ("cmd_put", "put_failed", "total_messages", "topics")),
                int(own["message_count"]),
            )

        talk.placed("t", b"plain")
        assert seen() == (1, 0, 1, 1, 1)
        key = "XID:1:01:01:m"
        talk.done(key, "BEGIN")
        for _ in range(3):
            talk.placed("t", b"hello", key)
        assert seen() == (4, 0, 1, 1, 1)
        talk.done(key, "PREPARE")
        assert seen() == (4, 0, 1, 1, 1)
        talk.done(key, "COMMIT_TWO_PHASE")
        assert seen() == (4, 0, 4, 1, 4)
        talk.done("TX:a:1", "BEGIN")
        talk.placed("t", b"hello", "TX:a:1")
        talk.done("TX:a:1", "ROLLBACK")
        assert seen() == (5, 0, 4, 1, 4)
        assert talk.put("t", b"late", "TX:a:1")[0] == ERROR
        assert seen() == (6, 1, 4, 1, 4)
        realtime = statistics(broker, "t")["topic_realtime_put"]
        assert realtime.startswith("Count=4,"), realtime


def test_a_transaction_as_large_as_may_be(tmp_path: Path) -> None:
    """MQ-107: what a transaction takes can be voted for and committed, whatever its messages are made of."""
    topics = ("t", "x" * 127)
    shapes: list[tuple[bytes, str | None]] = [(b"", None), (b"", "属" * 1000), (b"x" * 4000, "tag"), (b"x" * 100, None)]
    flags = ("--segment-bytes", "65536", "--max-body-bytes", "8192")
    with BrokerProcess(tmp_path / "data", *flags) as broker, Talk(broker) as talk:
        for number, (body, attribute) in enumerate(shapes):
            for topic in topics:
                key = f"XID:1:{number:02x}:{topics.index(topic):02x}:m"
                before = len(talk.messages(topic))
                talk.done(key, "BEGIN")
                taken = 0
                while (answer := talk.put(topic, body, key, attribute=attribute))[0] == OK:
                    taken += 1
                assert "(max_branch_bytes)" in answer[1]
                assert taken > 5
                assert talk.transaction(key, "PREPARE") == (OK, "0")
                talk.done(key, "COMMIT_TWO_PHASE")
                assert len(talk.messages(topic)) == before + taken

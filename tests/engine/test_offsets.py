"""Offsets of consumer groups as clients see them, and those that a stopped or killed broker keeps."""

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

from metaq.protocol.remoting import fastjson
from metaq.protocol.remoting.codes import COMPACT, JSON, PULL_COMMITS_OFFSET, PULL_SUSPENDS, Request, Response
from metaq.protocol.remoting.headers import encode_header, with_letters
from metaq.protocol.remoting.sending.batch import BatchItem, encode_batch
from metaq.store.files.disk import RealDisk
from metaq.store.files.documents import BACKUP, write_document
from tests.support.admin import ask, connect, create_topic, send
from tests.support.broker import BrokerProcess, wait_until
from tests.support.consumer import Consumer, subscription
from tests.support.messages import records, send_header

DEADLINE_S: Final = 60.0
SAVED: Final = "config/consumerOffset.json"
KEPT: Final = "METAQ_SYS_OFFSETS"
NEVER: Final = ("--offset-snapshot-interval-ms", "3600000")
OFTEN: Final = ("--offset-snapshot-interval-ms", "100")


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path_factory.mktemp("offsets") / "data") as process:
        yield process


_numbers = itertools.count()


@pytest.fixture
def name() -> str:
    """One that no other test uses."""
    return f"n{next(_numbers)}"


Join = Callable[..., Consumer]


@pytest.fixture
def join() -> Iterator[Join]:
    """Makes consumers that are closed in the end."""
    with ExitStack() as stack:
        yield lambda *args, **more: stack.enter_context(Consumer(*args, **more))


def make(broker: BrokerProcess, topic: str, partitions: int = 1) -> None:
    """A topic that a kill does not take back."""
    with connect(broker) as admin:
        create_topic(admin, topic, write=partitions, read=partitions)


def fill(broker: BrokerProcess, topic: str, messages: int, partition: int = 0) -> None:
    """Offsets behind the end of a partition are none, so there have to be messages before them."""
    with connect(broker) as producer:
        header = send_header(topic, partition=partition)._replace(batch=True)
        body = encode_batch([BatchItem(0, b"x", "")] * messages)
        ask(producer, Request.SEND_BATCH_MESSAGE, body, **with_letters(encode_header(header)))


def kept(broker: BrokerProcess) -> list[dict[str, dict[str, int]]]:
    """The changes that are in the log, in order."""
    with connect(broker) as reader:
        return [json.loads(bytes(record.body)) for record in records(reader, KEPT)]


def in_log(broker: BrokerProcess, key: str, offset: int, partition: int = 0) -> bool:
    """Return whether the log has this committed offset, or a later one."""
    return any(changes.get(key, {}).get(str(partition), -1) >= offset for changes in kept(broker))


# -- what a client sees -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("serialization", [JSON, COMPACT])
def test_offsets_move_forward(broker: BrokerProcess, name: str, join: Join, serialization: int) -> None:
    """SG-055, SG-067, SG-078: a lower offset and a negative one change nothing; groups and partitions are apart."""
    make(broker, name, 2)
    fill(broker, name, 6)
    consumer, other = join(broker, "cg", serialization=serialization), join(broker, "other")
    answer = consumer.commit(name, 5)
    assert (answer.code, answer.fields) == (Response.SUCCESS, {})
    assert consumer.offset(name) == 5
    for late in (4, 0, -1):
        assert consumer.commit(name, late).code == Response.SUCCESS
        assert consumer.offset(name) == 5
    assert consumer.commit(name, 6).code == Response.SUCCESS
    assert consumer.commit(name, 1, partition=1).code == Response.SUCCESS
    assert (consumer.offset(name), consumer.offset(name, 1), other.offset(name)) == (6, 1, 0)
    assert consumer.commit(name, 1, partition=2).code == Response.SYSTEM_ERROR
    assert consumer.commit("nowhere", 1).code == Response.TOPIC_NOT_EXIST
    table = fastjson.decode(consumer.call(Request.GET_ALL_CONSUMER_OFFSET, {}).body)["offsetTable"]
    assert table[f"{name}@cg"] == {0: 6, 1: 1}


def test_administrators_set_offsets_of_a_group_that_is_off(broker: BrokerProcess, name: str, join: Join) -> None:
    """SG-067: RocketMQ's tool asks how far a group is (208), then commits in its name; while a member is there it cannot."""
    make(broker, name, 1)
    fill(broker, name, 6)
    tool, consumer = join(broker, name), join(broker, name)
    for offset, known in ((5, 5), (2, 5)):
        tool.commit(name, offset)
        assert tool.offset(name) == known
    ask(tool.wire, Request.GET_CONSUME_STATS, consumerGroup=name)
    for offset, known in ((2, 2), (-1, 2), (3, 3), (1, 1)):
        assert tool.commit(name, offset).code == Response.SUCCESS
        assert consumer.offset(name) == known
    consumer.commit(name, 4)
    consumer.commit(name, 3)
    assert consumer.offset(name) == 4
    consumer.beat(subscription(name))
    tool.commit(name, 0)
    assert consumer.offset(name) == 4


def test_a_pull_commits(broker: BrokerProcess, name: str, join: Join) -> None:
    """SG-067, SG-084: at once, also when it is held."""
    with connect(broker) as producer:
        send(producer, name, b"x", b"y")
    consumer, watcher = join(broker, "cg"), join(broker, "cg")
    consumer.beat(subscription(name))
    assert consumer.bodies(name, flags=PULL_COMMITS_OFFSET, commit=1) == [b"x", b"y"]
    assert consumer.offset(name) == 1
    consumer.pull(name, commit=2)  # without the flag
    assert consumer.offset(name) == 1
    fields = consumer.pull_fields(name, 2, flags=PULL_COMMITS_OFFSET | PULL_SUSPENDS, commit=2, wait_ms=30_000)
    held = consumer.wire.send(Request.PULL_MESSAGE, fields)
    wait_until(lambda: watcher.offset(name) == 2, DEADLINE_S, "the held pull has committed")
    assert consumer.offset(name) == 2
    assert not consumer.wire.answered(held)


def test_where_a_new_group_begins(broker: BrokerProcess, name: str, join: Join) -> None:
    """SG-055, SG-078: at 0 while nothing has aged out; on an old partition the client decides."""
    consumer = join(broker, "cg")
    assert consumer.offset(name) == 0
    with connect(broker) as admin:
        send(admin, name, b"x", b"y")
        assert consumer.offset(name) == 0
        assert consumer.offset(name, setZeroIfNotFound="false") is None
        ask(admin, Request.DELETE_TOPIC_IN_BROKER, topic=name)
        send(admin, name, b"z")
    assert consumer.number(Request.GET_MIN_OFFSET, name) == 2
    assert consumer.offset(name) is None
    consumer.commit(name, 3)
    assert consumer.offset(name) == 3


def test_offsets_of_a_partition(broker: BrokerProcess, name: str, join: Join) -> None:
    """SG-078: its ends, the one at a time, and the age of its oldest message; an empty one has zeros."""
    consumer = join(broker, "cg", serialization=COMPACT)
    assert [consumer.number(code, name) for code in (Request.GET_MAX_OFFSET, Request.GET_MIN_OFFSET)] == [0, 0]
    assert consumer.number(Request.GET_EARLIEST_MSG_STORETIME, name) == -1
    assert consumer.number(Request.SEARCH_OFFSET_BY_TIMESTAMP, name, timestamp="1") == 0
    with connect(broker) as producer:
        send(producer, name, b"x", b"y")
        first, second = (record.store_ms for record in records(producer, name))
    assert [consumer.number(code, name) for code in (Request.GET_MAX_OFFSET, Request.GET_MIN_OFFSET)] == [2, 0]
    assert consumer.number(Request.GET_EARLIEST_MSG_STORETIME, name) == first
    at = {bound: lambda time, bound=bound: search(consumer, name, time, bound) for bound in ("LOWER", "UPPER")}
    assert [at["LOWER"](time) for time in (0, first, second, second + 1)] == [0, 0, 0 if first == second else 1, 2]
    assert [at["UPPER"](time) for time in (0, second, second + 1)] == [0, 1, 1]


def search(consumer: Consumer, topic: str, time_ms: int, bound: str) -> int:
    return consumer.number(Request.SEARCH_OFFSET_BY_TIMESTAMP, topic, timestamp=str(time_ms), boundaryType=bound)


# -- what is kept -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("snapshots", [NEVER, OFTEN], ids=["log", "snapshots"])
def test_an_orderly_stop_keeps_all(tmp_path: Path, join: Join, snapshots: tuple[str, str]) -> None:
    """SG-067, SG-068: to the last commit, in the snapshot and in the log; a stop without a change leaves the same."""
    data = tmp_path / "data"
    with BrokerProcess(data, *snapshots) as broker:
        make(broker, "T", 3)
        consumer = join(broker, "cg")
        for partition in range(3):
            fill(broker, "T", 12, partition)
            consumer.commit("T", 10 + partition, partition)
        assert broker.terminate() == 0
        saved = json.loads((data / SAVED).read_bytes())
        assert saved["offsetTable"] == {"T@cg": {"0": 10, "1": 11, "2": 12}}
        broker.start()
        again = join(broker, "cg")
        assert [again.offset("T", partition) for partition in range(3)] == [10, 11, 12]
        assert saved["next"] == len(kept(broker))
        assert broker.terminate() == 0
        assert json.loads((data / SAVED).read_bytes()) == saved


def test_snapshots_are_written_meanwhile(tmp_path: Path, join: Join) -> None:
    """SG-068: every offset_snapshot_interval_ms when something has changed, and whole."""
    data = tmp_path / "data"
    with BrokerProcess(data, *OFTEN) as broker:
        make(broker, "T")
        consumer = join(broker, "cg")
        for offset in (1, 2, 3):
            consumer.commit("T", offset)

            def saved(offset: int = offset) -> bool:
                file = data / SAVED
                return file.exists() and json.loads(file.read_bytes())["offsetTable"] == {"T@cg": {"0": offset}}

            wait_until(saved, DEADLINE_S, f"offset {offset} is in the snapshot")


@pytest.mark.slow
@pytest.mark.parametrize("durability", ["memory", "disk"])
@pytest.mark.parametrize("snapshots", [NEVER, OFTEN], ids=["log", "snapshots"])
def test_kills_take_back_what_was_not_in_the_log_yet(
    tmp_path: Path, join: Join, snapshots: tuple[str, str], durability: str
) -> None:
    """SG-067, SG-068: kills under load, again and again. Nothing that is in the log is lost, nothing appears."""
    with BrokerProcess(tmp_path / "data", *snapshots, durability=durability) as broker:
        make(broker, "T", 2)
        asked = 0
        for _ in range(3):
            consumer = join(broker, "cg")
            start = asked
            while not in_log(broker, "T@cg", start + 1):
                fill(broker, "T", 100)
                fill(broker, "T", 100, partition=1)
                for _ in range(50):
                    asked += 1
                    consumer.commit("T", asked)
                    consumer.commit("T", asked, partition=1)
            sure = max(changes.get("T@cg", {}).get("0", 0) for changes in kept(broker))
            for _ in range(20):  # these may be lost
                asked += 1
                consumer.commit("T", asked)
            broker.kill()
            broker.start()
            after = join(broker, "cg").offset("T")
            assert after is not None
            assert start < sure <= after <= asked


def test_a_lost_snapshot_is_made_good_from_the_log(tmp_path: Path, join: Join) -> None:
    """SG-067, SG-068: a torn one and its backup too; what was removed stays removed."""
    data = tmp_path / "data"
    with BrokerProcess(data, *OFTEN) as broker:
        make(broker, "T")
        make(broker, "gone")
        fill(broker, "T", 7)
        consumer = join(broker, "cg")
        consumer.commit("T", 7)
        consumer.commit("gone", 7)
        wait_until(lambda: in_log(broker, "gone@cg", 7), DEADLINE_S, "the commits are in the log")
        with connect(broker) as admin:
            ask(admin, Request.DELETE_TOPIC_IN_BROKER, topic="gone")
        wait_until(lambda: {"gone@cg": {"0": -1}} in kept(broker), DEADLINE_S, "the removal is in the log")
        broker.kill()
        for file in (data / SAVED, data / (SAVED + BACKUP)):
            file.write_bytes(b"{torn")
        broker.start()
        again = join(broker, "cg")
        assert again.offset("T") == 7
        table = fastjson.decode(again.call(Request.GET_ALL_CONSUMER_OFFSET, {}).body)["offsetTable"]
        assert table == {"T@cg": {0: 7}}
        assert "snapshot of consumer offsets damaged" in broker.stderr()


def test_a_snapshot_may_be_newer_than_the_log(tmp_path: Path, join: Join) -> None:
    """SG-068: after a power cut at level memory. No message that comes then is passed over, what is committed then is kept."""
    data = tmp_path / "data"
    with BrokerProcess(data, *NEVER) as broker:
        make(broker, "T")
        fill(broker, "T", 3)
        assert broker.terminate() == 0
        write_document(RealDisk(), data / SAVED, {"next": 1000, "offsetTable": {"T@cg": {"0": 5}, "lost@cg": {"2": 9}}})
        broker.start()
        fill(broker, "T", 1)
        consumer = join(broker, "cg")
        assert consumer.offset("T") == 3
        assert "offset taken back to where its partition ends group=cg topic=T partition=0 offset=5 end=3" in broker.stderr()
        consumer.commit("T", 4)
        wait_until(lambda: in_log(broker, "T@cg", 4), DEADLINE_S, "the commit is in the log")
        broker.kill()
        broker.start()
        assert join(broker, "cg").offset("T") == 4


def test_a_client_that_has_seen_more_than_there_is(broker: BrokerProcess, name: str, join: Join) -> None:
    """SG-067, SG-078: after a power cut at level memory. Its old offset, beyond the end, stands against no new one."""
    make(broker, name)
    fill(broker, name, 3)
    consumer = join(broker, "cg")
    consumer.commit(name, 5)
    consumer.commit(name, 4)
    assert consumer.offset(name) == 5
    consumer.commit(name, 2)
    assert consumer.offset(name) == 2


def test_many_changes_take_several_messages(tmp_path: Path, join: Join) -> None:
    """SG-067: none is larger than a segment has room for."""
    data = tmp_path / "data"
    with BrokerProcess(data, "--segment-bytes", "65536", "--max-body-bytes", "4096", *NEVER) as broker:
        make(broker, "T", 500)
        for partition in range(500):
            fill(broker, "T", 9, partition)
        consumer = join(broker, "cg")
        for partition in range(500):
            consumer.wire.send(
                Request.UPDATE_CONSUMER_OFFSET,
                {"consumerGroup": "cg", "topic": "T", "queueId": str(partition), "commitOffset": "9"},
                oneway=True,
            )
        assert consumer.offset("T", 499) == 9

        def whole() -> bool:
            found = {int(number) for changes in kept(broker) for number in changes.get("T@cg", {})}
            return found == set(range(500))

        wait_until(whole, DEADLINE_S, "all changes are in the log")
        assert len(kept(broker)) > 1
        broker.kill()
        broker.start()
        table = fastjson.decode(join(broker, "cg").call(Request.GET_ALL_CONSUMER_OFFSET, {}).body)["offsetTable"]
        assert table == {"T@cg": dict.fromkeys(range(500), 9)}


def test_nobody_writes_offsets_but_the_broker(broker: BrokerProcess) -> None:
    """SG-067: neither over the one protocol nor over the other."""
    with connect(broker) as producer, broker.connect() as text:
        fields = {"a": "pg", "b": KEPT, "c": "TBW102", "d": "1", "e": "0", "f": "0", "g": "1", "h": "0"}
        assert producer.call(Request.SEND_MESSAGE_V2, fields, b"{}").code == Response.NO_PERMISSION
        text.sendall(b"put %s 0 2 0 7\r\n{}" % KEPT.encode())
        assert text.recv(4096).startswith(b"result 403 ")

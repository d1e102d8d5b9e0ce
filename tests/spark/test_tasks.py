"""Tasks as they read in a worker, from real brokers, without Spark."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from metaq.client.connecting.access import Access
from metaq.client.consuming.bulk import BulkConnection
from metaq.errors import ConnectionFailed, DataLost
from metaq.message import MessageQueue, TopicPartition
from metaq.spark.reading import tasks as tasks_module
from metaq.spark.reading.disk import Folder
from metaq.spark.reading.options import ReadOptions, read_options
from metaq.spark.reading.ranges import Range
from metaq.spark.reading.tasks import Part, Task, read_task
from tests.spark.test_disk import FIRST, make
from tests.spark.topics import AGING, age, clients
from tests.support.broker import BrokerProcess

TOPIC = "t"
DEAD = "127.0.0.1:1"


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path / "data") as broker:
        yield broker


def options(broker: BrokerProcess, **more: str) -> ReadOptions:
    return read_options({"metaq.bootstrap.servers": broker.registry, "subscribe": TOPIC, **more})


def part(begin: int, end: int, *addresses: str, number: int = 7, queue: int = 0) -> Part:
    """Return a part of a queue that Spark knows by another number."""
    return Part(Range(TopicPartition(TOPIC, number), begin, end), MessageQueue(TOPIC, "metaq", queue), addresses)


def offsets(broker: BrokerProcess, *parts: Part, **more: str) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for batch in read_task(Task(parts), options(broker, **more)):
        found += zip(batch["partition"].to_pylist(), batch["offset"].to_pylist(), strict=True)
    return found


def put(broker: BrokerProcess, *bodies: bytes, partition: int = 0) -> None:
    with clients(broker) as (client, text):
        client.admin().create_topic(TOPIC, 2)
        text.put_many(TOPIC, bodies, partition=partition)


def test_parts_are_read_one_behind_the_other(broker: BrokerProcess) -> None:
    """P47: exactly their ranges, under the numbers that Spark knows."""
    put(broker, *[b"x"] * 30)
    put(broker, *[b"y"] * 30, partition=1)
    found = offsets(broker, part(5, 8, broker.address), part(28, 30, broker.address, number=3, queue=1), part(0, 0))
    assert found == [(7, 5), (7, 6), (7, 7), (3, 28), (3, 29)]


def test_a_broker_that_restarts_or_dies_is_left_for_its_slave(broker: BrokerProcess) -> None:
    """P47: a connection that a worker has kept may be dead; an address that does not answer is not the end."""
    put(broker, *[b"x"] * 10)
    assert len(offsets(broker, part(0, 10, broker.address))) == 10
    broker.restart(same_port=True)
    assert len(offsets(broker, part(0, 10, broker.address))) == 10
    assert len(offsets(broker, part(0, 10, DEAD, broker.address))) == 10


def test_an_address_that_fails_is_left_alone_for_a_while(broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """P47: a host that has vanished is waited for once, not by each fetch, while another one has the messages."""
    put(broker, *[b"x"] * 10)
    gone = "127.0.0.1:2"
    tried: list[str] = []

    def connect(address: str, timeout_s: float, access: Access) -> BulkConnection:
        tried.append(address)
        if address == gone:
            raise ConnectionFailed(f"cannot connect to {address}: timed out")
        return BulkConnection(address, timeout_s, access)

    monkeypatch.setattr(tasks_module, "BulkConnection", connect)
    monkeypatch.setattr(tasks_module, "AVOIDED_S", 3600.0)
    parts = [part(number, number + 1, gone, broker.address) for number in range(10)]
    assert len(offsets(broker, *parts)) == 10
    assert tried == [gone, broker.address]
    broker.restart(same_port=True)
    assert len(offsets(broker, *parts)) == 10
    assert tried.count(gone) == 2, "once more, when the connection to the other one is lost"
    monkeypatch.setattr(tasks_module, "AVOIDED_S", 0.0)
    assert len(offsets(broker, *parts)) == 10
    assert tried.count(gone) == 12


def test_a_broker_without_an_address_is_named(broker: BrokerProcess) -> None:
    """P47: at once: a task cannot look it up."""
    with pytest.raises(ConnectionFailed, match="broker metaq had no address"):
        offsets(broker, part(0, 1))


@pytest.mark.slow
def test_what_is_gone_is_told_or_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """P48: what ages out after the plan was made: the range, and not one message more."""
    with BrokerProcess(tmp_path / "data", *AGING) as broker:
        put(broker, *[b"%04d" % number * 200 for number in range(300)])
        least = age(broker, TOPIC, 100)
        words = rf"messages are lost: t-7 offsets 50 to {least - 1} \({least - 50}\): they have aged out"
        with pytest.raises(DataLost, match=words):
            offsets(broker, part(50, 300, broker.address))
        found = offsets(broker, part(50, 300, broker.address), failOnDataLoss="false")
        assert found == [(7, offset) for offset in range(least, 300)]
        assert offsets(broker, part(10, 20, broker.address), failOnDataLoss="false") == []
        told = [record.getMessage() for record in caplog.records if "messages are lost" in record.getMessage()]
        assert [line.partition("t-7 offsets ")[2].partition(" (")[0] for line in told] == [f"50 to {least - 1}", "10 to 19"]
        with pytest.raises(DataLost, match=r"t-7 offsets 305 to 309 \(5\): the partition ends at 300"):
            offsets(broker, part(305, 310, broker.address))


@pytest.mark.parametrize("fail", ["true", "false"])
def test_what_is_not_shown_yet_is_not_lost(broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch, fail: str) -> None:
    """P48: a slave, or a new master, ends where messages are to be read; the task fails, and its plan is made again."""
    monkeypatch.setattr(tasks_module, "PATIENCE_S", 0.0)
    put(broker, *[b"x"] * 10)
    with pytest.raises(ConnectionFailed, match=r"metaq has not shown t-7 offsets 10 to 11 within 0 s; .* ends at 10"):
        offsets(broker, part(5, 12, broker.address), failOnDataLoss=fail)


@pytest.mark.parametrize("fail", ["true", "false"])
def test_what_ages_out_of_a_folder_is_told_or_left_out(tmp_path: Path, fail: str) -> None:
    """P48: also when it goes while the folder is read."""
    made = make(tmp_path / "data", 900, 300)
    most = len(made.bodies[FIRST])
    given = read_options({"path": str(made.path), "subscribe": FIRST.topic, "failOnDataLoss": fail})
    reading = read_task(Task([Part(Range(FIRST, 0, most), MessageQueue(FIRST.topic, "", 0))]), given)
    found = next(reading)["offset"].to_pylist()
    for segment in sorted((made.path / "commitlog").iterdir())[:6]:
        segment.unlink()
    begun, least = len(found), Folder(made.path).ends(*FIRST).least
    if fail == "true":
        lost = rf"a-0 offsets {begun} to {least - 1} \({least - begun}\): they aged out while the folder was read"
        with pytest.raises(DataLost, match=lost):
            list(reading)
        return
    found += [offset for batch in reading for offset in batch["offset"].to_pylist()]
    assert found == [*range(begun), *range(least, most)]


def test_memory_is_bounded_whatever_the_range(broker: BrokerProcess) -> None:
    """P47: 96 MiB are read in a part of that."""
    body = bytes(range(256)) * 32
    count = 12 * 1024
    put(broker, *[body] * count)
    batches = read_task(Task([part(0, count, broker.address)]), options(broker))
    rows = next(batches).num_rows
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that of now
    before = peak_kib()
    rows += sum(batch.num_rows for batch in batches)
    assert rows == count
    assert peak_kib() - before < 64 * 1024


def peak_kib() -> int:
    """The most memory that this process has had."""
    found = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])

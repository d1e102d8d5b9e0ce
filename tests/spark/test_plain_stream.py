"""The reader of a stream for PySpark 4.0 and 4.1, asked as these ask it, over a real broker."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from metaq.errors import ConnectionFailed
from metaq.spark.reading import brokers as brokers_module
from metaq.spark.reading import stream as stream_module
from metaq.spark.reading.options import read_options
from metaq.spark.reading.plainstream import PlainStreamReader
from tests.spark.readers import masters, offsets, ranges, two_brokers
from tests.spark.topics import DEADLINE_S, clients
from tests.support.broker import BrokerProcess, wait_until

TOPIC = "t"


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path / "data") as broker:
        put(broker, 0, 0)
        yield broker


@pytest.fixture
def new_reader(broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., PlainStreamReader]]:
    """Yield a function that makes a reader as Spark does after a start or a restart."""
    monkeypatch.setattr(stream_module, "HOLD_S", 0.0)
    readers = []

    def make(**options: str) -> PlainStreamReader:
        given = {"metaq.bootstrap.servers": broker.registry, "subscribe": TOPIC, **options}
        readers.append(PlainStreamReader(lambda: read_options(given)))
        return readers[-1]

    yield make
    for reader in readers:
        if reader._connected is not None:
            reader._connected.close()


MakeReader = Callable[..., PlainStreamReader]


def put(broker: BrokerProcess, partition: int, count: int) -> None:
    with clients(broker) as (client, text):
        client.admin().create_topic(TOPIC, 2)
        text.put_many(TOPIC, [b"x"] * count, partition=partition)


def test_a_new_query_is_asked_for_an_end_first(broker: BrokerProcess, new_reader: MakeReader) -> None:
    """P47: its beginning is from the same moment."""
    put(broker, 0, 5)
    earliest = new_reader(startingOffsets="earliest")
    end = earliest.latestOffset()
    put(broker, 0, 5)
    assert ranges(earliest, earliest.initialOffset(), end) == [(0, 0, 5)]
    assert offsets(earliest.latestOffset()) == [10, 0]
    latest = new_reader()
    end = latest.latestOffset()
    put(broker, 1, 3)
    start = latest.initialOffset()
    assert start == end
    assert ranges(latest, start, end) == []
    assert ranges(latest, end, latest.latestOffset()) == [(1, 0, 3)]


def test_a_first_batch_that_crashed_loses_nothing(broker: BrokerProcess, new_reader: MakeReader) -> None:
    """P47: Spark asks again where the query begins, and latest is further on: what is between is the next batch."""
    end = new_reader().latestOffset()
    put(broker, 0, 5)
    again = new_reader()
    assert ranges(again, end, end) == [], "what Spark asks first after a restart"
    assert ranges(again, again.initialOffset(), end) == []
    assert ranges(again, end, again.latestOffset()) == [(0, 0, 5)]


def test_a_first_batch_that_crashed_waits_for_its_brokers(
    tmp_path: Path, new_reader: MakeReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P47: its partitions keep their numbers, and begin where they began, although one was away at the restart."""
    with two_brokers(tmp_path, TOPIC, 8) as (broker, client):
        options = {"metaq.bootstrap.servers": broker.registry, "startingOffsets": '{"t": {"0": 4, "1": 5}}'}
        end = new_reader(**options).latestOffset()
        broker.terminate()
        wait_until(lambda: masters(client) == {"n"}, DEADLINE_S, "one has left")
        again = new_reader(**options)
        again.partitions(end, end)
        with monkeypatch.context() as impatient:
            impatient.setattr(brokers_module, "PATIENCE_S", 0.0)
            with pytest.raises(ConnectionFailed, match="broker m, which has messages to read, is not there"):
                again.initialOffset()
        broker.restart()
        wait_until(lambda: masters(client) == {"m", "n"}, DEADLINE_S, "it is back")
        assert ranges(again, again.initialOffset(), end) == [(0, 4, 8), (1, 5, 8)]


def test_limits_hold_after_a_restart(broker: BrokerProcess, new_reader: MakeReader) -> None:
    """P47: the latest offset of the checkpoint is where the next batch begins."""
    put(broker, 0, 11)
    limits = {"startingOffsets": "earliest", "minOffsetsPerTrigger": "4", "maxOffsetsPerTrigger": "5"}
    first = new_reader(**limits).latestOffset()
    again = new_reader(**limits)
    again.partitions(first, first)
    second = again.latestOffset()
    assert [offsets(first), offsets(second)] == [[5, 0], [10, 0]]
    assert again.latestOffset() == second, "1 of 4"
    put(broker, 1, 3)
    assert offsets(again.latestOffset()) == [11, 3]

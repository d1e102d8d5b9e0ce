"""A stream's first batch that is planned again after a crash: Spark does not record where it begins."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from metaq.client import TextClient, connect
from metaq.spark.reading import stream as stream_module
from metaq.spark.reading.limitedstream import LimitedStreamReader
from metaq.spark.reading.options import read_options
from metaq.spark.reading.plainstream import PlainStreamReader
from metaq.spark.reading.stream import StreamReader
from tests.spark.readers import hide, masters, ranges
from tests.spark.topics import DEADLINE_S, clients
from tests.support.broker import BrokerProcess, RegistryProcess, wait_until

TOPIC = "t"
LATER = {"startingTimestamp": "9999999999999", "startingOffsetsByTimestampStrategy": "latest"}

MakeReader = Callable[..., StreamReader]


@pytest.fixture(params=[LimitedStreamReader, PlainStreamReader])
def new_reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeReader]:
    """Yield a function that makes a reader as Spark does after a start or a restart."""
    monkeypatch.setattr(stream_module, "HOLD_S", 0.0)
    readers: list[StreamReader] = []

    def make(servers: str, **options: str) -> StreamReader:
        given = {"metaq.bootstrap.servers": servers, "subscribe": TOPIC, **options}
        readers.append(request.param(lambda: read_options(given)))
        return readers[-1]

    yield make
    for reader in readers:
        if reader._connected is not None:
            reader._connected.close()


def first_batch(reader: StreamReader) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return where a new query's first batch begins and ends, asked for in the order of Spark's version."""
    if isinstance(reader, LimitedStreamReader):
        start = reader.initialOffset()
        return start, reader.latestOffset(start, ReadAllAvailable())
    assert isinstance(reader, PlainStreamReader)
    end = reader.latestOffset()
    return reader.initialOffset(), end


def begun_again(reader: StreamReader, end: dict[str, Any]) -> dict[str, Any]:
    """Return where the first batch begins, asked for as after a crash."""
    if isinstance(reader, PlainStreamReader):
        reader.partitions(end, end)
    return reader.initialOffset()


def fill(broker: BrokerProcess) -> None:
    with TextClient(broker.host, broker.port, timeout_s=60) as text:
        text.put_many(TOPIC, [b"x"] * 8, partition=0)


@pytest.mark.parametrize(
    "options",
    [
        {"startingOffsets": '{"t": {"0": 4, "1": 5}}'},
        {"startingOffsets": '{"t": {"0": 4, "1": 5}}', "failOnDataLoss": "false"},
        {"startingOffsets": '{"t": {"0": -2, "1": -1}}'},
        LATER,
    ],
)
def test_what_a_new_master_hides_moves_no_beginning(tmp_path: Path, new_reader: MakeReader, options: dict[str, str]) -> None:
    """P48: it is looked up once the partitions show the batch; no message is lost, and none is read that was before it."""
    with BrokerProcess(tmp_path / "data") as broker, clients(broker) as (client, text):
        client.admin().create_topic(TOPIC, 2)
        for partition in range(2):
            text.put_many(TOPIC, [b"x"] * 8, partition=partition)
        reader, again = new_reader(broker.registry, **options), new_reader(broker.registry, **options)
        start, end = first_batch(reader)
        hide(again, 3)
        assert ranges(again, begun_again(again, end), end) == ranges(reader, start, end)


def test_a_broker_that_was_away_moves_no_beginning(tmp_path: Path, new_reader: MakeReader) -> None:
    """P47: each partition begins where it began, and not where another does, also when Spark asks for that too early."""
    with RegistryProcess(tmp_path / "registry") as registry, connect(registry.address, timeout_s=60) as client:
        flags = ("--registries", registry.address, "--broker-name")
        with BrokerProcess(tmp_path / "m", *flags, "m") as broker, BrokerProcess(tmp_path / "n", *flags, "n") as other:
            wait_until(lambda: masters(client) == {"m", "n"}, DEADLINE_S, "both are registered")
            client.admin().create_topic(TOPIC, 1, broker_names=("n",))
            fill(other)
            client.admin().delete_topic(TOPIC)
            client.admin().create_topic(TOPIC, 1)
            fill(broker)
            fill(other)
            reader, again = (new_reader(registry.address, startingOffsets="earliest") for _ in range(2))
            start, end = first_batch(reader)
            batch = ranges(reader, start, end)
            assert batch == [(0, 0, 8), (1, 8, 16)]
            broker.terminate()
            wait_until(lambda: masters(client) == {"n"}, DEADLINE_S, "one has left")
            early = again.initialOffset() if isinstance(again, LimitedStreamReader) else None
            broker.restart()
            wait_until(lambda: masters(client) == {"m", "n"}, DEADLINE_S, "it is back")
            assert ranges(again, early or begun_again(again, end), end) == batch

"""The reader of a stream, asked as Spark asks it, over real brokers."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import NoReturn

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows, ReadMinRows
from pyspark.sql.types import StructType

from metaq.client import TextClient, connect
from metaq.errors import ConfigError, DataLost, RequestTimeout
from metaq.message import MessageQueue
from metaq.spark.login import NOBODY
from metaq.spark.reading import brokers as brokers_module
from metaq.spark.reading import stream as stream_module
from metaq.spark.reading.brokers import Brokers
from metaq.spark.reading.limitedstream import LOST, LimitedStreamReader
from metaq.spark.reading.ranges import QUEUES
from metaq.spark.reading.tasks import Task
from metaq.spark.source import COLUMNS, MetaqDataSource
from tests.spark.readers import hide, masters, offsets, ranges, two_brokers
from tests.spark.topics import AGING, DEADLINE_S, age, clients
from tests.support.broker import BrokerProcess, RegistryProcess, wait_until

ALL = ReadAllAvailable()
TOPIC = "t"

MakeReader = Callable[..., LimitedStreamReader]


@pytest.fixture
def new_reader() -> Iterator[MakeReader]:
    """Yield a function that makes a reader as Spark does after a start or a restart."""
    schema = StructType()
    for column in COLUMNS.split(", "):
        schema.add(column.split(" ")[0], "string")
    readers: list[LimitedStreamReader] = []

    def make(servers: str, **options: str) -> LimitedStreamReader:
        reader = MetaqDataSource({"metaq.bootstrap.servers": servers, "subscribe": TOPIC, **options}).streamReader(schema)
        assert isinstance(reader, LimitedStreamReader)
        readers.append(reader)
        return reader

    yield make
    for reader in readers:
        if reader._connected is not None:
            reader._connected.close()


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path / "data") as broker:
        put(broker, 0, 0)
        yield broker


def put(broker: BrokerProcess, partition: int, count: int, body: bytes = b"x") -> None:
    with clients(broker) as (client, text):
        client.admin().create_topic(TOPIC, 2)
        text.put_many(TOPIC, [body] * count, partition=partition)


def test_where_a_query_begins_is_kept_before_it_moves(broker: BrokerProcess, new_reader: MakeReader) -> None:
    """P47: with latest, the first batch is empty; with earliest there is no need."""
    put(broker, 0, 5)
    latest = new_reader(broker.registry)
    start = latest.initialOffset()
    assert offsets(start) == [5, 0]
    put(broker, 1, 3)
    assert latest.latestOffset(start, ALL) == start, "what Spark keeps as the end of batch 0"
    assert offsets(latest.latestOffset(start, ALL)) == [5, 3]
    earliest = new_reader(broker.registry, startingOffsets="earliest")
    start = earliest.initialOffset()
    assert offsets(start) == [0, 0]
    assert offsets(earliest.latestOffset(start, ALL)) == [5, 3]


def test_latest_is_one_place_though_messages_come(broker: BrokerProcess, new_reader: MakeReader) -> None:
    """P47: Spark asks where a query begins when it makes the first batch, when it plans it, and again after a crash."""
    reader = new_reader(broker.registry)
    end = reader.latestOffset(reader.initialOffset(), ALL)
    put(broker, 0, 5)
    assert reader.initialOffset() == end
    assert ranges(reader, end, end) == []
    again = new_reader(broker.registry)
    assert ranges(again, again.initialOffset(), end) == []
    assert ranges(again, end, again.latestOffset(end, ALL)) == [(0, 0, 5)]


def test_a_beginning_that_is_recorded_is_not_recorded_again(broker: BrokerProcess, new_reader: MakeReader) -> None:
    """P47: a query that ends by itself, whose first batch crashed, reads what is there."""
    put(broker, 0, 5)
    options = {"startingTimestamp": "1", "startingOffsetsByTimestampStrategy": "latest"}
    reader = new_reader(broker.registry, **options)
    end = reader.latestOffset(reader.initialOffset(), ALL)
    assert offsets(end) == [0, 0]
    again = new_reader(broker.registry, **options)
    assert ranges(again, again.initialOffset(), end) == []
    assert offsets(again.latestOffset(end, ALL)) == [5, 0]


def test_an_empty_first_batch_is_empty_again(tmp_path: Path, new_reader: MakeReader, monkeypatch: pytest.MonkeyPatch) -> None:
    """P47: also when a broker is away as Spark asks again where the query begins, or hides messages."""
    monkeypatch.setattr(stream_module, "HOLD_S", 0.0)
    with two_brokers(tmp_path, TOPIC, 5) as (broker, client):
        reader = new_reader(broker.registry)
        end = reader.latestOffset(reader.initialOffset(), ALL)
        assert offsets(end) == [5, 5]
        broker.terminate()
        wait_until(lambda: masters(client) == {"n"}, DEADLINE_S, "one has left")
        again, hiding = new_reader(broker.registry), new_reader(broker.registry)
        hide(hiding, 2)
        starts = [again.initialOffset(), hiding.initialOffset()]
        assert list(map(offsets, starts)) == [[5], [3]]
        broker.restart()
        wait_until(lambda: masters(client) == {"m", "n"}, DEADLINE_S, "it is back")
        assert [ranges(again, starts[0], end), ranges(hiding, starts[1], end)] == [[], []]


def test_a_limit_is_for_those_who_ask_for_it(broker: BrokerProcess, new_reader: MakeReader) -> None:
    """P47: Spark may want all at once, whatever the option says."""
    put(broker, 0, 30)
    put(broker, 1, 10)
    reader = new_reader(broker.registry, startingOffsets="earliest", maxOffsetsPerTrigger="20")
    start = reader.initialOffset()
    assert reader.getDefaultReadLimit() == ReadMaxRows(20)
    assert offsets(reader.latestOffset(start, ReadMaxRows(20))) == [14, 6], "one for each, and the rest in proportion"
    assert offsets(reader.latestOffset(start, ALL)) == [30, 10]
    assert new_reader(broker.registry).getDefaultReadLimit() == ALL


def test_a_batch_waits_for_the_least_and_not_longer_than_said(
    broker: BrokerProcess, new_reader: MakeReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P47: the first one does not wait, nor do those that Spark wants to have all."""
    monkeypatch.setattr(stream_module, "HOLD_S", 0.0)
    put(broker, 0, 5)
    limits = {"minOffsetsPerTrigger": "10", "maxTriggerDelay": "60s"}
    reader = new_reader(broker.registry, startingOffsets="earliest", **limits)
    limit = reader.getDefaultReadLimit()
    assert limit == ReadMinRows(10)
    first = reader.latestOffset(reader.initialOffset(), limit)
    assert offsets(first) == [5, 0]
    put(broker, 1, 9)
    assert reader.latestOffset(first, limit) == first, "9 of 10"
    assert offsets(reader.latestOffset(first, ALL)) == [5, 9]
    put(broker, 0, 1)
    second = reader.latestOffset(first, limit)
    assert offsets(second) == [6, 9]
    put(broker, 0, 1)
    assert reader.latestOffset(second, limit) == second
    reader._triggered -= 60.0
    assert offsets(reader.latestOffset(second, limit)) == [7, 9], "1 of 10, but a minute has passed"


def test_the_least_and_the_most_work_together(
    broker: BrokerProcess, new_reader: MakeReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P47: a query that ends by itself takes also what is less than the least."""
    monkeypatch.setattr(stream_module, "HOLD_S", 0.0)
    put(broker, 0, 11)
    limits = {"minOffsetsPerTrigger": "4", "maxOffsetsPerTrigger": "5"}
    reader = new_reader(broker.registry, startingOffsets="earliest", **limits)
    limit = reader.getDefaultReadLimit()
    assert limit == ReadMaxRows(5)
    first = reader.latestOffset(reader.initialOffset(), limit)
    second = reader.latestOffset(first, limit)
    assert [offsets(first), offsets(second)] == [[5, 0], [10, 0]]
    assert reader.latestOffset(second, limit) == second
    reader.prepareForTriggerAvailableNow()
    assert offsets(reader.latestOffset(second, limit)) == [11, 0]


def test_news_are_waited_for_and_their_absence_is_told(broker: BrokerProcess, new_reader: MakeReader) -> None:
    """P47: the same offsets again, so that Spark makes no batch."""
    put(broker, 0, 5)
    reader = new_reader(broker.registry, startingOffsets="earliest")
    end = reader.latestOffset(reader.initialOffset(), ALL)
    assert reader.latestOffset(end, ALL) == end
    assert ranges(reader, end, end) == []
    assert len(reader.partitions(end, end)) == 1, "Spark would make a task of its own from none"


def test_available_now_ends_where_it_began(broker: BrokerProcess, new_reader: MakeReader) -> None:
    """P47: what comes later is for the next run, though the limit makes several batches of it."""
    put(broker, 0, 5)
    reader = new_reader(broker.registry, startingOffsets="earliest")
    reader.prepareForTriggerAvailableNow()
    start = reader.initialOffset()
    put(broker, 0, 5)
    put(broker, 1, 5)
    first = reader.latestOffset(start, ReadMaxRows(3))
    second = reader.latestOffset(first, ReadMaxRows(3))
    assert [offsets(first), offsets(second)] == [[3, 0], [5, 0]]
    assert reader.latestOffset(second, ReadMaxRows(3)) == second


def test_a_batch_is_planned_again_after_a_restart(broker: BrokerProcess, new_reader: MakeReader) -> None:
    """P47: by a reader that was asked nothing before: the same messages, and not those that came since."""
    put(broker, 0, 5)
    reader = new_reader(broker.registry, startingOffsets="earliest")
    start = reader.initialOffset()
    end = reader.latestOffset(start, ALL)
    put(broker, 0, 5)
    assert ranges(new_reader(broker.registry), start, end) == ranges(reader, start, end) == [(0, 0, 5)]


@pytest.mark.slow
def test_a_checkpoint_of_other_topics(broker: BrokerProcess, new_reader: MakeReader) -> None:
    """P47: a query that reads another topic than its checkpoint says what to do, once that topic has messages."""
    start = new_reader(broker.registry).initialOffset()
    put(broker, 0, 5)
    with clients(broker) as (client, _):
        client.admin().create_topic("u", 1)
    other = new_reader(broker.registry, subscribe="u")
    with pytest.raises(ConfigError, match="also reads t: subscribe to that again, or begin with a new checkpointLocation"):
        other.partitions(start, other.latestOffset(start, ALL))


def test_what_a_new_master_hides_is_not_lost(
    broker: BrokerProcess, new_reader: MakeReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P48: no batch goes back, and what is planned is waited for."""
    monkeypatch.setattr(stream_module, "HOLD_S", 0.0)
    put(broker, 0, 5)
    start = new_reader(broker.registry, startingOffsets="earliest").initialOffset()
    reader = new_reader(broker.registry)
    end = reader.latestOffset(start, ALL)
    put(broker, 1, 2)
    hide(reader, 1)
    following = reader.latestOffset(end, ALL)
    assert offsets(following) == [5, 2]
    hide(reader, 1)
    assert ranges(reader, start, following) == [(0, 0, 5), (1, 0, 2)]


def test_a_beginning_by_time_may_be_after_what_was_seen(broker: BrokerProcess, new_reader: MakeReader) -> None:
    """P47: a partition that grows before the offset of the time is found has lost nothing."""
    put(broker, 0, 5)
    options = {"startingTimestamp": "9999999999999", "startingOffsetsByTimestampStrategy": "latest"}
    reader = new_reader(broker.registry, **options)
    hide(reader, 1)  # shows as little as before the messages came
    assert offsets(reader.initialOffset()) == [5, 0]


def test_a_partition_that_stays_short_has_lost_messages(
    broker: BrokerProcess, new_reader: MakeReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P48: after some patience."""
    monkeypatch.setattr(stream_module, "HOLD_S", 0.0)
    put(broker, 0, 5)
    start = new_reader(broker.registry, startingOffsets="earliest").initialOffset()
    reader = new_reader(broker.registry)
    end = reader.latestOffset(start, ALL)
    hide(reader, 100)
    assert reader.latestOffset(end, ALL) == end
    for module in (brokers_module, stream_module):
        monkeypatch.setattr(module, "PATIENCE_S", 0.0)
    back = reader.latestOffset(end, ALL)
    assert offsets(back) == [3, 0]
    with pytest.raises(DataLost, match=r"t-0 offsets 3 to 4 \(2\): its offsets went back"):
        reader.partitions(end, back)
    with pytest.raises(DataLost, match=r"t-0 offsets 3 to 4 \(2\): the partition ends at 3"):
        reader.partitions(start, end)


@pytest.mark.slow
def test_what_has_aged_out_is_an_error_or_counted(
    tmp_path: Path, new_reader: MakeReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P48: once, however often a batch is planned."""
    monkeypatch.setattr(brokers_module, "PATIENCE_S", 0.0)
    with BrokerProcess(tmp_path / "data", *AGING) as broker:
        put(broker, 0, 300, b"x" * 800)
        start = new_reader(broker.registry, startingOffsets="earliest").initialOffset()
        least = age(broker, TOPIC, 100)
        strict = new_reader(broker.registry)
        end = strict.latestOffset(start, ALL)
        with pytest.raises(DataLost, match=rf"t-0 offsets 0 to {least - 1} \({least}\): they have aged out"):
            strict.partitions(start, end)
        reader = new_reader(broker.registry, failOnDataLoss="false")
        assert reader.latestOffset(start, ALL) == end
        assert ranges(reader, start, end) == ranges(reader, start, end) == [(0, least, 300)]
        reported = reader.reportLatestOffset()
        assert reported is not None
        assert reported[LOST] == {TOPIC: {"0": least}}
        with pytest.raises(DataLost, match=r"t-0 offsets 300 to 309 \(10\): the partition ends at 300"):
            strict.partitions(end, {**end, TOPIC: {"0": 310, "1": 0}})


def test_a_broker_that_comes_moves_no_partition(
    tmp_path: Path, new_reader: MakeReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P47, MQ-019: its partitions get new numbers, although it sorts before the others, and are read from the beginning."""
    monkeypatch.setattr(stream_module, "ROUTES_S", 0.0)
    with ExitStack() as stack:
        registry = stack.enter_context(RegistryProcess(tmp_path / "registry"))
        client = stack.enter_context(connect(registry.address, timeout_s=60))
        reader = new_reader(registry.address, startingOffsets="earliest")

        def start(name: str) -> None:
            stack.enter_context(BrokerProcess(tmp_path / name, "--registries", registry.address, "--broker-name", name))
            wait_until(lambda: name in masters(client), DEADLINE_S, f"{name} is registered")
            client.admin().create_topic(TOPIC, 1, broker_names=(name,))
            with client.producer() as producer:
                for _ in range(8):
                    producer.send(TOPIC, b"x")

        start("m")
        before = reader.latestOffset(reader.initialOffset(), ALL)
        assert (offsets(before), before[QUEUES]) == ([8], {TOPIC: [["m", 0, 1]]})
        start("a")
        after = reader.latestOffset(before, ALL)
        assert after[QUEUES] == {TOPIC: [["m", 0, 1], ["a", 0, 1]]}
        assert sum(offsets(after)) == 16
        assert ranges(reader, before, after) == [(0, 8, offsets(after)[0]), (1, 0, offsets(after)[1])]


def test_a_broker_that_restarts_is_planned_with_its_address(
    tmp_path: Path, new_reader: MakeReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P47: also when the last look for topics was while it was away."""
    with RegistryProcess(tmp_path / "registry") as registry, connect(registry.address, timeout_s=60) as client:
        flags = ("--registries", registry.address, "--broker-name")
        with BrokerProcess(tmp_path / "m", *flags, "m"), BrokerProcess(tmp_path / "n", *flags, "n") as broker:
            wait_until(lambda: masters(client) == {"m", "n"}, DEADLINE_S, "both are registered")
            client.admin().create_topic(TOPIC, 1)
            reader = new_reader(registry.address, startingOffsets="earliest")
            start = reader.initialOffset()
            broker.terminate()
            wait_until(lambda: masters(client) == {"m"}, DEADLINE_S, "one has left")
            monkeypatch.setattr(stream_module, "ROUTES_S", 0.0)
            reader.latestOffset(start, ALL)
            monkeypatch.setattr(stream_module, "ROUTES_S", 3600.0)
            broker.restart()
            wait_until(lambda: masters(client) == {"m", "n"}, DEADLINE_S, "it is back")
            with TextClient(broker.host, broker.port, timeout_s=60) as text:
                text.put_many(TOPIC, [b"x"] * 8, partition=0)
            (task,) = reader.partitions(start, reader.latestOffset(start, ALL))
            assert isinstance(task, Task)
            (part,) = task.parts
            assert (part.queue.broker_name, part.range.size, len(part.addresses)) == ("n", 8, 1)


@pytest.mark.parametrize("options", [{"subscribePattern": "t"}, {"assign": '{"t": [0, 1]}'}])
def test_topics_of_a_broker_that_is_away_stay_known(
    tmp_path: Path, new_reader: MakeReader, monkeypatch: pytest.MonkeyPatch, options: dict[str, str]
) -> None:
    """P47: a pattern without a match, or a partition that is missing, is an error of a new query only."""
    monkeypatch.setattr(stream_module, "ROUTES_S", 0.0)
    monkeypatch.setattr(stream_module, "HOLD_S", 0.0)
    with RegistryProcess(tmp_path / "registry") as registry, connect(registry.address, timeout_s=60) as client:
        flags = ("--registries", registry.address, "--broker-name")
        with BrokerProcess(tmp_path / "m", *flags, "m"), BrokerProcess(tmp_path / "n", *flags, "n") as broker:
            wait_until(lambda: masters(client) == {"m", "n"}, DEADLINE_S, "both are registered")
            names = ("n",) if "subscribePattern" in options else ("m", "n")
            client.admin().create_topic(TOPIC, 1, broker_names=names)
            reader = new_reader(registry.address, subscribe="", startingOffsets="earliest", **options)
            start = reader.initialOffset()
            broker.terminate()
            wait_until(lambda: masters(client) == {"m"}, DEADLINE_S, "one has left")
            reader._refresh()
            with pytest.raises(ConfigError, match=r"no topic matches|has no partition 1; it has 1"):
                new_reader(registry.address, subscribe="", **options).initialOffset()
            broker.restart()
            wait_until(lambda: masters(client) == {"m", "n"}, DEADLINE_S, "it is back")
            with TextClient(broker.host, broker.port, timeout_s=60) as text:
                text.put_many(TOPIC, [b"x"] * 8, partition=0)
            assert ranges(reader, start, reader.latestOffset(start, ALL)) == [(len(names) - 1, 0, 8)]


def test_a_partition_that_is_new_begins_at_its_oldest_message(
    broker: BrokerProcess, new_reader: MakeReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P48: none of it is lost, also when the batch is planned again, and with a limit or an end of the query."""
    monkeypatch.setattr(stream_module, "ROUTES_S", 0.0)
    monkeypatch.setattr(stream_module, "HOLD_S", 0.0)
    options = {"subscribe": "", "subscribePattern": "t|again", "startingOffsets": "earliest"}

    def create(count: int) -> None:
        with clients(broker) as (client, text):
            client.admin().create_topic("again", 1)
            text.put_many("again", [b"x"] * count, partition=0)

    create(5)
    with clients(broker) as (client, _):
        client.admin().delete_topic("again")
    reader, ending = new_reader(broker.registry, **options), new_reader(broker.registry, **options)
    start = reader.initialOffset()
    ending.prepareForTriggerAvailableNow()
    create(4)
    nothing = ending.latestOffset(start, ALL)
    assert ranges(ending, start, nothing) == [], "it came after the query has begun"
    assert ranges(reader, nothing, reader.latestOffset(nothing, ALL)) == [(0, 5, 9)]
    first = reader.latestOffset(start, ReadMaxRows(3))
    second = reader.latestOffset(first, ReadMaxRows(3))
    again = new_reader(broker.registry, **options)
    assert ranges(again, start, first) == ranges(reader, start, first) == [(0, 5, 8)]
    assert ranges(again, first, second) == ranges(reader, first, second) == [(0, 8, 9)]
    assert reader.latestOffset(second, ALL) == second


def test_a_topic_that_is_gone_keeps_no_other_offsets_from_the_group(
    broker: BrokerProcess, new_reader: MakeReader, caplog: pytest.LogCaptureFixture
) -> None:
    """P47: those of the others are committed, and the failure is logged."""
    put(broker, 0, 5)
    with clients(broker) as (client, _):
        client.admin().create_topic("gone", 1)
        reader = new_reader(broker.registry, subscribe="gone,t", startingOffsets="earliest", groupId="g")
        end = reader.latestOffset(reader.initialOffset(), ALL)
        client.admin().delete_topic("gone")
        reader.commit(end)
        with client.pull_consumer(TOPIC, "g") as consumer:
            assert [consumer.committed(queue) for queue in consumer.partitions()] == [5, 0]
    assert "offsets not committed group=g reason=the broker refused: the topic gone does not exist" in caplog.text


def test_a_silent_broker_is_not_waited_for_once_more_for_each_topic(monkeypatch: pytest.MonkeyPatch) -> None:
    """P47: the next batch commits what is left out now."""
    brokers = Brokers("127.0.0.1:1", NOBODY)
    asked = []

    class Silent:
        def pull_consumer(self, topic: str, group: str) -> NoReturn:
            asked.append((topic, group))
            raise RequestTimeout("no answer")

    with closing(brokers._client), monkeypatch.context() as patched:
        patched.setattr(brokers, "_client", Silent())
        patched.setattr(brokers_module, "TIMEOUT_S", 0.0)
        with pytest.raises(RequestTimeout):
            brokers.commit("g", {MessageQueue("t", "m", 0): 1, MessageQueue("u", "m", 0): 1})
    assert asked == [("t", "g")]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"endingOffsets": "latest"}, "endingOffsets: a streaming query has no end"),
        ({"filterPushdown": "true"}, "filterPushdown: Spark passes filters to batch reads only"),
        ({"startingOffsets": '{"t": {"0": 5}}'}, "startingOffsets: t-1 is left out"),
    ],
)
def test_options_are_looked_at_when_a_query_begins(
    broker: BrokerProcess, new_reader: MakeReader, options: dict[str, str], words: str
) -> None:
    """P47: not when the reader is made: Spark would hide it."""
    reader = new_reader(broker.registry, **options)
    with pytest.raises(ConfigError, match=words):
        reader.initialOffset()

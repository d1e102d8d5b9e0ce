"""Batch reads by a real Spark from real brokers: they read exactly the log."""

import json
import re
import subprocess
import sys
import zlib
from contextlib import ExitStack
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    IsNotNull,
    LessThan,
    StringStartsWith,
)

from metaq.client import connect
from metaq.errors import DataLost
from metaq.message import TopicPartition
from metaq.spark.reading import brokers as brokers_module
from metaq.spark.reading.batch import PUSHED, BatchReader
from metaq.spark.reading.brokers import Brokers
from metaq.spark.reading.filters import FilteringReader
from metaq.spark.reading.options import read_options
from metaq.spark.reading.planning import plan_batch
from metaq.spark.reading.ranges import ANY, Layout, Span
from metaq.spark.reading.tasks import Task
from metaq.spark.source import MetaqDataSource
from tests.client.poison import ZLIB, send_packed
from tests.spark.readers import NewMaster
from tests.spark.topics import AGING, DEADLINE_S, age, clients, fill, log_of, plain, reader, rows
from tests.support.broker import BrokerProcess, RegistryProcess, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pyspark.sql import SparkSession

PARTITIONS = {"one": 1, "eight": 8, "many": 64}
EACH = {"one": 700, "eight": 60, "many": 12}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[BrokerProcess]":
    """With one, eight and 64 partitions of messages of all kinds."""
    with BrokerProcess(tmp_path_factory.mktemp("broker") / "data") as broker:
        for topic, partitions in PARTITIONS.items():
            fill(broker, topic, partitions, EACH[topic])
        yield broker


# -- what is read ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("topic", PARTITIONS)
def test_a_batch_is_the_log(spark: "SparkSession", broker: BrokerProcess, topic: str) -> None:
    """P47: every message once, with all its parts, in order within each partition; an empty partition is no trouble."""
    wanted = log_of(broker, topic)
    frame = reader(spark, broker, topic, includeHeaders=True).load()
    found = rows(frame)
    assert sorted(found, key=lambda row: row[:3]) == wanted
    for partition in {row.partition for row in wanted}:
        offsets = [row.offset for row in found if row.partition == partition]
        assert offsets == sorted(offsets)
    assert len({row.partition for row in wanted}) >= PARTITIONS[topic] - 1
    assert any(row.headers for row in wanted)
    assert rows(frame) == found, "a frame reads the same again"


def test_columns_are_those_of_kafka_and_the_tag(spark: "SparkSession", broker: BrokerProcess) -> None:
    """P47: headers only when asked for."""
    frame = reader(spark, broker, "eight").load()
    names = ["key", "value", "topic", "partition", "offset", "timestamp", "timestampType", "tag"]
    assert frame.columns == names
    assert reader(spark, broker, "eight", includeHeaders=True).load().columns == [*names, "headers"]
    assert sorted(rows(frame), key=lambda row: row[:3]) == plain(log_of(broker, "eight"))


def test_topics_by_names_pattern_and_partition(spark: "SparkSession", broker: BrokerProcess) -> None:
    """P47."""
    one, eight = log_of(broker, "one"), log_of(broker, "eight")
    found = rows(reader(spark, broker, "one, eight").load())
    assert sorted(found, key=lambda row: row[:3]) == plain(eight + one)
    pattern = reader(spark, broker, "", subscribePattern="e.*t|one|METAQ.*").load()
    assert {row[0] for row in pattern.select("topic").distinct().collect()} == {"one", "eight"}
    assigned = rows(reader(spark, broker, "", assign=json.dumps({"eight": [2, 5]})).load())
    assert sorted(assigned, key=lambda row: row[:3]) == plain(row for row in eight if row.partition in {2, 5})


def test_offsets_and_times_say_where_to_begin_and_to_end(spark: "SparkSession", broker: BrokerProcess) -> None:
    """P47: offsets with -2 and -1, a time, times of each partition."""
    log = plain(log_of(broker, "eight"))
    size = {partition: sum(row.partition == partition for row in log) for partition in range(8)}

    def found(**options: object) -> list[tuple[int, int]]:
        return sorted((row.partition, row.offset) for row in rows(reader(spark, broker, "eight", **options).load()))

    starts = {**dict.fromkeys(range(8), -2), 0: 10, 1: size[1]}
    ends = {**dict.fromkeys(range(8), -1), 0: 15, 2: 7}
    wanted = [
        (row.partition, row.offset)
        for row in log
        if row.offset >= max(0, starts[row.partition]) and (ends[row.partition] < 0 or row.offset < ends[row.partition])
    ]
    told = {"startingOffsets": json.dumps({"eight": starts}), "endingOffsets": json.dumps({"eight": ends})}
    assert found(**told) == wanted
    middle = sorted(row.stored_ms for row in log)[len(log) // 2]
    latest = {"startingOffsetsByTimestampStrategy": "latest"}
    after = [(row.partition, row.offset) for row in log if row.stored_ms >= middle]
    before = [(row.partition, row.offset) for row in log if row.stored_ms < middle]
    assert found(startingTimestamp=middle, **latest) == after
    assert found(endingTimestamp=middle) == before
    table = json.dumps({"eight": dict.fromkeys(range(8), middle)})
    assert found(startingOffsetsByTimestamp=table, **latest) == after


def test_what_comes_later_is_in_a_new_load(spark: "SparkSession", broker: BrokerProcess) -> None:
    """P47: the end is fixed when the plan is made."""
    fill(broker, "growing", 2, 5)
    frame = reader(spark, broker, "growing").load()
    before = rows(frame)
    with clients(broker) as (_, text):
        text.put("growing", b"later", partition=0)
    assert rows(frame) == before
    assert len(rows(reader(spark, broker, "growing").load())) == len(before) + 1


class Growing(Brokers):
    """Brokers whose partitions each get a message after their first look."""

    def spans(self, layout: Layout) -> dict[TopicPartition, Span]:
        return {key: Span(span.least, span.most - 1) for key, span in super().spans(layout).items()}


@pytest.mark.parametrize("time", ["endingTimestamp", "startingTimestamp"])
def test_messages_that_come_before_times_are_found_are_not_lost(broker: BrokerProcess, time: str) -> None:
    """P47: times later than the newest message, as the topic grows."""
    given = {"metaq.bootstrap.servers": broker.registry, "subscribe": "one", time: "9999999999999"}
    options = read_options({**given, "startingOffsetsByTimestampStrategy": "latest"}).for_batch()
    origin = Growing(options.servers, options.login)
    try:
        planned = ranges_of(plan_batch(origin, options, dict.fromkeys(PUSHED, ANY)))
        assert planned == ([(0, 0, len(log_of(broker, "one")))] if time == "endingTimestamp" else [])
    finally:
        origin.close()


def test_what_a_new_master_hides_is_waited_for(broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """P48: up to the offsets that the options name; what does not come is lost."""
    given = {"metaq.bootstrap.servers": broker.registry, "subscribe": "one"}

    def planned(looks: int, **offsets: str) -> list[tuple[int, int, int]]:
        options = read_options({**given, **offsets}).for_batch()
        origin = NewMaster(options, looks)
        try:
            return ranges_of(plan_batch(origin, options, dict.fromkeys(PUSHED, ANY)))
        finally:
            origin.close()

    assert planned(1, endingOffsets='{"one": {"0": 5}}') == [(0, 0, 5)]
    assert planned(1, startingOffsets='{"one": {"0": 4}}', endingOffsets='{"one": {"0": -1}}') == [
        (0, 4, len(log_of(broker, "one")))
    ]
    monkeypatch.setattr(brokers_module, "PATIENCE_S", 0.0)
    with pytest.raises(DataLost, match=r"one-0 offsets 3 to 4 \(2\): the partition ends at 3"):
        planned(9, endingOffsets='{"one": {"0": 5}}')
    with pytest.raises(DataLost, match=r"one-0 offsets 3 to 3 \(1\): the partition ends at 3, before reading begins"):
        planned(9, startingOffsets='{"one": {"0": 4}}')
    assert planned(9, startingOffsets='{"one": {"0": 4}}', failOnDataLoss="false") == []


# -- tasks ----------------------------------------------------------------------------------------------------------------


def test_min_partitions_asks_for_more_tasks(spark: "SparkSession", broker: BrokerProcess) -> None:
    """P47: a partition is cut when there are fewer than tasks; without the option few messages are one task."""
    assert reader(spark, broker, "many").load().rdd.getNumPartitions() == 1
    frame = reader(spark, broker, "one", minPartitions=5).load()
    assert frame.rdd.getNumPartitions() == 5
    assert rows(frame) == plain(log_of(broker, "one"))


# -- filters --------------------------------------------------------------------------------------------------------------


def ranges_of(tasks: "Iterable[InputPartition]") -> list[tuple[int, int, int]]:
    """Return partition, begin and end of what tasks read."""
    parts = [part for task in tasks if isinstance(task, Task) for part in task.parts]
    return [(part.range.partition.partition, part.range.begin, part.range.end) for part in parts]


def planned(broker: BrokerProcess, topic: str, *filters: Filter) -> tuple[list[tuple[int, int, int]], list[Filter]]:
    """The ranges that are read under filters, and the filters that Spark is to look at again."""
    options = read_options({"metaq.bootstrap.servers": broker.registry, "subscribe": topic, "filterPushdown": "true"})
    reader = FilteringReader(options.for_batch())
    left = list(reader.pushFilters(list(filters)))
    return ranges_of(reader.partitions()), left


def test_filters_are_pushed_down(broker: BrokerProcess) -> None:
    """P47: what cannot match is not read: partitions, offsets, times; what is not understood is left to Spark."""
    log = log_of(broker, "eight")
    size = {partition: sum(row.partition == partition for row in log) for partition in range(8)}
    whole = [(partition, 0, size[partition]) for partition in range(8)]
    assert planned(broker, "eight") == (whole, [])
    number, offset, topic = ("partition",), ("offset",), ("topic",)
    assert planned(broker, "eight", IsNotNull(number), EqualTo(number, 3), GreaterThanOrEqual(offset, 5)) == (
        [(3, 5, size[3])],
        [],
    )
    assert planned(broker, "eight", In(number, (1, 2, 9)), GreaterThan(offset, 5), LessThan(offset, 8)) == (
        [(1, 6, 8), (2, 6, 8)],
        [],
    )
    assert planned(broker, "eight", EqualTo(topic, "other")) == ([], [])
    some = In(offset, (5, 8))
    assert planned(broker, "eight", EqualTo(number, 3), some) == ([(3, 5, 9)], [some]), "6 and 7 are read and do not match"
    odd = [StringStartsWith(topic, "e"), EqualTo(("value",), b""), EqualTo(offset, "5")]
    assert planned(broker, "eight", *odd) == (whole, odd)
    later = GreaterThan(("timestamp",), datetime.fromtimestamp(log[-1].stored_ms / 1000 + 60, UTC))
    assert planned(broker, "eight", later) == ([], [later])
    earlier = LessThan(("timestamp",), datetime.fromtimestamp(log[0].stored_ms / 1000 - 3600, UTC))
    assert planned(broker, "eight", earlier) == ([], [earlier])


def test_a_filtered_query_is_the_same_with_and_without_pushdown(spark: "SparkSession", broker: BrokerProcess) -> None:
    """P47."""
    log = plain(log_of(broker, "eight"))
    middle = datetime.fromtimestamp(log[len(log) // 2].stored_ms / 1000, UTC)
    condition = f"partition in (1, 3) and offset between 10 and 20 and timestamp >= timestamp'{middle.isoformat()}'"
    wanted = [
        row for row in log if row.partition in {1, 3} and 10 <= row.offset <= 20 and row.stored_ms >= middle.timestamp() * 1000
    ]
    for pushdown in (True, False):
        frame = reader(spark, broker, "eight", filterPushdown=pushdown).load().where(condition)
        assert sorted(rows(frame), key=lambda row: row[:3]) == wanted, pushdown


# -- errors on the driver -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"subscribe": "nowhere"}, "RouteNotFound: no route for topic nowhere: the topic does not exist"),
        ({"subscribePattern": "no.*", "subscribe": ""}, "ConfigError: subscribePattern: no topic matches 'no.*'"),
        ({"subscribe": "", "assign": '{"eight": [8]}'}, "ConfigError: assign: topic eight has no partition 8; it has 8"),
        ({"metaq.bootstrap.servers": "127.0.0.1:1"}, "RouteNotFound: no route for topic .*: no registry answers"),
        ({"metaq.bootstrap.servers": "http://x"}, "BadRequest: 'http://x' begins with http://; write metaq://"),
        ({"startingOffsets": '{"eight": {"0": 5'}, "ConfigError: startingOffsets: .* is not JSON"),
        ({"startingOffsets": '{"eight": {"0": 5}}'}, "ConfigError: startingOffsets: eight-1, .* is left out"),
        ({"startingTimestamp": 1 << 50}, "ConfigError: startingTimestamp: eight-0, .* has no message stored then or later"),
        ({"maxOffsetPerTrigger": 5}, "ConfigError: the option maxoffsetpertrigger .* did you mean maxOffsetsPerTrigger"),
        ({"endingOffsets": "earliest"}, "ConfigError: endingOffsets: a batch cannot end at earliest"),
        ({"failOnDataLoss": "perhaps"}, "ConfigError: failOnDataLoss: 'perhaps' is neither true nor false"),
        ({"groupId": "g"}, "ConfigError: groupId: only streaming queries"),
        ({"path": "here"}, "ConfigError: give .* both are there"),
    ],
)
def test_what_is_wrong_is_one_sentence(
    spark: "SparkSession", broker: BrokerProcess, options: dict[str, object], words: str
) -> None:
    """P47: on the driver, before any task runs, and without the call stack of another process."""
    given = {name: value for name, value in {"subscribe": "eight", **options}.items() if value}
    topic = str(given.pop("subscribe", ""))
    with pytest.raises(AnalysisException, match=words) as caught:
        reader(spark, broker, topic, **given).load().collect()
    assert "Traceback" not in str(caught.value)
    assert len(str(caught.value).strip().splitlines()) <= 2, "Spark adds a line with its own code"


def test_a_schema_of_ones_own_is_refused(spark: "SparkSession", broker: BrokerProcess) -> None:
    """P47."""
    with pytest.raises(AnalysisException, match="ConfigError: the columns are key, value, topic"):
        reader(spark, broker, "eight").schema("value string").load().collect()


# -- data loss ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_has_aged_out_fails_or_is_skipped(spark: "SparkSession", tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """P48: offsets that are gone: an error that names them, or all but them and a line that names them."""
    with BrokerProcess(tmp_path / "data", *AGING) as broker, clients(broker) as (client, text):
        client.admin().create_topic("aging", 1)
        text.put_many("aging", [b"%04d" % number * 200 for number in range(300)], partition=0)
        least = age(broker, "aging", 100)
        start = json.dumps({"aging": {"0": 40}})
        loss = f"aging-0 offsets 40 to {least - 1} \\({least - 40}\\): they have aged out; the oldest that is kept is {least}"
        with pytest.raises(AnalysisException, match=f"DataLost: messages are lost: {loss}. Either"):
            reader(spark, broker, "aging", startingOffsets=start).load().collect()
        skipping = reader(spark, broker, "aging", startingOffsets=start, failOnDataLoss=False).load()
        assert [row.offset for row in rows(skipping)] == list(range(least, 300))
        told = {"metaq.bootstrap.servers": broker.registry, "subscribe": "aging", "startingOffsets": start}
        BatchReader(read_options({**told, "failOnDataLoss": "false"}).for_batch()).partitions()
        assert [record.levelname for record in caplog.records if re.search(loss, record.getMessage())] == ["WARNING"]
        assert [row.offset for row in rows(reader(spark, broker, "aging").load())] == list(range(least, 300))


@pytest.mark.slow
def test_what_ages_out_between_plan_and_read(spark: "SparkSession", tmp_path: Path) -> None:
    """P48: a frame whose plan names messages that are gone when it runs: the same rules in the task."""
    with BrokerProcess(tmp_path / "data", *AGING) as broker, clients(broker) as (client, text):
        client.admin().create_topic("aging", 1)
        text.put_many("aging", [b"%04d" % number * 200 for number in range(300)], partition=0)
        failing = reader(spark, broker, "aging").load()
        skipping = reader(spark, broker, "aging", failOnDataLoss=False).load()
        assert failing.rdd.getNumPartitions() == skipping.rdd.getNumPartitions() == 1  # both are planned now
        least = age(broker, "aging", 100)
        with pytest.raises(PySparkException, match=f"DataLost: messages are lost: aging-0 offsets 0 to {least - 1} "):
            failing.collect()
        assert [row.offset for row in rows(skipping)] == list(range(least, 300))


def test_a_damaged_message_fails_or_is_left_out(spark: "SparkSession", tmp_path: Path) -> None:
    """P48, F-BIT: one flipped bit on the disk costs one message, which is named."""
    with BrokerProcess(tmp_path / "data") as broker, clients(broker) as (client, text):
        client.admin().create_topic("t", 1)
        text.put_many("t", [b"body %d" % number * 9 for number in range(100)], partition=0)
        assert broker.terminate() == 0
        log = broker.data / "commitlog" / f"{0:020d}"
        data = bytearray(log.read_bytes())
        at = data.index(b"body 37")
        data[at] ^= 1
        log.write_bytes(data)
        broker.start()
        with pytest.raises(PySparkException, match=r"DataLost: messages are lost: t-0 offsets 37 to 37 \(1\): damaged"):
            reader(spark, broker, "t").load().collect()
        found = rows(reader(spark, broker, "t", failOnDataLoss=False).load())
        assert [row.offset for row in found] == [number for number in range(100) if number != 37]


# -- several brokers ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_partitions_are_numbered_over_all_brokers(spark: "SparkSession", tmp_path: Path) -> None:
    """P47, MQ-019: in the order of broker name and queue, which offsets in JSON use, too."""
    with ExitStack() as stack:
        registry = stack.enter_context(RegistryProcess(tmp_path / "registry"))
        brokers = {
            name: stack.enter_context(BrokerProcess(tmp_path / name, "--registries", registry.address, "--broker-name", name))
            for name in ("b", "a")
        }
        client = stack.enter_context(connect(registry.address))
        wait_until(lambda: len(client.admin().masters()) == 2, DEADLINE_S, "both brokers are registered")
        client.admin().create_topic("t", 2)
        producer = client.producer()
        sent = [producer.send("t", b"%d" % number) for number in range(40)]
        order = [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
        wanted = {
            (order.index(result.queue[1:]), int(result.queue_offset), b"%d" % number) for number, result in enumerate(sent)
        }
        options = {"metaq.bootstrap.servers": registry.address, "subscribe": "t"}
        frame = spark.read.format("metaq").options(**options).load()
        assert {(row.partition, row.offset, row.value) for row in rows(frame)} == wanted
        some = spark.read.format("metaq").options(**{**options, "startingOffsets": '{"t": {"0": 3, "1": 0, "2": 1, "3": 5}}'})
        begin = {0: 3, 1: 0, 2: 1, 3: 5}
        found = {(row.partition, row.offset, row.value) for row in rows(some.load())}
        assert found == {place for place in wanted if place[1] >= begin[place[0]]}
        assert [key for key, _ in groupby(sorted(place[0] for place in found))] == [0, 1, 2, 3]
        assert brokers["a"].running


# -- the way in -----------------------------------------------------------------------------------------------------------


def test_nothing_brings_gevent() -> None:
    """P47: Spark's processes are not patched, nor are they in danger of it."""
    code = (
        "import sys, pyspark_metaq, metaq.spark.reading.stream, metaq.spark.reading.groups\n"
        "assert pyspark_metaq.DefaultSource.name() == 'metaq'\n"
        "print(sorted({'gevent', 'pandas'} & set(sys.modules)))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    assert run.stdout == "[]\n"
    assert MetaqDataSource.__module__ == "metaq.spark.source", "workers find it by its name"


def test_a_body_that_cannot_be_inflated_fails_no_read(spark: "SparkSession", tmp_path: Path) -> None:
    """P47, SG-098: its row says why, or has the bytes that are stored; a larger body is one that may not be inflated."""
    with BrokerProcess(tmp_path / "data") as broker, connect(broker.registry) as client:
        client.admin().create_topic("poisoned", 1)
        for body, sys_flag in ((b"no zlib", ZLIB), (zlib.compress(bytes(100)), ZLIB)):
            send_packed(client, "poisoned", body, sys_flag)
        client.producer().send("poisoned", b"good")
        raw = [b"no zlib", bytes(100), b"good"]
        assert [row.value for row in rows(reader(spark, broker, "poisoned").load())] == raw
        told = reader(spark, broker, "poisoned", includeErrors=True, maxInflatedBytes=99).load()
        assert told.columns[-1] == "error"
        found = {row["offset"]: row["error"] for row in told.collect()}
        assert [offset for offset, error in sorted(found.items()) if error is None] == [2]
        assert "more than 99" in found[1]

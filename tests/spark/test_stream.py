"""Streaming reads by a real Spark from real brokers."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from pyspark.errors import AnalysisException, StreamingQueryException

from metaq.client import connect
from metaq.message import MessageQueue
from metaq.spark.reading.groups import GroupOffsets
from metaq.spark.reading.limitedstream import LOST
from metaq.spark.reading.ranges import QUEUES
from tests.spark.topics import (
    AGING,
    DEADLINE_S,
    STARTS,
    TOO_BUSY,
    Row,
    age,
    clients,
    fill,
    log_of,
    plain,
    rows,
    run_now,
    stream,
)
from tests.support.broker import BrokerProcess, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

PARTITIONS = {"one": 1, "eight": 8, "many": 64}
EACH = {"one": 500, "eight": 50, "many": 10}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[BrokerProcess]":
    with BrokerProcess(tmp_path_factory.mktemp("broker") / "data") as broker:
        for topic, partitions in PARTITIONS.items():
            fill(broker, topic, partitions, EACH[topic])
        yield broker


class Seen(NamedTuple):
    """The results of a query: its rows and its progress."""

    batches: dict[int, list[Row]]
    """The rows of each batch, by its number."""
    progress: list[Any]

    @property
    def rows(self) -> list[Row]:
        return [row for number in sorted(self.batches) for row in self.batches[number]]


def started(frame: "DataFrame", checkpoint: str, batches: dict[int, list[Row]], *, now: bool = False) -> "StreamingQuery":
    """A query that keeps its rows in ``batches``; with ``now`` it ends when it has read what is there."""

    def keep(batch: "DataFrame", number: int) -> None:
        batches[number] = rows(batch)

    writer = frame.writeStream.foreachBatch(keep).option("checkpointLocation", checkpoint)
    return (writer.trigger(availableNow=True) if now else writer).start()


def running(frame: "DataFrame", checkpoint: str, batches: dict[int, list[Row]], *, now: bool = False) -> "StreamingQuery":
    """A query that has begun to read, or has ended; started again when Spark was too impatient with its own process."""
    for _ in range(STARTS):
        query = started(frame, checkpoint, batches, now=now)
        wait_until(partial(_has_begun, query, batches), DEADLINE_S, "the query begins to read")
        if TOO_BUSY not in str(query.exception()):
            return query
    raise AssertionError(f"Spark gave up {STARTS} times: {query.exception()}")


def _has_begun(query: "StreamingQuery", batches: dict[int, list[Row]]) -> bool:
    return bool(batches) or not query.isActive


def read_now(frame: "DataFrame", checkpoint: str) -> Seen:
    """Run a query until it has read what is there."""
    batches: dict[int, list[Row]] = {}
    query = running(frame, checkpoint, batches, now=True)
    try:
        assert query.awaitTermination(int(DEADLINE_S)), "the query ends by itself"
    finally:
        query.stop()
    return Seen(batches, list(query.recentProgress))


def by_place(found: list[Row]) -> list[Row]:
    return sorted(found, key=lambda row: row[:3])


# -- what is read ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("topic", PARTITIONS)
def test_a_stream_is_the_log_in_batches_of_a_limited_size(
    spark: "SparkSession", broker: BrokerProcess, topic: str, checkpoint: str
) -> None:
    """P47: every message once, in order within each partition, in batches of maxOffsetsPerTrigger; also with AvailableNow."""
    wanted = log_of(broker, topic)
    most = len(wanted) // 3 + 1
    frame = stream(spark, broker, topic, startingOffsets="earliest", maxOffsetsPerTrigger=most, includeHeaders=True).load()
    seen = read_now(frame, checkpoint)
    assert [len(seen.batches[number]) for number in sorted(seen.batches)] == [most, most, len(wanted) - 2 * most]
    assert by_place(seen.rows) == wanted
    for partition in range(PARTITIONS[topic]):
        offsets = [row.offset for row in seen.rows if row.partition == partition]
        assert offsets == list(range(len(offsets)))


@pytest.mark.slow
def test_a_query_goes_on_where_its_checkpoint_says(spark: "SparkSession", tmp_path: Path, checkpoint: str) -> None:
    """P47: starting options count only for a new query; the last message is read, and nothing is read again."""
    with BrokerProcess(tmp_path / "data") as broker:
        fill(broker, "t", 4, 10)
        frame = stream(spark, broker, "t", startingOffsets="earliest").load()
        first = read_now(frame, checkpoint)
        assert by_place(first.rows) == plain(log_of(broker, "t"))
        assert read_now(frame, checkpoint).rows == []
        with clients(broker) as (_, text):
            later = text.put_many("t", [b"later"] * 7, partition=2)
        second = read_now(frame, checkpoint)
        assert [row.value for row in second.rows] == [b"later"] * len(later)
        assert by_place(first.rows + second.rows) == plain(log_of(broker, "t"))
        assert min(second.batches) > max(first.batches)


@pytest.mark.slow
def test_latest_is_kept_before_anything_is_read(spark: "SparkSession", tmp_path: Path, checkpoint: str) -> None:
    """P47: Spark does not keep where a new query began; what comes after it was started the first time is read."""
    with BrokerProcess(tmp_path / "data") as broker:
        fill(broker, "t", 2, 10)
        frame = stream(spark, broker, "t").load()
        assert read_now(frame, checkpoint).rows == []
        with clients(broker) as (_, text):
            text.put_many("t", [b"%d" % number for number in range(9)], partition=0)
        assert sorted(row.value for row in read_now(frame, checkpoint).rows) == [b"%d" % number for number in range(9)]


@pytest.mark.slow
def test_a_running_query_sees_new_messages_partitions_and_a_restarted_broker(
    spark: "SparkSession", tmp_path: Path, checkpoint: str
) -> None:
    """P47: new partitions are read from their beginning; a broker that is killed and comes back is waited for."""
    with BrokerProcess(tmp_path / "data") as broker:
        fill(broker, "t", 2, 10)
        seen = Seen({}, [])
        query = running(stream(spark, broker, "t", startingOffsets="earliest").load(), checkpoint, seen.batches)
        try:

            def wait_for_all() -> None:
                count = len(log_of(broker, "t"))
                wait_until(lambda: len(seen.rows) >= count or not query.isActive, DEADLINE_S, f"{count} messages are read")
                assert query.isActive, query.exception()

            wait_for_all()
            with clients(broker) as (client, text):
                client.admin().create_topic("t", 5)
                text.put_many("t", [b"new"] * 5, partition=4)
            wait_for_all()
            broker.restart(same_port=True)
            with clients(broker) as (_, text):
                text.put_many("t", [b"after"] * 5, partition=0)
            wait_for_all()
            assert by_place(seen.rows) == plain(log_of(broker, "t"))
        finally:
            query.stop()


@pytest.mark.slow
def test_a_query_waits_for_the_least_of_a_batch(spark: "SparkSession", tmp_path: Path, checkpoint: str) -> None:
    """P47: it sees fewer messages and leaves them for later; one more, and all of them are a batch."""
    idle = "spark.sql.streaming.noDataProgressEventInterval"
    spark.conf.set(idle, "0")  # else Spark tells every ten seconds that nothing happens
    try:
        with BrokerProcess(tmp_path / "data") as broker, clients(broker) as (client, text):
            client.admin().create_topic("t", 1)
            text.put_many("t", [b"x"] * 5, partition=0)
            seen = Seen({}, [])
            limits = {"startingOffsets": "earliest", "minOffsetsPerTrigger": 10, "maxTriggerDelay": "1h"}
            query = running(stream(spark, broker, "t", **limits).load(), checkpoint, seen.batches)
            try:
                wait_until(lambda: len(seen.rows) == 5, DEADLINE_S, "the first batch has not waited")
                text.put_many("t", [b"x"] * 9, partition=0)

                def latest() -> int:
                    progress = query.lastProgress
                    return 0 if progress is None else int(json.loads(progress["sources"][0]["latestOffset"])["t"]["0"])

                wait_until(lambda: latest() == 14, DEADLINE_S, "9 messages more are seen")
                assert len(seen.rows) == 5
                text.put_many("t", [b"x"], partition=0)
                wait_until(lambda: len(seen.rows) == 15, DEADLINE_S, "10 messages are a batch")
                assert [len(seen.batches[number]) for number in sorted(seen.batches)] == [5, 10]
            finally:
                query.stop()
    finally:
        spark.conf.unset(idle)


# -- data loss ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_ages_out_under_a_stopped_query(spark: "SparkSession", tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """P48: with failOnDataLoss the query fails and names the range, again and again; without, exactly that is skipped."""
    with BrokerProcess(tmp_path / "data", *AGING) as broker, clients(broker) as (client, text):
        client.admin().create_topic("aging", 1)
        bodies = [b"%04d" % number * 200 for number in range(300)]
        text.put_many("aging", bodies[:30], partition=0)
        checkpoint = str(tmp_path / "checkpoint")
        first = read_now(stream(spark, broker, "aging", startingOffsets="earliest").load(), checkpoint)
        assert [row.offset for row in first.rows] == list(range(30))
        text.put_many("aging", bodies[30:], partition=0)
        least = age(broker, "aging", 100)
        other = shutil.copytree(checkpoint, tmp_path / "other")
        told = f"aging-0 offsets 30 to {least - 1} \\({least - 30}\\): they have aged out"
        for _ in range(2):
            with pytest.raises(StreamingQueryException, match=f"DataLost: messages are lost: {told}") as caught:
                read_now(stream(spark, broker, "aging").load(), checkpoint)
            assert "Traceback" not in str(caught.value)
        skipping = stream(spark, broker, "aging", failOnDataLoss=False).load()
        assert [row.offset for row in read_now(skipping, checkpoint).rows] == list(range(least, 300))
        assert read_now(stream(spark, broker, "aging").load(), checkpoint).rows == []
        seen = read_now(skipping, str(other))
        assert [row.offset for row in seen.rows] == list(range(least, 300))
        latest = json.loads(seen.progress[-1]["sources"][0]["latestOffset"])
        assert latest[LOST] == {"aging": {"0": least - 30}}


# -- offsets --------------------------------------------------------------------------------------------------------------


def committed(broker: BrokerProcess, topic: str, group: str) -> dict[MessageQueue, int | None]:
    with connect(broker.registry, timeout_s=60) as client, client.pull_consumer(topic, group) as consumer:
        return {queue: consumer.committed(queue) for queue in consumer.partitions()}


def test_progress_and_checkpoint_tell_offsets_as_kafka_does(
    spark: "SparkSession", broker: BrokerProcess, checkpoint: str
) -> None:
    """P47: next offsets by topic and partition, with the queues behind the numbers, in plain JSON."""
    seen = read_now(stream(spark, broker, "eight", startingOffsets="earliest").load(), checkpoint)
    counts = {str(partition): sum(row.partition == partition for row in seen.rows) for partition in range(8)}
    wanted = {"eight": counts, QUEUES: {"eight": [["metaq", 0, 8]]}}
    assert json.loads(seen.progress[-1]["sources"][0]["endOffset"]) == wanted
    assert json.loads((Path(checkpoint) / "offsets" / "0").read_text().splitlines()[-1]) == wanted


@pytest.mark.slow
def test_offsets_of_a_group_are_committed_as_next_offsets(spark: "SparkSession", broker: BrokerProcess, tmp_path: Path) -> None:
    """P47: by a listener after each batch, the last one too; by the option one batch later."""
    ends = {}
    with connect(broker.registry, timeout_s=60) as client:
        ends = {view.queue: view.end for view in client.admin().queues("eight")}
    listener = GroupOffsets(broker.registry, "watched", query="named")
    spark.streams.addListener(listener)
    try:
        frame = stream(spark, broker, "eight", startingOffsets="earliest").load()
        writer = frame.writeStream.format("noop").queryName("named").trigger(availableNow=True)
        run_now(writer.option("checkpointLocation", str(tmp_path / "a")).start)
        wait_until(lambda: committed(broker, "eight", "watched") == ends, DEADLINE_S, "all offsets are committed")
    finally:
        spark.streams.removeListener(listener)
    options = {"startingOffsets": "earliest", "groupId": "late", "maxOffsetsPerTrigger": 40}
    read_now(stream(spark, broker, "eight", **options).load(), str(tmp_path / "b"))
    late = {queue: offset or 0 for queue, offset in committed(broker, "eight", "late").items()}
    assert 0 < sum(late.values()) <= sum(ends.values())
    assert sum(late.values()) % 40 == 0
    assert all(late[queue] <= ends[queue] for queue in ends)


# -- errors on the driver -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"subscribe": "nowhere"}, "RouteNotFound: no route for topic nowhere: the topic does not exist"),
        ({"metaq.bootstrap.servers": "127.0.0.1:1"}, "RouteNotFound: .*: no registry answers"),
        ({"endingOffsets": "latest"}, "ConfigError: endingOffsets: a streaming query has no end"),
        ({"startingOffsets": "[5]"}, "ConfigError: startingOffsets: .* is neither earliest nor latest nor JSON"),
        ({"startingOffsets": '{"eight": {"0": 5}}'}, "ConfigError: startingOffsets: eight-1, .* is left out"),
    ],
)
def test_what_is_wrong_is_one_sentence(
    spark: "SparkSession", broker: BrokerProcess, options: dict[str, object], words: str, checkpoint: str
) -> None:
    """P47: when the query is made or begins, without the call stack of another process."""
    given = {"subscribe": "eight", **options}
    topic = str(given.pop("subscribe"))
    with pytest.raises((AnalysisException, StreamingQueryException), match=words) as caught:
        read_now(stream(spark, broker, topic, **given).load(), checkpoint)
    assert "Traceback" not in str(caught.value)

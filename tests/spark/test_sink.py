"""Writes of Spark, read by the client: what arrives, where, how often, and the errors of wrong writes."""

import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pytest

import metaq
from metaq.errors import ConfigError, Refused
from metaq.protocol.properties import WRITE
from metaq.protocol.record import java_hash
from metaq.protocol.remoting.codes import Response
from metaq.spark.writing.repeats import without_repeats
from metaq.spark.writing.sink import Target, _patiently, send
from tests.docs.examples import ROOT
from tests.spark.dying import BATCH, MESSAGES, TOO_LATE, TRIES
from tests.spark.topics import run_now
from tests.support.broker import BrokerProcess

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.partner("java")

DEADLINE_S: Final = 800.0
ROWS: Final = 3000


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path_factory.mktemp("sink") / "data") as process:
        yield process


@pytest.fixture(scope="module")
def client(broker: BrokerProcess) -> Iterator[metaq.Client]:
    with metaq.connect(broker.registry, timeout_s=60.0) as client:
        yield client


def stored(client: metaq.Client, topic: str) -> list[metaq.ReceivedMessage]:
    """Everything in a topic, partition by partition."""
    admin = client.admin()
    return [message for queue in admin.queues(topic) for message in admin.read(queue.queue, queue.begin, queue.end)]


def write(frame: "DataFrame", broker: BrokerProcess, **options: str) -> None:
    frame.write.format("metaq").option("metaq.bootstrap.servers", broker.registry).options(**options).mode("append").save()


def test_rows_become_messages(spark: "SparkSession", broker: BrokerProcess, client: metaq.Client) -> None:
    """P47: each column where it belongs, of each topic that the rows name; and read again they are the same rows."""
    for topic, partitions in (("apples", 1), ("pears", 3)):
        client.admin().create_topic(topic, partitions)
    schema = "value string, key string, tag string, headers array<struct<key:string,value:binary>>, topic string, partition int"
    rows = [
        ("full", "k1", "red", [("size", b"9"), ("grown", b"here")], "pears", 2),
        ("", None, None, None, "apples", None),
        ("x" * 300_000, "", "", [], "pears", 1),
        ("plain", None, None, [("empty", b"")], "pears", 0),
    ]
    write(spark.createDataFrame(rows, schema).coalesce(1), broker)
    found = {message.body.decode(): message for topic in ("apples", "pears") for message in stored(client, topic)}
    assert found.keys() == {row[0] for row in rows}
    for body, key, tag, headers, topic, partition in rows:
        message = found[body]
        assert (message.topic, message.keys, message.tag) == (topic, (key,) if key else (), tag or None)
        assert partition is None or message.partition == partition
        users = {name: value for name, value in message.properties.items() if name not in {"KEYS", "TAGS", WRITE}}
        assert users == {name: value.decode() for name, value in headers or [] if value}
    assert len({message.properties[WRITE].split("/")[0] for message in found.values()}) == 1
    read = spark.read.format("metaq").option("metaq.bootstrap.servers", broker.registry).option("subscribe", "pears")
    again = read.option("includeHeaders", "true").load().where("partition = 2").collect()
    assert [(row.key, row.value, row.tag) for row in again] == [(b"k1", b"full", "red")]
    assert {pair.key: bytes(pair.value) for pair in again[0].headers}.items() >= {"size": b"9", "grown": b"here"}.items()


def test_rows_with_a_key_keep_their_order(spark: "SparkSession", broker: BrokerProcess, client: metaq.Client) -> None:
    """P47: in the partition where messages with it as ordering key go; rows without a key go anywhere, each once."""
    client.admin().create_topic("keyed", 5)
    keys = "case when id % 7 = 0 then null else concat('key', id % 7) end key"
    write(spark.range(ROWS).coalesce(1).selectExpr("cast(id as string) value", keys), broker, topic="keyed")
    messages = stored(client, "keyed")
    assert Counter(int(message.body) for message in messages) == Counter(range(ROWS))
    for number in range(1, 7):
        mine = [message for message in messages if message.keys == (f"key{number}",)]
        assert {message.partition for message in mine} == {abs(java_hash(f"key{number}")) % 5}
        assert [int(message.body) for message in mine] == list(range(number, ROWS, 7))


def test_a_topic_is_created_by_writing_to_it(spark: "SparkSession", broker: BrokerProcess, client: metaq.Client) -> None:
    """MQ-006: as by any other send, where the broker allows it."""
    write(spark.range(10).selectExpr("cast(id as string) value"), broker, topic="created")
    assert len(stored(client, "created")) == 10


WRONG: Final[list[tuple[str, dict[str, str], str]]] = [
    ("'a' value", {}, "give the option topic, or a column topic"),
    ("'a' value", {"topik": "t"}, "the option topik is unknown; did you mean topic"),
    ("'a' value", {"topic": "a b"}, "topic 'a b': write 1 to 127 letters"),
    ("'a' value", {"topic": "t", "metaq.bootstrap.servers": "127.0.0.1:1"}, "no registry answers. Tried 127.0.0.1:1"),
    ("'a' body", {"topic": "t"}, "the column value is required, of type string or binary; there are body"),
    ("1 value", {"topic": "t"}, "the column value is int; write it as string or binary"),
    ("'a' value, 'x' colour", {"topic": "t"}, "the column colour is unknown; there are value, key"),
    ("'a' value, map('a', 'b') headers", {"topic": "t"}, "the column headers is map<string,string>; write it as array<struct<"),
]


@pytest.mark.parametrize(("columns", "options", "error"), WRONG, ids=lambda value: value if isinstance(value, str) else "")
def test_a_wrong_write_fails_on_the_driver(
    spark: "SparkSession", broker: BrokerProcess, columns: str, options: dict[str, str], error: str
) -> None:
    """P14: with one sentence and no call stack, before a task runs."""
    from pyspark.errors import AnalysisException

    with pytest.raises(AnalysisException) as caught:
        write(spark.sql(f"select {columns}"), broker, **options)
    assert error in str(caught.value)
    assert "Traceback" not in str(caught.value)


def test_a_topic_is_never_overwritten(spark: "SparkSession", broker: BrokerProcess) -> None:
    """P14: what Spark calls overwrite would have to delete messages."""
    from pyspark.errors import AnalysisException

    target = spark.sql("select 'a' value").write.format("metaq").option("metaq.bootstrap.servers", broker.registry)
    with pytest.raises(AnalysisException, match="a topic can only be appended to"):
        target.option("topic", "t").mode("overwrite").save()


BAD_ROWS: Final[list[tuple[str, dict[str, str], str]]] = [
    ("cast(null as string) value", {"topic": "t"}, "a row's value is null"),
    ("'a' value, 'New York' key", {"topic": "t"}, "key is 'New York': it contains a blank"),
    ("'a' value, cast(null as string) topic", {}, "a row's topic is null, and there is no option topic"),
    ("'a' value, 9 partition", {"topic": "t"}, "topic t has partitions 0 to 3, but rows are for 9"),
    ("repeat('a', 5000000) value", {"topic": "t"}, "a batch of 1 messages of 50.* bytes is over the limit of 4194304"),
]


@pytest.mark.parametrize(("columns", "options", "error"), BAD_ROWS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_row_that_cannot_be_written_is_told(
    spark: "SparkSession", broker: BrokerProcess, columns: str, options: dict[str, str], error: str
) -> None:
    """P14: with what it is, and what to do."""
    from pyspark.errors import PySparkException

    with pytest.raises(PySparkException, match=error):
        write(spark.sql(f"select {columns}"), broker, **options)


def test_a_write_waits_for_a_broker_that_restarts(tmp_path: Path) -> None:
    """P25: a task goes on when the broker is there again; what was on its way may be there twice, with the same mark."""

    def rows(first: int) -> pa.RecordBatch:
        return pa.record_batch({"value": pa.array([str(number) for number in range(first, first + ROWS)])})

    with BrokerProcess(tmp_path / "data") as broker, metaq.connect(broker.registry, timeout_s=60.0) as client:
        client.admin().create_topic("waiting", 2)

        def batches() -> Iterator[pa.RecordBatch]:
            yield rows(0)
            broker.kill()
            restarting = threading.Thread(target=partial(broker.restart, same_port=True))
            restarting.start()
            yield rows(ROWS)
            restarting.join()

        written = send(batches(), Target(broker.registry, "waiting"), "query/0/0")
        messages = stored(client, "waiting")
    assert written.rows == 2 * ROWS
    marked = {message.properties[WRITE]: int(message.body) for message in messages}
    assert Counter(marked.values()) == Counter(range(2 * ROWS))
    assert {int(mark.split("/")[3]): number for mark, number in marked.items()} == {row: row for row in range(2 * ROWS)}


def test_a_write_waits_for_the_next_master() -> None:
    """P25: a broker that is no master now says so, and there will be another one."""
    answers: list[int | Refused] = [Refused(Response.SERVICE_NOT_AVAILABLE, "not the master now, try again"), 7]

    def send_once() -> int:
        answer = answers.pop(0)
        if isinstance(answer, Refused):
            raise answer
        return answer

    assert _patiently(send_once) == 7
    answers = [Refused(Response.NO_PERMISSION, "not allowed")]
    with pytest.raises(Refused, match="not allowed"):
        _patiently(send_once)


def test_messages_without_a_mark_are_no_repeats(spark: "SparkSession") -> None:
    """P47: whatever other headers they have, or none."""
    headers = [None, [], [("size", b"9")], [("size", b"9"), (WRITE, b"q/0/0/1")], [(WRITE, b"q/0/0/1")], [(WRITE, b"q/0/0/2")]]
    rows = [("t", 0, offset, found) for offset, found in enumerate(headers)]
    schema = "topic string, partition int, offset long, headers array<struct<key:string,value:binary>>"
    once = without_repeats(spark.createDataFrame(rows, schema))
    found = {row.offset for row in once.select("offset").collect()}
    assert found in ({0, 1, 2, 3, 5}, {0, 1, 2, 4, 5}), "one of two repeats is left"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_repeats_after_a_crash_are_recognised(
    spark: "SparkSession", broker: BrokerProcess, client: metaq.Client, tmp_path: Path
) -> None:
    """P47: the driver is killed between the write of a micro-batch and its commit; what is written again has the same marks."""
    client.admin().create_topic("source", 3)
    producer = client.producer()
    for first in range(0, ROWS, 100):
        producer.send_batch("source", [b"%d" % number for number in range(first, first + 100)])
    mark = tmp_path / "mark"
    mark.touch()
    assert copy_topic(broker, tmp_path) == -signal.SIGKILL
    assert not mark.exists()
    assert copy_topic(broker, tmp_path) == 0

    messages = stored(client, "copy")
    assert len(messages) == ROWS + MESSAGES
    counts = Counter(message.properties[WRITE] for message in messages)
    repeated = [write for write, count in counts.items() if count > 1]
    assert len(counts) == ROWS
    assert len(repeated) == MESSAGES
    assert {write.split("/")[1] for write in repeated} == {str(BATCH)}
    bodies = {(message.properties[WRITE], message.body) for message in messages}
    assert Counter(int(body) for _, body in bodies) == Counter(range(ROWS))

    producer.send("copy", b"not from Spark")
    producer.send("copy", b"not from Spark")
    wanted = Counter([*(b"%d" % number for number in range(ROWS)), b"not from Spark", b"not from Spark"])
    options = {"metaq.bootstrap.servers": broker.registry, "subscribe": "copy", "includeHeaders": "true"}
    batch = spark.read.format("metaq").options(**options).load()
    assert bodies_of(without_repeats(batch)) == wanted
    stream = spark.readStream.format("metaq").options(**options, startingOffsets="earliest").load()
    once = without_repeats(stream.withWatermark("timestamp", "1 hour")).select("value")
    run_now(once.writeStream.format("memory").queryName("once").trigger(availableNow=True).start)
    assert bodies_of(spark.table("once")) == wanted
    with pytest.raises(ConfigError, match="includeHeaders=true"):
        without_repeats(batch.drop("headers"))


def bodies_of(frame: "DataFrame") -> Counter[bytes]:
    return Counter(bytes(row.value) for row in frame.select("value").collect())


def copy_topic(broker: BrokerProcess, folder: Path) -> int:
    """Run the query that copies, and dies on the way while there is a mark; its exit code."""
    command: list[Any] = [sys.executable, "-m", "tests.spark.dying", broker.registry, folder / "checkpoint", folder / "mark"]
    for _ in range(TRIES):
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, cwd=ROOT, check=False)
        if TOO_LATE not in done.stderr:
            break
    assert done.returncode in {0, -signal.SIGKILL}, done.stderr[-5000:]
    return done.returncode

"""Topics with messages of all kinds, and what a read of them must show: the log as the client reads it."""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from metaq.client import Client, OutgoingMessage, TextClient, connect
from metaq.protocol.remoting.codes import Request
from metaq.spark.reading.columns import NOT_USERS
from tests.support.admin import ask
from tests.support.admin import connect as admin_connect
from tests.support.broker import BrokerProcess, wait_until

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, DataFrameReader, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamReader

DEADLINE_S: Final = 120.0
TOO_BUSY: Final = "Python worker failed to connect back"
"""What Spark says when a new process of its own needs more than the ten seconds that Spark gives it, on a busy machine."""
STARTS: Final = 5
"""How often a query is started then."""
RARELY: Final = ("--retention-interval-ms", "3600000")
AGING: Final = ("--segment-bytes", "65536", "--max-body-bytes", "8192", "--keep-hours", "0.00001", *RARELY)
"""Of a broker: everything ages out as soon as it is asked for (``age``), but for the segment that is written to."""


def run_until(
    start: "Callable[[], StreamingQuery]", done: Callable[[], bool], what: str, deadline_s: float
) -> "StreamingQuery":
    """Run a query until that is so, or it ends; started again when Spark was too impatient with its own process."""
    for _ in range(STARTS):
        query = start()
        try:
            wait_until(lambda: not query.isActive or done(), deadline_s, what, pause_s=0.1)  # noqa: B023
        finally:
            query.stop()
        error = query.exception()
        if error is None:
            return query
        if TOO_BUSY not in str(error):
            raise error
    raise AssertionError(f"Spark gave up {STARTS} times: {error}")


def run_now(start: "Callable[[], StreamingQuery]") -> "StreamingQuery":
    """Run a query until it has read what is there."""
    return run_until(start, lambda: False, "the query ends by itself", DEADLINE_S)


class Row(NamedTuple):
    """A message."""

    topic: str
    partition: int
    offset: int
    value: bytes
    key: bytes | None
    tag: str | None
    """Also when it is empty: the client does not tell that apart."""
    stored_ms: int
    headers: Mapping[str, bytes] | None = None


@contextmanager
def clients(broker: BrokerProcess) -> Iterator[tuple[Client, TextClient]]:
    """One of each protocol."""
    with connect(broker.registry, timeout_s=60) as client, TextClient(broker.host, broker.port, timeout_s=60) as text:
        yield client, text


def fill(broker: BrokerProcess, topic: str, partitions: int, each: int, seed: int = 0) -> None:
    """A topic in which every partition but the last has messages from both protocols; of one partition that is the one."""
    rng = random.Random(seed)
    with clients(broker) as (client, text):
        client.admin().create_topic(topic, partitions)
        producer = client.producer()
        for partition in range(max(1, partitions - 1)):
            bodies = [rng.randbytes(rng.randrange(0, 200)) for _ in range(each)]
            text.put_many(topic, bodies[::2], partition=partition, attribute=rng.choice([None, "", "paid"]))
            text.put_many(topic, bodies[1::2], partition=partition)
        for number in range(each):
            pairs = {f"name{number % 3}": f"value {number}", "more": "é"} if number % 4 else {}
            body = b"%d," % number * rng.choice([1, 2000])
            producer.send(topic, body, keys=f"key{number} other", tag=rng.choice([None, "new"]), properties=pairs)
        producer.send_batch(topic, [OutgoingMessage(b"%d" % number, keys=str(number)) for number in range(each)])


def log_of(broker: BrokerProcess, topic: str) -> list[Row]:
    """All messages of a topic by partition and offset, read message by message by the client."""
    with connect(broker.registry, timeout_s=60) as client:
        admin = client.admin()
        views = {view.queue: view for view in admin.queues(topic)}
        found = []
        for number, queue in enumerate(admin.readable(topic)):
            for message in admin.read(queue, views[queue].begin, views[queue].end):
                keys = message.keys[:1]
                users = {name: text.encode() for name, text in message.properties.items() if name not in NOT_USERS}
                place = (topic, number, int(message.queue_offset), message.body)
                found.append(
                    Row(*place, keys[0].encode() if keys else None, message.tag or None, message.store_ms, users or None)
                )
        return found


def rows(frame: "DataFrame") -> list[Row]:
    """Return the rows of a read, in its order."""
    return [_row(found.asDict()) for found in frame.collect()]


def _row(found: dict[str, Any]) -> Row:
    stored: datetime = found["timestamp"]
    assert found["timestampType"] == 1
    key = None if found["key"] is None else bytes(found["key"])
    pairs = found.get("headers")
    headers = None if pairs is None else {pair["key"]: bytes(pair["value"]) for pair in pairs}
    place = (found["topic"], found["partition"], found["offset"], bytes(found["value"]))
    return Row(*place, key, found["tag"] or None, round(stored.timestamp() * 1000), headers)


def plain(found: Iterable[Row]) -> list[Row]:
    """Without headers."""
    return [row._replace(headers=None) for row in found]


def reader(spark: "SparkSession", broker: BrokerProcess, topic: str, **options: object) -> "DataFrameReader":
    """A batch read; ``options`` replace those given."""
    given = {"metaq.bootstrap.servers": broker.registry, "subscribe": topic, **options}
    return spark.read.format("metaq").options(**{name: str(value) for name, value in given.items()})


def stream(spark: "SparkSession", broker: BrokerProcess, topic: str, **options: object) -> "DataStreamReader":
    """A streaming read."""
    given = {"metaq.bootstrap.servers": broker.registry, "subscribe": topic, **options}
    return spark.readStream.format("metaq").options(**{name: str(value) for name, value in given.items()})


def age(broker: BrokerProcess, topic: str, beyond: int) -> int:
    """Have messages of partition 0 of a broker with ``AGING`` deleted, ``beyond`` at least; the oldest that is left."""
    with connect(broker.registry, timeout_s=60) as client, admin_connect(broker) as admin:

        def oldest() -> int:
            ask(admin, Request.DELETE_EXPIRED_COMMITLOG)
            return client.admin().queues(topic)[0].begin

        wait_until(lambda: oldest() > beyond, DEADLINE_S, f"more than {beyond} messages have aged out")
        found = oldest()
        wait_until(lambda: oldest() == found, DEADLINE_S, "nothing more ages out")
        return found

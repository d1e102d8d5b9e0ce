"""Locks of ordered consumers over restarts and changes of the master: they are in the log (``metaq.engine.locklog``)."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import orjson
import pytest

from metaq.client import TextClient
from metaq.errors import Refused
from metaq.protocol.remoting.codes import Request, Response
from tests.support import nospace
from tests.support.admin import create_topic, send
from tests.support.broker import BrokerProcess, wait_until
from tests.support.cluster import Cluster, wait_caught_up
from tests.support.consumer import Consumer
from tests.support.messages import records
from tests.support.remoting import RemotingClient

DEADLINE_S: Final = 60.0
TOPIC: Final = "orders"
LOCKS: Final = "METAQ_SYS_LOCKS"


class Cramped(BrokerProcess):
    """A broker that a test can take the room from, by a file ``full`` beside its folder."""

    program = (nospace.__name__,)


def fill(text: TextClient, size: int) -> None:
    """Put messages of a size until there is no room for one more."""
    with pytest.raises(Refused, match="no room"):
        for _ in range(1000):
            text.put(TOPIC, bytes(size))


def with_topic(broker: BrokerProcess) -> BrokerProcess:
    """The broker, with partitions that can be locked."""
    with RemotingClient(broker.host, broker.port) as client:
        create_topic(client, TOPIC, write=4, read=4)
        for partition in range(4):  # so that a slave has them in its log, whenever it gets the table
            send(client, TOPIC, b"x", partition=partition)
    return broker


@contextmanager
def members(broker: BrokerProcess) -> Iterator[tuple[Consumer, Consumer]]:
    """Two of one group."""
    with Consumer(broker, "billing", "one@1") as one, Consumer(broker, "billing", "two@1") as two:
        yield one, two


@pytest.mark.parametrize("durability", ["memory", "disk"])
def test_who_has_a_queue_has_it_after_a_restart(tmp_path: Path, durability: str) -> None:
    """SG-005, SG-123, F-KILL: the others do not get it, whoever asks first; what was given back is free."""
    with BrokerProcess(tmp_path / "data", durability=durability) as broker:
        with members(with_topic(broker)) as (one, two):
            assert one.lock(TOPIC, 0, 1, 2) == [0, 1, 2]
            one.unlock(TOPIC, 1)
            two.unlock(TOPIC, 0)
            assert two.lock(TOPIC, 1) == [1]
        for _ in range(2):
            broker.restart()
            with members(broker) as (one, two):
                assert two.lock(TOPIC, 0, 1, 2, 3) == [1, 3]
                assert one.lock(TOPIC, 0, 1, 2, 3) == [0, 2]
        with members(broker) as (one, _):
            one.unlock(TOPIC, 0)
        assert broker.terminate() == 0
        broker.start()
        with members(broker) as (_, two):
            assert two.lock(TOPIC, 0, 2) == [0]


def test_what_is_kept(tmp_path: Path) -> None:
    """SG-123: one message for each change and each renewal, none when nobody gets anything."""
    with BrokerProcess(tmp_path / "data") as broker, members(with_topic(broker)) as (one, two):
        one.lock(TOPIC, 0, 1)
        two.lock(TOPIC, 0, 1)
        one.lock(TOPIC, 0)
        one.unlock(TOPIC, 0, 1)
        with RemotingClient(broker.host, broker.port) as client:
            rows = [orjson.loads(record.body) for record in records(client, LOCKS)]
        said = [(row["client"], row["held"], [queue[2] for queue in row["queues"]]) for row in rows]
        assert said == [("one@1", True, [0, 1]), ("one@1", True, [0]), ("one@1", False, [0, 1])]
        assert {(row["group"], *queue[:2]) for row in rows for queue in row["queues"]} == {("billing", TOPIC, "metaq")}


def test_a_promoted_slave_knows_who_has_a_queue(tmp_path: Path) -> None:
    """SG-123, F-FAIL: as the old master knew it; a slave gives none."""
    with Cluster(tmp_path, "--min-in-sync", "1") as cluster:
        master, slave = cluster.pair()
        with members(with_topic(master)) as (one, two):
            assert one.lock(TOPIC, 0, 1) == [0, 1]
            assert two.lock(TOPIC, 2) == [2]
        wait_caught_up(master, slave)
        with members(slave) as (_, two):
            refused = two.call(Request.LOCK_BATCH_MQ, {}, two.queue_set(TOPIC, 3))
            assert refused.code == Response.SERVICE_NOT_AVAILABLE
        master.kill()
        slave.promote()
        with members(slave) as (one, two):
            assert two.lock(TOPIC, 0, 1, 2) == [2]
            assert one.lock(TOPIC, 0, 1, 2) == [0, 1]


def test_a_lock_that_too_few_replicas_have_is_not_given(tmp_path: Path) -> None:
    """SG-123, F-PART: another one might be master soon, and would not know of it; it is given when it is safe."""
    with Cluster(tmp_path, "--replica-lag-ms", "1500", "--replica-timeout-ms", "300") as cluster:
        master, slave = cluster.pair()
        with members(with_topic(master)) as (one, two):
            slave.pause()
            answer = one.call(Request.LOCK_BATCH_MQ, {}, one.queue_set(TOPIC, 0))
            assert answer.code in (Response.FLUSH_SLAVE_TIMEOUT, Response.SLAVE_NOT_AVAILABLE)
            assert not answer.body
            slave.go_on()
            wait_caught_up(master, slave)
            asked = partial(one.call, Request.LOCK_BATCH_MQ, {}, one.queue_set(TOPIC, 0))
            wait_until(lambda: asked().code == Response.SUCCESS, DEADLINE_S, "it is given when it was asked for again")
            assert two.lock(TOPIC, 0) == []


def test_locks_are_given_while_the_disk_is_full(tmp_path: Path) -> None:
    """SG-123, P24: in memory only: what is there goes on being consumed in order."""
    small = ("--segment-bytes", "65536", "--max-body-bytes", "4096", "--max-branch-bytes", "16384")
    with Cramped(tmp_path / "data", *small) as broker, members(with_topic(broker)) as (one, two):
        (tmp_path / "full").touch()
        with TextClient(broker.host, broker.port) as text:
            for size in (1000, 1):
                fill(text, size)
        assert one.lock(TOPIC, 0) == [0]
        assert two.lock(TOPIC, 0, 1) == [1]
        assert "locks are not kept" in broker.stderr()


def test_only_what_there_is_can_be_locked(tmp_path: Path) -> None:
    """SG-123, E-05: neither a partition that its topic does not have, nor another topic's or broker's; and nothing is kept."""
    with BrokerProcess(tmp_path / "data") as broker, members(with_topic(broker)) as (one, two):
        assert one.lock(TOPIC, -1, 4, 1 << 30) == []
        assert one.lock("nowhere", 0) == []
        foreign = one.queue_set(TOPIC, 0).replace(b'"metaq"', b'"other"')
        assert b'"lockOKMQSet":[]' in one.call(Request.LOCK_BATCH_MQ, {}, foreign).body
        assert two.lock(TOPIC, 3, 3, 4) == [3]
        with RemotingClient(broker.host, broker.port) as client:
            rows = [orjson.loads(record.body) for record in records(client, LOCKS)]
        assert [row["queues"] for row in rows] == [[[TOPIC, "metaq", 3]]]

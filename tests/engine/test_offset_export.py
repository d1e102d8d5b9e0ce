"""The offsets of all groups, as a broker exports them on request, and as it records them by itself."""

import itertools
import json
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import pytest

from metaq.client import Client, ConsumeFrom, Model, TextClient, connect
from metaq.message import HISTORY_TOPIC
from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.offsetrows import Kind, OffsetRow
from tests.support.admin import ask, create_topic, fields_of, pull, records, send
from tests.support.admin import connect as connect_remoting
from tests.support.broker import BrokerProcess, RegistryProcess, wait_until
from tests.support.cluster import PATIENT, Cluster, wait_caught_up
from tests.support.consumer import Consumer, subscription
from tests.support.offsets import page, rows

DEADLINE_S: Final = 60.0
DAY_MS: Final = 24 * 3600 * 1000
OFTEN: Final = ("--offset-export-interval-ms", "100")
FIRST: Final = ConsumeFrom.FIRST


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path_factory.mktemp("export") / "data", "--keep-hours", "48") as process:
        yield process


@pytest.fixture(scope="module")
def client(broker: BrokerProcess) -> Iterator[Client]:
    with connect(broker.registry) as client:
        yield client


_numbers = itertools.count()


@pytest.fixture
def topic() -> str:
    """One that no other test uses."""
    return f"t{next(_numbers)}"


def fill(broker: BrokerProcess, topic: str, messages: int, partitions: int = 1) -> None:
    """So many in each partition."""
    with connect_remoting(broker) as admin:
        create_topic(admin, topic, write=partitions, read=partitions)
        for partition in range(partitions):
            send(admin, topic, *(b"%d" % number for number in range(messages)), partition=partition)


def stored(broker: BrokerProcess, topic: str, partition: int = 0) -> list[int]:
    """When each message of a partition was stored."""
    with connect_remoting(broker) as client:
        return [record.store_ms for record in records(pull(client, topic, 0, partition=partition))]


def at(history: list[OffsetRow], partition: int) -> OffsetRow:
    (row,) = [row for row in history if row.partition == partition]
    return row


# -- groups of the remoting protocol ----------------------------------------------------------------------------------


def test_a_group_with_a_member(broker: BrokerProcess, client: Client, topic: str) -> None:
    """SG-055, SG-067: what it has committed, who pulls, and between which times the messages were stored."""
    fill(broker, topic, 5, partitions=3)
    began_ms = round(datetime.now(UTC).timestamp() * 1000)
    with client.consumer(topic, topic, consume_from=FIRST) as consumer:
        partitions = set()
        for message in consumer:
            partitions.add(message.queue.partition)
            consumer.commit()
            if len(partitions) == 2 and message.queue_offset == 4:
                break
        wait_until(
            lambda: all(row.owner for row in rows(broker, Kind.REMOTING, topic, topic)), DEADLINE_S, "all partitions are pulled"
        )
        found = rows(broker, Kind.REMOTING, topic, topic)
        (member,) = client.admin().members(topic).members  # type: ignore[union-attr]
    committed = client.admin().offsets(topic, topic)
    assert [row.partition for row in found] == [0, 1, 2]
    for row in found:
        times = stored(broker, topic, row.partition)
        assert (row.broker, row.minimum, row.maximum, row.retention_ms) == ("metaq", 0, 5, 2 * DAY_MS)
        assert (row.minimum_ts, row.maximum_ts, row.owner) == (times[0], times[-1], member.client_id)
        assert began_ms <= row.ts == found[0].ts
        known = next(offset for queue, offset in committed.items() if queue.partition == row.partition)
        assert (row.consumed or 0) == known
        waiting = None if row.consumed in (None, 5) else times[row.consumed or 0]
        assert row.consumed_ts == waiting
    assert 5 in [row.consumed for row in found]


def test_the_owner_is_who_pulls_now(broker: BrokerProcess, topic: str) -> None:
    """SG-055: of two members the one that has pulled last; nobody once it has gone, though the other one is there."""
    fill(broker, topic, 3)
    with Consumer(broker, topic, "one") as one, Consumer(broker, topic, "two") as two:
        for member in (one, two):
            member.beat(subscription(topic))
        assert at(rows(broker, Kind.REMOTING, topic, topic), 0).owner is None
        pull(one.wire, topic, 0, group=topic)
        assert at(rows(broker, Kind.REMOTING, topic, topic), 0).owner == "one"
        pull(two.wire, topic, 0, group=topic)
        assert at(rows(broker, Kind.REMOTING, topic, topic), 0).owner == "two"
        with connect_remoting(broker) as stranger:  # no member: it has the partition for nobody
            pull(stranger, topic, 0, group=topic)
        assert at(rows(broker, Kind.REMOTING, topic, topic), 0).owner == "two"
        two.commit(topic, 2)
        two.wire.close()
        wait_until(lambda: one.members() == ["one"], DEADLINE_S, "the other has gone")
        row = at(rows(broker, Kind.REMOTING, topic, topic), 0)
        assert (row.owner, row.consumed, row.consumed_ts) == (None, 2, stored(broker, topic)[2])
    assert at(rows(broker, Kind.REMOTING, topic, topic), 0).consumed == 2  # it is known without members, too


def test_who_is_left_out(broker: BrokerProcess, client: Client, topic: str, tmp_path: Path) -> None:
    """SG-118: groups that broadcast keep their offsets themselves; tools are no groups; a deleted topic is gone."""
    fill(broker, topic, 3)
    all_of_it = f"{topic}-all"
    with client.consumer(topic, all_of_it, model=Model.BROADCASTING, consume_from=FIRST, offsets_folder=tmp_path) as consumer:
        next(iter(consumer))
        with Consumer(broker, "TOOLS_CONSUMER") as tool:
            tool.commit(topic, 1)
        with Consumer(broker, f"{topic}-one") as one:
            one.commit(topic, 1)
        assert {row.group for row in page(broker).rows if row.topic == topic} == {f"{topic}-one"}
    client.admin().delete_topic(topic)
    assert not [row for row in page(broker).rows if row.topic == topic]


def test_a_topic_without_a_group(broker: BrokerProcess, topic: str) -> None:
    """19.1: has rows of its own, with what is in it, until a group reads it; topics of the broker itself have none."""
    fill(broker, topic, 4, partitions=2)
    found = sorted((row for row in page(broker).rows if row.topic == topic), key=lambda row: row.partition)
    assert [(row.kind, row.group, row.partition, row.minimum, row.maximum) for row in found] == [
        (Kind.TOPIC, "", 0, 0, 4),
        (Kind.TOPIC, "", 1, 0, 4),
    ]
    assert [(row.consumed, row.consumed_ts, row.owner, row.lag) for row in found] == [(None, None, None, None)] * 2
    assert found[0].maximum_ts == stored(broker, topic)[-1]
    assert {row.topic for row in page(broker).rows if row.kind == Kind.TOPIC}.isdisjoint({HISTORY_TOPIC, "TBW102"})
    with Consumer(broker, f"{topic}-one") as one:
        one.commit(topic, 1)
    assert {(row.kind, row.group) for row in page(broker).rows if row.topic == topic} == {(Kind.REMOTING, f"{topic}-one")}


# -- other readers of the text protocol -------------------------------------------------------------------------------


def test_a_reader_that_is_observed(broker: BrokerProcess, topic: str) -> None:
    """MQ-031, MQ-063: the last position that it asked for, as an ordinal; a question for the end is none."""
    fill(broker, topic, 5, partitions=2)
    times = stored(broker, topic, 1)
    with TextClient(broker.host, broker.port) as text:
        batch = text.get(topic, 0, partition=1, group="reader")
        (row,) = rows(broker, Kind.OBSERVED, "reader", topic)
        assert (row.partition, row.consumed, row.maximum, row.consumed_ts) == (1, 0, 5, times[0])
        assert row.owner is not None and row.owner.startswith("127.0.0.1:")
        for consumed, message in enumerate(batch.messages, 1):
            text.get(topic, message.next_position, partition=1, group="reader")
            (row,) = rows(broker, Kind.OBSERVED, "reader", topic)
            assert (row.consumed, row.consumed_ts) == (consumed, times[consumed] if consumed < 5 else None)
        text.get(topic, (1 << 63) - 1, partition=1, group="reader")
        text.get(topic, 0, partition=1, group="g" * 256)
        text.get("nowhere", 0, group="reader")
        found = page(broker).rows
        assert [each._replace(ts=0) for each in found if each.topic == topic] == [row._replace(ts=0)]
        assert "nowhere" not in {each.topic for each in found}


# -- pages ------------------------------------------------------------------------------------------------------------


def test_pages(broker: BrokerProcess, topic: str) -> None:
    """SG-055: a page ends behind a whole topic of a group; all have one time; nothing is missing, and nothing comes twice."""
    names = [f"{topic}-{letter}" for letter in "abc"]
    with Consumer(broker, topic) as consumer:
        for name in names:
            fill(broker, name, 1, partitions=3)
            consumer.commit(name, 1, partition=2)
    first = page(broker, limit=1)
    pages = [first]
    while pages[-1].next is not None:
        pages.append(page(broker, limit=1, after=pages[-1].next))
    found = [row for each in pages for row in each.rows]
    assert {row.ts for row in found} == {first.rows[0].ts}
    assert all(len({(row.kind, row.group, row.topic) for row in each.rows}) <= 1 for each in pages)
    assert [(row.topic, row.partition) for row in found if row.group == topic] == [
        (name, n) for name in names for n in range(3)
    ]
    assert [row._replace(ts=0) for row in found] == [row._replace(ts=0) for row in page(broker).rows]


def test_what_is_refused(broker: BrokerProcess) -> None:
    """SG-055: a limit and a place that are none, each with the reason."""
    with connect_remoting(broker) as client:
        for fields, reason in (
            ({"limit": "0"}, "limit is 0"),
            ({"limit": "1001"}, "limit is 1001"),
            ({"after": "[1]"}, "not the `next` of a page"),
            ({"after": "here"}, "not the `next` of a page"),
            ({"after": '["x","y","z",1]'}, "not the `next` of a page"),
        ):
            answer = client.call(Request.EXPORT_OFFSETS, fields)
            assert answer.code == Response.SYSTEM_ERROR and reason in (answer.remark or ""), answer


# -- what has aged out, and what only the disk has --------------------------------------------------------------------


@pytest.mark.slow
def test_an_offset_that_has_aged_out(tmp_path: Path) -> None:
    """SG-045: the group goes on at the oldest message, whose time is told; offsets and times are found after a restart."""
    flags = ("--segment-bytes", "65536", "--max-body-bytes", "8192")
    with BrokerProcess(tmp_path / "data", *flags) as broker:
        with connect_remoting(broker) as admin:
            create_topic(admin, "orders")
            send(admin, "orders", *[b"x" * 8000] * 40)
        with Consumer(broker, "billing") as consumer, TextClient(broker.host, broker.port) as text:
            consumer.commit("orders", 1)
            text.get("orders", 0, group="reader")
        before = at(rows(broker, Kind.REMOTING, "billing", "orders"), 0)
        assert (before.consumed, before.minimum, before.maximum) == (1, 0, 40)
        broker.terminate()
        broker.flags = (*flags, "--keep-hours", "0.00001")
        broker.restart()
        assert page(broker).rows[0]._replace(retention_ms=None, ts=0) == before._replace(retention_ms=None, ts=0)
        with connect_remoting(broker) as admin:

            def aged() -> bool:
                ask(admin, Request.DELETE_EXPIRED_COMMITLOG)
                return at(rows(broker, Kind.REMOTING, "billing", "orders"), 0).minimum > 1

            wait_until(aged, DEADLINE_S, "the first messages are deleted")
        row = at(rows(broker, Kind.REMOTING, "billing", "orders"), 0)
        assert (row.consumed, row.maximum, row.maximum_ts) == (1, 40, before.maximum_ts)
        assert row.consumed_ts == row.minimum_ts is not None
        assert rows(broker, Kind.OBSERVED, "reader", "orders") == []  # it was observed by the process before


# -- the history ------------------------------------------------------------------------------------------------------


def history(client: Client) -> list[OffsetRow]:
    return list(client.admin().offset_export().history(datetime.now(UTC) - timedelta(hours=1)))


def test_a_history_is_recorded(tmp_path: Path) -> None:
    """SG-067: again and again, one time in each record; it goes on after a stop and a kill; nobody else writes there."""
    with ExitStack() as stack:
        broker = stack.enter_context(BrokerProcess(tmp_path / "data", *OFTEN))
        fill(broker, "orders", 5, partitions=2)
        with Consumer(broker, "billing") as consumer:
            consumer.commit("orders", 2)
        client = stack.enter_context(connect(broker.registry))

        def recorded(offset: int) -> bool:
            return any((row.partition, row.consumed) == (0, offset) for row in history(client))

        for offset, stop in ((2, broker.terminate), (3, broker.kill), (4, broker.kill)):
            with Consumer(broker, "billing") as consumer:
                consumer.commit("orders", offset)
            wait_until(lambda offset=offset: recorded(offset), DEADLINE_S, f"{offset} is in the history")  # type: ignore[misc]
            stop()
            broker.restart(same_port=True)
        found = [row for row in history(client) if row.topic == "orders"]
        times = sorted({row.ts for row in found})
        assert len(times) >= 3
        for ts in times:
            assert [row.partition for row in found if row.ts == ts] == [0, 1]
        assert {row.consumed for row in found if row.partition == 0} >= {2, 3, 4}
        with connect_remoting(broker) as sender:
            fields = fields_of(a="pg", b=HISTORY_TOPIC, c="TBW102", d=1, e=0, f=0, g=1, h=0, i="", j=0, k=False)
            assert sender.call(Request.SEND_MESSAGE_V2, fields, b"x").code == Response.NO_PERMISSION


def test_a_body_is_lines_of_json(tmp_path: Path) -> None:
    """SG-055: compressed as clients compress theirs, so any of them reads it; times as ISO 8601."""
    with BrokerProcess(tmp_path / "data", *OFTEN) as broker, connect(broker.registry) as client:
        fill(broker, "orders", 5)
        with Consumer(broker, "billing") as consumer:
            consumer.commit("orders", 2)
        wait_until(lambda: any(row.consumed == 2 for row in history(client)), DEADLINE_S, "the commit is in the history")
        with client.pull_consumer(HISTORY_TOPIC) as reader:
            reader.assign(reader.partitions())
            found = [json.loads(line) for message in reader.poll(timeout_s=DEADLINE_S) for line in message.body.splitlines()]
            while not any(row["consumed"] == 2 for row in found):
                for message in reader.poll(timeout_s=DEADLINE_S):
                    found += map(json.loads, message.body.splitlines())
        for row in found:
            assert list(row) == list(OffsetRow._fields)
            assert datetime.fromisoformat(row["ts"]).utcoffset() == timedelta(0)
        (group,) = {(row["group"], row["topic"], row["partition"]) for row in found if row["consumed"] == 2}
        assert group == ("billing", "orders", 0)


def test_no_history_without_topics_or_when_it_is_off(tmp_path: Path) -> None:
    """SG-067: a broker without topics records nothing; 0 switches it off."""
    with ExitStack() as stack:
        off = stack.enter_context(BrokerProcess(tmp_path / "off", "--offset-export-interval-ms", "0"))
        often = stack.enter_context(BrokerProcess(tmp_path / "often", *OFTEN))
        clients = [stack.enter_context(connect(broker.registry)) for broker in (off, often)]
        before_ms = round(datetime.now(UTC).timestamp() * 1000)
        for broker in (off, often):
            fill(broker, "orders", 1)
            with Consumer(broker, "billing") as consumer:
                consumer.commit("orders", 1)
        wait_until(lambda: len({row.ts for row in history(clients[1])}) >= 3, DEADLINE_S, "three records")
        ends = [client.admin().queues(HISTORY_TOPIC)[0].end for client in clients]
        assert ends[0] == 0 < ends[1]
        assert min(row.ts for row in history(clients[1])) >= before_ms


def test_slaves_answer_and_record_nothing(tmp_path: Path) -> None:
    """SG-083: what they have of their master, its history among it; the master's goes on beside them."""
    with (
        RegistryProcess(tmp_path / "registry") as registry,
        Cluster(tmp_path, *PATIENT, "--registries", registry.address, *OFTEN) as both,
    ):
        master, slave = both.pair()
        fill(master, "orders", 5)
        with Consumer(master, "billing") as consumer:
            consumer.commit("orders", 3)
        wait_until(
            lambda: [row.consumed for row in rows(slave, Kind.REMOTING, "billing", "orders")] == [3], DEADLINE_S, "it knows"
        )
        with connect(registry.address) as client:
            wait_until(lambda: bool(history(client)), DEADLINE_S, "there is a history")
        wait_caught_up(master, slave)

"""Offsets of MetaQ's groups, which their consumers keep in ZooKeeper, as a broker exports them."""

import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import pytest
from kazoo.client import KazooClient

from metaq.client import TextClient, connect
from metaq.protocol.remoting.offsetrows import Kind, OffsetRow
from metaq.registry.paths import Layout
from tests.support.broker import BrokerProcess, wait_until
from tests.support.offsets import page, rows
from tests.support.zookeeper import ZooKeeperProcess

pytestmark = pytest.mark.partner("java")

DEADLINE_S: Final = 60.0
NUMBER: Final = 7
LAYOUT: Final = Layout("/export")
"""Apart from what other tests keep in the same ZooKeeper."""
CONSUMER: Final = "billing_host-1700000000000-1a2b3c4d"
FLAGS: Final = ("--zookeeper-root", LAYOUT.root, "--zookeeper-session-ms", "2000", "--broker-number", str(NUMBER))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ZooKeeperProcess]:
    with ZooKeeperProcess(tmp_path / "zk") as server:
        yield server


def start(server: ZooKeeperProcess, folder: Path, *flags: str) -> BrokerProcess:
    return BrokerProcess(folder / "data", "--zookeeper", server.address, *FLAGS, *flags)


def fill(broker: BrokerProcess, topic: str, partitions: int) -> dict[int, list[int]]:
    """Five messages in each partition; where each of them begins, and the end."""
    with TextClient(broker.host, broker.port) as text:
        text.create(topic, partitions)
        places = {}
        for partition in range(partitions):
            for number in range(5):
                text.put(topic, b"%d" % number * (number + 1), partition=partition)
            places[partition] = [0, *(message.next_position for message in text.get(topic, partition=partition).messages)]
        return places


def consume(zookeeper: KazooClient, group: str, topic: str, places: dict[tuple[int, int], str], owner: str = "") -> None:
    """Store offsets as a consumer does, by broker and partition; with an ``owner``, make it own these partitions."""
    for (broker, partition), offset in places.items():
        zookeeper.create(LAYOUT.offset(group, topic, broker, partition), offset.encode(), makepath=True)
        if owner:
            path = f"{LAYOUT.owners(group, topic)}/{broker}-{partition}"
            zookeeper.create(path, owner.encode(), ephemeral=True, makepath=True)


def test_groups_in_zookeeper(server: ZooKeeperProcess, tmp_path: Path) -> None:
    """MQ-052: positions become ordinals; owners; other brokers' partitions and other nodes are left alone."""
    with start(server, tmp_path) as broker, server.client() as zookeeper:
        places = fill(broker, "orders", 4)
        consume(
            zookeeper, "billing", "orders", {(NUMBER, 0): f"4711-{places[0][2]}", (NUMBER, 1): f"-9-{places[1][5]}"}, CONSUMER
        )
        consume(zookeeper, "billing", "orders", {(NUMBER, 2): f"1-{places[2][3] + 1}", (NUMBER + 1, 3): "1-2"})
        zookeeper.create(f"{LAYOUT.progress('billing', 'orders')}/nonsense", b"1-2")
        consume(zookeeper, "audit", "orders", {(NUMBER, 0): "not an offset"})
        consume(zookeeper, "audit", "elsewhere", {(NUMBER, 0): "1-2"})
        wait_until(lambda: page(broker).problem is None, DEADLINE_S, "the broker is connected to ZooKeeper")
        found = rows(broker, Kind.ZOOKEEPER, "billing", "orders")
        assert [(row.partition, row.consumed, row.minimum, row.maximum, row.owner) for row in found] == [
            (0, 2, 0, 5, CONSUMER),
            (1, 5, 0, 5, CONSUMER),
            (2, 3, 0, 5, None),  # in the middle of a message: it is sent to where that begins
            (3, None, 0, 5, None),
        ]
        assert [row.consumed_ts is not None for row in found] == [True, False, True, False]
        assert {row.consumed for row in rows(broker, Kind.ZOOKEEPER, "audit", "orders")} == {None}
        assert "elsewhere" not in {row.topic for row in page(broker).rows}
    shutil.rmtree(tmp_path / "data")


def test_a_group_is_one_kind(server: ZooKeeperProcess, tmp_path: Path) -> None:
    """MQ-052: what ZooKeeper knows is not observed as well, also while it is away; that is told, and the rest goes on."""
    with start(server, tmp_path, "--offset-export-interval-ms", "200") as broker, server.client() as zookeeper:
        places = fill(broker, "orders", 1)
        consume(zookeeper, "billing", "orders", {(NUMBER, 0): f"1-{places[0][1]}"})
        with TextClient(broker.host, broker.port) as text:
            for group, ordinal in (("billing", 2), ("telnet", 3)):
                text.get("orders", places[0][ordinal], group=group)
        both = [(Kind.OBSERVED, "telnet", 3), (Kind.ZOOKEEPER, "billing", 1)]

        def known() -> list[tuple[str, str, int | None]]:
            return [
                (row.kind, row.group, row.consumed)
                for row in page(broker).rows
                if row.topic == "orders" and row.group != "metaq"
            ]

        wait_until(lambda: known() == both, DEADLINE_S, "both groups are there")
        complete(broker)
        said = broker.stderr().count("offset history incomplete")
        server.kill()
        wait_until(lambda: page(broker).problem is not None, DEADLINE_S, "the broker misses ZooKeeper")
        assert server.address in (page(broker).problem or "")
        assert known() == both[:1]
        wait_until(lambda: broker.stderr().count("offset history incomplete") > said, DEADLINE_S, "it says so")
        before = recorded(broker)
        wait_until(lambda: len(recorded(broker)) >= len(before) + 3, DEADLINE_S, "records go on")
        assert broker.stderr().count("offset history incomplete") == said + 1  # once, not with every record
        server.start()
        wait_until(lambda: known() == both, DEADLINE_S, "both groups are there again")
        wait_until(lambda: recorded(broker)[-1].kind == Kind.ZOOKEEPER, DEADLINE_S, "and recorded")
    shutil.rmtree(tmp_path / "data")


def complete(broker: BrokerProcess) -> None:
    """Wait until ZooKeeper's groups are recorded."""
    wait_until(lambda: Kind.ZOOKEEPER in {row.kind for row in recorded(broker)}, DEADLINE_S, "a whole record")


def recorded(broker: BrokerProcess) -> list[OffsetRow]:
    """The history, the newest row last."""
    with connect(broker.registry) as client:
        return list(client.admin().offset_export().history(datetime.fromtimestamp(0, UTC)))

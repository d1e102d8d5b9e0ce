"""Replicas that find their master through ZooKeeper, and the addresses for slaves that are stored there."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import orjson
import pytest
from kazoo.client import KazooClient

from metaq.protocol.remoting.codes import MASTER
from metaq.registry.paths import RegisteredReplica, decode_broker_node
from tests.support.broker import wait_until
from tests.support.cluster import Cluster
from tests.support.zookeeper import ZooKeeperProcess

pytestmark = pytest.mark.partner("java")

DEADLINE_S: Final = 60.0
SESSION_MS: Final = 2000
SLAVE: Final = ("--role", "slave")
MASTER_NODE: Final = "/metaq/groups/DefaultCluster/metaq/master"
OWN_NODE: Final = RegisteredReplica("DefaultCluster", "metaq", 1).path


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ZooKeeperProcess]:
    with ZooKeeperProcess(tmp_path / "zk") as server:
        yield server


@pytest.fixture
def look(server: ZooKeeperProcess) -> Iterator[KazooClient]:
    with server.client(60) as look:
        yield look


@pytest.fixture
def cluster(server: ZooKeeperProcess, tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, "--zookeeper", server.address, "--zookeeper-session-ms", str(SESSION_MS)) as cluster:
        yield cluster
    for folder in tmp_path.glob("replica?"):
        shutil.rmtree(folder)


def test_a_slave_finds_its_master_through_zookeeper(cluster: Cluster, look: KazooClient) -> None:
    """SG-082, SG-081: no setting names it; the slave follows the master that comes later, and the one that takes its place."""
    slave = cluster.add(2, "", *SLAVE)
    slave.wait_problem("no master is known")
    master = cluster.add(1, "", "--replication-listen", "127.0.0.2:0")  # not the host that clients are told
    third = cluster.add(3, "", *SLAVE)
    master.wait_for(in_sync=[1, 2, 3])
    node = decode_broker_node(look.get(OWN_NODE)[0])
    assert node.replication == master.replication == slave.status()["master"]
    third.wait_for(suspect=None)
    master.kill()
    third.promote()
    slave.wait_for(master=third.replication)
    third.wait_for(in_sync=[2, 3])


def test_slaves_are_told_an_address_that_they_can_connect_to(cluster: Cluster, look: KazooClient) -> None:
    """SG-050, SG-082: an elected master that takes slaves on all of its addresses is known by the host that it advertises."""
    elected = ("--role", "elected", "--replication-listen", "0.0.0.0:0", "--allow-public")
    replica = cluster.add(1, "", *elected)
    replica.wait_for(role="master")
    where = f"127.0.0.1:{replica.replication.rpartition(':')[2]}"
    assert orjson.loads(look.get(MASTER_NODE)[0])["replication"] == where

    def told() -> bool:
        found = look.retry(look.exists, OWN_NODE) and decode_broker_node(look.get(OWN_NODE)[0])
        return bool(found) and (found.number, found.replication) == (MASTER, where)

    wait_until(told, DEADLINE_S, f"{OWN_NODE} says that slaves connect to {where}")

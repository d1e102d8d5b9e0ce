"""What a slave does for clients and operators, and what it leaves to its master."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.broker import RegistryProcess
from tests.support.cluster import Cluster


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with RegistryProcess(tmp_path / "registry") as registry, Cluster(tmp_path, "--registries", registry.address) as cluster:
        yield cluster
    for folder in tmp_path.glob("replica?"):
        shutil.rmtree(folder)


def test_a_slave_asks_its_registries_for_the_master(cluster: Cluster) -> None:
    """SG-082: it follows whoever is master of its name, also one that comes later or takes the place of another."""
    slave = cluster.add(2, "", "--role", "slave")
    slave.wait_problem("nobody knows a master")
    master = cluster.add(1)
    third = cluster.add(3, "", "--role", "slave")
    master.wait_for(in_sync=[1, 2, 3])
    assert slave.status()["master"] == master.replication
    master.kill()
    third.promote()
    slave.wait_for(master=third.replication)
    third.wait_for(in_sync=[2, 3])

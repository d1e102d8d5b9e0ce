"""Backups, as docs/operations.md describes them: the files copied, and a broker started on the copy."""

import shutil
from pathlib import Path

import pytest

from metaq.client import TextClient
from tests.support.broker import BrokerProcess, wait_until
from tests.support.cli import Cli
from tests.support.cluster import Cluster

BODIES = [b"%d" % number for number in range(500)]


def bodies(broker: BrokerProcess) -> list[bytes]:
    """Everything in the topic."""
    with TextClient(broker.host, broker.port) as client:
        found: list[bytes] = []
        batch = client.get("orders")
        while batch.messages:
            found += [message.body for message in batch.messages]
            batch = client.get("orders", batch.next_position)
        return found


def test_the_copy_of_a_folder(tmp_path: Path) -> None:
    """P39: of a stopped broker: it is whole, and a broker over the copy has the same and goes on with the same ids."""
    with BrokerProcess(tmp_path / "data") as broker:
        with TextClient(broker.host, broker.port) as client:
            client.put_many("orders", BODIES)
        assert broker.terminate() == 0
        shutil.copytree(tmp_path / "data", tmp_path / "copy")
        broker.start()
        with TextClient(broker.host, broker.port) as client:
            later = client.put("orders", b"later")
    Cli("").run("verify", str(tmp_path / "copy"))
    with BrokerProcess(tmp_path / "copy") as restored:
        assert bodies(restored) == BODIES
        with TextClient(restored.host, restored.port) as client:
            assert client.put("orders", b"later").position == later.position


@pytest.mark.slow
def test_the_copy_of_a_slave(tmp_path: Path) -> None:
    """P39: which is stopped for it while its master goes on; without the others it starts as a broker alone."""
    with Cluster(tmp_path) as cluster:
        master = cluster.add(1, "", "--min-in-sync", "1")
        slave = cluster.add(2, master.replication, "--min-in-sync", "1")
        master.wait_for(in_sync=[1, 2])
        with TextClient(master.host, master.port) as client:
            client.put_many("orders", BODIES)
            wait_until(lambda: bodies(slave) == BODIES, 60, "the slave shows what the master has")
            assert slave.terminate() == 0
            shutil.copytree(slave.data, tmp_path / "copy")
            master.wait_for(in_sync=[1])
            client.put("orders", b"meanwhile")
            slave.follow(master.replication)
            master.wait_for(in_sync=[1, 2])
    Cli("").run("verify", str(tmp_path / "copy"))
    with BrokerProcess(tmp_path / "copy") as restored, TextClient(restored.host, restored.port) as client:
        assert bodies(restored) == BODIES
        client.put("orders", b"after the restore")
        assert bodies(restored) == [*BODIES, b"after the restore"]


def test_a_copy_that_is_another_broker_is_refused(tmp_path: Path) -> None:
    """P39: ids of the two would be taken for one another."""
    with BrokerProcess(tmp_path / "data", "--broker-name", "orders") as broker:
        assert broker.terminate() == 0
    other = BrokerProcess(tmp_path / "data", "--broker-name", "payments")
    with pytest.raises(AssertionError, match="belongs to broker 'orders' number 0, the settings say 'payments' number 0"):
        other.start()

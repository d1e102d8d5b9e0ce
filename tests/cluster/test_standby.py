"""Readers at a slave: groups that read there by their setting ``brokerId``, and others while there is no master."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import gevent
import pytest

from metaq.client import ConsumeFrom, connect
from metaq.errors import DiskFailed
from metaq.protocol.remoting import fastjson
from metaq.protocol.remoting.codes import MASTER, Request
from metaq.server.replicas.roles import MasterRole, SlaveRole
from metaq.store.recovery.recovery import open_store
from tests.cluster.test_following import SETTINGS, Disk, Master, follower_of
from tests.cluster.traffic import TOPIC, try_put
from tests.support.admin import ask
from tests.support.admin import connect as connect_remoting
from tests.support.broker import RegistryProcess, wait_until
from tests.support.cluster import DEADLINE_S, Cluster, ReplicaProcess, wait_caught_up
from tests.support.consumer import Consumer

GROUP: Final = "reports"
STANDBY: Final = 3


def read_from(master: ReplicaProcess, replica: int) -> None:
    """Make the group read from this replica, as RocketMQ's ``updateSubGroup -i`` does."""
    with connect_remoting(master) as client:
        ask(client, Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, fastjson.encode({"groupName": GROUP, "brokerId": replica}))


def suggested(replica: ReplicaProcess, group: str = GROUP) -> int:
    """The replica that a reader of the group is sent to."""
    with Consumer(replica, group) as consumer:
        return int(consumer.pull_as(TOPIC, "*").fields["suggestWhichBrokerId"])


def wait_suggested(number: int, *replicas: ReplicaProcess) -> None:
    wait_until(lambda: all(suggested(each) == number for each in replicas), DEADLINE_S, f"readers are sent to {number}")


@pytest.mark.slow
def test_a_group_reads_from_its_standby(tmp_path: Path) -> None:
    """MQ-051, MQ-080, SG-070: the replica that is named, else one in sync; the master when it is that, or none is."""
    with Cluster(tmp_path, "--min-in-sync", "1") as cluster:
        master, second = cluster.pair()
        third = cluster.add(STANDBY, master.replication)
        master.wait_for(in_sync=[1, 2, 3])
        assert try_put(master, b"x") == (200, "")
        for slave in (second, third):
            wait_caught_up(master, slave)
        read_from(master, STANDBY)
        wait_suggested(STANDBY, master, third)
        wait_suggested(0, second)  # to the master, which sends it on
        assert [suggested(replica, "others") for replica in (master, second, third)] == [0, 0, 0]
        third.kill()
        master.wait_for(in_sync=[1, 2])
        wait_suggested(2, master, second)
        second.kill()
        master.wait_for(in_sync=[1])
        wait_suggested(0, master)
        for slave in (second, third):
            slave.start()
            wait_caught_up(master, slave)
        wait_suggested(STANDBY, master, third)
        read_from(master, 1)
        wait_suggested(0, master, second, third)


def test_a_consumer_leaves_the_master_alone(tmp_path: Path) -> None:
    """MQ-051, MQ-067: its messages come from the standby, its offsets go to the master; without the setting it returns."""
    with RegistryProcess(tmp_path / "registry") as registry:
        flags = ("--registries", registry.address, "--min-in-sync", "1")
        with Cluster(tmp_path, *flags) as cluster:
            master, slave = cluster.pair()
            assert try_put(master, b"first") == (200, "")
            wait_caught_up(master, slave)
            read_from(master, slave.number)
            with connect(registry.address) as client, client.consumer(TOPIC, GROUP, consume_from=ConsumeFrom.FIRST) as consumer:
                numbers = iter(range(1000))

                def comes_from(replica: ReplicaProcess) -> Callable[[], bool]:
                    def came() -> bool:
                        before = given(replica)
                        assert try_put(master, b"%d" % next(numbers)) == (200, "")
                        message = consumer.receive(timeout_s=DEADLINE_S)
                        return message is not None and given(replica) > before

                    return came

                wait_until(comes_from(slave), DEADLINE_S, "messages come from the slave")
                read_from(master, 0)
                wait_until(comes_from(master), DEADLINE_S, "messages come from the master again")


def given(replica: ReplicaProcess) -> int:
    """Messages that a replica has given to readers."""
    with connect_remoting(replica) as client:
        table = fastjson.decode(ask(client, Request.GET_BROKER_RUNTIME_INFO).body)["table"]
    return int(table["msgGetTotalTodayNow"])


@pytest.mark.parametrize(
    ("standby", "in_sync", "goes_to"),
    [(3, {2, 3, 4}, 3), (9, {5, 3, 4}, 3), (2, {4, 3}, 3), (4, {3}, 3), (3, set(), 0), (1, {2, 3}, 0), (0, {2, 3}, 0)],
)
def test_brokers_with_other_slaves_than_the_group_names(standby: int, in_sync: set[int], goes_to: int) -> None:
    """MQ-080: a replica that is not there, or not in sync, is replaced by the one in sync with the least number."""
    slaves = [SimpleNamespace(replica=number, in_sync=number in in_sync) for number in (5, 4, 3, 2)]
    master: Any = SimpleNamespace(in_sync=SimpleNamespace(own=1, standings=lambda: slaves), _hot_bytes=1000)
    assert MasterRole.reader_goes_to(master, standby, 0, behind_bytes=0) == goes_to


@pytest.mark.parametrize(
    ("meets", "goes_to"),
    [("a disk that fails", MASTER), ("a refusal", MASTER), ("nobody", 2), ("a master that hangs up", 2)],
)
def test_readers_stay_at_a_slave_whose_master_may_be_gone(tmp_path: Path, meets: str, goes_to: int) -> None:
    """SG-083: and go to the master when the slave itself has failed or is refused: its log would not grow, their data would."""
    source, _ = open_store(tmp_path / "master", SETTINGS)
    store, _ = open_store(tmp_path / "slave", SETTINGS)
    master = Master(source)
    slave = follower_of(store, lambda: master.address, Disk())
    role: Any = SimpleNamespace(seen=slave.seen, _hot_bytes=1000, _number=2)
    if meets == "a disk that fails":
        store.fail(DiskFailed("cannot sync: input/output error"))
    if meets == "nobody":
        master.close()
    with gevent.Timeout(DEADLINE_S):
        slave.start()
        if meets == "a refusal":
            master.meet()
            master.send_heartbeat([], refused="it is another broker")
        if meets == "a master that hangs up":
            master.meet()
            master.close()
        while slave.seen.problem is None:
            gevent.sleep(0.001)
        slave.seen.in_sync = frozenset({1, 2})  # as it was heard before
        assert [SlaveRole.reader_goes_to(role, standby, 0, behind_bytes=0) for standby in (0, 2)] == [goes_to, goes_to]
        slave.stop()
    master.close()
    for each in (store, source):
        each.close()

"""The registry's tables and its file of keys, case by case; a property test checks every order of events."""

import random
from pathlib import Path
from typing import Final

import orjson
import pytest

from metaq.errors import BadRequest, DiskFull, UnknownTopic
from metaq.protocol.remoting.codes import ORDER_TOPICS
from metaq.protocol.remoting.routes import NO_LIVE_BROKER, BrokerData, DataVersion, QueueData, TopicConfig, TopicConfigs
from metaq.registry.kvconfig import FILE, KvConfig
from metaq.registry.routes import MAX_DEPARTED, BrokerKey, MasterAddress, RouteTables
from metaq.store.files.disk import RealDisk
from metaq.store.files.filecache import run_here
from tests.support.faultydisk import ROOT, FaultyDisk

EXPIRY_MS: Final = 120_000
MASTER: Final = BrokerKey("c1", "broker-a", 0, "10.0.0.1:10911")
REPLICA: Final = BrokerKey("c1", "broker-a", 1, "10.0.0.2:10911")


def table(counter: int, *topics: TopicConfig) -> TopicConfigs:
    return TopicConfigs(DataVersion(1, counter), {topic.name: topic for topic in topics})


def topic(name: str, queues: int = 4, sys_flag: int = 0) -> TopicConfig:
    return TopicConfig(name, queues, queues, sys_flag=sys_flag)


@pytest.fixture
def tables() -> RouteTables:
    """One master with three topics, registered at 0."""
    tables = RouteTables(EXPIRY_MS)
    tables.register(MASTER, "10.0.0.1:10912", table(1, topic("A"), topic("B"), topic("C")), "connection", 0)
    return tables


# -- registration -----------------------------------------------------------------------------------------------------


def test_topics_are_merged_never_replaced(tables: RouteTables) -> None:
    """SG-109: a registration may carry only the topic that has just changed."""
    tables.register(MASTER, "ha", table(2, topic("B", 8)), "connection", 1)
    assert tables.route("A", 1).queues == (QueueData("broker-a", 4, 4, 6),)
    assert tables.route("B", 1).queues == (QueueData("broker-a", 8, 8, 6),)


def test_an_unchanged_version_changes_no_topic(tables: RouteTables) -> None:
    """SG-109: so what an administrator changed here stays."""
    assert tables.wipe_write_permission("broker-a") == 3
    tables.register(MASTER, "ha", table(1, topic("A"), topic("B"), topic("C")), "connection", 1)
    assert tables.route("A", 1).queues[0].permission == 4
    tables.register(MASTER, "ha", table(2, topic("A"), topic("B"), topic("C")), "connection", 2)
    assert tables.route("A", 2).queues[0].permission == 6


def test_a_first_registration_with_one_topic_is_not_taken_as_the_whole(tables: RouteTables) -> None:
    """SG-109: the whole table follows under the same version, and must not be passed over as known."""
    other = BrokerKey("c1", "broker-b", 0, "10.0.0.3:10911")
    tables.register(other, "ha", table(5, topic("B")), "other", 0)
    assert tables.query_version("broker-b", other.address, DataVersion(1, 5), 0) == (True, None)
    tables.register(other, "ha", table(5, topic("A"), topic("B")), "other", 1)
    assert [queue.broker_name for queue in tables.route("A", 1).queues] == ["broker-a", "broker-b"]
    assert tables.query_version("broker-b", other.address, DataVersion(1, 5), 1) == (False, DataVersion(1, 5))


def test_a_replica_learns_its_master_and_changes_no_topic(tables: RouteTables) -> None:
    """SG-081, SG-100, SG-105: one name, a master and a replica."""
    done = tables.register(REPLICA, "ha", table(9, topic("A", 1), topic("D")), "replica", 1)
    assert done.master == MasterAddress("10.0.0.1:10911", "10.0.0.1:10912")
    assert tables.topics() == ["A", "B", "C"]
    assert tables.route("A", 1).brokers == (BrokerData("c1", "broker-a", {0: MASTER.address, 1: REPLICA.address}),)


def test_a_replica_alone_speaks_for_the_name() -> None:
    """SG-100: consumers can read from it."""
    tables = RouteTables(EXPIRY_MS)
    assert tables.register(REPLICA, "ha", table(9, topic("A"), topic("B")), "replica", 0).master is None
    assert tables.route("A", 0).brokers[0].addresses == {1: REPLICA.address}


def test_a_process_in_a_new_role_has_one_entry(tables: RouteTables) -> None:
    """SG-105: the same address under another number."""
    tables.register(MASTER._replace(number=2), "ha", table(2, topic("A"), topic("B")), "connection", 1)
    assert tables.route("A", 1).brokers[0].addresses == {2: MASTER.address}


def test_another_process_under_the_same_name_takes_its_place(tables: RouteTables) -> None:
    """SG-081, SG-105: and the goodbye of the first one, or the end of its connection, does not remove the second."""
    done = tables.register(MASTER._replace(address="10.0.0.9:10911"), "ha", table(1, topic("A"), topic("E")), "new", 1)
    assert done.replaced == MASTER.address
    assert tables.unregister("broker-a", MASTER.address, 2) == []
    assert tables.connection_closed("connection", 2) == []
    assert tables.route("E", 2).brokers[0].addresses == {0: "10.0.0.9:10911"}


# -- liveness ---------------------------------------------------------------------------------------------------------


def test_a_silent_broker_expires_when_its_time_is_over(tables: RouteTables) -> None:
    """SG-052, SG-053, SG-110: after 120 s, not at 120 s; then nothing of it is left."""
    assert tables.scan(EXPIRY_MS) == []
    assert [removed.connection for removed in tables.scan(EXPIRY_MS + 1)] == ["connection"]
    assert tables.topics() == []
    assert tables.cluster_info() == ({}, {})


def test_signs_of_life(tables: RouteTables) -> None:
    """SG-052: a registration, an unchanged version and a heartbeat count; a changed version does not."""
    assert tables.query_version("broker-a", MASTER.address, DataVersion(1, 1), 100_000) == (False, DataVersion(1, 1))
    assert tables.scan(220_000) == []
    assert tables.refresh("broker-a", MASTER.address, 200_000)
    assert tables.scan(320_000) == []
    tables.register(MASTER, "ha", table(1, topic("A"), topic("B")), "connection", 300_000)
    assert tables.scan(420_000) == []
    assert tables.query_version("broker-a", MASTER.address, DataVersion(1, 2), 420_000)[0]
    assert len(tables.scan(420_001)) == 1
    assert not tables.refresh("broker-a", MASTER.address, 420_001)


def test_a_broker_may_announce_its_own_time() -> None:
    """SG-110."""
    tables = RouteTables(EXPIRY_MS)
    tables.register(MASTER, "ha", table(1, topic("A")), "connection", 0, timeout_ms=1000)
    assert tables.scan(1000) == []
    assert len(tables.scan(1001)) == 1


def test_the_broker_of_the_same_process_never_expires() -> None:
    """SG-110: it has no connection that could end."""
    tables = RouteTables(EXPIRY_MS)
    tables.register(MASTER, "ha", table(1, topic("A")), None, 0)
    assert tables.scan(10 * EXPIRY_MS) == []


def test_an_end_of_connection_removes_what_it_registered(tables: RouteTables) -> None:
    """SG-112: the name stays while another process holds it, with its topics."""
    tables.register(REPLICA, "ha", table(9, topic("A")), "replica", 1)
    assert [removed.key for removed in tables.connection_closed("connection", 2)] == [MASTER]
    assert tables.route("A", 2).brokers[0].addresses == {1: REPLICA.address}
    assert [removed.key for removed in tables.connection_closed("replica", 3)] == [REPLICA]
    assert tables.topics() == []


def test_a_connection_that_was_replaced_removes_nothing(tables: RouteTables) -> None:
    """SG-112: the broker connected again before the end of the old connection was seen."""
    tables.register(MASTER, "ha", table(1, topic("A")), "newer", 1)
    assert tables.connection_closed("connection", 2) == []
    assert tables.topics() == ["A", "B", "C"]


def test_a_missing_route_says_why(tables: RouteTables) -> None:
    """SG-113: the three causes that a registry knows."""
    with pytest.raises(UnknownTopic, match="none of the 1 live brokers has such a topic"):
        tables.route("missing", 0)
    tables.unregister("broker-a", MASTER.address, 5_000)
    with pytest.raises(UnknownTopic, match=rf"{NO_LIVE_BROKER}; broker broker-a, .* removed 2 s ago because it said goodbye"):
        tables.route("A", 7_000)
    with pytest.raises(UnknownTopic, match="no broker is registered"):
        tables.route("missing", 7_000)
    with pytest.raises(UnknownTopic) as caught:
        tables.route("A", 7_000)
    assert caught.value.code == 17


def test_departed_brokers_are_remembered_up_to_a_number(tables: RouteTables) -> None:
    """SG-113: a registry does not grow with brokers that come and go."""
    for number in range(MAX_DEPARTED):
        key = BrokerKey("c1", f"other-{number}", 0, f"10.1.0.1:{number}")
        tables.register(key, "ha", table(1, topic(f"T{number}")), key, 0)
        tables.connection_closed(key, 0)
        with pytest.raises(UnknownTopic, match=f"broker other-{number}, .* its connection closed"):
            tables.route(f"T{number}", 0)
    tables.unregister("broker-a", MASTER.address, 0)
    with pytest.raises(UnknownTopic, match="no broker is registered"):
        tables.route("T0", 0)


# -- lists and administration -----------------------------------------------------------------------------------------


def test_lists_of_topics(tables: RouteTables) -> None:
    """SG-104, SG-106: by cluster, by unit, and the names that are topics of their own."""
    other = BrokerKey("c2", "broker-b", 0, "10.0.0.3:10911")
    tables.register(other, "ha", table(1, topic("U", sys_flag=1), topic("S", sys_flag=2), topic("US", sys_flag=3)), "other", 0)
    assert tables.topics() == ["A", "B", "C", "S", "U", "US"]
    assert tables.topics_of_cluster("c1") == ["A", "B", "C"]
    assert tables.topics_of_cluster("c3") == []
    assert tables.unit_topics() == ["U", "US"]
    assert tables.unit_subscribed_topics() == ["S", "US"]
    assert tables.unit_subscribed_topics(only_outside_units=True) == ["S"]
    assert tables.system_topics() == (["c1", "broker-a", "c2", "broker-b"], MASTER.address)
    assert RouteTables(EXPIRY_MS).system_topics() == ([], None)


def test_write_permissions_of_a_broker(tables: RouteTables) -> None:
    """SG-104."""
    assert tables.wipe_write_permission("broker-a") == 3
    assert {tables.route(name, 0).queues[0].permission for name in "ABC"} == {4}
    assert tables.add_write_permission("broker-a") == 3
    assert {tables.route(name, 0).queues[0].permission for name in "ABC"} == {6}
    assert tables.wipe_write_permission("broker-b") == 0


def test_topics_entered_and_deleted_by_hand(tables: RouteTables) -> None:
    """SG-104."""
    queue = QueueData("broker-a", 2, 2, 6)
    tables.add_topic("D", {"broker-a": queue})
    assert tables.route("D", 0).queues == (queue,)
    with pytest.raises(BadRequest, match="there is no live broker broker-x"):
        tables.add_topic("E", {"broker-a": queue, "broker-x": queue})
    tables.delete_topic("D", "c2")
    assert "D" in tables.topics()
    tables.delete_topic("D", "c1")
    tables.delete_topic("A")
    tables.delete_topic("missing")
    assert tables.topics() == ["B", "C"]


def test_the_processes_under_a_name(tables: RouteTables) -> None:
    """SG-105."""
    assert tables.members("c1", "broker-a") == BrokerData("c1", "broker-a", {0: MASTER.address})
    assert tables.members("c1", "broker-x") == BrokerData("c1", "broker-x", {})


# -- keys -------------------------------------------------------------------------------------------------------------


def test_keys_outlive_the_registry(tmp_path: Path) -> None:
    """SG-103, SG-115: ordered topics are in kvConfig.json."""
    config = KvConfig(RealDisk(), tmp_path / "config")
    assert (config.table(ORDER_TOPICS), config.get(ORDER_TOPICS, "T"), config.problems) == (None, None, [])
    config.put(ORDER_TOPICS, "T", "broker-a:4", run_here)
    config.put(ORDER_TOPICS, "gone", "broker-a:1", run_here)
    config.delete(ORDER_TOPICS, "gone", run_here)
    config.delete(ORDER_TOPICS, "gone", run_here)
    again = KvConfig(RealDisk(), tmp_path / "config")
    assert again.table(ORDER_TOPICS) == {"T": "broker-a:4"}
    assert again.get(ORDER_TOPICS, "T") == "broker-a:4"
    content = orjson.loads((tmp_path / "config" / FILE).read_bytes())
    assert content["configTable"] == {"ORDER_TOPIC_CONFIG": {"T": "broker-a:4"}}


def test_a_damaged_file_of_keys_is_reported_and_the_one_before_it_used(tmp_path: Path) -> None:
    """SG-115."""
    config = KvConfig(RealDisk(), tmp_path)
    config.put("N", "first", "1", run_here)
    config.put("N", "second", "2", run_here)
    file = tmp_path / FILE
    file.write_bytes(file.read_bytes().replace(b'"2"', b'"3"'))
    again = KvConfig(RealDisk(), tmp_path)
    assert again.table("N") == {"first": "1"}
    (problem,) = again.problems
    assert FILE in problem


def test_a_key_that_cannot_be_kept_is_not_there() -> None:
    """SG-115: whoever sets it is told; what was there before is in force, here and after a restart."""
    disk = FaultyDisk(random.Random(1))
    config = KvConfig(disk, ROOT)
    config.put("N", "key", "before", run_here)
    disk.full_from, disk.full_for = disk.space_calls, 1000
    with pytest.raises(DiskFull):
        config.put("N", "key", "after", run_here)
    assert config.get("N", "key") == "before"
    assert KvConfig(disk, ROOT).get("N", "key") == "before"

"""Brokers that are registered in ZooKeeper: their nodes, and the answers of each one's registry."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest
from kazoo.client import KazooClient
from kazoo.exceptions import NoNodeError

from metaq.client import TextClient
from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.headers import TopicOnly, encode_header
from metaq.protocol.remoting.routes import decode_cluster_info, decode_route
from metaq.registry.paths import BROKERS, RegisteredReplica
from tests.support.broker import BrokerProcess, wait_until
from tests.support.remoting import RemotingClient
from tests.support.zookeeper import ZooKeeperProcess

pytestmark = pytest.mark.partner("java")

DEADLINE_S: Final = 60.0
SESSION_MS: Final = 2000


class Brokers:
    """Some brokers, and a client that looks at ZooKeeper."""

    def __init__(self, server: ZooKeeperProcess, folder: Path) -> None:
        self.server = server
        self._folder = folder
        self._stack = ExitStack()

    def __enter__(self) -> "Brokers":
        self.look: KazooClient = self._stack.enter_context(self.server.client(60))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, number: int, *flags: str) -> BrokerProcess:
        broker = BrokerProcess(
            self._folder / f"broker{number}",
            f"--zookeeper={self.server.address}",
            f"--zookeeper-session-ms={SESSION_MS}",
            f"--broker-number={number}",
            f"--broker-name=b{number}",
            *flags,
        )
        return self._stack.enter_context(broker)

    def data(self, path: str) -> str | None:
        found = self.stat(path)
        return None if found is None else found[0]

    def stat(self, path: str) -> tuple[str, Any] | None:
        """With what ZooKeeper knows of the node."""
        try:
            data, stat = self.look.retry(self.look.get, path)
        except NoNodeError:
            return None
        return data.decode(), stat

    def owner(self, path: str) -> int | None:
        """The session that an ephemeral node belongs to."""
        found = self.stat(path)
        return None if found is None else found[1].owner_session_id

    def children(self, path: str) -> list[str]:
        try:
            return sorted(self.look.retry(self.look.get_children, path))
        except NoNodeError:
            return []

    def wait_data(self, path: str, data: str | None) -> None:
        wait_until(lambda: self.data(path) == data, DEADLINE_S, f"{path} is {data}")


@pytest.fixture
def brokers(tmp_path: Path) -> Iterator[Brokers]:
    with ZooKeeperProcess(tmp_path / "zk") as server, Brokers(server, tmp_path) as some:
        yield some


def ask(address: str, request: int, fields: dict[str, str] | None = None) -> Any:
    host, _, port = address.rpartition(":")
    with RemotingClient(host, int(port)) as client:
        return client.call(request, fields)


def known(registry: str) -> dict[str, dict[int, str]]:
    """The brokers that a registry knows, with their addresses."""
    cluster = decode_cluster_info(ask(registry, Request.GET_BROKER_CLUSTER_INFO).body)
    return {name: dict(broker.addresses) for name, broker in cluster.brokers.items()}


def partitions(registry: str, topic: str) -> dict[str, tuple[int, int]]:
    """Partitions to write to, and permission, by broker."""
    answer = ask(registry, Request.GET_ROUTEINFO_BY_TOPIC, encode_header(TopicOnly(topic)))
    if answer.code == Response.TOPIC_NOT_EXIST:
        return {}
    return {queue.broker_name: (queue.write_queues, queue.permission) for queue in decode_route(answer.body).queues}


# -- MetaQ's nodes ----------------------------------------------------------------------------------------------------


def test_a_master_registers(brokers: Brokers) -> None:
    """MQ-044, MQ-046, MQ-047, MQ-079, MQ-081: its address, and each topic with its partitions, in all three trees."""
    broker = brokers.start(7, "--advertise", "localhost:18123")
    address = f"meta://localhost:{broker.port}"
    with TextClient(broker.host, broker.port) as text:
        text.create("orders", 4)
    brokers.wait_data("/meta/brokers/topics-sub/orders/7-m", '{"numParts":4,"broker":"7-m"}')
    brokers.wait_data("/meta/brokers/ids/7", address)
    assert brokers.data("/meta/brokers/ids/7/master") == address
    checksum = brokers.data("/meta/brokers/ids/7/master_config_checksum")
    assert checksum is not None and 0 < int(checksum) < 2**32
    brokers.wait_data("/meta/brokers/topics-pub/orders/7-m", '{"numParts":4,"broker":"7-m"}')
    brokers.wait_data("/meta/brokers/topics/orders/7-m", "4")
    assert brokers.children("/meta/brokers/topics") == ["orders"]
    assert brokers.children("/meta/brokers/ids/7") == ["master", "master_config_checksum"]
    for path in ("ids/7/master", "ids/7/master_config_checksum", "topics/orders/7-m", "topics-pub/orders/7-m"):
        assert brokers.owner(f"/meta/brokers/{path}") is not None
    assert brokers.owner("/meta/brokers/ids/7") is None


def test_topics_that_change(brokers: Brokers) -> None:
    """MQ-046, MQ-048: a first put, more partitions (a new node), permissions, a deletion; each at once."""
    broker = brokers.start(0)
    with TextClient(broker.host, broker.port) as text:
        text.put("orders", b"first")
        brokers.wait_data("/meta/brokers/topics-pub/orders/0-m", '{"numParts":1,"broker":"0-m"}')
        before = brokers.look.get("/meta/brokers/topics-pub/orders/0-m")[1]
        text.create("orders", 3)
        brokers.wait_data("/meta/brokers/topics-pub/orders/0-m", '{"numParts":3,"broker":"0-m"}')
        assert brokers.look.get("/meta/brokers/topics-pub/orders/0-m")[1].czxid > before.czxid
    brokers.wait_data("/meta/brokers/topics-sub/orders/0-m", '{"numParts":3,"broker":"0-m"}')
    host, _, port = broker.address.rpartition(":")
    with RemotingClient(host, int(port)) as admin:
        assert admin.call(Request.UPDATE_BROKER_CONFIG, None, b"brokerPermission=4").code == Response.SUCCESS
        brokers.wait_data("/meta/brokers/topics-pub/orders/0-m", None)
        assert brokers.data("/meta/brokers/topics-sub/orders/0-m") is not None
        assert admin.call(Request.UPDATE_BROKER_CONFIG, None, b"brokerPermission=6").code == Response.SUCCESS
        brokers.wait_data("/meta/brokers/topics-pub/orders/0-m", '{"numParts":3,"broker":"0-m"}')
        assert admin.call(Request.DELETE_TOPIC_IN_BROKER, encode_header(TopicOnly("orders"))).code == Response.SUCCESS
    for tree in ("topics", "topics-pub", "topics-sub"):
        brokers.wait_data(f"/meta/brokers/{tree}/orders/0-m", None)


def test_another_root(brokers: Brokers) -> None:
    """MQ-044: the setting zookeeper_root, the clients' zk.zkRoot."""
    brokers.start(0, "--zookeeper-root", "/else/meta")
    wait_until(lambda: brokers.data("/else/meta/brokers/ids/0/master") is not None, DEADLINE_S, "the master is registered")
    assert brokers.children("/meta") == []


def test_an_orderly_stop_leaves_nothing(brokers: Brokers) -> None:
    """MQ-044: the ephemeral nodes go at once, and the persistent one is emptied."""
    broker = brokers.start(0)
    brokers.wait_data("/meta/brokers/ids/0", f"meta://{broker.address}")
    assert broker.terminate() == 0
    assert brokers.data("/meta/brokers/ids/0") == ""
    assert brokers.children("/meta/brokers/ids/0") == []
    assert brokers.children(f"{BROKERS}/DefaultCluster/b0") == []


def test_a_killed_broker_is_back_before_its_old_session_ends(brokers: Brokers) -> None:
    """MQ-044: it takes over what the run before has left, which would else stay in its way."""
    broker = brokers.start(0, "--zookeeper-session-ms", "60000")
    with TextClient(broker.host, broker.port) as text:
        text.create("orders", 2)
    path = "/meta/brokers/topics-sub/orders/0-m"
    brokers.wait_data(path, '{"numParts":2,"broker":"0-m"}')
    before = brokers.owner(path)
    broker.restart(same_port=True)
    wait_until(lambda: brokers.owner(path) not in (None, before), DEADLINE_S / 2, "the nodes are the new run's")
    own = RegisteredReplica("DefaultCluster", "b0", 1).path
    wait_until(lambda: brokers.owner(own) == brokers.owner(path), DEADLINE_S, "its own node is the new run's")


def test_two_brokers_with_one_number(brokers: Brokers, tmp_path: Path) -> None:
    """MQ-079: the second one complains, registers no topics under that number, and disturbs nobody."""
    first = brokers.start(5)
    with TextClient(first.host, first.port) as text:
        text.create("orders", 2)
    brokers.wait_data("/meta/brokers/topics-sub/orders/5-m", '{"numParts":2,"broker":"5-m"}')
    owner = brokers.owner("/meta/brokers/topics-sub/orders/5-m")
    second = BrokerProcess(
        tmp_path / "second", "--zookeeper", brokers.server.address, "--broker-number", "5", "--broker-name", "other"
    )
    with second, TextClient(second.host, second.port) as text:
        text.create("orders", 2)
        text.create("audit", 2)
        wait_until(
            lambda: "zookeeper node taken path=/meta/brokers/ids/5/master" in second.stderr(), DEADLINE_S, "it complains"
        )
        wait_until(lambda: "other" in known(first.registry), DEADLINE_S, "the second is known by its name")
        assert brokers.owner("/meta/brokers/topics-sub/orders/5-m") == owner
        assert brokers.data("/meta/brokers/topics-sub/audit/5-m") is None
        first.kill()
        brokers.wait_data("/meta/brokers/ids/5/master", f"meta://{second.address}")
        brokers.wait_data("/meta/brokers/topics-sub/audit/5-m", '{"numParts":2,"broker":"5-m"}')


def test_ids_of_two_brokers(brokers: Brokers) -> None:
    """MQ-079: the first message of each has another id: Java consumers skip a message whose id they have had."""
    ids = set()
    for number in (0, 1, 1023):
        broker = brokers.start(number)
        with TextClient(broker.host, broker.port) as text:
            put = text.put("orders", b"x").id
            (message,) = text.get("orders").messages
            assert message.id == put
            ids.add(put)
    assert len(ids) == 3
    assert min(ids) > 0


# -- ours -------------------------------------------------------------------------------------------------------------


def test_every_registry_knows_all_brokers(brokers: Brokers) -> None:
    """MY-004, MY-009, MY-011, MQ-022: topics of each are known to all, at once when they change, until it goes."""
    first, second = brokers.start(0), brokers.start(1)
    with TextClient(first.host, first.port) as text:
        text.create("orders", 2)
    with TextClient(second.host, second.port) as text:
        text.create("orders", 3)
    both = {"b0": {0: first.address}, "b1": {0: second.address}}
    for broker in (first, second):
        wait_until(lambda at=broker: known(at.registry) == both, DEADLINE_S, "both are known")  # type: ignore[misc]
        wait_until(
            lambda at=broker: partitions(at.registry, "orders") == {"b0": (2, 6), "b1": (3, 6)},  # type: ignore[misc]
            DEADLINE_S,
            "the topic is on both",
        )
    with RemotingClient(second.host, second.port) as admin:
        assert admin.call(Request.UPDATE_BROKER_CONFIG, None, b"brokerPermission=4").code == Response.SUCCESS
    wait_until(lambda: partitions(first.registry, "orders") == {"b0": (2, 6), "b1": (3, 4)}, DEADLINE_S, "b1 only gives")
    second.kill()
    wait_until(lambda: known(first.registry) == {"b0": {0: first.address}}, DEADLINE_S, "the killed one is gone")
    assert partitions(first.registry, "orders") == {"b0": (2, 6)}
    second.start()
    wait_until(lambda: known(first.registry).keys() == {"b0", "b1"}, DEADLINE_S, "it is back")
    wait_until(lambda: partitions(first.registry, "orders")["b1"] == (3, 6), DEADLINE_S, "with its topic")


def test_its_own_node(brokers: Brokers) -> None:
    """MY-016: where a broker can be reached, for the other brokers and for our clients."""
    broker = brokers.start(3, "--replication-listen", "127.0.0.1:4")
    path = RegisteredReplica("DefaultCluster", "b3", 1).path
    wait_until(lambda: brokers.data(path) is not None, DEADLINE_S, "it is registered")
    row = json.loads(brokers.data(path) or "")
    version = row.pop("version")
    assert row == {
        "remoting": broker.address,
        "registry": broker.registry,
        "text": broker.address,
        "replication": "127.0.0.1:4",
        "number": 0,
        "permission": 6,
    }
    assert len(version) == 2


@pytest.mark.slow
@pytest.mark.parametrize("wiped", [False, True])
def test_zookeeper_away_for_many_sessions(brokers: Brokers, *, wiped: bool) -> None:
    """MY-016, MQ-022: brokers serve on, every registry goes on knowing all, and all register again."""
    first, second = brokers.start(0), brokers.start(1)
    both = {"b0": {0: first.address}, "b1": {0: second.address}}
    wait_until(lambda: known(first.registry) == both == known(second.registry), DEADLINE_S, "both are known")
    brokers.server.kill()
    if wiped:
        brokers.server.wipe()
    for broker in (first, second):
        wait_until(lambda at=broker: "zookeeper connection lost" in at.stderr(), DEADLINE_S, "the loss is noticed")  # type: ignore[misc]
    with TextClient(second.host, second.port) as text:
        text.create("meanwhile", 2)
    assert known(first.registry) == both
    wait_until(lambda: "zookeeper does not answer" in first.stderr(), DEADLINE_S, "it has been away for two sessions")
    brokers.server.start()
    while brokers.data("/meta/brokers/topics-sub/meanwhile/1-m") is None:
        assert known(first.registry) == both
    wait_until(lambda: partitions(first.registry, "meanwhile") == {"b1": (2, 6)}, DEADLINE_S, "the new topic is known")
    for number in (0, 1):
        wait_until(lambda n=number: brokers.data(f"/meta/brokers/ids/{n}/master") is not None, DEADLINE_S, "masters")  # type: ignore[misc]
    assert known(first.registry) == both == known(second.registry)


def test_a_broker_starts_without_zookeeper(brokers: Brokers) -> None:
    """MQ-044: it serves, and registers when ZooKeeper comes."""
    brokers.server.kill()
    broker = brokers.start(0)
    with TextClient(broker.host, broker.port) as text:
        text.create("orders", 2)
    brokers.server.start()
    brokers.wait_data("/meta/brokers/topics-sub/orders/0-m", '{"numParts":2,"broker":"0-m"}')
    assert broker.terminate() == 0

"""Clients that find brokers through ZooKeeper."""

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

import metaq.aio
from metaq.client import Client, ConsumeFrom, TextClient, connect
from metaq.errors import BadRequest, RouteNotFound, RouteProblem
from tests.support.broker import BrokerProcess, wait_until
from tests.support.ports import free_ports
from tests.support.zookeeper import Ensemble, ZooKeeperProcess

pytestmark = pytest.mark.partner("java")

DEADLINE_S: Final = 60.0


class Cluster:
    """A ZooKeeper, and brokers that are registered there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self.zookeeper = ZooKeeperProcess(folder / "zk")

    def __enter__(self) -> "Cluster":
        self._stack.enter_context(self.zookeeper)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, number: int) -> BrokerProcess:
        flags = ["--zookeeper", self.zookeeper.address, "--zookeeper-session-ms", "2000"]
        flags += ["--broker-number", str(number), "--broker-name", f"b{number}"]
        return self._stack.enter_context(BrokerProcess(self._folder / f"broker{number}", *flags))

    def connect(self) -> Client:
        return self._stack.enter_context(connect(f"zk://{self.zookeeper.address}/", timeout_s=DEADLINE_S))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path) as some:
        yield some


def wait_registries(client: Client, *brokers: BrokerProcess) -> None:
    wanted = tuple(sorted(broker.registry for broker in brokers))
    wait_until(lambda: client.admin().registries == wanted, DEADLINE_S, f"the registries are {wanted}")


def create(broker: BrokerProcess, topic: str) -> None:
    with TextClient(broker.host, broker.port) as text:
        text.create(topic, 2)


def wait_partitions(client: Client, topic: str, count: int) -> None:
    def found() -> bool:
        try:
            return sum(queue.write_queues for queue in client.admin().route(topic).queues) == count
        except RouteNotFound:
            return False

    wait_until(found, DEADLINE_S, f"{topic} has {count} partitions")


def test_messages_of_all_brokers(cluster: Cluster) -> None:
    """MQ-020, MQ-023, MQ-047: ZooKeeper alone is named; messages go to both brokers and come from both."""
    first, second = cluster.start(0), cluster.start(1)
    for broker in (first, second):
        create(broker, "orders")
    client = cluster.connect()
    wait_registries(client, first, second)
    wait_partitions(client, "orders", 4)
    with client.producer() as producer:
        brokers = {producer.send("orders", b"%d" % number).queue.broker_name for number in range(20)}
    assert brokers == {"b0", "b1"}
    with client.consumer("orders", "readers", consume_from=ConsumeFrom.FIRST) as consumer:
        bodies: set[bytes] = set()
        end = time.monotonic() + DEADLINE_S
        while len(bodies) < 20 and time.monotonic() < end:
            message = consumer.receive(timeout_s=1)
            if message is not None:
                bodies.add(message.body)
    assert bodies == {b"%d" % number for number in range(20)}


@pytest.mark.slow
def test_registries_come_and_go(cluster: Cluster) -> None:
    """MQ-022: a client follows them while it sends; it goes on without ZooKeeper, and when all is back."""
    first = cluster.start(0)
    client = cluster.connect()
    wait_registries(client, first)
    second = cluster.start(1)
    wait_registries(client, first, second)
    for broker in (first, second):
        create(broker, "orders")
    wait_partitions(client, "orders", 4)
    with client.producer() as producer:
        cluster.zookeeper.kill()
        for _ in range(4):
            assert producer.send("orders", b"without ZooKeeper").queue.broker_name in {"b0", "b1"}
        assert client.admin().registries == tuple(sorted((first.registry, second.registry)))
        cluster.zookeeper.start()
        first.kill()
        wait_registries(client, second)
        assert client.admin().route("orders") is not None
        producer.send("orders", b"with one broker")
        first.start()
        wait_registries(client, first, second)


@pytest.mark.slow
def test_a_client_that_is_there_before_everything_else(tmp_path: Path) -> None:
    """MQ-020: it waits for ZooKeeper and for a broker as long as the call may last."""
    (port,) = free_ports(1)
    with connect(f"zk://127.0.0.1:{port}", timeout_s=DEADLINE_S) as client:
        brokers: list[str] = []
        asking = threading.Thread(target=lambda: brokers.extend(broker.name for broker in client.admin().brokers()))
        asking.start()
        with ZooKeeperProcess(tmp_path / "zk", port=port) as zookeeper:
            flags = ("--zookeeper", zookeeper.address, "--broker-name", "late")
            with BrokerProcess(tmp_path / "data", *flags):
                asking.join(DEADLINE_S)
                assert brokers == ["late"]


def test_nobody_there() -> None:
    """MQ-020: the error says that ZooKeeper names no registry, after the time of the call."""
    (port,) = free_ports(1)
    with connect(f"zk://127.0.0.1:{port}/?timeout_s=0.5") as client:
        with pytest.raises(RouteNotFound, match="ZooKeeper has named none") as caught:
            client.producer().send("orders", b"x")
        assert caught.value.reason is RouteProblem.REGISTRY_UNREACHABLE


def test_an_ensemble(tmp_path: Path) -> None:
    """MQ-020: several servers in one address; the one that leads is killed."""
    with Ensemble(tmp_path) as ensemble:
        flags = ("--zookeeper", ensemble.address, "--broker-name", "b")
        with BrokerProcess(tmp_path / "data", *flags) as broker, connect(f"zk://{ensemble.address}") as client:
            wait_registries(client, broker)
            ensemble.leader().kill()
            with BrokerProcess(tmp_path / "more", *flags[:2], "--broker-name", "c", "--broker-number", "1") as other:
                wait_registries(client, broker, other)


def test_asyncio(cluster: Cluster) -> None:
    """MQ-020: the same address, the same way."""
    broker = cluster.start(0)
    create(broker, "orders")

    async def send() -> str:
        address = f"zk://{cluster.zookeeper.address}"
        async with metaq.aio.connect(address, timeout_s=DEADLINE_S) as client, client.producer() as producer:
            return (await producer.send("orders", b"x")).queue.broker_name

    assert asyncio.run(send()) == "b0"


@pytest.mark.parametrize("address", ["zk://", "zk://a:b", "zk://a/meta", "zookeeper://a"])
def test_addresses_that_are_none(address: str) -> None:
    """MQ-020: refused at once."""
    with pytest.raises(BadRequest):
        connect(address)


def test_kazoo_is_an_extra() -> None:
    """MQ-020: nobody needs it without ZooKeeper, and who needs it is told how to get it."""
    code = """
import sys
import metaq, metaq.errors
assert not any(name.split(".")[0] == "kazoo" for name in sys.modules)
sys.modules["kazoo"] = None
import metaq.cli.host.serve
try:
    metaq.connect("zk://127.0.0.1:1")
except metaq.errors.ConfigError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=DEADLINE_S)
    assert "pip install 'metaq-broker[zookeeper]'" in done.stdout, done.stderr

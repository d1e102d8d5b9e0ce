"""The brokers that are in ZooKeeper, which the test plays, as they come into the registry of another one."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, cast

import gevent
from gevent import socket
from gevent.event import Event

from metaq.address import Address
from metaq.clock import SystemClock
from metaq.config import Settings
from metaq.engine.registry import Registry
from metaq.protocol.remoting.codes import READ, WRITE
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.protocol.remoting.routes import DataVersion, TopicConfig, TopicConfigs, encode_topic_table
from metaq.registry.kvconfig import KvConfig
from metaq.registry.paths import BrokerNode, RegisteredReplica
from metaq.registry.session import Znode
from metaq.replication.peers import Peers
from metaq.server.registering.zkregistration import OtherBrokers
from metaq.store.files.disk import RealDisk
from tests.support.fakeremoting import FakeRemoting, Reply

DEADLINE_S: Final = 60.0
SILENT: Final = Address("127.0.0.1", 1)


class Nodes:
    """ZooKeeper with the nodes of brokers only."""

    connected_at = 0.0
    session_s = 0.0

    def __init__(self) -> None:
        self._data: dict[str, bytes] = {}
        self._watches: dict[str, Callable[[], None]] = {}

    def put(self, name: str, remoting: str, version: int, replica: int = 1) -> None:
        path = RegisteredReplica("c", name, replica).path
        self._data[path] = BrokerNode(remoting, None, remoting, None, 0, READ | WRITE, DataVersion(1, version)).encode()
        self._tell(path)

    def remove(self, name: str) -> None:
        path = RegisteredReplica("c", name, 1).path
        del self._data[path]
        self._tell(path)

    def _tell(self, path: str) -> None:
        for watched, changed in list(self._watches.items()):
            if path.startswith(watched):
                changed()

    def watch(self, path: str, changed: Callable[[], None]) -> Callable[[], None]:
        self._watches[path] = changed
        changed()
        return lambda: None

    def children(self, path: str) -> list[str]:
        return sorted({each[len(path) + 1 :].partition("/")[0] for each in self._data if each.startswith(f"{path}/")})

    def get(self, path: str) -> Znode | None:
        return Znode(self._data[path], 0) if path in self._data else None


class Silent(Peers):
    """Connections to others, of which those to one broker wait until the test ends them."""

    def __init__(self) -> None:
        super().__init__(lambda: None, "")
        self.asked, self.ended, self.left = Event(), Event(), Event()

    def connect(self, address: tuple[str, int], timeout_s: float) -> socket.socket:
        if address != SILENT:
            return super().connect(address, timeout_s)
        self.asked.set()
        try:
            self.ended.wait()
            raise ConnectionRefusedError
        finally:
            self.left.set()


def test_a_broker_that_does_not_answer_delays_no_other(tmp_path: Path) -> None:
    """MY-009, MY-011: what changes at the others is known at once, and who goes is gone, whoever is still asked."""
    registry = Registry(Settings(), KvConfig(RealDisk(), tmp_path), SystemClock())
    nodes, peers, topics = Nodes(), Silent(), ["before"]

    def tell(_: RemotingCommand) -> Reply:
        table = {topic: TopicConfig(topic, 1, 1) for topic in topics}
        return Reply(body=encode_topic_table(TopicConfigs(DataVersion(1, len(topics)), table)))

    def wait_topics(*names: str) -> None:
        with gevent.Timeout(DEADLINE_S):
            while registry.tables.topics() != sorted(names):
                gevent.sleep(0.01)

    with FakeRemoting(get_all_topic_config=tell) as talker:
        nodes.put("silent", str(SILENT), 1)
        nodes.put("talker", talker.address, 1)
        others = OtherBrokers(cast(Any, nodes), RegisteredReplica("c", "own", 1), registry, SystemClock(), peers)
        others.start()
        try:
            assert peers.asked.wait(DEADLINE_S)
            wait_topics("before")
            topics.append("after")
            nodes.put("talker", talker.address, 2)
            wait_topics("before", "after")
            nodes.remove("talker")
            wait_topics()
            nodes.put("silent", talker.address, 2)
            peers.ended.set()
            wait_topics("before", "after")
        finally:
            others.stop()


def test_an_answer_that_comes_late_takes_no_place(tmp_path: Path) -> None:
    """MY-009: another replica has become master since."""
    registry = Registry(Settings(), KvConfig(RealDisk(), tmp_path), SystemClock())
    nodes, asked, go_on = Nodes(), threading.Event(), threading.Event()
    table = encode_topic_table(TopicConfigs(DataVersion(1, 1), {"orders": TopicConfig("orders", 1, 1)}))

    def tell(_: RemotingCommand) -> Reply:
        return Reply(body=table)

    def late(_: RemotingCommand) -> Reply:
        asked.set()
        assert go_on.wait(DEADLINE_S)
        return Reply(body=table)

    def wait(condition: Callable[[], bool]) -> None:
        with gevent.Timeout(DEADLINE_S):
            while not condition():
                gevent.sleep(0.01)

    def master() -> str | None:
        return registry.tables.members("c", "b").addresses.get(0)

    with (
        FakeRemoting(get_all_topic_config=late) as before,
        FakeRemoting(get_all_topic_config=tell) as new,
    ):
        others = OtherBrokers(
            cast(Any, nodes), RegisteredReplica("c", "own", 1), registry, SystemClock(), Peers(lambda: None, "")
        )
        nodes.put("b", before.address, 1)
        others.start()
        try:
            wait(asked.is_set)
            nodes.remove("b")
            nodes.put("b", new.address, 1, replica=2)
            wait(lambda: master() == new.address)
            go_on.set()
            wait(lambda: not others._asking)
            assert master() == new.address
        finally:
            others.stop()


def test_nobody_is_asked_any_more_once_a_broker_has_stopped(tmp_path: Path) -> None:
    """MY-009: an answer would be entered into a registry that others may read."""
    registry = Registry(Settings(), KvConfig(RealDisk(), tmp_path), SystemClock())
    nodes, peers = Nodes(), Silent()
    nodes.put("silent", str(SILENT), 1)
    others = OtherBrokers(cast(Any, nodes), RegisteredReplica("c", "own", 1), registry, SystemClock(), peers)
    others.start()
    assert peers.asked.wait(DEADLINE_S)
    others.stop()
    assert peers.left.is_set()

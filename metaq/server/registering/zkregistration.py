"""The registration of a broker in ZooKeeper, from which its own registry also learns of the other brokers.

MetaQ's clients find the nodes of ``metaq.registry.paths``. RocketMQ's clients, and ours, ask the registry of any broker. For
these, each broker has a node with a version. When it changes, the other brokers ask that broker for its topics (request code
21), and their registries treat the answer as a registration.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

import gevent
import orjson
from gevent.event import Event

from metaq.address import Address, parse_address
from metaq.checksum import crc32
from metaq.clock import Clock
from metaq.config import Settings
from metaq.engine.pool import run_in_pool
from metaq.engine.registry import Registry
from metaq.engine.tables.topics import Topic, TopicTable
from metaq.errors import BadRequest, ConfigError, MetaqError
from metaq.fields import plain
from metaq.message import DEAD_PREFIX, RETRY_PREFIX
from metaq.protocol.remoting.codes import INHERIT, MASTER, READ, WRITE, Request
from metaq.protocol.remoting.routes import DataVersion, TopicConfigs, decode_topic_table
from metaq.registry.groupoffsets import GroupOffsetReader
from metaq.registry.members import Members
from metaq.registry.paths import (
    TOPICS,
    TOPICS_TO_PUBLISH,
    TOPICS_TO_SUBSCRIBE,
    BrokerNode,
    Layout,
    RegisteredReplica,
    Replica,
    decode_broker_node,
    encode_address,
    encode_partitions,
)
from metaq.registry.routes import BrokerKey
from metaq.registry.session import SetData, greenlets
from metaq.registry.zookeeper import ZooKeeper
from metaq.replication.peers import Peers
from metaq.server.registering.outbound import Outbound
from metaq.server.wire.listeners import replication_address

logger = logging.getLogger(__name__)

ASK_TIMEOUT_S: Final = 3.0
LOOK_S: Final = 1.0
"""The pause before a broker that did not answer is asked again, and between checks for brokers that have expired."""


def open_session(settings: Settings, clock: Clock) -> ZooKeeper:
    """Return the session that the settings ask for, not started.

    Raise ``ConfigError`` when the setting ``zookeeper`` is malformed.
    """
    try:
        return ZooKeeper(settings.zookeeper, settings.zookeeper_session_ms, clock, greenlets, run_in_pool)
    except BadRequest as error:
        raise ConfigError(f"zookeeper: {error}") from error


class Listening(Protocol):
    """The addresses to which a broker is bound, and the one that it advertises."""

    @property
    def text(self) -> Address: ...

    @property
    def registry(self) -> Address | None: ...

    @property
    def advertised(self) -> Address: ...


class Places(NamedTuple):
    """The addresses of this broker as others receive them, mostly as HOST:PORT."""

    remoting: str
    registry: str | None
    text: Address
    replication: str | None


def places_of(listening: Listening, settings: Settings) -> Places:
    """Return the addresses that others receive: the advertised host with the port of each service."""
    host = listening.advertised.host
    return Places(
        str(listening.advertised),
        None if listening.registry is None else str(listening.registry._replace(host=host)),
        listening.text._replace(host=host),
        replication_address(settings, listening.advertised),
    )


class InZooKeeper:
    """A broker's session with ZooKeeper, and all its work there."""

    def __init__(
        self,
        settings: Settings,
        listening: Listening,
        topics: TopicTable,
        registry: Registry | None,
        clock: Clock,
        peers: Peers,
        *,
        is_master: bool,
    ) -> None:
        """Prepare the session. ``registry``, if given, is filled with the other brokers.

        Raise ``ConfigError`` for malformed settings.
        """
        self.zookeeper = open_session(settings, clock)
        places = places_of(listening, settings)
        self.group_offsets = GroupOffsetReader(self.zookeeper, Layout(settings.zookeeper_root), settings.broker_number)
        self._own = OwnNodes(self.zookeeper, settings, places, topics, clock.now_ms(), is_master=is_master)
        self._others = None if registry is None else OtherBrokers(self.zookeeper, self._own.member, registry, clock, peers)

    def start(self) -> None:
        """Register, and follow the other brokers, as soon as ZooKeeper can be reached; returns at once."""
        self._own.start()
        if self._others is not None:
            self._others.start()
        self.zookeeper.start()

    @property
    def problem(self) -> str | None:
        """The reason why clients cannot see this broker in ZooKeeper; ``None`` while the session is connected."""
        return None if self.zookeeper.connected else f"not connected to ZooKeeper {self.zookeeper.hosts}"

    def topic_changed(self, name: str) -> None:
        """Publish that a topic was made, changed or removed; never blocks."""
        self._own.topic_changed(name)

    def stop(self) -> None:
        """Remove this broker's nodes, and close the session."""
        if self._others is not None:
            self._others.stop()
        self._own.stop()
        self.zookeeper.stop()


class OwnNodes:
    """The nodes that one replica of a broker has in ZooKeeper."""

    def __init__(
        self,
        zookeeper: ZooKeeper,
        settings: Settings,
        places: Places,
        topics: TopicTable,
        started_ms: int,
        *,
        is_master: bool,
    ) -> None:
        """Prepare the nodes. ``started_ms`` tells the topic table of this run from that of an earlier one."""
        self._zookeeper = zookeeper
        self._places = places
        self._topics = topics
        self._started_ms = started_ms
        self.is_master = is_master
        self.member = RegisteredReplica(settings.cluster_name, settings.broker_name, settings.replica_number)
        self._replica = Replica(settings.broker_number, None if is_master else settings.replica_number - 1)
        self._layout = Layout(settings.zookeeper_root)
        self._checksum = b"%d" % crc32(orjson.dumps(plain(settings)))
        self._number = MASTER if is_master else settings.replica_number
        self._data: dict[str, dict[str, bytes]] = {}  # topic → path → the node's data
        self._others = [self._layout.replica(self._replica)]
        self._unwatch: Callable[[], None] = lambda: None

    def start(self) -> None:
        """Register, as soon as ZooKeeper can be reached and again whenever the session is lost, until ``stop``."""
        keep, place = self._zookeeper.keep, self._layout.replica(self._replica)
        keep(self.member.path, self._describe, same=_same_process)
        keep(place, lambda: encode_address(self._places.text))
        if self.is_master:
            checksum = self._layout.checksum(self._replica.broker)
            keep(checksum, lambda: self._checksum, after=place)
            self._others.append(checksum)
            self._unwatch = self._zookeeper.watch(self._layout.broker(self._replica.broker), self._write_master)
        for topic in self._topics:
            self._register(topic.name)

    def topic_changed(self, name: str) -> None:
        """Publish that a topic was made, changed or removed; never blocks."""
        self._register(name)
        self._zookeeper.touch(self.member.path)

    def stop(self) -> None:
        """Have the nodes removed. They go at once when the session is closed after this."""
        self._unwatch()
        place = self._layout.replica(self._replica)
        if self.is_master and self._zookeeper.held(place):
            try:
                self._zookeeper.commit([SetData(self._layout.broker(self._replica.broker), b"")])
            except MetaqError as error:
                logger.info("no goodbye zookeeper=%s reason=%s", self._zookeeper.hosts, error)
        for path in (self.member.path, *self._others, *(path for paths in self._data.values() for path in paths)):
            self._zookeeper.drop(path)

    def _describe(self) -> bytes:
        places, topics = self._places, self._topics
        where = places.remoting, places.registry, str(places.text), places.replication
        return BrokerNode(*where, self._number, topics.permission, DataVersion(self._started_ms, topics.version)).encode()

    def _write_master(self) -> None:
        """Write the master's address into the persistent parent of its node, which clients that know of no slaves read."""
        path, address = self._layout.broker(self._replica.broker), encode_address(self._places.text)
        if self._zookeeper.held(self._layout.replica(self._replica)):
            found = self._zookeeper.get(path)
            if found is not None and found.data != address:
                self._zookeeper.commit([SetData(path, address, found.version)])

    # -- topics -------------------------------------------------------------------------------------------------------

    def _register(self, name: str) -> None:
        topic = self._topics.get(name)
        before, wanted = self._data.get(name, {}), self._wanted(topic)
        self._data[name] = wanted
        if not wanted:
            del self._data[name]
        for path in before.keys() - wanted.keys():
            self._zookeeper.drop(path)
        for path, data in wanted.items():
            if path not in before:
                self._zookeeper.keep(path, partial(self._data_at, name, path), after=self._layout.replica(self._replica))
            elif before[path] != data:
                self._zookeeper.touch(path)

    def _data_at(self, topic: str, path: str) -> bytes:
        return self._data.get(topic, {}).get(path, b"")

    def _wanted(self, topic: Topic | None) -> dict[str, bytes]:
        """Return the paths of a topic with their data.

        Clients see only users' topics, and each tree only lists topics that allow its use.
        """
        if topic is None or self._topics.is_system(topic.name) or topic.name.startswith((RETRY_PREFIX, DEAD_PREFIX)):
            return {}
        permission = self._topics.permission_of(topic)
        at = partial(self._layout.topic, topic=topic.name, replica=self._replica)
        wanted = {}
        if permission & (READ | WRITE):
            wanted[at(TOPICS)] = b"%d" % topic.all_partitions
        if permission & WRITE and topic.partitions:
            wanted[at(TOPICS_TO_PUBLISH)] = encode_partitions(topic.partitions, self._replica)
        if permission & READ and topic.read_partitions:
            wanted[at(TOPICS_TO_SUBSCRIBE)] = encode_partitions(topic.read_partitions, self._replica)
        return wanted


def _same_process(found: bytes, own: bytes) -> bool:
    """Return whether a node was left by a former run of this broker: one at the same addresses."""
    try:
        former, now = decode_broker_node(found), decode_broker_node(own)
    except BadRequest:
        return False
    return (former.remoting, former.text) == (now.remoting, now.text)


class OtherBrokers:
    """Fills this broker's registry with the other brokers in ZooKeeper."""

    def __init__(self, zookeeper: ZooKeeper, own: RegisteredReplica, registry: Registry, clock: Clock, peers: Peers) -> None:
        self._peers = peers
        self._own = own
        self._registry = registry
        self._wake = Event()
        self._members = Members(zookeeper, clock, self._wake.set)
        self._entered: dict[RegisteredReplica, BrokerNode] = {}
        self._silent: set[RegisteredReplica] = set()
        self._asking: dict[RegisteredReplica, Any] = {}
        self._greenlet: Any = None

    def start(self) -> None:
        self._members.start()
        self._greenlet = gevent.spawn(self._follow)

    def stop(self) -> None:
        self._members.stop()
        if self._greenlet is not None:
            self._greenlet.kill()
        gevent.killall(list(self._asking.values()))

    def _follow(self) -> None:
        while True:
            self._wake.clear()
            nodes = {member: node for member, node in self._members.nodes().items() if member != self._own}
            for member in self._entered.keys() - nodes.keys():
                self._registry.unregister(member.broker_name, self._entered.pop(member).remoting)
            for member, node in nodes.items():
                if self._entered.get(member) != node and member not in self._asking:
                    self._asking[member] = gevent.spawn(self._ask_once, member, node)
            self._wake.wait(LOOK_S)

    def _ask_once(self, member: RegisteredReplica, node: BrokerNode) -> None:
        """Enter a broker; others are entered meanwhile, since it may take long to answer."""
        try:
            self._enter(member, node)
        finally:
            del self._asking[member]
            if self._members.nodes().get(member) != node:  # it has changed, or gone
                self._wake.set()

    def _enter(self, member: RegisteredReplica, node: BrokerNode) -> None:
        """Ask a broker for its topics, and register it here if it answers."""
        try:
            table = _allowed(self._ask(node), node.permission)
        except MetaqError as error:
            level = logging.DEBUG if member in self._silent else logging.WARNING
            logger.log(level, "broker does not tell its topics broker=%s reason=%s", member, error)
            self._silent.add(member)
            return
        self._silent.discard(member)
        if self._members.nodes().get(member) != node:  # meanwhile another replica may have got its number, and be entered
            return
        before = self._entered.get(member)
        if before is not None and before.remoting != node.remoting:
            self._registry.unregister(member.broker_name, before.remoting)
        key = BrokerKey(member.cluster, member.broker_name, node.number, node.remoting)
        self._registry.register(key, node.replication or "", table)
        self._entered[member] = node

    def _ask(self, node: BrokerNode) -> TopicConfigs:
        link = Outbound(parse_address(node.remoting, setting="remoting"), ASK_TIMEOUT_S, peers=self._peers)
        try:
            return decode_topic_table(link.call(Request.GET_ALL_TOPIC_CONFIG, {}).body)
        finally:
            link.close()


def _allowed(table: TopicConfigs, permission: int) -> TopicConfigs:
    """Return the table with each topic's permissions reduced to those that the broker allows."""
    topics = {
        name: topic._replace(permission=topic.permission & (permission | INHERIT)) for name, topic in table.topics.items()
    }
    return table._replace(topics=topics)

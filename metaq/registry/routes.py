"""The registry's tables of live brokers and their topics (specs: remoting protocol, sections 2.1 to 2.5).

The tables do no I/O: time comes in as ``now_ms``, from any clock that does not jump. They are in memory only; after a restart
brokers register again.

::

    broker name → cluster                       a broker stands here only while one of its processes lives
                  id → BrokerProcess            address, connection, data version, when it was last heard of
                  topic → QueueData

A topic's route is looked up at each broker. A table of topics with their brokers would make that one step, but then a broker
with 16,000 topics that leaves takes the loop for 10 to 20 ms, and now takes it for 1: routes are asked for topic by topic, and
there are few brokers.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from metaq.errors import BadRequest, UnknownTopic
from metaq.protocol.remoting.codes import MASTER, READ, UNIT, UNIT_SUBSCRIBED, WRITE
from metaq.protocol.remoting.routes import (
    NO_LIVE_BROKER,
    BrokerData,
    ClusterInfo,
    DataVersion,
    QueueData,
    TopicConfig,
    TopicConfigs,
    TopicRoute,
)

MAX_DEPARTED: Final = 64
"""Brokers that are remembered after they left, so that an error can explain a missing route."""
TOPICS_BEFORE_REST: Final = 1024
"""Topics entered between two calls of ``rest``: a millisecond or two of work."""


def nobody_waits() -> None:
    """Do nothing: a short registration needs no rest for other work."""


class BrokerKey(NamedTuple):
    """A registering process; ``address`` is where clients reach it."""

    cluster: str
    name: str
    number: int
    """0 for the master; slaves have other numbers."""
    address: str


class MasterAddress(NamedTuple):
    """The addresses of a master, as a slave receives them."""

    address: str
    ha_address: str


class Registered(NamedTuple):
    """The outcome of a registration."""

    first: bool
    replaced: str | None
    """The address of another process that held the same name and number until now."""
    master: MasterAddress | None
    """The live master, for a slave only."""


class Removed(NamedTuple):
    """A process that is no longer in the tables."""

    key: BrokerKey
    connection: Hashable | None


@dataclass(slots=True)
class BrokerProcess:
    """The entry of a live broker process."""

    address: str
    ha_address: str
    version: DataVersion | None
    """The version of its topics; ``None``: they may be incomplete, so the next registration counts as a change."""
    seen_ms: int
    timeout_ms: int
    connection: Hashable | None
    """``None`` for the broker in the registry's own process, which need not be watched."""


@dataclass(slots=True)
class _Group:
    """The processes under one broker name, at least one."""

    cluster: str
    processes: dict[int, BrokerProcess] = field(default_factory=dict)
    topics: dict[str, QueueData] = field(default_factory=dict)


class _Departed(NamedTuple):
    """A broker name without a live process, and why the last one went."""

    at_ms: int
    why: str
    topics: Collection[str]


class RouteTables:
    """All tables of one registry."""

    def __init__(self, expiry_ms: int) -> None:
        self._expiry_ms = expiry_ms
        self._groups: dict[str, _Group] = {}
        self._departed: dict[str, _Departed] = {}

    # -- registration -------------------------------------------------------------------------------------------------

    def register(
        self,
        key: BrokerKey,
        ha_address: str,
        table: TopicConfigs,
        connection: Hashable | None,
        now_ms: int,
        timeout_ms: int | None = None,
        rest: Callable[[], None] = nobody_waits,
    ) -> Registered:
        """Enter or refresh a process. Topics are merged: topics that ``table`` does not name stay as they are.

        ``rest`` is called after every ``TOPICS_BEFORE_REST`` topics; changes to the tables during it are respected.
        """
        self._departed.pop(key.name, None)
        group = self._groups.setdefault(key.name, _Group(key.cluster))
        group.cluster = key.cluster
        for number in [n for n, process in group.processes.items() if process.address == key.address and n != key.number]:
            del group.processes[number]  # the same process in a new role
        before = group.processes.get(key.number)
        replaced = before.address if before is not None and before.address != key.address else None
        first = before is None or replaced is not None
        # A single topic may be one that has just changed, sent before this registry had received the others.
        version = None if first and len(table.topics) == 1 else table.version
        known = None if first or before is None else before.version
        group.processes[key.number] = BrokerProcess(
            key.address, ha_address, version, now_ms, self._expiry_ms if timeout_ms is None else timeout_ms, connection
        )
        # Without a master the replica with the smallest number supplies the topics, since readers need them.
        if key.number == min(group.processes) and (known is None or not known.same(table.version)):
            self._merge(key.name, group, table.topics.values(), rest)
        return Registered(first, replaced, self.master(key.name) if key.number != MASTER else None)

    def _merge(self, name: str, group: _Group, topics: Iterable[TopicConfig], rest: Callable[[], None]) -> None:
        known: dict[tuple[int, int, int, int], QueueData] = {}  # most topics are alike, and there may be thousands
        for count, topic in enumerate(topics, 1):
            if not count % TOPICS_BEFORE_REST:
                rest()
                if self._groups.get(name) is not group:  # the broker has left meanwhile
                    return
            numbers = topic.read_queues, topic.write_queues, topic.permission, topic.sys_flag
            queue = known.get(numbers)
            if queue is None:
                queue = known[numbers] = QueueData(name, *numbers)
            group.topics[topic.name] = queue

    def refresh(self, name: str, address: str, now_ms: int) -> bool:
        """Note a sign of life; return whether the process is known."""
        process = self._process(name, address)
        if process is not None:
            process.seen_ms = now_ms
        return process is not None

    def query_version(self, name: str, address: str, version: DataVersion, now_ms: int) -> tuple[bool, DataVersion | None]:
        """Return whether ``version`` differs from the registered one, and that one; an equal one is a sign of life."""
        process = self._process(name, address)
        known = None if process is None else process.version
        changed = known is None or not known.same(version)
        if process is not None and not changed:
            process.seen_ms = now_ms
        return changed, known

    def unregister(self, name: str, address: str, now_ms: int) -> list[Removed]:
        """Remove a process that unregisters; one at another address that took over its name and number stays."""
        return self._remove(lambda group, process: group == name and process.address == address, "it said goodbye", now_ms)

    def connection_closed(self, connection: Hashable, now_ms: int) -> list[Removed]:
        """Remove every process whose last registration came through ``connection``."""
        return self._remove(lambda _, process: process.connection == connection, "its connection closed", now_ms)

    def scan(self, now_ms: int) -> list[Removed]:
        """Remove every process that has been silent for longer than its timeout."""

        def silent(_: str, process: BrokerProcess) -> bool:
            return process.connection is not None and now_ms - process.seen_ms > process.timeout_ms

        return self._remove(silent, "it was silent for too long", now_ms)

    def _process(self, name: str, address: str) -> BrokerProcess | None:
        group = self._groups.get(name)
        if group is None:
            return None
        return next((process for process in group.processes.values() if process.address == address), None)

    def _remove(self, leaves: Callable[[str, BrokerProcess], bool], why: str, now_ms: int) -> list[Removed]:
        removed = [
            Removed(BrokerKey(group.cluster, name, number, process.address), process.connection)
            for name, group in self._groups.items()
            for number, process in group.processes.items()
            if leaves(name, process)
        ]
        for key, _ in removed:
            group = self._groups[key.name]
            del group.processes[key.number]
            if not group.processes:
                del self._groups[key.name]
                self._remember(key.name, _Departed(now_ms, f"{why} ({key.address})", group.topics))
        return removed

    def _remember(self, name: str, departed: _Departed) -> None:
        self._departed[name] = departed
        if len(self._departed) > MAX_DEPARTED:
            del self._departed[next(iter(self._departed))]

    # -- questions ----------------------------------------------------------------------------------------------------

    def route(self, topic: str, now_ms: int) -> TopicRoute:
        """Return the route of a topic; raise ``UnknownTopic``, with the reason, when no live broker has it."""
        queues = self._queues(topic)
        if not queues:
            raise UnknownTopic(f"no route for topic {topic}: {self._why_nowhere(topic, now_ms)}")
        return TopicRoute(tuple(queues.values()), tuple(self._broker(name) for name in queues))

    def _queues(self, topic: str) -> dict[str, QueueData]:
        """Return the queues that each broker has of a topic; empty when no live broker has it."""
        return {name: group.topics[topic] for name, group in self._groups.items() if topic in group.topics}

    def _why_nowhere(self, topic: str, now_ms: int) -> str:
        for name, gone in reversed(self._departed.items()):
            if topic in gone.topics:
                ago = (now_ms - gone.at_ms) // 1000
                return f"{NO_LIVE_BROKER}; broker {name}, which had it, was removed {ago} s ago because {gone.why}"
        if not self._groups:
            return "no broker is registered here; is one running that names this registry?"
        return f"none of the {len(self._groups)} live brokers has such a topic; create it, or let it be created by a send"

    def _broker(self, name: str) -> BrokerData:
        group = self._groups[name]
        return BrokerData(group.cluster, name, {number: group.processes[number].address for number in sorted(group.processes)})

    def members(self, cluster: str, name: str) -> BrokerData:
        """Return the live processes under a broker name; there may be none."""
        return self._broker(name) if name in self._groups else BrokerData(cluster, name, {})

    def master(self, name: str) -> MasterAddress | None:
        """Return the addresses of the live master under a broker name, or ``None``."""
        process = self._groups[name].processes.get(MASTER) if name in self._groups else None
        return None if process is None else MasterAddress(process.address, process.ha_address)

    def cluster_info(self) -> ClusterInfo:
        """Return every live broker, and the brokers of each cluster."""
        return ClusterInfo({name: self._broker(name) for name in self._groups}, self._clusters())

    def _clusters(self) -> dict[str, list[str]]:
        clusters: dict[str, list[str]] = {}
        for name, group in self._groups.items():
            clusters.setdefault(group.cluster, []).append(name)
        return clusters

    def topics(self) -> list[str]:
        """Return all topics of live brokers, sorted."""
        return self._topics_with(lambda *_: True)

    def topics_of_cluster(self, cluster: str) -> list[str]:
        """Return the topics of the brokers of one cluster, sorted."""
        return self._topics_with(lambda group, _: group.cluster == cluster)

    def system_topics(self) -> tuple[list[str], str | None]:
        """Return the names of clusters and brokers, which are topics of their own, and the address of any live broker."""
        names: list[str] = []
        for cluster, brokers in self._clusters().items():
            names += [cluster, *brokers]
        address = next((process.address for group in self._groups.values() for process in group.processes.values()), None)
        return names, address

    def unit_topics(self) -> list[str]:
        """Return the topics that belong to a unit, sorted."""
        return self._topics_with(lambda _, queue: bool(queue.sys_flag & UNIT))

    def unit_subscribed_topics(self, *, only_outside_units: bool = False) -> list[str]:
        """Return the topics that a unit subscribes to, sorted; with ``only_outside_units`` those that belong to no unit."""
        unwanted = UNIT if only_outside_units else 0
        return self._topics_with(lambda _, queue: bool(queue.sys_flag & UNIT_SUBSCRIBED) and not queue.sys_flag & unwanted)

    def _topics_with(self, wanted: Callable[[_Group, QueueData], bool]) -> list[str]:
        return sorted(
            {topic for group in self._groups.values() for topic, queue in group.topics.items() if wanted(group, queue)}
        )

    # -- administration -----------------------------------------------------------------------------------------------

    def wipe_write_permission(self, broker: str) -> int:
        """Remove the write permission of a broker's topics until it registers a change; return their number."""
        return self._change_permissions(broker, lambda permission: permission & ~WRITE)

    def add_write_permission(self, broker: str) -> int:
        """Give a broker's topics read and write permission until it registers a change; return their number."""
        return self._change_permissions(broker, lambda _: READ | WRITE)

    def _change_permissions(self, broker: str, change: Callable[[int], int]) -> int:
        if broker not in self._groups:
            return 0
        topics = self._groups[broker].topics
        changed = {queue: queue._replace(permission=change(queue.permission)) for queue in set(topics.values())}
        topics.update({topic: changed[queue] for topic, queue in topics.items()})
        return len(topics)

    def delete_topic(self, topic: str, cluster: str | None = None) -> None:
        """Remove a topic, on the brokers of one cluster or on all, until a broker that has it registers a change."""
        for group in self._groups.values():
            if cluster is None or group.cluster == cluster:
                group.topics.pop(topic, None)

    def add_topic(self, topic: str, queues: Mapping[str, QueueData]) -> None:
        """Enter a topic on live brokers by hand; raise ``BadRequest``, entering nothing, when one of them is not live."""
        for name in queues:
            if name not in self._groups:
                raise BadRequest(f"there is no live broker {name}; nothing was changed for topic {topic}")
        for name, queue in queues.items():
            self._groups[name].topics[topic] = queue

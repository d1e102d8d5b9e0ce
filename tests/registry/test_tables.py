"""The registry's tables against a model: many brokers register, change and leave in any order."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from metaq.errors import UnknownTopic
from metaq.protocol.remoting.codes import READ, WRITE
from metaq.protocol.remoting.routes import DataVersion, QueueData, TopicConfig, TopicConfigs
from metaq.registry.routes import BrokerKey, RouteTables

EXPIRY_MS: Final = 1000
NAMES: Final = ("broker-a", "broker-b")
TOPICS: Final = ("T0", "T1", "T2", "T3")
ADDRESSES: Final = ("10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1")
CONNECTIONS: Final = (*range(4), None)

names = st.sampled_from(NAMES)
addresses = st.sampled_from(ADDRESSES)
numbers = st.sampled_from((0, 0, 0, 1, 2))
connections = st.sampled_from(CONNECTIONS)
versions = st.builds(DataVersion, st.just(1), st.integers(0, 2))
topics = st.dictionaries(st.sampled_from(TOPICS), st.integers(1, 4), min_size=2)


@dataclass(slots=True)
class Lives:
    """The model's knowledge of one process."""

    address: str
    version: DataVersion
    seen_ms: int
    connection: int | None


class RegistryTables(RuleBasedStateMachine):
    """The model: processes by (name, number), queues by (topic, name), and nothing derived."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = RouteTables(EXPIRY_MS)
        self.now_ms = 0
        self.lives: dict[tuple[str, int], Lives] = {}
        self.queues: dict[tuple[str, str], QueueData] = {}

    @rule(name=names, number=numbers, address=addresses, connection=connections, version=versions, topics=topics)
    def register(
        self, name: str, number: int, address: str, connection: int | None, version: DataVersion, topics: dict[str, int]
    ) -> None:
        table = TopicConfigs(version, {topic: TopicConfig(topic, count, count) for topic, count in topics.items()})
        before = self.lives.get((name, number))
        first = before is None or before.address != address
        for key in [key for key, life in self.lives.items() if key[0] == name and life.address == address]:
            if key != (name, number):
                del self.lives[key]
        self.lives[name, number] = Lives(address, version, self.now_ms, connection)
        smallest = number == min(other for group, other in self.lives if group == name)
        if smallest and (first or before is None or before.version != version):
            for topic, count in topics.items():
                self.queues[topic, name] = QueueData(name, count, count, READ | WRITE)
        done = self.tables.register(BrokerKey("c-" + name, name, number, address), "ha", table, connection, self.now_ms)
        assert done.first == first
        assert done.replaced == (before.address if before is not None and first else None)
        master = self.lives.get((name, 0))
        assert done.master == (None if number == 0 or master is None else (master.address, "ha"))

    @rule(name=names, address=addresses)
    def unregister(self, name: str, address: str) -> None:
        gone = [key for key, life in self.lives.items() if key[0] == name and life.address == address]
        removed = self.tables.unregister(name, address, self.now_ms)
        assert [(entry.key.name, entry.key.number) for entry in removed] == gone
        self.remove(gone)

    @rule(connection=st.sampled_from(CONNECTIONS[:-1]))
    def close(self, connection: int) -> None:
        gone = {key for key, life in self.lives.items() if life.connection == connection}
        removed = self.tables.connection_closed(connection, self.now_ms)
        assert {(entry.key.name, entry.key.number) for entry in removed} == gone
        self.remove(gone)

    @rule(pause=st.integers(1, 2 * EXPIRY_MS))
    def wait_and_scan(self, pause: int) -> None:
        self.now_ms += pause
        gone = {
            key for key, life in self.lives.items() if life.connection is not None and self.now_ms - life.seen_ms > EXPIRY_MS
        }
        removed = self.tables.scan(self.now_ms)
        assert {(entry.key.name, entry.key.number) for entry in removed} == gone
        self.remove(gone)

    @rule(name=names, address=addresses)
    def beat(self, name: str, address: str) -> None:
        known = [life for key, life in self.lives.items() if key[0] == name and life.address == address]
        assert self.tables.refresh(name, address, self.now_ms) == bool(known)
        for life in known:
            life.seen_ms = self.now_ms

    @rule(name=names, address=addresses, version=versions)
    def ask_for_changes(self, name: str, address: str, version: DataVersion) -> None:
        known = [life for key, life in self.lives.items() if key[0] == name and life.address == address]
        changed, stored = self.tables.query_version(name, address, version, self.now_ms)
        assert stored == (known[0].version if known else None)
        assert changed == (stored != version)
        if not changed:
            known[0].seen_ms = self.now_ms

    @rule(name=names, wipe=st.booleans())
    def change_permissions(self, name: str, wipe: bool) -> None:
        mine = [key for key in self.queues if key[1] == name]
        change = self.tables.wipe_write_permission if wipe else self.tables.add_write_permission
        assert change(name) == len(mine)
        for key in mine:
            self.queues[key] = self.queues[key]._replace(permission=READ if wipe else READ | WRITE)

    @rule(topic=st.sampled_from(TOPICS), cluster=st.sampled_from((None, "c-broker-a")))
    def delete_topic(self, topic: str, cluster: str | None) -> None:
        self.tables.delete_topic(topic, cluster)
        for name in NAMES if cluster is None else ("broker-a",):
            self.queues.pop((topic, name), None)

    def remove(self, gone: Iterable[tuple[str, int]]) -> None:
        for process in gone:
            del self.lives[process]
        live = {name for name, _ in self.lives}
        self.queues = {key: queue for key, queue in self.queues.items() if key[1] in live}

    @invariant()
    def routes_are_those_of_the_model(self) -> None:
        for topic in TOPICS:
            expected = {queue for (name, _), queue in self.queues.items() if name == topic}
            if not expected:
                with pytest.raises(UnknownTopic, match=topic):
                    self.tables.route(topic, self.now_ms)
                continue
            route = self.tables.route(topic, self.now_ms)
            assert set(route.queues) == expected
            assert len(route.queues) == len(expected)
            assert [broker.name for broker in route.brokers] == [queue.broker_name for queue in route.queues]
            for broker in route.brokers:
                assert broker.addresses == self.addresses(broker.name)
                assert broker.addresses
        assert self.tables.topics() == sorted({topic for topic, _ in self.queues})

    @invariant()
    def clusters_are_those_of_the_model(self) -> None:
        info = self.tables.cluster_info()
        live = {name for name, _ in self.lives}
        assert info.brokers.keys() == live
        assert info.clusters == {"c-" + name: [name] for name in live}
        for name in live:
            assert info.brokers[name].addresses == self.addresses(name)
            with_topics = sorted(topic for topic, broker in self.queues if broker == name)
            assert self.tables.topics_of_cluster("c-" + name) == with_topics

    def addresses(self, name: str) -> dict[int, str]:
        return {number: life.address for (group, number), life in self.lives.items() if group == name}


def test_any_order_of_registrations_departures_and_questions() -> None:
    """SG-100, SG-104, SG-105, SG-106, SG-107, SG-109, SG-110, SG-111, SG-113: as the model has it."""
    run_state_machine_as_test(RegistryTables, settings=settings(max_examples=60, stateful_step_count=30))

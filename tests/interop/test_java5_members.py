"""Members of a group that consume by pops from several brokers, and through a failover: RocketMQ's unmodified Java client 5."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest

import metaq
from tests.interop.clients import ClientError
from tests.interop.conftest import Start5
from tests.interop.java5 import NEWEST, Java5, set_mode, set_up
from tests.interop.mqadmin import AdminTool
from tests.support.broker import BrokerProcess, wait_until
from tests.support.group import Group
from tests.support.zookeeper import ZooKeeperProcess

pytestmark = [
    pytest.mark.partner("java", "mvn"),
    pytest.mark.timeout(900),
    pytest.mark.slow,
    pytest.mark.parametrize("version", [NEWEST], indirect=True, scope="module"),
]

WAIT_S: Final = 120.0
MESSAGES: Final = 100_000
MEMBERS: Final = 3
QUEUES: Final = 4
HURRY_MS: Final = 1000
DELAY_MS: Final = 8000


@pytest.fixture
def brokers(tmp_path: Path) -> Iterator[tuple[BrokerProcess, BrokerProcess]]:
    """Two brokers with one registry."""
    with ExitStack() as stack:
        first = stack.enter_context(BrokerProcess(tmp_path / "a"))
        flags = ("--broker-name", "other", "--broker-number", "1", "--registries", first.registry)
        second = stack.enter_context(BrokerProcess(tmp_path / "b", *flags))
        admin = stack.enter_context(metaq.connect(first.registry)).admin()
        wait_until(lambda: len(admin.masters()) == 2, WAIT_S, "both are registered")
        yield first, second


def test_members_share_two_brokers(brokers: tuple[BrokerProcess, BrokerProcess], start5: Start5, name: str) -> None:
    """A-01: three clients pop all queues of two brokers; each message is consumed, none twice, and each client gets some."""
    registry = brokers[0].registry
    first, *_ = clients = [start5(registry) for _ in range(MEMBERS)]
    set_up(registry, name, name, QUEUES)
    set_mode(AdminTool(first, registry), name, name)
    for client in clients:
        client.start_consumer(name, name, name, counting=True)
    first.start_producer(name, name)
    first.publish_numbers(name, name, MESSAGES)
    counts = [Counter[int]() for _ in clients]
    seen: set[int] = set()

    def complete() -> bool:
        for client, count in zip(clients, counts, strict=True):
            numbers = client.tally(name)
            count.update(numbers)
            seen.update(numbers)
        return len(seen) == MESSAGES

    wait_until(complete, WAIT_S, "each message at some member", 0.2)
    assert seen == set(range(MESSAGES))
    assert sum(map(Counter.total, counts)) == MESSAGES, "no message twice"
    assert all(counts)
    for client in clients:
        client.kill()


def test_members_go_on_with_the_next_master(start5: Start5, tmp_path: Path, name: str) -> None:
    """A-16: a master is killed under pops, acks and delayed messages; each message is consumed, and the delayed ones that it
    had acknowledged are delivered once. None is early."""
    with ExitStack() as stack:
        zookeeper = stack.enter_context(ZooKeeperProcess(tmp_path / "zk"))
        group = stack.enter_context(Group(tmp_path, zookeeper.address))
        master = group.wait_master()
        registries = ";".join(member.registry for member in group.members.values())
        clients = [start5(registries) for _ in range(2)]
        set_up(registries, name, name, QUEUES)
        set_mode(AdminTool(clients[0], registries), name, name)
        for client in clients:
            client.start_consumer(name, name, name, hurry_ms=HURRY_MS, invisible_ms=5000)
        producer = clients[0]
        producer.start_producer(name, name, hurry_ms=HURRY_MS)
        delayed = [b"delayed %d" % number for number in range(30)]
        due_ms: dict[bytes, int] = {}
        bodies: list[bytes] = []
        for number in range(60):
            if number == len(delayed):
                master.kill()
            body = b"delayed %d" % number
            due_ms[body] = now_ms() + DELAY_MS
            send(producer, name, body, delay_ms=DELAY_MS)
            bodies.append(b"%d" % number)
            send(producer, name, bodies[-1])

        def missing() -> set[bytes]:
            return {*bodies, *due_ms}.difference(*(client.bodies(name) for client in clients))

        wait_until(lambda: not missing(), WAIT_S, "each message at some member", 0.2)
        assert group.wait_master() is not master
        places: dict[bytes, set[tuple[int, int]]] = {}
        for message in (message for client in clients for message in client.messages(name)):
            places.setdefault(message.body, set()).add((message.queue, message.offset))
            assert message.stored >= due_ms.get(message.body, 0)
        assert {len(places[body]) for body in delayed} == {1}
        for client in clients:
            client.kill()


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def send(client: Java5, topic: str, body: bytes, **wishes: Any) -> None:
    """Send a message until it is acknowledged."""

    def taken() -> bool:
        try:
            return client.publish(topic, topic, body, **wishes).status == "SEND_OK"
        except ClientError:
            return False

    wait_until(taken, WAIT_S, f"{body!r} is taken")

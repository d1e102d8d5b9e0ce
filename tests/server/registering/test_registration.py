"""The registration of a broker with external registries, which the test plays, and with the registry in its own process."""

from pathlib import Path
from typing import Final

import gevent
import pytest

from metaq.address import Address
from metaq.clock import SystemClock
from metaq.config import Settings
from metaq.engine.registry import Registry
from metaq.engine.role import Role
from metaq.engine.tables.topics import TopicTable
from metaq.errors import Fenced
from metaq.protocol.record import MAX_TOPIC_LENGTH
from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.protocol.remoting.routes import TopicConfigs, decode_data_version, decode_registration
from metaq.registry.kvconfig import KvConfig
from metaq.replication.peers import STRANGER
from metaq.server.registering.registration import TELL_TIMEOUT_S, Registration
from metaq.server.registry import RegistryServer
from metaq.store.fence import Fence
from metaq.store.files.disk import RealDisk
from tests.support.fakeremoting import FakeRemoting, Reply, Script

DEADLINE_S: Final = 60.0


def wait_for(registry: FakeRemoting, code: Request, more: int = 2) -> None:
    """Wait until so many more requests of the code have come."""
    wait_count(registry, code, registry.count(code) + more)


def wait_count(registry: FakeRemoting, code: Request, count: int) -> None:
    with gevent.Timeout(DEADLINE_S):
        while registry.count(code) < count:
            gevent.sleep(0.01)


def registration_of(
    topics: TopicTable,
    fence: Fence,
    registries: str = "",
    *,
    is_master: bool = True,
    interval_ms: int = 100,
    registry: Registry | None = None,
) -> Registration:
    """Return the registration of a broker with these topics, not yet started."""
    registration = Registration(
        Settings(registries=registries, registration_interval_ms=interval_ms),
        Role(is_master=is_master),
        Address("127.0.0.1", 1),
        topics,
        "an identity",
        SystemClock(),
        registry,
        STRANGER,
        fence.check,
    )
    topics.changed = registration.topic_changed
    return registration


def wait_master(registration: Registration, master: Address | None) -> None:
    """Wait until this is the master to follow."""
    with gevent.Timeout(DEADLINE_S):
        while registration.find_master() != master:
            gevent.sleep(0.01)


def refuse() -> None:
    raise Fenced("another replica may be master by now")


def test_a_fenced_master_does_not_take_its_place_back(tmp_path: Path) -> None:
    """F-PART, SG-052: cut off from ZooKeeper only; the next master has registered, and readers may still need this one.

    What keeps it registered is what RocketMQ's registries of all versions take for a sign of life.
    """
    fence, topics = Fence(), TopicTable(tmp_path, 10)
    busy = iter([Reply(Response.SYSTEM_BUSY, remark="busy")])

    def live(_: RemotingCommand) -> Reply:
        return next(busy, Reply())  # a registry that is busy once keeps it, too

    with FakeRemoting(register_broker=lambda _: Reply(fields={}), query_data_version=live) as registry:
        registration = registration_of(topics, fence, registry.address)
        registration.start()
        try:
            wait_for(registry, Request.REGISTER_BROKER)
            fence.guard(refuse)
            wait_for(registry, Request.QUERY_DATA_VERSION, 1)
            registered = registry.count(Request.REGISTER_BROKER)
            wait_for(registry, Request.QUERY_DATA_VERSION)
            assert registry.count(Request.REGISTER_BROKER) == registered
            sign, key = registry.requests[-1], registration.key
            assert (sign.fields["brokerName"], sign.fields["brokerAddr"]) == (key.name, key.address)
            assert decode_data_version(sign.body) == registration.table().version
            topics.ensure("orders", 1)
            wait_for(registry, Request.QUERY_DATA_VERSION)
            with gevent.Timeout(TELL_TIMEOUT_S / 2):  # nobody waits for what it cannot register
                registration.wait_told()
            fence.guard(lambda: None)
            topics.ensure("audit", 1)
            wait_for(registry, Request.REGISTER_BROKER)
            after = [request for request in registry.requests if request.code == Request.REGISTER_BROKER][registered]
            assert {"orders", "audit"} <= decode_registration(after.body, after.version, False).topics.keys()
            assert len(registry.connections) == 1
            assert registration.problem is None
        finally:
            registration.stop()


def test_a_busy_registry_keeps_the_broker(tmp_path: Path) -> None:
    """SG-112: it removes a broker whose connection ends: the broker soon asks again over the same one, for all that changed."""
    registered: list[TopicConfigs] = []

    def take(request: RemotingCommand) -> Reply:
        registered.append(decode_registration(request.body, request.version, False))
        return Reply(Response.SYSTEM_BUSY, remark="busy") if len(registered) == 2 else Reply(fields={})

    topics = TopicTable(tmp_path, 10)
    with FakeRemoting(register_broker=take) as registry:
        registration = registration_of(topics, Fence(), registry.address, interval_ms=60_000)
        registration.start()
        try:
            wait_count(registry, Request.REGISTER_BROKER, 1)
            topics.ensure("orders", 1)
            wait_count(registry, Request.REGISTER_BROKER, 2)
            topics.ensure("audit", 1)
            wait_count(registry, Request.REGISTER_BROKER, 3)
            registration.wait_told()
            assert "orders" in registered[2].topics
            assert len(registry.connections) == 1
            assert registration.problem is None
        finally:
            registration.stop()


def test_a_registry_that_is_lost_names_no_master(tmp_path: Path) -> None:
    """SG-082: a slave follows the master that is known where registries answer; only if none does, the one known before."""
    before, after = Address("10.0.0.1", 8125), Address("10.0.0.2", 8125)
    masters = {"first": before, "second": before}

    def naming(which: str) -> Script:
        return lambda _: Reply(fields={"haServerAddr": str(masters[which])})

    with FakeRemoting(register_broker=naming("second")) as second:
        with FakeRemoting(register_broker=naming("first")) as first:
            registration = registration_of(
                TopicTable(tmp_path, 10), Fence(), f"{first.address};{second.address}", is_master=False
            )
            registration.start()
            wait_for(first, Request.REGISTER_BROKER)
            wait_for(second, Request.REGISTER_BROKER)
            wait_master(registration, before)
        try:
            masters["second"] = after
            wait_master(registration, after)
            second.hang_up()
            second.scripts.clear()  # it refuses to register this broker
            with gevent.Timeout(DEADLINE_S):
                while registration.problem is None:
                    gevent.sleep(0.01)
            assert registration.find_master() == after
        finally:
            registration.stop()


@pytest.mark.parametrize("deleted", [False, True])
def test_topics_that_change_while_a_broker_starts(tmp_path: Path, *, deleted: bool) -> None:
    """SG-050, SG-104: it accepts connections before it registers; its own registry learns all the other topics, too."""
    registry = Registry(Settings(), KvConfig(RealDisk(), tmp_path), SystemClock())
    topics = TopicTable(tmp_path, 10)
    topics.ensure("old", 1)
    topics.ensure("gone", 1)
    registration = registration_of(topics, Fence(), registry=registry)
    if deleted:
        topics.delete("gone", {})
    else:
        topics.ensure("a", 1)
        topics.ensure("b", 1)
    registration.start()
    try:
        assert registry.tables.topics() == sorted(topic.name for topic in topics)
        topics.ensure("new", 1)
        assert "new" in registry.tables.topics()
    finally:
        registration.stop()
    topics.ensure("late", 1)
    assert registry.tables.topics() == []


def test_the_longest_names_of_as_many_topics_as_there_may_be(tmp_path: Path) -> None:
    """SG-109: they are 6 MB, which a registry would refuse; compressed they are within its limits."""
    topics = TopicTable(tmp_path, Settings().max_topics)
    for number in range(topics.max_topics):
        topics.ensure(f"{number:0{MAX_TOPIC_LENGTH}}", 1)
    server = RegistryServer(Settings(data=tmp_path, registry_listen="127.0.0.1:0"))
    server.start()
    registration = registration_of(topics, Fence(), str(Address(*server.address)), interval_ms=60_000)
    registration.start()
    try:
        with gevent.Timeout(DEADLINE_S):
            while (problem := registration.problem) is not None:
                assert "refused" not in problem
                gevent.sleep(0.01)
        assert server._registry.tables.topics() == [topic.name for topic in topics]
    finally:
        registration.stop()
        server.stop()

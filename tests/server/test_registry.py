"""Brokers and registries as processes: registration, and everything that ends it."""

import os
import signal
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import gevent
import orjson
import pytest
from gevent.event import Event

from metaq.client import TextClient
from metaq.config import Settings, load
from metaq.message import DEFAULT_TOPIC
from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.frames import FrameReader, RemotingCommand, encode_request
from metaq.protocol.remoting.headers import KvKey, KvPair, RegisterBroker, TopicOnly, encode_header
from metaq.protocol.remoting.routes import (
    BrokerData,
    DataVersion,
    QueueData,
    TopicConfig,
    TopicConfigs,
    TopicRoute,
    decode_cluster_info,
    decode_registration,
    decode_route,
    encode_registration,
)
from metaq.server.registry import RegistryServer
from tests.support.admin import create_topic
from tests.support.broker import BrokerFailed, BrokerProcess, RegistryProcess, wait_until
from tests.support.fakeremoting import FakeRemoting, Reply
from tests.support.remoting import ConnectionEnded, RemotingClient

DEADLINE_S: Final = 60.0
ORDER: Final = "ORDER_TOPIC_CONFIG"
FAST: Final = ("--registration-interval-ms", "100")


@pytest.fixture
def registries(tmp_path: Path) -> Iterator[list[RegistryProcess]]:
    """Two, which know nothing of each other."""
    with RegistryProcess(tmp_path / "r1") as first, RegistryProcess(tmp_path / "r2") as second:
        yield [first, second]


def named(*registries: RegistryProcess) -> tuple[str, str]:
    return "--registries", ";".join(registry.address for registry in registries)


def client(address: str) -> RemotingClient:
    host, _, port = address.rpartition(":")
    return RemotingClient(host, int(port))


def route(registry: str, topic: str = DEFAULT_TOPIC) -> TopicRoute | None:
    """Return the route of a topic from the registry at HOST:PORT, ``None`` if it does not know the topic."""
    with client(registry) as asker:
        answer = asker.call(Request.GET_ROUTEINFO_BY_TOPIC, encode_header(TopicOnly(topic)))
    if answer.code == Response.TOPIC_NOT_EXIST:
        return None
    assert answer.code == Response.SUCCESS, answer.remark
    return decode_route(answer.body)


def addresses(registry: str) -> dict[str, BrokerData]:
    """The brokers that the registry at HOST:PORT knows."""
    with client(registry) as asker:
        return decode_cluster_info(asker.call(Request.GET_BROKER_CLUSTER_INFO).body).brokers


def wait_registered(registry: RegistryProcess, broker: BrokerProcess, name: str = "metaq") -> None:
    def registered() -> bool:
        known = addresses(registry.address).get(name)
        return known is not None and known.addresses == {0: broker.address}

    wait_until(registered, DEADLINE_S, f"{broker.address} is registered at {registry.address}")


def wait_gone(registry: RegistryProcess) -> None:
    wait_until(lambda: addresses(registry.address) == {}, DEADLINE_S, f"no broker is left at {registry.address}")


def wait_logged(process: BrokerProcess, text: str) -> None:
    wait_until(lambda: text in process.stderr(), DEADLINE_S, f"{text!r} in {process.log}")


# -- the embedded registry --------------------------------------------------------------------------------------------


def test_a_broker_that_serves_is_in_its_own_registry(tmp_path: Path) -> None:
    """SG-050, SG-101, SG-114, RD-013, RD-014, MY-017: on every port, with its topics; no ZooKeeper, no set-up."""
    with BrokerProcess(tmp_path / "data") as broker:
        for port in (broker.registry, broker.address):
            assert addresses(port) == {"metaq": BrokerData("DefaultCluster", "metaq", {0: broker.address})}
            assert route(port) is not None


def test_a_new_topic_is_routed_at_once(tmp_path: Path) -> None:
    """SG-066, SG-104, SG-113, MY-019, MY-026: when `create` is answered the route is there; when the topic grows it is new."""
    with BrokerProcess(tmp_path / "data") as broker, TextClient(broker.host, broker.port) as text:
        assert route(broker.registry, "orders") is None
        text.create("orders", 3)
        assert route(broker.registry, "orders") == TopicRoute(
            (QueueData("metaq", 3, 3, 6),), (BrokerData("DefaultCluster", "metaq", {0: broker.address}),)
        )
        text.create("orders", 5)
        found = route(broker.registry, "orders")
        assert found is not None
        assert found.queues == (QueueData("metaq", 5, 5, 6),)


def test_a_broker_that_takes_no_messages_any_more_says_so_for_every_topic(tmp_path: Path) -> None:
    """SG-066, SG-104: when the change is answered, the routes of all topics are without permission to write."""
    with BrokerProcess(tmp_path / "data") as broker, TextClient(broker.host, broker.port) as text:
        for name in ("orders", "audit"):
            text.create(name, 2)
        with client(broker.registry) as admin:
            assert admin.call(Request.UPDATE_BROKER_CONFIG, None, b"brokerPermission=4").code == Response.SUCCESS
        for name in ("orders", "audit"):
            found = route(broker.registry, name)
            assert found is not None
            assert found.queues == (QueueData("metaq", 2, 2, 4),)


def test_the_broker_of_the_same_process_does_not_expire(tmp_path: Path) -> None:
    """SG-110: another broker that is silent does, and its connection is closed."""
    flags = ("--registry-expiry-ms", "200", "--registry-scan-ms", "20", "--registration-interval-ms", "60000")
    with BrokerProcess(tmp_path / "data", *flags) as broker, client(broker.registry) as silent:
        register(silent, "silent")
        silent.wait_closed()
        assert set(addresses(broker.registry)) == {"metaq"}
        assert "reason=silent" in broker.stderr()


def register(connection: RemotingClient, name: str, topics: Sequence[str] = ("T1", "T2")) -> None:
    """Register a broker that does not exist."""
    header = RegisterBroker(name, "10.0.0.1:10911", "c1", "10.0.0.1:10912", 0)
    table = TopicConfigs(DataVersion(1, 1), {topic: TopicConfig(topic, 1, 1) for topic in topics})
    assert connection.call(Request.REGISTER_BROKER, encode_header(header), encode_registration(table)).code == Response.SUCCESS


# -- several registries -----------------------------------------------------------------------------------------------


def test_a_broker_registers_with_every_registry(tmp_path: Path, registries: list[RegistryProcess]) -> None:
    """SG-051, SG-103, RD-014: and both hear of a new topic, without waiting for the next round."""
    with BrokerProcess(tmp_path / "data", *named(*registries)) as broker, TextClient(broker.host, broker.port) as text:
        for registry in registries:
            wait_registered(registry, broker)
            assert route(registry.address, "orders") is None
        text.create("orders", 3)
        for registry in registries:
            wait_until(lambda at=registry.address: route(at, "orders") is not None, DEADLINE_S, "the new topic is routed")  # type: ignore[misc]
            found = route(registry.address, "orders")
            assert found is not None
            assert found.queues == (QueueData("metaq", 3, 3, 6),)
            assert route(registry.address, DEFAULT_TOPIC) is not None


def test_a_topic_is_routed_when_its_creation_is_answered(tmp_path: Path, registries: list[RegistryProcess]) -> None:
    """SG-064, SG-125: by every registry; one that is down does not hold it up."""
    with BrokerProcess(tmp_path / "data", *named(*registries)) as broker, client(broker.address) as asker:
        for registry in registries:
            wait_registered(registry, broker)
        for number in range(20):
            create_topic(asker, f"made-{number}")
            assert all(route(registry.address, f"made-{number}") for registry in registries), number
        registries[0].kill()
        create_topic(asker, "made-without")
        assert route(registries[1].address, "made-without")


def test_a_killed_broker_is_removed_at_once(tmp_path: Path, registries: list[RegistryProcess]) -> None:
    """SG-053, SG-107, SG-112: by the end of its connection, long before it would expire; it comes back by itself."""
    with BrokerProcess(tmp_path / "data", *named(*registries)) as broker:
        for registry in registries:
            wait_registered(registry, broker)
        broker.kill()
        for registry in registries:
            wait_gone(registry)
            assert route(registry.address) is None
            assert "reason=connection closed" in registry.stderr()
        broker.restart(same_port=True)
        for registry in registries:
            wait_registered(registry, broker)


def test_a_broker_that_stops_says_goodbye(tmp_path: Path, registries: list[RegistryProcess]) -> None:
    """SG-111."""
    with BrokerProcess(tmp_path / "data", *named(*registries)) as broker:
        for registry in registries:
            wait_registered(registry, broker)
        assert broker.terminate() == 0
        for registry in registries:
            wait_gone(registry)
            assert "reason=goodbye" in registry.stderr()


def test_a_registry_that_comes_back_learns_everything_anew(tmp_path: Path, registries: list[RegistryProcess]) -> None:
    """SG-051, SG-103: a registry keeps no routes; the broker connects again and registers all its topics."""
    first, second = registries
    with BrokerProcess(tmp_path / "data", *named(first, second), *FAST) as broker:
        with TextClient(broker.host, broker.port) as text:
            text.create("orders", 3)
        for registry in registries:
            wait_registered(registry, broker)
        first.kill()
        wait_logged(broker, f"cannot register registry={first.address}")
        assert route(second.address, "orders") is not None
        first.restart(same_port=True)
        wait_registered(first, broker)
        assert route(first.address, "orders") == route(second.address, "orders")
        assert route(first.address, DEFAULT_TOPIC) == route(second.address, DEFAULT_TOPIC)
        wait_until(lambda: broker.stderr().count(f" registered registry={first.address}") >= 2, DEADLINE_S, "it is logged")


def test_a_registry_that_is_down_holds_up_no_broker(tmp_path: Path) -> None:
    """SG-051: the broker serves, says what is missing and where, and registers when the registry is there."""
    with RegistryProcess(tmp_path / "registry") as registry:
        registry.kill()
        with BrokerProcess(tmp_path / "data", *named(registry), *FAST) as broker:
            with TextClient(broker.host, broker.port) as text:
                text.put("orders", b"served")
            wait_logged(broker, f"cannot register registry={registry.address} reason=cannot connect to {registry.address}")
            assert "setting: registries" in broker.stderr()
            registry.restart(same_port=True)
            wait_registered(registry, broker)
            assert route(registry.address, "orders") is not None


@pytest.mark.slow
def test_a_broker_that_registers_in_time_stays(tmp_path: Path) -> None:
    """SG-052, SG-066: while a silent one expires over and over, as the clock of this test."""
    with (
        RegistryProcess(tmp_path / "registry", "--registry-expiry-ms", "5000", "--registry-scan-ms", "50") as registry,
        BrokerProcess(tmp_path / "data", *named(registry), *FAST) as broker,
    ):
        wait_registered(registry, broker)
        for number in range(2):
            with client(registry.address) as silent:
                register(silent, f"silent-{number}")
                silent.wait_closed()
        assert set(addresses(registry.address)) == {"metaq"}
        assert registry.stderr().count("broker registered") >= 3


def test_two_brokers_of_one_name_are_noticed(tmp_path: Path) -> None:
    """SG-105: the registry says which address took the place of which."""
    with (
        RegistryProcess(tmp_path / "registry") as registry,
        BrokerProcess(tmp_path / "one", *named(registry), *FAST) as one,
        BrokerProcess(tmp_path / "two", *named(registry), *FAST) as two,
    ):
        wait_logged(registry, "another process took a broker's place")
        assert {one.address, two.address} >= set(addresses(registry.address)["metaq"].addresses.values())


# -- ordered topics and other keys ------------------------------------------------------------------------------------


def test_ordered_topics_outlive_registry_and_broker(tmp_path: Path) -> None:
    """SG-103, SG-115: in kvConfig.json, in routes, and in the table of the broker whose registration was answered with them."""
    flags = ("--order-message-enable", "--checkpoint-interval-ms", "50", *FAST)
    with BrokerProcess(tmp_path / "data", *flags) as broker:
        with TextClient(broker.host, broker.port) as text:
            text.create("ordered", 4)
            text.create("plain", 4)
        with client(broker.registry) as admin:
            pair = KvPair(ORDER, "ordered", "metaq:4")
            assert admin.call(Request.PUT_KV_CONFIG, encode_header(pair)).code == Response.SUCCESS
        wait_until(lambda: order_of(broker, "ordered"), DEADLINE_S, "the broker knows that the topic is ordered")
        content = orjson.loads((broker.data / "config" / "kvConfig.json").read_bytes())
        assert content["configTable"] == {ORDER: {"ordered": "metaq:4"}}
        broker.restart()
        found = route(broker.registry, "ordered")
        assert found is not None
        assert found.order_conf == "metaq:4"
        assert (order_of(broker, "ordered"), order_of(broker, "plain")) == (True, False)
        with client(broker.registry) as admin:
            admin.call(Request.DELETE_KV_CONFIG, encode_header(KvKey(ORDER, "ordered")))
        wait_until(lambda: not order_of(broker, "ordered"), DEADLINE_S, "the broker knows that the topic is not ordered")


def order_of(broker: BrokerProcess, topic: str) -> bool:
    """Return whether the broker's saved table marks a topic as ordered."""
    file = broker.data / "config" / "topics.json"
    if not file.exists():
        return False
    row = orjson.loads(file.read_bytes())["topicConfigTable"].get(topic, {"order": False})
    return bool(row["order"])


def test_ordered_topics_of_an_external_registry(tmp_path: Path) -> None:
    """SG-115: the answer to a registration names them; routes speak of them only when that is enabled."""
    with RegistryProcess(tmp_path / "registry") as registry:
        with client(registry.address) as admin:
            admin.call(Request.PUT_KV_CONFIG, encode_header(KvPair(ORDER, "ordered", "metaq:4")))
        with BrokerProcess(tmp_path / "data", *named(registry), *FAST, "--checkpoint-interval-ms", "50") as broker:
            with TextClient(broker.host, broker.port) as text:
                text.create("ordered", 4)
            wait_until(lambda: order_of(broker, "ordered"), DEADLINE_S, "the broker knows that the topic is ordered")
            found = route(registry.address, "ordered")
            assert found is not None
            assert found.order_conf is None


def test_damaged_keys_are_reported_and_the_version_before_used(tmp_path: Path) -> None:
    """SG-115."""
    with RegistryProcess(tmp_path / "registry") as registry:
        with client(registry.address) as admin:
            for value in ("1", "2"):
                admin.call(Request.PUT_KV_CONFIG, encode_header(KvPair("N", "k", value)))
        registry.kill()
        file = registry.data / "config" / "kvConfig.json"
        file.write_bytes(file.read_bytes()[:-8])
        registry.start()
        with client(registry.address) as admin:
            assert admin.call(Request.GET_KV_CONFIG, encode_header(KvKey("N", "k"))).fields == {"value": "1"}
        assert "registry keys damaged, the version before is used" in registry.stderr()
        assert "kvConfig.json" in registry.stderr()


# -- the advertised address -------------------------------------------------------------------------------------------


def test_an_advertised_address_that_nobody_answers(tmp_path: Path) -> None:
    """SG-050: the broker serves and says what is wrong, and which setting puts it right."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and never listens
        advertise = f"127.0.0.1:{taken.getsockname()[1]}"
        with BrokerProcess(tmp_path / "data", "--advertise", advertise) as broker:
            assert addresses(broker.registry)["metaq"].addresses == {0: advertise}
            wait_logged(broker, f"does not reach itself under the address that clients are told: cannot connect to {advertise}")
            assert "hint=set advertise to HOST:PORT" in broker.stderr()


def test_an_advertised_address_where_another_broker_answers(tmp_path: Path) -> None:
    """SG-050."""
    with (
        BrokerProcess(tmp_path / "other", "--broker-name", "other") as other,
        BrokerProcess(tmp_path / "data", "--advertise", other.address) as broker,
    ):
        wait_logged(broker, f"another broker (other) answers under the address {other.address} that clients are told")


def test_an_advertised_address_that_is_right(tmp_path: Path) -> None:
    """SG-050: no word about it, after the same question."""
    with BrokerProcess(tmp_path / "data", "--log-level", "DEBUG") as broker:
        wait_logged(broker, f"advertised address is right address={broker.address}")
        assert "advertised address problem" not in broker.stderr()


def test_listening_on_every_address_needs_an_advertised_one(tmp_path: Path) -> None:
    """SG-050: nobody can connect to 0.0.0.0."""
    broker = BrokerProcess(tmp_path / "data", "--allow-public", listen="0.0.0.0:0")
    with pytest.raises(BrokerFailed, match=r"0\.0\.0\.0.*set advertise to HOST:PORT"):
        broker.start()


@pytest.mark.parametrize("registries", ["nonsense", "127.0.0.1", "127.0.0.1:0", "127.0.0.1:1;:2"])
def test_a_registry_address_that_is_none_stops_the_start(tmp_path: Path, registries: str) -> None:
    """SG-051."""
    with pytest.raises(BrokerFailed, match=r"registries: '.*' is not HOST:PORT"):
        BrokerProcess(tmp_path / "data", "--registries", registries).start()


def test_a_registry_that_others_can_reach_needs_permission(tmp_path: Path) -> None:
    """SG-101: as with a broker; nobody is asked who he is."""
    with pytest.raises(BrokerFailed, match=r"registry_listen: other machines can reach 0\.0\.0\.0"):
        RegistryProcess(tmp_path / "data", listen="0.0.0.0:0").start()


def test_damage_on_one_connection_is_not_felt_on_another(tmp_path: Path) -> None:
    """SG-112: what is no frame closes the connection, and removes the broker that registered over it, but no other."""
    with RegistryProcess(tmp_path / "registry") as registry, client(registry.address) as good, client(registry.address) as bad:
        register(good, "good")
        register(bad, "bad")
        bad.send_bytes(b"\x00\x00\x00\x08\x07\x00\x00\x00nonsense")
        with pytest.raises(ConnectionEnded):
            bad.call(Request.GET_BROKER_CLUSTER_INFO)
        wait_until(lambda: set(addresses(registry.address)) == {"good"}, DEADLINE_S, "only the other broker is left")
        register(good, "good")


def is_refused(registry: RegistryProcess) -> bool:
    try:
        registry.connect().close()
    except ConnectionRefusedError:
        return True
    return False


def test_a_registry_that_stops_ends_the_answers_that_it_has_begun(tmp_path: Path) -> None:
    """SG-112: a long list arrives as a whole, although the client begins to read it late."""
    names = [f"{number:0>30000}" for number in range(300)]  # together more than the buffers of a connection take
    with RegistryProcess(tmp_path / "registry") as registry, client(registry.address) as broker, socket.socket() as asker:
        for first in range(0, len(names), 60):
            register(broker, f"b{first}", names[first : first + 60])
        asker.settimeout(DEADLINE_S)
        asker.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        asker.connect((registry.host, registry.port))
        asker.sendall(encode_request(Request.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, 1, {}))
        asker.recv(1, socket.MSG_PEEK)  # it has begun
        os.kill(registry.pid, signal.SIGTERM)
        wait_until(lambda: is_refused(registry), DEADLINE_S, "the registry takes no more connections")
        reader = FrameReader()
        frames: list[RemotingCommand] = []
        while not frames:
            data = asker.recv(1 << 16)
            assert data, "the answer is cut off"
            frames += reader.receive(data)
        assert set(names) <= set(orjson.loads(frames[0].body)["topicList"])


def test_regular_work_of_a_registry_that_fails_is_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """SG-110: an error that nobody expects is logged, and ends it not for ever."""
    failures, done = [RuntimeError("of all things")], Event()

    def look() -> None:
        if failures:
            raise failures.pop()
        done.set()

    registry = RegistryServer(Settings(data=tmp_path, registry_listen="127.0.0.1:0"))
    looking = gevent.spawn(registry._every, 0.001, look)
    try:
        assert done.wait(DEADLINE_S)
    finally:
        looking.kill()
        registry.stop()
    (record,) = caplog.records
    assert record.getMessage() == "duty failed duty=look"
    assert record.exc_info


# -- again and again --------------------------------------------------------------------------------------------------


def test_all_topics_are_registered_again_and_again(tmp_path: Path) -> None:
    """SG-052, SG-066, RD-014: every ``registration_interval_ms``, 30 s unless told otherwise, with names and every topic."""
    assert load(None, {}, {}).registration_interval_ms == 30_000
    seen: list[RemotingCommand] = []

    def take(request: RemotingCommand) -> Reply:
        seen.append(request)
        return Reply(fields={}, body=b'{"table":{}}')

    with (
        FakeRemoting(register_broker=take) as registry,
        BrokerProcess(tmp_path / "data", "--registries", registry.address, *FAST) as broker,
    ):
        with TextClient(broker.host, broker.port) as text:
            text.create("orders", 3)

        def whole() -> int:
            tables = [decode_registration(request.body, request.version, False).topics for request in list(seen)]
            return sum({"orders", DEFAULT_TOPIC} <= set(topics) for topics in tables)

        wait_until(lambda: whole() >= 3, DEADLINE_S, "nothing changes, and all topics are told again")
        assert "cannot register" not in broker.stderr()
    names = {(request.fields["brokerName"], request.fields["clusterName"]) for request in seen}
    assert names == {("metaq", "DefaultCluster")}

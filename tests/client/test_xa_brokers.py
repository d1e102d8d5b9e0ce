"""XA sessions with real brokers: named ones, and those that a registry names."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from metaq.client import TextClient
from metaq.client import connect as connect_registry
from metaq.client.transactions.branchplaces import Named
from metaq.client.xa import XaFailed, connect, resolve
from metaq.errors import RouteNotFound
from metaq.tx.xacodes import XaCode
from tests.support.broker import BrokerProcess, RegistryProcess, wait_until

QUALIFIER: Final = "myapp-host1"
LONG_S: Final = 60.0


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def test_brokers_without_port() -> None:
    """MQ-075: 8123, where text brokers listen."""
    brokers = Named("localhost; 127.0.0.1:1")
    assert brokers.everyone() == ["localhost:8123", "127.0.0.1:1"]
    assert brokers.choose() in brokers.everyone()


def bodies(broker: BrokerProcess, topic: str) -> list[bytes]:
    with TextClient(broker.host, broker.port, timeout_s=LONG_S) as client:
        partitions = range(client.create(topic, 1))
        return sorted(message.body for number in partitions for message in client.iterate(topic, partition=number))


def test_a_branch_survives_the_broker(tmp_path: Path) -> None:
    """MQ-071, MQ-075, MQ-076: prepared, killed, listed, committed: all messages at once, with their ids and tags."""
    with BrokerProcess(tmp_path / "data") as broker, connect(broker.address, qualifier=QUALIFIER, timeout_s=LONG_S) as session:
        session.tpc_begin(session.xid(1, "order-2003", "b"))
        ids = [session.send("orders", b"%d" % number, tag="T") for number in range(3)]
        session.tpc_prepare()
        broker.restart(same_port=True)
        session.leave()
        (xid,) = session.tpc_recover()
        assert (xid.gtrid, bodies(broker, "orders")) == (b"order-2003", [])
        session.tpc_commit(xid)
        with TextClient(broker.host, broker.port, timeout_s=LONG_S) as client:
            found = client.get("orders").messages
        assert [(message.id, message.attribute, message.body) for message in found] == [
            (message_id, "T", b"%d" % number) for number, message_id in enumerate(ids)
        ]
        with pytest.raises(XaFailed) as gone:
            session.tpc_commit(xid)
        assert gone.value.code == XaCode.NOTA


def test_brokers_by_way_of_the_registry(tmp_path: Path, stack: contextlib.ExitStack) -> None:
    """MQ-074, MQ-075: a branch goes to a broker that has all its topics; all brokers are asked what they have."""
    registry = stack.enter_context(RegistryProcess(tmp_path / "registry"))
    flags = ("--registries", registry.address, "--broker-name")
    brokers = {name: stack.enter_context(BrokerProcess(tmp_path / name, *flags, name)) for name in ("a", "b")}
    client = stack.enter_context(connect_registry(registry.address, timeout_s=LONG_S))
    admin = client.admin()
    wait_until(lambda: len(admin.masters()) == 2, LONG_S, "both brokers are registered")
    admin.create_topic("orders", 2)
    for name, broker in brokers.items():
        with TextClient(broker.host, broker.port) as one:
            one.create(f"only-{name}", 2)
    wait_until(lambda: {"only-a", "only-b"} <= set(admin.topics()), LONG_S, "the registry knows all topics")

    both = stack.enter_context(client.xa_session("orders", "only-b", qualifier=QUALIFIER))
    either = stack.enter_context(client.xa_session("orders", qualifier=QUALIFIER))
    anywhere = stack.enter_context(client.xa_session(qualifier=QUALIFIER))
    xids = []
    for number, session in enumerate([both] * 4 + [either] * 8):
        xids.append(session.xid(number, "g", "b"))
        session.tpc_begin(xids[-1])
        for _ in range(2):
            session.send("orders", b"%d" % number)
        if session is both:
            session.send("only-b", b"%d" % number)
        session.tpc_prepare()
        session.leave()
    assert sorted(anywhere.tpc_recover()) == xids
    assert resolve(anywhere, lambda xid: True).committed == len(xids)
    stored = {name: bodies(broker, "orders") for name, broker in brokers.items()}
    assert sorted(stored["a"] + stored["b"]) == sorted(b"%d" % number for number in range(12) for _ in range(2))
    assert {b"0", b"1", b"2", b"3"} <= set(stored["b"])  # the broker that has both topics
    assert bodies(brokers["b"], "only-b") == [b"0", b"1", b"2", b"3"]

    with pytest.raises(RouteNotFound, match="none takes messages for all of only-a, only-b"):
        both_apart = client.xa_session("only-a", "only-b", qualifier=QUALIFIER)
        both_apart.tpc_begin(xids[0])
    on_b = stack.enter_context(client.xa_session("only-b", qualifier=QUALIFIER))
    on_b.tpc_begin(xids[0])
    with pytest.raises(RouteNotFound, match="which takes no message for it; name all topics"):
        on_b.send("only-a", b"x")
    brokers["a"].kill()
    assert anywhere.tpc_recover() == []
    assert list(anywhere.unreachable) == [brokers["a"].address]


def test_a_topic_that_the_branch_creates(tmp_path: Path, stack: contextlib.ExitStack) -> None:
    """MQ-075: at a broker that creates topics with fewer partitions than clients of the other protocol would ask for."""
    broker = stack.enter_context(BrokerProcess(tmp_path / "data"))
    client = stack.enter_context(connect_registry(broker.registry, timeout_s=LONG_S))
    session = stack.enter_context(client.xa_session("new", qualifier=QUALIFIER))
    session.tpc_begin(session.xid(1, "g", "b"))
    for number in range(4):
        session.send("new", b"%d" % number)
    session.tpc_commit()
    assert bodies(broker, "new") == [b"0", b"1", b"2", b"3"]

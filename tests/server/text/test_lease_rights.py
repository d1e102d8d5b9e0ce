"""What changes while a connection leases: its rights, the groups, and how many these are; in the process of the test."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from metaq.engine.tables.groups import Group
from metaq.engine.tables.topics import Topic
from metaq.message import GroupPartition
from metaq.protocol.remoting.codes import WRITE
from metaq.server.access.permissions import Permission, Principal
from metaq.server.text.leases import MOST_PAIRS
from tests.server.text.test_leases import Broker, Client

SUB: Final = {"*": Permission.SUB}


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    broker = Broker(tmp_path / "data")
    yield broker
    broker.parts.close()


@pytest.fixture
def user() -> Principal:
    user = Principal("bob")
    user.become(SUB, SUB, admin=False)
    return user


@pytest.fixture
def client(broker: Broker, user: Principal) -> Client:
    client = Client(broker)
    client.text._session.principal = user
    return client


CHANGES: Final[dict[str, Callable[[Broker, Principal], object]]] = {
    "bob may not read orders": lambda broker, user: user.end(),
    "bob may not consume for the group billing": lambda broker, user: user.become(SUB, {}, admin=False),
    "consumeEnable": lambda broker, user: broker.parts.context.groups.put(Group("billing", consume_enable=False)),
    "perm 2": lambda broker, user: broker.parts.context.topics.put(Topic("orders", 4, 4, WRITE)),
    "broker_permission": lambda broker, user: broker.parts.context.topics.restrict(WRITE),
}


@pytest.mark.parametrize("reason", CHANGES)
def test_a_subscription_ends_when_it_may_get_no_more(broker: Broker, client: Client, user: Principal, reason: str) -> None:
    """E-05: the client is told why, and gets nothing that comes later."""
    client.say("subscribe orders billing ready=9 1")
    broker.put("a")
    assert client.heard() == ["message 1 1 0-0 orders 0 0 1 0", "a"]
    CHANGES[reason](broker, user)
    broker.put("b")
    status, text = client.heard()
    assert status.startswith("result 403 ")
    assert status.endswith(" 1")
    assert reason in text
    broker.put("c")
    assert client.heard() == []
    assert client.say("unsubscribe orders billing 2")[0].startswith("result 404 ")


def test_what_a_removed_user_had_goes_to_others(broker: Broker, client: Client, user: Principal) -> None:
    """E-05: its messages and its partitions."""
    client.say("subscribe orders billing assign=own ready=9 1")
    other = Client(broker)
    other.say("subscribe orders billing assign=own ready=9 2")
    broker.put("a")
    assert client.heard()[0].startswith("message ")
    user.end()
    broker.put("b")
    assert "".join(other.heard()).count("message") == 2


@pytest.mark.parametrize("line", ["ack 0-0 2", "nack 0-0 2", "nack 0-0 dead 2", "extend 0-0 120000 2"])
def test_a_removed_user_ends_no_leases(broker: Broker, client: Client, user: Principal, line: str) -> None:
    """E-05: not those of its connection either."""
    broker.put("a")
    client.say("pop orders billing 1 7")
    user.end()
    assert client.say(line)[0].startswith("result 403 ")
    user.become(SUB, SUB, admin=False)
    assert client.say("ack 0-0 3") == ["result 200 1 3", "1"]


def delete_group(broker: Broker, *, auto_create: bool) -> None:
    """Delete the group with its offsets; ``auto_create``: use makes it anew."""
    context = broker.parts.context
    context.groups.auto_create = auto_create
    context.groups.remove("billing")
    context.offsets.remove("billing")


@pytest.mark.parametrize("auto_create", [True, False])
def test_a_message_is_not_lost_when_it_is_rejected_after_its_group_was_deleted(
    broker: Broker, client: Client, *, auto_create: bool
) -> None:
    """ES-103: the group, whose offsets are still there, is made anew for the dead letter; the answer says if it may not be."""
    broker.put("a")
    client.say("pop orders billing 1 7")
    broker.parts.context.groups.auto_create = auto_create
    broker.parts.context.groups.remove("billing")
    answer = client.say("nack 0-0 dead 2")
    assert answer[0].startswith("result 200 1 " if auto_create else "result 500 ")
    assert broker.dead_letters() == auto_create


@pytest.mark.parametrize("line", ["subscribe orders billing ready=9 1", "pop orders billing 1 wait=5000 1"])
def test_consumers_that_stay_make_a_deleted_group_anew(broker: Broker, client: Client, line: str) -> None:
    """MY-008: there are no offsets of a group that is in no table."""
    client.say(line)
    delete_group(broker, auto_create=True)
    broker.put("a")
    assert client.heard()[0] == "message 1 1 0-0 orders 0 0 1 0"
    assert broker.parts.context.groups.get("billing") is not None


def test_a_pop_that_ends_without_messages_makes_no_group(broker: Broker, client: Client) -> None:
    """MY-008: also one that was held when its group was deleted."""
    client.say("pop orders billing 1 wait=5000 1")
    delete_group(broker, auto_create=True)
    broker.advance(5)
    assert client.heard()[0].startswith("result 404 ")
    assert broker.parts.context.groups.get("billing") is None


@pytest.mark.parametrize("line", ["subscribe orders billing ready=9 1", "pop orders billing 1 wait=5000 1"])
def test_consumers_of_a_deleted_group_get_nothing_when_use_makes_no_groups(broker: Broker, client: Client, line: str) -> None:
    """MY-008: they learn the reason, and the group stays deleted."""
    client.say(line)
    delete_group(broker, auto_create=False)
    broker.put("a")
    status, text = client.heard()
    assert status.startswith("result 500 ")
    assert "the group billing does not exist" in text
    assert client.say("unsubscribe orders billing 2")[0].startswith("result 404 ")
    assert broker.leasing.leases.get(GroupPartition("billing", "orders", 0)) is None
    assert broker.parts.context.offsets.get("billing", "orders", 0) is None


def test_a_connection_may_lease_from_any_number_of_groups_one_after_the_other(broker: Broker, client: Client) -> None:
    """ES-103: those count of which it has messages that are not finished."""
    broker.put("a")
    for number in range(MOST_PAIRS + 1):
        assert client.say(f"pop orders g{number} 1 7")[0].startswith("message ")
        assert client.say("ack 0-0 8") == ["result 200 1 8", "1"]


def test_the_groups_of_a_connection_are_limited(broker: Broker, client: Client) -> None:
    """ES-103: until the messages of one are finished. The short forms know the subscriptions and what is out."""
    client.say("subscribe orders g0 ready=0 1")
    broker.put("a")
    for number in range(1, MOST_PAIRS):
        assert client.say(f"pop orders g{number} 1 7")[0].startswith("message ")
    assert client.say("pop orders last 1 7")[0].startswith("result 503 ")
    assert client.say("subscribe orders last 1")[0].startswith("result 503 ")
    assert client.say("ack 0-0 8") == ["result 200 1 8", "1"]
    assert client.say("pop orders last 1 7")[0].startswith("message ")
    assert client.say("pop orders g63 1 7")[0].startswith("result 503 ")
    client.say("ready 1 9")
    assert client.say("ack 0-0 8") == ["result 200 1 8", "1"]

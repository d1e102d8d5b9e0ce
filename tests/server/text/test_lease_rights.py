"""Rights to lease over the text protocol that change while a connection is open, in the process of the test."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from metaq.engine.tables.groups import Group
from metaq.engine.tables.topics import Topic
from metaq.protocol.remoting.codes import WRITE
from metaq.server.access.permissions import Permission, Principal
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

"""Administration, with the broker in memory and with a real one."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from metaq.client import Admin, Client, ConsumeFrom, OutgoingMessage, ReceivedMessage, connect
from metaq.client.admin.views import GroupView
from metaq.client.connecting.identity import UniqueIds
from metaq.errors import RouteNotFound, RouteProblem
from metaq.testing import InMemoryBroker
from tests.client.conftest import Connect
from tests.client.test_consumers import DEADLINE_S, FIRST, Heard, send, take
from tests.support.broker import RegistryProcess, wait_until

LONG_AGO = datetime(2000, 1, 1, tzinfo=UTC)


@pytest.fixture
def admin(client: Client) -> Admin:
    return client.admin()


def test_topics_come_and_go(admin: Admin) -> None:
    """SG-125: created on every master, seen at the registry, deleted everywhere."""
    admin.create_topic("orders", 6)
    assert "orders" in admin.topics()
    (view,) = admin.topic_config("orders")
    assert (view.write_partitions, view.read_partitions, view.permission_text) == (6, 6, "RW")
    admin.delete_topic("orders")
    assert "orders" not in admin.topics()
    with pytest.raises(RouteNotFound) as found:
        admin.route("orders")
    assert found.value.reason is RouteProblem.TOPIC_ABSENT


def test_a_change_of_a_topic_or_group_needs_a_master(tmp_path: Path) -> None:
    """SG-125, P14: nothing is created or deleted where there is no broker, and that is said."""
    with RegistryProcess(tmp_path / "registry") as registry, connect(registry.address) as client:
        admin = client.admin()
        changes: list[Callable[[], None]] = [
            lambda: admin.create_topic("orders"),
            lambda: admin.delete_topic("orders"),
            lambda: admin.update_group(GroupView("billing")),
            lambda: admin.delete_group("billing"),
        ]
        for change in changes:
            with pytest.raises(RouteNotFound, match="none of them names a master; nothing was changed") as caught:
                change()
            assert caught.value.reason is RouteProblem.NO_LIVE_MASTER


def test_brokers_are_named(admin: Admin) -> None:
    """SG-054: names, numbers and addresses, from the registry."""
    (broker,) = admin.brokers()
    assert broker.broker_id == 0
    assert admin.masters() == [broker]


def test_a_message_is_found_by_key(client: Client, admin: Admin) -> None:
    """SG-132: every message of the topic that has the key, and none that only looks alike."""
    producer = client.producer()
    for number in range(6):
        producer.send("orders", str(number).encode(), keys=[f"order-{number % 2}", "eu"])
    producer.send("returns", b"other topic", keys="order-1")

    def bodies(key: str) -> list[bytes]:
        return sorted(message.body for message in admin.query_by_key("orders", key))

    wait_until(lambda: bodies("order-1") == [b"1", b"3", b"5"], DEADLINE_S, "the keys are indexed")
    assert len(bodies("eu")) == 6
    assert len(admin.query_by_key("orders", "eu", most=2)) == 2
    assert bodies("order") == []
    assert admin.query_by_key("orders", "eu", end=LONG_AGO) == []


def test_a_message_is_found_by_its_ids(client: Client, admin: Admin) -> None:
    """SG-136, RD-106: by the sender's id, and by the broker's."""
    sent = client.producer().send("orders", b"that one")
    client.producer().send("orders", b"another one")
    wait_until(lambda: len(admin.query_by_id("orders", sent.id)) == 1, DEADLINE_S, "the id is indexed")
    (message,) = admin.query_by_id("orders", sent.id)
    assert (message.body, message.offset_id) == (b"that one", sent.offset_id)


def test_a_message_is_found_where_its_broker_put_it(process: object, new_client: Connect) -> None:
    """RD-106: the id says which broker to ask, and where it has the message."""
    client = new_client()
    sent = client.producer().send("orders", b"that one")
    found = client.admin().query_by_offset_id(sent.offset_id)
    assert found is not None
    assert (found.id, found.body, found.queue) == (sent.id, b"that one", sent.queue)


def test_messages_of_a_time(client: Client, admin: Admin) -> None:
    """SG-132: everything that was stored from a time on, partition after partition."""
    ids = send(client, 9)
    assert sorted(message.id for message in admin.query_by_time("orders", LONG_AGO)) == sorted(ids)
    later = datetime.now(UTC) + timedelta(hours=1)
    assert list(admin.query_by_time("orders", later)) == []


def test_dead_letters_are_listed_and_replayed(memory: InMemoryBroker) -> None:
    """SG-074, E-07: once more to the group that failed, and to no other, under an id of its own: it is no duplicate."""
    heard, healed = Heard(), Heard()

    def failing(message: ReceivedMessage) -> None:
        heard(message)
        raise ValueError("not yet")

    from metaq.client import connect

    with connect(memory.address) as client:
        admin = client.admin()
        assert list(admin.dead_letters("billing")) == []
        sent = client.producer().send("orders", b"0", dedupe_id="once").id
        with client.listen("orders", "billing", failing, max_reconsume_times=0, consume_from=FIRST):
            wait_until(lambda: len(memory.dead_letters("billing")) == 1, DEADLINE_S, "the dead letter")
        (dead,) = admin.dead_letters("billing")
        assert (dead.id, dead.topic) == (sent, "orders")
        with client.listen("orders", "billing", healed, consume_from=FIRST):
            admin.replay("billing", dead)
            (again,) = healed.wait(1)
    assert (again.topic, again.reconsume_times) == ("orders", 0)
    assert again.id not in (sent, "") and "DEDUPE_ID" not in again.properties


@pytest.mark.parametrize("address", ["process"], indirect=True)
class TestGroups:
    """Views of groups that need a whole broker."""

    def test_lag_and_members(self, new_client: Connect) -> None:
        """SG-132, SG-121: how far a group is behind, and who is in it."""
        client = new_client()
        admin = client.admin()
        send(client, 10)
        with client.consumer("orders", "billing", tags="*", consume_from=FIRST) as consumer:
            take(consumer, 7)
            consumer.commit()
            assert sum(view.lag for view in admin.group_lag("billing", "orders")) == 3
            members = admin.members("billing")
            assert members is not None
            assert [member.client_id for member in members.members] == [client.id]
            assert members.subscriptions["orders"] == "*"
            assert "billing" in [group.name for group in admin.groups()]
            assert "billing" in admin.groups_of_topic("orders")
            state = admin.member_state("billing", client.id)
            assert state["properties"]["PROP_CONSUME_TYPE"] == "CONSUME_ACTIVELY"
        assert admin.members("billing") is None
        assert sum(view.end - view.begin for view in admin.queues("orders")) == 10

    def test_offsets_are_reset_with_nobody_there(self, new_client: Connect) -> None:
        """SG-118: first shown, then done."""
        client = new_client()
        admin = client.admin()
        ids = send(client, 8)
        with client.consumer("orders", "billing", consume_from=FIRST) as consumer:
            take(consumer, 8)
            consumer.commit()
        changes = admin.reset_offset("billing", "orders", ConsumeFrom.FIRST)
        assert [(change.before, change.after) for change in changes] == [(2, 0)] * 4
        assert sum(view.lag for view in admin.group_lag("billing", "orders")) == 0
        admin.reset_offset("billing", "orders", ConsumeFrom.FIRST, apply=True)
        with client.consumer("orders", "billing") as consumer:
            assert sorted(message.id for message in take(consumer, 8)) == sorted(ids)

    def test_offsets_are_reset_under_a_running_consumer(self, new_client: Connect) -> None:
        """SG-118: the broker tells the members, which obey."""
        client = new_client()
        heard = Heard()
        ids = send(client, 8)
        with client.listen("orders", "billing", heard, consume_from=FIRST):
            heard.wait(8)
            new_client().admin().reset_offset("billing", "orders", LONG_AGO, apply=True)
            again = heard.wait(16)[8:]
        assert sorted(message.id for message in again) == sorted(ids)

    def test_a_broker_tells_about_itself(self, new_client: Connect) -> None:
        """SG-054: state and settings."""
        admin = new_client().admin()
        (broker,) = admin.masters()
        assert "brokerVersionDesc" in admin.broker_info(broker.address)
        assert admin.broker_config(broker.address)["brokerName"] == broker.name


def test_ids_are_given_once(new_client: Connect) -> None:
    """SG-136: by no two clients, in one process or of one address, and by no broker twice; a batch has one for each message."""
    sent = [new_client().producer().send("orders", b"x") for _ in range(3) for _ in range(10)]
    sent += new_client().producer().send_batch("orders", [OutgoingMessage(b"x"), OutgoingMessage(b"y")])
    assert len({result.id for result in sent}) == len({result.offset_id for result in sent}) == len(sent) == 32
    makers = [UniqueIds("10.0.0.1") for _ in range(50)]
    ids = [maker.next() for _ in range(200) for maker in makers]
    assert len(set(ids)) == len(ids)

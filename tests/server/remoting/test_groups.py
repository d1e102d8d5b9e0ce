"""Consumer groups as their clients see them: heartbeats, members, subscriptions, filters, locks."""

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

from metaq.client import TextClient
from metaq.engine.tables.groups import Group, GroupTable
from metaq.protocol.remoting.codes import COMPACT, JSON, PULL_SUSPENDS, Request, Response
from metaq.store.files.disk import RealDisk
from metaq.store.files.filecache import run_here
from tests.support.admin import create_topic, send
from tests.support.broker import BrokerProcess, wait_until
from tests.support.consumer import Consumer, subscription
from tests.support.remoting import RemotingClient

DEADLINE_S: Final = 60.0
SQL: Final = "SQL92"
SAVED: Final = "config/subscriptionGroup.json"


_numbers = itertools.count()


@pytest.fixture
def name() -> str:
    """One that no other test uses."""
    return f"n{next(_numbers)}"


Join = Callable[..., Consumer]


@pytest.fixture
def join() -> Iterator[Join]:
    """Makes consumers that are closed in the end."""
    with ExitStack() as stack:
        yield lambda *args, **more: stack.enter_context(Consumer(*args, **more))


def put(broker: BrokerProcess, topic: str, *bodies: bytes, pairs: str = "") -> None:
    with RemotingClient(broker.host, broker.port) as producer:
        send(producer, topic, *bodies, pairs=pairs)


# -- members ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("serialization", [JSON, COMPACT])
def test_members_are_told_when_the_group_changes(broker: BrokerProcess, name: str, join: Join, serialization: int) -> None:
    """SG-087, SG-089, SG-123, RD-104: who joins, leaves or changes topics is told to all, before the heartbeat is answered."""
    first = join(broker, name, "10.0.0.1@1", serialization=serialization)
    first.beat(subscription("T"))
    assert first.told() == 1  # came before the answer: nothing was waited for
    first.beat(subscription("T"))
    first.beat(subscription("T", "TagA", version=2))
    assert first.told() == 0
    second = join(broker, name, "10.0.0.2@1")
    second.beat(subscription("T"))
    assert second.told() == 1
    assert first.members() == second.members() == ["10.0.0.1@1", "10.0.0.2@1"]
    assert first.told() == 1
    second.beat(subscription("T"), subscription("U"))
    assert second.told() == 1
    first.wire.request(Request.NOTIFY_CONSUMER_IDS_CHANGED)
    second.wire.close()
    first.wire.request(Request.NOTIFY_CONSUMER_IDS_CHANGED)
    assert first.members() == ["10.0.0.1@1"]


def test_a_goodbye_takes_a_client_out(broker: BrokerProcess, name: str, join: Join) -> None:
    """SG-087, SG-089: at once, and one that is connected twice is shown once."""
    first, twice, second = join(broker, name, "a@1"), join(broker, name, "a@1"), join(broker, name, "b@1")
    for consumer in (first, twice, second):
        consumer.beat(subscription("T"))
    assert first.members() == ["a@1", "b@1"]
    goodbye = second.call(Request.UNREGISTER_CLIENT, {"clientID": "b@1", "consumerGroup": name})
    assert (goodbye.code, goodbye.fields) == (Response.SUCCESS, {})
    assert second.members() == ["a@1"]
    twice.wire.close()
    first.wire.request(Request.NOTIFY_CONSUMER_IDS_CHANGED)
    first.call(Request.UNREGISTER_CLIENT, {"clientID": "a@1", "consumerGroup": name, "producerGroup": "pg"})
    assert first.members() == []


@pytest.mark.slow
def test_a_silent_client_is_forgotten(tmp_path: Path, join: Join) -> None:
    """SG-089, RD-104: its connection is closed and the others are told, while they go on with their heartbeats."""
    with BrokerProcess(tmp_path / "data", "--client-expiry-ms", "8000", "--client-scan-ms", "50") as broker:
        silent, alive = join(broker, "g", "silent@1"), join(broker, "g", "alive@1")
        silent.beat(subscription("T"))
        alive.beat(subscription("T"))

        def alone() -> bool:
            alive.beat(subscription("T"))
            return alive.members() == ["alive@1"]

        wait_until(alone, DEADLINE_S, "the silent member is gone")
        assert alive.told() == 2
        silent.wire.wait_closed()
        assert silent.told() == 2  # it was told of both joins


def test_a_group_can_be_left_in_peace(tmp_path: Path, join: Join) -> None:
    """SG-069, SG-070: a group whose notifyConsumerIdsChangedEnable is false is not told."""
    data = configured(tmp_path / "data", Group("g", notify_consumer_ids_changed_enable=False))
    with BrokerProcess(data) as broker:
        member = join(broker, "g")
        member.beat(subscription("T"))
        assert member.told() == 0


def test_members_that_want_different_things_are_reported(broker: BrokerProcess, name: str, join: Join) -> None:
    """SG-088: once, by name, when it happens; each member's own subscription counts for what it pulls itself."""
    put(broker, f"T{name}", b"a", pairs="TAGS\x01A\x02")
    put(broker, f"T{name}", b"b", pairs="TAGS\x01B\x02")
    one, two = join(broker, name, "one@1"), join(broker, name, "two@1")
    for _ in range(3):
        one.beat(subscription(f"T{name}", "A"))
        two.beat(subscription(f"T{name}", "B"))
    shown = json.loads(one.call(Request.GET_CONSUMER_CONNECTION_LIST, {"consumerGroup": name}).body)
    assert shown["differences"] == {f"T{name}": {"A": ["one@1"], "B": ["two@1"]}}
    (warning,) = [line for line in broker.stderr().splitlines() if f"group={name} " in line]
    assert "WARNING" in warning
    assert f"topic T{name}: A by one@1; B by two@1" in warning
    assert (one.bodies(f"T{name}"), two.bodies(f"T{name}")) == ([b"a"], [b"b"])


# -- groups -----------------------------------------------------------------------------------------------------------


def configured(data: Path, *groups: Group) -> Path:
    """The data folder of a broker that has these groups."""
    table = GroupTable(data, max_groups=100, auto_create=True)
    for group in groups:
        table.put(group)
    table.save(RealDisk(), 1, run_here)
    return data


def saved_groups(data: Path) -> dict[str, dict[str, object]]:
    file = data / SAVED
    return dict(json.loads(file.read_bytes())["subscriptionGroupTable"]) if file.exists() else {}


def test_a_heartbeat_makes_the_group_and_its_retry_topic(tmp_path: Path, join: Join) -> None:
    """SG-055, SG-063, SG-069, SG-070, SG-142: the group is saved when it is made, outlives a kill, and has a retry topic."""
    data = tmp_path / "data"
    with BrokerProcess(data) as broker:
        consumer = join(broker, "g")
        consumer.beat(subscription("T"), subscription("%RETRY%g"), unit=True)
        assert consumer.pull("%RETRY%g").code == Response.PULL_NOT_FOUND
        wait_until(lambda: "g" in saved_groups(data), DEADLINE_S, "the group is saved")
        broker.kill()
        saved = saved_groups(data)
        assert saved["g"] == {
            "brokerId": 0,
            "consumeBroadcastEnable": True,
            "consumeEnable": True,
            "consumeFromMinEnable": True,
            "groupName": "g",
            "notifyConsumerIdsChangedEnable": True,
            "retryMaxTimes": 16,
            "retryQueueNums": 1,
            "whichBrokerWhenConsumeSlowly": 1,
        }
        version = json.loads((data / SAVED).read_bytes())["dataVersion"]
        assert version["counter"] >= 1
        assert version["timestamp"] > 0
        broker.start()
        assert broker.terminate() == 0
        assert saved_groups(data) == saved


def test_groups_are_not_made_by_strangers(tmp_path: Path, join: Join) -> None:
    """SG-069, SG-079: with auto_create_groups off a group that nobody made may not pull, and is told why."""
    with BrokerProcess(tmp_path / "data", "--no-auto-create-groups") as broker:
        put(broker, "T", b"x")
        stranger = join(broker, "stranger")
        stranger.beat(subscription("T"))
        refused = stranger.pull("T")
        assert refused.code == Response.SUBSCRIPTION_GROUP_NOT_EXIST
        assert "auto_create_groups" in (refused.remark or "")
        assert stranger.commit("T", 1).code == Response.SUBSCRIPTION_GROUP_NOT_EXIST
        assert stranger.pull("%RETRY%stranger").code == Response.SUBSCRIPTION_GROUP_NOT_EXIST
        assert join(broker, "TOOLS_CONSUMER").pull_as("T", "*").code == Response.SUCCESS


def test_a_group_name_follows_the_rule(broker: BrokerProcess, join: Join) -> None:
    """SG-079: one whose retry topic could not have a name is refused."""
    for name in ("a b", "x" * 121):
        answer = join(broker, name).call(Request.HEART_BEAT, {}, join(broker, name).heartbeat(subscription("T")))
        assert answer.code == Response.SYSTEM_ERROR
        assert "group name" in (answer.remark or "")


# -- what a pull needs ------------------------------------------------------------------------------------------------


def test_a_pull_needs_a_subscription(broker: BrokerProcess, name: str, join: Join) -> None:
    """SG-055, SG-079: from a heartbeat, as new as the pull's own, or with the pull."""
    put(broker, name, b"x")
    consumer = join(broker, name)
    assert consumer.pull(name).code == Response.SUBSCRIPTION_NOT_EXIST
    nanoseconds = 1_795_257_375_351_123_456
    consumer.beat(subscription(name, "*", version=nanoseconds))
    assert consumer.bodies(name, version=nanoseconds) == [b"x"]
    assert consumer.bodies(name, version=0) == [b"x"]
    assert consumer.pull(name, version=nanoseconds + 1).code == Response.SUBSCRIPTION_NOT_LATEST
    consumer.beat(subscription("other"))
    assert consumer.pull(name).code == Response.SUBSCRIPTION_NOT_EXIST
    assert consumer.pull_as(name, "*").code == Response.SUCCESS
    assert consumer.pull_as(name, "").code == Response.SUCCESS
    assert consumer.pull_as(name, "||").code == Response.SUBSCRIPTION_PARSE_FAILED
    assert consumer.pull("nowhere").code == Response.TOPIC_NOT_EXIST
    assert consumer.pull(name, partition=9).code == Response.SYSTEM_ERROR


def test_a_new_connection_pulls_as_its_group_before_its_heartbeat(broker: BrokerProcess, name: str, join: Join) -> None:
    """SG-079, SG-087: what another member subscribes to counts meanwhile."""
    put(broker, name, b"x")
    join(broker, name, "a@1").beat(subscription(name))
    assert join(broker, name, "b@1").bodies(name) == [b"x"]


def test_a_group_may_be_stopped_and_kept_from_broadcasting(tmp_path: Path, join: Join) -> None:
    """SG-070, SG-079, SG-122: consumeEnable and consumeBroadcastEnable."""
    groups = (Group("stopped", consume_enable=False), Group("cluster", consume_broadcast_enable=False))
    with BrokerProcess(configured(tmp_path / "data", *groups)) as broker:
        put(broker, "T", b"x")
        stopped, cluster = join(broker, "stopped"), join(broker, "cluster")
        stopped.beat(subscription("T"))
        cluster.beat(subscription("T"), model="BROADCASTING")
        assert stopped.pull("T").code == cluster.pull("T").code == Response.NO_PERMISSION
        cluster.beat(subscription("T"))
        assert cluster.bodies("T") == [b"x"]


def test_broadcast_members_each_get_everything(broker: BrokerProcess, name: str, join: Join) -> None:
    """SG-118, SG-122: and the broker keeps no offsets for them."""
    put(broker, name, b"x", b"y")
    one, two = join(broker, name, "one@1"), join(broker, name, "two@1")
    for member in (one, two):
        member.beat(subscription(name), model="BROADCASTING")
        assert member.bodies(name) == [b"x", b"y"]
        assert member.commit(name, 2).code == Response.SUCCESS
    assert one.offset(name, setZeroIfNotFound="false") is None


def test_a_held_pull_is_woken_by_a_text_put(broker: BrokerProcess, name: str, join: Join) -> None:
    """SG-078, SG-084, SG-085: what one protocol puts the other one gets; those that do not match move the consumer on."""
    with TextClient(broker.host, broker.port, timeout_s=DEADLINE_S) as producer:
        producer.create(name, 1)
        consumer = join(broker, name)
        consumer.beat(subscription(name, "TagA"))
        held = consumer.wire.send(
            Request.PULL_MESSAGE, consumer.pull_fields(name, flags=PULL_SUSPENDS, wait_ms=30_000), serialization=COMPACT
        )
        assert consumer.members()  # answered later than the pull arrived
        assert not consumer.wire.answered(held)
        producer.put(name, b"other", attribute="TagB")
        producer.put(name, b"wanted", attribute="TagA")
        answer = consumer.wire.response(held)
        assert (answer.code, answer.fields["nextBeginOffset"]) == (Response.SUCCESS, "2")
        assert consumer.bodies(name) == [b"wanted"]


# -- filters ----------------------------------------------------------------------------------------------------------


def test_tags_and_expressions_filter(broker: BrokerProcess, name: str, join: Join) -> None:
    """SG-079, SG-141, RD-102: each group by its own filter, from heartbeats and pulls; what cannot be read is refused."""
    for body, tag, weight in ((b"1", "A", "5"), (b"2", "B", "50"), (b"3", "C", "500")):
        put(broker, name, body, pairs=f"TAGS\x01{tag}\x02weight\x01{weight}\x02")
    tags, sql = join(broker, f"{name}-tags"), join(broker, f"{name}-sql", serialization=COMPACT)
    tags.beat(subscription(name, "A || C", kind=None))
    sql.beat(subscription(name, "weight BETWEEN 10 AND 100 OR TAGS = 'C'", kind=SQL))
    assert tags.bodies(name) == [b"1", b"3"]
    assert sql.bodies(name) == [b"2", b"3"]
    nothing = sql.pull_as(name, "weight > 1000", SQL)
    assert (nothing.code, nothing.fields["nextBeginOffset"]) == (Response.PULL_RETRY_IMMEDIATELY, "3")
    assert sql.pull_as(name, "weight >", SQL).code == Response.SUBSCRIPTION_PARSE_FAILED
    assert sql.pull_as(name, "x", "GROOVY").code == Response.SUBSCRIPTION_PARSE_FAILED
    sql.beat(subscription(name, "weight >", kind=SQL))
    assert sql.pull(name).code == Response.SUBSCRIPTION_PARSE_FAILED


def test_retried_messages_pass_whatever_the_filter_of_their_topic(broker: BrokerProcess, name: str, join: Join) -> None:
    """SG-079: the retry topic is subscribed to on its own."""
    consumer = join(broker, name)
    consumer.beat(subscription(name, "weight > 10", kind=SQL), subscription(f"%RETRY%{name}"))
    put(broker, f"%RETRY%{name}", b"again", pairs="weight\x011\x02RETRY_TOPIC\x01t\x02")
    assert consumer.bodies(f"%RETRY%{name}") == [b"again"]


def test_filters_are_checked_before_they_are_used(tmp_path: Path, broker: BrokerProcess, join: Join) -> None:
    """SG-079: code 46, and a broker that does not filter by expressions."""

    def check(consumer: Consumer, expression: str, kind: str) -> int:
        body = {"clientId": "c", "group": "g", "subscriptionData": subscription("T", expression, kind=kind)}
        return consumer.call(Request.CHECK_CLIENT_CONFIG, {}, json.dumps(body).encode()).code

    consumer = join(broker, "g")
    assert check(consumer, "a > 1", SQL) == check(consumer, "TagA", "TAG") == Response.SUCCESS
    assert check(consumer, "a >", SQL) == check(consumer, "||", "TAG") == Response.SUBSCRIPTION_PARSE_FAILED
    with BrokerProcess(tmp_path / "data", "--no-sql-filter") as without:
        put(without, "T", b"x")
        plain = join(without, "g")
        assert check(plain, "a > 1", SQL) == Response.SYSTEM_ERROR
        assert plain.pull_as("T", "a > 1", SQL).code == Response.SYSTEM_ERROR
        assert plain.pull_as("T", "*").code == Response.SUCCESS


# -- bodies and locks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'{"consumerDataSet":[]}',
        b'{"clientID":"c","consumerDataSet":{}}',
        b'{"clientID":"c","consumerDataSet":[{"groupName":"g","subscriptionDataSet":[{"topic":"T","subVersion":1.5}]}]}',
    ],
)
def test_a_heartbeat_that_cannot_be_read(broker: BrokerProcess, join: Join, body: bytes) -> None:
    """SG-089: is refused with a reason; the connection goes on."""
    consumer = join(broker, "unread")
    answer = consumer.call(Request.HEART_BEAT, {}, body)
    assert answer.code == Response.SYSTEM_ERROR
    assert answer.remark
    assert consumer.members() == []


@pytest.mark.parametrize("serialization", [JSON, COMPACT])
def test_queues_are_locked_by_one_member(broker: BrokerProcess, name: str, join: Join, serialization: int) -> None:
    """SG-123: the owner keeps them, others get the rest, and groups do not see each other's."""
    one = join(broker, name, "one@1", serialization=serialization)
    two, stranger = join(broker, name, "two@1"), join(broker, f"{name}-other")
    create_topic(one.wire, "T", write=3, read=3)
    assert one.lock("T", 0, 1) == [0, 1]
    assert two.lock("T", 0, 1, 2) == [2]
    assert one.lock("T", 0, 2) == [0]
    assert stranger.lock("T", 0, 1, 2) == [0, 1, 2]
    two.unlock("T", 0)
    assert two.lock("T", 0) == []
    one.unlock("T", 0)
    assert two.lock("T", 0) == [0]


def test_partitions_of_a_topic_are_shared_by_a_group(broker: BrokerProcess, name: str, join: Join) -> None:
    """MQ-008, SG-123, SG-141, MY-001: two members, a partition each, have every message once; another group has all again."""
    with RemotingClient(broker.host, broker.port) as producer:
        create_topic(producer, name, write=2, read=2)
        for partition in (0, 1):
            send(producer, name, b"%d" % partition, partition=partition)
    one, two, other = join(broker, name, "one@1"), join(broker, name, "two@1"), join(broker, f"{name}-other")
    for member in (one, two, other):
        member.beat(subscription(name))
    assert one.bodies(name) + two.bodies(name, partition=1) == [b"0", b"1"]
    one.commit(name, 1)
    two.commit(name, 1, partition=1)
    assert (two.offset(name), one.offset(name, 1)) == (1, 1)
    assert other.bodies(name) + other.bodies(name, partition=1) == [b"0", b"1"]

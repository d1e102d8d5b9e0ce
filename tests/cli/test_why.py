"""Reasons why a group does not consume: each one is planted, and `metaq why-not-consuming` names it."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from metaq.client import Client, ConsumeFrom, Model, ReceivedMessage, connect
from metaq.client.admin.views import GroupView
from metaq.message import MessageQueue
from tests.support.broker import BrokerProcess, RegistryProcess, wait_until
from tests.support.cli import Cli
from tests.support.consumer import Consumer, owned, subscription

DEADLINE_S = 60.0
FIRST = ConsumeFrom.FIRST
OK, WARNING, PROBLEM = 0, 1, 2


@pytest.fixture
def client(broker: BrokerProcess) -> Iterator[Client]:
    with connect(broker.registry) as client:
        yield client


def fill(cli: Cli, client: Client, topic: str, messages: int = 4, *, tag: str | None = None) -> None:
    cli.run("topic", "create", topic, "2")
    with client.producer() as producer:
        for number in range(messages):
            producer.send(topic, b"%d" % number, tag=tag)


def why(cli: Cli, group: str, *flags: str, code: int, watch_s: float = 0.0) -> dict[str, list[str]]:
    """Return the problems that ``why-not-consuming`` finds, by check; each must come with advice."""
    found: dict[str, list[str]] = {}
    for row in cli.rows("why-not-consuming", group, "--watch", str(watch_s), *flags, code=code):
        if row["level"] != "ok":
            assert row["advice"], row
            found.setdefault(row["check"], []).append(row["found"])
    return found


def test_nothing_is_wrong(cli: Cli, client: Client) -> None:
    """E-04: each check in a line; the same under both names."""
    fill(cli, client, "fine")
    heard: list[bytes] = []
    with client.listen("fine", "healthy", lambda message: heard.append(message.body), consume_from=FIRST):
        wait_until(lambda: len(heard) == 4, DEADLINE_S, "all messages")
        text = cli.text("why-not-consuming", "healthy", "--watch", str(DEADLINE_S))
        assert {line.split()[0] for line in text.splitlines()[1:]} == {"ok"}
        assert "→" not in text
        assert cli.text("group", "why-not-consuming", "healthy").splitlines()[0] == text.splitlines()[0]


def test_nobody_consumes(cli: Cli, client: Client) -> None:
    """E-04: no member is connected."""
    fill(cli, client, "left")
    with client.consumer("left", "gone"):
        pass
    assert why(cli, "gone", code=PROBLEM)["consumers"] == ["no consumer is connected"]


def test_no_such_group(cli: Cli, client: Client) -> None:
    """E-04: a name that is nearly right is shown."""
    fill(cli, client, "accounts")
    with client.consumer("accounts", "accounting"):
        (found,) = why(cli, "acounting", code=PROBLEM)["group"]
    assert found.startswith("no broker knows the group acounting; alike: accounting")


def test_members_want_different_things(cli: Cli, broker: BrokerProcess, client: Client) -> None:
    """P17, E-04: who wants what."""
    fill(cli, client, "split", tag="a")
    with (
        connect(broker.registry) as other,
        client.consumer("split", "torn", tags="a"),
        other.consumer("split", "torn", tags="b"),
    ):
        (found,) = why(cli, "torn", code=PROBLEM)["subscriptions"]
    assert found == f"members have different subscriptions to split: TAG a by {client.id}; TAG b by {other.id}"


def test_partitions_without_an_owner(cli: Cli, broker: BrokerProcess, client: Client) -> None:
    """P18, E-04: a member that does not subscribe is given partitions all the same, and nobody consumes them."""
    fill(cli, client, "owned")
    fill(cli, client, "elsewhere")
    named = [[f"nobody consumes owned-{number} of metaq"] for number in (0, 1)]

    def shared() -> bool:
        return why(cli, "shared", "--topic", "owned", code=PROBLEM).get("owners") in named

    with connect(broker.registry) as other, client.consumer("owned", "shared"), other.consumer("elsewhere", "shared"):
        wait_until(shared, DEADLINE_S, "the members share the partitions, and one of those is named")


def test_a_topic_that_is_not_there(cli: Cli, client: Client) -> None:
    """P14, E-04: and one that nobody may read."""
    fill(cli, client, "present")
    with client.consumer("present", "waiting") as consumer:
        consumer.subscribe("absent")
        (found,) = why(cli, "waiting", code=PROBLEM)["topic"]
        assert "none of the 1 live brokers has such a topic" in found
        cli.run("topic", "create", "absent", "--permission", "w")
        (found,) = why(cli, "waiting", code=PROBLEM)["topic"]
        assert "its permissions forbid it" in found
        (found,) = why(cli, "waiting", "--topic", "owned-by-others", code=PROBLEM)["topic"]
        assert "no route for topic owned-by-others" in found


def test_a_topic_that_nobody_subscribes_to(cli: Cli, client: Client) -> None:
    """E-04: the group consumes, but not this."""
    fill(cli, client, "wanted")
    fill(cli, client, "unwanted")
    with client.consumer("wanted", "onesided"):
        assert why(cli, "onesided", "--topic", "unwanted", code=PROBLEM)["topic"] == ["no member subscribes to unwanted"]


def test_stuck_partitions(cli: Cli, client: Client) -> None:
    """P18, E-04: there is something to consume, somebody has it, and the offset does not move."""
    fill(cli, client, "thick", 6)
    with client.consumer("thick", "stuck", consume_from=FIRST) as consumer:
        assert next(iter(consumer)) is not None
        (found,) = why(cli, "stuck", code=PROBLEM, watch_s=1)["progress"]
        assert re.search(r"offsets did not move in \d+ s", found)
        assert "thick-0 of metaq at 0 of 3" in found and "thick-1 of metaq at 0 of 3" in found
        assert "the consumer holds" in found


def test_consuming_is_disabled(cli: Cli, client: Client) -> None:
    """E-04: for the group, or for broadcasts."""
    fill(cli, client, "shut")
    with client.consumer("shut", "barred"):
        cli.run("group", "update", "barred", "--no-consume")
        assert why(cli, "barred", code=PROBLEM)["enabled"] == ["consuming is disabled for the group on metaq"]
    client.admin().update_group(GroupView("quiet", consume_broadcast_enable=False))
    with client.consumer("shut", "quiet", model=Model.BROADCASTING):
        assert why(cli, "quiet", code=PROBLEM)["enabled"] == ["broadcast consuming is disabled for the group on metaq"]


@pytest.mark.parametrize(("tags", "sql"), [("PAID", None), ("*", "TAGS = 'PAID'")], ids=["tag", "sql"])
def test_all_messages_are_filtered_out(cli: Cli, client: Client, tags: str, sql: str | None) -> None:
    """E-04: what is wanted, and what there is."""
    topic, group = ("tagged", "strict") if sql is None else ("propertied", "stricter")
    fill(cli, client, topic, tag="paid")
    with client.listen(topic, group, lambda message: None, tags=tags, sql=sql, consume_from=FIRST) as consumer:
        wait_until(lambda: owned(consumer, topic) == 2, DEADLINE_S, "it has its queues")
        (found,) = why(cli, group, code=WARNING)["filter"]
    assert found == f"{sql or tags} lets none of the newest 4 messages of {topic} pass; their tags: paid"


def test_offsets_beyond_the_end(cli: Cli, client: Client) -> None:
    """E-04: as after lost data; the reset that is advised shows what it would do, and leaves other partitions."""
    fill(cli, client, "truncated")
    with client.pull_consumer("truncated", "ahead") as consumer:
        consumer.commit({MessageQueue("truncated", "metaq", 0): 1000, MessageQueue("truncated", "metaq", 1): 1})
    found = why(cli, "ahead", code=PROBLEM)
    assert found["offsets"] == ["committed offsets lie beyond the end: truncated-0 of metaq at 1000 of 2"]
    (advice,) = [row["advice"] for row in cli.rows("why-not-consuming", "ahead", code=PROBLEM) if row["check"] == "offsets"]
    assert advice == (
        "the topic is a new one, or data was lost; metaq group reset-offset ahead truncated --to-begin --partition 0 "
        "shows what would change"
    )
    command = advice.partition("; metaq ")[2].removesuffix(" shows what would change").split()
    (shown,) = cli.rows(*command)
    assert (shown["partition"], shown["after"], shown["applied"]) == (0, 0, False)
    cli.run(*command, "--yes")
    assert "offsets" not in why(cli, "ahead", code=PROBLEM)
    assert [row["committed"] for row in cli.rows("group", "lag", "ahead")] == [0, 1]


def test_failures_pile_up(cli: Cli, client: Client) -> None:
    """E-04, SG-072: what was given up, and what waits to be delivered again."""

    def fail(message: ReceivedMessage) -> None:
        raise ValueError("no")

    fill(cli, client, "hard")
    with client.listen("hard", "failing", fail, consume_from=FIRST, max_reconsume_times=0):
        wait_until(lambda: len(list(client.admin().dead_letters("failing"))) == 4, DEADLINE_S, "the dead letters")
        assert why(cli, "failing", code=WARNING)["dead letters"] == ["4 messages became dead letters"]
    with client.producer() as producer:
        for _ in range(3):
            producer.send("%RETRY%failing", b"again")
    assert why(cli, "failing", code=PROBLEM)["retries"] == ["3 messages that failed wait to be delivered again"]


@pytest.mark.slow
def test_a_member_that_does_not_answer(cli: Cli, broker: BrokerProcess) -> None:
    """E-04: what it does is not known, and that is said."""
    cli.run("topic", "create", "mute")
    with Consumer(broker, "silent") as member:
        member.beat(subscription("mute"))
        found = why(cli, "silent", code=WARNING)
    assert found["consumers"] == [f"no answer from {member.client_id}"]


@pytest.mark.slow
def test_consumers_that_reach_one_broker_of_two(tmp_path: Path) -> None:
    """P13, E-04: the other one's messages stay."""
    with RegistryProcess(tmp_path / "registry") as registry:
        cli = Cli(registry.address)
        flags = ("--registries", registry.address)
        with (
            BrokerProcess(tmp_path / "a", *flags, "--broker-name", "broker-a") as first,
            BrokerProcess(tmp_path / "b", *flags, "--broker-name", "broker-b") as second,
            connect(registry.address) as client,
        ):
            wait_until(lambda: len(cli.rows("cluster", "brokers")) == 2, DEADLINE_S, "both are registered")
            fill(cli, client, "spread")
            with Consumer(first, "half") as member:
                member.beat(subscription("spread"))
                found = why(cli, "half", code=PROBLEM)
                assert found["reach"] == [f"{member.client_id} not connected to broker-b at {second.address}"]
        shutil.rmtree(first.data)
        shutil.rmtree(second.data)

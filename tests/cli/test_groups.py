"""Groups, dead letters and clusters on the command line."""

import json
from datetime import UTC, datetime

from metaq.client import Client, ConsumeFrom, connect
from metaq.message import MessageQueue
from metaq.protocol.remoting.adminbodies import encode_offsets
from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.frames import RemotingCommand
from tests.support.broker import BrokerProcess, wait_until
from tests.support.cli import Cli
from tests.support.consumer import owned
from tests.support.fakeremoting import FakeRemoting, Reply, Script, route_to

DEADLINE_S = 60.0
FIRST = ConsumeFrom.FIRST


def consume(client: Client, topic: str, group: str, count: int) -> None:
    """Consume so many messages, commit, and leave."""
    with client.consumer(topic, group, consume_from=FIRST) as consumer:
        for _, _ in zip(range(count), consumer, strict=False):
            consumer.commit()


def fill(cli: Cli, client: Client, topic: str, messages: int, partitions: int = 2) -> list[str]:
    """Messages go round the partitions."""
    cli.run("topic", "create", topic, str(partitions))
    with client.producer() as producer:
        return [producer.send(topic, b"%d" % number).id for number in range(messages)]


def lag(cli: Cli, group: str) -> int:
    return sum(int(row["lag"]) for row in cli.rows("group", "lag", group))


def test_list_show_and_lag(cli: Cli, client: Client, broker: BrokerProcess) -> None:
    """E-04, SG-088: members, what each wants and has, and how far the group is."""
    fill(cli, client, "orders", 10)
    with client.consumer("orders", "billing", tags="*", consume_from=FIRST) as consumer:
        for _, _ in zip(range(4), consumer, strict=False):
            consumer.commit()
        wait_until(lambda: owned(consumer, "orders") == 2, DEADLINE_S, "it has its queues")
        (row,) = [row for row in cli.rows("group", "list") if row["group"] == "billing"]
        shown = cli.row("group", "show", "billing")
        text = cli.text("group", "show", "billing")
        assert lag(cli, "billing") == 6
    assert row == {
        "group": "billing",
        "members": 1,
        "model": "clustering",
        "topics": ["orders"],
        "lag": 6,
        "in_flight": None,
        "delayed": None,
        "enabled": True,
    }
    (member,) = shown["clients"]
    assert (member["client_id"], member["language"]) == (client.id, "PYTHON")
    assert member["partitions"] == {"orders": 2}
    assert member["subscriptions"] == {"orders": "*"}
    assert member["registries"] == broker.registry
    assert client.id in text and "orders=2" in text
    assert cli.text("group", "lag", "billing", "--topic", "orders").endswith("6 messages behind\n")
    assert "TOOLS_CONSUMER" not in cli.text("group", "list")
    assert "TOOLS_CONSUMER" in cli.text("group", "list", "--all")


def test_a_group_that_nobody_knows(cli: Cli) -> None:
    """E-04: exit code 1 for each command."""
    for command in ("show", "lag", "delete"):
        assert "no broker knows the group nobody" in cli.run("group", command, "nobody", code=1).stderr
    assert "no broker knows" in cli.run("group", "reset-offset", "nobody", "--to-end", code=1).stderr


def test_reset_shows_then_does(cli: Cli, client: Client) -> None:
    """E-04, SG-118: to the beginning, the end, a time, an offset of one partition."""
    fill(cli, client, "replayed", 8)
    consume(client, "replayed", "readers", 8)
    assert lag(cli, "readers") == 0
    shown = cli.rows("group", "reset-offset", "readers", "replayed", "--to-begin")
    assert [(row["before"], row["after"], row["applied"]) for row in shown] == [(4, 0, False)] * 2
    assert lag(cli, "readers") == 0
    preview = cli.run("group", "reset-offset", "readers", "replayed", "--to-begin")
    assert "--yes" in preview.stderr and "BEFORE" in preview.stdout
    cli.run("group", "reset-offset", "readers", "replayed", "--to-begin", "--yes")
    assert lag(cli, "readers") == 8
    cli.run("group", "reset-offset", "readers", "--to-end", "--yes")
    assert lag(cli, "readers") == 0
    one = cli.rows("group", "reset-offset", "readers", "replayed", "--to-offset", "1", "--partition", "1", "--yes")
    assert [(row["partition"], row["after"]) for row in one] == [(1, 1)]
    assert lag(cli, "readers") == 3
    now = datetime.now(UTC).isoformat()
    assert {row["after"] for row in cli.rows("group", "reset-offset", "readers", "replayed", "--to-time", now)} == {4}
    assert "give one of" in cli.run("group", "reset-offset", "readers", "--to-end", "--to-begin", code=2).stderr


def test_a_new_group_begins_at_the_end_of_a_young_topic_after_a_reset(cli: Cli, client: Client) -> None:
    """As the answers to questions say; it would begin at the first message otherwise."""
    fill(cli, client, "young", 2, partitions=1)
    for group in ("listening", "leasing"):
        cli.run("group", "update", group)
        cli.run("group", "reset-offset", group, "young", "--to-end", "--yes")
    client.producer().send("young", b"new")
    with client.consumer("young", "listening", consume_from=FIRST) as consumer:
        message = consumer.receive(timeout_s=DEADLINE_S)
        assert message is not None
        assert message.body == b"new"
    with client.lease_consumer("young", "leasing", from_first=True) as leasing:
        leased = leasing.receive(timeout_s=DEADLINE_S)
        assert leased is not None
        assert leased.body == b"new"
    with client.consumer("young", "otherwise") as consumer:
        message = consumer.receive(timeout_s=DEADLINE_S)
        assert message is not None
        assert message.body != b"new"


def test_a_reset_leaves_out_topics_that_are_gone(cli: Cli, client: Client) -> None:
    """E-04: of all topics of a group, those that exist are reset; the others are named."""
    for topic in ("early", "late"):
        fill(cli, client, topic, 2, partitions=1)
        consume(client, topic, "survivors", 2)
    with client.consumer("early", "survivors") as consumer:  # it still subscribes to what is gone
        wait_until(lambda: owned(consumer, "early") == 1, DEADLINE_S, "it is a member")
        cli.run("topic", "delete", "early", "--yes")
        done = cli.run("group", "reset-offset", "survivors", "--to-begin", "--yes")
        assert done.stderr == "metaq: the topic early does not exist; it is left out\n"
        assert "1 offsets were set" in done.stdout
        assert cli.row("group", "lag", "survivors", "--topic", "late")["lag"] == 2
        failed = cli.run("group", "reset-offset", "survivors", "late", "early", "--to-end", "--yes", code=1)
        assert "there is no topic early" in failed.stderr
        assert cli.row("group", "lag", "survivors", "--topic", "late")["lag"] == 2


def test_a_reset_that_fails_says_what_was_set() -> None:
    """E-04: the offsets of the topics before the one that fails."""

    def reset(request: RemotingCommand) -> Reply:
        return Reply(Response.SYSTEM_ERROR, remark="not now") if request.fields["topic"] == "b" else Reply()

    def replies(content: object) -> Script:
        return lambda _: Reply(body=json.dumps(content).encode())

    with FakeRemoting(
        get_all_subscriptiongroup_config=replies({"subscriptionGroupTable": {"billing": {"groupName": "billing"}}}),
        query_topics_by_consumer=replies({"topicList": ["a", "b"]}),
        get_consume_stats=replies({"offsetTable": {}}),
        get_min_offset=lambda _: Reply(fields={"offset": "3"}),
        invoke_broker_to_reset_offset=reset,
    ) as broker:
        named = {"cluster": "c", "brokerName": "m", "brokerAddrs": {"0": broker.address}}
        clusters = replies({"brokerAddrTable": {"m": named}, "clusterAddrTable": {"c": ["m"]}})
        broker.scripts |= {
            Request.GET_BROKER_CLUSTER_INFO: clusters,
            Request.GET_ROUTEINFO_BY_TOPIC: route_to({"m": broker.address}, 1),
        }
        failed = Cli(broker.address).run("group", "reset-offset", "billing", "--to-begin", "--yes", code=4)
    assert "1 offsets were set" in failed.stdout
    assert [line.split() for line in failed.stdout.splitlines()[1:-1]] == [["a", "m", "0", "3", "3"]]
    assert "not now" in failed.stderr


def test_a_reset_at_a_broker_that_resets_one_partition_at_a_time() -> None:
    """E-04: RocketMQ 5 looks at the header only, and answers what it has done: it is asked for the others, too."""
    asked: list[str] = []

    def reset(request: RemotingCommand) -> Reply:
        partition, offset = request.fields["queueId"], request.fields["offset"]
        asked.append(partition)
        return Reply(body=encode_offsets({MessageQueue("a", "m", int(partition)): int(offset)}))

    with FakeRemoting(
        get_consume_stats=lambda _: Reply(body=b'{"offsetTable":{}}'),
        get_min_offset=lambda _: Reply(fields={"offset": "0"}),
        get_max_offset=lambda _: Reply(fields={"offset": "9"}),
        invoke_broker_to_reset_offset=reset,
    ) as broker:
        named = {"cluster": "c", "brokerName": "m", "brokerAddrs": {"0": broker.address}}
        clusters = json.dumps({"brokerAddrTable": {"m": named}, "clusterAddrTable": {"c": ["m"]}}).encode()
        broker.scripts |= {
            Request.GET_BROKER_CLUSTER_INFO: lambda _: Reply(body=clusters),
            Request.GET_ROUTEINFO_BY_TOPIC: route_to({"m": broker.address}, 3),
        }
        with connect(broker.address) as client:
            changes = client.admin().reset_offset("billing", "a", 4, apply=True)
    assert [change.after for change in changes] == [4, 4, 4]
    assert asked == ["0", "1", "2"]


def test_reset_of_one_partition_under_a_running_consumer(cli: Cli, client: Client) -> None:
    """SG-118: the members are told, and go on there."""
    fill(cli, client, "again", 4, partitions=1)
    heard: list[bytes] = []
    with client.listen("again", "runners", lambda message: heard.append(message.body), consume_from=FIRST):
        wait_until(lambda: len(heard) == 4, DEADLINE_S, "all messages")
        cli.run("group", "reset-offset", "runners", "again", "--to-offset", "2", "--yes")
        wait_until(lambda: sorted(heard[4:]) == [b"2", b"3"], DEADLINE_S, "the last two once more")


def test_update_and_delete(cli: Cli, client: Client) -> None:
    """E-04, SG-070: what is not given stays; a deleted group has no offsets."""
    fill(cli, client, "short", 2)
    consume(client, "short", "leavers", 2)
    assert cli.row("group", "update", "leavers", "--retry-max-times", "3")["retry_max_times"] == 3
    assert cli.row("group", "update", "leavers", "--no-consume")["retry_max_times"] == 3
    row = cli.row("group", "update", "leavers", "--attribute", "priority.factor=50", "--attribute", "order=key")
    assert (row["priority_factor"], row["order"]) == (50, "key")
    row = cli.row("group", "update", "leavers", "--attribute", "order=")
    assert (row["priority_factor"], row["order"], row["retry_max_times"]) == (50, "none", 3)
    (row,) = [row for row in cli.rows("group", "list") if row["group"] == "leavers"]
    assert row["enabled"] is False
    assert "would delete leavers" in cli.text("group", "delete", "leavers")
    assert cli.row("group", "delete", "leavers", "--yes")["deleted"] is True
    assert "leavers" not in cli.text("group", "list")


def test_clusters_brokers_and_clients(cli: Cli, client: Client, broker: BrokerProcess) -> None:
    """E-04, SG-088: who is connected, as what, from where."""
    fill(cli, client, "watched", 1)
    (row,) = cli.rows("cluster", "brokers")
    assert (row["broker"], row["id"], row["address"], row["state"]) == ("metaq", 0, broker.address, "answers")
    assert row["put_today"] >= 1
    with client.consumer("watched", "watchers"), client.producer("writers") as producer:
        producer.send("watched", b"x")
        wait_until(lambda: "writers" in cli.text("cluster", "clients"), DEADLINE_S, "the producer is known")
        rows = {(row["kind"], row["group"]): row["client_id"] for row in cli.rows("cluster", "clients")}
        shown = cli.row("cluster", "show", "DefaultCluster")
    assert rows["consumer", "watchers"] == rows["producer", "writers"] == client.id
    assert (shown["producers"], shown["consumers"], shown["clients"], shown["brokers"]) == (1, 1, 1, 1)
    assert "no cluster elsewhere" in cli.run("cluster", "show", "elsewhere", code=1).stderr

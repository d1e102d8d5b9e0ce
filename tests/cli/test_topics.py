"""Topics on the command line: through the registry, and at one broker over the text protocol."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from metaq.client import Client, connect
from tests.support.broker import BrokerProcess, RegistryProcess, wait_until
from tests.support.cli import Cli
from tests.support.rest import Rest

DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path_factory.mktemp("topics") / "data", "--no-auto-create-topics") as process:
        yield process
    shutil.rmtree(process.data)


def names(cli: Cli, *flags: str) -> list[str]:
    return [row["topic"] for row in cli.rows("topic", "list", *flags)]


def test_create_grow_and_list(cli: Cli) -> None:
    """E-04, SG-125: seen at once, never fewer partitions, permissions stay unless they are given."""
    assert cli.text("topic", "create", "grown") == "grown has 1 partition\n"
    assert cli.text("topic", "create", "grown", "3", "--permission", "r") == "grown has 3 partitions\n"
    assert cli.row("topic", "create", "grown", "2") == {
        "topic": "grown",
        "partitions": 3,
        "permission": "R-",
        "brokers": ["metaq"],
    }
    (row,) = [row for row in cli.rows("topic", "list") if row["topic"] == "grown"]
    assert row == {
        "topic": "grown",
        "partitions": 3,
        "permission": "R-",
        "ordered": False,
        "brokers": ["metaq"],
        "priority": False,
    }
    assert "SCHEDULE_TOPIC_XXXX" not in names(cli)
    assert "SCHEDULE_TOPIC_XXXX" in names(cli, "--all")
    assert ["grown", "3", "R-", "no", "metaq", "no"] in [line.split() for line in cli.text("topic", "list").splitlines()]


def test_what_a_broker_may_not_do_for_now_is_not_made_a_topics_own(cli: Cli, broker: BrokerProcess, client: Client) -> None:
    """SG-125: a change of a topic while its broker is read-only leaves it writable."""
    admin = client.admin()
    cli.run("topic", "create", "changed")
    admin.update_broker_config(broker.address, brokerPermission="4")
    try:
        wait_until(lambda: cli.row("topic", "show", "changed")["permission"] == "R-", DEADLINE_S, "the route says so")
        assert cli.row("topic", "create", "changed", "2", "--dedupe-window", "10m")["permission"] == "R-"
    finally:
        admin.update_broker_config(broker.address, brokerPermission="6")
    wait_until(lambda: cli.row("topic", "show", "changed")["permission"] == "RW", DEADLINE_S, "the route says so")
    assert cli.row("message", "send", "changed", "x")["topic"] == "changed"


def test_a_change_leaves_partitions_that_are_only_read(cli: Cli, broker: BrokerProcess, client: Client) -> None:
    """E-32: what a shrunk topic has in the others is still to be read, whatever is changed next."""
    with Rest(broker.http) as rest:
        rest.put("/topics/shrunk", {"partitions": 8})
        rest.put("/topics/shrunk", {"partitions": 4})
    assert cli.row("topic", "create", "shrunk", "--permission", "rw")["partitions"] == 4
    (view,) = client.admin().topic_config("shrunk")
    assert (view.write_partitions, view.read_partitions) == (4, 8)


def test_a_topic_gets_and_loses_priorities(cli: Cli, broker: BrokerProcess) -> None:
    """MY-034: a change that does not name them leaves them."""

    def has_priorities() -> bool:
        return any(row["priority"] for row in cli.rows("topic", "list") if row["topic"] == "alarms")

    cli.run("topic", "create", "alarms", "3", "--priority", "--priority-max-wait-ms", "5")
    cli.run("topic", "create", "alarms", "3", "--permission", "rw")
    assert has_priorities()
    sent = cli.row("message", "send", "alarms", "x", "--priority", "1")
    assert sent["partition"] == 1
    cli.run("topic", "create", "alarms", "--no-priority")
    assert not has_priorities()


def test_an_ordered_topic_is_known_to_the_registry(cli: Cli, broker: BrokerProcess) -> None:
    """SG-115: brokers take the order from there, so it stays."""
    cli.run("topic", "create", "trades", "2", "--ordered", "--on", "metaq")
    (row,) = [row for row in cli.rows("topic", "list") if row["topic"] == "trades"]
    assert row["ordered"] is True
    assert "ORDER_TOPIC_CONFIG" in (broker.data / "config" / "kvConfig.json").read_text("utf-8")


def test_show_tells_partitions_messages_and_groups(cli: Cli, broker: BrokerProcess) -> None:
    """SG-088: consumers of a topic, by group."""
    cli.run("topic", "create", "shown", "2")
    with connect(broker.registry) as client:
        for number in range(5):
            client.producer().send("shown", b"%d" % number)
        with client.consumer("shown", "viewers", tags="a || b"):
            row = cli.row("topic", "show", "shown")
            text = cli.text("topic", "show", "shown")
    assert (row["messages"], row["partitions"], row["permission"]) == (5, 2, "RW")
    assert sum(queue["messages"] for queue in row["queues"]) == 5
    assert [queue["partition"] for queue in row["queues"]] == [0, 1]
    assert row["groups"] == [{"group": "viewers", "members": 1, "expression": "a || b", "lag": row["groups"][0]["lag"]}]
    assert "viewers" in text and "BROKER" in text


def test_route(cli: Cli, broker: BrokerProcess) -> None:
    """E-04, SG-102, SG-113: as clients are told it."""
    cli.run("topic", "create", "routed", "4")
    assert cli.rows("topic", "route", "routed") == [
        {
            "broker": "metaq",
            "cluster": "DefaultCluster",
            "role": "master",
            "address": broker.address,
            "write_partitions": 4,
            "read_partitions": 4,
            "permission": "RW",
        }
    ]


def test_delete_asks_first(cli: Cli, broker: BrokerProcess) -> None:
    """E-04: what would go is shown; with --yes it goes, at the broker and in the registry."""
    cli.run("topic", "create", "leaving", "2")
    with connect(broker.registry) as client:
        client.producer().send("leaving", b"x")
    shown = cli.run("topic", "delete", "leaving")
    assert shown.stdout == "would delete leaving with 1 messages on metaq\n"
    assert "--yes" in shown.stderr
    assert "leaving" in names(cli)
    assert cli.row("topic", "delete", "leaving", "--yes")["deleted"] is True
    assert "leaving" not in names(cli)
    cli.run("topic", "route", "leaving", code=1)


def test_one_broker_over_the_text_protocol(cli: Cli, broker: BrokerProcess) -> None:
    """MQ-006, MQ-017: --broker means one broker; it wins over a registry in the environment."""
    assert cli.text("topic", "create", "typed", "2", "--broker", broker.address) == "typed has 2 partitions\n"
    assert cli.row("topic", "create", "typed", "--broker", broker.address) == {"topic": "typed", "partitions": 2}
    assert "typed: partitions 2, messages 0, bytes 0" in cli.text("topic", "list", "--broker", broker.address).splitlines()
    refused = cli.run("topic", "create", "typed", "--permission", "r", "--broker", broker.address, code=2)
    assert "--permission needs a registry" in refused.stderr


# -- which of the causes it is ----------------------------------------------------------------------------------------


def test_no_registry() -> None:
    """P14: the address, and what the operating system says."""
    failed = Cli("127.0.0.1:1").run("topic", "route", "orders", code=3)
    assert "no registry answers" in failed.stderr
    assert "127.0.0.1:1: Connection refused" in failed.stderr


def test_no_topic(cli: Cli) -> None:
    """P14: the brokers live, and none has it."""
    failed = cli.run("topic", "route", "absent", code=1)
    assert failed.stderr == "metaq: there is no topic absent; metaq topic list shows the topics\n"


def test_no_permission(cli: Cli) -> None:
    """P14: the topic is there, and shut."""
    cli.run("topic", "create", "shut", "--permission", "r")
    failed = cli.run("message", "send", "shut", "x", code=4)
    assert "its permissions forbid it" in failed.stderr


def test_no_broker_and_no_live_broker(tmp_path: Path) -> None:
    """P14: nothing is registered, or what had the topic is gone."""
    with RegistryProcess(tmp_path / "registry") as registry:
        cli = Cli(registry.address)
        assert "no broker is registered at" in cli.run("topic", "route", "orders", code=1).stderr
        flags = ("--registries", registry.address, "--broker-name", "broker-a")
        with BrokerProcess(tmp_path / "data", *flags) as broker:
            wait_until(lambda: "broker-a" in cli.text("cluster", "brokers"), DEADLINE_S, "the broker is registered")
            cli.run("topic", "create", "orders")
            assert cli.row("cluster", "list") == {"cluster": "DefaultCluster", "masters": ["broker-a"], "replicas": 0}
            assert broker.terminate() == 0
        shutil.rmtree(broker.data)
        failed = cli.run("topic", "route", "orders", code=3)
        assert "broker broker-a, which had it, was removed" in failed.stderr
        assert "no broker is registered" in cli.run("cluster", "list").stderr


def test_wrong_arguments(cli: Cli) -> None:
    """E-15: what is wrong, and exit code 2."""
    assert "is not the address of a registry" in cli.run("topic", "list", "--registry", ";", code=2).stderr
    assert "is not one of" in cli.run("topic", "create", "t", "--permission", "x", code=2).stderr
    assert "no master of broker nowhere" in cli.run("topic", "create", "t", "--on", "nowhere", code=2).stderr

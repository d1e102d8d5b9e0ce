"""Commands that change several brokers, which differ."""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from metaq.protocol.remoting import fastjson
from metaq.protocol.remoting.codes import Request
from tests.support.admin import ask, ask_body, connect, create_topic
from tests.support.broker import BrokerProcess, RegistryProcess, wait_until
from tests.support.cli import Cli

DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[BrokerProcess]]:
    folder = tmp_path_factory.mktemp("two")
    with RegistryProcess(folder / "registry") as registry, ExitStack() as stack:
        some = []
        for name in ("a", "b"):
            flags = ("--registries", registry.address, "--broker-name", name)
            some.append(stack.enter_context(BrokerProcess(folder / name, *flags)))
            some[-1].registry = registry.address
        wait_until(partial(registered, Cli(registry.address), 2), DEADLINE_S, "both are registered")
        yield some
    shutil.rmtree(folder)


@pytest.fixture
def cli(brokers: list[BrokerProcess]) -> Cli:
    return Cli(brokers[0].registry)


def settings(broker: BrokerProcess, group: str) -> dict[str, Any]:
    with connect(broker) as client:
        row: dict[str, Any] = ask_body(client, Request.GET_SUBSCRIPTIONGROUP_CONFIG, group=group)
    return row


def test_an_update_of_a_group_changes_what_is_named_and_nothing_else(cli: Cli, brokers: list[BrokerProcess]) -> None:
    """E-04, SG-070: on each broker; also what the command has no option for stays."""
    others = {"brokerId": 2, "whichBrokerWhenConsumeSlowly": 3}
    flags = {"consumeFromMinEnable": False, "notifyConsumerIdsChangedEnable": False}
    own: list[dict[str, Any]] = [
        {**others, **flags, "retryMaxTimes": 5},
        {"consumeEnable": False, "attributes": {"order": "key"}},
    ]
    for broker, row in zip(brokers, own, strict=True):
        changes = {f"+{name}": value for name, value in row.get("attributes", {}).items()}
        with connect(broker) as client:
            body = fastjson.encode({"groupName": "differing", **row, "attributes": changes})
            ask(client, Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body)
    before = [settings(broker, "differing") for broker in brokers]

    cli.run("group", "update", "differing")
    assert [settings(broker, "differing") for broker in brokers] == before
    cli.run("group", "update", "differing", "--no-broadcast", "--attribute", "priority.factor=50")
    assert [settings(broker, "differing") for broker in brokers] == [
        {**row, "consumeBroadcastEnable": False, "attributes": {**row.get("attributes", {}), "priority.factor": "50"}}
        for row in before
    ]


def counts(brokers: list[BrokerProcess], topic: str) -> list[tuple[int, int]]:
    """How many partitions take messages on each broker, and how many are read."""
    found = []
    for broker in brokers:
        with connect(broker) as client:
            row = ask_body(client, Request.GET_TOPIC_CONFIG, topic=topic)
        found.append((row["writeQueueNums"], row["readQueueNums"]))
    return found


def test_a_topic_keeps_the_partitions_that_each_broker_has(cli: Cli, brokers: list[BrokerProcess]) -> None:
    """E-04, SG-125: a number is the least that each has; without one they stay, also where none takes messages."""
    for topic, made in (("uneven", [(8, 8), (4, 2)]), ("drained", [(0, 3), (2, 2)]), ("here", [(3, 3)])):
        for broker, (write, read) in zip(brokers, made, strict=False):
            with connect(broker) as client:
                create_topic(client, topic, write=write, read=read)
    for topic in ("uneven", "drained"):
        before = counts(brokers, topic)
        assert cli.row("topic", "create", topic, "--permission", "r")["permission"] == "R-"
        assert counts(brokers, topic) == before
    assert cli.text("topic", "create", "uneven") == "uneven has 8 partitions on a and 4 on b\n"
    assert cli.text("topic", "create", "uneven", "6") == "uneven has 8 partitions on a and 6 on b\n"
    assert counts(brokers, "uneven") == [(8, 8), (6, 6)]
    assert cli.row("topic", "create", "uneven", "9")["partitions"] == 9
    assert cli.text("topic", "create", "here", "--dedupe-window", "1s") == "here has 3 partitions on a and 1 on b\n"
    assert counts(brokers, "here") == [(3, 3), (1, 1)]
    assert cli.row("topic", "create", "drained", "--on", "b")["partitions"] == 2
    cli.run("topic", "create", "drained", "1")
    assert counts(brokers, "drained") == [(1, 3), (2, 2)]


def registered(cli: Cli, brokers: int = 1) -> bool:
    return len(cli.rows("cluster", "brokers")) == brokers


def test_what_is_deleted_while_a_registry_is_down(tmp_path: Path) -> None:
    """E-04, SG-125: the brokers and the other registries forget it, the error says so, and a repeat finishes."""
    with RegistryProcess(tmp_path / "first") as first, RegistryProcess(tmp_path / "second") as second:
        registries = f"{first.address};{second.address}"
        cli, other = Cli(registries), Cli(second.address)
        with BrokerProcess(tmp_path / "broker", "--registries", registries):
            for one in (cli, other):
                wait_until(partial(registered, one), DEADLINE_S, "the broker is registered")
            for topic in ("orders", "%RETRY%billing", "%DLQ%billing"):
                cli.run("topic", "create", topic)
            cli.run("group", "update", "billing")
            first.kill()
            failed = cli.run("topic", "delete", "orders", "--yes", code=3)
            assert first.address in failed.stderr and "the brokers have deleted orders" in failed.stderr
            assert "there is no topic orders" in other.run("topic", "route", "orders", code=1).stderr
            failed = cli.run("group", "delete", "billing", "--yes", code=3)
            assert "the brokers have deleted %RETRY%billing" in failed.stderr
            assert "billing" not in {row["group"] for row in other.rows("group", "list")}

            first.restart(same_port=True)
            wait_until(partial(registered, Cli(first.address)), DEADLINE_S, "the broker is registered again")
            left = {row["topic"] for one in (cli, other) for row in one.rows("topic", "list", "--all")}
            assert not {topic for topic in left if "billing" in topic or topic == "orders"}
            cli.run("topic", "create", "%DLQ%billing")
            assert cli.row("group", "delete", "billing", "--yes")["deleted"] is True
            assert "no broker knows the group billing" in cli.run("group", "delete", "billing", code=1).stderr
            assert "cannot be deleted" in cli.run("group", "delete", "TOOLS_CONSUMER", "--yes", code=4).stderr

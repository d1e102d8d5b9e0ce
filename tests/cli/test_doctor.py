"""`metaq doctor` on real brokers with planted problems."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from metaq.client import Client, ConsumeFrom, connect
from tests.support.broker import BrokerProcess, RegistryProcess, wait_until
from tests.support.cli import Cli
from tests.support.consumer import owned
from tests.support.users import write_users

DEADLINE_S = 60.0
PROBLEM = 2


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    # with so little that has to be free, how full this machine's disk is does not count
    flags = ("--ample-free-bytes", "0", "--clean-ratio", "1", "--force-ratio", "1", "--refuse-ratio", "1")
    with BrokerProcess(tmp_path_factory.mktemp("doctor") / "data", *flags) as process:
        yield process
    shutil.rmtree(process.data)


@pytest.fixture
def client(broker: BrokerProcess) -> Iterator[Client]:
    with connect(broker.registry) as client:
        yield client


def sick(cli: Cli, *flags: str, code: int = PROBLEM) -> dict[str, str]:
    """Return the problems that the doctor finds, by check; each must come with advice."""
    rows = cli.rows("doctor", "--watch", "0", *flags, code=code)
    assert all(row["advice"] for row in rows if row["level"] != "ok"), rows
    return {row["check"]: row["found"] for row in rows if row["level"] != "ok"}


def test_all_is_well(cli: Cli, client: Client, broker: BrokerProcess) -> None:
    """E-04, E-20: one line for each check, and exit code 0."""
    cli.run("topic", "create", "orders", "2")
    with client.consumer("orders", "billing") as consumer:
        wait_until(lambda: owned(consumer, "orders") == 2, DEADLINE_S, "it has its queues")
        text = cli.text("doctor", "--topic", "orders")
    lines = [line.split(maxsplit=1) for line in text.splitlines()[1:]]
    assert {level for level, _ in lines} == {"ok"}
    told = "\n".join(line for _, line in lines)
    assert f"{broker.registry} answers" in told
    assert f"metaq answers at {broker.address}" in told
    assert "metaq accepts and delivers messages" in told
    assert "the clock of metaq agrees with this one" in told
    assert "the disk of metaq is " in told
    assert "orders is on metaq (RW, 2)" in told
    assert "group billing" in told


def test_a_registry_that_is_not_there() -> None:
    """P14, E-04: with what the operating system says; nothing else is asked."""
    reason = "cannot connect to 127.0.0.1:1: Connection refused; check that metaq listens there"
    assert sick(Cli("127.0.0.1:1")) == {"registry": f"127.0.0.1:1 does not answer: {reason}"}


@pytest.mark.slow
def test_a_zookeeper_that_is_not_there() -> None:
    """P14, E-04: without a registry nothing can be asked, and that is a problem."""
    assert sick(Cli("zk://127.0.0.1:1"))["registry"].startswith("no registry answers")


def test_without_a_login(tmp_path: Path) -> None:
    """E-04, E-05: what refuses who asks is there, and no firewall is in the way."""
    users = ("--users-file", str(write_users(tmp_path / "users.yaml")))
    with RegistryProcess(tmp_path / "registry") as registry:
        flags = ("--registries", registry.address, "--broker-name", "shut")
        with BrokerProcess(tmp_path / "a", *flags, *users) as a, BrokerProcess(tmp_path / "b", *users) as b:
            cli = Cli(registry.address)
            wait_until(lambda: len(cli.rows("cluster", "brokers")) == 1, DEADLINE_S, "the broker is registered")
            for there, check, what in (
                (cli, "reached", f"shut answers at {a.address}"),
                (Cli(b.registry), "registry", f"{b.registry} answers"),
            ):
                rows = {row["check"]: row for row in there.rows("doctor", "--watch", "0", code=PROBLEM)}
                assert rows[check]["found"].startswith(f"{what}, and refuses: anonymous may not")
                assert "metaq --user NAME doctor" in rows[check]["advice"] and "firewall" not in rows[check]["advice"]


def test_one_registry_of_two(broker: BrokerProcess) -> None:
    """E-04: each is asked by itself."""
    found = sick(Cli(f"{broker.registry};127.0.0.1:1"))
    assert "127.0.0.1:1 does not answer" in found["registry"]


def test_no_broker_and_registries_that_disagree(broker: BrokerProcess, tmp_path: Path) -> None:
    """P14, E-04: a broker that does not name all of them."""
    with RegistryProcess(tmp_path / "registry") as registry:
        assert sick(Cli(registry.address)) == {"brokers": "no broker is registered"}
        found = sick(Cli(f"{registry.address};{broker.registry}"), code=1)
        assert found["registry"] == (f"registries know different brokers: {registry.address}: none; {broker.registry}: metaq")


def test_advertised_addresses_that_lead_nowhere_or_elsewhere(broker: BrokerProcess, tmp_path: Path) -> None:
    """P13, E-20: nobody answers there, or another broker does."""
    with (
        RegistryProcess(tmp_path / "registry") as registry,
        BrokerProcess(
            tmp_path / "a", "--registries", registry.address, "--broker-name", "lost", "--advertise", "127.0.0.1:1"
        ) as a,
    ):
        cli = Cli(registry.address)
        wait_until(lambda: len(cli.rows("cluster", "brokers")) == 1, DEADLINE_S, "the broker is registered")
        found = sick(cli)
        assert found["reached"].startswith(
            "lost cannot be reached at 127.0.0.1:1: cannot connect to 127.0.0.1:1: Connection refused"
        )
        assert found["topics"] == "topics and groups were not checked: not every master can be asked"
        assert a.terminate() == 0
    flags = ("--registries", broker.registry, "--broker-name", "double", "--advertise", broker.address)
    with BrokerProcess(tmp_path / "b", *flags) as b:
        cli = Cli(broker.registry)
        wait_until(lambda: len(cli.rows("cluster", "brokers")) == 2, DEADLINE_S, "the broker is registered")
        assert sick(cli)["reached"] == f"metaq answers at {broker.address}, where clients look for double"
        assert b.terminate() == 0
    shutil.rmtree(a.data)
    shutil.rmtree(b.data)


def test_a_broker_that_is_restricted(cli: Cli, client: Client, broker: BrokerProcess) -> None:
    """E-04: as a whole, and how that shows in a topic's route."""
    cli.run("topic", "create", "routed")
    admin = client.admin()
    admin.update_broker_config(broker.address, brokerPermission="4")
    try:
        found = sick(cli, "--topic", "routed")
        assert found["writable"] == "the permission of metaq is only R-"
        assert found["route"] == "routed accepts no messages on metaq"
    finally:
        admin.update_broker_config(broker.address, brokerPermission="6")


def test_topics_that_are_shut_or_absent(cli: Cli) -> None:
    """P14, E-04: permissions that may not be meant, and a topic without a route."""
    cli.run("topic", "create", "shut", "--permission", "w")
    try:
        assert sick(cli, code=1)["topics"] == "clients cannot both send and consume: shut (-W)"
        assert "none of the 1 live brokers has such a topic" in sick(cli, "--topic", "nowhere")["route"]
    finally:
        cli.run("topic", "delete", "shut", "--yes")


def test_groups_that_do_not_consume(cli: Cli, broker: BrokerProcess, client: Client) -> None:
    """P17, P18, E-04: differing subscriptions, partitions without owner, and one that is stuck."""
    cli.run("topic", "create", "sickly", "2")
    with client.producer() as producer:
        for _ in range(4):
            producer.send("sickly", b"x", tag="a")
    with (
        connect(broker.registry) as other,
        client.consumer("sickly", "ill", tags="a", consume_from=ConsumeFrom.FIRST),
        other.consumer("sickly", "ill", tags="b", consume_from=ConsumeFrom.FIRST),
    ):
        rows = cli.rows("doctor", "--watch", "1", code=PROBLEM)
        found = " ".join(row["found"] for row in rows if row["check"] == "group ill")
    assert "subscriptions: members have different subscriptions to sickly" in found
    assert re.search(r"progress: offsets did not move in \d+ s", found)
    assert "consumers: no consumer is connected" in sick(cli, "--group", "ill")["group ill"]


def test_a_broker_whose_disk_is_full(tmp_path: Path) -> None:
    """E-04: it says itself that it stores nothing, and why."""
    with BrokerProcess(tmp_path / "data", "--least-free-bytes", str(1 << 60)) as broker:
        found = sick(Cli(broker.registry))
        assert found["writable"].startswith("metaq cannot store messages: ")
    shutil.rmtree(broker.data)

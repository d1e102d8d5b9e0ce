"""Replicas on the command line: their status, a master chosen by an operator, and a new replica."""

import json
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from metaq.client import TextClient
from metaq.config import check, gather_settings
from metaq.protocol.remoting.codes import Request, Response
from metaq.server.wire.listeners import parse_registries
from tests.support.admin import connect, fields_of
from tests.support.broker import BrokerProcess, RegistryProcess, wait_until
from tests.support.cli import Cli
from tests.support.cluster import Cluster, ReplicaProcess, wait_caught_up
from tests.support.fakeremoting import FakeRemoting, Reply
from tests.support.ports import free_ports

DEADLINE_S = 60.0
NAME = "metaq"


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[RegistryProcess]:
    with RegistryProcess(tmp_path / "registry") as process:
        yield process


@pytest.fixture
def cluster(tmp_path: Path, registry: RegistryProcess) -> Iterator[Cluster]:
    with Cluster(tmp_path, "--registries", registry.address) as cluster:
        yield cluster
    for folder in tmp_path.glob("replica*"):
        if folder.is_dir():
            shutil.rmtree(folder)


@pytest.fixture
def cli(registry: RegistryProcess) -> Cli:
    return Cli(registry.address)


def standing(cli: Cli) -> dict[int, dict[str, Any]]:
    """The rows of ``status`` by replica."""
    return {row["replica"]: row for row in cli.rows("cluster", "status")}


def wait_rows(cli: Cli, **roles: str) -> dict[int, dict[str, Any]]:
    """Wait until the registry knows replicas in these roles (``r1="master"``), and they answer."""
    wanted = {int(name[1:]): role for name, role in roles.items()}
    found: dict[int, dict[str, Any]] = {}

    def stands() -> bool:
        nonlocal found
        found = standing(cli)
        return {number: row["role"] for number, row in found.items() if row["end"] is not None} == wanted

    wait_until(stands, DEADLINE_S, f"the registry knows {wanted}")
    return found


def put(broker: BrokerProcess, *bodies: bytes) -> None:
    with TextClient(broker.host, broker.port) as client:
        for body in bodies:
            client.put("orders", body)


def bodies(broker: BrokerProcess) -> list[bytes]:
    with TextClient(broker.host, broker.port) as client:
        return [message.body for message in client.get("orders").messages]


def test_status(cluster: Cluster, cli: Cli) -> None:
    """SG-035: roles, epochs, how far each is, who is in sync; one that is gone does not hide the others."""
    master, slave = cluster.pair()
    put(master, b"one")
    end = wait_caught_up(master, slave)
    rows = wait_rows(cli, r1="master", r2="slave")
    first, second = rows[1], rows[2]
    epoch = master.status()["epoch"]
    assert (first["broker"], first["address"], first["epoch"], first["end"]) == (NAME, master.address, epoch, end)
    assert first["in_sync_set"] == [1, 2] and first["min_in_sync"] == 2 and first["state"] == "answers"
    assert (second["address"], second["epoch"], second["readable_end"]) == (slave.address, epoch, end)
    assert (second["lag_bytes"], second["lag_s"], second["in_sync"]) == (0, 0, True)
    assert second["state"] == f"follows {master.replication}"
    table = cli.text("cluster", "status", NAME)
    assert "IN SYNC SET" in table and "1, 2" in table and slave.address in table
    assert "no broker nobody is registered" in cli.run("cluster", "status", "nobody", code=1).stderr
    master.kill()
    slave.wait_for(master="")
    wait_until(lambda: set(standing(cli)) == {2}, DEADLINE_S, "the registry has noticed")
    (row,) = cli.rows("cluster", "status")
    assert row["in_sync"] and row["lag_bytes"] == 0 and "follows" not in row["state"]


def test_status_without_replicas(tmp_path: Path) -> None:
    """SG-035: a broker that takes no slaves is there, and says so."""
    with BrokerProcess(tmp_path / "data") as broker:
        row = Cli(broker.registry).row("cluster", "status")
        assert (row["role"], row["state"], row["end"]) == ("master", "takes no slaves", None)
        refused = Cli(broker.registry).run("cluster", "add-slave", NAME, code=2).stderr
        assert "replication_listen" in refused
    shutil.rmtree(tmp_path / "data")


@pytest.mark.slow
def test_promote_and_demote(cluster: Cluster, cli: Cli) -> None:
    """SG-083, MQ-069, MY-006, P26: nothing changes without --yes; the old master comes back as a slave of the new one."""
    master, slave = cluster.pair()
    put(master, b"one")
    wait_caught_up(master, slave)
    epoch = wait_rows(cli, r1="master", r2="slave")[1]["epoch"]
    warned = cli.run("cluster", "promote", NAME)
    assert "two masters" in warned.stderr and "nothing was changed" in warned.stderr and "in sync" in warned.stdout
    assert slave.status()["role"] == "slave"
    master.kill()
    wait_until(lambda: set(standing(cli)) == {2}, DEADLINE_S, "the registry has noticed")
    shown = cli.run("cluster", "promote", NAME)
    assert "two masters" not in shown.stderr and "not in sync" not in shown.stderr
    cli.run("cluster", "promote", NAME, "--yes")
    assert wait_rows(cli, r2="master")[2]["epoch"] == epoch + 1
    assert "no slave" in cli.run("cluster", "promote", NAME, code=2).stderr

    master.restart()
    wait_until(lambda: master.stands(role="master"), DEADLINE_S, "two masters")
    assert (
        "are removed from its log"
        in cli.run("cluster", "demote", NAME, "--at", master.address, "--master", slave.replication).stderr
    )
    cli.run("cluster", "demote", NAME, "--at", master.address, "--yes", "--master", slave.replication)
    slave.wait_for(in_sync=[1, 2])
    wait_rows(cli, r1="slave", r2="master")
    put(slave, b"two")
    wait_caught_up(slave, master)
    assert bodies(master) == [b"one", b"two"]
    assert "no other replica" in cli.run("cluster", "demote", NAME, code=2).stderr


def test_promote_by_address(cluster: Cluster) -> None:
    """SG-083: without a registry, too; a slave that was not in sync, or another broker, is not taken for the right one."""
    master, slave = cluster.pair()
    nowhere = Cli("127.0.0.1:1")
    master.kill()
    slave.restart()
    asked = ("cluster", "promote", NAME, "--at", slave.address)
    assert "not in sync" in nowhere.run(*asked).stderr
    assert "not orders" in nowhere.run("cluster", "promote", "orders", "--at", slave.address, code=2).stderr
    nowhere.run("cluster", "promote", NAME, code=3)
    nowhere.run(*asked, "--yes")
    assert slave.status()["role"] == "master"


def replica_view(number: int, role: str, *, leads: bool = False) -> Reply:
    """The state of one of two replicas that elect their master."""
    view = {"role": role, "replica": number, "epoch": 3, "begin": 0, "end": 10, "durable_end": 10}
    view |= {"readable_end": 10, "in_sync": [1, 2], "min_in_sync": 2, "replication": "h:1", "master": "", "master_end": 10}
    return Reply(body=json.dumps({**view, "problem": None, "slaves": [], "elects": True, "leads": leads}).encode())


def brokers_named_a(master: FakeRemoting, slave: FakeRemoting) -> Reply:
    """What a registry answers that knows these two."""
    broker = {"cluster": "c", "brokerName": "a", "brokerAddrs": {"0": master.address, "2": slave.address}}
    info = {"brokerAddrTable": {"a": broker}, "clusterAddrTable": {"c": ["a"]}}
    return Reply(body=json.dumps(info).encode())


def test_hand_over() -> None:
    """P25, MQ-070: the master is told which slave takes its place, and the command ends when that one is master."""
    roles = {1: "master", 2: "slave"}

    def hand_over(request: Any) -> Reply:
        assert request.fields == {"replica": "2"}
        roles.update({1: "slave", 2: "master"})
        return Reply()

    with (
        FakeRemoting(replica_status=lambda _: replica_view(1, roles[1]), hand_over=hand_over) as master,
        FakeRemoting(replica_status=lambda _: replica_view(2, roles[2])) as slave,
        FakeRemoting(get_broker_cluster_info=lambda _: brokers_named_a(master, slave)) as registry,
    ):
        cli = Cli(registry.address)
        assert "nothing was changed" in cli.run("cluster", "handover", "a").stderr
        warned = cli.run("cluster", "promote", "a", "--replica", "2").stderr
        assert "no other replica can be made master while it is there" in warned and "two masters" not in warned
        assert master.count(Request.HAND_OVER) == 0
        done = cli.run("cluster", "handover", "a", "--to", "2", "--yes")
        assert "replica 2 of a" in done.stderr and "is master now, epoch 3" in done.stderr
        assert master.count(Request.HAND_OVER) == 1


def test_one_that_cannot_be_master_hands_over() -> None:
    """MQ-070, F-FULL: it was elected, and its disk has no room; the command finds it although it says that it is a slave."""
    roles = {1: "slave", 2: "slave"}

    def hand_over(request: Any) -> Reply:
        roles[2] = "master"
        return Reply()

    with (
        FakeRemoting(replica_status=lambda _: replica_view(1, roles[1], leads=True), hand_over=hand_over) as full,
        FakeRemoting(replica_status=lambda _: replica_view(2, roles[2])) as other,
        FakeRemoting(get_broker_cluster_info=lambda _: brokers_named_a(full, other)) as registry,
    ):
        done = Cli(registry.address).run("cluster", "handover", "a", "--yes")
        assert "replica 2 of a" in done.stderr and "is master now, epoch 3" in done.stderr


@pytest.mark.parametrize(
    ("command", "way"),
    [
        (("promote", "a", "--replica", "2"), "; a loss is accepted with --accept-loss"),
        (("promote", "a", "--replica", "2", "--accept-loss"), ""),
        (("demote", "a", "--replica", "1", "--master", "h:2"), "; metaq cluster handover a hands over"),
    ],
)
def test_a_refusal_is_shown_with_the_command_that_helps(command: tuple[str, ...], way: str) -> None:
    """SG-083: brokers name no commands, since the console shows their refusals as well."""
    refused = Reply(Response.SYSTEM_ERROR, remark="it must not be")
    with (
        FakeRemoting(replica_status=lambda _: replica_view(1, "master"), change_role=lambda _: refused) as master,
        FakeRemoting(replica_status=lambda _: replica_view(2, "slave"), change_role=lambda _: refused) as slave,
        FakeRemoting(get_broker_cluster_info=lambda _: brokers_named_a(master, slave)) as registry,
    ):
        told = Cli(registry.address).run("cluster", *command, "--yes", code=4).stderr
        assert f"it must not be{way}\n" in told


def test_add_slave(cluster: Cluster, cli: Cli, tmp_path: Path) -> None:
    """SG-036, SG-040, MQ-102, ES-018, ES-019, P06: the printed command starts a slave that copies all; progress is shown."""
    own = ("--http-listen", f"127.0.0.1:{free_ports(1)[0]}")
    master = cluster.add(
        1, "", "--min-in-sync", "1", "--max-body-bytes", "70000", "--no-auto-create-groups", "--order-message-enable", *own
    )
    put(master, *(b"x" * 1000 for _ in range(50)))
    wait_until(lambda: len(standing(cli)) == 1, DEADLINE_S, "the master is registered")
    printed = cli.row("cluster", "add-slave", NAME, "--data", str(tmp_path / "replica2"))
    wanted = {"role": "slave", "replica_number": "2", "master": master.replication, "segment_bytes": str(32 * 1024 * 1024)}
    assert printed["settings"].items() >= {**wanted, "min_in_sync": "1", "max_body_bytes": "70000"}.items()
    assert "http_listen" not in printed["settings"]
    assert {"--no-auto-create-groups", "--order-message-enable"} <= set(printed["command"])
    line = cli.text("cluster", "add-slave", NAME, "--data", str(tmp_path / "replica2"))
    assert shlex.split(line) == printed["command"]
    late = cli.run("cluster", "add-slave", NAME, "--wait", "0.1", code=1).stderr
    assert "has not come yet" in late and "not in sync after 0.1 s" in late

    slave = cluster.enter_context(Printed(tmp_path / "replica2", printed["command"]))
    shown = cli.run("cluster", "add-slave", NAME, "--replica", "2", "--wait", str(DEADLINE_S)).stderr
    assert "replica 2 holds" in shown and "in sync" in shown
    assert len(bodies(slave)) == 50


@pytest.mark.parametrize(
    ("named", "expected"), [("", {}), ("mq1:9876", {"registries": "{registry}"})], ids=["its own registry", "registries"]
)
def test_add_slave_where_masters_are_elected(named: str, expected: dict[str, str]) -> None:
    """SG-036, SG-082: it stands for election, too, and names no registry where each broker has one inside."""
    reply = Reply(body=f"broker_name=a\ncluster_name=c\nzookeeper=zk:2181\nregistries={named}\n".encode())
    with (
        FakeRemoting(replica_status=lambda _: replica_view(1, "master"), get_broker_config=lambda _: reply) as master,
        FakeRemoting(replica_status=lambda _: replica_view(2, "slave"), get_broker_config=lambda _: reply) as slave,
        FakeRemoting(get_broker_cluster_info=lambda _: brokers_named_a(master, slave)) as registry,
    ):
        printed = Cli(f" {registry.address};").row("cluster", "add-slave", "a")["settings"]
    own = {"role": "elected", "replica_number": "3", "zookeeper": "zk:2181"}
    wanted = {**own, **{name: value.format(registry=registry.address) for name, value in expected.items()}}
    assert {name: printed.get(name) for name in (*own, "registries", "master") if name in printed} == wanted
    settings = check(gather_settings(None, {}, printed))
    assert [str(address) for address in parse_registries(settings)] == [*filter(None, [wanted.get("registries")])]


class Printed(ReplicaProcess):
    """A slave as the printed command starts it, but on free ports."""

    def __init__(self, data: Path, command: list[str]) -> None:
        super().__init__(data, 2, "", durability="replica")
        assert command[:2] == ["metaq", "serve"]
        self._command = command[2:]

    def own_flags(self) -> list[str]:
        ports = ["--replication-listen", "127.0.0.1:0", "--remoting-listen", "none", "--http-listen", "127.0.0.1:0"]
        return [*self._command, *ports]


def test_slaves_that_are_set_otherwise(cluster: Cluster, cli: Cli) -> None:
    """SG-035: a slave that its master refuses says why; one that would behave otherwise as master is told, too."""
    master = cluster.add(1)
    cluster.add(2, master.replication, "--max-body-bytes", "70000")
    refused = cluster.add(3, master.replication, "--segment-bytes", str(16 * 1024 * 1024))
    refused.wait_problem("segment_bytes")
    rows = wait_rows(cli, r1="master", r2="slave", r3="slave")
    assert "segment_bytes" in rows[3]["state"] and not rows[3]["in_sync"]
    told = cli.run("cluster", "add-slave", NAME).stderr
    assert "max_body_bytes is 70000, not 1048576" in told and "segment_bytes is 16777216, not 33554432" in told
    assert (
        "replica 3 does not follow: " in cli.run("cluster", "add-slave", NAME, "--replica", "3", "--wait", "0", code=1).stderr
    )


@pytest.mark.slow
def test_the_doctor(cluster: Cluster, cli: Cli) -> None:
    """E-04, MQ-101, SG-140: too few replicas in sync, and a slave that follows nobody; and that all is well."""

    def found(level: str) -> str:
        rows = [json.loads(line) for line in cli.run_any("doctor", "--watch", "0", "--json").stdout.splitlines()]
        return "\n".join(row["found"] for row in rows if (row["check"], row["level"]) == ("replicas", level))

    master, slave = cluster.pair()
    wait_rows(cli, r1="master", r2="slave")
    assert found("ok") == "2 replicas of metaq are in sync" and not found("warning") + found("problem")
    slave.pause()
    master.wait_for(in_sync=[1])
    put_unsafe(master)
    lacks = "1 replicas of metaq are in sync, 2 are needed (min_in_sync): no message is safe"
    wait_until(lambda: found("problem") == lacks, DEADLINE_S, "it says so")
    slave.go_on()
    master.wait_for(in_sync=[1, 2])
    master.kill()
    slave.wait_for(master="")
    wait_until(lambda: "does not follow a master" in found("problem"), DEADLINE_S, "it says so")


def put_unsafe(master: ReplicaProcess) -> None:
    """A message that is stored, although too few replicas are in sync."""
    with connect(master) as client:
        fields = fields_of(a="pg", b="orders", c="TBW102", d=4, e=0, f=0, g=1700000000000, h=0, i="", j=0, k=False)
        assert client.call(Request.SEND_MESSAGE_V2, fields, b"x").code == Response.SLAVE_NOT_AVAILABLE


def test_the_doctor_finds_two_masters(tmp_path: Path) -> None:
    """MQ-068: of one name, at registries that know nothing of each other."""
    with RegistryProcess(tmp_path / "one") as one, RegistryProcess(tmp_path / "two") as two, Cluster(tmp_path) as cluster:
        master = cluster.add(1, "", "--registries", one.address)
        slave = cluster.add(2, master.replication, "--registries", two.address)
        master.wait_for(in_sync=[1, 2])
        slave.promote()
        cli = Cli(f"{one.address};{two.address}")

        def told() -> bool:
            return "metaq has 2 masters: " in cli.run_any("doctor", "--watch", "0").stdout

        wait_until(told, DEADLINE_S, "two masters are found")
    for data in tmp_path.glob("replica?"):
        shutil.rmtree(data)


def test_how_far_a_slave_may_lag(cluster: Cluster) -> None:
    """MQ-102: one that stands still is out of sync ``replica_lag_ms`` after it last held everything, though its link stays."""
    cluster.flags = (*cluster.flags, "--replica-lag-ms", "700", "--min-in-sync", "1")
    cluster.durability = "memory"
    master, slave = cluster.pair()
    slave.pause()
    put(master, b"x")
    seen: list[Any] = []

    def left() -> bool:
        status = master.status()
        seen.extend(row for row in status["slaves"] if row["in_sync"] and row["lag_ms"])
        return bool(status["in_sync"] == [1])

    wait_until(left, DEADLINE_S, "the slave is out of sync")
    assert "slave gone" not in master.stderr()  # as it would be after 10 s of silence
    assert seen and max(row["lag_ms"] for row in seen) < 5000
    slave.go_on()
    master.wait_for(in_sync=[1, 2])

"""The brokers of a cluster with their replicas, as any one of them shows them."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from metaq.registry.processes import Process
from metaq.server.registering.cluster import ProcessReport, ProcessState
from metaq.server.services.operating.cluster import _readable_member
from tests.support.broker import BrokerProcess, RegistryProcess, wait_until
from tests.support.cluster import Cluster, ReplicaProcess
from tests.support.rest import Rest
from tests.support.users import ADMIN, write_users

DEADLINE_S: Final = 60.0
SAID_WITHIN_S: Final = 10.0


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ReplicaProcess]]:
    """A master with two slaves, and a registry that knows all three."""
    folder: Path = tmp_path_factory.mktemp("replicas")
    with RegistryProcess(folder / "registry") as registry, Cluster(folder, "--registries", registry.address) as cluster:
        master = cluster.add(1)
        slaves = [cluster.add(number, master.replication) for number in (2, 3)]
        master.wait_for(in_sync=[1, 2, 3])
        yield [master, *slaves]


class Odd(NamedTuple):
    """A process that reports its state in another form."""

    info: dict[str, str]
    replica: dict[str, Any] | None = None


@pytest.mark.parametrize(
    "odd", [Odd({"putTps": "many"}), Odd({"metaqLag": ""}), Odd({}, {"replica": 2, "slaves": []}), Odd({}, {"in_sync": 7})]
)
def test_an_odd_report_hides_nothing_else(odd: Odd) -> None:
    """SG-102: it is that process's problem."""
    report = ProcessReport(odd.info, odd.replica)
    state = ProcessState(Process("c", "strange", 2, "10.0.0.1:10911"), True, report, None, 5, 2)
    shown = _readable_member(state, {}, is_own=False)
    assert (shown.broker, shown.reachable, shown.reached_ms) == ("strange", False, 5)
    assert shown.problem is not None and "cannot be read" in shown.problem


def members(rest: Rest) -> dict[int, dict[str, Any]]:
    """The members by number."""
    return {row["replica"]: row for row in rest.get("/cluster")["members"]}


def test_each_shows_all_and_a_lost_master(replicas: list[ReplicaProcess]) -> None:
    """SG-102: the same three from each of them; after SIGKILL the others say so within 10 s, and who is back is."""
    master, second, _ = replicas
    for replica in replicas:
        with Rest(replica.http) as rest:
            wait_until(lambda: members(rest).keys() == {1, 2, 3}, DEADLINE_S, "all are registered", 0.2)
            found = members(rest)
            assert [number for number, row in found.items() if row["own"]] == [replica.number]
            assert {number: row["role"] for number, row in found.items()} == {1: "master", 2: "slave", 3: "slave"}
            assert {number: row["address"] for number, row in found.items()} == {one.number: one.address for one in replicas}
            assert all(row["reachable"] and row["registered"] and row["problem"] is None for row in found.values())
            assert all(row["in_sync"] and row["log_end"] is not None and row["version"] for row in found.values())
            assert found[2]["lag_bytes"] is not None
            assert rest.get("/cluster")["without_master"] == []
    with Rest(second.http) as rest:
        master.kill()
        killed_s = time.monotonic()
        wait_until(lambda: not members(rest)[1]["reachable"], SAID_WITHIN_S, "the master is said to be lost", 0.1)
        assert time.monotonic() - killed_s < SAID_WITHIN_S
        lost = members(rest)[1]
        assert (lost["role"], lost["address"]) == ("master", master.address)
        assert "refused" in lost["problem"]
        assert lost["reached_ms"] > 0
        wait_until(lambda: not members(rest)[1]["registered"], DEADLINE_S, "the registry has noticed", 0.2)
        assert rest.get("/cluster")["without_master"] == [lost["broker"]]
        master.restart()
        wait_until(lambda: members(rest)[1]["reachable"], DEADLINE_S, "it is back", 0.2)
        assert len(rest.get("/cluster")["members"]) == 3


def test_brokers_with_users_and_without_a_registry(tmp_path: Path) -> None:
    """E-05, E-32: a cluster_user is answered; what a broker refuses is said; without a registry all were seen before."""
    users = write_users(tmp_path / "users.yaml")
    with RegistryProcess(tmp_path / "registry") as registry:
        flags = ("--users-file", str(users), "--registries", registry.address)
        known, stranger = (
            BrokerProcess(tmp_path / name, "--broker-name", name, *flags, *more)
            for name, more in (("known", ("--cluster-user", ADMIN.name)), ("stranger", ()))
        )
        with known, stranger, Rest(known.http, ADMIN) as at_known, Rest(stranger.http, ADMIN) as at_stranger:

            def both(rest: Rest) -> dict[str, dict[str, Any]]:
                return {row["broker"]: row for row in rest.get("/cluster")["members"]}

            wait_until(lambda: len(both(at_known)) == 2, DEADLINE_S, "both are registered", 0.2)
            assert all(row["reachable"] and row["problem"] is None for row in both(at_known).values())
            wait_until(lambda: len(both(at_stranger)) == 2, DEADLINE_S, "both are registered", 0.2)
            assert "log in first" in both(at_stranger)["known"]["problem"]
            assert both(at_stranger)["stranger"]["reachable"]
            registry.kill()
            wait_until(lambda: at_known.get("/cluster")["problem"] is not None, DEADLINE_S, "there is no registry", 0.2)
            assert all(row["reachable"] and row["registered"] for row in both(at_known).values())

"""The processes of a cluster that are remembered when no registry knows them any more."""

from typing import Final

from metaq.registry.processes import FORGET_S, MOST_PROCESSES, Process, SeenProcesses

MASTER: Final = Process("c", "orders", 0, "10.0.0.1:8123")
SLAVE: Final = Process("c", "orders", 2, "10.0.0.2:8123")


def by_address(*members: Process) -> dict[str, Process]:
    return {member.address: member for member in members}


def test_a_lost_process_is_remembered_for_an_hour() -> None:
    """E-32: and is no longer lost when a registry knows it again."""
    members = SeenProcesses({})
    members.listed(by_address(MASTER, SLAVE), 0.0)
    members.listed(by_address(SLAVE), 10.0)
    assert members.lost(by_address(SLAVE)) == by_address(MASTER)
    assert members.lost(by_address(MASTER, SLAVE)) == {}
    members.listed(by_address(SLAVE), FORGET_S + 1)
    assert members.lost(by_address(SLAVE)) == {}


def test_a_replica_that_has_moved_is_not_lost() -> None:
    """E-32: the same replica of the same broker, at another address; other replicas stay."""
    members, moved = SeenProcesses({}), MASTER._replace(address="10.0.0.9:8123")
    members.listed(by_address(MASTER, SLAVE), 0.0)
    members.reached(MASTER.address, 1, 1)
    members.reached(SLAVE.address, 2, 1)
    members.listed(by_address(moved), 1.0)
    assert members.lost(by_address(moved)) == by_address(MASTER, SLAVE)
    members.reached(moved.address, 1, 2)
    assert members.lost(by_address(moved)) == by_address(SLAVE)
    assert (members.last(moved.address), members.last(SLAVE.address), members.last(MASTER.address)) == ((2, 1), (1, 2), None)
    members.reached(MASTER.address, 1, 3)
    assert members.last(MASTER.address) is None


def test_their_number_is_bounded() -> None:
    """E-32: the oldest are forgotten first."""
    members = SeenProcesses({})
    for number in range(3 * MOST_PROCESSES):
        members.listed(by_address(Process("c", "b", 0, f"10.0.0.1:{number}")), 0.0)
    known = members.lost({})
    assert len(known) == 2 * MOST_PROCESSES
    assert f"10.0.0.1:{3 * MOST_PROCESSES - 1}" in known

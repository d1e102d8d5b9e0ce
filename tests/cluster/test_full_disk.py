"""Replicas whose disks are full when they are to become master."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from metaq.client import TextClient
from metaq.protocol.remoting.codes import Request
from tests.support import nospace
from tests.support.admin import Refused, ask, connect
from tests.support.broker import wait_until
from tests.support.cluster import DEADLINE_S, ReplicaProcess, wait_caught_up
from tests.support.group import Group, Member
from tests.support.zookeeper import ZooKeeperProcess

SEGMENT_BYTES: Final = 65536
MOST_BYTES: Final = 20000
TOO_LITTLE: Final = 40
"""For any record."""
SIZES: Final = ("--segment-bytes", str(SEGMENT_BYTES), "--max-body-bytes", str(MOST_BYTES), "--sweep-interval-ms", "20")
SMALL: Final = (*SIZES, "--min-in-sync", "1")


class Cramped(ReplicaProcess):
    """A replica whose disk gets full when a test says so."""

    program = (nospace.__name__,)

    def fill(self) -> None:
        self.data.with_name("full").write_text(nospace.BRIM, "ascii")

    def empty(self) -> None:
        self.data.with_name("full").unlink()

    def gives(self, body: bytes) -> None:
        with TextClient(self.host, self.port) as client:
            assert [message.body for message in client.get("t").messages] == [body]

    def takes(self, body: bytes) -> None:
        with TextClient(self.host, self.port) as client:
            client.put("t", body)


@contextmanager
def cramped(folder: Path) -> Iterator[tuple[Cramped, Cramped]]:
    """Yield a master and its slave, which have a message, each with a disk of its own."""
    for name in ("1", "2"):
        (folder / name).mkdir()
    with (
        Cramped(folder / "1" / "data", 1, "", *SMALL, durability="disk") as master,
        Cramped(folder / "2" / "data", 2, master.replication, *SMALL, durability="disk") as slave,
    ):
        master.takes(b"hello")
        master.wait_for(in_sync=[1, 2])
        yield master, slave


class CrampedMember(Member):
    """One of a group whose disks get full each by itself."""

    program = (nospace.__name__,)

    def __init__(self, data: Path, number: int, ports: tuple[int, int], *flags: str, durability: str) -> None:
        data.mkdir()
        super().__init__(data / "data", number, ports, *flags, durability=durability)

    def fill(self) -> None:
        self.data.with_name("full").write_text(nospace.BRIM, "ascii")


@pytest.mark.parametrize("killed", [True, False], ids=["killed", "stopped"])
def test_a_master_starts_on_a_full_disk(tmp_path: Path, *, killed: bool) -> None:
    """F-FULL: it gives messages, and is the master again, in a later epoch, when there is room."""
    with Cramped(tmp_path / "data", 1, "", *SMALL, durability="disk") as master:
        master.takes(b"hello")
        epoch = master.status()["epoch"]
        master.kill() if killed else master.terminate()
        master.fill()
        master.start()
        master.gives(b"hello")
        assert master.stands(role="slave")
        master.wait_problem("no room")
        master.empty()
        master.wait_for(role="master")
        assert master.status()["epoch"] > epoch
        master.takes(b"later")


def test_a_slave_is_promoted_while_its_disk_is_full(tmp_path: Path) -> None:
    """F-FULL: the order is refused with the reason, and obeyed when there is room."""
    with cramped(tmp_path) as (master, slave):
        slave.wait_for(suspect=None)
        master.terminate()
        slave.fill()
        with connect(slave) as client, pytest.raises(Refused, match="no room"):
            ask(client, Request.CHANGE_ROLE, role="master")
        slave.gives(b"hello")
        slave.empty()
        slave.promote()
        slave.takes(b"later")


def test_replicas_stop_in_order_while_their_disks_are_full(tmp_path: Path) -> None:
    """F-FULL: what they remember beside the log cannot be written, and the log is closed all the same."""
    with cramped(tmp_path) as (master, slave):
        master.fill()
        slave.fill()
        master.takes(b"later")  # the segment has its room already
        wait_caught_up(master, slave)
        for replica in (slave, master):
            assert replica.terminate() == 0
            said = replica.stderr()
            assert "not remembered" in said and "Traceback" not in said, said
            assert " stopped" in said.splitlines()[-1], said


def use_up(master: Member) -> None:
    """Put messages until the last segment of the log has no room for another record."""
    with TextClient(master.host, master.port) as client:
        client.put("t", b"x")
        before = master.status()["end"]
        client.put("t", b"x")
        end = master.status()["end"]
        rest = SEGMENT_BYTES - end % SEGMENT_BYTES - TOO_LITTLE
        while rest > 0:
            size = min(rest, MOST_BYTES) if rest < MOST_BYTES or rest > 2 * MOST_BYTES else rest // 2
            client.put("t", b"x" * (size - (end - before - 1)))
            rest -= size
    assert master.status()["end"] % SEGMENT_BYTES == SEGMENT_BYTES - TOO_LITTLE


@pytest.mark.slow
@pytest.mark.partner("java")
def test_one_that_is_elected_while_its_disk_is_full_hands_over(tmp_path: Path) -> None:
    """F-FULL, MQ-070: it cannot begin its epoch; without an order the group would have no master until there is room."""
    with (
        ZooKeeperProcess(tmp_path / "zookeeper") as server,
        Group(tmp_path, server.address, *SIZES, kind=CrampedMember) as group,
    ):
        before = group.wait_master()
        full = next(member for member in group.members.values() if member is not before)
        assert isinstance(full, CrampedMember)
        use_up(before)
        wait_caught_up(before, full)
        full.fill()
        before.order(Request.HAND_OVER, replica=full.number)
        wait_until(lambda: "room for the begin of its epoch" in full.stderr(), DEADLINE_S, "it is elected, and has no room")
        full.wait_for(role="slave", leads=True)
        with pytest.raises(Refused, match="is not in sync"):
            full.order(Request.HAND_OVER, replica=9)
        full.order(Request.HAND_OVER, replica=before.number)
        assert group.wait_master() is before
        full.wait_for(role="slave", leads=False)

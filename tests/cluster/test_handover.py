"""A master that an operator has replaced for a while: the handover and the way back, without a lost message."""

import contextlib
from pathlib import Path

import pytest

from metaq.protocol.remoting.codes import Request
from tests.cluster.test_stepping_down import put_acknowledged
from tests.cluster.traffic import read_all
from tests.support.broker import wait_until
from tests.support.cluster import DEADLINE_S, ROLE_CHANGES
from tests.support.group import Group, Member
from tests.support.zookeeper import ZooKeeperProcess

pytestmark = pytest.mark.partner("java")


def hand_over(group: Group, to: Member) -> None:
    """Order it of whoever is master, until the wanted one is: a replica that stood still for a while is replaced by others."""

    def ordered() -> bool:
        group.wait_whole()
        master = group.wait_master()
        if master is not to:
            with contextlib.suppress(*ROLE_CHANGES):
                master.order(Request.HAND_OVER, replica=to.number)
        return group.wait_master() is to

    wait_until(ordered, DEADLINE_S, f"replica {to.number} is master")


def bodies(member: Member) -> list[bytes]:
    """Return what readers get, each body once: a put that was not acknowledged was made again, and may be there twice."""
    return list(dict.fromkeys(message.body for message in read_all(member)))


@pytest.mark.slow
def test_there_and_back(tmp_path: Path) -> None:
    """MQ-070: once it is in sync the old master takes over again, with what was put meanwhile; nobody has to buffer."""
    with ZooKeeperProcess(tmp_path / "zookeeper") as server, Group(tmp_path, server.address) as group:
        old = group.wait_master()
        other = next(member for member in group.members.values() if member is not old)
        put_acknowledged(group, b"before")
        for to, body in ((other, b"meanwhile"), (old, b"after")):
            hand_over(group, to)
            put_acknowledged(group, body)
        group.wait_whole()
        for member in group.members.values():
            wait_until(lambda: bodies(member) == [b"before", b"meanwhile", b"after"], DEADLINE_S, "all is there")  # noqa: B023

"""A master that an operator has replaced for a while: the way there and back, without a message lost."""

from pathlib import Path

import pytest

from metaq.protocol.codes import Request
from tests.cluster.traffic import read_all, try_put
from tests.support.broker import wait_until
from tests.support.cluster import DEADLINE_S
from tests.support.group import Group, Member
from tests.support.zookeeper import ZooKeeperProcess

pytestmark = pytest.mark.partner("java")


def hand_over(group: Group, master: Member, to: Member) -> None:
    """Order it, and wait until the other one takes messages."""
    group.wait_whole()
    master.order(Request.HAND_OVER, replica=to.number)
    wait_until(lambda: group.master() is to, DEADLINE_S, f"replica {to.number} is master")


def test_there_and_back(tmp_path: Path) -> None:
    """MQ-070: once it is in sync the old master takes over again, with what was put meanwhile; nobody has to buffer."""
    with ZooKeeperProcess(tmp_path / "zookeeper") as server, Group(tmp_path, server.address) as group:
        old = group.wait_master()
        other = next(member for member in group.members.values() if member is not old)
        bodies = []
        for number, (master, to) in enumerate([(old, other), (other, old), (old, None)]):
            bodies.append(b"%d" % number)
            wait_until(lambda: try_put(master, bodies[-1])[0] == 200, DEADLINE_S, "the master takes messages")  # noqa: B023
            if to is not None:
                hand_over(group, master, to)
        for member in group.members.values():
            wait_until(lambda: len(read_all(member)) >= 3, DEADLINE_S, "readers see all")  # noqa: B023
            assert [message.body for message in read_all(member)] == bodies

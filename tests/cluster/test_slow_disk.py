"""Replicas whose disks need longer for the syncs of a role change than ZooKeeper's session timeout."""

from pathlib import Path
from typing import ClassVar, Final

import pytest

from tests.cluster.test_stepping_down import put_acknowledged
from tests.cluster.traffic import read_all
from tests.support.group import SESSION_MS, Group, Member
from tests.support.slowsyncs import SYNC_S
from tests.support.zookeeper import ZooKeeperProcess

pytestmark = pytest.mark.partner("java")

LEAST_SYNCS: Final = 5
"""Of an opening of a store."""
assert LEAST_SYNCS * SYNC_S > SESSION_MS / 1000


class SlowMember(Member):
    program: ClassVar[tuple[str, ...]] = ("tests.support.slowsyncs",)


@pytest.mark.slow
def test_who_is_elected_is_heard_of_while_the_disk_takes_its_time(tmp_path: Path) -> None:
    """F-FAIL: sessions outlive changes of the role: there is a master, and another one when it is killed."""
    with (
        ZooKeeperProcess(tmp_path / "zookeeper") as server,
        Group(tmp_path, server.address, kind=SlowMember) as group,
    ):
        old = put_acknowledged(group, b"before")
        old.kill()
        new = put_acknowledged(group, b"after")
        assert new is not old
        group.heal()
        group.wait_whole()
        first, *others = (message.body for message in read_all(group.wait_master()))
        assert first == b"before" and set(others) == {b"after"}, "a put that too few replicas hold is stored, too"

"""A master that reaches ZooKeeper but not its slaves, and the other way round."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.cluster.traffic import read_all, try_put
from tests.support.broker import wait_until
from tests.support.cluster import DEADLINE_S
from tests.support.group import SESSION_MS, Group, Member
from tests.support.proxy import Proxy
from tests.support.zookeeper import ZooKeeperProcess

pytestmark = pytest.mark.partner("java")

LOOK_S: Final = 0.05


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    with ZooKeeperProcess(tmp_path / "zookeeper") as server, Group(tmp_path, server.address, proxied=True) as group:
        yield group


def put_acknowledged(group: Group, body: bytes) -> Member:
    """Put until a master acknowledges it; that master."""
    found: list[Member] = []

    def put() -> bool:
        master = group.wait_master()
        found[:] = [master]
        return try_put(master, body)[0] == 200

    wait_until(put, DEADLINE_S, f"{body!r} is acknowledged", LOOK_S)
    return found[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cut", "is_copied"),
    [(Proxy.partition, False), (lambda proxy: proxy.drop("up"), True), (lambda proxy: proxy.drop("down"), False)],
    ids=["both ways", "reports are lost", "the log is lost"],
)
def test_a_master_that_no_slave_reaches_steps_down(group: Group, cut: Callable[[Proxy], None], *, is_copied: bool) -> None:
    """F-PART: another one in sync goes on with all that was acknowledged; what only the old one has is cut off."""
    old = put_acknowledged(group, b"before")
    for proxy in group.ways[old.number].slaves.values():
        cut(proxy)
    assert try_put(old, b"alone")[0] in (500, 503)
    assert put_acknowledged(group, b"after") is not old
    group.heal()
    group.wait_whole()
    assert "master steps down" in old.stderr()
    for member in group.members.values():
        wait_until(lambda: len(read_all(member)) >= 2, DEADLINE_S, "readers see all", LOOK_S)  # noqa: B023
        bodies = [message.body for message in read_all(member)]
        assert bodies[0] == b"before" and b"after" in bodies and (b"alone" in bodies) == is_copied


@pytest.mark.slow
def test_a_master_stays_when_the_others_are_too_few(group: Group) -> None:
    """F-PART: one slave is gone and the other one is cut off; alone that could acknowledge nothing either."""
    master = put_acknowledged(group, b"before")
    gone, cut_off = (member for member in group.members.values() if member is not master)
    epoch = master.status()["epoch"]
    gone.kill()
    group.ways[master.number].slaves[cut_off.number].partition()
    alone_until = time.monotonic() + 3 * SESSION_MS / 1000
    wait_until(lambda: time.monotonic() > alone_until, DEADLINE_S, "time passes", LOOK_S)
    assert (master.status()["role"], master.status()["epoch"]) == ("master", epoch)
    group.heal()
    group.wait_whole()
    put_acknowledged(group, b"after")  # by any: once the others are enough, it may step down before they have reported to it
    for member in group.members.values():
        wait_until(lambda: len(read_all(member)) >= 2, DEADLINE_S, "readers see all", LOOK_S)  # noqa: B023
        assert {message.body for message in read_all(member)} == {b"before", b"after"}


@pytest.mark.slow
def test_a_master_that_is_killed_before_anybody_follows_is_no_loss(group: Group) -> None:
    """ES-010, F-FAIL: the third one is elected, although the second one has never had a slave in sync."""
    first = put_acknowledged(group, b"before")
    for member in group.members.values():
        wait_until(lambda: len(read_all(member)) == 1, DEADLINE_S, "all replicas show it", LOOK_S)  # noqa: B023
    first.kill()
    group.members = {number: member for number, member in group.members.items() if member is not first}
    second = group.wait_master()
    for proxy in group.ways[second.number].slaves.values():
        proxy.partition()
    second.kill()
    del group.members[second.number]
    (third,) = group.members.values()
    wait_until(lambda: third.stands(role="master"), DEADLINE_S, f"the third one is master; see {third.log}", LOOK_S)
    assert try_put(third, b"alone")[0] == 500
    assert [message.body for message in read_all(third)] == [b"before"]

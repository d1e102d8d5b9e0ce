"""Slaves that are far behind: away for longer than the retention time, or without room for the data that they lack."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from metaq.client.text.textclient import TextClient
from metaq.protocol.remoting.codes import Request
from tests.cluster.traffic import TOPIC, read_all, try_put
from tests.support import nospace
from tests.support.admin import ask, connect
from tests.support.broker import wait_until
from tests.support.cluster import DEADLINE_S, Cluster, ReplicaProcess, check_prefix, wait_caught_up
from tests.support.group import Group, Member
from tests.support.zookeeper import ZooKeeperProcess

SEGMENT: Final = 65536
SMALL: Final = ("--segment-bytes", str(SEGMENT), "--max-body-bytes", "4096", "--max-branch-bytes", "16384")
KEPT_SHORTLY: Final = ("--keep-hours", "0.0001", "--retention-interval-ms", "3600000")
BYTES_PER_S: Final = 200_000


class Cramped(ReplicaProcess):
    """A replica that a test can take the room from, by a file ``full`` in the folder of the cluster."""

    program = (nospace.__name__,)


def bodies(seed: int, number: int) -> Iterator[bytes]:
    rng = random.Random(seed)
    return (rng.randbytes(2000) for _ in range(number))


def fill(replica: ReplicaProcess, seed: int, number: int) -> dict[int, bytes]:
    """So many messages that are acknowledged: bodies by id."""
    with TextClient(replica.host, replica.port) as client:
        sent = list(bodies(seed, number))
        return {put.id: body for put, body in zip(client.put_many(TOPIC, sent, partition=0), sent, strict=True)}


def delete_expired(master: ReplicaProcess, least: int) -> None:
    """Until the log begins at a log offset or behind."""

    def deleted() -> bool:
        with connect(master) as client:
            ask(client, Request.DELETE_EXPIRED_COMMITLOG)
        return bool(master.status()["begin"] >= least)

    wait_until(deleted, DEADLINE_S, "what has expired is deleted")


@pytest.mark.slow
@pytest.mark.partner("java")
def test_a_replica_that_was_away_for_too_long_may_be_elected_again(tmp_path: Path) -> None:
    """P06, F-FAIL: it copies everything anew, is not in sync before, and then takes over alone without a loss."""
    flags = (*SMALL, *KEPT_SHORTLY, "--min-in-sync", "1", "--replica-timeout-ms", "30000")
    with ZooKeeperProcess(tmp_path / "zookeeper") as zookeeper, Group(tmp_path, zookeeper.address, *flags) as group:
        master = group.wait_master()
        away, other = (member for member in group.members.values() if member is not master)
        fill(master, 1, 40)
        end = master.status()["end"]
        away.kill()
        acknowledged = fill(master, 2, 150)
        master.wait_for(in_sync=sorted((master.number, other.number)))
        delete_expired(master, end + SEGMENT)
        acknowledged |= fill(master, 3, 40)
        away.start()
        group.wait_whole()
        assert "log is copied anew" in away.stderr()
        assert away.status()["begin"] == master.status()["begin"] > end
        acknowledged |= fill(master, 4, 10)
        other.kill()
        master.kill()
        assert_alone(group, away)
        with TextClient(away.host, away.port) as client:
            first = client.offset(TOPIC, 0)
            found = {message.id: message.body for message in client.iterate(TOPIC, position=first)}
        kept = {id_: body for id_, body in acknowledged.items() if id_ >= min(found)}
        assert len(kept) >= 50
        assert {id_: found.get(id_) for id_ in kept} == kept


def assert_alone(group: Group, replica: Member) -> None:
    """It becomes master although it alone is left."""
    wait_until(lambda: group.master() is replica, DEADLINE_S, f"replica {replica.number} is master; see {replica.log}")


def test_a_slave_that_has_no_room_for_the_copy(tmp_path: Path) -> None:
    """P06, P24: it says so in the middle of the copy, is not in sync, keeps nothing waiting, and goes on when there is room."""
    with Cluster(tmp_path, *SMALL, "--min-in-sync", "1") as cluster:
        master = cluster.add(1)
        fill(master, 1, 300)
        proxy = cluster.proxy(master)
        proxy.bandwidth("down", BYTES_PER_S)
        slave = cluster.add(2, proxy.address, kind=Cramped)
        wait_until(lambda: slave.status()["end"] > SEGMENT, DEADLINE_S, "the copy has begun")
        (tmp_path / "full").touch()
        slave.wait_problem("no room for")
        assert try_put(master, b"meanwhile") == (200, "")
        assert master.status()["in_sync"] == [1]
        check_prefix(master, slave)
        (tmp_path / "full").unlink()
        proxy.heal()
        wait_caught_up(master, slave)
        check_prefix(master, slave)
        assert slave.status()["problem"] is None
        assert read_all(slave) == read_all(master)


@pytest.mark.parametrize("durability", ["replica", pytest.param("disk+replica", marks=pytest.mark.slow)])
def test_nothing_is_safe_while_the_only_slave_has_no_room(tmp_path: Path, durability: str) -> None:
    """P08, P24: where two replicas must have a message, none is acknowledged or shown before both have it."""
    with Cluster(tmp_path, *SMALL, durability=durability) as cluster:
        master = cluster.add(1)
        slave = cluster.add(2, master.replication, kind=Cramped)
        master.wait_for(in_sync=[1, 2])
        assert try_put(master, b"safe") == (200, "")
        (tmp_path / "full").touch()
        before = [message.body for message in read_all(master)]
        for body in bodies(1, 2 * SEGMENT // 2000 + 40):  # one segment may have been made ahead
            if try_put(master, body) != (200, ""):
                break
            before.append(body)
        slave.wait_problem("no room for")
        assert try_put(master, b"in doubt")[0] == 500
        assert [message.body for message in read_all(master)] == before
        check_prefix(master, slave)
        (tmp_path / "full").unlink()
        wait_caught_up(master, slave)
        assert try_put(master, b"safe again") == (200, "")
        wait_caught_up(master, slave)
        assert read_all(slave) == read_all(master)
        assert [message.body for message in read_all(master)][-2:] == [b"in doubt", b"safe again"]

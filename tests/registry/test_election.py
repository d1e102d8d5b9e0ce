"""One replica's part in elections, against a real ZooKeeper: which parts of the state a master may change, and when."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Final

import gevent
import pytest
from kazoo.client import KazooClient

from metaq.clock import SystemClock
from metaq.errors import BadRequest, Fenced, RegistryUnavailable
from metaq.registry.session import CreateNode, Operation
from metaq.registry.zookeeper import ZooKeeper
from metaq.replication.election import GRACE_S, LOOK_S, Election
from metaq.replication.nodes import UNTOLD, Candidate, Master, ReplicaGroupState, ReplicaLog
from tests.support.zookeeper import ZooKeeperProcess

pytestmark = pytest.mark.partner("java")

DEADLINE_S: Final = 60.0
GROUP: Final = "c/b"
STATE: Final = f"/metaq/groups/{GROUP}/state"
MASTER: Final = f"/metaq/groups/{GROUP}/master"
FIRST: Final = 2
"""Epoch of the first master that a group elects."""


def election(
    server: ZooKeeperProcess,
    replica: int,
    log: ReplicaLog | Callable[[], ReplicaLog],
    deposed: Callable[[], None] = lambda: None,
    session_ms: int = 2000,
    make: type[ZooKeeper] = ZooKeeper,
    elected: Callable[[int, frozenset[int], ReplicaLog], None] = lambda epoch, eligible, log: None,
) -> Election:
    clock = SystemClock()
    return Election(
        make(server.address, session_ms, clock),
        GROUP,
        replica,
        f"127.0.0.1:{replica}",
        log=(lambda: log) if isinstance(log, ReplicaLog) else log,
        elected=elected,
        deposed=deposed,
        moved=lambda address: None,
        monotonic=clock.monotonic,
    )


def wait(condition: Callable[[], bool], what: str) -> None:
    """Until it holds; greenlets go on meanwhile."""
    with gevent.Timeout(DEADLINE_S, AssertionError(f"not within {DEADLINE_S} s: {what}")):
        while not condition():
            gevent.sleep(0.01)


@contextmanager
def leased(folder: Path) -> Iterator[tuple[ZooKeeperProcess, Election]]:
    """Yield a ZooKeeper and the only replica, which is elected and has a lease of some seconds."""
    with ZooKeeperProcess(folder / "zookeeper") as server:
        replica = election(server, 1, ReplicaLog(1, 0), session_ms=10_000)
        replica.start()
        try:
            wait(lambda: replica.leading and replica._zookeeper.lease_end > 0, "it is elected, and has a lease")
            yield server, replica
        finally:
            replica.stop()


def test_a_replaced_master_changes_nothing(tmp_path: Path) -> None:
    """F-FAIL, F-PART: not even when it has read the version of the state that replaced its own."""
    with ZooKeeperProcess(tmp_path / "zookeeper") as server, server.client() as other:
        replica = election(server, 1, ReplicaLog(1, 0))
        replica.start()
        try:
            wait(lambda: replica.leading, "the only replica is elected")
            assert replica.agree(FIRST, frozenset((1, 2)))
            assert not replica.agree(FIRST - 1, frozenset((1,))), "an epoch that is over, of the same replica"
            with pytest.raises(Fenced):
                replica.check(FIRST - 1)
            replica.check(FIRST)
            later = ReplicaGroupState(epoch=7, master=2, in_sync=(2, 3)).encode()
            other.set(STATE, later)
            assert [replica.agree(FIRST, frozenset((1,))) for _ in range(3)] == [False] * 3
            assert other.get(STATE)[0] == later
        finally:
            replica.stop()


def test_a_master_writes_until_its_lease_ends(tmp_path: Path) -> None:
    """F-ZK, F-PART: not only while it is connected: the lease is good while the connection is renewed."""
    with leased(tmp_path) as (server, replica):
        zookeeper = replica._zookeeper
        server.kill()
        wait(lambda: not zookeeper.connected, "the connection is lost")
        wait(lambda: is_fenced(replica, zookeeper), "the lease is over")


def is_fenced(replica: Election, zookeeper: ZooKeeper) -> bool:
    """Whether a master may write no more, which is so from the end of its lease on, and not before."""
    before = monotonic()
    try:
        replica.check(FIRST)
    except Fenced:
        assert monotonic() >= zookeeper.lease_end
        return True
    assert before < zookeeper.lease_end
    return False


@pytest.mark.slow
def test_a_lease_is_of_one_session(tmp_path: Path) -> None:
    """F-ZK: with a session that was closed, or is over, it ends at once; that of the next session is not the master's."""
    with leased(tmp_path) as (server, replica):
        zookeeper = replica._zookeeper
        first = zookeeper.leased_session
        server.kill()
        server.wipe()
        server.start()
        wait(lambda: zookeeper.session not in {None, first}, "it has another session")
        assert zookeeper.lease_end == 0 or zookeeper.leased_session != first
        with pytest.raises(Fenced):
            replica.check(FIRST)


def test_a_master_that_gives_up_stands_again(tmp_path: Path) -> None:
    """F-FAIL: in the same session; it begins another epoch."""
    with ZooKeeperProcess(tmp_path / "zookeeper") as server:
        replica = election(server, 1, ReplicaLog(1, 0))
        replica.start()
        try:
            wait(lambda: replica.leading, "the only replica is elected")
            replica.give_up()
            assert not replica.leading
            wait(lambda: replica.leading, "it is elected again")
            replica.check(FIRST + 1)
            with pytest.raises(Fenced):
                replica.check(FIRST)
        finally:
            replica.stop()


class GivingUp(ZooKeeper):
    """A session whose replica gives up during its first election."""

    give_up: Callable[[], None] | None = None

    def commit(self, operations: Sequence[Operation]) -> bool:
        done = super().commit(operations)
        if self.give_up is not None and any(isinstance(each, CreateNode) and each.path == MASTER for each in operations):
            self.give_up()
            self.give_up = None
        return done


def test_a_replica_that_gives_up_while_it_is_elected_stands_again(tmp_path: Path) -> None:
    """F-FAIL: the log that it was elected for is replaced."""
    led: list[tuple[int, frozenset[int], ReplicaLog]] = []
    with ZooKeeperProcess(tmp_path / "zookeeper") as server, server.client() as other:
        other.create(STATE, ReplicaGroupState(3, 1, (1,)).encode(), makepath=True)
        log = ReplicaLog(3, 0, "its log is empty")
        replica = election(server, 1, log, make=GivingUp, elected=lambda *elected: led.append(elected))
        assert isinstance(replica._zookeeper, GivingUp)
        replica._zookeeper.give_up = replica.give_up
        replica.start()
        try:
            wait(lambda: replica.leading, "it is elected again")
            assert led == [(5, frozenset({1}), log)]
        finally:
            replica.stop()


def test_a_master_that_cannot_hand_over_hears_of_the_next_one(tmp_path: Path) -> None:
    """F-PART: another replica was elected meanwhile; the order fails, and this one is master no more."""
    heard: list[str] = []
    with ZooKeeperProcess(tmp_path / "zookeeper") as server, server.client() as other:
        replica = election(server, 1, ReplicaLog(1, 0), lambda: heard.append("deposed"))
        replica.start()
        try:
            wait(lambda: replica.leading, "the only replica is elected")
            assert replica.agree(FIRST, frozenset((1, 2)))
            other.set(STATE, ReplicaGroupState(epoch=7, master=2, in_sync=(2, 3)).encode())
            with pytest.raises(RegistryUnavailable, match="has changed meanwhile"):
                replica.hand_over(2)
            other.delete(MASTER)
            other.create(MASTER, Master(2, 7, "127.0.0.1:2", "another run").encode(), ephemeral=True)
            wait(lambda: heard == ["deposed"], "it hears of the next master")
            assert not replica.leading
            assert replica.master_address == ("127.0.0.1", 2)
        finally:
            replica.stop()


def test_no_replica_takes_over_from_a_living_master(tmp_path: Path) -> None:
    """F-FAIL: the master could change the set in sync no more, and would acknowledge nothing once a slave stops."""
    state = ReplicaGroupState(3, 1, (1,)).encode()
    with ZooKeeperProcess(tmp_path / "zookeeper") as server, server.client() as other:
        other.create(STATE, state, makepath=True)
        other.create(MASTER, Master(1, 3, "127.0.0.1:1", "a run").encode(), ephemeral=True)
        replica = election(server, 2, ReplicaLog(3, 0))
        replica.start()
        try:
            wait(lambda: replica.master_address is not None, "it knows the master")
            with pytest.raises(BadRequest, match="replica 1 is master: hand over instead"):
                replica.take_over(accept_loss=True)
            assert other.get(STATE)[0] == state
            other.delete(MASTER)
            with pytest.raises(BadRequest, match="It becomes master only if you accept the loss"):
                replica.take_over(accept_loss=False)
            replica.take_over(accept_loss=True)
            wait(lambda: replica.leading, "it is elected")
        finally:
            replica.stop()


def test_a_replica_does_not_take_over_from_a_state_that_it_has_not_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F-FAIL: another one was elected after the look for a master."""
    state = ReplicaGroupState(4, 3, (1, 3)).encode()
    with ZooKeeperProcess(tmp_path / "zookeeper") as server, server.client() as other:
        other.create(STATE, ReplicaGroupState(3, 1, (1,)).encode(), makepath=True)
        replica = election(server, 2, ReplicaLog(3, 0))
        monkeypatch.setattr(replica, "_loss", lambda log, found: other.set(STATE, state) and None)
        replica.start()
        try:
            wait(lambda: bool(other.exists(f"/metaq/groups/{GROUP}/replicas/2")), "it is there")
            with pytest.raises(RegistryUnavailable, match="has changed meanwhile"):
                replica.take_over(accept_loss=False)
            assert other.get(STATE)[0] == state
        finally:
            replica.stop()


@pytest.mark.slow
@pytest.mark.parametrize(("epoch", "goes_on"), [(2, True), (3, False)], ids=["same epoch", "later epoch"])
def test_a_master_makes_the_state_anew_if_nobody_was_elected_later(tmp_path: Path, epoch: int, *, goes_on: bool) -> None:
    """F-ZK: the logs of those that were in sync tell; without them it waits."""
    with ZooKeeperProcess(tmp_path / "zookeeper") as server:
        replica = election(server, 1, ReplicaLog(1, 0))
        replica.start()
        try:
            wait(lambda: replica.leading, "the only replica is elected")
            assert replica.agree(FIRST, frozenset((1, 2)))
            server.kill()
            server.wipe()
            server.start()
            with server.client() as other:
                wait(lambda: bool(other.exists(f"/metaq/groups/{GROUP}/replicas/1")), "it is back")
                gevent.sleep(1.5)  # three looks
                assert not other.exists(STATE), "replica 2 may have been elected later"
                other.create(f"/metaq/groups/{GROUP}/replicas/2", Candidate(ReplicaLog(epoch, 10), -1).encode(), ephemeral=True)
                if goes_on:
                    wait(lambda: bool(other.exists(MASTER)), "the state is made anew")
                    assert ReplicaGroupState.decode(other.get(STATE)[0]) == ReplicaGroupState(2, 1, (1, 2))
                    assert Master.decode(other.get(MASTER)[0]).epoch == 2
                else:
                    gevent.sleep(1.5)
                    assert not other.exists(MASTER)
        finally:
            replica.stop()


def test_others_let_the_preferred_one_go_first_while_it_is_there(tmp_path: Path) -> None:
    """F-FAIL: however slow it is; ZooKeeper tells that it is gone."""
    with ZooKeeperProcess(tmp_path / "zookeeper") as server, server.client() as other:
        other.create(STATE, ReplicaGroupState(3, 3, (1, 2, 3), preferred=2).encode(), makepath=True)
        other.create(
            f"/metaq/groups/{GROUP}/replicas/2", Candidate(ReplicaLog(3, 0), 0).encode(), ephemeral=True, makepath=True
        )
        replica = election(server, 1, ReplicaLog(3, 0))
        replica.start()
        try:
            wait(lambda: bool(other.exists(f"/metaq/groups/{GROUP}/replicas/1")), "it is there")
            gevent.sleep(GRACE_S + 2 * LOOK_S)
            assert not other.exists(MASTER)
            other.delete(f"/metaq/groups/{GROUP}/replicas/2")
            wait(lambda: replica.leading, "the next one is elected")
        finally:
            replica.stop()


def test_a_log_that_grows_is_not_written_again_and_again(tmp_path: Path) -> None:
    """F-ZK: each change of a replica's node wakes all the others of its group."""
    ends = list[int]()

    def growing() -> ReplicaLog:
        ends.append(len(ends))
        return ReplicaLog(3, len(ends))

    with ZooKeeperProcess(tmp_path / "zookeeper") as server, server.client() as other:
        other.create(STATE, ReplicaGroupState(3, 1, (1,)).encode(), makepath=True)
        replica, own = election(server, 1, growing), f"/metaq/groups/{GROUP}/replicas/1"
        replica.start()
        try:
            wait(lambda: replica.leading and told(other, own).log == ReplicaLog(3, UNTOLD), "its node is that of a master")
            made = other.exists(own).czxid
            for _ in range(3):
                asked = len(ends)
                replica._zookeeper.touch(own)
                wait(lambda: len(ends) > asked, "the keeper looks at its node again")  # noqa: B023
            assert other.exists(own).czxid == made
        finally:
            replica.stop()


def told(client: KazooClient, path: str) -> Candidate:
    """What a replica's node says."""
    return Candidate.decode(client.get(path)[0])


def test_nobody_takes_over_before_the_others_have_told_how_long_their_logs_are(tmp_path: Path) -> None:
    """F-ZK: when it is not known who was in sync, the longest log is the best."""
    with ZooKeeperProcess(tmp_path / "zookeeper") as server, server.client() as other:
        path = f"/metaq/groups/{GROUP}/replicas/2"
        other.create(path, Candidate(ReplicaLog(3, UNTOLD), -1).encode(), ephemeral=True, makepath=True)
        replica = election(server, 1, ReplicaLog(3, 10))
        replica.start()
        try:
            wait(lambda: replica._zookeeper.connected, "it is connected")
            with pytest.raises(BadRequest, match=r"how long the logs of \[2\] are: try again"):
                replica.take_over(accept_loss=False)
            other.set(path, Candidate(ReplicaLog(3, 11), 0).encode())
            with pytest.raises(BadRequest, match="replica 2 has the longest log"):
                replica.take_over(accept_loss=False)
        finally:
            replica.stop()

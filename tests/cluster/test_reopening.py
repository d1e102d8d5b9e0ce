"""A slave whose log has to be opened anew just when it is to become master, or turns out to be suspect only then."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal

import gevent
import pytest

from metaq.config import Settings
from metaq.engine.role import Role
from metaq.errors import BadRequest, DiskFailed
from metaq.message import Durability
from metaq.replication.nodes import ReplicaGroupState
from metaq.server.replicas.replica import ReplicaServer
from metaq.store.files.ending import ABORT
from tests.store.test_record_groups import FIRST as T0
from tests.store.test_record_groups import put

ANY: Final = "127.0.0.1:0"
MASTER: Final = Role(is_master=True, epoch=7)


@contextmanager
def slave(
    folder: Path,
    role: Literal["slave", "elected"] = "slave",
    zookeeper: str = "",
    durability: Durability = Durability.REPLICA,
) -> Iterator[ReplicaServer]:
    """A replica that follows nobody, and changes no role before its greenlets run."""
    server = ReplicaServer(
        Settings(
            data=folder,
            listen=ANY,
            remoting_listen="none",
            registry_listen=ANY,
            http_listen="none",
            replication_listen=ANY,
            replica_number=2,
            role=role,
            zookeeper=zookeeper,
            durability=durability,
            segment_bytes=1024 * 1024,  # an opening after a failure reads all of it
            max_body_bytes=1024,
        )
    )
    try:
        yield server
    finally:
        server._listener.close()
        server.broker._endpoint.close()
        server.broker.store.release()


@contextmanager
def started(folder: Path, role: Literal["slave", "elected"] = "slave", zookeeper: str = "") -> Iterator[ReplicaServer]:
    """The same; its broker is started, and stops in the end."""
    with slave(folder, role, zookeeper) as server:
        server._start_broker()
        try:
            yield server
        finally:
            server.stop()


def test_a_replica_that_is_elected_for_a_log_that_is_replaced_stands_again(tmp_path: Path) -> None:
    """F-FAIL: as a slave it would keep the node of the master, and the group would have none until it is restarted."""
    with slave(tmp_path, "elected", "127.0.0.1:1") as server:
        assert server._election is not None
        server._election._lead(ReplicaGroupState(7, 2, (1, 2)))
        assert server._election.leading and server._wanted is not None and server._wanted.is_master
        server._reopen()
        assert not server._election.leading
        assert not server._wanted.is_master


def test_an_operators_order_is_kept(tmp_path: Path) -> None:
    """F-FAIL: the new opening makes the replica master, and cuts its log, too."""
    with slave(tmp_path) as server:
        server._change(MASTER)
        server._reopen()
        assert server._wanted == MASTER


def test_an_operators_order_is_not_kept_for_a_log_that_may_lack_messages(tmp_path: Path) -> None:
    """F-FAIL: all of it may be deleted, to be copied anew."""
    with slave(tmp_path) as server:
        server._change(MASTER)
        server.broker.store.suspicion.rise("its log is copied anew")
        server._reopen()
        assert server._wanted is not None and not server._wanted.is_master


# -- what only the opening finds ------------------------------------------------------------------------------------------


def change(server: ReplicaServer) -> None:
    """Take the role that is wanted."""
    role, server._wanted = server._wanted, None
    assert role is not None
    server._change_now(role)


@pytest.mark.parametrize("is_known", [False, True])
def test_who_was_elected_before_its_log_was_known_to_be_suspect_gives_way(tmp_path: Path, *, is_known: bool) -> None:
    """F-FAIL: a sync has failed. As master it would have all others cut off what it lacks."""
    with started(tmp_path, "elected", "127.0.0.1:1") as server:
        election = server._election
        assert election is not None
        election._stood_with = server._log()._replace(suspect="its log was empty" if is_known else None)
        election._lead(ReplicaGroupState(7, 2, (1, 2)))
        server.broker.store.fail(DiskFailed("cannot sync: input/output error"))
        change(server)
        assert server.broker.role.is_master == election.leading == is_known
        assert (server.suspicion is None) == is_known


def test_who_was_elected_as_suspect_for_a_longer_log_gives_way(tmp_path: Path) -> None:
    """F-FAIL: the page cache has lost some more of it. Another one has the longest log now."""
    with started(tmp_path, "elected", "127.0.0.1:1") as server:
        election, store = server._election, server.broker.store
        assert election is not None
        put(store, T0, b"one")
        end = store.log.end
        put(store, T0, b"two")
        election._stood_with = server._log()._replace(suspect="its log was empty")
        election._lead(ReplicaGroupState(7, 2, (1, 2)))
        store.fail(DiskFailed("cannot sync: input/output error"))
        segment = store.log.segments[-1]
        with open(segment.path, "r+b") as file:
            file.seek(end - segment.base)
            file.write(bytes(store.log.end - end))
        change(server)
        assert server.broker.store.log.end == end
        assert not server.broker.role.is_master and not election.leading
        assert server.suspicion is not None
        election._stood_with = server._log()
        election._lead(ReplicaGroupState(8, 2, (1, 2)))
        change(server)
        assert server.broker.role.is_master and election.leading, "it is the longest even so"


@pytest.mark.parametrize("durability", [Durability.REPLICA, Durability.DISK_REPLICA])
def test_who_stands_while_its_disk_has_failed_stands_as_suspect(tmp_path: Path, durability: Durability) -> None:
    """F-FAIL: another one may have what the page cache has lost, unless all was synced before it was reported."""
    with slave(tmp_path, "elected", "127.0.0.1:1", durability) as server:
        put(server.broker.store, T0, b"one")
        assert server._log().suspect is None
        server.broker.store.fail(DiskFailed("cannot sync: input/output error"))
        suspect = "its disk has failed: cannot sync: input/output error"
        assert server._log().suspect == (suspect if durability is Durability.REPLICA else None)


def test_who_is_elected_anew_while_its_log_turns_out_to_be_suspect_is_asked_again(tmp_path: Path) -> None:
    """F-FAIL: it gives up the election that it was opened for, and not the next one, for which it opens once more."""
    with started(tmp_path, "elected", "127.0.0.1:1") as server:
        election = server._election
        assert election is not None
        election._stood_with = server._log()._replace(suspect=None)
        election._lead(ReplicaGroupState(7, 2, (1, 2)))
        server.broker.store.fail(DiskFailed("cannot sync: input/output error"))
        gevent.spawn(election._lead, ReplicaGroupState(9, 2, (1, 2)))  # when the opening waits for the disk
        change(server)
        assert not server.broker.role.is_master and election.leading
        change(server)
        assert not server.broker.role.is_master and not election.leading


@pytest.mark.parametrize("accept_loss", [False, True])
def test_who_is_promoted_before_its_log_is_known_to_be_suspect_is_held_back(tmp_path: Path, *, accept_loss: bool) -> None:
    """F-FAIL: also after a restart; with the loss accepted it is master."""
    with started(tmp_path) as server:
        server.promote(accept_loss=accept_loss)
        server.broker.store.fail(DiskFailed("cannot sync: input/output error"))
        change(server)
        assert server.broker.role.is_master == accept_loss
        assert (server.suspicion is None) == accept_loss
        assert (server._held_back is None) == accept_loss
        assert server._first_role().yields != accept_loss
        if not accept_loss:
            with pytest.raises(BadRequest, match="only if you accept the loss"):
                server.promote(accept_loss=False)
            server.promote(accept_loss=True)
            change(server)
            assert server.broker.role.is_master and server.suspicion is None


def test_who_is_elected_with_a_whole_log_is_master(tmp_path: Path) -> None:
    """F-FAIL: without a failure nothing is suspect."""
    with started(tmp_path, "elected", "127.0.0.1:1") as server:
        assert server._election is not None
        server._election._lead(ReplicaGroupState(7, 2, (1, 2)))
        change(server)
        assert server.broker.role.is_master and server._election.leading


# -- an orderly stop -----------------------------------------------------------------------------------------------------


def test_an_elected_master_that_stops_closes_its_store(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """F-ZK: also when its lease is over, with offsets that are not in the log yet. Else it would be suspect after a reboot."""
    with started(tmp_path, "elected", "127.0.0.1:1") as server:
        assert server._election is not None
        server._election._lead(ReplicaGroupState(7, 2, (1, 2)))
        change(server)
        server.broker.engine.context.offsets.commit("g", "t", 0, 1, 0.0)
        assert (tmp_path / ABORT).exists()
    assert not (tmp_path / ABORT).exists()
    assert "stopped without closing the store" not in caplog.text

"""A slave whose log has to be opened anew just when it is to become master."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal

from metaq.config import Settings
from metaq.engine.role import Role
from metaq.replication.nodes import ReplicaGroupState
from metaq.server.replicas.replica import ReplicaServer

ANY: Final = "127.0.0.1:0"
MASTER: Final = Role(is_master=True, epoch=7)


@contextmanager
def slave(folder: Path, role: Literal["slave", "elected"] = "slave", zookeeper: str = "") -> Iterator[ReplicaServer]:
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
        )
    )
    try:
        yield server
    finally:
        server._listener.close()
        server.broker._endpoint.close()
        server.broker.store.release()


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

"""Many connections to the replication port of a master: they do not keep a slave away, and their number is limited."""

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from metaq.replication.feeder import HELLO_TIMEOUT_S, MOST_NAMELESS, MOST_SLAVES
from metaq.replication.frames import CONTROL, FRAME, LENGTH, MAGIC, Hello
from tests.cluster.traffic import try_put
from tests.support.broker import SEGMENT_BYTES, SOCKET_TIMEOUT_S, wait_until
from tests.support.cluster import DEADLINE_S, Cluster, ReplicaProcess, wait_caught_up
from tests.support.tls import issue

FLOOD: Final = 400
BESIDE: Final = 16
"""Descriptors that a master opens and closes for other reasons."""


def descriptors(replica: ReplicaProcess) -> int:
    """How many a process holds."""
    return len(os.listdir(f"/proc/{replica.pid}/fd"))


def port_of(master: ReplicaProcess) -> tuple[str, int]:
    host, _, port = master.replication.rpartition(":")
    return host, int(port)


@contextlib.contextmanager
def connections(master: ReplicaProcess, count: int, said: bytes) -> Iterator[list[socket.socket]]:
    """So many that say the same, and stay."""
    with contextlib.ExitStack() as stack:
        held = []
        for _ in range(count):
            held.append(stack.enter_context(socket.create_connection(port_of(master), SOCKET_TIMEOUT_S)))
            with contextlib.suppress(ConnectionError):  # it may be the one that is dropped
                held[-1].sendall(said)
        yield held


@pytest.mark.slow
def test_who_says_nothing_keeps_no_slave_away(tmp_path: Path) -> None:
    """F-HA-GARBAGE: silent connections and hellos that never end; a slave is in sync within the time that those may take."""
    with Cluster(tmp_path, "--min-in-sync", "1") as cluster:
        master, slave = cluster.pair()
        slave.kill()
        master.wait_for(in_sync=[1])
        usual = descriptors(master)
        slow = MAGIC + LENGTH.pack(1000) + b'{"cluster":'
        with connections(master, FLOOD, b""), connections(master, FLOOD, slow):
            wait_until(lambda: descriptors(master) <= usual + MOST_NAMELESS + BESIDE, DEADLINE_S, "most of them are closed")
            slave.start()
            assert try_put(master, b"meanwhile") == (200, "")
            wait_caught_up(master, slave)
        wait_until(lambda: descriptors(master) <= usual + BESIDE, DEADLINE_S, "all of them are closed")
        assert "connection dropped" in master.stderr()
        assert "Traceback" not in master.stderr()


def test_who_begins_with_tls_keeps_no_slave_away(tmp_path: Path) -> None:
    """E-05, F-HA-GARBAGE: handshakes that never end are dropped like every other beginning, and nothing breaks by it."""
    with Cluster(tmp_path, "--min-in-sync", "1", *issue(tmp_path).flags) as cluster:
        master = cluster.add(1)
        usual = descriptors(master)
        with connections(master, 2 * MOST_NAMELESS, b"\x16\x03\x01\x02\x00\x01"):
            wait_until(lambda: "connection dropped" in master.stderr(), DEADLINE_S, "the oldest are dropped")
        wait_until(lambda: descriptors(master) <= usual + BESIDE, DEADLINE_S, "all of them are closed")
        assert "Traceback" not in master.stderr()


@pytest.mark.slow
def test_a_hello_may_take_its_time_but_not_longer(tmp_path: Path) -> None:
    """F-HA-GARBAGE: a byte now and then does not keep a connection open."""
    with Cluster(tmp_path, "--min-in-sync", "1") as cluster:
        master = cluster.add(1)
        with connections(master, 1, MAGIC + LENGTH.pack(1000)) as (slow,):
            slow.settimeout(HELLO_TIMEOUT_S / 20)

            def ended() -> bool:
                try:
                    slow.sendall(b" ")
                    return not slow.recv(1)
                except TimeoutError:
                    return False
                except ConnectionError:
                    return True

            wait_until(ended, DEADLINE_S, "the connection is closed")
        wait_until(lambda: "no hello" in master.stderr(), DEADLINE_S, "the reason is told")


def test_a_master_has_only_so_many_slaves(tmp_path: Path) -> None:
    """F-HA-GARBAGE: those that claim to be one beyond that are told so; the real one stays in sync."""
    with Cluster(tmp_path, "--min-in-sync", "1", "--replica-timeout-ms", "30000") as cluster:
        master, _ = cluster.pair()
        with contextlib.ExitStack() as stack:
            answers = []
            for number in range(10, 10 + MOST_SLAVES + 5):
                connection = stack.enter_context(socket.create_connection(port_of(master), SOCKET_TIMEOUT_S))
                hello = Hello("DefaultCluster", "metaq", 0, number, SEGMENT_BYTES, 0, 0, [[1, 0, 0]], None, "127.0.0.1:1", 0)
                connection.sendall(hello.encode())
                answers.append(first_control(connection))
            refused = [b'"refused":"this master has 32 slaves already' in answer for answer in answers]
            assert refused == [False] * (MOST_SLAVES - 1) + [True] * 6
            assert try_put(master, b"x") == (200, "")
            assert master.status()["in_sync"] == [1, 2]


def first_control(connection: socket.socket) -> bytes:
    """The body of the first frame."""
    stream = connection.makefile("rb")
    offset, size = FRAME.unpack(stream.read(FRAME.size))
    assert (offset >= 0, size) == (True, CONTROL)
    return stream.read(LENGTH.unpack(stream.read(LENGTH.size))[0])

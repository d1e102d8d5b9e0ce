"""The keeper of a session, against a real ZooKeeper that expires sessions, stops, is wiped, or is paused."""

import logging
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from kazoo.client import KazooClient

from metaq.clock import SystemClock
from metaq.errors import BadRequest, ChangeUnknown, RegistryUnavailable
from metaq.registry.session import CheckVersion, CreateNode, DeleteNode, Operation, SetData, Znode, parse_hosts
from metaq.registry.zookeeper import ZooKeeper
from tests.support.broker import wait_until
from tests.support.ports import free_ports
from tests.support.zookeeper import Ensemble, ZooKeeperProcess

pytestmark = pytest.mark.partner("java")

DEADLINE_S: Final = 60.0
SESSION_MS: Final = 1500
PATIENT_MS: Final = 30_000
"""Where no session is to expire, however long the machine stands still."""


@contextmanager
def session(hosts: str, session_ms: int = SESSION_MS) -> Iterator[ZooKeeper]:
    zookeeper = ZooKeeper(hosts, session_ms, SystemClock())
    zookeeper.start()
    try:
        yield zookeeper
    finally:
        zookeeper.stop()


def expire(zookeeper: ZooKeeper, server: ZooKeeperProcess) -> None:
    """End its session for it: a second client takes it over, and closes it."""
    identity = zookeeper._client.client_id
    thief = KazooClient(server.address, client_id=identity)
    thief.start(timeout=DEADLINE_S)
    thief.stop()
    thief.close()


def wait_held(zookeeper: ZooKeeper, path: str) -> None:
    wait_until(lambda: zookeeper.held(path), DEADLINE_S, f"{path} is held")


@pytest.fixture
def root(request: pytest.FixtureRequest) -> str:
    """A path of this test's own."""
    return f"/{request.node.name}"


def test_a_kept_node_outlives_its_sessions(zookeeper: ZooKeeperProcess, root: str) -> None:
    """MY-016: expired again and again at any moment, it stands there again each time, with the data of now."""
    path, data = f"{root}/some/node", b"0"
    rng = random.Random(7)
    with session(zookeeper.address) as keeper, zookeeper.client() as other:
        keeper.keep(path, lambda: data)
        wait_held(keeper, path)
        for number in range(1, 21):
            data = str(number).encode()
            before = keeper.session
            expire(keeper, zookeeper)
            wait_until(lambda before=before: keeper.session not in (None, before), DEADLINE_S, "there is a new session")  # type: ignore[misc]
            if rng.random() < 0.5:
                continue
            wait_held(keeper, path)
            assert other.get(path)[0] == data
        wait_held(keeper, path)
        assert other.get(path)[1].owner_session_id == keeper.session
    with zookeeper.client() as other:
        assert other.exists(path) is None


def test_a_node_that_somebody_removes_is_made_again(zookeeper: ZooKeeperProcess, root: str) -> None:
    """MY-016: without any loss of the session."""
    with session(zookeeper.address) as keeper, zookeeper.client() as other:
        keeper.keep(f"{root}/node", lambda: b"x")
        wait_held(keeper, f"{root}/node")
        for _ in range(5):
            other.delete(f"{root}/node")
            wait_until(lambda: other.exists(f"{root}/node") is not None, DEADLINE_S, "it is there again")
        both = other.transaction()  # between two requests the node would be made again
        both.delete(f"{root}/node")
        both.delete(root)
        assert both.commit() == [True, True]
        wait_until(lambda: other.exists(f"{root}/node") is not None, DEADLINE_S, "it is there again, with its parent")


def test_changed_data_is_a_new_node(zookeeper: ZooKeeperProcess, root: str) -> None:
    """MQ-046: clients that only look when the list changes are woken, and never see the list without it."""
    path, data = f"{root}/node", b"1"
    lists: list[list[str]] = []
    with session(zookeeper.address) as keeper, zookeeper.client() as other:
        keeper.keep(path, lambda: data)
        wait_held(keeper, path)
        other.ChildrenWatch(root, lists.append)
        first = other.get(path)[1]
        data = b"2"
        keeper.touch(path)
        wait_until(lambda: other.get(path)[0] == b"2", DEADLINE_S, "the new data is there")
        wait_until(lambda: len(lists) > 1, DEADLINE_S, "the list is read again")
        assert other.get(path)[1].czxid > first.czxid
        assert [] not in lists
        keeper.touch("/nobody-keeps-this")
        keeper.drop(path)
        wait_until(lambda: other.exists(path) is None, DEADLINE_S, "it is gone")
        expire(keeper, zookeeper)
        keeper.keep(f"{root}/other", lambda: b"")
        wait_held(keeper, f"{root}/other")
        assert other.exists(path) is None


def test_a_leftover_of_our_own_is_replaced_at_once(zookeeper: ZooKeeperProcess, root: str) -> None:
    """MQ-044: a killed process's session lives on for a minute; its successor does not wait for that."""
    with zookeeper.client(session_s=60) as former, zookeeper.client() as other:
        former.create(f"{root}/node", b"our address, run 1", ephemeral=True, makepath=True)
        with session(zookeeper.address) as keeper:
            keeper.keep(f"{root}/node", lambda: b"our address, run 2", same=lambda found, own: found[:11] == own[:11])
            wait_held(keeper, f"{root}/node")
            data, stat = other.get(f"{root}/node")
            assert data == b"our address, run 2"
            assert stat.owner_session_id == keeper.session


def test_a_node_of_somebody_else_is_left_alone(
    zookeeper: ZooKeeperProcess, root: str, caplog: pytest.LogCaptureFixture
) -> None:
    """MQ-044: it is complained of once, what stands after it waits, and both come when the other one has gone."""
    with session(zookeeper.address) as keeper, zookeeper.client() as other:
        with zookeeper.client() as former, caplog.at_level(logging.ERROR):
            former.create(f"{root}/first", b"theirs", ephemeral=True, makepath=True)
            keeper.keep(f"{root}/second", lambda: b"", after=f"{root}/first")
            keeper.keep(f"{root}/first", lambda: b"ours")
            keeper.keep(f"{root}/third", lambda: b"")
            wait_held(keeper, f"{root}/third")
            wait_until(lambda: "another session has it: 'theirs'" in caplog.text, DEADLINE_S, "the complaint is logged")
            keeper.touch(f"{root}/first")
            keeper.touch(f"{root}/third")
            wait_held(keeper, f"{root}/third")
            assert caplog.text.count("another session has it") == 1
            assert not keeper.held(f"{root}/first")
            assert other.get(f"{root}/first")[0] == b"theirs"
            assert other.exists(f"{root}/second") is None
        wait_held(keeper, f"{root}/first")
        wait_held(keeper, f"{root}/second")
        assert other.get(f"{root}/first")[0] == b"ours"


@pytest.mark.slow
def test_thousands_of_nodes(zookeeper: ZooKeeperProcess, root: str) -> None:
    """MQ-046: they are made many at a time, also after their session was lost."""
    paths = [f"{root}/{number % 100}/{number}" for number in range(3000)]
    with session(zookeeper.address, 10_000) as keeper, zookeeper.client() as other:
        for path in paths:
            keeper.keep(path, lambda: b"4")
        wait_until(lambda: all(map(keeper.held, paths)), DEADLINE_S, "all are held")
        expire(keeper, zookeeper)
        wait_until(lambda: all(map(keeper.held, paths)), DEADLINE_S, "all are held again")
        assert sum(len(other.get_children(f"{root}/{number}")) for number in range(100)) == 3000


def test_what_is_watched_is_told(zookeeper: ZooKeeperProcess, root: str) -> None:
    """MQ-047, MY-009: existence, data and children, also of a path that is not there yet, and after a lost session."""
    seen: list[tuple[Znode | None, list[str]]] = []
    with session(zookeeper.address) as keeper, zookeeper.client() as other:
        keeper.watch(root, lambda: seen.append((keeper.get(root), keeper.children(root))))

        def told(data: bytes | None, children: list[str]) -> None:
            def is_last() -> bool:
                return bool(seen) and (seen[-1][0] and seen[-1][0].data) == data and seen[-1][1] == children

            wait_until(is_last, DEADLINE_S, f"told of {data!r} {children}")

        told(None, [])
        other.create(root, b"1")
        told(b"1", [])
        other.create(f"{root}/b", b"")
        other.create(f"{root}/a", b"")
        told(b"1", ["a", "b"])
        other.set(root, b"2")
        told(b"2", ["a", "b"])
        expire(keeper, zookeeper)
        other.delete(f"{root}/b")
        told(b"2", ["a"])
        other.delete(root, recursive=True)
        told(None, [])


def test_one_that_is_told_and_fails_is_told_again(zookeeper: ZooKeeperProcess, root: str) -> None:
    """MY-009: an error of ours is logged, and the keeper goes on."""
    calls: list[int] = []

    def changed() -> None:
        calls.append(1)
        if len(calls) < 3:
            raise BadRequest("not yet")

    with session(zookeeper.address) as keeper:
        keeper.watch(root, changed)
        wait_until(lambda: len(calls) == 3, DEADLINE_S, "told three times")
        keeper.keep(f"{root}-node", lambda: b"")
        wait_held(keeper, f"{root}-node")


def test_requests(zookeeper: ZooKeeperProcess, root: str) -> None:
    """MY-014: a commit does all or nothing."""
    with session(zookeeper.address, PATIENT_MS) as keeper:
        wait_until(lambda: keeper.connected, DEADLINE_S, "connected")
        assert keeper.get(root) is None
        assert keeper.children(root) == []
        assert keeper.make(f"{root}/b", b"1") and not keeper.make(f"{root}/b", b"2")
        assert keeper.get(f"{root}/b") == Znode(b"1", 0)
        assert keeper.commit([CheckVersion(f"{root}/b", 0), SetData(f"{root}/b", b"2", 0), CreateNode(f"{root}/a", b"x")])
        assert keeper.children(root) == ["a", "b"]
        refused: list[list[Operation]] = [
            [SetData(f"{root}/a", b"y"), CheckVersion(f"{root}/b", 0)],
            [SetData(f"{root}/a", b"y"), SetData(f"{root}/b", b"3", 0)],
            [SetData(f"{root}/a", b"y"), CreateNode(f"{root}/b", b"")],
            [SetData(f"{root}/a", b"y"), DeleteNode(root)],
            [SetData(f"{root}/a", b"y"), DeleteNode(f"{root}/none")],
        ]
        for operations in refused:
            assert not keeper.commit(operations)
        assert keeper.get(f"{root}/a") == Znode(b"x", 0)
        assert keeper.commit([DeleteNode(f"{root}/a", 0), CreateNode(f"{root}/a", b"new", ephemeral=True)])
    with session(zookeeper.address) as keeper:
        wait_until(lambda: keeper.connected, DEADLINE_S, "connected")
        assert keeper.children(root) == ["b"]


def test_without_a_connection_nothing_waits(tmp_path: Path) -> None:
    """MY-014: nobody listens there; requests fail at once, and stopping is quick."""
    (port,) = free_ports(1)
    with session(f"127.0.0.1:{port}", 2 * PATIENT_MS) as keeper:
        begun = time.monotonic()
        for request in (lambda: keeper.get("/x"), lambda: keeper.children("/x"), lambda: keeper.make("/x")):
            with pytest.raises(RegistryUnavailable, match=f"ZooKeeper 127.0.0.1:{port} is not connected"):
                request()
        assert time.monotonic() - begun < PATIENT_MS / 1000
    assert time.monotonic() - begun < PATIENT_MS / 1000


@pytest.mark.parametrize(
    ("text", "places"),
    [
        ("a:1", [("a", 1)]),
        ("a:1, b", [("a", 1), ("b", 2181)]),
        ("[::1]:5,[::2]", [("::1", 5), ("::2", 2181)]),
    ],
)
def test_hosts(text: str, places: list[tuple[str, int]]) -> None:
    """MY-014: as every client of ZooKeeper writes them."""
    assert parse_hosts(text) == places


@pytest.mark.parametrize("text", ["", ",", "a:b", "a:0", ":1", "a:70000", "a:1/root"])
def test_hosts_that_are_none(text: str) -> None:
    """MY-014: refused."""
    with pytest.raises(BadRequest):
        parse_hosts(text)


# -- a ZooKeeper that is away -----------------------------------------------------------------------------------------


def keep_and_watch(keeper: ZooKeeper, calls: list[int]) -> None:
    keeper.keep("/away/node", lambda: b"x")
    keeper.watch("/away", lambda: calls.append(1))
    wait_held(keeper, "/away/node")
    wait_until(lambda: bool(calls), DEADLINE_S, "told of the node")


@contextmanager
def stopped(server: ZooKeeperProcess) -> Iterator[None]:
    server.kill()
    yield
    server.start()


@contextmanager
def wiped(server: ZooKeeperProcess) -> Iterator[None]:
    server.kill()
    server.wipe()
    yield
    server.start()


@contextmanager
def paused(server: ZooKeeperProcess) -> Iterator[None]:
    server.pause()
    yield
    server.resume()


@pytest.mark.slow
@pytest.mark.parametrize("away", [stopped, wiped, paused])
@pytest.mark.parametrize("sessions", [0.0, 5.0])
def test_everything_is_there_again(away: Callable[[ZooKeeperProcess], Any], sessions: float, tmp_path: Path) -> None:
    """MY-016: stopped, started without its data, or frozen: for a moment, or for many session times."""
    calls: list[int] = []
    with ZooKeeperProcess(tmp_path / "zk") as server, session(server.address) as keeper:
        keep_and_watch(keeper, calls)
        with away(server):
            wait_until(lambda: not keeper.connected, DEADLINE_S, "the loss is noticed")
            end = time.monotonic() + sessions * SESSION_MS / 1000
            wait_until(lambda: time.monotonic() >= end, DEADLINE_S, "it has been away for long")
            calls.clear()
        wait_until(lambda: keeper.connected, DEADLINE_S, "connected again")
        begun = time.monotonic()
        wait_held(keeper, "/away/node")
        wait_until(lambda: bool(calls), DEADLINE_S, "told after the reconnection")
        with server.client() as other:
            wait_until(lambda: _owner(other, "/away/node") == keeper.session, DEADLINE_S, "it is the session's")
        assert time.monotonic() - begun < 2 * SESSION_MS / 1000 + 5


def _owner(client: KazooClient, path: str) -> int | None:
    stat = client.exists(path)
    return None if stat is None else stat.owner_session_id


def test_a_change_whose_answer_does_not_come(tmp_path: Path) -> None:
    """MY-014: nobody knows whether it was made, and the error says so."""
    with ZooKeeperProcess(tmp_path / "zk") as server, session(server.address) as keeper:
        wait_until(lambda: keeper.connected, DEADLINE_S, "connected")
        server.pause()
        with pytest.raises(ChangeUnknown):
            keeper.commit([CreateNode("/maybe", b"")])
        server.resume()


def test_a_server_that_talks_nonsense(tmp_path: Path) -> None:
    """MY-014: kazoo's loop ends for good at an answer that it cannot read; the keeper begins anew."""
    with socket.create_server(("127.0.0.1", 0)) as nonsense:
        port = nonsense.getsockname()[1]

        def answer() -> None:
            link, _ = nonsense.accept()
            with link:
                link.recv(100)
                link.sendall((4).to_bytes(4, "big") + b"\xff" * 4)
            nonsense.close()

        talking = threading.Thread(target=answer)
        talking.start()
        with session(f"127.0.0.1:{port}") as keeper:
            talking.join(DEADLINE_S)
            assert not talking.is_alive()
            with ZooKeeperProcess(tmp_path / "zk", port=port):
                keeper.keep("/node", lambda: b"x")
                wait_held(keeper, "/node")


def test_an_ensemble_whose_leader_dies(tmp_path: Path) -> None:
    """MY-014: session and nodes live on."""
    with Ensemble(tmp_path) as ensemble, session(ensemble.address, PATIENT_MS) as keeper:
        keeper.keep("/node", lambda: b"x")
        wait_held(keeper, "/node")
        before = keeper.session
        ensemble.leader().kill()
        after = ensemble.leader()
        wait_until(lambda: keeper.session is not None, DEADLINE_S, "connected again")
        with after.client() as other:
            assert _owner(other, "/node") == keeper.session == before


# -- the lease --------------------------------------------------------------------------------------------------------


def test_the_session_time_is_what_the_server_grants(zookeeper: ZooKeeperProcess) -> None:
    """MY-014: two ticks at least; the lease counts with that."""
    with session(zookeeper.address, 100) as keeper:
        wait_until(lambda: keeper.session_s == 0.4, DEADLINE_S, "told of two ticks")


def test_the_lease_is_renewed_and_ends_with_the_session(zookeeper: ZooKeeperProcess) -> None:
    """MY-014: two thirds of the session ahead, and nothing once it is known to be lost."""
    with session(zookeeper.address) as keeper:
        wait_until(lambda: keeper.connected, DEADLINE_S, "connected")
        assert keeper.lease_end == 0
        keeper.hold_lease()
        wait_until(lambda: keeper.lease_end > time.monotonic(), DEADLINE_S, "there is a lease")
        first = keeper.lease_end
        wait_until(lambda: keeper.lease_end > first, DEADLINE_S, "it is renewed")
        assert keeper.lease_end < time.monotonic() + SESSION_MS / 1000
        before = keeper.session
        expire(keeper, zookeeper)
        wait_until(lambda: keeper.lease_end == 0 or keeper.session not in (None, before), DEADLINE_S, "the loss is noticed")
        wait_until(lambda: keeper.lease_end > time.monotonic(), DEADLINE_S, "the new session has a lease")
    assert keeper.lease_end == 0


@contextmanager
def holder(hosts: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        command = [sys.executable, "-m", "tests.registry.holder", hosts, str(SESSION_MS)]
        process = subprocess.Popen(command, stdout=output)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def last_lease(log: Path) -> float:
    lines = [line for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return float(lines[-1]) if lines else 0.0


def gone_at(client: KazooClient, deadline_s: float = DEADLINE_S) -> float:
    """When another client sees that the node has gone, which is later than it went."""
    wait_until(lambda: client.exists("/held") is None, deadline_s, "the holder's node goes")
    return time.monotonic()


@pytest.mark.slow
def test_a_frozen_holder_loses_its_lease_first(tmp_path: Path) -> None:
    """MY-014, MY-016: SIGSTOP at any moment: its lease has ended when others see its node go."""
    rng = random.Random(11)
    with ZooKeeperProcess(tmp_path / "zk") as server, server.client() as other:
        for number in range(3):
            log = tmp_path / f"leases{number}"
            with holder(server.address, log) as process:
                wait_until(lambda log=log: last_lease(log) > time.monotonic(), DEADLINE_S, "it holds a lease")  # type: ignore[misc]
                pause_until = time.monotonic() + rng.random()
                wait_until(lambda end=pause_until: time.monotonic() > end, DEADLINE_S, "some moment")  # type: ignore[misc]
                process.send_signal(signal.SIGSTOP)
                assert 0 < last_lease(log) < gone_at(other)


def test_an_unlucky_holder_loses_its_lease_first(tmp_path: Path) -> None:
    """MY-014, MY-016: frozen when the follower that it talks to is killed, and with it what it had not told the leader."""
    log = tmp_path / "leases"
    with Ensemble(tmp_path) as ensemble:
        leader = ensemble.leader()
        follower = next(member for member in ensemble.members if member is not leader)
        with leader.client(20) as other, holder(follower.address, log) as process:
            wait_until(lambda: last_lease(log) > time.monotonic(), DEADLINE_S, "it holds a lease")
            first = last_lease(log)
            wait_until(lambda: last_lease(log) > first, DEADLINE_S, "it is renewed")
            follower.kill()
            process.send_signal(signal.SIGSTOP)
            assert 0 < last_lease(log) < gone_at(other)

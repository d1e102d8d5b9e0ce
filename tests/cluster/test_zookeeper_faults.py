"""A group under load while ZooKeeper itself is away, has lost its data, or changes its leader."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.life import Life
from tests.support.group import SESSION_MS
from tests.support.zookeeper import Ensemble, ZooKeeperProcess

SEED = 5
SESSION_S = SESSION_MS / 1000


class ProxiedLife(Life):
    """One with proxies."""

    proxied = True


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ZooKeeperProcess]:
    with ZooKeeperProcess(tmp_path / "zookeeper") as server:
        yield server


def pass_sessions(life: Life) -> None:
    """Longer than any session lives without ZooKeeper: no master writes in the second half of that."""
    life.pass_time(SESSION_S)
    moment = time.monotonic()
    life.pass_time(SESSION_S)
    assert life.history.newest < moment, "a master writes although its lease has ended"


@pytest.mark.slow
def test_zookeeper_stopped_for_longer_than_its_sessions(tmp_path: Path, server: ZooKeeperProcess) -> None:
    """F-ZK: nobody writes when the lease has ended, and somebody does soon after ZooKeeper is back."""
    life = Life(SEED, tmp_path, server.address)

    def stopped() -> float:
        life.fault_begins()
        server.pause()
        pass_sessions(life)
        server.resume()
        back = time.monotonic()
        life.wait_acknowledged(back)
        return back

    with life.living():
        life.round(stopped)


@pytest.mark.slow
def test_zookeeper_killed_and_back(tmp_path: Path, server: ZooKeeperProcess) -> None:
    """F-ZK: its log has the sessions and the state; whoever is elected has everything."""
    life = Life(SEED, tmp_path, server.address)

    def killed() -> float:
        life.fault_begins()
        server.kill()
        pass_sessions(life)
        server.start()
        back = time.monotonic()
        life.wait_acknowledged(back)
        return back

    with life.living():
        life.round(killed)


@pytest.mark.slow
def test_sessions_of_all_replicas_expire(tmp_path: Path, server: ZooKeeperProcess) -> None:
    """F-ZK, F-PART: nobody reaches ZooKeeper, which forgets them all."""
    life = ProxiedLife(SEED, tmp_path, server.address)

    def expired() -> float:
        life.fault_begins()
        for ways in life.group.ways.values():
            ways.zookeeper.partition()
        pass_sessions(life)
        life.group.heal()
        back = time.monotonic()
        life.wait_new_master()
        return back

    with life.living():
        life.round(expired)


@pytest.mark.slow
@pytest.mark.parametrize("away_s", [0.0, 2 * SESSION_S], ids=["soon back", "back after the lease"])
def test_zookeeper_loses_its_data(tmp_path: Path, server: ZooKeeperProcess, away_s: float) -> None:
    """F-ZK: the master makes the state anew, and goes on."""
    life = Life(SEED, tmp_path, server.address)

    def wiped() -> float:
        life.fault_begins()
        server.kill()
        server.wipe()
        life.pass_time(away_s)
        server.start()
        back = time.monotonic()
        life.wait_acknowledged(back)
        return back

    with life.living():
        life.round(wiped)
        life.round(wiped)


@pytest.mark.slow
def test_zookeeper_loses_its_data_while_an_old_master_is_stopped(tmp_path: Path, server: ZooKeeperProcess) -> None:
    """F-ZK, F-FAIL: it still takes itself for the master when it goes on, but others have written since."""
    life = Life(SEED, tmp_path, server.address)

    def wiped() -> float:
        old = life.group.wait_master()
        life.fault_begins()
        old.pause()
        life.wait_new_master()
        new = life.group.wait_master()
        life.pass_time(1.0)
        server.kill()
        server.wipe()
        new.pause()
        old.go_on()
        server.start()
        life.pass_time(SESSION_S)  # in which the old one is alone with a ZooKeeper that knows nothing
        new.go_on()
        back = time.monotonic()
        life.wait_acknowledged(back)
        return back

    with life.living():
        life.round(wiped)


@pytest.mark.slow
def test_the_leader_of_an_ensemble_is_killed(tmp_path: Path) -> None:
    """F-ZK: the two others elect one, and sessions live on."""
    with Ensemble(tmp_path) as ensemble:
        life = Life(SEED, tmp_path, ensemble.address)

        def killed() -> float:
            began = life.fault_begins()
            leader = ensemble.leader()
            leader.kill()
            life.pass_time(2 * SESSION_S)
            life.wait_acknowledged(time.monotonic())
            leader.start()
            return began

        with life.living():
            life.round(killed)
            life.round(killed)

"""Bad networks between a master and its slave: delays, slices, cuts, losses, partitions, through a proxy."""

import random
import threading
import time
from pathlib import Path
from typing import Final

import pytest

from metaq.client.text.textclient import TextClient
from metaq.errors import ClientError
from metaq.protocol.remoting.codes import Request
from tests.cluster.traffic import TOPIC, read_all
from tests.support.admin import ask, connect
from tests.support.broker import wait_until
from tests.support.cluster import DEADLINE_S, ROLE_CHANGES, Cluster, ReplicaProcess, check_prefix, wait_caught_up
from tests.support.proxy import Direction, Proxy

SMALL: Final = ("--segment-bytes", "262144", "--max-body-bytes", "4096", "--max-branch-bytes", "16384")
QUICK: Final = ("--replica-lag-ms", "1000", "--replica-timeout-ms", "500")
HEALS_S: Final = 10.0
DIRECTIONS: Final[tuple[Direction, ...]] = ("up", "down")


class Load:
    """Puts messages from a thread until the ``with`` block ends, and remembers which were acknowledged."""

    def __init__(self, master: ReplicaProcess, seed: int) -> None:
        self.acknowledged: list[tuple[int, bytes]] = []
        """Id and body."""
        self._master = master
        self._rng = random.Random(seed)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._put_forever)

    def __enter__(self) -> "Load":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _put_forever(self) -> None:
        with TextClient(self._master.host, self._master.port) as client:
            while not self._stopping.is_set():
                body = self._rng.randbytes(self._rng.randrange(3000))
                try:
                    self.acknowledged.append((client.put(TOPIC, body, partition=0).id, body))
                except ClientError:  # stored, not yet safe
                    continue

    def wait_more(self, number: int) -> None:
        """Wait until so many more are acknowledged."""
        wanted = len(self.acknowledged) + number
        wait_until(lambda: len(self.acknowledged) >= wanted, DEADLINE_S, f"{number} more puts are acknowledged")


def trouble(proxy: Proxy, rng: random.Random) -> str:
    """Do one thing to the network; what it was."""
    kind = rng.choice(("delay", "slice", "bandwidth", "cut", "cut in a frame", "drop", "partition", "refuse"))
    direction = rng.choice(DIRECTIONS)
    match kind:
        case "delay":
            proxy.delay(direction, 0.05, 0.1)
        case "slice":
            proxy.slice(direction, rng.randrange(1, 40))
        case "bandwidth":
            proxy.bandwidth(direction, 20_000)
        case "cut":
            proxy.cut()
        case "cut in a frame":
            proxy.cut(rng.randrange(1, 30_000), "down")
        case "drop":
            proxy.drop(direction)
        case "partition":
            proxy.partition()
        case _:
            proxy.refuse()
            proxy.cut()
    return f"{kind} {direction}"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_trouble_loses_nothing(tmp_path: Path, seed: int) -> None:
    """F-PART: the slave's log is a prefix all along, in sync again within ten seconds, and has all that was acknowledged."""
    rng = random.Random(seed)
    with Cluster(tmp_path, *SMALL, *QUICK) as cluster:
        master, slave, proxy = cluster.proxied_pair()
        with Load(master, seed) as load:
            for _ in range(8):
                load.wait_more(20)
                kind = trouble(proxy, rng)
                lasts_until = time.monotonic() + 2 * rng.random()
                while time.monotonic() < lasts_until:
                    check_prefix(master, slave)
                proxy.heal()
                healed = time.monotonic()
                wait_until(lambda: master.stands(in_sync=[1, 2]), DEADLINE_S, f"in sync after {kind}, seed {seed}")
                assert time.monotonic() - healed < HEALS_S, kind
        wait_caught_up(master, slave)
        check_prefix(master, slave)
        for replica in (slave, master):
            found = {message.id: message.body for message in read_all(replica)}
            assert {id_: found.get(id_) for id_, _ in load.acknowledged} == dict(load.acknowledged)
        assert "Traceback" not in master.stderr() + slave.stderr()


def test_acknowledgements_that_are_held_back_lose_nothing(tmp_path: Path) -> None:
    """F-PART: reports do not reach the master, then it is lost: the slave has more than was acknowledged, never less."""
    with Cluster(tmp_path, *QUICK) as cluster:
        master, slave, proxy = cluster.proxied_pair()
        with Load(master, 1) as load:
            load.wait_more(50)
            proxy.drop("up")
            master.wait_for(in_sync=[1])
            proxy.heal()
            load.wait_more(50)
            before = slave.status()["end"]
            proxy.drop("up")
            wait_until(lambda: more_than(slave, before), DEADLINE_S, "the slave has what is not acknowledged")
            master.kill()
        slave.promote()
        master.start()
        proxy.close()
        master.demote(slave.replication)
        wait_caught_up(slave, master)
        check_prefix(slave, master)
        found = {message.id: message.body for message in read_all(slave)}
        assert {id_: found.get(id_) for id_, _ in load.acknowledged} == dict(load.acknowledged)


@pytest.mark.slow
def test_a_copy_goes_on_where_it_was_cut_off(tmp_path: Path) -> None:
    """P06: a log whose begin has aged out is copied over many connections; what has come is not asked for again."""
    few = ("--keep-hours", "0.0001", "--retention-interval-ms", "3600000", "--min-in-sync", "1")
    with Cluster(tmp_path, *SMALL, *few) as cluster:
        master = cluster.add(1)
        with TextClient(master.host, master.port) as client:
            client.put_many(TOPIC, (random.Random(0).randbytes(3000) for _ in range(300)), partition=0)

        def expired() -> bool:
            with connect(master) as admin:
                ask(admin, Request.DELETE_EXPIRED_COMMITLOG)
            return bool(master.status()["begin"] > 0)

        wait_until(expired, DEADLINE_S, "the log begins later")
        with TextClient(master.host, master.port) as client:
            client.put_many(TOPIC, (random.Random(1).randbytes(3000) for _ in range(700)), partition=0)
        proxy = cluster.proxy(master)
        proxy.bandwidth("down", 1_000_000)
        slave = cluster.add(2, proxy.address)
        ends = [0]
        while len(ends) < 6:
            wait_until(lambda: more_than(slave, ends[-1] + 100_000), DEADLINE_S, "the copy goes on")
            ends.append(ends[-1] + 100_000)
            proxy.cut()
        proxy.heal()
        wait_caught_up(master, slave)
        check_prefix(master, slave)
        assert slave.stderr().count("log is copied anew begin=") == 1


def more_than(replica: ReplicaProcess, end: int) -> bool:
    """Return whether the replica's log ends after a log offset; ``False`` also while it opens its store again."""
    try:
        return bool(replica.status()["end"] > end)
    except ROLE_CHANGES:
        return False

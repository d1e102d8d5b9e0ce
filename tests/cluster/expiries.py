"""Sessions of brokers expire again and again: they are cut off or stopped, or ZooKeeper is stopped or has lost its data.

See ``tests.cluster.registered`` for what must hold. An expiry is counted when a broker's nodes belong to another session than
before. ``python -m tests.cluster.expiries --seed 7 --count 100`` makes that many of them.
"""

import argparse
import os
import random
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tests.cluster.registered import LATE_S, Registered
from tests.crash.command import Result, expect
from tests.crash.driver import CaseFailed
from tests.support.proxy import Direction
from tests.support.zookeeper import ZooKeeperProcess

BROKERS: Final = 5
SESSION_MS: Final = 1000
AWAY: Final = (1.3, 3.0)
"""For how many session times."""
DIRECTIONS: Final[tuple[Direction, ...]] = ("up", "down")


class Expiries:
    """Some brokers and one ZooKeeper."""

    def __init__(self, registered: Registered, server: ZooKeeperProcess, seed: int) -> None:
        self._registered, self._server = registered, server
        self._rng = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.again_s: list[float] = []
        """How long each time until all were registered."""

    def run(self, count: int) -> None:
        """Until so many sessions have expired."""
        kinds: dict[Callable[[], float], int] = {
            self._cut_off: 6,
            self._one_way: 3,
            self._brokers_stopped: 3,
            self._server_stopped: 2,
            self._server_killed: 1,
            self._server_wiped: 2,
        }
        before = self._registered.sessions()
        while self.counts["sessions expired"] < count:
            (kind,) = self._rng.choices(list(kinds), list(kinds.values()))
            self.again_s.append(self._registered.wait_again(kind()))
            now = self._registered.sessions()
            self.counts["sessions expired"] += sum(old != new for old, new in zip(before, now, strict=True))
            self.counts[kind.__name__.strip("_").replace("_", " ")] += 1
            before = now

    def _some(self) -> list[int]:
        return self._rng.sample(range(BROKERS), self._rng.choice((1, BROKERS - 1, BROKERS, BROKERS)))

    def _pass(self) -> None:
        """Go on without; the producer, too."""
        end, sent = time.monotonic() + self._rng.uniform(*AWAY) * SESSION_MS / 1000, self._registered.sender.sent
        while time.monotonic() < end:
            self._registered.sender.check()
            time.sleep(0.02)
        expect(self._registered.sender.sent > sent, "the producer has sent something meanwhile")

    # -- what happens; each returns since when all is well ------------------------------------------------------------

    def _cut_off(self) -> float:
        for number in self._some():
            self._registered.ways[number].partition()
        return self._healed()

    def _one_way(self) -> float:
        for number in self._some():
            self._registered.ways[number].drop(self._rng.choice(DIRECTIONS))
        return self._healed()

    def _healed(self) -> float:
        self._pass()
        for way in self._registered.ways:
            way.heal()
        return time.monotonic()

    def _brokers_stopped(self) -> float:
        """SIGSTOP, of less than all."""
        stopped = [self._registered.brokers[number].pid for number in self._some()[: BROKERS // 2]]
        self._registered.sender.some_stopped = True
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(self._rng.uniform(*AWAY) * SESSION_MS / 1000)
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        back = time.monotonic()
        sent = self._registered.sender.sent
        while self._registered.sender.sent < sent + 2 * BROKERS:  # each of them was asked once more
            expect(time.monotonic() - back < 2 * LATE_S, "the producer goes on when all brokers do")
            time.sleep(0.02)
        self._registered.sender.some_stopped = False
        return back

    def _server_stopped(self) -> float:
        self._server.pause()
        self._pass()
        self._server.resume()
        return time.monotonic()

    def _server_killed(self) -> float:
        self._server.kill()
        self._pass()
        self._server.start()
        return time.monotonic()

    def _server_wiped(self) -> float:
        self._server.kill()
        self._server.wipe()
        self._pass()
        self._server.start()
        return time.monotonic()


def run(seed: int, count: int) -> Result:
    """Have at least ``count`` sessions expire."""
    with (
        tempfile.TemporaryDirectory(prefix=f"metaq-expiries-{seed}-") as folder,
        ZooKeeperProcess(Path(folder) / "zookeeper") as server,
        Registered(Path(folder), server, BROKERS, SESSION_MS, seed) as registered,
    ):
        expiries = Expiries(registered, server, seed)
        try:
            expiries.run(count)
            registered.finish()
        except Exception as error:
            said = "\n".join(f"{broker.data.name}:\n{broker.stderr()[-2000:]}" for broker in registered.brokers)
            raise CaseFailed(
                f"after {dict(expiries.counts)}: {error!r}\nreplay: --seed {seed} --count {count}\n{said}"
            ) from error
    details = {
        **expiries.counts,
        "sends acknowledged": registered.sender.sent,
        "ms until registered again, median": round(1000 * statistics.median(expiries.again_s)),
        "ms at most": round(1000 * max(expiries.again_s)),
    }
    return Result("expiries", range(seed, seed + 1), expiries.counts["sessions expired"], details)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=20)
    options = parser.parse_args()
    print(run(options.seed, options.count))


if __name__ == "__main__":
    main()

"""ZooKeeper is away for a minute (stopped, killed, or killed with all its data) while all that depends on it is in use.

An elected master must refuse puts when its lease has ended, readers go on, and puts are accepted again soon after ZooKeeper is
back (``tests.cluster.life``). Brokers without elections go on, a producer that knows them goes on, and they register again
(``tests.cluster.registered``).

``python -m tests.cluster.zookeeper --seed 7 --count 3 --seconds 60`` takes it away three times.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tests.cluster.life import Life
from tests.cluster.load import Reader
from tests.cluster.registered import LATE_S, Registered
from tests.crash.command import Result, expect
from tests.crash.driver import CaseFailed
from tests.support.group import SESSION_MS
from tests.support.zookeeper import ZooKeeperProcess

BROKERS: Final = 2
AWAY_S: Final = 60.0
SESSION_S: Final = SESSION_MS / 1000


class Away:
    """One ZooKeeper, a group that it elects a master for, and brokers that are registered there."""

    def __init__(self, server: ZooKeeperProcess, life: Life, registered: Registered, away_s: float) -> None:
        self._server, self._life, self._registered, self._away_s = server, life, registered, away_s
        self.most_again_s = 0.0
        """Until all brokers were registered again."""

    def stopped(self) -> float:
        """SIGSTOP: its connections stay open, and nothing answers."""
        return self._away(self._server.pause, self._server.resume)

    def killed(self) -> float:
        """SIGKILL: nobody listens there; it comes back with its data."""
        return self._away(self._server.kill, self._server.start)

    def wiped(self) -> float:
        """It comes back without."""

        def wipe() -> None:
            self._server.kill()
            self._server.wipe()

        return self._away(wipe, self._server.start)

    def _away(self, go: Callable[[], None], come_back: Callable[[], None]) -> float:
        life, sender = self._life, self._registered.sender
        (reader,) = [worker for worker in life.load.workers if type(worker) is Reader]
        life.fault_begins()
        go()
        life.pass_time(SESSION_S)
        ended, sent = time.monotonic(), sender.sent
        while time.monotonic() < ended + self._away_s - SESSION_S:
            life.pass_time(0.2)
            sender.check()
            expect(time.monotonic() - reader.succeeded_at < 2 * LATE_S, "readers of the group go on")
        expect(life.history.newest < ended, "a master writes although its lease has ended")
        expect(sender.sent > sent + self._away_s - SESSION_S, "the producer sends to the brokers that it knows", sent)
        come_back()
        back = time.monotonic()
        self.most_again_s = max(self.most_again_s, self._registered.wait_again(back))
        life.wait_acknowledged(back)
        return back


def run(seed: int, count: int, away_s: float = AWAY_S) -> Result:
    """Have ZooKeeper be away ``count`` times for so many seconds, in each way as often."""
    with (
        tempfile.TemporaryDirectory(prefix=f"metaq-zookeeper-{seed}-") as name,
        ZooKeeperProcess(Path(name) / "zookeeper") as server,
        Registered(Path(name), server, BROKERS, SESSION_MS, seed) as registered,
    ):
        life = Life(seed, Path(name), server.address)
        away = Away(server, life, registered, away_s)
        kinds = [away.stopped, away.killed, away.wiped]
        random.Random(seed).shuffle(kinds)
        try:
            with life.living():
                for number in range(count):
                    life.round(kinds[number % len(kinds)])
            registered.finish()
        except Exception as error:
            told = f"seed {seed}, in {life.doing}, after {dict(life.counts)}: {error!r}"
            raise CaseFailed(f"{told}\n{life.group.stderr()}\n{registered.stderr()}") from error
    details = {
        **life.counts,
        "sends acknowledged": registered.sender.sent,
        "ms until registered again at most": round(1000 * away.most_again_s),
    }
    return Result("zookeeper", range(seed, seed + 1), count, details)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=AWAY_S)
    options = parser.parse_args()
    print(run(options.seed, options.count, options.seconds))


if __name__ == "__main__":
    main()

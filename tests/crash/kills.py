"""SIGKILL under load at random moments, also while the broker starts and recovers, and what must be there afterwards.

A case is the life of one data folder, which outlives ``KILLS`` kills. After each restart everything new is read and compared
with what was acknowledged, and a sample of the old; at the end everything, then the broker stops in order and the folder is
verified. What must hold: it always starts; no message that was acknowledged or delivered is lost, at either durability level;
none is altered, moved, doubled or made up; positions and ordinals never go back; topics keep their partitions.

``python -m tests.crash.kills --seed 7 --count 2000 --workers 2`` runs it. A failure names the seed. A seed draws the same
settings and the same load again, but not the same instants, as processes and disks are not deterministic.
"""

import argparse
import multiprocessing
import random
import shutil
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Final

from metaq.client import TextClient
from metaq.store.recovery.verify import Report, verify
from tests.crash.command import Result, expect
from tests.crash.driver import CaseFailed
from tests.crash.history import CREATED, LARGEST_TEXT_BODY, History
from tests.crash.load import put_and_get
from tests.support.broker import SOCKET_TIMEOUT_S, BrokerProcess, wait_until

KILLS: Final = 25
"""In one case."""
WHILE_STARTING: Final = 0.25
AT_ONCE: Final = 0.1
"""Shares of the kills: before the broker is ready, and in its first moments."""


def run(seed: int, count: int, workers: int = 2) -> Result:
    """Kill at least ``count`` times, in cases from ``seed`` on, so many of them side by side."""
    seeds = range(seed, seed + -(-count // KILLS))
    details: Counter[str] = Counter()
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for case in pool.map(one_case, seeds):
            details.update(case)
    return Result("kills", seeds, details["kills"], dict(details))


def one_case(seed: int) -> dict[str, int]:
    """Live one data folder; return how many kills of each kind it saw, and so on. It is removed unless something is wrong."""
    folder = Path(tempfile.mkdtemp(prefix=f"metaq-kills-{seed}-"))
    life = _Life(seed, folder / "data")
    try:
        life.live()
    except Exception as error:
        raise CaseFailed(
            f"after {life.counts['kills']} kills: {error!r}\nflags: {' '.join(life.broker.flags)}\nfolder: {folder}\n"
            f"replay: python -m tests.crash.kills --seed {seed}"
        ) from error
    finally:
        life.broker.kill()
    shutil.rmtree(folder)
    return dict(life.counts)


class _Life:
    """One data folder from its beginning to its end."""

    def __init__(self, seed: int, data: Path) -> None:
        self._rng = random.Random(seed)
        self._history = History(seed)
        self._start_s = 1.0  # how long the last start took
        self.broker = BrokerProcess(data)
        self.counts: Counter[str] = Counter()
        self._draw_settings()

    def _draw_settings(self) -> None:
        """Small files and short pauses: segments and queue files roll, and sweeps and checkpoints happen, all the time."""
        rng = self._rng
        drawn = {
            "max-body-bytes": LARGEST_TEXT_BODY,
            "segment-bytes": rng.choice((40_000, 65_536, 262_144, 4 << 20)),
            "queue-file-bytes": rng.choice((256, 4096, 65_536, 20 << 20)),
            "hot-bytes": rng.choice((0, 50_000, 256 << 20)),
            "max-open-files": rng.choice((8, 32, 512)),
            "max-unsent-bytes": rng.choice((1024, 16_384, 8 << 20)),
            "checkpoint-interval-ms": rng.choice((10, 50, 200, 5000)),
            "sweep-interval-ms": rng.choice((10, 50, 250)),
            "flush-messages": rng.choice((10, 1000)),
            "sync-timeout-ms": 600_000,  # no put is refused, however busy the disk is
            "ample-free-bytes": 0,  # a disk that is rather full deletes nothing
        }
        self.broker.flags = tuple(text for name, value in drawn.items() for text in (f"--{name}", str(value)))
        self.broker.durability = rng.choice(("disk", "memory"))

    def live(self) -> None:
        self._start()
        with self._client() as client:
            for topic, partitions in CREATED.items():
                client.create(topic, partitions)
        self._kill_under_load(at_once=False)
        while self.counts["kills"] < KILLS:
            if self._rng.random() < 0.1:
                self._draw_settings()
            kind = self._rng.random()
            if kind < WHILE_STARTING:
                self._kill_while_starting()
            else:
                self._start()
                self._kill_under_load(at_once=kind < WHILE_STARTING + AT_ONCE)
        self._end()

    def _start(self) -> None:
        began = time.monotonic()
        self.broker.start()
        self._start_s = time.monotonic() - began

    def _client(self) -> TextClient:
        return TextClient(self.broker.host, self.broker.port, timeout_s=SOCKET_TIMEOUT_S)

    def _kill_while_starting(self) -> None:
        """The first half of a start goes by with imports: the moment is drawn from the rest, and a little more."""
        moment = time.monotonic() + self._start_s * self._rng.uniform(0.5, 1.1)
        self.broker.launch()
        wait_until(lambda: time.monotonic() >= moment, 2 * self._start_s + 1, "the moment of the kill")
        expect(self.broker.running, "the broker starts", self.broker.stderr()[-2000:])
        self.broker.kill()
        self._count("kills while starting")

    def _kill_under_load(self, *, at_once: bool) -> None:
        if not at_once:
            with self._client() as client:
                self._history.check(client, self._rng, whole=False)
        seconds = self._rng.uniform(0, 0.02) if at_once else 0.02 + 0.38 * self._rng.random() ** 2
        put_and_get(self.broker, self._history, self._rng, seconds)
        self._count("kills at once" if at_once else "kills under load")

    def _count(self, kind: str) -> None:
        self.counts[kind] += 1
        self.counts["kills"] += 1

    def _end(self) -> None:
        """Check that a kill leaves no damage, and that everything is there, and in its place after an orderly stop."""
        self._verify()
        self._start()
        with self._client() as client:
            self._history.check(client, self._rng, whole=True)
        expect(self.broker.terminate() == 0, "an orderly stop", self.broker.stderr()[-2000:])
        expect("Traceback" not in self.broker.stderr(), "no surprises", self.broker.stderr()[-2000:])
        report = self._verify()
        placed = len(self._history.places)
        expect(report.records == report.units == placed, "log and queues hold what was delivered", report, placed)
        self.counts["acknowledged"] = self._history.acknowledged
        self.counts["delivered without an answer"] = placed - self._history.acknowledged
        self.counts["sent"] = len(self._history.sent)

    def _verify(self) -> Report:
        report = verify(self.broker.data)
        expect(not report.damages and not report.quarantined_bytes, "no kill damages anything", report)
        return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=KILLS)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    print(run(options.seed, options.count, options.workers))


if __name__ == "__main__":
    main()

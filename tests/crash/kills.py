"""SIGKILL under load at random moments, also while the broker starts and recovers, and what must be there afterwards.

A case is the life of one data folder, which outlives many kills. After each restart everything new is read and compared
with what was acknowledged, and a sample of the old; at the end everything, then the broker stops in order and the folder is
verified. What must hold: it always starts; no message that was acknowledged or delivered is lost, at either durability level;
none is altered, moved, doubled or made up; positions and ordinals never go back; topics keep their partitions.

``python -m tests.crash.kills --seed 7 --count 2000 --workers 2`` runs it. A failure names the seed. A seed draws the same
settings and the same load again, but not the same instants, as processes and disks are not deterministic.
"""

from functools import partial
from pathlib import Path
from typing import Final

from metaq.client import TextClient
from tests.crash.command import expect
from tests.crash.history import CREATED, LARGEST_TEXT_BODY, History
from tests.crash.lives import ANSWERS, Life, main, one_life, run_lives
from tests.crash.load import put_and_get
from tests.support.broker import SOCKET_TIMEOUT_S

WHILE_STARTING: Final = 0.25
AT_ONCE: Final = 0.1
"""Shares of the kills: before the broker is ready, and in its first moments."""


class LoadLife(Life):
    """One data folder from its beginning to its end."""

    name = "kills"
    most_kills = 25

    def __init__(self, seed: int, folder: Path) -> None:
        super().__init__(seed, folder)
        self._history = History(seed)
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
        self._set(drawn)

    def live(self, kills: int) -> None:
        self._start()
        with self._client() as client:
            for topic, partitions in CREATED.items():
                client.create(topic, partitions)
        self._kill_under_load(at_once=False)
        while self.counts["kills"] < kills:
            if self._rng.random() < 0.1:
                self._draw_settings()
            kind = self._rng.random()
            if kind < WHILE_STARTING:
                self._kill_while_starting()
            else:
                self._start()
                self._kill_under_load(at_once=kind < WHILE_STARTING + AT_ONCE)
        self._end()

    def _client(self) -> TextClient:
        return TextClient(self.broker.host, self.broker.port, timeout_s=SOCKET_TIMEOUT_S)

    def _kill_under_load(self, *, at_once: bool) -> None:
        if not at_once:
            with self._client() as client:
                self._history.check(client, self._rng, whole=False)
        seconds = self._rng.uniform(0, 0.02) if at_once else 0.02 + 0.38 * self._rng.random() ** 2
        put_and_get(self.broker, self._history, self._rng, seconds, 0 if at_once else ANSWERS)
        self._count("kills at once" if at_once else "kills under load")

    def _end(self) -> None:
        """Check that a kill leaves no damage, and that everything is there, and in its place after an orderly stop."""
        self._verify()
        self._start()
        with self._client() as client:
            self._history.check(client, self._rng, whole=True)
        report = self._stop()
        placed = len(self._history.places)
        expect(report.records == report.units == placed, "log and queues hold what was delivered", report, placed)
        self.counts["acknowledged"] = self._history.acknowledged
        self.counts["delivered without an answer"] = placed - self._history.acknowledged
        self.counts["sent"] = len(self._history.sent)


one_case: Final = partial(one_life, LoadLife)
run: Final = partial(run_lives, LoadLife)

if __name__ == "__main__":
    main(LoadLife)

"""Lives of data folders whose brokers are killed again and again: what the modules that kill real brokers share."""

import argparse
import multiprocessing
import random
import shutil
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import ClassVar, Final

from metaq.store.recovery.verify import Report, verify
from metaq.timers.inspecting import TimerInspection
from tests.crash.command import Result, expect
from tests.crash.driver import CaseFailed
from tests.support.broker import BrokerProcess, wait_until

ANSWERS: Final = 15
"""Answers that a load has got before its broker is killed under it, however slow the machine is."""
ANSWERED_S: Final = 60.0


def await_answers(count: Callable[[], int], has_failed: Callable[[], bool]) -> None:
    """Return when there are ``ANSWERS`` more answers than now, or the load has failed."""
    enough = count() + ANSWERS
    wait_until(lambda: count() >= enough or has_failed(), ANSWERED_S, f"{ANSWERS} answers")


class Life(ABC):
    """One data folder from its beginning to its end: one case."""

    name: ClassVar[str]
    """Of the module in this package."""
    most_kills: ClassVar[int]
    """In one case."""

    def __init__(self, seed: int, folder: Path, broker: type[BrokerProcess] = BrokerProcess) -> None:
        self._rng = random.Random(seed)
        self._start_s = 1.0  # how long the last start took
        self._folder = folder
        self.broker = broker(folder / "data")
        self.counts: Counter[str] = Counter()
        """What happened; its ``kills`` are all kills."""

    @abstractmethod
    def live(self, kills: int) -> None:
        """Live until the broker was killed so often, and check what must hold. Raises ``Violation``."""

    def _set(self, flags: Mapping[str, object]) -> None:
        """Start the broker with these flags from now on, at a durability level that is drawn."""
        self.broker.flags = tuple(text for name, value in flags.items() for text in (f"--{name}", str(value)))
        self.broker.durability = self._rng.choice(("disk", "memory"))

    def _start(self) -> None:
        began = time.monotonic()
        self.broker.start()
        self._start_s = time.monotonic() - began

    def _kill(self, *kinds: str) -> None:
        expect(self.broker.running, "the broker lives", self.broker.stderr()[-2000:])
        self.broker.kill()
        self._count(*kinds)

    def _count(self, *kinds: str) -> None:
        """Count a kill, also as one of these kinds."""
        self.counts.update(("kills", *kinds))

    def _kill_while_starting(self) -> None:
        """The first half of a start goes by with imports: the moment is drawn from the rest, and a little more."""
        moment = time.monotonic() + self._start_s * self._rng.uniform(0.5, 1.2)
        self.broker.launch()
        wait_until(lambda: time.monotonic() >= moment, 2 * self._start_s + 1, "the moment of the kill")
        self._kill("kills while starting")

    def _stop(self) -> Report:
        """Stop the broker in order, and verify the folder."""
        expect(self.broker.terminate() == 0, "an orderly stop", self.broker.stderr()[-2000:])
        expect("Traceback" not in self.broker.stderr(), "no surprises", self.broker.stderr()[-2000:])
        return self._verify()

    def _verify(self) -> Report:
        report = verify(self.broker.data, inspect=TimerInspection().record)
        expect(not report.damages and not report.quarantined_bytes, "no kill damages anything", report)
        return report


def one_life(kind: type[Life], seed: int, kills: int = 0) -> dict[str, int]:
    """Live one data folder, with as many kills as its kind has; return the counts. It is removed unless something is wrong."""
    folder = Path(tempfile.mkdtemp(prefix=f"metaq-{kind.name}-{seed}-"))
    life = kind(seed, folder)
    try:
        life.live(kills or kind.most_kills)
    except Exception as error:
        raise CaseFailed(
            f"after {life.counts['kills']} kills: {error!r}\nflags: {' '.join(life.broker.flags)}\nfolder: {folder}\n"
            f"replay: python -m tests.crash.{kind.name} --seed {seed}"
        ) from error
    finally:
        life.broker.kill()
    shutil.rmtree(folder)
    return dict(life.counts)


def run_lives(kind: type[Life], seed: int, count: int, workers: int = 2) -> Result:
    """Kill at least ``count`` times, in cases from ``seed`` on, so many of them side by side."""
    seeds = range(seed, seed + -(-count // kind.most_kills))
    details: Counter[str] = Counter()
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for case in pool.map(partial(one_life, kind), seeds):
            details.update(case)
    return Result(kind.name, seeds, details["kills"], dict(details))


def main(kind: type[Life]) -> None:
    """``--seed N`` lives the case N, ``--count M`` that and as many after it as make M kills."""
    parser = argparse.ArgumentParser(
        description=sys.modules[kind.__module__].__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=kind.most_kills, help="kills")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    print(run_lives(kind, options.seed, options.count, options.workers))

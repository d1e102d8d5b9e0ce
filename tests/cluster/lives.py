"""Many lives, several at a time, each in a process of its own: they mostly wait for sessions to end."""

import argparse
import multiprocessing
import shutil
import statistics
import tempfile
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Final, NamedTuple

from tests.cluster.life import EXCUSED, CalledOff, Campaign, Life
from tests.crash.command import Result, expect
from tests.crash.driver import CaseFailed
from tests.support.canary import MOST_EXCUSED
from tests.support.zookeeper import ZooKeeperProcess

AT_ONCE: Final = 4
"""One takes a third to a half of a processor."""
BACK: Final = "ms of offset commits back at most"

_campaign: Campaign
"""Of a process that lives lives for another one."""


class Lived(NamedTuple):
    """The results of a life that ended well."""

    counts: Counter[str]
    pauses: list[float]
    """See ``Life.pauses``."""
    back_ms: int
    """For how long commits of offsets were lost at most."""


def run_lives(kind: type[Life], name: str, unit: str, seed: int, count: int, rounds: int, at_once: int = AT_ONCE) -> Result:
    """Live groups of at most so many rounds, from ``seed`` on, until ``count`` faults of the unit have been made.

    When one fails (:class:`CaseFailed`) the others end what they have started, and leave nothing. ``Violation`` when the canary
    had to excuse too many.
    """
    context = multiprocessing.get_context("spawn")
    campaign = Campaign(unit, count, context)
    details: Counter[str] = Counter()
    pauses: list[float] = []
    back_ms, following = 0, seed
    running: set[Future[Lived]] = set()
    with ProcessPoolExecutor(at_once, context, _join, (campaign,)) as pool:
        try:
            while running or not campaign.done:
                while len(running) < at_once and not campaign.done:
                    running.add(pool.submit(_live, kind, name, following, rounds))
                    following += 1
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for lived in (future.result() for future in done):
                    details.update(lived.counts)
                    pauses += lived.pauses
                    back_ms = max(back_ms, lived.back_ms)
        except BaseException:
            campaign.call_off()
            raise
    check_excused(details, unit)
    details["ms without acknowledgement, median"] = round(1000 * statistics.median(pauses))
    details["ms at most"] = round(1000 * max(pauses))
    details[BACK] = back_ms
    return Result(name, range(seed, following), details[unit], dict(details))


def check_excused(details: Counter[str], unit: str) -> None:
    """``Violation`` when too many cases needed an excuse."""
    details[EXCUSED] += 0  # it is told in any case
    expect(details[EXCUSED] <= MOST_EXCUSED * details[unit], "this machine was late too often to prove anything", details)


def _join(campaign: Campaign) -> None:
    global _campaign  # noqa: PLW0603 - what processes share they are given when they start, not with their work
    _campaign = campaign


def _live(kind: type[Life], name: str, seed: int, rounds: int) -> Lived:
    life = one_life(kind, name, seed, rounds, _campaign)
    return Lived(life.counts, [pause for pause, _ in life.pauses], round(1000 * life.progress.most_back_s))


def one_life(kind: type[Life], name: str, seed: int, rounds: int, campaign: Campaign | None = None) -> Life:
    """One group. Its folder is removed unless something is wrong."""
    folder = Path(tempfile.mkdtemp(prefix=f"metaq-{name}-{seed}-"))
    with ZooKeeperProcess(folder / "zookeeper") as zookeeper:
        life = kind(seed, folder, zookeeper.address, campaign)
        try:
            life.live(rounds)
        except CalledOff:
            shutil.rmtree(folder)
            raise
        except Exception as error:
            raise CaseFailed(
                f"in {life.doing}, after {dict(life.counts)}: {error!r}\nfolder: {folder}\n"
                f"replay: python -m tests.cluster.{name} --seed {seed} --rounds {rounds}"
            ) from error
    shutil.rmtree(folder)
    return life


def main(kind: type[Life], name: str, rounds: int) -> None:
    """``--seed N`` lives the group N."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=rounds)
    options = parser.parse_args()
    life = one_life(kind, name, options.seed, options.rounds)
    print(dict(life.counts), *life.pauses)

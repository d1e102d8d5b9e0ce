"""SIGKILL of the driver of a streaming query at random moments, and a restart with its checkpoint, while messages arrive.

A case is the life of one query, with up to ``KILLS`` kills of the driver and all its processes: while it starts, while it
plans, reads, keeps a batch or writes its checkpoint. In the end it reads what is left. What must hold: every message of the
topic is in exactly one batch; a batch that is read again holds the same messages; no batch that was committed is read again.

``python -m tests.spark.restarts --seed 7 --count 100`` runs it. A failure names the seed, which draws the same settings again,
not the same instants.
"""

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Final

import pyarrow.parquet as pq

from metaq.client import TextClient, connect
from tests.crash.command import Result, expect
from tests.crash.driver import CaseFailed
from tests.spark.topics import STARTS, TOO_BUSY, log_of
from tests.support.broker import BrokerProcess, wait_until

KILLS: Final = 10
"""In one life."""
WHILE_STARTING: Final = 0.2
"""Share of the kills at a random moment of the start; the others come at random after the first batch of a start."""
TOPIC: Final = "orders"
PARTITIONS: Final = 8
PAUSE_S: Final = 0.02
"""Between two messages."""
START_S: Final = 300.0
"""A driver starts in ten seconds, on a machine that does nothing else."""
NO_LIMIT: Final = 1_000_000
ROOT: Final = Path(__file__).parents[2]

Place = tuple[int, int, bytes]


def run(seed: int, count: int) -> Result:
    """Kill ``count`` times, in lives from ``seed`` on."""
    details: Counter[str] = Counter()
    following = seed
    while details["kills"] < count:
        details.update(one_life(following, min(KILLS, count - details["kills"])))
        following += 1
    return Result("restarts", range(seed, following), details["kills"], dict(details))


def one_life(seed: int, kills: int) -> dict[str, int]:
    """One query from its beginning to its end; its folder is removed unless something is wrong."""
    folder = Path(tempfile.mkdtemp(prefix=f"metaq-restarts-{seed}-"))
    try:
        with BrokerProcess(folder / "data") as broker:
            counts = _Life(seed, folder, broker).live(kills)
    except Exception as error:
        replay = f"python -m tests.spark.restarts --seed {seed} --count {kills}"
        raise CaseFailed(f"{error!r}\nfolder: {folder}\nreplay: {replay}") from error
    shutil.rmtree(folder)
    return dict(counts)


class _Life:
    def __init__(self, seed: int, folder: Path, broker: BrokerProcess) -> None:
        self._rng = random.Random(seed)
        self._folder = folder
        self._log = folder / "driver.log"
        self._log_before = 0
        self._broker = broker
        self._most = self._rng.choice((20, 100, 1000))
        self._start_s = 10.0
        self._committed = -1
        self._seen: set[Path] = set()
        self._counts: Counter[str] = Counter()

    def live(self, kills: int) -> Counter[str]:
        with connect(self._broker.registry) as client:
            client.admin().create_topic(TOPIC, PARTITIONS)
        over = threading.Event()
        producer = threading.Thread(target=self._produce, args=(over, self._rng.random()))
        producer.start()
        try:
            for _ in range(kills):
                self._start_and_kill()
                self._check()
        finally:
            over.set()
            producer.join()
        self._finish()
        found = self._check()
        wanted = {(row.partition, row.offset, row.value) for row in log_of(self._broker, TOPIC)}
        every = [place for batch in found.values() for place in batch]
        expect(set(every) == wanted, "every message is read", wanted ^ set(every))
        self._counts["messages"] = len(wanted)
        self._counts["batches"] = len(found)
        return self._counts

    def _produce(self, over: threading.Event, seed: float) -> None:
        rng = random.Random(seed)
        with TextClient(self._broker.host, self._broker.port, timeout_s=60) as text:
            number = 0
            while not over.wait(PAUSE_S):
                bodies = [b"%d" % (number + more) for more in range(rng.choice((1, 1, 1, 30)))]
                text.put_many(TOPIC, bodies, partition=rng.randrange(PARTITIONS))
                number += len(bodies)

    def _launch(self, most: int, *more: str) -> subprocess.Popen[bytes]:
        """A driver in a session of its own, so that it is killed with its JVM."""
        command = [sys.executable, "-m", "tests.spark.restart_driver", self._broker.registry, TOPIC, str(self._folder)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "SPARK_LOCAL_IP": "127.0.0.1"}
        self._log_before = self._log.stat().st_size if self._log.exists() else 0
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [*command, str(most), *more],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _start_and_kill(self) -> None:
        for _ in range(STARTS):
            driver = self._launch(self._most)
            try:
                lives = self._wait_for_the_moment(driver)
            finally:
                _kill(driver)
            if lives:
                self._counts["kills"] += 1
                return
        raise AssertionError(f"Spark gave up {STARTS} times; see {self._log}")

    def _wait_for_the_moment(self, driver: subprocess.Popen[bytes]) -> bool:
        """Wait for a random moment, and return whether the driver still lives then, to be killed."""
        began, before = time.monotonic(), len(self._files())
        kind, moment = "kills while starting", began + self._rng.uniform(0.2, 1.0) * self._start_s
        if self._rng.random() >= WHILE_STARTING:
            what = f"the driver reads; see {self._log}"
            wait_until(lambda: len(self._files()) > before or driver.poll() is not None, START_S, what)
            self._start_s = time.monotonic() - began
            kind, moment = "kills while reading", time.monotonic() + 3 * self._rng.random() ** 2
        wait_until(lambda: time.monotonic() >= moment or driver.poll() is not None, START_S, "the moment of the kill")
        if driver.poll() is None:
            self._counts[kind] += 1
            return True
        self._expect_too_busy()
        return False

    def _expect_too_busy(self) -> None:
        words = self._log.read_bytes()[self._log_before :].decode(errors="replace")
        expect(TOO_BUSY in words, "the driver lives", words[-3000:])

    def _finish(self) -> None:
        for _ in range(STARTS):
            driver = self._launch(NO_LIMIT, "now")
            try:
                if driver.wait(START_S) == 0:
                    return
            finally:
                _kill(driver)
            self._expect_too_busy()
        raise AssertionError(f"Spark gave up {STARTS} times; see {self._log}")

    def _files(self) -> list[Path]:
        return sorted((self._folder / "batches").glob("*.parquet"))

    def _check(self) -> dict[int, list[Place]]:
        """The batches, compared with what was committed before."""
        found: dict[int, list[Place]] = {}
        again = 0
        for path in self._files():
            number = int(path.stem.partition("-")[0])
            columns = pq.read_table(path).to_pydict()
            places = sorted(zip(columns["partition"], columns["offset"], columns["value"], strict=True))
            if number in found:
                again += 1
                expect(found[number] == places, "a batch that is read again is the same", path)
            expect(path in self._seen or number > self._committed, "no committed batch is read again", path)
            self._seen.add(path)
            found[number] = places
        every = Counter(place for batch in found.values() for place in batch)
        expect(not every or max(every.values()) == 1, "no message is in two batches", every.most_common(3))
        commits = self._folder / "checkpoint" / "commits"
        done = [int(path.name) for path in commits.iterdir() if path.name.isdecimal()] if commits.is_dir() else []
        expect(set(done) <= found.keys(), "what is committed is kept", sorted(set(done) - found.keys()))
        self._committed = max(done, default=-1)
        self._counts["batches read again"] = again
        return found


def _kill(driver: subprocess.Popen[bytes]) -> None:
    """With all processes of its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(driver.pid, signal.SIGKILL)
    driver.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=KILLS)
    options = parser.parse_args()
    print(run(options.seed, options.count))


if __name__ == "__main__":
    main()

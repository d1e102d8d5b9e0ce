"""SIGKILL while consumers pop, ack, nack, extend and reject, in two groups, over TCP.

A case is the life of one data folder, which outlives ``KILLS`` kills. Each consumer keeps what it was answered: which messages
it got, how long its leases go on, and what it finished. At some seeds retention deletes the segments of what is still open.

What must hold (L-1 to L-8, L-11): an ack that was answered is never undone; no message is given while a lease of it goes on,
across kills too; each delivery says one delivery more than the last; no message is given more often than its group allows; each
is what was sent. In the end each message is acked or a dead letter, and no message is a dead letter twice.

``python -m tests.crash.leases --seed 7 --count 2000 --workers 2`` runs it. A failure names the seed. A seed draws the same
settings and the same work again, but not the same instants, as processes and disks are not deterministic.
"""

import argparse
import multiprocessing
import random
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Final

from metaq.protocol.remoting import fastjson
from metaq.protocol.remoting.codes import Request
from metaq.store.recovery.verify import verify
from tests.crash.command import Result, expect
from tests.crash.driver import CaseFailed
from tests.crash.leasejournal import GROUPS, MOST_TIMES, PARTITIONS, TOPIC, Consumer, Journal, Place
from tests.crash.lives import await_answers
from tests.support.admin import ask, connect, create_topic
from tests.support.broker import BrokerProcess, wait_until
from tests.support.messages import send as send_message
from tests.support.messages import send_header, sent
from tests.support.remoting import ConnectionEnded, RemotingClient

KILLS: Final = 20
"""In one case."""
CONSUMERS: Final = 3
"""Of each group."""
KEPT_S: Final = 5
AT_ONCE: Final = 8
DEADLINE_S: Final = 120.0


def run(seed: int, count: int, workers: int = 2) -> Result:
    """Kill at least ``count`` times, in cases from ``seed`` on, so many of them side by side."""
    seeds = range(seed, seed + -(-count // KILLS))
    details: Counter[str] = Counter()
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for case in pool.map(one_case, seeds):
            details.update(case)
    return Result("leases", seeds, details["kills"], dict(details))


def one_case(seed: int, kills: int = KILLS) -> dict[str, int]:
    """Live one data folder; return how many kills it saw, and so on. It is removed unless something is wrong."""
    folder = Path(tempfile.mkdtemp(prefix=f"metaq-leases-{seed}-"))
    life = Life(seed, folder)
    try:
        life.live(kills)
    except Exception as error:
        raise CaseFailed(
            f"after {life.counts['kills']} kills: {error!r}\nflags: {' '.join(life.broker.flags)}\nfolder: {folder}\n"
            f"replay: python -m tests.crash.leases --seed {seed}"
        ) from error
    finally:
        life.broker.kill()
    shutil.rmtree(folder)
    return dict(life.counts)


class Life:
    """One data folder from its beginning to its end."""

    def __init__(self, seed: int, folder: Path) -> None:
        rng = self._rng = random.Random(seed)
        self._keeps_little = rng.random() < 0.4
        flags = {
            "max-body-bytes": 4096,
            "segment-bytes": 262_144,
            "hot-bytes": rng.choice((0, 50_000, 256 << 20)),
            "checkpoint-interval-ms": rng.choice((10, 200, 5000)),
            "sweep-interval-ms": rng.choice((10, 250)),
            "retention-interval-ms": 3_600_000,  # the test says when
            "delete-hour": (time.gmtime().tm_hour + 12) % 24,
            "keep-hours": KEPT_S / 3600 if self._keeps_little else 72,
        }
        texts = (text for name, value in flags.items() for text in (f"--{name}", str(value)))
        self.broker = BrokerProcess(folder / "data", *texts, durability=rng.choice(("memory", "memory", "disk")))
        self.journal = Journal()
        self.counts: Counter[str] = Counter()

    def live(self, kills: int) -> None:
        self.broker.start()
        with connect(self.broker) as client:
            create_topic(client, TOPIC, write=PARTITIONS, read=PARTITIONS)
            for group in GROUPS:
                row = {"groupName": group, "retryMaxTimes": MOST_TIMES}
                ask(client, Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, fastjson.encode(row))
        saved = self.broker.data / "config" / "subscriptionGroup.json"
        wait_until(lambda: saved.exists() and all(group in saved.read_text() for group in GROUPS), DEADLINE_S, "saved tables")
        for _ in range(kills):
            self._work(self._rng.uniform(0, 0.8))
            self.counts["kills"] += 1
            self.broker.start()
            with connect(self.broker) as client:
                self.journal.read_dead_letters(client)
                if self._keeps_little:
                    ask(client, Request.DELETE_EXPIRED_COMMITLOG)
        self._end()

    def _work(self, seconds: float | None) -> None:
        """Send and consume until the kill; without a number of seconds, consume until nothing is left."""
        failures: list[BaseException] = []
        stopping = threading.Event()
        works: list[Callable[[RemotingClient, random.Random, threading.Event], None]] = [
            self._consume(group, careful=seconds is None) for group in GROUPS for _ in range(CONSUMERS)
        ]
        if seconds is not None:
            works.append(self._send)
        seeds = [self._rng.random() for _ in works]
        threads = [
            threading.Thread(target=self._guarded, args=(work, random.Random(seed), stopping, failures), daemon=True)
            for work, seed in zip(works, seeds, strict=True)
        ]
        for thread in threads:
            thread.start()
        if seconds is not None:
            await_answers(lambda: self.journal.counts["acked"], lambda: bool(failures))
            time.sleep(seconds)
            expect(self.broker.running, "the broker lives", self.broker.stderr()[-2000:])
            self.broker.kill()
        else:
            wait_until(lambda: bool(failures) or self._is_over(), DEADLINE_S, "all is consumed", pause_s=0.2)
        stopping.set()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]

    def _guarded(
        self,
        work: Callable[[RemotingClient, random.Random, threading.Event], None],
        rng: random.Random,
        stopping: threading.Event,
        failures: list[BaseException],
    ) -> None:
        try:
            with RemotingClient(self.broker.host, self.broker.port) as client:
                work(client, rng, stopping)
        except (OSError, ConnectionEnded):
            pass  # the broker was killed
        except BaseException as error:  # noqa: BLE001 - raised by whoever waits for the thread
            failures.append(error)

    def _send(self, client: RemotingClient, rng: random.Random, stopping: threading.Event) -> None:
        while not stopping.is_set():
            partitions = [rng.randrange(PARTITIONS) for _ in range(AT_ONCE)]
            bodies = [self.journal.new_body(rng.choice((20, 200, 2000))) for _ in partitions]
            opaques = [
                send_message(client, send_header(TOPIC, partition=partition), body)
                for partition, body in zip(partitions, bodies, strict=True)
            ]
            for opaque, body in zip(opaques, bodies, strict=True):
                fields = sent(client, opaque)
                self.journal.sent(body, Place(int(fields["queueId"]), int(fields["queueOffset"])))
            time.sleep(0.01)

    def _consume(self, group: str, *, careful: bool) -> Callable[[RemotingClient, random.Random, threading.Event], None]:
        def consume(client: RemotingClient, rng: random.Random, stopping: threading.Event) -> None:
            consumer = Consumer(client, self.journal, group, rng)
            while not stopping.is_set():
                consumer.work(careful=careful)

        return consume

    def _missing(self) -> list[tuple[str, int]]:
        with connect(self.broker) as client:
            self.journal.read_dead_letters(client)
            return self.journal.missing([_bound(client, Request.GET_MIN_OFFSET, each) for each in range(PARTITIONS)])

    def _is_over(self) -> bool:
        """Return whether nothing is missing, and nothing open that nobody was told of: the offsets are at the ends."""
        if self._missing():
            return False
        with connect(self.broker) as client:
            ends = [_bound(client, Request.GET_MAX_OFFSET, partition) for partition in range(PARTITIONS)]
            asked = [(group, partition) for group in GROUPS for partition in range(PARTITIONS)]
            answers = [
                ask(client, Request.QUERY_CONSUMER_OFFSET, consumerGroup=group, topic=TOPIC, queueId=partition)
                for group, partition in asked
            ]
        return [int(answer.fields["offset"]) for answer in answers] == ends * len(GROUPS)

    def _end(self) -> None:
        self._work(None)
        expect(not self._missing(), "nothing is lost", self._missing())
        expect(self.broker.terminate() == 0, "an orderly stop", self.broker.stderr()[-2000:])
        expect("Traceback" not in self.broker.stderr(), "no surprises", self.broker.stderr()[-2000:])
        report = verify(self.broker.data)
        expect(not report.damages and not report.quarantined_bytes, "no kill damages anything", report)
        self.counts.update(self.journal.counts)


def _bound(client: RemotingClient, code: int, partition: int) -> int:
    return int(ask(client, code, topic=TOPIC, queueId=partition).fields["offset"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=KILLS, help="kills")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    print(run(options.seed, options.count, options.workers))


if __name__ == "__main__":
    main()

"""A slave that starts empty while its master has gigabytes and accepts puts, and that is killed halfway.

What must hold: its progress is visible all the time, at the master and at the slave; after a restart it goes on where it was;
it gets in sync; the two logs are the same, byte for byte; and when the master is lost then, the promoted slave has every
message that was acknowledged.

``python -m tests.cluster.fullcopy --seed 7 --megabytes 5000`` copies that much. It needs twice that on disk.
"""

import argparse
import random
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from metaq.client.text.textclient import TextClient
from tests.cluster.traffic import TOPIC
from tests.crash.command import Result, expect
from tests.support.cli import Cli
from tests.support.cluster import Cluster, ReplicaProcess, compare_logs, wait_caught_up

MEGABYTE: Final = 1_000_000
PARTITIONS: Final = 4
CHOSEN: Final = "chosen"
"""The topic of the messages that are put during the copy."""
PAUSE_S: Final = 0.02
STUCK_S: Final = 60.0
"""So long a copy may stand still, on a machine that has other things to do."""
ANSWER_S: Final = 60.0


class Trickle(threading.Thread):
    """Puts small messages until it is stopped, and remembers those that were acknowledged."""

    def __init__(self, master: ReplicaProcess) -> None:
        super().__init__()
        self.acknowledged: dict[int, bytes] = {}
        """Bodies by id."""
        self._place = (master.host, master.port)
        self._stopping = threading.Event()

    def run(self) -> None:
        with TextClient(*self._place, timeout_s=ANSWER_S) as client:
            while not self._stopping.wait(PAUSE_S):
                body = b"%d" % len(self.acknowledged)
                self.acknowledged[client.put(CHOSEN, body, partition=0).id] = body

    def stop(self) -> None:
        self._stopping.set()
        self.join()


class Watch:
    """How far the copy is, as operators see it."""

    def __init__(self, master: ReplicaProcess, slave: ReplicaProcess) -> None:
        self._master, self._slave = master, slave
        self._cli = Cli(master.registry)
        self._moved_at = time.monotonic()
        self.end = 0
        self.looks = 0

    def look(self) -> dict[str, Any]:
        """The slave's line of ``metaq cluster status``; it and the slave itself agree, and both go on."""
        before = int(self._slave.status()["end"])
        rows = [row for row in self._cli.rows("cluster", "status") if row["replica"] == self._slave.number]
        row = rows[0] if rows else {"end": None, "in_sync": False}  # nobody knows it between two connections
        after = int(self._slave.status()["end"])
        if row["end"] is not None and before > 0:  # between two connections the master knows nothing
            expect(row["end"] <= after, "the master does not say that the slave has more than it has", row, after)
        expect(after >= self.end, "the slave's log only grows", after, self.end)
        if after > self.end:
            self.end, self._moved_at = after, time.monotonic()
        expect(time.monotonic() - self._moved_at < STUCK_S, f"the copy goes on; see {self._slave.log}", row)
        self.looks += 1
        found: dict[str, Any] = row
        return found

    def until_end(self, log_offset: int) -> None:
        while self.end < log_offset:
            self.look()

    def until_in_sync(self) -> None:
        while not self.look()["in_sync"]:
            continue


def bodies(rng: random.Random, size: int) -> Iterator[bytes]:
    """Bodies of all sizes, so many bytes together."""
    block = rng.randbytes(4 * MEGABYTE)
    while size > 0:
        length = rng.choice((100, 2_000, 30_000, 60_000, 200_000))
        at = rng.randrange(len(block) - length)
        yield block[at : at + length]
        size -= length


def fill(master: ReplicaProcess, rng: random.Random, megabytes: int) -> None:
    """So much, over several partitions."""
    with TextClient(master.host, master.port, timeout_s=ANSWER_S) as client:
        client.create(TOPIC, PARTITIONS)
        for _ in range(megabytes // 100 or 1):
            share = MEGABYTE * megabytes // (megabytes // 100 or 1)
            client.put_many(TOPIC, bodies(rng, share), partition=rng.randrange(PARTITIONS))


def copy(seed: int, megabytes: int, folder: Path) -> dict[str, int]:
    """Fill, copy, lose the slave, go on, lose the master, compare."""
    rng = random.Random(seed)
    with Cluster(folder, "--min-in-sync", "1", "--replica-timeout-ms", str(round(1000 * ANSWER_S))) as cluster:
        master = cluster.add(1)
        fill(master, rng, megabytes)
        size = int(master.status()["end"])
        trickle = Trickle(master)
        trickle.start()
        try:
            began = time.monotonic()
            slave = cluster.add(2, master.replication)
            watch = Watch(master, slave)
            watch.until_end(round(size * rng.uniform(0.3, 0.7)))
            slave.kill()
            killed = time.monotonic()
            slave.start()
            away_s = time.monotonic() - killed
            watch.until_in_sync()
            seconds = time.monotonic() - began - away_s
        finally:
            trickle.stop()
        end = wait_caught_up(master, slave)
        check_went_on(slave, size)
        master.kill()
        slave.promote()
        with TextClient(slave.host, slave.port) as client:
            found = {message.id: message.body for message in client.iterate(CHOSEN)}
        lost = {id_: body for id_, body in trickle.acknowledged.items() if found.get(id_) != body}
        expect(not lost, f"{len(lost)} that were acknowledged are lost", list(lost.items())[:3])
        slave.kill()
        compare_logs(master.data, slave.data, 0, end)
        return {
            "MB in the log": size // MEGABYTE,
            "MB/s": round(size / MEGABYTE / seconds),
            "s until in sync": round(seconds),
            "acknowledged meanwhile": len(trickle.acknowledged),
            "looks at the progress": watch.looks,
        }


def check_went_on(slave: ReplicaProcess, size: int) -> None:
    """The second start of the slave did not begin anew, and its log says how far the copy was."""
    said = slave.stderr()
    first, second = [int(at) for at in re.findall(r"following master=\S+ from=(\d+)", said)[:2]]
    expect(first == 0 < second, "it goes on where it was killed", first, second)
    expect("log is copied anew" not in said, "what it had is not thrown away")
    expect("Traceback" not in said, "no surprises", said[-3000:])


def run(seed: int, count: int) -> Result:
    """Copy ``count`` megabytes."""
    with tempfile.TemporaryDirectory(prefix=f"metaq-fullcopy-{seed}-") as folder:
        details = copy(seed, count, Path(folder))
    return Result("fullcopy", range(seed, seed + 1), count, details)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--megabytes", type=int, default=5000)
    options = parser.parse_args()
    print(run(options.seed, options.megabytes))


if __name__ == "__main__":
    main()

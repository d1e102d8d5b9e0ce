"""SIGKILL while messages are parked for their time, cancelled and delivered; the index of timers spoiled, the clock set.

A case is the life of one data folder, which outlives many kills. Messages are delayed by moments, seconds or an hour, and
cancelled at any distance from their time. Between a kill and the next start the folder ``timerindex`` may be deleted, cut
short, altered, put back as it was before, or be that of another broker, and the clock may be set. At some seeds retention
deletes what has been read, so pending messages are stored again and again. In the end the clock is set beyond the last due.

What must hold: it always starts; each message that was acknowledged and not cancelled is delivered exactly once; none
before its time; none twice; none whose cancel was acknowledged; each one of which a cancel was told that it was delivered.

``python -m tests.crash.timers --seed 7 --count 2000 --workers 2`` runs it. A failure names the seed. A seed draws the same
settings and the same work again, but not the same instants, as processes and disks are not deterministic.
"""

import random
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import ClassVar, Final

from metaq.client import TextClient
from metaq.errors import ConnectionFailed
from metaq.protocol.record import decode_record
from metaq.protocol.remoting.codes import Request
from tests.crash.command import expect
from tests.crash.lives import Life, await_answers, main, one_life, run_lives
from tests.crash.timerjournal import CANCELLED, DELIVERED, HOUR_MS, TOPIC, Connection, Journal
from tests.support.admin import ask, connect
from tests.support.broker import SOCKET_TIMEOUT_S, BrokerProcess, wait_until
from tests.support.remoting import RemotingClient

PARTITIONS: Final = 2
SENDERS: Final = 3
WHILE_STARTING: Final = 0.2
AT_ONCE: Final = 0.1
"""Shares of the kills: before the broker is ready, and in its first moments."""
SPOILED: Final = 0.25
CLOCK_SET: Final = 0.15
"""Shares of the starts."""
LARGEST_BODY: Final = 4096
AIMING: Final = 8
"""Connections that cancel just in time, each with a partition of its own."""
DELIVERY_DEADLINE_S: Final = 120.0
KEPT_S: Final = 2
ASKED_S: Final = 2.0
"""How long the command to delete segments is repeated when one is due and none goes, on a machine that does much else."""
FILLER: Final = "filler"
"""A topic of nobody."""


class ControlledBroker(BrokerProcess):
    """A broker whose clock is as fast as a file beside its data folder says."""

    program: ClassVar[tuple[str, ...]] = ("tests.support.controlled",)


class TimerLife(Life):
    """One data folder from its beginning to its end."""

    name = "timers"
    most_kills = 20

    def __init__(self, seed: int, folder: Path) -> None:
        super().__init__(seed, folder, ControlledBroker)
        self._index = folder / "data" / "timerindex"
        self._fast_ms = 0
        self._positions = [0] * PARTITIONS
        self.journal = Journal(random.Random(seed))
        self._keeps_little = self._rng.random() < 0.5
        self._draw_settings()

    def _draw_settings(self) -> None:
        """Small files and short pauses, so that everything that happens to timers happens all the time."""
        rng = self._rng
        pauses_ms = (10, 50, 200) if self._keeps_little else (10, 50, 200, 5000)  # what is deleted is in a checkpoint before
        drawn = {
            "max-body-bytes": LARGEST_BODY + 64,
            "segment-bytes": 262_144,
            "hot-bytes": rng.choice((0, 50_000, 256 << 20)),
            "checkpoint-interval-ms": rng.choice(pauses_ms),
            "sweep-interval-ms": rng.choice((10, 50, 250)),
            "sync-timeout-ms": 600_000,  # no put is refused, however busy the disk is
            "ample-free-bytes": 0,  # a disk that is rather full deletes nothing
            "retention-interval-ms": 3_600_000,  # the test says when
            "keep-hours": KEPT_S / 3600 if self._keeps_little else 72,
            "timer-engine": rng.choice(("rocksdict", "rocksdict", "sqlite3")),
        }
        self._set(drawn)

    def clock(self) -> int:
        """Return the broker's time."""
        return time.time_ns() // 1_000_000 + self._fast_ms

    def live(self, kills: int) -> None:
        self._start()
        with self._client() as client:
            client.create(TOPIC, PARTITIONS)
            client.create(FILLER, 1)
        self._kill_under_load(at_once=False)
        while self.counts["kills"] < kills:
            if self._rng.random() < 0.1:
                self._draw_settings()
            if self._rng.random() < SPOILED:
                self._spoil()
            if self._rng.random() < CLOCK_SET:
                self._set_clock(self._rng.choice((-1, 1)) * self._rng.choice((1_000, 60_000, 3 * HOUR_MS)))
            kind = self._rng.random()
            if kind < WHILE_STARTING:
                self._kill_while_starting()
            else:
                self._start()
                self._kill_under_load(at_once=kind < WHILE_STARTING + AT_ONCE)
        self._end()

    def _client(self) -> TextClient:
        return TextClient(self.broker.host, self.broker.port, timeout_s=SOCKET_TIMEOUT_S)

    # -- the load -----------------------------------------------------------------------------------------------------

    def _kill_under_load(self, *, at_once: bool) -> None:
        self._read_all(None)
        if self._keeps_little:
            self._delete_expired()
        seconds = self._rng.uniform(0, 0.05) if at_once else 0.05 + 0.8 * self._rng.random() ** 2
        failures: list[BaseException] = []
        threads = [
            threading.Thread(target=self._guarded, args=(self._send, failures, seed), daemon=True) for seed in self._seeds()
        ]
        threads.append(threading.Thread(target=self._guarded, args=(self._read, failures, 0), daemon=True))
        for thread in threads:
            thread.start()
        if not at_once:
            await_answers(lambda: self.journal.acknowledged, lambda: bool(failures))
        time.sleep(seconds)
        self._kill("kills at once" if at_once else "kills under load")
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]

    def _seeds(self) -> list[int]:
        return [self._rng.randrange(1 << 32) for _ in range(SENDERS)]

    def _guarded(self, work: Callable[[int], None], failures: list[BaseException], seed: int) -> None:
        try:
            work(seed)
        except (OSError, ConnectionFailed):
            pass  # the broker was killed
        except BaseException as error:  # noqa: BLE001 - raised by whoever waits for the thread
            failures.append(error)

    def _send(self, seed: int) -> None:
        rng = random.Random(seed)
        connection = Connection(self.broker, self.journal, self.clock)
        try:
            while True:
                number = self.journal.some_open() if rng.random() < 0.3 else None
                if number is None:
                    connection.park(some_delay(rng), rng.randrange(PARTITIONS), rng.choice((0, 100, LARGEST_BODY - 8)))
                    continue
                rest_s = (self.journal.timers[number].due_ms - self.clock()) / 1000
                if 0 < rest_s < 0.3 and rng.random() < 0.7:
                    time.sleep(max(0, rest_s + rng.uniform(-0.004, 0.004)))
                connection.cancel(number)
        finally:
            connection.close()

    def _read(self, _: int) -> None:
        with self._client() as client:
            while True:
                self._read_on(client, self.clock)
                time.sleep(0.003)

    def _read_all(self, clock: Callable[[], int] | None) -> None:
        with self._client() as client:
            self._read_on(client, clock)

    def _read_on(self, client: TextClient, clock: Callable[[], int] | None) -> None:
        """Read what is new in all partitions."""
        for partition in range(PARTITIONS):
            while True:
                batch = client.get(TOPIC, self._positions[partition], partition=partition, max_bytes=1 << 20)
                now_ms = None if clock is None else clock()
                for message in batch.messages:
                    self.journal.read(int.from_bytes(message.body[:8]), message.id, now_ms)
                    self._positions[partition] = message.next_position
                if not batch.messages:
                    break

    def _delete_expired(self) -> None:
        """End the last segment, and have those deleted that are old enough: all of their messages have been read.

        The command is repeated for a time: right after a start the delayed messages there have not been looked at yet.
        """
        bases = self._bases()
        with self._client() as client:
            while self._bases() == bases:  # how much the senders write depends on the machine
                client.put(FILLER, bytes(LARGEST_BODY))
        until = time.monotonic() + (ASKED_S if self._is_due() else 0)
        with connect(self.broker) as client:
            while not (deleted := self._delete(client)) and time.monotonic() < until:
                time.sleep(0.01)
        self.counts["segments deleted"] += deleted

    def _delete(self, client: RemotingClient) -> int:
        before = self._bases()
        ask(client, Request.DELETE_EXPIRED_COMMITLOG)
        return len(before - self._bases())

    def _delete_all(self) -> None:
        """Nothing is pending any more: of all segments only the last one stays, and the spare one after it."""

        def is_deleted(client: RemotingClient) -> bool:
            self._delete(client)
            return len(self._bases()) <= 2

        with connect(self.broker) as client:
            wait_until(partial(is_deleted, client), DELIVERY_DEADLINE_S, "all full segments are deleted", pause_s=0.05)

    def _is_due(self) -> bool:
        """Return whether the oldest segment is old enough: the time of the first record of the second one says so."""
        _, second, *_ = sorted((self._folder / "data" / "commitlog").iterdir())
        with second.open("rb") as file:
            begin = file.read(2 * LARGEST_BODY)
        return any(begin) and self.clock() - decode_record(begin).store_ms >= KEPT_S * 1000

    def _bases(self) -> set[str]:
        return {path.name for path in (self._folder / "data" / "commitlog").iterdir()}

    # -- between a kill and a start -----------------------------------------------------------------------------------

    def _set_clock(self, by_ms: int) -> None:
        self._fast_ms += by_ms
        (self._folder / "clock").write_text(str(self._fast_ms))
        self.counts["clock set"] += 1

    def _spoil(self) -> None:
        """Delete, damage or exchange the index, or keep a copy of it for another time."""
        if not self._index.exists():
            return
        copy, rng = self._folder / "copy", self._rng
        files = sorted(path for path in self._index.iterdir() if path.is_file() and path.stat().st_size)
        kind = rng.choice(("delete", "delete a file", "truncate", "flip", "copy", "copy", "put back", "put back", "another's"))
        match kind:
            case "delete":
                shutil.rmtree(self._index)
            case "delete a file" if files:
                rng.choice(files).unlink()
            case "truncate" if files:
                path = rng.choice(files)
                with path.open("r+b") as file:
                    file.truncate(rng.randrange(path.stat().st_size))
            case "flip" if files:
                path = rng.choice(files)
                data = bytearray(path.read_bytes())
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
                path.write_bytes(data)
            case "copy":
                shutil.rmtree(copy, ignore_errors=True)
                shutil.copytree(self._index, copy)
                return
            case "put back" if copy.exists():
                shutil.rmtree(self._index)
                shutil.copytree(copy, self._index)
            case "another's":
                shutil.rmtree(self._index)
                shutil.copytree(self._anothers(), self._index)
            case _:
                return
        self.counts[f"index: {kind}"] += 1

    def _anothers(self) -> Path:
        """Return the index of another broker, with pending messages."""
        data = self._folder / "another"
        if not data.exists():
            with BrokerProcess(data, *self.broker.flags) as broker:
                journal = Journal(self._rng)
                connection = Connection(broker, journal, self.clock)
                with TextClient(broker.host, broker.port) as client:
                    client.create(TOPIC, PARTITIONS)
                for _ in range(30):
                    connection.park(self._rng.choice((1_000, HOUR_MS)), 0, 100)
                connection.close()
                expect(broker.terminate() == 0, "an orderly stop", broker.stderr()[-2000:])
        return data / "timerindex"

    # -- the end ------------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        """Deliver everything, and check that no kill has left damage."""
        last_ms = max((timer.due_ms for timer in self.journal.timers), default=0)
        self._set_clock(max(0, last_ms - self.clock()) + 1000)
        self._start()
        with self._client() as client:
            wait_until(lambda: self._is_over(client), DELIVERY_DEADLINE_S, "everything is delivered", pause_s=0.02)
            time.sleep(0.5)  # for what nobody is owed: its park was not answered
            self._read_on(client, None)
        self.journal.check()
        if self._keeps_little:
            self._delete_all()
        self._stop()
        self.counts.update(self.journal.counts())

    def _is_over(self, client: TextClient) -> bool:
        self._read_on(client, None)
        return self.journal.owed == 0


def aim(seed: int, count: int, folder: Path, durability: str) -> dict[str, int]:
    """Cancel messages at about their time, on several connections, and read at once what was delivered instead.

    Each cancel that comes too late makes the next one earlier, and each one in time later, so both happen on every machine.
    """
    with BrokerProcess(folder / "data", durability=durability) as broker:
        journal = Journal(random.Random(seed))
        with TextClient(broker.host, broker.port) as client:
            client.create(TOPIC, AIMING)
        with ThreadPoolExecutor(AIMING) as pool:
            shares = [pool.submit(_aim, broker, journal, seed + share, share, -(-count // AIMING)) for share in range(AIMING)]
            for share in shares:
                share.result()
        wait_until(lambda: all(timer.copies or CANCELLED in timer.answers for timer in journal.timers), 30.0, "all are decided")
        journal.check()
        return journal.counts()


def _aim(broker: BrokerProcess, journal: Journal, seed: int, partition: int, count: int) -> None:
    rng, position = random.Random(seed), 0
    early_s, longer_ms = 0.0, 0  # longer, where a put takes as long as the delay
    connection = Connection(broker, journal, _now_ms)
    with TextClient(broker.host, broker.port, timeout_s=SOCKET_TIMEOUT_S) as client:
        for _ in range(count):
            number = connection.park(rng.randint(5, 30) + longer_ms, partition, 10)
            timer = journal.timers[number]
            timer.asked += 1
            left_s = timer.due_ms / 1000 - time.time()
            longer_ms = longer_ms + 25 if left_s <= early_s else max(0, longer_ms - 5)
            time.sleep(max(0, left_s - early_s + rng.uniform(-0.003, 0.003)))
            code = connection.cancel(number)
            early_s += 0.004 if code == DELIVERED else -0.004
            batch = client.get(TOPIC, position, partition=partition)
            for message in batch.messages:
                journal.read(int.from_bytes(message.body[:8]), message.id, _now_ms())
                position = message.next_position
            expect(bool(timer.copies) == (code == DELIVERED), "the answer says what readers see", number, timer, code)
    connection.close()


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def some_delay(rng: random.Random) -> int:
    """Return a delay in milliseconds: mostly short, sometimes beyond some kills, sometimes beyond all."""
    return rng.choice(
        (rng.randint(50, 500), rng.randint(50, 3_000), rng.randint(50, 3_000), rng.randint(3_000, 20_000), HOUR_MS)
    )


one_case: Final = partial(one_life, TimerLife)
run: Final = partial(run_lives, TimerLife)

if __name__ == "__main__":
    main(TimerLife)

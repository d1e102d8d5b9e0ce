"""The table of undecided half messages compared with the log, through kills, power cuts and lost snapshots.

A case is the life of one data folder on a faulty disk: half messages are stored, decided, put again, brought back and asked
about, snapshots are taken, and the process ends at any moment, with or without the machine. At every moment the table must be
what reading the topics from their beginning makes of them, and a message is delivered just when its commit is recorded.

Replay one case: ``python -m tests.crash.halves --seed N``.
"""

import random
import zlib
from typing import Final, NamedTuple

from metaq.message import Durability, TopicPartition
from metaq.protocol.properties import HALF
from metaq.protocol.record import (
    Record,
    constant_middle,
    decode_properties,
    decode_record,
    encode_properties,
    record_tail,
)
from metaq.store.files.filecache import read_here, run_here
from metaq.store.newrecord import NewRecord
from metaq.store.recordgroups import put_record_group
from metaq.store.recovery.recovery import open_store
from metaq.store.settings import StoreSettings
from metaq.tx.halves import HALVES, IMMUNITY, OPS, SNAPSHOT, Half, Halves, Origin
from tests.crash.command import Result, expect, main, run_until
from tests.crash.driver import case
from tests.support.faultydisk import DATA, FaultyDisk
from tests.support.manualclock import ManualClock

CHECK_AFTER_MS: Final = 6000
CONFIG: Final = DATA / "config"
REAL: Final = TopicPartition("orders", 0)
HOST: Final = bytes(8)
STEPS: Final = 60
IMMUNITIES: Final = ((None, CHECK_AFTER_MS), ("0", 0), ("7", 7000), ("soon", CHECK_AFTER_MS), ("-1", CHECK_AFTER_MS))
WEIGHTS: Final = {
    "send": 4,
    "decide": 5,
    "put_again": 2,
    "bring_back": 1,
    "ask": 2,
    "pass_time": 1,
    "sync": 2,
    "checkpoint": 1,
    "save": 3,
    "crash": 3,
    "stop": 1,
    "spoil_snapshot": 1,
}


class Told(NamedTuple):
    """The state of the half messages according to the log."""

    undecided: dict[int, tuple[int, int]]
    """Place and time of storing by first ordinal."""
    committed: set[int]


def run(seed: int, count: int) -> Result:
    """At least ``count`` ends of the process."""
    return run_until(one_case, "ends", seed, count, "half messages")


def one_case(seed: int) -> dict[str, int]:
    """Live one data folder."""
    with case("tests.crash.halves", seed):
        life = Life(random.Random(seed))
        for _ in range(STEPS):
            life.step()
        return life.counts


class Life:
    """One data folder through many processes."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._clock = ManualClock()
        self._disk = FaultyDisk(rng)
        self._settings = StoreSettings(
            segment_bytes=8192,
            queue_file_bytes=64,
            hot_bytes=rng.choice((0, 2000, 1 << 20)),
            open_files=4,
            durability=rng.choice((Durability.MEMORY, Durability.DISK)),
        )
        self._delays: dict[int, int] = {}  # of a half's first check, as far as the half cannot be another one
        self.counts = {"ends": 0, "decided": 0, "lost snapshots": 0}
        self._open()

    def step(self) -> None:
        """One operation, and a look at what it led to."""
        name = self._rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        getattr(self, name)()
        self._clock.advance(1)
        self._check()

    def _open(self) -> None:
        self._store, _ = open_store(DATA, self._settings, self._clock, self._disk)
        self._halves = Halves(self._store, CONFIG, CHECK_AFTER_MS)
        self.counts["ends"] += 1

    # -- what brokers do ----------------------------------------------------------------------------------------------

    def _new_record(self, key: TopicPartition, body: bytes, pairs: dict[str, str]) -> NewRecord:
        middle = constant_middle(0, 0, HOST, self._clock.now_ms(), HOST)
        tail = record_tail(key.topic, encode_properties(pairs.items()))
        return NewRecord(
            queue=self._store.queue(*key),
            flag=0,
            body=body,
            crc=zlib.crc32(body) & 0x7FFFFFFF,
            middle=middle,
            text_size=20 + len(body),
            tail=tail,
        )

    def _append(self) -> None:
        self._store.append()
        self._halves.follow(read_here)

    def _any(self) -> tuple[int, Half] | None:
        found = [(ordinal, self._halves.find(ordinal)) for ordinal in self._halves]
        open_ones = [(ordinal, half) for ordinal, half in found if half is not None]
        return self._rng.choice(open_ones) if open_ones else None

    def send(self) -> None:
        for _ in range(self._rng.randint(1, 4)):
            immunity, after_ms = self._rng.choice(IMMUNITIES)
            pairs = {"k": "v"} if immunity is None else {IMMUNITY: immunity}
            self._delays[self._store.queue(*HALVES).next] = after_ms
            body = self._rng.choice((b"x", HALF.encode(), bytes(1500)))
            self._store.put(*self._new_record(HALVES, body, pairs))
        self._append()

    def decide(self) -> None:
        found = self._any()
        if found is None:
            return
        ordinal = found[0]
        text = str(ordinal).encode()
        members = [self._new_record(REAL, text, {"k": "v"})] if self._rng.random() < 0.5 else []
        put_record_group(self._store, self._new_record(OPS, text, {"TAGS": "d"}), members)
        self._halves.claim(ordinal)
        expect(self._halves.find(ordinal) is None, "what is on its way is decided once", ordinal)
        self._append()
        self.counts["decided"] += 1

    def put_again(self) -> None:
        found = self._any()
        if found is not None:
            ordinal, half = found
            origin = Origin(ordinal, 0, half.since_ms)
            self._store.put(*self._new_record(HALVES, b"x", {HALF: str(origin)}))
            self._append()
            now = self._halves.find(ordinal)
            if now is not None:  # a copy is no younger
                expect(now[1:] == half[1:], "checks go on", half, now)

    def bring_back(self) -> None:
        """Make a decided half message undecided again, by putting it once more."""
        known = set(self._halves)
        decided = [ordinal for ordinal in range(self._end(HALVES)) if ordinal not in known]
        if decided:
            ordinal = self._rng.choice(decided)
            self._delays[ordinal] = CHECK_AFTER_MS
            self._store.put(*self._new_record(HALVES, b"x", {HALF: str(Origin(ordinal, 0, self._clock.now_ms()))}))
            self._append()

    def ask(self) -> None:
        found = self._any()
        if found is not None:
            ordinal, half = found
            self._halves.asked(ordinal, half.checks + 1, half.due_ms + 5)
            wanted = half._replace(checks=half.checks + 1, due_ms=half.due_ms + 5)
            expect(self._halves.find(ordinal) == wanted, "a check is counted", ordinal)

    def pass_time(self) -> None:
        self._clock.advance(1000)

    # -- what happens to them -----------------------------------------------------------------------------------------

    def sync(self) -> None:
        self._store.sync()
        self._halves.follow(read_here)

    def checkpoint(self) -> None:
        self._store.sweep()
        self._store.checkpoint()

    def save(self) -> None:
        self._halves.save(run_here)

    def crash(self) -> None:
        if self._rng.random() < 0.5:
            self._disk = self._disk.power_cut(self._rng)
            self._delays.clear()
        else:
            self._disk.killed()
        self._open()

    def stop(self) -> None:
        self._halves.save_last()
        before = {ordinal: self._halves.find(ordinal) for ordinal in self._halves}
        self._store.close()
        self._disk.killed()
        self._open()
        after = {ordinal: self._halves.find(ordinal) for ordinal in self._halves}
        expect(before == after, "an orderly stop changes nothing", before, after)

    def spoil_snapshot(self) -> None:
        """The process is killed, and the file is damaged, or its backup too."""
        self._disk.killed()
        names = (SNAPSHOT,) if self._rng.random() < 0.5 else (SNAPSHOT, f"{SNAPSHOT}.bak")
        for path, data in list(self._disk.files()):
            if path.parent == CONFIG and path.name in names:
                self._disk.set_content(path, bytes(data[: len(data) // 2]))
                self.counts["lost snapshots"] += 1
        self._open()

    # -- what must hold -----------------------------------------------------------------------------------------------

    def _end(self, key: TopicPartition) -> int:
        queue = self._store.queues.get(key)
        return 0 if queue is None else queue.readable

    def _records(self, key: TopicPartition) -> list[Record]:
        queue = self._store.queues.get(key)
        if queue is None:
            return []
        found = self._store.records(queue, self._store.first(queue, read_here)[0], 1 << 20, read_here)
        return [decode_record(bytes(each.buffer[each.at : each.at + each.size])) for each in found if each is not None]

    def _told(self) -> Told:
        told = Told({}, set())
        for record in sorted(self._records(HALVES) + self._records(OPS), key=lambda record: record.log_offset):
            if record.topic == OPS.topic:
                told.undecided.pop(int(bytes(record.body)), None)
                if b"METAQ_GROUP_END" in record.properties:
                    told.committed.add(int(bytes(record.body)))
                continue
            named = decode_properties(record.properties).get(HALF, f"{record.queue_offset}:0:{record.store_ms}")
            ordinal, _, since_ms = map(int, named.split(":"))
            told.undecided[ordinal] = (record.log_offset, told.undecided.get(ordinal, (0, since_ms))[1])
        return told

    def _check(self) -> None:
        told = self._told()
        known = {ordinal: self._halves.find(ordinal) for ordinal in self._halves}
        expect(known.keys() == told.undecided.keys(), "the log says what is undecided", known, told)
        for ordinal, half in known.items():
            if half is not None:
                expect(half[:2] == told.undecided[ordinal], "a half is where the log says", ordinal, half, told)
                if not half.checks and ordinal in self._delays:
                    expect(half.due_ms == half.since_ms + self._delays[ordinal], "asked in its time", ordinal, half)
        oldest = min((place for place, _ in told.undecided.values()), default=None)
        expect(self._halves.oldest == oldest, "the oldest one", self._halves.oldest, oldest)
        delivered = {int(bytes(record.body)) for record in self._records(REAL)}
        expect(delivered == told.committed, "delivered is what was committed", delivered, told.committed)


if __name__ == "__main__":
    main(one_case)

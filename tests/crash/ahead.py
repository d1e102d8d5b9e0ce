"""Snapshots and logs of three replicas that get ahead of one another, through kills, power cuts and new masters.

A case is the life of one group: the master stores messages with a delay, half messages, branches and offsets, decides and
delivers some, and saves its snapshots. Slaves copy its log and keep its snapshots, each at its own pace, so a snapshot is often
ahead of the log that it lies beside, more so when the power has taken all that was not synced. Any replica may be master then;
what the others have beyond its log is cut off, and the process may end before their snapshots are removed.

Whoever becomes master must know what its own log says, whatever its snapshots say: each delayed message is delivered, once,
each half message without a decision is undecided, each prepared branch is prepared, and no message is skipped that its group
has not consumed.

Replay one case: ``python -m tests.crash.ahead --seed N``.
"""

import random
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, Final, TypeVar

from metaq.engine.offsets.offsetlog import OffsetLog, load_offsets
from metaq.engine.schedule import Schedule, source_of
from metaq.engine.tables.offsets import OffsetTable
from metaq.engine.tables.topics import TopicTable
from metaq.engine.turn import PutOutcome
from metaq.message import SCHEDULE_TOPIC, TRANSACTIONS_TOPIC, Durability, TopicPartition
from metaq.protocol.properties import REAL_QUEUE, REAL_TOPIC
from metaq.protocol.record import Record, constant_middle, decode_record, encode_properties, record_tail
from metaq.replication import documents
from metaq.store.copies.applying import Copier, piece
from metaq.store.copies.discarding import cut_at_next_opening
from metaq.store.copies.epochs import Epochs, common_end
from metaq.store.files.filecache import read_here, run_here
from metaq.store.log.walk import Gap
from metaq.store.newrecord import NewRecord
from metaq.store.recordgroups import put_record_group
from metaq.store.recovery.recovery import open_store
from metaq.store.settings import StoreSettings
from metaq.tx.halves import HALVES, OPS, Halves
from metaq.tx.journal import MARKS, Held, content_of
from metaq.tx.manager import Transactions
from metaq.tx.openbranches import Room
from tests.crash.command import Result, expect, main, run_until
from tests.crash.driver import case
from tests.support.faultydisk import DATA, FaultyDisk
from tests.support.manualclock import ManualClock

T = TypeVar("T")

STEPS: Final = 70
REPLICAS: Final = 3
LEVEL: Final = 1
DELAY_MS: Final = 1000
GROUP: Final = "billing"
REAL: Final = TopicPartition("orders", 0)
PARKED: Final = TopicPartition(SCHEDULE_TOPIC, LEVEL - 1)
TRANSACTION_MARKS: Final = TopicPartition(TRANSACTIONS_TOPIC, MARKS)
CONFIG: Final = DATA / "config"
HOST: Final = bytes(8)
SETTINGS: Final = StoreSettings(
    segment_bytes=1 << 16, queue_file_bytes=256, hot_bytes=0, open_files=16, durability=Durability.MEMORY
)
LIMITS: Final = {"max_branches": 99, "max_branch_bytes": 10_000, "max_open_transaction_bytes": 100_000, "max_timeout_s": 60}
WEIGHTS: Final = {
    "send": 3,
    "delay": 4,
    "deliver": 4,
    "half": 4,
    "decide": 4,
    "prepare": 2,
    "roll_back": 2,
    "consume": 3,
    "save": 6,
    "sync": 3,
    "copy": 6,
    "hand_on": 6,
    "sync_slave": 2,
    "fail_over": 2,
}


class _LosesAll(random.Random):
    """A power cut takes all that was not synced, so that no log gets a hole, which is another matter."""

    def choice(self, seq: Sequence[T] | Any) -> T:
        first: T = seq[0]
        return first


class _Turns:
    """Each outcome is a turn of its own, and known at once."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def staged(self, outcome: PutOutcome) -> None:
        self._store.append()
        outcome.stored()


def _part(**members: Any) -> Any:
    """Return a stand-in for a part of a broker, with only the members that are read."""
    return SimpleNamespace(**members)


class _Replica:
    """One data folder."""

    def __init__(self, number: int, clock: ManualClock) -> None:
        self.number = number
        self.clock = clock
        self.disk = FaultyDisk(_LosesAll(0))
        self.open()

    def open(self) -> None:
        self.store, _ = open_store(DATA, SETTINGS, self.clock, self.disk)
        self.epochs = Epochs(self.store)

    def end(self, *, power: bool) -> None:
        if power:
            self.disk = self.disk.power_cut(_LosesAll(0))
        else:
            self.disk.killed()
        self.open()

    def lead(self, number: int) -> None:
        """Become master, as a broker does."""
        store = self.store
        self.epochs.begin(number, self.number)
        store.append()
        self.offsets = OffsetTable()
        topics = TopicTable(DATA, 10)
        topics.ensure(REAL.topic, 1)
        self.context = _part(
            store=store,
            epochs=self.epochs,
            settings=_part(data=DATA, segment_bytes=SETTINGS.segment_bytes),
            topics=topics,
            offsets=self.offsets,
            store_host=HOST,
        )
        turns: Any = _Turns(store)
        self.offset_log = OffsetLog(self.context, turns, run_here)
        self.tx = Transactions(store, Room(**LIMITS), HOST, CONFIG)
        self.halves = Halves(store, CONFIG, 6000)
        holds: Any = None
        self.schedule = Schedule(self.context, turns, holds, _part(timer=None), run_here)

    # -- what its log says --------------------------------------------------------------------------------------------

    def records(self, key: TopicPartition) -> list[Record]:
        return [decode_record(stored.buffer[stored.at : stored.at + stored.size]) for stored in self._stored(key)]

    def _stored(self, key: TopicPartition) -> Iterator[Any]:
        queue = self.store.queues.get(key)
        if queue is not None:
            yield from self.store.records(queue, 0, 1 << 20, read_here)

    def delivered(self) -> list[int]:
        """The ordinals of the delayed messages whose copies the log has, in its order."""
        found = [source_of(stored) for stored in self.store.log.walk(0) if not isinstance(stored, Gap)]
        return [source.ordinal for source in found if source is not None]

    def undecided(self) -> set[int]:
        decided = {int(bytes(record.body)) for record in self.records(OPS)}
        return {record.queue_offset for record in self.records(HALVES)} - decided

    def prepared(self) -> set[str]:
        keys: set[str] = set()
        for stored in self._stored(TRANSACTION_MARKS):
            mark = content_of(stored)
            keys = keys | {mark["key"]} if mark["do"] == "prepare" else keys - {mark["key"]}
        return keys


def run(seed: int, count: int) -> Result:
    """At least ``count`` changes of the master."""
    return run_until(one_case, "new masters", seed, count, "snapshots ahead")


def one_case(seed: int) -> dict[str, int]:
    """Live one group."""
    with case("tests.crash.ahead", seed):
        group = _Group(random.Random(seed))
        for _ in range(STEPS):
            group.step()
        group.fail_over()
        return dict(group.counts)


class _Group:
    """Three replicas, one of them the master."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._clock = ManualClock()
        self._replicas = [_Replica(number, self._clock) for number in range(1, REPLICAS + 1)]
        self._put = 0
        self._consumed: set[bytes] = set()
        self._epoch = 2
        self.counts: Counter[str] = Counter()
        self._master = self._replicas[0]
        self._master.lead(self._epoch)

    def step(self) -> None:
        name = self._rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        getattr(self, name)()
        self._clock.advance(0.001)

    @property
    def _slaves(self) -> list[_Replica]:
        return [replica for replica in self._replicas if replica is not self._master]

    # -- what masters do ----------------------------------------------------------------------------------------------

    def _new_record(self, key: TopicPartition, body: bytes, pairs: dict[str, str]) -> NewRecord:
        middle = constant_middle(0, 0, HOST, self._clock.now_ms(), HOST)
        tail = record_tail(key.topic, encode_properties(pairs.items()))
        return NewRecord(
            queue=self._master.store.queue(*key),
            flag=0,
            body=body,
            crc=zlib.crc32(body) & 0x7FFFFFFF,
            middle=middle,
            text_size=20 + len(body),
            tail=tail,
        )

    def _append(self, key: TopicPartition, pairs: dict[str, str]) -> None:
        for _ in range(self._rng.choice((1, 3))):
            self._put += 1
            self._master.store.put(*self._new_record(key, b"%d" % self._put, pairs))
        self._master.store.append()

    def send(self) -> None:
        self._append(REAL, {"k": "v"})

    def delay(self) -> None:
        self._append(PARKED, {REAL_TOPIC: REAL.topic, REAL_QUEUE: "0"})

    def deliver(self) -> None:
        self._clock.advance(DELAY_MS / 1000 + 1)
        level = self._master.schedule._levels[LEVEL]
        due, _ = level._due()
        if due:
            level._deliver(due)

    def half(self) -> None:
        self._append(HALVES, {"k": "v"})
        self._master.halves.follow(read_here)

    def decide(self) -> None:
        halves = self._master.halves
        for ordinal in self._rng.sample(list(halves), min(2, len(halves))):
            put_record_group(self._master.store, self._new_record(OPS, b"%d" % ordinal, {"TAGS": "d"}), [])
            halves.claim(ordinal)
            self._master.store.append()
            halves.follow(read_here)

    def prepare(self) -> None:
        self._put += 1
        master, key, body = self._master, f"XID:{self._put}", b"%d" % self._put
        held = Held(master.store.queue(*REAL), 0, body, zlib.crc32(body) & 0x7FFFFFFF, None, master.tx.steps.next_id(), 0, HOST)
        master.tx.branches.begin(key, self._clock.monotonic(), 60)
        master.tx.branches.put(key, held, held.size)
        step = master.tx.prepare(key)
        assert step is not None
        master.store.append()
        step.succeeded()

    def roll_back(self) -> None:
        for key in sorted(self._master.prepared())[:1]:
            step = self._master.tx.rollback(key)
            assert step is not None
            self._master.store.append()
            step.succeeded()

    def consume(self) -> None:
        """All there is; the offset is in the log at once or later."""
        records = self._master.records(REAL)
        if records:
            self._consumed |= {bytes(record.body) for record in records}
            self._master.offsets.commit(GROUP, *REAL, records[-1].queue_offset + 1, 0)
        if self._rng.random() < 0.7:
            self._master.offset_log.append()

    def save(self) -> None:
        master = self._master
        if self._rng.random() < 0.8:
            master.schedule.save()
            master.offset_log.save()
        if self._rng.random() < 0.8:
            master.tx.snapshots.save(run_here)
            master.halves.save(run_here)

    def sync(self) -> None:
        self._master.store.sync()

    # -- what slaves do -----------------------------------------------------------------------------------------------

    def copy(self) -> None:
        slave, log = self._rng.choice(self._slaves), self._master.store.log
        copier, at, most = Copier(slave.store), slave.store.log.end, self._rng.choice((100, 2000, 1 << 20))
        start, data = piece(log, at, most, read_here)
        copier.take(start, bytes(data))
        slave.store.append()

    def hand_on(self) -> None:
        """A slave keeps the snapshots as they are, however far it is."""
        slave = self._rng.choice(self._slaves)
        found = {name: self._master.disk.read_file(CONFIG / name).decode() for name in self._written()}
        self.counts["snapshots handed on"] += len(found)
        documents.keep(CONFIG, slave.disk, found, slave.store.durable_end)

    def _written(self) -> list[str]:
        return [name for name in documents.DERIVED if name in self._master.disk.list_directory(CONFIG)]

    def sync_slave(self) -> None:
        self._rng.choice(self._slaves).store.sync()

    # -- another master -----------------------------------------------------------------------------------------------

    def fail_over(self) -> None:
        for replica in self._replicas:
            replica.end(power=self._rng.random() < 0.5)
        self._master = master = self._rng.choice(self._replicas)
        self._epoch += 1
        master.lead(self._epoch)
        self._check()
        self.counts["new masters"] += 1
        for slave in self._slaves:
            self._cut(slave)

    def _cut(self, slave: _Replica) -> None:
        """Cut off, at the slave's next opening, the end of its log that its master does not have."""
        own, master = slave.store.log, self._master
        end = common_end(slave.epochs.table, own.end, master.epochs.table, master.store.log.end)
        assert end is not None
        if end < own.end:
            cut_at_next_opening(slave.store, end, own.end)
            if self._rng.random() < 0.5:
                documents.forget_derived(CONFIG, slave.disk)
            slave.end(power=False)
            self.counts["logs cut"] += 1

    def _check(self) -> None:
        """The new master knows what its log says."""
        master = self._master
        delivered = master.delivered()
        expect(delivered == list(range(len(delivered))), "each delayed message once", delivered)
        position = master.schedule.positions().get(LEVEL, 0)
        expect(position == len(delivered), "what was not delivered will be", position, delivered)
        expect(set(master.halves) == master.undecided(), "undecided halves", list(master.halves), master.undecided())
        known = {key for key, _ in master.tx.branches.places()}
        expect(known == master.prepared(), "prepared branches", known, master.prepared())
        offset = master.offsets.get(GROUP, *REAL) or 0
        skipped = [record.body for record in master.records(REAL)[:offset] if bytes(record.body) not in self._consumed]
        expect(not skipped, "nothing is skipped", offset, skipped)
        self._check_again()

    def _check_again(self) -> None:
        """Check that the snapshot of the offsets, loaded once more, is not ahead of the log."""
        again = _part(**{**vars(self._master.context), "offsets": OffsetTable()})
        expect(not load_offsets(again), "the snapshot is of this log")


if __name__ == "__main__":
    main(one_case)

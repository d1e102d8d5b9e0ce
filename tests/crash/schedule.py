"""Transactions on a faulty disk, driven as the broker drives them, beside a small model of what they promise.

The model is a list of *acts*, one for each group of records that the log took, and what is open in memory. What a restart must
find is the list folded: prepared branches, operators' decisions, and the delivered messages in their order. So a branch that
was committed is delivered once and whole, one that was rolled back never, and one that was prepared is still there.

An end of the process takes what was only staged; a power cut may also take any act that was not durable, each on its own. Which
of those are left is read from the marks; that their groups, the branch table and what readers see agree with them is checked.
"""

import random
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Final, TypeVar

import orjson

from metaq.errors import DiskFull
from metaq.message import Durability, TopicPartition
from metaq.protocol.properties import MESSAGE_ID
from metaq.protocol.record import decode_properties, decode_record, host_bytes
from metaq.store.expiry import delete_expired
from metaq.store.files.filecache import Read, read_here, run_here
from metaq.store.log.retention import RetentionRules
from metaq.store.recovery.recovery import open_store
from metaq.store.settings import StoreSettings
from metaq.tx.branches import Work
from metaq.tx.journal import Held
from metaq.tx.manager import Transactions
from metaq.tx.openbranches import Room
from metaq.tx.states import Decision
from metaq.tx.steps import Step
from metaq.tx.xacodes import XaCode, XaError
from tests.crash.branchmodel import Act, Flight, Logged, Message, Model, Table
from tests.crash.command import expect
from tests.crash.driver import NEARLY_FULL
from tests.support.faultydisk import DATA, EMPTY, FaultyDisk
from tests.support.manualclock import ManualClock

T = TypeVar("T")

KEYS: Final = tuple(f"XID:1:0a:{number:02x}:app" for number in range(4))
LOCAL: Final = "TX:S:1"
TIMEOUT_S: Final = 60
MARKS: Final = TopicPartition("METAQ_SYS_TRANSACTIONS", 0)
PARTITIONS: Final = (TopicPartition("orders", 0), TopicPartition("orders", 1))
HOST: Final = host_bytes("127.0.0.1", 8123)
MESSAGE_GROWTH: Final = 600
"""What limits count beside a message's body."""
RETENTION: Final = RetentionRules(keep_ms=1000, ample_free_bytes=1 << 30, least_free_bytes=1)
MAX_BRANCH_BYTES: Final = 2000
STEPS: Final = ("prepare", "commit", "commit in one phase", "rollback", "forget", *(f"decide {each}" for each in Decision))
"""The commands that may have to store something."""


def settings(durability: Durability, segment_bytes: int = 4096) -> StoreSettings:
    """Small files."""
    return StoreSettings(
        segment_bytes=segment_bytes,
        queue_file_bytes=256,
        index_slots=1,
        index_entries=8,
        hot_bytes=0,
        open_files=16,
        durability=durability,
        retention=RETENTION,
    )


class LosesAll(random.Random):
    """A power cut takes all that was not synced; a write that is stopped has done its first half."""

    def choice(self, seq: Sequence[T] | Any) -> T:
        first: T = seq[0]
        return first

    def randrange(self, start: int, stop: int | None = None, step: int = 1) -> int:
        return start // 2


class Schedule:
    """One data folder through many processes."""

    def __init__(self, rng: random.Random, store_settings: StoreSettings) -> None:
        self.rng = rng
        self.settings = store_settings
        self.disk = FaultyDisk(rng)
        self.clock = ManualClock()
        self.model = Model()
        self.staged: list[Flight] = []
        self.parked: deque[Flight] = deque()
        self.reading: dict[str, tuple[str, Work[Held]]] = {}
        """Commits of prepared branches whose messages are still being read."""
        self.told_since_save = False
        self._put = 0
        self._sure: int | None = None
        self._rebooted = False
        self.open()

    # -- commands -----------------------------------------------------------------------------------------------------

    def begin(self, key: str) -> None:
        taken = self._taken("begin", key, lambda: self.tx.branches.begin(key, self.clock.monotonic(), TIMEOUT_S))
        if taken and key not in self.model.told.prepared:
            self.model.open.setdefault(key, [])

    def put(self, key: str, size: int = 4) -> None:
        """A message of its own, in one partition after the other."""
        message, held = self._message(size)
        taken = self.model.refusal("put", key) is None
        over = taken and _bytes([*self.model.open[key], message]) > MAX_BRANCH_BYTES
        limit = XaCode.RMERR if over else None
        if self._taken("put", key, lambda: self.tx.branches.put(key, held, held.size), limit):
            self.model.open[key].append(message)

    def _message(self, size: int) -> tuple[Message, Held]:
        self._put += 1
        message = Message(self._put % 2, b"%04d" % self._put * max(1, size // 4), self.tx.steps.next_id())
        queue = self.store.queue(*PARTITIONS[message.partition])
        crc = zlib.crc32(message.payload) & 0x7FFFFFFF
        return message, Held(queue, 0, message.payload, crc, None, message.message_id, self.clock.now_ms(), HOST)

    def step(self, command: str, key: str) -> None:
        """One of ``STEPS``, as far as it goes in one turn."""
        if self.look(command, key):
            self.found(key)
        elif command in ("prepare", "rollback", "forget"):
            self._step(command, key)

    def look(self, command: str, key: str) -> bool:
        """Begin a commit or a decision; false when there is nothing to go on with."""
        tx, model = self.tx, self.model
        if command in ("prepare", "rollback", "forget"):
            return False
        work: list[Work[Held]] = []
        if command.startswith("decide"):
            outcome = Decision(command.removeprefix("decide "))
            taken = self._taken(command, key, lambda: work.append(tx.decide(key, outcome)))
        else:
            one_phase = command == "commit in one phase"
            taken = self._taken(command, key, lambda: work.append(tx.commit(key, one_phase=one_phase)))
        if not taken:
            return False
        if work[0].place is None and not work[0].messages:
            tx.branches.done(key)
            expect(model.open.pop(key) == [], "nothing to commit", key)
            return False
        model.busy.add(key)
        self.reading[key] = command, work[0]
        return True

    def found(self, key: str) -> None:
        """Go on with a commit whose messages have been read."""
        command, work = self.reading.pop(key)
        one_phase = work.place is None
        messages = self.tx.at_hand(work) or self.tx.messages(work, read_here)
        promised = tuple(self.model.open[key]) if one_phase else self.model.told.prepared[key]
        expect(_plain(messages) == promised, "a branch commits what was put in it", key, messages, promised)
        if command.startswith("decide"):
            outcome = Decision(command.removeprefix("decide "))
            act = Act("heuristic", key, promised if outcome is Decision.COMMIT else (), outcome)
            self._store(act, lambda: self.tx.store_decision(key, work, outcome, messages))
        else:
            self._store(Act("commit", key, promised), lambda: self.tx.store_commit(key, work, messages))

    def not_found(self, key: str) -> None:
        """The messages of a commit could not be read."""
        del self.reading[key]
        self.tx.branches.failed(key)
        self.model.busy.discard(key)
        self.model.open.pop(key, None)

    def _step(self, command: str, key: str) -> None:
        model, tx = self.model, self.tx
        code = model.refusal(command, key)
        work = {"prepare": tx.prepare, "rollback": tx.rollback, "forget": tx.forget}[command]
        if code is not None:
            self._taken(command, key, lambda: work(key))
            return
        if command == "forget":
            there = key in model.told.heuristic and key not in model.open and key not in model.told.prepared
            act = Act("forget", key) if there else None
        elif command == "prepare":
            act = Act("prepare", key, tuple(model.open[key])) if model.open[key] else None
        else:
            act = None if key in model.open else Act("rollback", key)
        if act is None:
            expect(work(key) is None, "nothing is stored", command, key)
            if command != "forget":
                del model.open[key]
            return
        model.busy.add(key)
        self._store(act, lambda: work(key))

    def _store(self, act: Act, call: Callable[[], Step | None]) -> None:
        """Stage an act, unless the disk has no room for it; then check the error."""
        calls = self.disk.space_calls
        try:
            step = call()
        except XaError as error:
            full = self.disk.full_from is not None and calls < self.disk.full_from <= self.disk.space_calls
            expect(full or not self.store.writable, "refused for want of room", act, error)
            expect(error.code is (XaCode.RBOTHER if act.key in self.model.open else XaCode.RMFAIL), "its code", act, error)
            self.model.busy.discard(act.key)
            self.model.open.pop(act.key, None)
        else:
            self._stage(act, step)

    def _stage(self, act: Act, step: Step | None) -> None:
        expect(step is not None, "a step", act)
        assert step is not None
        self.staged.append(Flight(act, step, self.store.queue(*MARKS).next - 1))

    def _taken(self, command: str, key: str, call: Callable[[], object], limit: XaCode | None = None) -> bool:
        """Return whether a command is accepted, as the model predicts; ``limit``: the expected code when it is over a limit."""
        code = limit or self.model.refusal(command, key)
        try:
            call()
        except XaError as error:
            expect(error.code == code, "the code of a refused command", command, key, error.wire, code)
            return False
        expect(code is None, "a command is refused", command, key, code)
        return True

    def local(self, count: int, size: int) -> None:
        """Commit a local transaction."""
        made = [self._message(size) for _ in range(count)]
        act = Act("commit", LOCAL, tuple(message for message, _ in made))
        try:
            step = self.tx.store_local(LOCAL, [held for _, held in made])
        except DiskFull:
            expect(self.disk.full_from is not None or not self.store.writable, "refused for want of room")
            return
        self._stage(act, step)

    def expire(self) -> None:
        """Let the time of every open branch be over; those that are past their vote stay."""
        self.clock.advance(TIMEOUT_S + 1)
        expired = self.tx.branches.expire(self.clock.monotonic())
        expect(set(expired) == self.model.open.keys() - self.model.busy, "what expires", expired)
        for key in expired:
            del self.model.open[key]

    # -- turns --------------------------------------------------------------------------------------------------------

    @contextmanager
    def full_disk(self) -> Iterator[None]:
        """The next call that may need room has none."""
        disk = self.disk
        disk.full_from, disk.full_for, disk.copy_on_write = disk.space_calls + 1, 1, True
        try:
            yield
        finally:
            disk.full_from = None

    def append(self, *, full: bool = False) -> None:
        """The end of a turn; ``full``: the disk has no room for what was staged."""
        failed = False
        with self.full_disk() if full else nullcontext():
            try:
                self.store.append()
            except DiskFull:
                failed = True
        for flight in self.staged:
            flight.failed, flight.end = failed, self.store.log.end
            if not failed:
                self.model.log.append(Logged(flight.act, flight.ordinal))
        self.parked += self.staged
        self.staged = []
        self._settle()

    def sync(self) -> None:
        """Make everything appended durable, and tell outcomes."""
        covered = len(self.model.log)
        self.store.sync()
        self.model.synced = self.model.durable = covered
        self._settle()

    def finish(self) -> None:
        """The turn, and its sync."""
        self.append()
        self.sync()

    def late(self) -> None:
        """Tell the first outcome before its time."""
        self._tell(self.parked.popleft())

    def _settle(self) -> None:
        while self.parked and (self.settings.durability is Durability.MEMORY or self.parked[0].end <= self.store.durable_end):
            self._tell(self.parked.popleft())

    def _tell(self, flight: Flight) -> None:
        act, model = flight.act, self.model
        self.told_since_save = True
        if not act.again:
            model.busy.discard(act.key)
            if act.key != LOCAL:
                model.open.pop(act.key, None)
        if flight.failed:
            flight.step.failed()
        else:
            flight.step.succeeded()
            if not act.again:
                model.told.apply(act)

    # -- duties -------------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """The duty that takes and writes snapshots."""
        self.tx.snapshots.save(run_here)
        self.told_since_save = False

    def keep(self, before: int, read: Read) -> None:
        """Have branches put again."""
        for step in self.tx.keeping.keep(before, read):
            self._stage(Act("prepare", "", again=True), step)

    def checkpoint(self) -> None:
        covered = len(self.model.log)
        self.store.checkpoint()
        self.model.durable = covered

    def delete_expired(self, read: Read) -> None:
        """Retention, as if the disk were nearly full; what two checkpoints do not cover stays."""
        needed = self.tx.keeping.oldest
        self.disk.room = NEARLY_FULL
        try:
            decision = delete_expired(self.store, needed_from=needed)
        finally:
            self.disk.room = EMPTY
        delete_expired(self.store)
        if decision.due_before is not None:
            self.keep(decision.due_before, read)

    # -- ends of the process ------------------------------------------------------------------------------------------

    def end(self, *, power: bool) -> None:
        """The process is gone, and with ``power`` the machine."""
        sure = self.model.durable if power else len(self.model.log)
        self._sure = sure if self._sure is None else min(sure, self._sure)
        if power:
            self._rebooted = True
            self.disk = self.disk.power_cut(self.rng)
        else:
            self.disk.killed()

    def open(self) -> None:
        """Open the folder: exactly what must be there is, and what may be there is whole."""
        self.store, _ = open_store(DATA, self.settings, self.clock, self.disk)
        limits = {"max_branches": 9, "max_branch_bytes": MAX_BRANCH_BYTES, "max_open_transaction_bytes": 8000}
        self.room = Room(**limits, max_timeout_s=TIMEOUT_S)
        self.tx = Transactions(self.store, self.room, HOST, DATA / "config")
        model = self.model
        candidates = [*model.log, *(Logged(flight.act, flight.ordinal) for flight in self.staged)]
        sure = len(model.log) if self._sure is None else self._sure
        model.log = self._survivors(candidates, sure)
        if self._rebooted or self.settings.durability is Durability.DISK:
            model.durable = len(model.log)
        model.synced = len(model.log)
        model.open, model.busy, model.told = {}, set(), Table(model.log)
        self.disk.room = EMPTY
        self.staged, self.parked, self.reading = [], deque(), {}
        self._sure, self._rebooted = None, False
        self.check()
        self.check_prepared()
        following = self.tx.steps.next_id()
        known = [message.message_id for logged in model.log for message in logged.act.messages]
        expect(following < min(known, default=0), "ids never run back", following, known)

    def _survivors(self, candidates: list[Logged], sure: int) -> list[Logged]:
        queue = self.store.queues.get(MARKS)
        if queue is None:
            expect(sure == 0, "marks are lost", candidates[:sure])
            return []
        first, _ = self.store.first(queue, read_here)
        marks = {}
        for ordinal, stored in enumerate(self.store.records(queue, first, 1000, read_here), first):
            if stored is not None:
                marks[ordinal] = orjson.loads(decode_record(stored.buffer[stored.at : stored.at + stored.size]).body)
        left = []
        for number, (act, ordinal) in enumerate(candidates):
            mark = marks.pop(ordinal, None)
            expect(mark is not None or number >= sure or ordinal < first, "a durable mark is there", act, ordinal)
            if mark is None:
                left += [Logged(act, ordinal)] if number < sure else []
                continue
            found = act if act.key else _same(mark["key"], candidates[:number])
            expect((mark["do"], mark["key"]) == found[:2], "a mark says what was done", mark, found)
            left.append(Logged(found, ordinal))
        expect(not marks, "no mark comes from nowhere", marks)
        return left

    def close(self) -> None:
        """An orderly stop."""
        self.finish()
        self.tx.snapshots.save_last()
        self.store.close()
        self.end(power=False)

    # -- comparing ----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """The branch table, what is promised and what readers see."""
        tx, model = self.tx, self.model
        told = model.told
        undecided = sorted(told.prepared.keys() | told.heuristic.keys())
        expect(tx.branches.recover(None) == undecided, "recover lists", tx.branches.recover(None), undecided)
        places = dict(tx.branches.places())
        expect(places.keys() == told.prepared.keys(), "what is prepared", places, told.prepared)
        expect(dict(tx.branches.heuristics()) == told.heuristic, "decisions", told.heuristic)
        expect(tx.branches.counts().open == len(model.open), "what is open", tx.branches.counts(), model.open)
        expect({key for key in KEYS if tx.branches.is_busy(key)} == model.busy, "what is busy", model.busy)
        held = sum(_bytes(messages) for messages in model.open.values())
        expect(self.room.open_bytes == held, "bytes of open branches", self.room.open_bytes, held)
        voting = [flight.act for flight in (*self.staged, *self.parked) if flight.act.do == "prepare" and not flight.act.again]
        kib = sum(-(-_bytes(messages) // 1024) for messages in (*told.prepared.values(), *(act.messages for act in voting)))
        expect(self.store.reserved_bytes == 1024 * kib, "promised room", self.store.reserved_bytes, kib)
        self._check_delivered()

    def _check_delivered(self) -> None:
        """Each message of a committed branch once, in order, and all of a branch or none."""
        seen = self.model.synced if self.settings.durability is Durability.DISK else len(self.model.log)
        delivered = Table(self.model.log[:seen]).delivered
        for number, partition in enumerate(PARTITIONS):
            queue = self.store.queues.get(partition)
            expected = [(message.payload, message.message_id) for message in delivered if message.partition == number]
            if queue is None:
                expect(not expected, "delivered", expected)
                continue
            first, _ = self.store.first(queue, read_here)
            got = []
            for stored in self.store.records(queue, first, 1000, read_here):
                if stored is not None:
                    record = decode_record(stored.buffer[stored.at : stored.at + stored.size])
                    got.append((bytes(record.body), int(decode_properties(record.properties)[MESSAGE_ID])))
            if self.store.log.begin:
                expected = expected[len(expected) - len(got) :]
            expect(got == expected, "delivered once, in order and together", number, got, expected)

    def check_prepared(self) -> None:
        """Prepared branches hold what was put in them."""
        for key, place in self.tx.branches.places():
            got = _plain(self.tx.messages(Work([], place), read_here))
            expect(got == self.model.told.prepared[key], "a prepared branch is whole", key, got)


def _plain(messages: Sequence[Held]) -> tuple[Message, ...]:
    return tuple(Message(held.queue.partition, held.payload, held.message_id) for held in messages)


def _same(key: str, before: Sequence[Logged]) -> Act:
    """Return the act of a branch that was parked once more, with the messages that it held before."""
    return next(act for act, _ in reversed(before) if (act.do, act.key) == ("prepare", key))._replace(again=True)


def _bytes(messages: Sequence[Message]) -> int:
    return sum(len(message.payload) + MESSAGE_GROWTH for message in messages)

"""The table of pending timers against a model that folds the whole log anew, through random work, crashes and retention."""

import random
import shutil
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import pytest

from metaq.store.log.commitlog import CommitLog
from metaq.store.ordered.ordered import EngineName, open_ordered, remove_ordered
from metaq.timers.entering import CANCEL, SEGMENT, TIMER, IndexStep, TimerState
from metaq.timers.packs import PACK, REACHED, REMOVED, keys_in
from metaq.timers.pending import Pending
from metaq.timers.records import Cancelled, Delivered, Key, Park, Parks, Secret, TimerEvent, key_of, parts_of
from tests.crash.command import expect
from tests.support.samples import seed_of_tree

SEGMENT_BYTES: Final = 2_000
RECORD_BYTES: Final = 100
STEPS: Final = 250
REFUSED: Final = 0.1
"""The part of the changes of the index that is refused."""
CHECKED: Final = 0.4
"""The part of the steps after which all must hold: to ask for single timers takes apart what the table kept whole."""
WEIGHTS: Final = {
    "park": 12,
    "cancel": 5,
    "deliver": 8,
    "move": 4,
    "load": 5,
    "append": 14,
    "fail": 1,
    "land": 12,
    "apply": 8,
    "flush": 3,
    "sort_in": 3,
    "delete_segments": 4,
    "pass_time": 4,
    "set_clock": 1,
    "reopen": 2,
    "crash": 2,
}


class FakeSegment(NamedTuple):
    """A segment of a log that is only numbers."""

    base: int

    @property
    def end(self) -> int:
        return self.base + SEGMENT_BYTES


class FakeFile:
    """A file in which every place holds other bytes."""

    def __init__(self, base: int) -> None:
        self._base = base

    def read(self, size: int, offset: int) -> bytes:
        return b"%020d" % (self._base + offset)


class FakeLog:
    """The parts of a log that the table asks."""

    def __init__(self) -> None:
        self.begin = 0
        self.end = 0

    def find(self, log_offset: int) -> FakeSegment | None:
        found = FakeSegment(log_offset // SEGMENT_BYTES * SEGMENT_BYTES)
        return found if self.begin <= found.base and found.base <= self.end else None

    def file(self, segment: FakeSegment) -> FakeFile:
        return FakeFile(segment.base)


class Staged(NamedTuple):
    """A record on its way, as the broker keeps it."""

    event: TimerEvent
    taken: tuple[Key, ...]


class Folded(NamedTuple):
    """What a sequence of events comes to."""

    pending: dict[Key, int]
    cancelled: set[Key]
    secret: Secret | None

    def segments(self, begin: int) -> dict[int, int]:
        """Return how many timers each segment holds that the log still has."""
        counts = Counter(place // SEGMENT_BYTES * SEGMENT_BYTES for place in self.pending.values())
        return {base: count for base, count in counts.items() if base >= begin}


def fold(events: list[TimerEvent]) -> Folded:
    """Return what events come to, as naively as possible."""
    pending: dict[Key, int] = {}
    cancelled: set[Key] = set()
    secret: Secret | None = None
    for event in events:
        match event:
            case Park(key, place, _, _):
                pending[key] = place
            case Parks():
                pending.update(zip(event.keys, event.places, strict=True))
            case Delivered(to, _, _):
                pending = {key: place for key, place in pending.items() if key > to}
            case Cancelled(timers, _):
                for key, _ in timers:
                    del pending[key]
                    cancelled.add(key)
            case Secret():
                secret = event
    return Folded(pending, cancelled, secret)


class Life:
    """One table through many processes, driven as the broker drives it."""

    def __init__(self, seed: int, folder: Path, engine: EngineName) -> None:
        self.rng = random.Random(seed)
        self.folder = folder
        self.engine = engine
        self.log = FakeLog()
        self.now_ms = 1_000_000
        self.events: list[TimerEvent] = []  # in the log
        self.landed = 0  # how many of them readers see
        self.turn: list[Staged] = []
        self.in_log: list[list[Staged]] = []  # turns
        self.flushed = 0
        self.counts: Counter[str] = Counter()
        self.known: set[Key] = set()
        self.is_alone = False
        self.refused = REFUSED
        self.open()

    # -- the process --------------------------------------------------------------------------------------------------

    def open(self) -> None:
        index, reason = open_ordered(self.folder, self.engine)
        expect(reason is None, "nothing is damaged", reason)
        vars(index)["apply"] = partial(self._refuse_some, index.apply)
        self.table = Pending(index, cast(CommitLog, self.log), pack_from=self.rng.choice((1, 2, 5, 100)))
        for event in self.events:
            if event.end > self.table.covered:
                self.table.follow(event)
        self.landed = len(self.events)
        self.turn, self.in_log = [], []
        self.flushed = self.table.covered

    def _refuse_some(self, apply: Callable[..., bool], *changes: Any) -> bool:
        """Change the index, or refuse to now and then, as an engine does that would have to wait."""
        return self.rng.random() >= self.refused and apply(*changes)

    def reopen(self) -> None:
        self.table.index.ordered.close()
        self.open()

    def crash(self) -> None:
        """Lose what was not flushed of the index."""
        self.table.index.ordered.close()
        remove_ordered(self.folder)
        if self._copy.exists():
            shutil.copytree(self._copy, self.folder)
        self.open()

    @property
    def _copy(self) -> Path:
        return self.folder.with_name("copy")

    def flush(self) -> None:
        self.table.index.ordered.flush()
        self.table.index.ordered.close()
        shutil.rmtree(self._copy, ignore_errors=True)
        shutil.copytree(self.folder, self._copy)
        index, _ = open_ordered(self.folder, self.engine)
        self.table.index.ordered = index
        self.flushed = self.table.covered

    # -- records ------------------------------------------------------------------------------------------------------

    def _place(self) -> tuple[int, int]:
        """Return where the next record begins and ends."""
        place = self.log.end
        if place % SEGMENT_BYTES > SEGMENT_BYTES - 2 * RECORD_BYTES:
            place = (place // SEGMENT_BYTES + 1) * SEGMENT_BYTES
        self.log.end = place + RECORD_BYTES
        return place, self.log.end

    def _stage(self, event: TimerEvent, *taken: Key) -> None:
        for key in keys_of(event):
            self.table.flight.add(key)
        self.turn.append(Staged(event, taken))

    def _coming(self) -> list[TimerEvent]:
        return [*self.events, *(staged.event for staged in self.turn)]

    def append(self) -> None:
        self.events += [staged.event for staged in self.turn]
        self.in_log.append(self.turn)
        self.turn = []
        self.table.flight.end_turn(is_stored=True)

    def fail(self) -> None:
        """The append of a turn fails."""
        for staged in self.turn:
            for key in staged.taken:
                self.table.release(key)
        self.turn = []
        self.table.flight.end_turn(is_stored=False)

    def land(self) -> None:
        for _ in range(self.rng.randint(1, 3)):
            if self.in_log:
                self.table.flight.land()
                for staged in self.in_log.pop(0):
                    self.table.follow(staged.event)
                    self.landed += 1

    # -- what brokers do ----------------------------------------------------------------------------------------------

    def park(self) -> None:
        for _ in range(self.rng.randint(1, 4)):
            if self.rng.random() < 0.03:
                place, end = self._place()
                self._stage(Secret(self.rng.randbytes(16), place, end))
            due_ms = self.now_ms + self.rng.choice((1, self.rng.randrange(50), self.rng.randrange(3_000), 10**9))
            if self.rng.random() < 0.5:
                place, end = self._place()
                key = key_of(due_ms, place)
                self.known.add(key)
                self._stage(Park(key, place, None, end))
                continue
            run = Parks()
            for _ in range(self.rng.randint(1, 6)):
                place, run.end = self._place()
                run.places.append(place)
                run.keys.append(key_of(self.rng.choice((due_ms, due_ms + self.rng.randrange(3_000))), place))
            self.known.update(run.keys)
            self._stage(run)

    def _find(self, key: Key) -> tuple[TimerState, int | None]:
        """Return what becomes known of a timer by the table, and by the index where the table says so."""
        table = self.table
        state = table.state(key)
        if state is not TimerState.FAR:
            return state, table.place(key)
        ((found, place),) = table.find([key], lambda call: call())
        if found is TimerState.PENDING and key < table.horizon:
            return TimerState.GONE, None
        return found, place if found is TimerState.PENDING else None

    def _some_pending(self) -> tuple[Key, int] | None:
        if not self.known:
            return None
        key = self.rng.choice(sorted(self.known))
        state, place = self._find(key)
        return (key, place) if state is TimerState.PENDING and place is not None else None

    def cancel(self) -> None:
        found = self._some_pending()
        if found is not None:
            _, end = self._place()
            self.table.take(*found)
            self._stage(Cancelled([found], end), found[0])
            self.counts["cancels"] += 1

    def move(self) -> None:
        """Store the timers of the oldest segment once more, as carry-forward does."""
        oldest = min(self.table.segments, default=None)
        if oldest is None:
            return
        for key in sorted(self.known):
            state, before = self._find(key)
            if state is TimerState.PENDING and before is not None and before < oldest + SEGMENT_BYTES:
                place, end = self._place()
                self.table.take(key, before)
                self._stage(Park(key, place, before, end), key)
                self.counts["moves"] += 1

    def deliver(self) -> None:
        """As ``Delivery`` does, with work of others between the steps."""
        self.load(self.rng.choice((0, 100, 3_000)))
        taken = self.table.take_due(self.now_ms, self.rng.choice((1, 3, 256)))
        if not taken:
            return
        expect([key for key, _ in taken] == sorted(key for key, _ in taken), "in order", taken)
        expect(parts_of(taken[-1][0])[0] <= self.now_ms, "nothing before its time", taken[-1])
        for _ in range(0 if self.is_alone else self.rng.randrange(3)):
            self.rng.choice((self.park, self.cancel, self.move, self.append, self.land))()
        count = self.rng.randint(1, len(taken))
        for key, _ in taken[count:]:
            self.table.release(key)
        taken = taken[:count]
        if not self.table.is_clear(taken[-1][0]):
            for key, _ in taken:
                self.table.release(key)
            return
        to = taken[-1][0]
        passed = {key for key in fold(self._coming()).pending if key <= to}
        expect(passed == {key for key, _ in taken}, "a mark passes only what it delivers", passed, taken)  # T-6
        bases = Counter(found.base for _, place in taken if (found := self.log.find(place)) is not None)
        _, end = self._place()
        self._stage(Delivered(to, dict(bases), end), *(key for key, _ in taken))
        self.counts["deliveries"] += 1

    def load(self, ahead_ms: int | None = None) -> None:
        """As ``Upkeep.load`` does: packs are sorted in first."""
        until = key_of(self.now_ms + (self.rng.randrange(4_000) if ahead_ms is None else ahead_ms), 0)
        while (step := self.table.load(until)) is IndexStep.MORE:
            self.counts["loads in steps"] += 1
        self.counts["loads refused"] += step is IndexStep.REFUSED

    def apply(self) -> None:
        """Enter what is durable into the index: a part of what readers see."""
        seen = self.events[: self.landed]
        if seen:
            self.table.apply(self.rng.choice(seen[-8:]).end)

    def sort_in(self) -> None:
        self.counts["packs"] += self.table.index.sort_in() is IndexStep.MORE

    def delete_segments(self) -> None:
        """Retention, which keeps what ``Timers.needed_from`` says."""
        needed = [] if (oldest := self.table.oldest()) is None else [oldest]
        if self.table.covered > self.flushed or self.table.waiting or self.in_log or self.turn:
            needed.append(self.flushed)
        end = min([*needed, self.log.end])
        before = self.log.begin
        self.log.begin = max(before, end // SEGMENT_BYTES * SEGMENT_BYTES)
        self.counts["deleted segments"] += (self.log.begin - before) // SEGMENT_BYTES

    def pass_time(self) -> None:
        self.now_ms += self.rng.choice((1, 50, 1_000))

    def set_clock(self) -> None:
        self.now_ms += self.rng.choice((-2_000, -100, 10_000))

    # -- what must hold -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        table, told = self.table, fold(self.events[: self.landed])
        expect(table.segments == told.segments(self.log.begin), "segments are counted", table.segments, told)  # I-7
        expect(len(table) == len(told.pending), "pending ones are counted", len(table), len(told.pending))
        expect(table.secret is None or told.secret is not None, "the secret", table.secret)
        expect(table.secret is None or table.secret[:2] == cast(Secret, told.secret)[:2], "the secret", table.secret, told)
        taken = {key for turn in [*self.in_log, self.turn] for staged in turn for key in staged.taken}
        for key in self.known:
            state, place = self._find(key)
            if key in taken:
                expect(state is TimerState.TAKEN, "what is on its way is taken", key, state)
            elif key in told.pending:
                expect((state, place) == (TimerState.PENDING, told.pending[key]), "pending is pending", key, state, place)
                memory = table.state(key)
                expect(key >= table.horizon or memory is TimerState.PENDING, "what is below the horizon is near", key)
            else:
                wanted = TimerState.CANCELLED if key in told.cancelled else TimerState.GONE
                expect(state is wanted, "what is over is over", key, state, wanted)
        near = [key for key in told.pending if key < table.horizon and key not in taken]
        expect(table.near == len(near) and table.first == min(near, default=None), "the first one", table.first)

    def check_index(self) -> None:
        """I-1: the index is what the log before X comes to."""
        index, told = self.table.index.ordered, fold([event for event in self.events if event.end <= self.table.covered])
        with index.scan(TIMER, CANCEL) as scan:
            timers = {row[1:]: int.from_bytes(place) if place else parts_of(row[1:])[1] for row, place in scan.next(100_000)}
        timers |= {key: parts_of(key)[1] for key in self._packed()}
        expect(timers == told.pending, "the index has what is pending", timers, told.pending)
        with index.scan(CANCEL, CANCEL + b"\xff" * 17) as scan:
            cancelled = {row[1:] for row, _ in scan.next(100_000)}
        expect(cancelled == told.cancelled, "the index has what was cancelled", cancelled ^ told.cancelled)
        with index.scan(SEGMENT, TIMER) as scan:
            counts = {int.from_bytes(row[1:]): int.from_bytes(count) for row, count in scan.next(100_000)}
        kept = {base: count for base, count in counts.items() if base >= self.log.begin}
        expect(kept == told.segments(self.log.begin), "the index counts segments", kept, told)

    def _packed(self) -> set[Key]:
        """Return the timers of packs that count, as the rows say."""
        index = self.table.index.ordered
        with index.scan(PACK, PACK + b"\xff" * 9) as scan:
            packed = [key for _, pack in scan.next(100_000) for key in keys_in(pack)]
        with index.scan(REMOVED, REMOVED + b"\xff" * 17) as scan:
            removed = {row[1:] for row, _ in scan.next(100_000)}
        (reached,) = index.find([REACHED])
        expect(len(packed) == self.table.index.packs.count, "packed ones are counted", self.table.index.packs.count)
        expect(len(packed) == len(set(packed)), "each is in one pack", packed)
        return {key for key in packed if key > (reached or b"") and key not in removed}

    def step(self) -> None:
        name = self.rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        getattr(self, name)()
        if self.rng.random() < CHECKED:
            self.check()
        if self.rng.random() < 0.1:
            self.check_index()

    def end(self) -> None:
        """Everything is delivered in the end, and the index is empty, however it came to be."""
        self.append()
        while self.in_log:
            self.land()
        self.now_ms, self.is_alone = 1 << 50, True
        for _ in range(10_000):
            self.deliver()
            self.append()
            while self.in_log:
                self.land()
            if not len(self.table):
                break
        self.refused = 0.0
        while self.table.apply(self.log.end):
            pass
        self.check()
        self.check_index()
        expect(not self.table.segments, "nothing is left", self.table.segments)


def keys_of(event: Any) -> list[Key]:
    """Return the keys that a record keeps in flight."""
    match event:
        case Park(key, _, _, _):
            return [key]
        case Parks():
            return event.keys
        case Cancelled(timers, _):
            return [key for key, _ in timers]
    return []


def live(seed: int, folder: Path, engine: EngineName, steps: int) -> Counter[str]:
    """Live one case; a failure names the seed."""
    folder.mkdir()
    life = Life(seed, folder / "timerindex", engine)
    try:
        for _ in range(steps):
            life.step()
        life.end()
    except Exception as error:
        raise AssertionError(f"seed {seed}: {error!r}") from error
    finally:
        life.table.index.ordered.close()
    return life.counts


@pytest.mark.parametrize("engine", ["rocksdict", pytest.param("sqlite3", marks=pytest.mark.slow)])
def test_the_table_is_what_the_log_comes_to(tmp_path: Path, engine: EngineName) -> None:
    """ES-007, I-1, I-7, T-6: other work for each commit, and the same every time."""
    counts: Counter[str] = Counter()
    for seed in range(8):
        counts += live(seed, tmp_path / str(seed), engine, STEPS)
    named = ("cancels", "moves", "deliveries", "deleted segments", "packs", "loads in steps")
    assert min(counts[name] for name in named) > 10, counts
    live(seed_of_tree(), tmp_path / "tree", engine, STEPS)  # its work is not counted: it may be one-sided


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("engine", ["rocksdict", "sqlite3"])
def test_the_table_is_what_the_log_comes_to_for_long(tmp_path: Path, engine: EngineName) -> None:
    """I-1, I-7, T-6: other lives for each commit."""
    first = 1_000 + seed_of_tree()
    for seed in range(first, first + 30):
        live(seed, tmp_path / str(seed), engine, STEPS)

"""The ids that were seen against a model that folds the whole log anew, through random puts, failures, crashes and windows."""

import random
import shutil
import tracemalloc
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import pytest

from metaq.dedupe.filter import FIRST_BYTES
from metaq.dedupe.records import LONGEST_NAME, First, SeenId, StoredAs, generation_of, id_in, id_of, name_of, over_ms, value_of
from metaq.dedupe.seen import PASSED, SET_BACK_MS, SeenIds
from metaq.protocol import properties
from metaq.store.log.commitlog import CommitLog
from metaq.store.ordered.ordered import EngineName, open_ordered
from tests.support.samples import seed_of_tree

RECORD_BYTES: Final = 100
STEPS: Final = 300
WINDOWS: Final = {"orders": 1000, "trades": 300}
FIRST: Final = First(StoredAs.PLAIN, 0, 0, 0, 7)
WEIGHTS: Final = {
    "put": 30,
    "append": 12,
    "fail": 2,
    "apply": 8,
    "flush": 3,
    "forget": 2,
    "pass_time": 6,
    "reopen": 2,
    "crash": 2,
}


class FakeLog:
    """A log that is only numbers: every place has other bytes."""

    def find(self, place: int) -> Any:
        return self

    base = 0

    def file(self, segment: Any) -> Any:
        return self

    def read(self, size: int, offset: int) -> bytes:
        return b"%020d" % offset


class Stored(NamedTuple):
    """A message of the model."""

    seen: SeenId
    is_appended: bool


class Model:
    """A log of ids and its index, driven at random; the log itself is the truth."""

    def __init__(self, folder: Path, engine: EngineName, seed: int) -> None:
        self.rng = random.Random(seed)
        self.folder, self.engine, self.now_ms = folder, engine, 10_000
        self.log: list[SeenId] = []
        self.staged: list[SeenId] = []
        self.copies = 0
        self.swallowed = self.stored = self.surely = 0
        self.seen = self.open()

    def open(self) -> SeenIds:
        index, reason = open_ordered(self.folder, self.engine, seldom_asked=True)
        assert reason is None
        seen = SeenIds(index, cast(CommitLog, FakeLog()), WINDOWS)
        for each in self.log:
            if each.end > seen.covered:
                seen.follow(each, self.now_ms)
        return seen

    @property
    def end(self) -> int:
        return (len(self.log) + len(self.staged) + 1) * RECORD_BYTES

    def find(self, topic: str, ident: str) -> tuple[bytes, First | None]:
        name = name_of(topic, ident)
        new = self.seen.key(topic, name, self.now_ms)
        if self.rng.randrange(2):
            is_new = self.seen.meet(topic, name, self.now_ms)
        else:
            key = self.seen.new_key(topic, name, self.now_ms)
            is_new = key is not None
            assert key in (None, new)
        if is_new:
            self.surely += 1
            return new, None
        keys = self.seen.keys(topic, name, self.now_ms)
        first = self.seen.look(keys)
        if first is None and self.seen.may_have(keys):
            found = self.seen.find(keys, lambda call: call())
            first = next((found[key] for key in keys if key in found), None)
        return new, first

    def put(self) -> None:
        topic, ident = self.rng.choice(list(WINDOWS)), str(self.rng.randrange(12))
        key, first = self.find(topic, ident)
        same = [each for each in (*self.log, *self.staged) if (each.topic, each.ident) == (topic, ident)]
        if first is None:
            assert all(each.store_ms + WINDOWS[topic] <= self.now_ms for each in same), "D-1: it is stored twice in its window"
            new = First(StoredAs.PLAIN, 0, len(self.log) + len(self.staged), self.end - RECORD_BYTES, 7)
            self.staged.append(SeenId(topic, ident, self.now_ms, new, self.end))
            self.seen.stage(key, value_of(new), self.staged[-1].end, self.now_ms)
            self.stored += 1
            return
        assert same and first == same[-1].first, "D-2: there is no such record, or another one"
        assert self.now_ms < same[-1].store_ms + 2 * WINDOWS[topic], "it is older than two windows"
        self.swallowed += 1

    def append(self) -> None:
        self.log += self.staged
        self.staged = []
        self.seen.appended(is_stored=True)

    def fail(self) -> None:
        self.staged = []
        self.seen.appended(is_stored=False)

    def apply(self) -> None:
        self.seen.apply(self.rng.randrange(self.end + 1))

    def flush(self) -> None:
        self.append()
        self.seen.cover(len(self.log) * RECORD_BYTES)
        self.seen.index.close()
        copy = self.folder.with_name(f"{self.folder.name}.{self.copies}")
        shutil.copytree(self.folder, copy)
        self.copies += 1
        self.seen = self.open()

    def forget(self) -> None:
        self.seen.forget(self.now_ms)
        self.seen.drop_filters(self.now_ms)

    def pass_time(self) -> None:
        self.now_ms += self.rng.choice((1, 20, 100, 500, -40))

    def reopen(self) -> None:
        self.append()
        self.seen.index.close()
        self.seen = self.open()

    def crash(self) -> None:
        """Go on with the index as it was at any flush, or without one; what was staged is not in the log."""
        self.staged = []
        self.seen.index.close()
        shutil.rmtree(self.folder)
        copy = self.folder.with_name(f"{self.folder.name}.{self.rng.randrange(self.copies + 1)}")
        if copy.exists():
            shutil.copytree(copy, self.folder)
        self.seen = self.open()


@pytest.mark.parametrize("engine", ["rocksdict", "sqlite3"])
def test_ids_are_known_for_their_window(tmp_path: Path, engine: EngineName) -> None:
    """D-1, D-2, I-4, I-5: through failed appends, crashes with any X, generations that end, and a clock that steps back."""
    seed = seed_of_tree()
    models = [Model(tmp_path / str(case), engine, seed + case) for case in range(4 if engine == "rocksdict" else 2)]
    for model in models:
        for _ in range(STEPS):
            getattr(model, model.rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0])()
        model.seen.index.close()
    seen = [sum(counts) for counts in zip(*((model.swallowed, model.stored, model.surely) for model in models), strict=True)]
    assert min(seen) > 10, f"seed {seed}: {seen}"  # one case alone may be poor in one of them


def test_both_forms_of_properties_have_the_same_id() -> None:
    """E-07: as they are sent, as a table, and as what a record keeps says without looking for it."""
    names = [properties.DEDUPE_ID, properties.UNIQUE_KEY, properties.TIMER_DEQUEUE, "KEYS", "X" + properties.DEDUPE_ID]
    rng = random.Random(7)
    for _ in range(2000):
        pieces = [f"{rng.choice(names)}\x01{rng.choice(('a', 'b', 'c d'))}\x02" for _ in range(rng.randrange(5))]
        text = "".join(pieces)
        text = text[:-1] if rng.random() < 0.3 else text
        assert id_in(text) == id_of(properties.parse(text)), repr(text)
        kept = properties.as_sent(text)
        assert kept is None or kept[3] in (None, id_in(text)), repr(text)


def test_keys_of_one_generation_lie_together() -> None:
    """What is over is one range, whatever the windows."""
    assert over_ms(999, 1000) == 2000 and over_ms(1000, 1000) == 3000
    assert generation_of(2000) + name_of("b", "x") < generation_of(2100) + name_of("a", "x")


def test_ids_of_any_length_have_names_of_their_own() -> None:
    """D-2: one that is too long for a key is hashed, and no topic with an id looks like another one."""
    assert name_of("a", "bc") == b"a\0bc" != name_of("ab", "c")
    longest = "x" * (LONGEST_NAME - 2)
    names = {name_of("a", longest), name_of("a", f"{longest}x"), name_of("a", f"{longest}y"), name_of("b", longest)}
    assert len(names) == 4 and max(map(len, names)) == LONGEST_NAME


def test_ids_that_have_entered_are_dropped_and_known(tmp_path: Path) -> None:
    """D-1: those that wait, those that are in memory although the index has them, and those of this turn."""
    topic, now_ms = next(iter(WINDOWS)), 10_000
    index, _ = open_ordered(tmp_path / "index", "rocksdict", seldom_asked=True)
    seen = SeenIds(index, cast(CommitLog, FakeLog()), WINDOWS)
    names = [name_of(topic, str(number)) for number in range(2 * PASSED)]
    for number, name in enumerate(names):
        key = seen.new_key(topic, name, now_ms) or seen.key(topic, name, now_ms)
        seen.stage(key, value_of(First(StoredAs.PLAIN, 0, number, 0, 7)), number * RECORD_BYTES, now_ms)
        if number % 100 == 0:
            seen.appended(is_stored=True)
        if number == PASSED + PASSED // 2:
            while seen.apply((PASSED - 1) * RECORD_BYTES):
                pass
    assert seen.waiting == PASSED
    for number, name in enumerate(names):
        first = seen.look(seen.keys(topic, name, now_ms))
        assert first is not None and first.ordinal == number
    index.close()


def test_no_filter_is_made_for_a_generation_that_is_over(tmp_path: Path) -> None:
    """E-07: a new replica reads all that its master has kept. It asks the index should its clock be set back so far."""
    topic, window_ms = next(iter(WINDOWS.items()))
    index, _ = open_ordered(tmp_path / "index", "sqlite3", seldom_asked=True)
    seen = SeenIds(index, cast(CommitLog, FakeLog()), WINDOWS)
    now_ms = SET_BACK_MS * 100
    long_ago_ms = now_ms - SET_BACK_MS - 2 * window_ms
    tracemalloc.start()
    for number in range(500):
        stored_ms = long_ago_ms - (499 - number) * window_ms
        seen.follow(SeenId(topic, str(number), stored_ms, FIRST, (number + 1) * RECORD_BYTES), now_ms)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken < 500 * FIRST_BYTES
    assert not seen.is_new(topic, name_of(topic, "499"), long_ago_ms)
    assert seen.look(seen.keys(topic, name_of(topic, "499"), long_ago_ms)) == FIRST
    assert seen.is_new(topic, name_of(topic, "other"), now_ms)
    index.close()


def test_a_clock_that_was_ahead_does_not_make_ids_new(tmp_path: Path) -> None:
    """D-1: the filter of a generation that seemed to be over was dropped, and the clock is set back into it."""
    topic, window_ms = next(iter(WINDOWS.items()))
    index, _ = open_ordered(tmp_path / "index", "sqlite3", seldom_asked=True)
    seen = SeenIds(index, cast(CommitLog, FakeLog()), WINDOWS)
    name, now_ms = name_of(topic, "a"), 1000 * window_ms
    assert seen.meet(topic, name, now_ms)
    seen.stage(seen.key(topic, name, now_ms), value_of(First(StoredAs.PLAIN, 0, 0, 0, 7)), RECORD_BYTES, now_ms)
    seen.appended(is_stored=True)
    seen.drop_filters(now_ms + 100 * window_ms + SET_BACK_MS)
    assert not seen.meet(topic, name, now_ms + 1)
    assert seen.look(seen.keys(topic, name, now_ms + 1)) is not None
    assert seen.is_new(topic, name_of(topic, "b"), now_ms + 100 * window_ms)  # others are known to be new again
    index.close()

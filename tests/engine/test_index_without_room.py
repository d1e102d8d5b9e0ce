"""A start on a disk that has no room to open the indexes of timers and of ids: it serves what it has."""

import logging
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import gevent
import pytest

from metaq.engine.dedupe.dedupe import Dedupe
from metaq.engine.timers.timing import Timing
from metaq.engine.writing import Draft, note, stage
from metaq.errors import DiskFull, NotWritable, Overloaded
from metaq.message import TopicPartition
from metaq.protocol.properties import DEDUPE_ID, NONE, REAL_TOPIC
from metaq.store.files.filecache import read_here, run_here
from metaq.store.ordered.ordered import open_ordered
from metaq.timers.handles import Handle
from tests.support.broker import wait_until
from tests.support.inprocess import Parts

DEADLINE_S: Final = 30.0
ONCE: Final = TopicPartition("once", 0)
HOUR_MS: Final = 3_600_000
TOPICS: Final = {ONCE.topic: {"partitions": 1, "dedupe_window_ms": HOUR_MS}}


class Bench:
    """A broker with timers and ids, whose turns the test ends."""

    def __init__(self, data: Path) -> None:
        self.parts = Parts(data, topics=TOPICS, timer_engine="sqlite3")
        self.timing = Timing.open(self.parts.context, self.parts.turns, run_here)
        self.dedupe: Dedupe = self.timing.dedupe
        for index in (self.timing.timers, self.dedupe):
            index.start()
        gevent.sleep(0)  # they read an empty log

    def close(self) -> None:
        self.timing.stop()
        self.dedupe.stop()
        self.dedupe.close()
        self.timing.timers.close()
        self.parts.close()

    def draft(self, body: bytes, ident: str = "") -> Draft:
        return Draft(*ONCE, body, {DEDUPE_ID: ident} if ident else {}, 0, 0, 5, bytes(8))

    def put(self, draft: Draft) -> bool:
        """Store a message; return whether its id is new."""
        _, first = self.dedupe.once(draft, lambda: stage(self.parts.context, draft))
        self.end_turn()
        return first is None

    def end_turn(self) -> None:
        note(self.parts.turns, lambda _: None)
        self.parts.end_turn()
        self.parts.store.sync()
        for index in (self.timing.timers, self.dedupe):
            index.apply()

    def until(self, is_so: Callable[[], bool], what: str) -> None:
        def look() -> bool:
            gevent.sleep(0.001)
            self.end_turn()
            return is_so()

        wait_until(look, DEADLINE_S, what)

    def has_ids(self) -> bool:
        return self.dedupe.numbers()["dedupe_index"] == "yes"

    def count(self) -> int:
        return sum(each is not None for each in self.parts.store.records(self.parts.store.queue(*ONCE), 0, 1 << 20, read_here))


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """While this has an item no index can be opened; it says which ones were tried."""
    tried: list[Path] = []

    def opened(folder: Path, *arguments: Any, **options: Any) -> Any:
        if tried:
            tried.append(folder)
            raise DiskFull("a test says so")
        return open_ordered(folder, *arguments, **options)

    for name in ("timers", "dedupe"):
        monkeypatch.setattr(f"metaq.{name}.opening.open_ordered", opened)
    yield tried


def test_a_start_without_room_for_the_indexes(tmp_path: Path, full: list[Path], caplog: pytest.LogCaptureFixture) -> None:
    """T-1, E-07: what needs them is refused until there is room, nothing of it is forgotten, and no segment is deleted."""
    caplog.set_level(logging.ERROR)
    with closing(Bench(tmp_path)) as bench:
        assert bench.put(bench.draft(b"first", "a"))
        handle = bench.timing.timers.park(bench.draft(b"later"), bench.parts.clock.now_ms() + HOUR_MS).handle
        assert handle is not None
        bench.end_turn()
    full.append(tmp_path)
    with closing(Bench(tmp_path)) as bench:
        assert [folder.name for folder in full[1:]] == ["timerindex", "dedupeindex"]
        check_refused(bench, handle)
        bench.until(lambda: len(full) > 5, "it is tried again")
        check_refused(bench, handle)
        full.clear()
        bench.until(lambda: bench.timing.timers.table is not None and bench.has_ids(), "the indexes are there")
        assert bench.dedupe.find(bench.dedupe.keys(ONCE.topic, "a", bench.parts.clock.now_ms()))
        assert bench.timing.timers.is_genuine(handle)
        assert bench.timing.timers.park(bench.draft(b"one more"), bench.parts.clock.now_ms() + 2 * HOUR_MS).handle
        bench.parts.clock.advance(HOUR_MS / 1000)
        before = bench.count()
        bench.timing.delivery.start()
        bench.until(lambda: bench.count() == before + 1, "the first one is delivered")


def check_refused(bench: Bench, handle: Handle) -> None:
    """Messages are given and taken, but none for later, none with an id, and no cancel."""
    timers, before = bench.timing.timers, bench.count()
    assert before > 0
    with pytest.raises(Overloaded):
        timers.park(bench.draft(b"x"), bench.parts.clock.now_ms() + HOUR_MS)
    with pytest.raises(Overloaded):
        timers.parked_handle(handle.due_ms, handle.ident)
    with pytest.raises(NotWritable):
        timers.is_genuine(handle)
    with pytest.raises(Overloaded):
        bench.put(bench.draft(b"x", "a"))
    with pytest.raises(Overloaded):
        bench.dedupe.release({REAL_TOPIC: ONCE.topic, DEDUPE_ID: "a"}, 0, 0, lambda _: NONE)
    assert bench.put(bench.draft(b"without"))
    assert bench.count() == before + 1
    assert (timers.needed_from, bench.timing.keeper.oldest) == (0, 0)


def test_a_window_that_is_gone_needs_no_index(tmp_path: Path, full: list[Path]) -> None:
    """E-07: nor is it opened later."""
    full.append(tmp_path)
    with closing(Bench(tmp_path)) as bench:
        topics = bench.parts.context.topics
        topic = topics.get(ONCE.topic)
        assert topic is not None
        topics.put(replace(topic, attributes={}))
        bench.dedupe.topic_changed(ONCE.topic)
        bench.end_turn()
        assert bench.put(bench.draft(b"x", "a")) and bench.put(bench.draft(b"x", "a"))

"""Retention that keeps what pending timers need, where records about them are damaged or lost."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import gevent
import pytest

from metaq.engine.timers.keeping import AT_ONCE, LOOK_S, TimerKeeper
from metaq.engine.timers.recurring import Runs
from metaq.engine.writing import internal_mark, note, stage
from metaq.errors import DiskFull
from metaq.protocol.record import HEADER_SIZE, decode_record
from metaq.store.copies.discarding import TIMER_INDEX
from metaq.store.files.disk import Usage
from metaq.store.files.filecache import read_here, run_here
from metaq.store.queues.consumequeue import UNIT
from metaq.timers.records import MARKS, PARKS, Delivered, event_of_mark
from tests.engine.test_room import DAY_MS, GIB, JOBS, TimedBroker
from tests.support.broker import wait_until

DEADLINE_S: Final = 30.0
BODY: Final = bytes(12 * 1024)
LATER_MS: Final = 30 * DAY_MS
MANY: Final = 3 * AT_ONCE + 1
FORCED: Final = Usage(55 * GIB, 9 * GIB)
"""The room of a disk on which the oldest segments go, and puts are taken."""


class Bench(TimedBroker):
    """A broker whose timers are delivered when the test lets them."""

    def start(self) -> None:
        """Read what the index lacks, and have all of it on the disk: then it needs the log no more."""
        self.timing.timers.start()
        self.until(lambda: self.timing.timers.table is not None, "the log is read")
        self.timing.timers.flush()

    def until(self, is_so: Callable[[], bool], what: str) -> None:
        def look() -> bool:
            gevent.sleep(0.001)
            self.parts.end_turn()
            self.parts.store.sync()
            self.timing.timers.apply()
            return is_so()

        wait_until(look, DEADLINE_S, what)

    def park(self, body: bytes, delay_ms: int) -> int:
        """Delay a message; return the log offset of its park."""
        handle = self.put(body, delay_ms).handle
        assert handle is not None
        return handle.ident

    def deliver(self, seconds: float, pending: int) -> None:
        """Let time pass, until so many timers are pending."""
        self.parts.clock.advance(seconds)
        self.timing.delivery.start()
        self.until(lambda: self.timing.timers.pending == pending, "what is due is delivered")
        self.timing.delivery.stop()

    def fill(self) -> None:
        """Have some segments after what the log has, with the secret of handles in one of them."""
        for number in range(8):
            self.put(BODY)
            if number == 5:
                self.timing.timers.stage_secret_again()
                note(self.parts.turns, lambda _: None)
                self.parts.end_turn()
        self.parts.store.sync()
        self.timing.timers.apply()

    def fill_segment(self) -> None:
        """Leave no room for any record in the newest segment."""
        log = self.parts.store.log
        begin = log.staged_end
        self.put(b"")
        overhead = log.staged_end - begin
        while (room := log.room_end - log.staged_end) >= overhead:
            self.put(BODY[: room - overhead])
        self.parts.store.sync()
        self.timing.timers.apply()

    def until_kept(self, keeper: TimerKeeper, after_round: Callable[[], None] = lambda: None) -> None:
        """Have rounds of a keeper until it needs none of the full segments."""
        segments = self.parts.store.log.segments
        before = segments[-1].base

        def is_kept() -> bool:
            keeper.keep(before)
            note(self.parts.turns, lambda _: None)
            after_round()
            return (keeper.oldest or 0) >= before

        self.until(is_kept, "the timers are stored again")

    def retire(self) -> None:
        self.disk.room = FORCED
        super().retire()

    def marks(self) -> list[int]:
        """Return the log offsets of the marks that deliver."""
        stored = self.parts.store.records(self.parts.store.queue(*MARKS), 0, 1 << 20, read_here)
        return [each.log_offset for each in stored if each is not None and isinstance(event_of_mark(each), Delivered)]

    def bodies(self) -> list[bytes]:
        """Return the bodies of the messages that the log still has."""
        queue, found = self.parts.store.queue(*JOBS), list[bytes]()
        for stored in self.parts.store.records(queue, self.parts.store.first(queue, read_here)[0], 1 << 20, read_here):
            assert stored is not None
            found.append(bytes(decode_record(bytes(stored.buffer[stored.at : stored.at + stored.size])).body))
        return found


def flip(data: Path, place: int) -> None:
    """Damage a record in the first segment."""
    with (data / "commitlog" / f"{0:020d}").open("r+b") as segment:
        segment.seek(place + HEADER_SIZE)
        byte = segment.read(1)[0]
        segment.seek(place + HEADER_SIZE)
        segment.write(bytes([byte ^ 1]))


def lose_places(data: Path, count: int) -> None:
    """Damage the first entries of the queue of parks."""
    units = next((data / "consumequeue" / PARKS.topic / str(PARKS.partition)).iterdir())
    with units.open("r+b") as file:
        file.write(UNIT.pack(1 << 50, 500, 0) * count)


@pytest.fixture
def again(tmp_path: Path) -> Iterator[Callable[[Bench, bool], Bench]]:
    """Begins again with the folder of a broker, with its index or without."""
    opened: list[Bench] = []

    def begin(bench: Bench, with_index: bool) -> Bench:
        now_ms = bench.parts.clock.now_ms()
        if not with_index:
            shutil.rmtree(tmp_path / TIMER_INDEX)
        following = Bench(tmp_path)
        opened.append(following)
        following.parts.clock.jump(now_ms - following.parts.clock.now_ms())
        following.start()
        return following

    yield begin
    for bench in opened:
        bench.close()


def test_a_timer_is_kept_whatever_its_segment_counts(tmp_path: Path, again: Callable[[Bench, bool], Bench]) -> None:
    """T-1: the park of another one is damaged, which a mark has counted: the segment seems to hold none."""
    with closing(Bench(tmp_path)) as bench:
        soon = bench.park(b"soon", 1)
        bench.park(b"later", LATER_MS)
        bench.deliver(1.0, 1)
        bench.fill()
    flip(tmp_path, soon)
    bench = again(bench, False)
    assert bench.timing.keeper.oldest == 0
    bench.retire()
    assert bench.parts.store.log.begin > 0
    bench.deliver(LATER_MS / 1000, 0)
    assert bench.bodies()[-1] == b"later"


def test_one_timer_among_many_is_found(tmp_path: Path, again: Callable[[Bench, bool], Bench]) -> None:
    """T-1: the others were delivered, and more lie before and after it than are looked at together."""
    with closing(Bench(tmp_path)) as bench:
        now_ms, timers = bench.parts.clock.now_ms(), bench.timing.timers
        for number in range(3 * AT_ONCE):
            delay_ms = LATER_MS if number == 3 * AT_ONCE // 2 else 1
            timers.park(internal_mark(bench.parts.context, JOBS, b"%d" % number), now_ms + delay_ms)
        bench.deliver(1.0, 1)
        bench.fill()
    bench = again(bench, True)
    bench.retire()
    assert bench.parts.store.log.begin > 0
    assert (bench.timing.timers.pending, bench.timing.timers.moved) == (1, 1)
    bench.deliver(LATER_MS / 1000, 0)
    assert bench.bodies()[-1] == b"%d" % (3 * AT_ONCE // 2)


def test_a_segment_without_timers_goes_whatever_it_counts(tmp_path: Path, again: Callable[[Bench, bool], Bench]) -> None:
    """A mark of delivery is damaged, and the next one says that its timer has come, too, but counts only its own."""
    with closing(Bench(tmp_path)) as bench:
        bench.park(b"first", 1)
        bench.park(b"second", 60_000)
        bench.deliver(1.0, 1)
        bench.deliver(60.0, 0)
        damaged = bench.marks()[0]
        bench.fill()
    flip(tmp_path, damaged)
    bench = again(bench, False)
    assert bench.timing.timers.pending == 1
    bench.retire()
    assert bench.parts.store.log.begin > 0
    assert bench.timing.timers.pending == 0


def test_a_timer_that_cannot_be_read_does_not_stop_retention(
    tmp_path: Path, again: Callable[[Bench, bool], Bench], caplog: pytest.LogCaptureFixture
) -> None:
    """It is reported once, and when it is due."""
    with closing(Bench(tmp_path)) as bench:
        lost = bench.park(b"later", LATER_MS)
        bench.fill()
    flip(tmp_path, lost)
    bench = again(bench, True)
    bench.retire()
    assert bench.parts.store.log.begin > 0
    assert caplog.text.count(f"timers lost, their segments go timers=1 first_log_offset={lost}\n") == 1
    bench.deliver(LATER_MS / 1000, 0)
    assert bench.timing.timers.dropped == 1


def test_a_timer_is_kept_of_which_only_the_place_is_lost(tmp_path: Path, again: Callable[[Bench, bool], Bench]) -> None:
    """T-1: the index knows where its park is, which is intact."""
    with closing(Bench(tmp_path)) as bench:
        bench.park(b"later", LATER_MS)
        bench.fill()
    lose_places(tmp_path, 1)
    bench = again(bench, True)
    bench.retire()
    assert bench.parts.store.log.begin > 0
    bench.deliver(LATER_MS / 1000, 0)
    assert bench.bodies()[-1] == b"later"


def test_an_index_is_opened_again_while_timers_are_stored_again(
    tmp_path: Path, again: Callable[[Bench, bool], Bench], caplog: pytest.LogCaptureFixture
) -> None:
    """The look that goes on with the one before it says nothing of the new one, which would be made anew from the log."""
    with closing(Bench(tmp_path)) as bench:
        bench.park(b"later", LATER_MS)
        bench.fill()
    bench = again(bench, True)
    timers, context = bench.timing.timers, bench.parts.context
    opened: list[bool] = []

    def run(call: Callable[[], Any]) -> Any:
        if not opened:
            opened.append(True)
            timers.failed(DiskFull("a test says so"))
            timers.apply()
        return call()

    TimerKeeper(timers, Runs(context, run_here), run).keep(bench.parts.store.log.segments[-1].base)
    assert opened and caplog.text.count("timer index failed") == 1
    bench.until(lambda: timers.table is not None, "the index is opened again")
    bench.retire()
    assert bench.parts.store.log.begin > 0 and timers.pending == 1


def test_segments_before_a_timer_go_where_there_is_no_room_for_it(
    tmp_path: Path, again: Callable[[Bench, bool], Bench], caplog: pytest.LogCaptureFixture
) -> None:
    """Nor for the secret of handles: what these segments free may be the room that both need."""
    with closing(Bench(tmp_path)) as bench:
        for _ in range(8):
            bench.put(BODY)
        place = bench.park(b"later", LATER_MS)
        for _ in range(8):
            bench.put(BODY)
        bench.fill_segment()
    bench = again(bench, True)
    log = bench.parts.store.log
    bench.disk.has_room = False
    bench.retire()
    assert "duty failed duty=TimerKeeper.keep reason=no room" in caplog.text
    assert log.segments[0].base <= place < log.segments[0].end
    bench.disk.has_room = True
    bench.retire()
    assert log.begin > place and bench.timing.timers.pending == 1


def test_a_broker_that_could_not_store_its_first_timer_deletes_segments(tmp_path: Path) -> None:
    """It has a table of timers then, and no queue of parks."""
    with closing(Bench(tmp_path)) as bench:
        bench.timing.timers.ready()
        for _ in range(16):
            bench.put(BODY)
        bench.fill_segment()
        bench.put(BODY)
        assert PARKS not in bench.parts.store.queues
        bench.retire()
        bench.retire()
        assert bench.parts.store.log.begin > 0


@pytest.fixture
def without_places(tmp_path: Path, again: Callable[[Bench, bool], Bench]) -> Bench:
    """A broker with many timers, of which the queue has lost all places."""
    with closing(Bench(tmp_path)) as bench:
        now_ms, timers = bench.parts.clock.now_ms(), bench.timing.timers
        for number in range(MANY):
            timers.park(internal_mark(bench.parts.context, JOBS, b"%d" % number), now_ms + LATER_MS + number)
        bench.fill()
    lose_places(tmp_path, MANY)
    return again(bench, True)


def test_messages_that_come_meanwhile_do_not_stop_retention(without_places: Bench) -> None:
    """Nothing about timers comes after them: the last timer is cancelled while it is looked at."""
    bench, timers = without_places, without_places.timing.timers
    assert timers.table is not None
    *others, (key, place) = timers.upkeep.page(timers.table, b"", MANY)
    came: list[bool] = []

    def run(call: Callable[[], Any]) -> Any:
        if timers.moved == len(others) and not came:
            came.append(True)
            timers.stage_cancel(key, place, {})
            stage(bench.parts.context, internal_mark(bench.parts.context, JOBS, b"ordinary"))
        return call()

    keeper = TimerKeeper(timers, Runs(bench.parts.context, run_here), run)
    bench.until_kept(keeper)
    assert came and timers.moved == timers.pending == len(others)


def test_timers_that_the_queue_has_lost_are_looked_for_in_many_rounds(without_places: Bench) -> None:
    """Each one ends in time: a full disk, and a broker that stops, wait for it."""
    bench, timers = without_places, without_places.timing.timers
    moved = [0]

    def run(call: Callable[[], Any]) -> Any:
        bench.parts.clock.advance(LOOK_S)
        return call()

    keeper = TimerKeeper(timers, Runs(bench.parts.context, run_here), run)
    bench.until_kept(keeper, lambda: moved.append(timers.moved))
    assert max(after - before for before, after in pairwise(moved)) == AT_ONCE
    assert timers.moved == MANY

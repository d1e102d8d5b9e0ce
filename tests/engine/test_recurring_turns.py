"""Recurring messages that change while a run of them is delivered, turn by turn (``tests.support.inprocess``)."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import gevent
import pytest

from metaq.engine.dedupe.dedupe import Dedupe
from metaq.engine.timers.cancelling import Cancels
from metaq.engine.timers.delivery import Delivery
from metaq.engine.timers.recurring import RecurringMessages, Runs
from metaq.engine.timers.table import MOST_WAITING
from metaq.engine.timers.timers import Timers
from metaq.engine.writing import Draft
from metaq.errors import DiskFailed, Overloaded, UnknownTimer
from metaq.message import TopicPartition
from metaq.protocol.properties import TIMER_OUT
from metaq.protocol.record import HEADER_SIZE, decode_properties, decode_record
from metaq.store.copies.discarding import TIMER_INDEX
from metaq.store.files.filecache import read_here, run_here
from metaq.timers.definitions import Recurring
from metaq.timers.records import MARKS, PARKS, Parks, key_of
from tests.support.broker import wait_until
from tests.support.inprocess import Parts

DEADLINE_S: Final = 30.0
JOBS: Final = TopicPartition("jobs", 0)
TICK: Final = Recurring("tick", "@every 1h", JOBS.topic, b"x", partition=0)
HOUR_MS: Final = 3_600_000


class Bench:
    """The timers of one broker, whose turns and clock the test moves."""

    def __init__(self, data: Path, **settings: Any) -> None:
        self.parts = Parts(data, topics={JOBS.topic: {"partitions": 1}}, **settings)
        self.timers = Timers(self.parts.context, self.parts.turns, run_here)
        dedupe = Dedupe(self.parts.context, self.parts.turns, self.timers.parked_handle, run_here)
        runs = Runs(self.parts.context, run_here)
        self.recurring = RecurringMessages(self.timers, Cancels(self.timers, dedupe, run_here), runs)
        self.delivery = Delivery(self.timers, runs, run_here)
        self.delivery.start()

    def close(self) -> None:
        self.delivery.stop()
        self.timers.close()
        self.parts.close()

    def begin(self, work: Callable[..., object], *values: object) -> Any:
        """Let a request stage its change, in a greenlet that waits for the end of the turn."""
        before = self.parts.store.log.staged_end
        greenlet = gevent.spawn(work, *values)
        wait_until(lambda: self._settles(greenlet, before), DEADLINE_S, "it is staged")
        return greenlet

    def _settles(self, greenlet: Any, before: int) -> bool:
        gevent.sleep(0)
        return bool(greenlet.dead) or self.parts.store.log.staged_end > before

    def end(self, greenlet: Any) -> object:
        """End turns until a request is answered; return its result, or raise its error."""

        def is_over() -> bool:
            self.parts.end_turn()
            gevent.sleep(0.001)
            return bool(greenlet.dead)

        wait_until(is_over, DEADLINE_S, "it is answered")
        return greenlet.get()

    def begin_delivery(self) -> None:
        """Let the delivery stage what is due now."""
        before = self.parts.store.log.staged_end
        self.timers.woken()
        wait_until(lambda: self._has_staged(before), DEADLINE_S, "the delivery is staged")

    def _has_staged(self, before: int) -> bool:
        gevent.sleep(0)
        return self.parts.store.log.staged_end > before

    def settle(self) -> None:
        """End some turns, in which everything that is due is delivered."""
        self.timers.woken()
        for _ in range(20):
            gevent.sleep(0)
            self.parts.end_turn()

    def dues(self) -> list[int]:
        """The times of the runs that readers see."""
        queue, found = self.parts.store.queue(*JOBS), []
        for stored in self.parts.store.records(queue, 0, 1 << 20, read_here):
            assert stored is not None
            record = decode_record(bytes(stored.buffer[stored.at : stored.at + stored.size]))
            found.append(int(decode_properties(record.properties)[TIMER_OUT]))
        return found


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path / "data")
    yield bench
    bench.close()


def define(bench: Bench, recurring: Recurring = TICK) -> int:
    due_ms = bench.end(bench.begin(bench.recurring.define, recurring))
    assert isinstance(due_ms, int)
    bench.parts.clock.advance((due_ms - bench.parts.clock.now_ms()) / 1000)
    return due_ms


def check_over(bench: Bench, dues: list[int]) -> None:
    """Nothing is pending or defined, and no run comes any more."""
    assert bench.dues() == dues
    assert (bench.timers.pending, bench.recurring.list_("", 9)) == (0, [])
    with pytest.raises(UnknownTimer):
        bench.recurring.undefine(TICK.name)
    bench.parts.clock.advance(3 * HOUR_MS / 1000)
    bench.settle()
    assert bench.dues() == dues


def test_it_ends_while_a_run_is_delivered(bench: Bench) -> None:
    """E-13, T-3: the delivery was first, so the run comes, and the next one is cancelled with the definition."""
    due_ms = define(bench)
    bench.begin_delivery()
    ending = gevent.spawn(bench.recurring.undefine, TICK.name)
    gevent.sleep(0)
    assert not ending.dead and bench.dues() == []
    bench.end(ending)
    check_over(bench, [due_ms])


def test_a_run_is_due_while_it_ends(bench: Bench) -> None:
    """E-13, T-3: the end was first, so the run does not come, in the same turn or later."""
    define(bench)
    ending = bench.begin(bench.recurring.undefine, TICK.name)
    bench.timers.woken()
    for _ in range(5):
        gevent.sleep(0)  # the delivery looks, and may not pass what is in flight
    bench.end(ending)
    bench.settle()
    check_over(bench, [])


def test_it_is_defined_again_while_a_run_is_delivered(bench: Bench) -> None:
    """E-13: the run of the old definition comes once, and from then on those of the new one, whose run is the only pending."""
    due_ms = define(bench)
    bench.begin_delivery()
    defining = gevent.spawn(bench.recurring.define, TICK._replace(cron="@every 2h"))
    gevent.sleep(0)
    assert bench.end(defining) == due_ms + 2 * HOUR_MS
    assert (bench.dues(), bench.timers.pending) == ([due_ms], 1)
    bench.parts.clock.advance(2 * HOUR_MS / 1000)
    bench.settle()
    assert bench.dues() == [due_ms, due_ms + 2 * HOUR_MS]
    (row,) = bench.recurring.list_("", 9)
    assert row[1] == due_ms + 4 * HOUR_MS


def test_an_end_that_is_refused_leaves_nothing_in_the_log(tmp_path: Path) -> None:
    """E-13: more changes wait for the index than may; the master goes on with the definition, and so does who reads its log."""
    data = tmp_path / "data"
    with closing(Bench(data)) as bench:
        define(bench)
        table, marks = bench.timers.table, bench.parts.store.queues[MARKS]
        assert table is not None
        parks, before = Parks(), marks.next
        for _ in range(MOST_WAITING + 1):
            parks.add(key_of(1 << 50, 0), 0, 1 << 50)
        table.follow(parks)
        with pytest.raises(Overloaded):
            bench.end(bench.begin(bench.recurring.undefine, TICK.name))
        bench.parts.end_turn()
        assert marks.next == before
    shutil.rmtree(data / TIMER_INDEX)
    with closing(Bench(data)) as bench:
        bench.timers.start()
        bench.end(gevent.spawn(bench.recurring.list_, "", 9))  # once the log is read
        assert [definition.name for definition, _, _ in bench.recurring.list_("", 9)] == [TICK.name]


def test_a_run_that_is_larger_than_a_segment_is_dropped(bench: Bench) -> None:
    """Segments were larger when it was defined; the next run is still pending."""
    due_ms = define(bench, TICK._replace(body=bytes(60_000)))
    now_ms, data = bench.parts.clock.now_ms(), bench.parts.settings.data
    bench.close()
    smaller = Bench(data, segment_bytes=72 * 1024, max_body_bytes=16 * 1024)
    smaller.parts.clock.jump(now_ms - smaller.parts.clock.now_ms())
    smaller.timers.start()

    def is_dropped() -> bool:
        smaller.settle()
        gevent.sleep(0.001)
        return smaller.timers.runs_dropped > 0

    wait_until(is_dropped, DEADLINE_S, "the run is dropped")
    smaller.settle()
    assert (smaller.dues(), smaller.timers.runs_dropped, smaller.timers.pending) == ([], 1, 1)
    (row,) = smaller.recurring.list_("", 9)
    assert row[1] == due_ms + HOUR_MS
    bench.parts, bench.timers, bench.delivery = smaller.parts, smaller.timers, smaller.delivery


def test_a_recurring_message_ends_that_is_larger_than_a_segment(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """T-1: segments were larger when it was defined, and no other message waits for it."""
    bench.end(bench.begin(bench.recurring.define, TICK._replace(body=bytes(62_000))))
    due_ms, data = bench.parts.clock.now_ms() + HOUR_MS, bench.parts.settings.data
    bench.timers.park(Draft(*JOBS, b"x", {}, 0, 0, 5, bytes(8)), due_ms + 1)
    bench.parts.end_turn()
    bench.close()
    smaller = Bench(data, segment_bytes=60 * 1024, max_body_bytes=16 * 1024)
    bench.parts, bench.timers, bench.delivery = smaller.parts, smaller.timers, smaller.delivery
    smaller.parts.clock.jump(due_ms + 2 - smaller.parts.clock.now_ms())
    smaller.timers.start()

    def is_over() -> bool:
        smaller.settle()
        gevent.sleep(0.001)
        return smaller.dues() == [due_ms + 1] or "timers wait" in caplog.text

    wait_until(is_over, DEADLINE_S, "the other one is delivered")
    assert (smaller.dues(), smaller.timers.runs_dropped, smaller.timers.pending) == ([due_ms + 1], 1, 0)
    assert "recurring message lost name=tick" in caplog.text


@pytest.mark.parametrize("runs", [0, 1], ids=["its first run", "a later one"])
def test_a_recurring_message_goes_on_after_the_record_of_its_run_is_lost(bench: Bench, runs: int) -> None:
    """E-13: the index is made anew from a log that has no pending run of it any more."""
    bench.end(bench.begin(bench.recurring.define, TICK))
    for _ in range(runs):
        bench.parts.clock.advance(HOUR_MS / 1000)
        bench.settle()
    began, data, place = bench.parts.clock.now_ms(), bench.parts.settings.data, last_park(bench)

    def damage() -> None:
        flip(data, [place])
        shutil.rmtree(data / TIMER_INDEX)

    begin_again(bench, damage)
    assert len(bench.dues()) == runs
    for count in (1, 2):
        bench.parts.clock.advance(HOUR_MS / 1000)
        bench.settle()
        assert bench.dues()[runs:] == [began + number * HOUR_MS for number in range(1, count + 1)]
    assert bench.timers.pending == 1


def test_a_recurring_message_that_ends_while_it_gets_a_lost_run_has_no_run(bench: Bench) -> None:
    """Its end waits until the run is in the log."""
    bench.end(bench.begin(bench.recurring.define, TICK))
    data, place = bench.parts.settings.data, last_park(bench)

    def damage() -> None:
        flip(data, [place])
        shutil.rmtree(data / TIMER_INDEX)

    open_again(bench, damage)
    before = bench.parts.store.log.staged_end
    wait_until(lambda: bench._has_staged(before), DEADLINE_S, "a run is staged")
    undefining = gevent.spawn(bench.recurring.undefine, TICK.name)
    gevent.sleep(0)
    bench.end(undefining)
    check_over(bench, [])


def test_a_recurring_message_of_which_nothing_is_left_is_reported(
    bench: Bench, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """E-13: only the index knows its name; its definition is damaged, and so is its pending run, which came later."""
    index, kept = bench.parts.settings.data / TIMER_INDEX, tmp_path / "kept"
    bench.end(bench.begin(bench.recurring.define, TICK))
    ((definition, _, _),) = bench.recurring.list_("", 9)
    bench.parts.store.sync()
    begin_again(bench, lambda: shutil.copytree(index, kept))
    bench.parts.clock.advance(HOUR_MS / 1000)
    bench.settle()
    places = [last_park(bench), definition.place]

    def damage() -> None:
        flip(bench.parts.settings.data, places)
        shutil.rmtree(index)
        shutil.copytree(kept, index)

    begin_again(bench, damage)
    bench.settle()
    assert caplog.text.count("recurring message lost name=tick") == 1


def last_park(bench: Bench) -> int:
    """Return the log offset of the newest park."""
    queue = bench.parts.store.queue(*PARKS)
    (last,) = bench.parts.store.records(queue, queue.readable - 1, 1, read_here)
    assert last is not None
    return last.log_offset


def flip(data: Path, places: list[int]) -> None:
    """Damage records."""
    with (data / "commitlog" / f"{0:020d}").open("r+b") as segment:
        for place in places:
            segment.seek(place + HEADER_SIZE)
            segment.write(b"\xff")


def begin_again(bench: Bench, meanwhile: Callable[[], object]) -> None:
    """Begin again as ``open_again`` does, and read the log."""
    open_again(bench, meanwhile)
    bench.end(gevent.spawn(bench.recurring.list_, "", 9))  # once the log is read
    bench.settle()


def open_again(bench: Bench, meanwhile: Callable[[], object]) -> None:
    """Begin again with the same time, after something was done to the folder."""
    now_ms, data = bench.parts.clock.now_ms(), bench.parts.settings.data
    bench.close()
    meanwhile()
    following = Bench(data)
    bench.parts, bench.timers, bench.recurring = following.parts, following.timers, following.recurring
    bench.delivery = following.delivery
    bench.parts.clock.jump(now_ms - bench.parts.clock.now_ms())
    bench.timers.start()


def test_a_recurring_message_does_not_end_because_the_disk_cannot_be_asked(bench: Bench) -> None:
    """Its definition is intact, and found when it is asked for again: the broker had no file descriptor left, for instance."""
    define(bench)
    table = bench.timers.table
    definition = None if table is None else table.definitions.get(TICK.name)
    assert definition is not None

    def fails(call: Callable[[], Any]) -> Any:
        raise DiskFailed("cannot open a segment: too many open files")

    with pytest.raises(DiskFailed):
        Runs(bench.parts.context, fails).recurring(definition)
    found = Runs(bench.parts.context, run_here).recurring(definition)
    assert found is not None and found.body == TICK.body

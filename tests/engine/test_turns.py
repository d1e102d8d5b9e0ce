"""Turns at durability DISK: what comes while a sync runs is appended together when it ends. At REPLICA: what readers see."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import gevent
import pytest
from gevent.event import Event

from metaq.engine.duties import Duties
from metaq.engine.role import NoReplicas, RoleParts
from metaq.engine.turn import LONGEST_HOLD_S, Short, Turns
from metaq.engine.writing import internal, stage
from metaq.errors import DiskFailed, MetaqError, StoreError, TooManyFiles
from metaq.protocol.remoting.codes import Response
from metaq.protocol.text.replies import IN_DOUBT
from metaq.store.files.filecache import run_here
from metaq.store.messagestore import MANY_HIDDEN
from tests.support.broker import wait_until
from tests.support.inprocess import Parts

T = TypeVar("T")
TIMEOUT_MS = 5000
DEADLINE_S = 30.0


class Outcome:
    """An outcome that remembers what it was told."""

    size = 0

    def __init__(self) -> None:
        self.result = ""

    def stored(self) -> None:
        self.result += "stored"

    def refused(self, error: MetaqError, outcome: str) -> None:
        self.result += outcome

    def late(self, short: Short) -> None:
        self.result += short.code.name


class Bench:
    """A store whose syncs end when the test lets them."""

    def __init__(self, data: Path) -> None:
        self.parts = Parts(data, durability="disk", sync_timeout_ms=TIMEOUT_MS)
        self.store, self.loop = self.parts.store, self.parts.loop
        hub = cast(Any, SimpleNamespace(loop=self.loop))
        self.turns = Turns(self.store, self.parts.settings, hub, self._run, lambda _: None)
        self.syncs = 0
        self.failure: DiskFailed | None = None
        self._may_end = Event()
        self._greenlet = gevent.spawn(self.turns.sync_forever)

    def _run(self, call: Callable[[], T]) -> T:
        self.syncs += 1
        self._may_end.wait()
        self._may_end.clear()
        if self.failure is not None:
            raise self.failure
        return call()

    def put(self) -> Outcome:
        outcome = Outcome()
        stage(self.parts.context, internal(self.parts.context, "orders", b"hello"))
        self.turns.staged(outcome)
        return outcome

    def end_turn(self) -> None:
        self.loop.end_turn()

    def end_sync(self) -> None:
        self._may_end.set()
        for _ in range(3):  # the greenlet that syncs, and what it leaves to the loop
            self.loop.end_turn()

    def close(self) -> None:
        self.turns.stop()
        self._greenlet.kill()
        self.store.close(durably=False)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.close()


def test_puts_that_come_during_a_sync_are_appended_together_when_it_ends(bench: Bench) -> None:
    first = bench.put()
    bench.end_turn()
    after_first, turns = bench.store.log.end, bench.turns.number
    during = [bench.put()]
    bench.end_turn()
    during.append(bench.put())
    bench.end_turn()
    assert (bench.syncs, bench.store.log.end, first.result) == (1, after_first, "")
    bench.end_sync()
    assert (first.result, bench.turns.number, bench.syncs) == ("stored", turns + 1, 2)
    assert bench.store.log.end > after_first
    assert [outcome.result for outcome in during] == ["", ""]
    bench.end_sync()
    assert [outcome.result for outcome in during] == ["stored", "stored"]


def test_who_answers_is_called_after_all_that_learn_what_is_stored(bench: Bench) -> None:
    """What an answer lets others stage belongs to the next turn, also for those that learn of this one last."""
    called: list[tuple[str, int]] = []

    def answer(failure: StoreError | None) -> None:
        bench.put()
        called.append(("answers", bench.turns.number))
        bench.turns.after_append(lambda failure: called.append(("next turn", bench.turns.number)))

    before = bench.turns.number
    bench.turns.with_answers(answer)
    bench.turns.after_append(lambda failure: called.append(("learns", bench.turns.number)))
    bench.end_turn()
    assert called == [("learns", before + 1), ("answers", before + 1), ("next turn", before + 2)]


def test_a_slow_sync_keeps_no_put_from_the_log(bench: Bench) -> None:
    """And the time after which a put is answered as late runs."""
    bench.put()
    bench.end_turn()
    before, put = bench.store.log.end, bench.put()
    bench.parts.clock.advance(LONGEST_HOLD_S)
    bench.loop.fire_timers()
    assert bench.store.log.end > before
    bench.parts.clock.advance(TIMEOUT_MS / 1000)
    bench.turns.expire()
    assert put.result == Response.FLUSH_DISK_TIMEOUT.name
    bench.end_sync()
    assert bench.turns.nothing_parked()


def test_work_on_the_store_ends_a_turn_that_waits_for_a_sync(bench: Bench) -> None:
    """A greenlet that goes on in the middle of a turn would see messages whose append may still fail."""
    bench.put()
    bench.end_turn()
    before, put = bench.store.log.end, bench.put()
    duties = Duties(bench.parts.context, bench.turns, run_here)
    assert not bench.store.settled
    duties.settle()
    assert bench.store.settled
    assert bench.store.log.end > before
    bench.end_sync()
    bench.end_sync()
    assert put.result == "stored"


def test_a_sync_that_fails_also_refuses_the_turn_that_waited_for_it(bench: Bench) -> None:
    """SG-066: both are in doubt, since both are in the log."""
    first = bench.put()
    bench.end_turn()
    during = bench.put()
    bench.failure = DiskFailed("the disk does not answer")
    bench.end_sync()
    assert [first.result, during.result] == [IN_DOUBT, IN_DOUBT]
    assert not bench.store.writable


def test_puts_wait_until_a_file_can_be_opened_again(bench: Bench) -> None:
    """SG-041: nothing was tried and nothing is lost, so they are answered when they are on the disk."""
    put = bench.put()
    bench.end_turn()
    bench.failure = TooManyFiles("cannot open a segment: too many open files")
    bench.end_sync()
    assert (put.result, bench.store.writable) == ("", True)
    bench.failure = None

    def tries_again() -> bool:
        gevent.sleep(0.001)
        return bench.syncs == 2

    wait_until(tries_again, DEADLINE_S, "it tries again")
    bench.end_sync()
    assert put.result == "stored"


class Copies:
    """Replicas that hold as much as the test says, of which enough are in sync or not."""

    held_end = 0
    hopeful = False


def test_who_waits_for_replicas_can_read_what_is_answered(tmp_path: Path) -> None:
    """However much came before for which too few were in sync; what nobody waits for takes little memory."""
    parts, copies = Parts(tmp_path, durability="replica", replication_listen="127.0.0.1:0"), Copies()
    hub = cast(Any, SimpleNamespace(loop=parts.loop))
    turns = Turns(parts.store, parts.settings, hub, run_here, lambda _: None, RoleParts(NoReplicas(), copies))

    def put() -> Outcome:
        outcome = Outcome()
        stage(parts.context, internal(parts.context, "orders", b"hello"))
        turns.staged(outcome)
        parts.loop.end_turn()
        return outcome

    count = MANY_HIDDEN + 100
    results = {put().result for _ in range(count)}
    assert results == {Response.SLAVE_NOT_AVAILABLE.name}
    assert len(parts.store._unpublished) <= MANY_HIDDEN + 1
    copies.hopeful = True
    first, end, second = put(), parts.store.log.end, put()
    copies.held_end = end
    turns.release()
    assert (first.result, second.result) == ("stored", "")
    assert parts.store.queue("orders", 0).readable == count + 1
    parts.close()

"""The duties that look after the store go on, whatever goes wrong in one round of them."""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import gevent
import pytest
from gevent.event import Event

from metaq.clock import SystemClock
from metaq.config import load
from metaq.engine.duties import Duties
from metaq.engine.role import NoReplicas
from metaq.engine.turn import Short
from metaq.engine.writing import internal, stage
from metaq.errors import MetaqError
from metaq.store.files.filecache import run_here
from tests.support.inprocess import Parts


@pytest.mark.parametrize("error", [ValueError("unexpected"), OSError("unexpected")])
def test_a_duty_survives_its_failures(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    """SG-066, SG-068: the next round comes, and the failure is in the log with its place."""
    store = SimpleNamespace(clock=SystemClock(), shortage=None)
    context = cast(
        Any,
        SimpleNamespace(settings=load(None, {}, {}), store=store, topics=None, groups=None, modes=None, replicas=NoReplicas()),
    )
    duties = Duties(context, cast(Any, None), cast(Callable[..., Any], None))
    rounds: list[int] = []

    def fails() -> None:
        rounds.append(len(rounds))
        if len(rounds) == 1:
            raise error

    with caplog.at_level(logging.ERROR):
        duties.every(0.001, fails)
        deadline = store.clock.monotonic() + 30
        while len(rounds) < 3 and store.clock.monotonic() < deadline:
            gevent.sleep(0.001)
    duties.pause()
    assert len(rounds) >= 3
    assert "duty failed duty=fails" in caplog.text
    assert "unexpected" in caplog.text


class _Table:
    """A table that counts how often it is saved."""

    unsaved = False
    saves = 0

    def save(self, *_: object) -> None:
        self.unsaved = False
        self.saves += 1


def test_a_changed_topic_is_saved_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """SG-068: a broker that is killed a moment later still knows how many partitions it had."""
    monkeypatch.setattr("metaq.engine.duties.SAVE_TABLES_S", 3600.0)
    topics, others = _Table(), _Table()
    store = SimpleNamespace(clock=SystemClock(), shortage=None, failure=None, disk=None, check_healthy=lambda: None)
    parts = {"topics": topics, "groups": others, "modes": others, "replicas": NoReplicas()}
    context = cast(Any, SimpleNamespace(settings=load(None, {}, {}), store=store, **parts))
    duties = Duties(context, cast(Any, None), cast(Callable[..., Any], None))
    greenlet = gevent.spawn(duties._save_tables_forever)
    deadline = store.clock.monotonic() + 30
    for times in (1, 2):
        topics.unsaved = True
        duties.topic_changed()
        while topics.unsaved and store.clock.monotonic() < deadline:
            gevent.sleep(0.001)
        assert (topics.saves, others.saves) == (times, 0)
    greenlet.kill()


def test_a_checkpoint_syncs_the_log_as_turns_do() -> None:
    """SG-041: one sync after the other, or they hide from each other what the kernel reports; none once the broker stops."""
    made: list[str] = []

    def checkpoint(run: Callable[..., Any], rest: Callable[[], None], run_sync: Callable[..., Any]) -> None:
        run_sync(lambda: made.append("sync"))
        duties.pause()
        run_sync(lambda: made.append("late"))

    def run_sync(call: Callable[[], Any]) -> Any:
        made.append("in its thread")
        return call()

    store = SimpleNamespace(
        clock=SystemClock(), shortage=None, failure=None, settled=True, check_healthy=lambda: None, checkpoint=checkpoint
    )
    parts = {"topics": _Table(), "groups": _Table(), "modes": _Table(), "replicas": NoReplicas()}
    context = cast(Any, SimpleNamespace(settings=load(None, {}, {}), store=store, **parts))
    duties = Duties(context, cast(Any, SimpleNamespace(run_sync=run_sync)), cast(Callable[..., Any], None))
    duties._checkpoint()
    assert made == ["in its thread", "sync"]


class _Outcome:
    """The outcome of a put, once it is known."""

    size = 0
    result = ""

    def stored(self) -> None:
        self.result = "stored"

    def refused(self, error: MetaqError, outcome: str) -> None:
        self.result = outcome

    def late(self, short: Short) -> None:
        self.result = short.code.name


class _Keeper:
    """A keeper that knows what it needs only when the test lets it."""

    def __init__(self) -> None:
        self.asked, self.may_answer = Event(), Event()

    @property
    def oldest(self) -> int | None:
        self.asked.set()
        self.may_answer.wait()
        return None

    def keep(self, before: int) -> None:
        """Do nothing."""


def test_puts_are_answered_while_a_start_looks_after_retention(tmp_path: Path) -> None:
    """SG-041: connections are accepted by then, and on a slow disk the look takes long."""
    parts, keeper, outcome = Parts(tmp_path / "data", durability="disk"), _Keeper(), _Outcome()
    duties = Duties(parts.context, parts.turns, run_here)
    start = gevent.spawn(duties.start, [keeper])
    assert keeper.asked.wait(30)
    stage(parts.context, internal(parts.context, "orders", b"hello"))
    parts.turns.staged(outcome)
    deadline = time.monotonic() + 30
    while not outcome.result and time.monotonic() < deadline:
        parts.end_turn()
        gevent.sleep(0.001)
    assert (outcome.result, start.ready()) == ("stored", False)
    keeper.may_answer.set()
    start.get()
    duties.pause()
    assert duties.stop(30)
    parts.close()

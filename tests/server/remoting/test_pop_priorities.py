"""Pops of a topic with priorities: the highest level first, but for two brakes."""

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from metaq.engine.priorities.levels import prioritize
from metaq.engine.writing import Draft, note, stage
from metaq.protocol.properties import PRIORITY
from metaq.protocol.remoting.codes import Response
from metaq.protocol.remoting.leases.receipts import Receipt
from tests.server.remoting.test_pops import GROUP, INVISIBLE_MS, TOPIC, Consumer, bodies

LEVELS: Final = 3
NO_WAIT: Final = 0
"""Ageing is off."""


class Alarms(Consumer):
    """A broker whose topic has levels of priority, and a client of it."""

    def __init__(self, data: Path, *, max_wait_ms: int = NO_WAIT, factor: int = 100) -> None:
        super().__init__(data, {"partitions": LEVELS, "priority": True})
        topics, groups = self.parts.context.topics, self.parts.context.groups
        topic = topics.get(TOPIC)
        assert topic is not None
        topics.put(topic.having({"priority.max.wait.ms": str(max_wait_ms)}))
        groups.put(replace(groups.ensure(GROUP), attributes={"priority.factor": str(factor)}))

    def put_at(self, level: int, *names: str) -> None:
        """Store messages with a priority, which decides where they are."""
        for name in names:
            draft = Draft(TOPIC, 0, name.encode(), {PRIORITY: str(level)}, 0, 0, self.parts.clock.now_ms(), bytes(8))
            prioritize(self.parts.context.topics, draft)
            stage(self.parts.context, draft)
        note(self.parts.turns, lambda error: None)
        self.parts.end_turn()


Opening = Callable[..., Alarms]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opening]:
    """Open brokers with attributes of the topic and of the group."""
    brokers: list[Alarms] = []

    def opening(**attributes: int) -> Alarms:
        brokers.append(Alarms(tmp_path / str(len(brokers)), **attributes))
        return brokers[-1]

    yield opening
    for broker in brokers:
        broker.parts.close()


def test_a_pop_takes_the_highest_level_first(opened: Opening) -> None:
    """MY-034, R-1: over as many levels as it has room for, and all that came meanwhile before what is lower."""
    alarms = opened()
    alarms.put_at(0, "low1", "low2")
    alarms.put_at(2, "high1", "high2")
    alarms.put_at(1, "middle")
    assert bodies(alarms.popped(1)) == ["high1"]
    assert bodies(alarms.popped(3)) == ["high2", "middle", "low1"]
    alarms.put_at(9, "high3")
    assert bodies(alarms.popped()) == ["high3", "low2"]


def test_what_comes_again_stays_in_its_level(opened: Opening) -> None:
    """MY-034, R-1: before what is lower, and never before what is higher."""
    alarms = opened()
    alarms.put_at(1, "middle")
    (taken,) = alarms.popped(1)
    alarms.put_at(2, "high")
    alarms.put_at(0, "low")
    assert alarms.change(taken[1], 0).code == Response.SUCCESS
    assert [bodies(alarms.popped(1)) for _ in range(3)] == [["high"], ["middle"], ["low"]]


def test_all_that_comes_again_is_given_before_what_is_lower(opened: Opening) -> None:
    """MY-034, R-1: half of a pop is for what is new, but only as far as there is something new in the level."""
    alarms = opened()
    alarms.put_at(2, "a", "b", "c", "d")
    for _, receipt in alarms.popped():
        assert alarms.change(receipt, 0).code == Response.SUCCESS
    alarms.put_at(2, "e")
    alarms.put_at(0, "low1", "low2")
    assert bodies(alarms.popped(6)) == ["a", "b", "c", "d", "e", "low1"]


def test_a_pop_that_waits_gets_any_level(opened: Opening) -> None:
    """MY-034: without a backlog priorities change nothing."""
    alarms = opened()
    assert alarms.pop(poll_ms=5000) is None
    alarms.put_at(0, "low")
    alarms.leasing.lines.wake(alarms.parts.store.queues.values())
    alarms.parts.end_turn()
    (answer,) = alarms.client.answers()
    assert bodies(alarms.messages(answer)) == ["low"]


def test_messages_that_have_waited_too_long_come_first(opened: Opening) -> None:
    """MY-034, R-2: of any level, the oldest first; until then the highest level."""
    alarms = opened(max_wait_ms=4000)
    alarms.put_at(0, "low1", "low2")
    alarms.parts.advance(2)
    alarms.put_at(1, "middle1", "middle2")
    alarms.parts.advance(2)
    alarms.put_at(2, "high1", "high2", "high3")
    assert bodies(alarms.popped(1)) == ["high1"]
    alarms.parts.advance(0.001)
    assert bodies(alarms.popped(1)) == ["low1"]
    alarms.parts.advance(2)
    assert bodies(alarms.popped(4)) == ["low2", "middle1", "middle2", "high2"]


def test_what_comes_again_has_waited_since_it_was_stored(opened: Opening) -> None:
    """MY-034, R-2: one that is given back does not begin to wait anew."""
    alarms = opened(max_wait_ms=4000)
    alarms.put_at(0, "low")
    ((_, receipt),) = alarms.popped()
    alarms.parts.advance(4.001)
    alarms.put_at(2, "high")
    alarms.put_at(0, "low2")
    assert alarms.change(receipt, 0).code == Response.SUCCESS
    assert [bodies(alarms.popped(1)) for _ in range(3)] == [["low"], ["high"], ["low2"]]


def test_at_a_factor_some_pops_begin_elsewhere(opened: Opening) -> None:
    """MY-034: 90 of 100 go by priority, the others begin at each level in turn; pops that get nothing do not count."""
    alarms = opened(factor=90)
    assert [alarms.popped() for _ in range(15)] == [[]] * 15
    for level in range(LEVELS):
        alarms.put_at(level, *(f"{level}" for _ in range(60)))
    begun = Counter(bodies(alarms.popped(1))[0] for _ in range(60))
    assert begun == {"2": 56, "1": 2, "0": 2}


class PopMachine(RuleBasedStateMachine):
    """R-1 after each pop: it gives all that there is, or as much as it may, from the highest level down."""

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()
        self._alarms = Alarms(Path(self._folder.name))
        self._levels: dict[str, int] = {}
        self._ready_ms: dict[str, int] = {}
        self._given: dict[str, Receipt] = {}

    def teardown(self) -> None:
        self._alarms.parts.close()
        self._folder.cleanup()

    @rule(level=st.integers(0, LEVELS - 1), count=st.sampled_from((1, 2, 5)))
    def put(self, level: int, count: int) -> None:
        names = [f"{len(self._levels) + number}" for number in range(count)]
        self._alarms.put_at(level, *names)
        self._levels.update(dict.fromkeys(names, level))
        self._ready_ms.update(dict.fromkeys(names, 0))

    @rule(most=st.sampled_from((1, 3, 8)))
    def pop(self, most: int) -> None:
        now_ms = self._alarms.parts.clock.now_ms()
        ready = sorted((self._levels[name] for name, since_ms in self._ready_ms.items() if since_ms <= now_ms), reverse=True)
        taken = self._alarms.popped(most)
        assert sorted((self._levels[name] for name, _ in taken), reverse=True) == ready[:most]
        for name, receipt in taken:
            self._given[name] = receipt
            self._ready_ms[name] = now_ms + INVISIBLE_MS  # not from pop_ms on, which is later where pops follow each other

    @precondition(lambda self: self._given)
    @rule()
    def give_all_back(self) -> None:
        for name in list(self._given):
            self._give_back(name)

    def _give_back(self, name: str) -> None:
        if self._alarms.change(self._given.pop(name), 0).code == Response.SUCCESS:
            self._ready_ms[name] = 0

    @precondition(lambda self: self._given)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        self._give_back(data.draw(st.sampled_from(sorted(self._given))))

    @precondition(lambda self: self._given)
    @rule(data=st.data())
    def ack(self, data: st.DataObject) -> None:
        """Finish a message; a late ack of one that nobody else has got counts."""
        name = data.draw(st.sampled_from(sorted(self._given)))
        assert self._alarms.ack(self._given.pop(name)) == Response.SUCCESS
        del self._ready_ms[name]

    @rule(ms=st.integers(1, INVISIBLE_MS))
    def wait(self, ms: int) -> None:
        self._alarms.parts.advance(ms / 1000)


def test_no_ready_message_of_a_higher_level_is_passed_over() -> None:
    """MY-034, R-1: fresh, given back, or with a lease that is over, however many a pop takes."""
    run_state_machine_as_test(PopMachine, settings=settings(max_examples=25, stateful_step_count=30, deadline=None))

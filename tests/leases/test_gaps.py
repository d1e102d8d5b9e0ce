"""Events of which some are missing: no message is lost, and what is dead stays dead."""

import random
from typing import Final

from hypothesis import given, settings
from hypothesis import strategies as st

from metaq.leases.events import Acked, Dead, LeaseEvent, Lined, Passed, Popped, Repeated, Reset, Row, Whole
from metaq.leases.gaps import events_after_gap
from metaq.leases.state import PartitionLeases

NOW_MS: Final = 1_700_000_000_000
EVENTS: Final = 40


def history(rng: random.Random) -> list[LeaseEvent]:
    """Return events as a broker makes them: pops, pops again, acks, deaths and snapshots."""
    state, events = PartitionLeases(0), list[LeaseEvent]()
    for number in range(EVENTS):
        open_now, pop_ms = state.ordinals(), NOW_MS + number
        match rng.randrange(6):
            case 0 | 1:
                new: list[LeaseEvent] = [Popped(pop_ms, pop_ms, state.next, 4, rng.choice((0b1111, 0b1001)))]
            case 2 if open_now:
                new = [Repeated(pop_ms, pop_ms, sorted(rng.sample(open_now, rng.randint(1, len(open_now)))))]
            case 3 if open_now:
                ordinal = rng.choice(open_now)
                bunch = state.find(ordinal)
                assert bunch is not None
                new = [Acked(bunch.pop_ms, ordinal, 1)]
            case 4 if open_now:
                new = [Dead(rng.choice(open_now))]
            case 5:
                new = list(state.events(0))
            case _:
                new = [Passed(state.next + 1)]
        for event in new:
            state.apply(event, NOW_MS, 0)
        events += new
    return events


def fold(events: list[LeaseEvent]) -> PartitionLeases:
    state = PartitionLeases(0)
    for event in events:
        state.apply(event, NOW_MS, 0)
    return state


@given(st.integers(0, 1 << 32), st.integers(0, EVENTS), st.integers(1, 10))
@settings(max_examples=300)
def test_what_is_missing_loses_nothing(seed: int, first: int, count: int) -> None:
    """L-2, L-7: what is open is open or comes anew, and what is dead by an event that is there is not."""
    events = history(random.Random(seed))
    before, after = events[:first], events[first + count :]
    whole, state = fold(events), fold(before)
    for event in after:
        for each in events_after_gap(state, event, NOW_MS):
            state.apply(each, NOW_MS, 0)
    found = state.ordinals()
    assert len(found) == len(set(found)) == state.open
    assert all(ordinal in found or ordinal >= state.next for ordinal in whole.ordinals())
    unsure = [event.ordinal for event in events[first : first + count] if isinstance(event, Dead)]
    assert all(ordinal in found or ordinal >= state.next for ordinal in unsure)
    dead = {event.ordinal for event in (*before, *after) if isinstance(event, Dead)}
    assert all(ordinal not in found and ordinal < state.next for ordinal in dead)


def test_what_a_missing_pop_gave_waits() -> None:
    """L-2: two pops are missing; a reset after them is as good as any."""
    state = PartitionLeases(3)
    for event in events_after_gap(state, Popped(NOW_MS, NOW_MS + 1000, 5, 2, 0b11), NOW_MS):
        state.apply(event, NOW_MS, 0)
    state.settle(NOW_MS)
    assert (state.ordinals(), state.first_waiting(9), state.next) == ([3, 4, 5, 6], [3, 4], 7)
    for event in events_after_gap(state, Reset(9), NOW_MS):
        state.apply(event, NOW_MS, 0)
    assert (state.ordinals(), state.base) == ([], 9)


def test_what_was_lined_is_open_once() -> None:
    """L-2, L-10: a pop gave message 6 and lined 5, whose key is that of an open message; it waits only when that is done."""
    state = PartitionLeases(4)
    state.apply(Popped(NOW_MS, NOW_MS + 1000, 4, 1, 1), NOW_MS, 0)
    for event in (Popped(NOW_MS, NOW_MS + 1000, 6, 1, 1), Lined([5])):
        for each in events_after_gap(state, event, NOW_MS):
            state.apply(each, NOW_MS, 0)
    state.settle(NOW_MS)
    assert (state.open, state.lined, state.first_waiting(9)) == (3, 1, [])
    state.learn({4: "a", 5: "a", 6: "b"})
    state.apply(Acked(NOW_MS, 4, 1), NOW_MS, 0)
    assert state.first_waiting(9) == [5]
    state.apply(Repeated(NOW_MS + 1, NOW_MS + 1000, [5]), NOW_MS, 0)
    for pop_ms, ordinal in ((NOW_MS, 6), (NOW_MS + 1, 5)):
        state.apply(Acked(pop_ms, ordinal, 1), NOW_MS, 0)
    assert (state.open, state.base) == (0, 7)


def test_what_was_lined_is_open_once_without_its_pop() -> None:
    """L-2: what is before it may have been given by the pop that is missing."""
    state = PartitionLeases(3)
    for event in (Lined([5, 7]), Popped(NOW_MS, NOW_MS + 1000, 8, 1, 1)):
        for each in events_after_gap(state, event, NOW_MS):
            state.apply(each, NOW_MS, 0)
    state.settle(NOW_MS)
    assert (state.ordinals(), state.open, state.next) == ([3, 4, 5, 6, 7, 8], 6, 9)
    assert (state.first_waiting(9), state.lined) == ([3, 4, 6], 2)


def test_what_is_dead_by_an_event_that_is_there_stays_dead() -> None:
    """L-7: the pop that gave it is missing, and with it what it knew of others."""
    state = PartitionLeases(3)
    for event in events_after_gap(state, Dead(6), NOW_MS):
        state.apply(event, NOW_MS, 0)
    assert (state.ordinals(), state.next) == ([3, 4, 5], 7)
    for event in events_after_gap(state, Whole(8, 9, [Row(4, 1, NOW_MS, NOW_MS, 2, NOW_MS)]), NOW_MS):
        state.apply(event, NOW_MS, 0)
    assert (state.ordinals(), state.next) == ([3, 4, 5, 7, 8], 9)

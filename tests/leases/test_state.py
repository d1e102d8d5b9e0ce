"""The state of leases, against a dictionary of messages that does the same one by one."""

import random
from dataclasses import dataclass, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from metaq.leases.events import Acked, Changed, Dead, LeaseEvent, Lined, Passed, Popped, Repeated, Reset
from metaq.leases.state import PartitionLeases, ReceiptState

SHIFT_MS = 1_700_000_000_000
END = 200


@dataclass
class Given:
    """An open message."""

    pop_ms: int
    due_ms: int
    times: int
    first_ms: int


class Leases(RuleBasedStateMachine):
    """Pops, acks and all else in any order; the invariants L-1 and L-4 to L-6 after each."""

    def __init__(self) -> None:
        super().__init__()
        self.state = PartitionLeases(0)
        self.now_ms, self.last_pop_ms, self.next = 1000, 0, 0
        self.open: dict[int, Given] = {}

    def _apply(self, event: LeaseEvent) -> None:
        self.state.apply(event, self.now_ms, SHIFT_MS)

    def _pop_ms(self) -> int:
        self.last_pop_ms = max(self.now_ms + SHIFT_MS, self.last_pop_ms + 1)
        return self.last_pop_ms

    @property
    def _waiting(self) -> list[int]:
        return sorted(ordinal for ordinal, each in self.open.items() if each.due_ms <= self.now_ms)

    @rule(skipped=st.integers(0, 3), bits=st.integers(0, 0xFF), lease_ms=st.integers(0, 50))
    def pop(self, skipped: int, bits: int, lease_ms: int) -> None:
        length = bits.bit_length()
        first, pop_ms = self.next + skipped, self._pop_ms()
        self._apply(Popped(pop_ms, pop_ms + lease_ms, first, length, bits))
        self.next = first + length
        for index in range(length):
            if bits >> index & 1:
                self.open[first + index] = Given(pop_ms, self.now_ms + lease_ms, 1, pop_ms)

    @rule(further=st.integers(0, 5))
    def pass_some(self, further: int) -> None:
        self._apply(Passed(self.next + further))
        self.next += further

    @rule(ms=st.integers(1, 30))
    def time_passes(self, ms: int) -> None:
        self.now_ms += ms

    @rule(most=st.integers(1, 5), lease_ms=st.integers(0, 50))
    def give_again(self, most: int, lease_ms: int) -> None:
        self.state.settle(self.now_ms)
        ordinals = self.state.first_waiting(most)
        assert ordinals == self._waiting[:most]
        pop_ms = self._pop_ms()
        self._apply(Repeated(pop_ms, pop_ms + lease_ms, ordinals))
        for ordinal in ordinals:
            before = self.open[ordinal]
            self.open[ordinal] = replace(before, pop_ms=pop_ms, due_ms=self.now_ms + lease_ms, times=before.times + 1)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), lease_ms=st.integers(0, 50))
    def give_to_the_same_attempt(self, data: st.DataObject, lease_ms: int) -> None:
        ordinals = sorted(data.draw(st.sets(st.sampled_from(sorted(self.open)), min_size=1)))
        pop_ms = self._pop_ms()
        self._apply(Repeated(pop_ms, pop_ms + lease_ms, ordinals, same_attempt=True))
        for ordinal in ordinals:
            self.open[ordinal] = replace(self.open[ordinal], pop_ms=pop_ms, due_ms=self.now_ms + lease_ms)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), bits=st.integers(1, 0xFF), is_last=st.booleans())
    def ack(self, data: st.DataObject, bits: int, is_last: bool) -> None:
        first = data.draw(st.sampled_from(sorted(self.open)))
        pop_ms = self.open[first].pop_ms - (not is_last)
        self._apply(Acked(pop_ms, first, bits))
        for index in range(bits.bit_length()):
            known = self.open.get(first + index)
            if bits >> index & 1 and known is not None and known.pop_ms == pop_ms:
                del self.open[first + index]

    @precondition(lambda self: self.open)
    @rule(data=st.data(), lease_ms=st.integers(0, 50), is_last=st.booleans())
    def change(self, data: st.DataObject, lease_ms: int, is_last: bool) -> None:
        ordinal = data.draw(st.sampled_from(sorted(self.open)))
        known = self.open[ordinal]
        pop_ms = known.pop_ms - (not is_last)
        due_ms = self.now_ms + min(lease_ms, self.now_ms + lease_ms + SHIFT_MS - pop_ms)
        self._apply(Changed(pop_ms, ordinal, self.now_ms + lease_ms + SHIFT_MS))
        if is_last:
            self.open[ordinal] = replace(known, due_ms=max(due_ms, self.now_ms))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        ordinal = data.draw(st.sampled_from(sorted(self.open)))
        self._apply(Dead(ordinal))
        del self.open[ordinal]

    @rule(offset=st.integers(0, END))
    def reset(self, offset: int) -> None:
        self._apply(Reset(offset))
        self.next, self.open = offset, {}

    @rule()
    def read_again(self) -> None:
        """Replace the state by what its own events say, as an opening does."""
        events, self.state = list(self.state.events(SHIFT_MS)), PartitionLeases(0)
        for event in events:
            self._apply(event)
        self._shorten()

    def _shorten(self) -> None:
        """Shorten leases that were given ahead of the clock, as a whole state does: no lease becomes longer than it was."""
        for ordinal, each in self.open.items():
            left_ms = min(each.due_ms - self.now_ms, each.due_ms + SHIFT_MS - each.pop_ms)
            self.open[ordinal] = replace(each, due_ms=self.now_ms + max(0, left_ms))

    @rule(end=st.integers(0, END))
    def log_ends(self, end: int) -> None:
        events = self.state.cut(end, SHIFT_MS)
        for event in events:
            self._apply(event)
        self.next = min(self.next, end)
        self.open = {ordinal: each for ordinal, each in self.open.items() if ordinal < end}
        if events:
            self._shorten()

    @invariant()
    def state_is_that_of_the_dictionary(self) -> None:
        self.state.settle(self.now_ms)
        waiting = self._waiting
        assert (self.state.open, self.state.waiting) == (len(self.open), len(waiting))
        assert self.state.leased == len(self.open) - len(waiting)
        assert self.state.first_waiting(END) == waiting
        assert self.state.next == self.next
        assert self.state.base == min(self.open, default=self.next)
        due = [each.due_ms for each in self.open.values() if each.due_ms > self.now_ms]
        assert self.state.next_due_ms == min(due, default=None)
        for ordinal, each in self.open.items():
            found = self.state.find(ordinal)
            assert found is not None
            assert (found.pop_ms, found.times, found.first_ms) == (each.pop_ms, each.times, each.first_ms)
            over = ReceiptState.OVER if each.due_ms <= self.now_ms else ReceiptState.LEASED
            assert self.state.receipt_state(ordinal, each.pop_ms) is over
            assert self.state.receipt_state(ordinal, each.pop_ms - 1) is ReceiptState.AGAIN
        assert self.state.receipt_state(self.next, 0) is ReceiptState.UNKNOWN
        closed = next((ordinal for ordinal in range(self.next) if ordinal not in self.open), None)
        assert closed is None or self.state.receipt_state(closed, 0) is ReceiptState.DONE


Leases.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestLeases = Leases.TestCase


def test_a_claimed_message_is_given_to_nobody() -> None:
    state = PartitionLeases(0)
    state.apply(Popped(SHIFT_MS, SHIFT_MS, 0, 2, 3), 0, SHIFT_MS)
    state.settle(0)
    state.claim(0)
    assert state.first_waiting(2) == [1]
    assert state.receipt_state(0, SHIFT_MS) is ReceiptState.DONE
    assert state.is_claimed(0)
    assert state.release(0, is_dead=False)
    assert state.first_waiting(2) == [0, 1]


def test_a_claimed_message_in_line_keeps_its_place() -> None:
    """L-10: when a claim ends, and the message is not dead, it waits only if its turn has come."""
    state = PartitionLeases(0)
    for event in (Popped(SHIFT_MS, SHIFT_MS + 1000, 0, 3, 0b1), Lined([1, 2])):
        state.apply(event, 0, SHIFT_MS)
    state.learn({0: "a", 1: "a", 2: "a"})
    for ordinal in (1, 2):
        state.claim(ordinal)
    assert state.release(1, is_dead=False)
    assert (state.lined, state.leased, state.first_waiting(9)) == (2, 1, [])
    state.claim(1)
    state.apply(Acked(SHIFT_MS, 0, 1), 0, SHIFT_MS)
    assert state.first_waiting(9) == []
    for ordinal in (2, 1):
        assert state.release(ordinal, is_dead=False)
    assert (state.lined, state.first_waiting(9)) == (1, [1])


def test_a_clock_that_was_set_back_lengthens_no_lease_beyond_its_length() -> None:
    state = PartitionLeases(0)
    state.apply(Popped(SHIFT_MS, SHIFT_MS + 60_000, 0, 1, 1), 500, SHIFT_MS - 3_600_000)
    assert state.next_due_ms == 60_500


@pytest.mark.parametrize("seed", range(10))
def test_a_part_of_a_whole_state_takes_nothing_for_done(seed: int) -> None:
    """L-2: a power cut may leave any number of the first events. What the others have is given again then."""
    rng = random.Random(seed)
    state, first = PartitionLeases(0), 0
    for number in range(1, 600):
        pop_ms, count = 1000 * number, rng.randint(1, 5)
        events: list[LeaseEvent] = [Popped(pop_ms, pop_ms + 9, first, count, (1 << count) - 1)]
        if rng.random() < 0.5:
            events.append(Repeated(pop_ms + 1, pop_ms + 9, [first + rng.randrange(count)], False))
        events.append(Acked(pop_ms, first, rng.randrange(1 << count)))
        for event in events:
            state.apply(event, 0, 0)
        first += count
    whole = list(state.events(0))
    assert len(whole) > 3
    part = PartitionLeases(0)
    for event in whole:
        part.apply(event, 0, 0)
        known = set(part.ordinals())
        assert all(ordinal in known or ordinal >= part.next for ordinal in state.ordinals())
        assert all(ordinal < part.next for ordinal in known)
    assert (list(part.ordinals()), part.next) == (list(state.ordinals()), state.next)

"""The engine of leases against a dictionary: anything that a consumer, an administrator, a clock or a disk may do."""

from collections.abc import Sequence
from typing import Final

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from metaq.engine.leases.planning import Plan, PopRequest
from metaq.engine.leases.poison import Reason
from metaq.engine.leases.popping import PopResult
from metaq.leases.state import ReceiptState
from metaq.message import GroupPartition, TopicPartition
from metaq.store.files.filecache import read_here
from tests.engine.leases.dictionary import Dictionary, Given, Message, Place, Receipt
from tests.engine.leases.leased import GROUPS, MOST_TIMES, PARTITIONS, TOPIC, LeasedBroker, records_of

TRIES: Final = 8
SLACK_MS: Final = 100
"""By so much may ``pop_ms`` run ahead of the clock here: by 1 ms for each pop that follows another at once."""
HOUR_MS: Final = 3_600_000
SET_S: Final = 12 * 3600.0
"""More than the clock was set by in all: a lease that is in a snapshot between two settings is longer by the second."""
RARE: Final = (
    "snapshot",
    "snapshot",
    "kill",
    "kill",
    "disk",
    "disk",
    "tend",
    "set clock",
    "commit",
    "reset offset",
    "retire",
    "delete topic",
)

GROUP = st.sampled_from(GROUPS)
PARTITION = st.integers(0, PARTITIONS - 1)
INVISIBLE_MS = st.sampled_from((1000, 10_000))
OFFSET = st.integers(0, 12)
TAG = st.sampled_from(("", "", "red", "blue"))
PLACE = st.builds(lambda group, partition: GroupPartition(group, TOPIC, partition), GROUP, PARTITION)


class LeaseMachine(RuleBasedStateMachine):
    """The invariants L-1 to L-8, L-10 to L-13 after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.broker = LeasedBroker()
        self.known = Dictionary()
        self.saved = self.known.copy()
        """As of the end of the last turn: what was answered."""
        self.unkept: set[GroupPartition] = set()
        self.receipts: list[Receipt] = []
        self.answered = 0
        """So many of the receipts."""
        self.plans: list[tuple[PopRequest, str, Plan]] = []
        self.is_full = False
        self._put = 0
        self.put(0, ["", "red", "blue"])
        self.put(1, ["", ""])
        self.end_turn()

    @property
    def now_ms(self) -> int:
        return self.broker.now_ms

    # -- turns --------------------------------------------------------------------------------------------------------

    @rule()
    def end_turn(self) -> None:
        self.broker.end_turn()
        self._turn_ended()

    def _turn_ended(self) -> None:
        for partition, messages in enumerate(self.known.messages):
            assert self.is_full or len(messages) == self.broker.end_of(partition)
            del messages[self.broker.end_of(partition) :]
        for group in GROUPS:
            for letter in self.broker.dead_letters(group, self.known.letters[group]):
                self.known.letters[group] += 1
                place, ordinal = self.known.place_of(group, letter.body)
                if ordinal >= place.next:
                    continue  # a reset of this turn made it a new message again
                assert ordinal not in place.dead, letter
                place.dead.add(ordinal)
                if ordinal in place.dying:
                    given = place.open.pop(ordinal, None)
                    assert given is None or letter.times == given.times
                elif ordinal in place.open:
                    assert letter.reason == Reason.AGED_OUT
                    del place.open[ordinal]
                place.done.discard(ordinal)
        for place in self.known.places.values():
            left = place.dying & place.open.keys()
            assert self.is_full or not left
            for ordinal in left:
                place.open[ordinal].due_ms = min(self.now_ms, place.open[ordinal].due_ms)
            place.dying.clear()
        for where, place in self.known.places.items():
            self._check_offset(where, place)
        self.answered = len(self.receipts)
        self.unkept = set(self.broker.leases.log.unkept)
        for where in self.known.places.keys() - self.unkept:
            self.known.places[where].undone.clear()
        self.saved = self.known.copy()

    def _check_offset(self, where: GroupPartition, place: Place) -> None:
        """The offset is the base, and there is none before the first pop."""
        known = self.broker.context.offsets.get(*where)
        is_new = known is None and self.broker.state(where) is None
        assert known == place.base or (is_new and place.next <= self.broker.first_of(where.partition)), (where, known, place)

    # -- messages -----------------------------------------------------------------------------------------------------

    @rule(partition=PARTITION, tags=st.lists(TAG, min_size=1, max_size=4))
    def put(self, partition: int, tags: list[str]) -> None:
        for tag in tags:
            self._put += 1
            body = b"message %d" % self._put
            if self.broker.put(TOPIC, partition, body, tag):
                self.known.messages[partition].append(Message(body, tag))

    # -- pops ---------------------------------------------------------------------------------------------------------

    @rule(
        group=GROUP,
        partition=st.none() | PARTITION,
        most=st.integers(1, 5),
        lease_ms=INVISIBLE_MS,
        tag=TAG,
        order=st.booleans(),
    )
    def pop(self, group: str, partition: int | None, most: int, lease_ms: int, tag: str, order: bool) -> None:
        request = self.broker.request(group, partition, most, lease_ms, tag, in_order=order)
        for _ in range(TRIES):
            plan = self.broker.plan(request)
            result = self._take(request, tag, plan)
            assert result is not None
            if result.given or not plan:
                break
        if result is not None and not result.given and not order and not self.is_full:
            self._check_nothing_is_ready(request, tag)

    @rule(group=GROUP, seconds=st.sampled_from((0, 1, 10)))
    def consume(self, group: str, seconds: float) -> None:
        """Pop what there is, after a while."""
        if seconds:
            self.advance(seconds)
        self.pop(group, None, 5, 1000, "", False)

    @rule(group=GROUP, partition=st.none() | PARTITION, most=st.integers(1, 5), tag=TAG, order=st.booleans())
    def plan(self, group: str, partition: int | None, most: int, tag: str, order: bool) -> None:
        """Plan a pop that waits for the disk: others go on before it is taken."""
        request = self.broker.request(group, partition, most, 10_000, tag, in_order=order)
        self.plans.append((request, tag, self.broker.plan(request)))

    @precondition(lambda self: self.plans)
    @rule()
    def take_late(self) -> None:
        request, tag, plan = self.plans.pop()
        if all(each.state is None or self.broker.state(each.place) is each.state for each in plan):
            self._take(request, tag, plan)

    def _take(self, request: PopRequest, tag: str, plan: Plan) -> PopResult | None:
        now_ms, group = self.now_ms, request.group.name
        result = self.broker.take(request, plan)
        for part in [] if result is None else result.given:
            where = GroupPartition(group, TOPIC, part.partition)
            place = self.known.places[where]
            if request.in_order:
                self._check_order(place, list(part.ordinals), now_ms)
            records = list(records_of(part.body))
            assert list(part.ordinals) == [record.queue_offset for record in records] == sorted(part.ordinals)
            for ordinal, times, record in zip(part.ordinals, part.times, records, strict=True):
                message = self.known.messages[part.partition][ordinal]
                assert (record.partition, bytes(record.body), record.reconsume_times) == (part.partition, message.body, times)
                assert result is not None
                self._give(place, ordinal, times, Given(result.pop_ms, now_ms + request.invisible_ms, times + 1, result.pop_ms))
                assert times or not tag or message.tag == tag
                receipt = Receipt(where, ordinal, result.pop_ms)
                assert receipt not in self.receipts
                self.receipts.append(receipt)
        for partition in range(PARTITIONS):
            self._pass(GroupPartition(group, TOPIC, partition), tag, now_ms)
        return result

    def _give(self, place: Place, ordinal: int, times: int, given: Given) -> None:
        assert ordinal not in place.done | place.dead | place.dying
        if ordinal < place.next:
            before = place.open[ordinal]
            assert before.due_ms <= self.now_ms and before.times == times < MOST_TIMES
            given.first_ms = before.first_ms
        else:
            assert times == 0
        place.open[ordinal] = given

    def _check_order(self, place: Place, ordinals: Sequence[int], now_ms: int) -> None:
        assert not place.leased(now_ms)
        waiting = [each for each in place.open if not self.known.is_poison(place.open[each])]
        assert list(ordinals) == sorted(waiting)[: len(ordinals)] if place.open else min(ordinals) >= place.next

    def _pass(self, where: GroupPartition, tag: str, now_ms: int) -> None:
        """Take over what a pop passed, and what it gave up."""
        state, place = self.broker.leases.get(where), self.known.places[where]
        if state is None:
            return
        for ordinal in range(place.next, state.next):
            if ordinal not in place.open:
                aged_out = ordinal < self.broker.first_of(where.partition)
                assert aged_out or (tag and self.known.messages[where.partition][ordinal].tag != tag), ordinal
                place.done.add(ordinal)
        place.next = state.next
        for ordinal in [each for each in place.open if state.find(each) is None]:
            assert ordinal < self.broker.first_of(where.partition)  # it was given from a plan that was older than its end
            place.finish(ordinal)
        for ordinal, given in place.open.items():
            if state.is_claimed(ordinal) and ordinal not in place.dying:
                assert self.known.is_poison(given) and given.due_ms <= now_ms
                place.dying.add(ordinal)

    def _check_nothing_is_ready(self, request: PopRequest, tag: str) -> None:
        for partition in range(PARTITIONS) if request.partitions is None else request.partitions:
            place = self.known.places[GroupPartition(request.group.name, TOPIC, partition)]
            assert len([each for each in place.open.values() if self.known.is_poison(each)]) > TRIES or not place.waiting(
                self.now_ms
            )
            first = max(place.next, self.broker.first_of(partition))
            assert not self.known.matching(partition, first, self.broker.end_of(partition), tag)

    # -- the ends of leases -------------------------------------------------------------------------------------------

    def _receipt(self, data: st.DataObject) -> tuple[Receipt, Place, Given | None]:
        """Draw one that was given, or one that is off by something; what it names, if it means anything."""
        receipt = data.draw(st.sampled_from(self.receipts[-20:]))
        off = data.draw(st.sampled_from((0, 0, 0, 0, 1, 2)))
        receipt = receipt._replace(pop_ms=receipt.pop_ms - (off == 1), ordinal=receipt.ordinal + 1000 * (off == 2))
        place = self.known.places[receipt.place]
        given = place.open.get(receipt.ordinal)
        return receipt, place, None if given is None or given.pop_ms != receipt.pop_ms else given

    @precondition(lambda self: self.receipts)
    @rule(data=st.data())
    def ack(self, data: st.DataObject) -> None:
        receipt, place, given = self._receipt(data)
        assert self.broker.leases.ack(receipt.place, receipt.pop_ms, receipt.ordinal, 1) == (given is not None)
        if given is not None:
            place.finish(receipt.ordinal)

    @precondition(lambda self: self.receipts)
    @rule(data=st.data(), bits=st.integers(1, 0xFFF))
    def ack_many(self, data: st.DataObject, bits: int) -> None:
        receipt, place, _ = self._receipt(data)
        first = data.draw(st.sampled_from((receipt.ordinal, 0, 1 << 62)))
        named = [first + index for index in range(bits.bit_length()) if bits >> index & 1]
        acked = [each for each in named if each in place.open and place.open[each].pop_ms == receipt.pop_ms]
        assert self.broker.leases.ack(receipt.place, receipt.pop_ms, first, bits) == len(acked)
        for ordinal in acked:
            place.finish(ordinal)

    @precondition(lambda self: self.receipts)
    @rule(data=st.data(), lease_ms=st.sampled_from((0, 500, 30_000)))
    def change(self, data: st.DataObject, lease_ms: int) -> None:
        """Nack, or extend."""
        receipt, place, given = self._receipt(data)
        leases, wall_ms = self.broker.leases, self.broker.clock.now_ms()
        due_ms = leases.due_ms(receipt.pop_ms, lease_ms, 12 * HOUR_MS)
        state = leases.change(receipt.place, receipt.ordinal, receipt.pop_ms, due_ms)
        is_leased = given is not None and given.due_ms > self.now_ms and receipt.ordinal not in place.dying
        assert (state is ReceiptState.LEASED) == is_leased
        if is_leased and given is not None:
            given.due_ms = self.now_ms + min(lease_ms, max(0, receipt.pop_ms + 12 * HOUR_MS - wall_ms))

    @precondition(lambda self: self.receipts)
    @rule(data=st.data())
    def reject(self, data: st.DataObject) -> None:
        receipt, place, given = self._receipt(data)
        state = self.broker.leases.receipt_state(receipt.place, receipt.ordinal, receipt.pop_ms)
        is_leased = given is not None and given.due_ms > self.now_ms and receipt.ordinal not in place.dying
        assert (state is ReceiptState.LEASED) == is_leased
        queue = self.broker.store.queues.get(TopicPartition(TOPIC, receipt.place.partition))
        if is_leased and queue is not None:
            stored = self.broker.store.reader.record(queue, receipt.ordinal, read_here)
            if stored is None:
                assert receipt.ordinal < self.broker.first_of(receipt.place.partition)
                return  # given from a plan that was older than its end
            record = bytes(stored.buffer[stored.at : stored.at + stored.size])
            self.broker.leasing.poison.give_up(receipt.place, receipt.ordinal, record, Reason.REJECTED)
            self._note_claim(receipt.place, receipt.ordinal)

    def _note_claim(self, where: GroupPartition, ordinal: int) -> None:
        state = self.broker.leases.get(where)
        assert state is not None and (self.is_full or state.is_claimed(ordinal))
        if state.is_claimed(ordinal):
            self.known.places[where].dying.add(ordinal)

    # -- the offset ---------------------------------------------------------------------------------------------------

    def _reset_offset(self, where: GroupPartition, offset: int) -> None:
        offset = min(offset, self.broker.end_of(where.partition))
        self.broker.context.offsets.reset(*where, offset)
        self.known.places[where].go_to(offset)
        self.broker.parts.clock.advance(SLACK_MS / 1000)  # the next delivery of a message has another pop_ms
        self._log_offsets()

    def _commit(self, where: GroupPartition, offset: int) -> None:
        """A member that pulls commits an offset."""
        offset = min(offset, self.broker.end_of(where.partition))
        place, before = self.known.places[where], self.broker.context.offsets.get(*where)
        self.broker.context.offsets.commit(*where, offset, self.broker.clock.monotonic())
        if before is None and self.broker.state(where) is None:
            place.next = offset
        elif offset > place.base:
            place.commit(offset)
        self._log_offsets()

    def _log_offsets(self) -> None:
        """Have offsets of groups without leases in the log, which otherwise takes half a second."""
        self.end_turn()
        if not self.is_full:
            self.broker.log_offsets()
            self._turn_ended()

    # -- time ---------------------------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from((0.001, 0.6, 1.0, 1.0, 10.0, 10.0, 700.0)))
    def advance(self, seconds: float) -> None:
        self.end_turn()
        self.broker.advance(seconds)
        self._turn_ended()

    # -- what is rare -------------------------------------------------------------------------------------------------

    @rule(what=st.sampled_from(RARE), data=st.data())
    def rarely(self, what: str, data: st.DataObject) -> None:
        """Do one of the things that a day has few of."""
        match what:
            case "delete topic" if not self.is_full:
                self._delete_topic()
            case "retire" if not self.is_full:
                self._retire()
            case "reset offset" | "commit":
                where, offset = data.draw(PLACE), data.draw(OFFSET)
                if self.is_full and self.broker.state(where) is None:
                    return  # only the log of offsets would have it, which is full
                self._commit(where, offset) if what == "commit" else self._reset_offset(where, offset)
            case "set clock":
                self.broker.clock.jump(data.draw(st.sampled_from((-HOUR_MS, -1000, 1000, HOUR_MS))))
            case "snapshot":
                self._snapshot()
            case "tend":
                self._tend()
            case "disk":
                self._fill_or_free_disk()
            case _:
                self._close_or_kill(kill=data.draw(st.booleans()))

    def _tend(self) -> None:
        self.end_turn()
        self.broker.tend()
        self._turn_ended()
        assert self.is_full or not self.unkept

    def _snapshot(self) -> None:
        self.end_turn()
        self.broker.keeper._take_snapshot()
        self._turn_ended()

    def _delete_topic(self) -> None:
        self.end_turn()
        self.broker.delete_topic()
        for where, place in self.known.places.items():
            ends = len(self.known.messages[where.partition])
            place.go_to(ends)
            place.done |= set(range(ends))
        self.plans.clear()
        self._turn_ended()

    def _retire(self) -> None:
        """F-15: segments with open messages are deleted."""
        self.end_turn()
        gone = [
            (where, ordinal)
            for where, place in self.known.places.items()
            for ordinal in place.open
            if ordinal < self.broker.first_of(where.partition)
        ]
        self.broker.retire()
        for where, ordinal in gone:
            state = self.broker.state(where)
            if state is None or state.find(ordinal) is None:
                self.known.places[where].finish(ordinal)  # given from a plan that was older than its end: no dead letter has it
        self._turn_ended()

    # -- the disk, and the end of the process -------------------------------------------------------------------------

    def _fill_or_free_disk(self) -> None:
        """F-11: nothing more can be stored; pops and acks go on."""
        self.end_turn()
        if self.is_full:
            self.broker.free_disk()
        else:
            self.broker.disk.fill()
        self.is_full = not self.is_full

    def _close_or_kill(self, *, kill: bool) -> None:
        """F-9, F-11: end in order, or by kill -9 in the middle of a turn, also while there is no room."""
        if kill or self.is_full:
            self.broker, self.known, self.is_full = self.broker.killed(), self.saved, False
            del self.receipts[self.answered :]
            self.broker.clock.advance(0.001)  # no broker starts in no time: what is given again has another ``pop_ms``
        else:
            self.end_turn()
            self.broker = self.broker.closed()
        self._opened()

    def _opened(self) -> None:
        self.plans.clear()
        # while the clock is set back, a delivery gets the name of one that was not stored
        self.receipts = [each for each in self.receipts if each.place not in self.unkept]
        for where, place in self.known.places.items():
            state = self.broker.state(where)
            if where in self.unkept:
                place.take_over(state, self.broker.context.offsets.get(*where) or 0)
            if state is None:
                assert not place.open
                self._check_offset(where, place)
                continue
            for ordinal, given in place.open.items():
                bunch = state.find(ordinal)
                assert bunch is not None, (where, ordinal)
                given.due_ms = bunch.due_ms
        self._turn_ended()

    # -- always -------------------------------------------------------------------------------------------------------

    @invariant()
    def the_state_is_that_of_the_dictionary(self) -> None:
        total = 0
        for where, place in self.known.places.items():
            state = self.broker.state(where)
            if state is None:
                assert not place.open
                continue
            found = {ordinal: state.find(ordinal) for ordinal in state.ordinals()}
            shown = {ordinal: Given(b.pop_ms, b.due_ms, b.times, b.first_ms) for ordinal, b in found.items() if b is not None}
            waiting = place.waiting(self.now_ms)
            assert state.first_waiting(1000) == waiting
            for ordinal in (*waiting, *place.dying & place.open.keys()):  # when its lease ended does not matter any more
                shown[ordinal].due_ms = place.open[ordinal].due_ms
            assert shown == place.open, (where, shown, place.open)
            assert (state.next, state.base) == (place.next, place.base)
            total += state.open
        assert self.broker.leases.open == total

    def teardown(self) -> None:
        """Consume all that is left: each message is done or dead then, and no lease is forgotten."""
        if self.is_full:
            self._fill_or_free_disk()
        self._tend()
        self.advance(SET_S)
        for _ in range(MOST_TIMES + 2):
            self.advance(700.0)
            for group in GROUPS:
                while True:
                    before = len(self.receipts)
                    self.pop(group, None, 5, 1000, "", False)
                    if len(self.receipts) == before:
                        break
                    for receipt in self.receipts[before:]:
                        assert self.broker.leases.ack(receipt.place, receipt.pop_ms, receipt.ordinal, 1)
                        self.known.places[receipt.place].finish(receipt.ordinal)
            self.end_turn()
        for where, place in self.known.places.items():
            assert not place.open
            end = len(self.known.messages[where.partition])
            assert max(place.next, self.broker.first_of(where.partition)) == end


@pytest.mark.timeout(1200)  # seconds pass where it holds; a failure is made smaller for up to five minutes
def test_anything_may_happen_to_leases() -> None:
    """E-08, F-9, F-11, F-15, F-17: each message is given until it is done or dead, to one at a time, whatever happens."""
    run_state_machine_as_test(LeaseMachine, settings=settings(max_examples=60, stateful_step_count=50))

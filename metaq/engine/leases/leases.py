"""The leases of one broker: the states of all groups in all partitions from which they lease messages.

A state is there from the first pop on. It is left, which is an event, when nothing was open for a while: the group's offset
is then all there is to know. Whatever changes a state goes through ``record``: the event is applied at once, and is in the log
at the end of the turn. So a group's offset follows from the events wherever there is a state.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Final

from metaq.engine.context import Context
from metaq.engine.leases.counting import LeaseCounts
from metaq.engine.leases.leaselog import LeaseLog
from metaq.engine.tables.groups import SAFE_ACKS, Group
from metaq.engine.tables.modes import Mode
from metaq.engine.turn import NOT_STORED, TOO_FEW_REPLICAS, PutOutcome, Short, Turns
from metaq.errors import DiskFull, Fenced, MetaqError, Overloaded, StoreError
from metaq.leases.events import Acked, Changed, Dead, Forgotten, LeaseEvent, Reset
from metaq.leases.gaps import events_after_gap
from metaq.leases.state import PartitionLeases, ReceiptState
from metaq.message import GroupPartition, QueueOffset, TopicPartition
from metaq.store.files.disk import MAKE_ROOM
from metaq.store.files.filecache import Read

logger = logging.getLogger(__name__)

MOST_OPEN: Final = 1_000_000
"""Open messages of the whole broker: as many are held in memory, some 200 to 350 bytes for each pop."""
MOST_BITS: Final = 1024
"""Messages for which one ack has bits: they may be far apart."""
KEPT_S: Final = 600.0
"""How long a state stays in memory in which nothing is open."""

GRANT_RETRY_MS: Final = 1000
"""When to try again to lease messages, after the replicas did not have a lease in time."""

Touched = Callable[[str, str], None]
Granted = Callable[[MetaqError | None], None]
"""Receives ``None`` when consumers may get the messages that they were leased, or why they may not."""


class Leases:
    """The states, and their log."""

    def __init__(self, context: Context, turns: Turns) -> None:
        """Learn the states from the log."""
        self.context = context
        self.turns = turns
        self._clock = context.store.clock
        self._states: dict[tuple[str, str], dict[int, PartitionLeases]] = {}
        self._used_s: dict[PartitionLeases, float] = {}
        self.open = 0
        """Open messages, of all groups."""
        self.log = LeaseLog(context, turns, self._whole)
        self.counts = LeaseCounts()
        self._touched: dict[GroupPartition, PartitionLeases] = {}  # in this turn
        self.touched: Touched = _nobody
        """Called after a turn with each group and topic whose state has changed."""
        self._open_states()
        context.offsets.owner = self

    def _open_states(self) -> None:
        has_gap, now_ms = False, self._clock.now_ms()
        for placed in self.log.read():
            if placed is None:
                has_gap = True
                continue
            place, event = placed
            if has_gap and self.get(place) is None:
                self._apply(place, [Reset(self.context.offsets.get(*place) or 0)])
            state = self.get(place)
            self._apply(place, events_after_gap(state, event, now_ms) if has_gap and state is not None else [event])
        self._touched.clear()
        is_master = self.context.replicas.is_master
        for place, state in list(self._all()):
            topic, queue = self.context.topics.get(place.topic), self.context.store.queues.get(TopicPartition(*place[1:]))
            end = 0 if queue is None else queue.next
            events = [Forgotten()] if topic is None else state.cut(end, self.shift_ms)
            if events and is_master:
                self.record(place, *events)
            elif events:
                self._apply(place, events)
            if topic is not None and is_master and self.context.offsets.get(*place) != state.base:
                self.context.offsets.reset(*place, state.base)
        self.counts = LeaseCounts()  # without what is in the log

    # -- asking -------------------------------------------------------------------------------------------------------

    def get(self, place: GroupPartition) -> PartitionLeases | None:
        """Return the state of a place; ``None`` when nothing is open there and nothing was popped for a while."""
        return self._states.get((place.group, place.topic), {}).get(place.partition)

    def of(self, group: str, topic: str) -> dict[int, PartitionLeases]:
        """Return the states of a group in a topic, by partition."""
        return self._states.get((group, topic), {})

    def pairs(self) -> list[tuple[str, str]]:
        """Return the groups and topics that have states."""
        return list(self._states)

    def _all(self) -> Iterator[tuple[GroupPartition, PartitionLeases]]:
        for (group, topic), states in self._states.items():
            for partition, state in states.items():
                yield GroupPartition(group, topic, partition), state

    def settled(self, place: GroupPartition) -> PartitionLeases | None:
        """Return the state of a place as it is now: the leases that have ended are over."""
        state = self.get(place)
        if state is not None:
            state.settle(self._now_ms)
        return state

    def settle(self, group: str, topic: str) -> None:
        """Let the messages of a group in a topic wait whose leases have ended, in all partitions."""
        now_ms = self._now_ms
        for state in self.of(group, topic).values():
            state.settle(now_ms)

    def receipt_state(self, place: GroupPartition, ordinal: int, pop_ms: int) -> ReceiptState:
        """Return what has become of a delivery."""
        state = self.settled(place)
        if state is not None:
            return state.receipt_state(ordinal, pop_ms)
        offset = self.context.offsets.get(*place)
        return ReceiptState.DONE if offset is not None and 0 <= ordinal < offset else ReceiptState.UNKNOWN

    @property
    def _now_ms(self) -> int:
        return int(self._clock.monotonic() * 1000)

    @property
    def shift_ms(self) -> int:
        """The milliseconds to add to the times of states to get Unix time."""
        return self._clock.now_ms() - self._now_ms

    def message(self, place: GroupPartition, ordinal: int, read: Read) -> bytes | None:
        """Return the record of a message of a place; ``None`` when it is lost.

        Raise ``ColdRead`` as ``read`` does, and ``Overloaded`` while a new master does not know that replicas have it.
        """
        queue = self.context.store.queues.get(TopicPartition(place.topic, place.partition))
        if queue is None or not 0 <= ordinal < queue.next:
            return None
        if ordinal >= queue.readable:
            reason = f"message {ordinal} of {place.topic}-{place.partition} is not known to be on enough replicas; try again"
            raise Overloaded(reason, retry_after_ms=GRANT_RETRY_MS)
        stored = self.context.store.reader.record(queue, ordinal, read)
        return None if stored is None else bytes(stored.buffer[stored.at : stored.at + stored.size])

    # -- changing -----------------------------------------------------------------------------------------------------

    def record(self, place: GroupPartition, *events: LeaseEvent) -> None:
        """Apply events of a place now, and have them in the log at the end of this turn."""
        self._apply(place, events)
        self.log.note(place, events)

    def grant(self, group: Group, granted: Granted) -> None:
        """Have ``granted`` called when consumers of a group may get what was leased to them in this turn.

        Its leases are in the log then, or in memory where the disk has no room for them. In a group with safe acks, at a level
        that rests on replicas, those in sync have them: the next master will not give these messages again before the leases
        end. If that cannot be, nobody gets them before the leases end.
        """
        if self._wants_copies(group):
            self._stage(_Grant(granted), partial(self._keeps_group, group.name))
        else:
            self.turns.with_answers(partial(_granted, granted))

    def check_grants(self, group: Group) -> None:
        """Raise ``Overloaded`` while leases of a group could not be granted, because too few replicas are in sync."""
        copies = self.turns.copies
        if copies is not None and self._wants_copies(group) and not copies.hopeful:
            raise _not_granted(TOO_FEW_REPLICAS)

    def _wants_copies(self, group: Group) -> bool:
        return group.lease_acks == SAFE_ACKS and self.turns.copies is not None

    def _keeps_group(self, group: str) -> bool:
        """Return whether the log has all that a group has leased."""
        return all(place.group != group for place in self.log.unkept)

    def staged(self, outcome: PutOutcome, places: Collection[GroupPartition]) -> None:
        """Take the outcome of changes of places in this turn; it is refused when the log has no room for one of them."""
        self._stage(outcome, partial(self.log.keeps, places))

    def _stage(self, outcome: PutOutcome, is_kept: Callable[[], bool]) -> None:
        logged = _Logged(outcome, is_kept)
        self.turns.after_append(logged.appended)
        self.turns.staged(logged)

    def begin(self, place: GroupPartition, offset: int) -> PartitionLeases:
        """Return a new state of a place, in which everything before ``offset`` is done."""
        self.record(place, Reset(offset))
        return self._states[place.group, place.topic][place.partition]

    def ack(self, place: GroupPartition, pop_ms: int, first: int, bits: int) -> int:
        """Finish messages of one delivery: those of the bits, counted from ``first`` on; return how many were open in it."""
        state = self.get(place)
        if state is None:
            self.counts.meaningless += bits.bit_count()
            return 0
        before = state.open
        event: Acked = tuple.__new__(Acked, (pop_ms, first, bits))  # at a third of the cost of its own constructor
        self._apply(place, [event])
        done = before - state.open
        self.counts.meaningless += bits.bit_count() - done
        if done:
            self.log.note(place, [event])
        return done

    def ack_all(self, place: GroupPartition, pop_ms: int, ordinals: Iterable[int]) -> int:
        """Finish messages of one delivery; return how many were open in it."""
        done = first = bits = 0
        for ordinal in sorted(ordinals):
            if bits and ordinal - first >= MOST_BITS:
                done += self.ack(place, pop_ms, first, bits)
                bits = 0
            if not bits:
                first = ordinal
            bits |= 1 << (ordinal - first)
        return done + (self.ack(place, pop_ms, first, bits) if bits else 0)

    def due_ms(self, pop_ms: int, invisible_ms: int, most_ms: int) -> int:
        """Return when a delivered message becomes visible that stays invisible for a time from now on (Unix time).

        That is at most ``most_ms`` after the delivery. A clock that was set back to before the delivery counts from there.
        """
        now_ms = max(self._clock.now_ms(), pop_ms)
        return min(now_ms + invisible_ms, max(now_ms, pop_ms + most_ms))

    def change(
        self, place: GroupPartition, ordinal: int, pop_ms: int, due_ms: int, *, given_back: bool = False
    ) -> ReceiptState:
        """Let a lease that goes on end at ``due_ms`` (Unix time, from the method of this name); return its state before.

        ``given_back``: nobody has the message until then, it is delayed.
        """
        found = self.receipt_state(place, ordinal, pop_ms)
        if found is ReceiptState.LEASED:
            self.record(place, Changed(pop_ms, ordinal, due_ms, given_back))
        else:
            self.counts.meaningless += 1
        return found

    def change_all(self, place: GroupPartition, changes: Sequence[Changed]) -> list[Changed]:
        """Let leases end at other times, as ``change`` does; return the changes of those that go on."""
        state = self.settled(place)
        made: list[Changed] = []
        if state is not None:
            made += [each for each in changes if state.receipt_state(each.ordinal, each.pop_ms) is ReceiptState.LEASED]
        self.counts.meaningless += len(changes) - len(made)
        if made:
            self.record(place, *made)
        return made

    def died(self, place: GroupPartition, ordinal: int) -> None:
        """Take over that a message is among the dead letters now: the event is in the log."""
        self._apply(place, [Dead(ordinal)])

    def _apply(self, place: GroupPartition, events: Sequence[LeaseEvent]) -> None:
        states = self._states.setdefault((place.group, place.topic), {})
        state = states.get(place.partition)
        if state is None:
            state = states[place.partition] = PartitionLeases(0)
        before, now_s = state.open, self._clock.monotonic()
        now_ms = int(now_s * 1000)
        shift_ms = self._clock.now_ms() - now_ms
        for event in events:
            opened = state.open
            state.apply(event, now_ms, shift_ms)
            self.counts.take(place, event, state, opened - state.open)
            if isinstance(event, Forgotten):
                self.open -= before
                self._drop(place)
                return
        self.open += state.open - before
        self._used_s[state] = now_s
        if not self._touched:
            self.turns.before_append(self._end_turn)
        self._touched[place] = state

    def _end_turn(self) -> None:
        """Commit the offsets of what has changed, and tell whoever waits for leases."""
        touched, self._touched = self._touched, {}
        pairs: dict[tuple[str, str], None] = {}
        for place, state in touched.items():
            if self.get(place) is state:
                self._commit(place, state.base)
            pairs[place.group, place.topic] = None
        self.turns.with_answers(partial(self._tell, pairs))

    def _tell(self, pairs: Iterable[tuple[str, str]], failure: StoreError | None) -> None:
        for group, topic in pairs:
            self.touched(group, topic)

    def _commit(self, place: GroupPartition, base: int) -> None:
        if self.context.topics.get(place.topic) is not None:
            self.context.offsets.lead(*place, base)

    def _drop(self, place: GroupPartition) -> None:
        states = self._states[place.group, place.topic]
        state = states.pop(place.partition)
        self.open -= state.open
        self._used_s.pop(state, None)
        if not states:
            del self._states[place.group, place.topic]

    # -- the offsets of groups ----------------------------------------------------------------------------------------

    def given(self, place: GroupPartition) -> QueueOffset | None:
        """Return the offset of the first message that was never given; ``None`` for a place without a state."""
        state = self.get(place)
        return None if state is None else QueueOffset(state.next)

    def commits(self, place: GroupPartition, offset: int) -> bool:
        """Take a consumer's own commit of an offset into account; return whether it counts.

        In a group whose mode is POP it does not. Otherwise its sender has pulled and finished all before the offset.
        """
        state = self.get(place)
        if state is None:
            return True
        if self.context.modes.get(place.topic, place.group).mode is Mode.POP:
            return False
        used_s = self._used_s[state]
        if offset >= state.next:
            self.record(place, Reset(offset))
        else:
            self.record(place, *state.finishing_before(offset))
        self._used_s[state] = used_s  # it is left when nobody has leased for a while, however often somebody commits
        return True

    def reset(self, place: GroupPartition, offset: int) -> None:
        """Take over an offset that an administrator has set: nothing is open any more."""
        if self.get(place) is not None:
            self.record(place, Reset(offset))
        else:  # the log may have a state that was left
            self.log.note(place, [Forgotten()])
            self.turns.with_answers(partial(self._tell, [(place.group, place.topic)]))

    def forget(self, group: str, topic: str) -> None:
        """Forget the leases of a group in a topic, because its offsets are gone."""
        self.counts.forget(group, topic)
        for partition in list(self.of(group, topic)):
            self.record(GroupPartition(group, topic, partition), Forgotten())

    # -- keeping ------------------------------------------------------------------------------------------------------

    def tell(self, place: GroupPartition) -> bool:
        """Record the whole state of a place; return whether the log has room for it."""
        return self.log.tell(place)

    def _whole(self, place: GroupPartition) -> Iterable[LeaseEvent]:
        state = self.get(place)
        return [Forgotten()] if state is None else state.events(self.shift_ms)

    @property
    def unkept(self) -> int:
        """The number of places whose events could not be stored yet."""
        return len(self.log.unkept)

    @property
    def count(self) -> int:
        """The number of places that have a state."""
        return len(self._used_s)

    def places(self) -> list[GroupPartition]:
        """Return all places that have a state."""
        return [place for place, _ in self._all()]

    def leave_unused(self) -> None:
        """Leave states in which nothing is open and that nobody has used for a while."""
        since_s = self._clock.monotonic() - KEPT_S
        for place, state in list(self._all()):
            if not state.open and self._used_s.get(state, 0.0) < since_s:
                self.record(place, Forgotten())


class _Logged:
    """The outcome of changes that must be in the log: without room for them a turn succeeds, and has them in memory only."""

    __slots__ = ("_is_kept", "_outcome", "_refusal", "size")

    def __init__(self, outcome: PutOutcome, is_kept: Callable[[], bool]) -> None:
        """Begin; ``is_kept`` says at the end of the turn whether the log has the changes."""
        self._outcome = outcome
        self._is_kept = is_kept
        self._refusal: DiskFull | None = None
        self.size = 0

    def appended(self, failure: StoreError | None) -> None:
        """Learn what the log has, before later turns change it."""
        if not self._is_kept():
            self._refusal = DiskFull(f"the disk has no room for the leases of the group; {MAKE_ROOM}")

    def stored(self) -> None:
        if self._refusal is None:
            self._outcome.stored()
        else:
            self._outcome.refused(self._refusal, NOT_STORED)

    def refused(self, error: MetaqError, outcome: str) -> None:
        self._outcome.refused(error, outcome)

    def late(self, short: Short) -> None:
        if self._refusal is None:
            self._outcome.late(short)
        else:
            self._outcome.refused(self._refusal, NOT_STORED)


class _Grant:
    """The outcome of a turn in which messages were leased that consumers get once replicas have the leases."""

    __slots__ = ("_granted", "size")

    def __init__(self, granted: Granted) -> None:
        self._granted = granted
        self.size = 0

    def stored(self) -> None:
        self._granted(None)

    def refused(self, error: MetaqError, outcome: str) -> None:
        self._granted(error)

    def late(self, short: Short) -> None:
        self._granted(_not_granted(short))


def _granted(granted: Granted, error: StoreError | None) -> None:
    """Grant what was appended. Without room on the disk it is kept in memory, but a master that was replaced gives nothing."""
    granted(error if isinstance(error, Fenced) else None)


def _not_granted(short: Short) -> Overloaded:
    return Overloaded(f"the leases are not {short.lacks}; the group has lease_acks={SAFE_ACKS}", retry_after_ms=GRANT_RETRY_MS)


def _nobody(group: str, topic: str) -> None:
    """Ignore a change: nobody waits for leases."""

"""What must not happen to leases when the disk is full, the clock is set, or two things come in one turn: one case each."""

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Final

import gevent
import pytest

from metaq.engine.leases.draining import Drain
from metaq.engine.leases.poison import Reason
from metaq.engine.reading import young
from metaq.engine.tables.offsets import RESET_STANDS_S
from metaq.engine.writing import internal_mark, note, stage
from metaq.leases.state import ReceiptState
from metaq.message import GroupPartition, TopicPartition
from metaq.protocol.properties import MOST_BYTES
from metaq.store.files.disk import File
from metaq.store.files.filecache import read_here, run_here
from tests.engine.leases.leased import FILLER, FILLER_BYTES, GROUPS, MOST_TIMES, TOPIC, LeasedBroker

GROUP: Final = GROUPS[0]
PLACE: Final = GroupPartition(GROUP, TOPIC, 0)
QUEUE: Final = TopicPartition(TOPIC, 0)
LEASE_MS: Final = 10_000
HOUR_MS: Final = 3_600_000
LITTLE: Final = 200
"""Bytes in which no record of leases has room, but the end of a segment."""


@pytest.fixture
def broker() -> LeasedBroker:
    return LeasedBroker()


def put(broker: LeasedBroker, count: int) -> None:
    for number in range(count):
        assert broker.put(TOPIC, 0, b"%d" % number)
    broker.end_turn()


def pop(broker: LeasedBroker, most: int = 32, *, order: bool = False) -> tuple[Sequence[int], int]:
    """Pop from the first partition; return the ordinals, and the time that names the delivery."""
    request = broker.request(GROUP, 0, most, LEASE_MS, in_order=order)
    result = broker.take(request, broker.plan(request))
    assert result is not None
    return (list(result.given[0].ordinals) if result.given else []), result.pop_ms


def record(broker: LeasedBroker, ordinal: int) -> bytes:
    stored = broker.store.reader.record(broker.store.queues[QUEUE], ordinal, read_here)
    assert stored is not None
    return bytes(stored.buffer[stored.at : stored.at + stored.size])


def reject(broker: LeasedBroker, ordinal: int) -> None:
    broker.leasing.poison.give_up(PLACE, ordinal, record(broker, ordinal), Reason.REJECTED)


def open_in(broker: LeasedBroker) -> list[int]:
    state = broker.state(PLACE)
    return [] if state is None else state.ordinals()


def dead(broker: LeasedBroker) -> list[bytes]:
    return [letter.body for letter in broker.dead_letters(GROUP)]


def noted(steps: list[str], name: str, call: Callable[[], None]) -> None:
    steps.append(name)
    call()


def offset(broker: LeasedBroker) -> int | None:
    return broker.context.offsets.get(*PLACE)


# -- a full disk ------------------------------------------------------------------------------------------------------


def test_what_was_given_without_room_is_not_done_after_a_kill(broker: LeasedBroker) -> None:
    """E-08, F-11: what follows in the log says nothing about it, so the whole state is there first."""
    put(broker, 3)
    broker.disk.fill()
    assert pop(broker, 2)[0] == [0, 1]
    broker.end_turn()
    broker.free_disk()
    assert pop(broker, 1)[0] == [2]
    broker.end_turn()
    assert open_in(broker.killed()) == [0, 1, 2]


def test_the_secret_outlives_a_full_disk_at_the_first_pop(broker: LeasedBroker) -> None:
    """E-08, F-11: consumers have receipts that are signed with it, and the record that had it was not stored."""
    put(broker, 1)
    log, secret = broker.store.log, broker.leases.log.secret
    while (room := log.room_end - log.staged_end) > LITTLE:
        broker.put(FILLER, 0, bytes(max(0, min(FILLER_BYTES, room - LITTLE))))
        broker.end_turn()
    broker.disk.fill()
    assert pop(broker)[0] == [0]
    broker.end_turn()
    assert broker.leases.log.unkept == [PLACE]
    broker.free_disk()
    log.prepare(run_here, run_here)
    broker.tend()
    assert broker.killed().leases.log.secret == secret


def test_what_died_after_a_full_disk_is_dead_after_a_kill(broker: LeasedBroker) -> None:
    """E-08, F-11: the event of its death means something only after the pops that were not stored."""
    put(broker, 2)
    broker.disk.fill()
    pop(broker)
    broker.end_turn()
    broker.free_disk()
    reject(broker, 0)
    broker.end_turn()
    broker = broker.killed()
    assert (open_in(broker), dead(broker)) == ([1], [b"0"])


def test_a_snapshot_without_room_is_worth_nothing(broker: LeasedBroker) -> None:
    """E-08, F-11: an opening reads what was there before it."""
    put(broker, 1)
    pop(broker)
    broker.end_turn()
    broker.disk.fill()
    broker.keeper._take_snapshot()
    broker.end_turn()
    assert broker.leases.log.since == 0
    broker.free_disk()
    broker.tend()
    assert open_in(broker.killed()) == [0]


# -- snapshots and retention ------------------------------------------------------------------------------------------


def test_a_snapshot_of_nothing_keeps_the_secret(broker: LeasedBroker) -> None:
    """E-08, F-15: nothing is open, and the segment of the record that had the secret is deleted."""
    put(broker, 1)
    _, pop_ms = pop(broker)
    secret = broker.leases.log.secret
    broker.leases.ack(PLACE, pop_ms, 0, 1)
    broker.end_turn()
    broker.advance(700)
    broker.tend()
    assert broker.leases.places() == []
    broker.retire()
    assert broker.store.log.begin > 0
    assert broker.killed().leases.log.secret == secret


def test_one_snapshot_follows_the_other(broker: LeasedBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    """E-08: two at once, of two duties, would leave out what the first one has told before the second began."""
    put(broker, 1)
    pop(broker)
    broker.end_turn()
    log, steps = broker.leases.log, list[str]()
    noting = {name: partial(noted, steps, name, getattr(log, name)) for name in ("begin_snapshot", "end_snapshot")}
    leases = SimpleNamespace(log=SimpleNamespace(**noting), places=broker.leases.places, tell=broker.leases.tell)
    monkeypatch.setattr(broker.keeper, "_leases", leases)
    monkeypatch.setattr(broker.keeper, "_rest", broker.end_turn)  # which lets other greenlets run
    gevent.joinall([gevent.spawn(broker.keeper._take_snapshot) for _ in range(2)], raise_error=True)
    assert steps == ["begin_snapshot", "end_snapshot"] * 2


def test_what_is_open_is_a_dead_letter_before_its_segment_goes(broker: LeasedBroker) -> None:
    """E-08, F-15: and the dead letter, and what nobody was given yet, have no second life."""
    put(broker, 3)
    pop(broker, 2)
    broker.end_turn()
    broker.retire()
    assert [(letter.body, letter.reason) for letter in broker.dead_letters(GROUP)] == [(b"0", "aged out"), (b"1", "aged out")]
    assert (open_in(broker), broker.first_of(0)) == ([], 3)
    assert pop(broker)[0] == []
    assert not broker.leasing.pops.is_ready(GROUP, TOPIC, (0,))
    broker.end_turn()
    assert open_in(broker.killed()) == []


# -- the same turn ----------------------------------------------------------------------------------------------------


def test_two_rejections_in_one_turn_make_one_dead_letter(broker: LeasedBroker) -> None:
    """E-08: the second one comes too late."""
    put(broker, 1)
    _, pop_ms = pop(broker)
    reject(broker, 0)
    assert broker.leases.receipt_state(PLACE, 0, pop_ms) is ReceiptState.DONE
    reject(broker, 0)
    broker.end_turn()
    assert dead(broker) == [b"0"]


def test_two_plans_give_a_message_up_once(broker: LeasedBroker) -> None:
    """E-08: the second one was made while the disk was read, and is not taken."""
    put(broker, 1)
    for _ in range(MOST_TIMES):
        assert pop(broker)[0] == [0]
        broker.advance(LEASE_MS / 1000)
    request = broker.request(GROUP, 0, 32, LEASE_MS)
    plans = [broker.plan(request), broker.plan(request)]
    assert broker.take(request, plans[0]) is not None
    assert broker.take(request, plans[1]) is None
    broker.end_turn()
    assert dead(broker) == [b"0"]


def test_a_reset_after_a_rejection_gives_the_message_again(broker: LeasedBroker) -> None:
    """E-08: it is a dead letter, and open; both here and after a kill."""
    put(broker, 1)
    pop(broker)
    reject(broker, 0)
    broker.context.offsets.reset(*PLACE, 0)
    assert pop(broker)[0] == [0]
    broker.end_turn()
    assert (open_in(broker), dead(broker)) == ([0], [b"0"])
    assert open_in(broker.killed()) == [0]


def test_a_message_that_is_finished_during_a_plan_is_no_failure(broker: LeasedBroker) -> None:
    """E-08: the plan waits for the disk, an ack comes, and the plan is not taken."""
    put(broker, 2)
    _, pop_ms = pop(broker)
    broker.end_turn()
    broker.put(FILLER, 0, bytes(FILLER_BYTES))  # what is before it is not hot any more
    broker.advance(LEASE_MS / 1000)
    request = broker.request(GROUP, 0, 32, LEASE_MS)

    def slow(file: File, size: int, offset: int) -> bytes:
        broker.leases.ack(PLACE, pop_ms, 0, 0b11)
        return read_here(file, size, offset)

    plan = broker.leasing.pops.plan(request, slow)
    assert open_in(broker) == []
    assert broker.take(request, plan) is None


# -- dead letters -----------------------------------------------------------------------------------------------------


def with_poison(broker: LeasedBroker) -> None:
    """Have two messages wait, of which the first one was delivered as often as allowed."""
    put(broker, 2)
    assert pop(broker, 1)[0] == [0]
    broker.advance(LEASE_MS / 1000)
    assert pop(broker, 2)[0] == [0, 1]
    broker.advance(LEASE_MS / 1000)


def test_a_message_that_cannot_die_stops_no_other(broker: LeasedBroker) -> None:
    """E-08: not even for a consumer that takes one at a time. It dies when there is room for its topic."""
    with_poison(broker)
    broker.context.topics.max_topics = 1
    assert pop(broker, 1)[0] == [1]
    broker.end_turn()
    assert open_in(broker) == [0, 1]
    broker.context.topics.max_topics = 100
    assert pop(broker, 1)[0] == []
    broker.end_turn()
    assert (open_in(broker), dead(broker)) == ([1], [b"0"])


def test_in_order_nothing_comes_after_a_message_that_cannot_die(broker: LeasedBroker) -> None:
    """E-08, L-10: the next one is given once it is on its way."""
    with_poison(broker)
    broker.context.topics.max_topics = 1
    assert pop(broker, 2, order=True)[0] == []
    broker.context.topics.max_topics = 100
    assert pop(broker, 2, order=True)[0] == [1]
    broker.end_turn()
    assert (open_in(broker), dead(broker)) == ([1], [b"0"])


@pytest.mark.parametrize("order", [False, True])
def test_messages_that_die_together_are_no_more_bytes_than_are_asked_for(broker: LeasedBroker, order: bool) -> None:
    """But at least one; the next one stops others in order only."""
    put(broker, 3)
    assert pop(broker, 2)[0] == [0, 1]
    broker.advance(LEASE_MS / 1000)
    assert pop(broker, 3)[0] == [0, 1, 2]
    broker.advance(LEASE_MS / 1000)
    request = broker.request(GROUP, 0, 1, LEASE_MS, in_order=order)._replace(most_bytes=2 * len(record(broker, 0)) - 1)
    for given, left, letters in (([], [1, 2], [b"0"]), ([2], [2], [b"0", b"1"])) if order else (([2], [1, 2], [b"0"]),):
        result = broker.take(request, broker.plan(request))
        assert result is not None
        assert [ordinal for part in result.given for ordinal in part.ordinals] == given
        broker.end_turn()
        assert (open_in(broker), dead(broker)) == (left, letters)


# -- order, begin and clocks ------------------------------------------------------------------------------------------


def test_in_order_nothing_new_comes_while_something_waits(broker: LeasedBroker) -> None:
    """E-08, L-10: messages that were given back come before the next ones, however many are wanted."""
    put(broker, 8)
    assert pop(broker, 4, order=True)[0] == [0, 1, 2, 3]
    broker.advance(LEASE_MS / 1000)
    assert pop(broker, 8, order=True)[0] == [0, 1, 2, 3]
    broker.advance(LEASE_MS / 1000)
    assert pop(broker, 8, order=True)[0] == []  # they are on their way to the dead letters
    broker.end_turn()
    assert pop(broker, 8, order=True)[0] == [4, 5, 6, 7]


def test_a_group_that_begins_at_the_end_gets_what_comes(broker: LeasedBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    """E-08: its first pop finds nothing, and says where the next one begins."""
    monkeypatch.setattr(young, "_YOUNG_BYTES", -1)
    put(broker, 2)
    request = broker.request(GROUP, 0, 32, LEASE_MS)._replace(from_first=False)
    broker.take(request, broker.plan(request))
    broker.end_turn()
    put(broker, 1)
    assert pop(broker)[0] == [2]


def test_a_lease_is_extended_although_the_clock_was_set_back(broker: LeasedBroker) -> None:
    """E-08, F-6: the clock is now before the delivery."""
    put(broker, 1)
    _, pop_ms = pop(broker)
    broker.clock.jump(-HOUR_MS)
    due_ms = broker.leases.due_ms(pop_ms, 30_000, HOUR_MS)
    assert broker.leases.change(PLACE, 0, pop_ms, due_ms) is ReceiptState.LEASED
    broker.advance(29)
    assert pop(broker)[0] == []
    broker.advance(1)
    assert pop(broker)[0] == [0]


def test_bits_that_are_far_away_finish_nothing(broker: LeasedBroker) -> None:
    """E-08, F-21: an ack may name any offset, with bits for many messages."""
    put(broker, 3)
    _, pop_ms = pop(broker)
    assert broker.leases.ack(PLACE, pop_ms, 1 << 62, (1 << 40) - 1) == 0
    assert broker.leases.ack(PLACE, pop_ms, 1, (1 << 4000) - 1) == 2
    assert open_in(broker) == [0]


def put_full(broker: LeasedBroker) -> None:
    """Put a message whose properties have no room for more."""
    draft = internal_mark(broker.context, QUEUE, b"0")
    draft.properties["a"] = "x" * (MOST_BYTES - 3)
    stage(broker.context, draft)
    note(broker.parts.turns, lambda _: None)
    broker.end_turn()


def test_a_message_with_properties_to_the_brim_can_die(broker: LeasedBroker) -> None:
    """E-08: there is no room to say where it came from; it must not stand before all others for ever."""
    put_full(broker)
    pop(broker)
    reject(broker, 0)
    broker.end_turn()
    assert open_in(broker) == []
    assert broker.end_of(0) == 1
    assert broker.store.queues[TopicPartition(f"%DLQ%{GROUP}", 0)].readable == 1


def test_a_message_with_properties_to_the_brim_becomes_a_retry(broker: LeasedBroker) -> None:
    """E-08: at once, for there is no room to say when; else its group could never pull from now on."""
    put_full(broker)
    assert pop(broker)[0] == [0]
    broker.end_turn()
    drain = Drain(broker.context, broker.leases, broker.leasing.moves, run_here)
    draining = gevent.spawn(drain.drain, broker.context.groups.ensure(GROUP), TOPIC)
    for _ in range(5):
        broker.end_turn()
    draining.get(block=False)
    assert open_in(broker) == []
    assert broker.store.queues[TopicPartition(f"%RETRY%{GROUP}", 0)].readable == 1


# -- the offset -------------------------------------------------------------------------------------------------------


def test_a_reset_stands_against_commits_of_members(broker: LeasedBroker) -> None:
    """E-08: a member that has not heard of it commits what it had, and finishes nothing with that."""
    put(broker, 5)
    pop(broker, 2)
    broker.end_turn()
    offsets, now_s = broker.context.offsets, broker.clock.monotonic()
    offsets.reset(*PLACE, 0, now_s)
    broker.end_turn()
    offsets.commit(*PLACE, 5, now_s)
    assert offset(broker) == 0
    assert pop(broker, 1)[0] == [0]
    offsets.commit(*PLACE, 5, now_s + RESET_STANDS_S)
    broker.end_turn()
    assert (offset(broker), open_in(broker)) == (5, [])


def test_a_reset_is_kept_with_the_leases(broker: LeasedBroker) -> None:
    """E-08: the log of offsets, which has it half a second later, is not asked where there are leases."""
    put(broker, 3)
    _, pop_ms = pop(broker)
    broker.leases.ack(PLACE, pop_ms, 0, 0b111)
    broker.end_turn()
    broker.log_offsets()
    assert offset(broker) == 3
    broker.context.offsets.reset(*PLACE, 1)
    broker.end_turn()
    broker = broker.killed()
    assert offset(broker) == 1
    assert pop(broker)[0] == [1, 2]


def test_leases_that_were_left_do_not_take_an_offset_back(broker: LeasedBroker) -> None:
    """E-08: the group pulls since then, and its leases are not the last word any more."""
    put(broker, 3)
    _, pop_ms = pop(broker, 1)
    broker.leases.ack(PLACE, pop_ms, 0, 1)
    broker.end_turn()
    broker.advance(700)
    broker.tend()
    assert broker.leases.get(PLACE) is None
    broker.context.offsets.commit(*PLACE, 3, broker.clock.monotonic())
    broker.log_offsets()
    assert offset(broker.killed()) == 3


def test_a_pop_leaves_nothing_of_a_topic_that_is_deleted_in_its_turn(broker: LeasedBroker) -> None:
    """E-08, F-17: its group has no offset yet."""
    put(broker, 2)
    assert pop(broker)[0] == [0, 1]
    broker.delete_topic()
    assert (broker.leases.open, broker.leases.places(), offset(broker)) == (0, [], None)
    assert broker.killed().leases.places() == []


@pytest.mark.parametrize("made_again", [False, True])
def test_a_pop_takes_nothing_of_a_topic_that_is_deleted_meanwhile(broker: LeasedBroker, made_again: bool) -> None:
    """E-08, F-17: while it reads, or waits in line."""
    put(broker, 2)
    request = broker.request(GROUP, 0, 32, LEASE_MS)
    plan = broker.plan(request)
    broker.delete_topic()
    if not made_again:
        broker.context.topics.delete(TOPIC, {})
    assert broker.take(request, plan) is None
    result = broker.take(request, broker.plan(request))
    assert result is not None and not result.given
    broker.end_turn()
    assert broker.leases.open == 0
    assert broker.leases.places() == ([PLACE] if made_again else [])


def test_places_of_a_deleted_topic_are_forgotten(broker: LeasedBroker) -> None:
    """E-08, F-17: what is open of it counts no more, and is given to nobody, now or after a kill."""
    put(broker, 2)
    pop(broker)
    broker.end_turn()
    broker.delete_topic()
    assert (broker.leases.open, broker.leases.places()) == (0, [])
    put(broker, 1)
    assert pop(broker)[0] == [2]
    broker.end_turn()
    assert open_in(broker.killed()) == [2]


@pytest.mark.parametrize("reset", [False, True], ids=["commit", "reset"])
def test_a_pop_that_read_while_the_offset_changed_gives_nothing(broker: LeasedBroker, reset: bool) -> None:
    """A group's first pop is not from an offset that a member, or an administrator, has left meanwhile."""
    put(broker, 4)
    request, offsets = broker.request(GROUP, 0, 32, LEASE_MS), broker.context.offsets
    plan = broker.plan(request)
    if reset:
        offsets.reset(*PLACE, 3)
    else:
        offsets.commit(*PLACE, 3, broker.clock.monotonic())
    assert broker.take(request, plan) is None
    assert pop(broker)[0] == [3]

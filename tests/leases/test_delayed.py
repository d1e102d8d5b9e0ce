"""The messages that were given back with a delay: counted as they come and go, in the log and in whole states."""

from hypothesis import given
from hypothesis import strategies as st

from metaq.leases.events import (
    Acked,
    Changed,
    Dead,
    LeaseEvent,
    LeaseRecord,
    More,
    Popped,
    Repeated,
    Row,
    Whole,
    decode_events,
    encode_events,
)
from metaq.leases.state import PartitionLeases
from metaq.message import GroupPartition

PLACE = GroupPartition("billing", "orders", 0)
ORDINALS = st.integers(0, 7)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("change"), ORDINALS, st.booleans(), st.integers(0, 20)),
        st.tuples(st.just("ack"), ORDINALS),
        st.tuples(st.just("dead"), ORDINALS),
        st.tuples(st.just("again"), ORDINALS),
        st.tuples(st.just("pass"), st.integers(1, 20)),
        st.tuples(st.just("reopen")),
    ),
    max_size=40,
)


def kept(events: list[LeaseEvent]) -> list[LeaseEvent]:
    """The events as the log returns them."""
    return [event for _, event in decode_events(encode_events(LeaseRecord(0, [(PLACE, event) for event in events]))).events]


@given(STEPS)
def test_delayed_messages_are_counted(steps: list[tuple[object, ...]]) -> None:
    """MY-033: as many as were given back, are open, and are not due; whatever becomes of them."""
    state, now_ms, pop_ms = PartitionLeases(0), 100, 100
    state.apply(Popped(pop_ms, 200, 0, 8, 0xFF), now_ms, 0)
    delays: dict[int, int] = {}
    for step in steps:
        match step:
            case ("change", int(ordinal), bool(back), int(after_ms)):
                bunch = state.find(ordinal)
                if bunch is not None and not state.is_waiting(ordinal):
                    (event,) = kept([Changed(bunch.pop_ms, ordinal, now_ms + after_ms, back)])
                    state.apply(event, now_ms, 0)
                    delays.pop(ordinal, None)
                    if back:
                        delays[ordinal] = now_ms + after_ms
            case ("ack", int(ordinal)):
                bunch = state.find(ordinal)
                state.apply(Acked(0 if bunch is None else bunch.pop_ms, ordinal, 1), now_ms, 0)
                delays.pop(ordinal, None)
            case ("dead", int(ordinal)):
                state.apply(Dead(ordinal), now_ms, 0)
                delays.pop(ordinal, None)
            case ("again", int(ordinal)):
                if state.is_waiting(ordinal):
                    pop_ms += 1
                    state.apply(Repeated(pop_ms, now_ms + 30, [ordinal]), now_ms, 0)
            case ("pass", int(passed_ms)):
                now_ms += passed_ms
            case ("reopen",):
                events = kept(list(state.events(0)))
                state = PartitionLeases(0)
                for event in events:
                    state.apply(event, now_ms, 0)
        state.settle(now_ms)
        delays = {ordinal: due_ms for ordinal, due_ms in delays.items() if due_ms > now_ms}
        assert state.delayed == len(delays)
        assert state.leased + state.waiting == state.open >= state.delayed


def test_how_they_are_kept() -> None:
    """MY-033: a member more, which others do not have: records of before are read as they are."""
    place = b'"of":[["billing","orders",0]]'
    back = LeaseRecord(0, [(PLACE, Changed(1000, 5, 9000, given_back=True))])
    assert encode_events(back) == b'{"since":0,%b,"do":[["c",0,1000,5,9000,1]]}' % place
    rows = [Row(5, 1, 1000, 9000, 2, 900, given_back=True), Row(6, 1, 1000, 9000, 2, 900)]
    whole = LeaseRecord(0, [(PLACE, Whole(5, 7, rows)), (PLACE, More(rows))])
    row = b'[[5,"1",1000,9000,2,900,true],[6,"1",1000,9000,2,900]]'
    assert encode_events(whole) == b'{"since":0,%b,"do":[["=",0,5,7,%b],["+",0,%b]]}' % (place, row, row)
    assert all(decode_events(encode_events(record)) == record for record in (back, whole))


def test_the_open_messages_are_found_from_anywhere() -> None:
    """MY-033: those alone and those in bunches."""
    state = PartitionLeases(0)
    state.apply(Popped(100, 200, 0, 4, 0b1011), 100, 0)
    state.apply(Popped(101, 200, 4, 1, 1), 100, 0)
    state.apply(Popped(102, 200, 5, 3, 0b110), 100, 0)
    assert state.singles() == [4]
    assert [state.wide_from(start, 9) for start in (0, 1, 3, 4, 7, 8)] == [
        [0, 1, 3, 6, 7],
        [1, 3, 6, 7],
        [3, 6, 7],
        [6, 7],
        [7],
        [],
    ]
    assert state.wide_from(0, 2) == [0, 1]

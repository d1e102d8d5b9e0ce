"""Events of leases, as the log holds them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.errors import CorruptRecord
from metaq.leases.events import (
    Acked,
    Changed,
    Dead,
    Forgotten,
    LeaseRecord,
    Lined,
    More,
    Passed,
    PlacedEvent,
    Popped,
    Repeated,
    Reset,
    Row,
    Whole,
    decode_events,
    encode_events,
)
from metaq.message import GroupPartition

ORDERS, AUDIT = GroupPartition("billing", "orders", 0), GroupPartition("audit", "orders", 3)

GOLDEN: list[tuple[PlacedEvent, str]] = [
    ((ORDERS, Popped(1000, 61000, 5, 2, 0b11)), '["p",0,1000,61000,5,2]'),
    ((ORDERS, Popped(1000, 61000, 5, 7, 0b1011111)), '["p",0,1000,61000,5,7,"5f"]'),
    ((ORDERS, Passed(12)), '["s",0,12]'),
    ((ORDERS, Repeated(2000, 62000, [17, 23])), '["r",0,2000,62000,[17,23]]'),
    ((ORDERS, Repeated(2000, 62000, [17, 23], same_attempt=True)), '["r",0,2000,62000,[17,23],1]'),
    ((ORDERS, Acked(1000, 5, 0xFF)), '["a",0,[[1000,5,"ff"]]]'),
    ((ORDERS, Changed(1000, 5, 9000)), '["c",0,1000,5,9000]'),
    ((ORDERS, Lined([31, 40])), '["l",0,[31,40]]'),
    ((ORDERS, Dead(5)), '["x",0,5]'),
    ((ORDERS, Reset(0)), '["o",0,0]'),
    ((ORDERS, Forgotten()), '["-",0]'),
    ((ORDERS, Whole(5, 9, [Row(5, 3, 1000, 61000, 1, 1000)])), '["=",0,5,9,[[5,"3",1000,61000,1,1000]]]'),
    ((ORDERS, More([Row(7, 1, 2000, 62000, 2, 1000)])), '["+",0,[[7,"1",2000,62000,2,1000]]]'),
]


@pytest.mark.parametrize(("event", "row"), GOLDEN)
def test_one_event(event: PlacedEvent, row: str) -> None:
    body = encode_events(LeaseRecord(7, [event]))
    assert body == f'{{"since":7,"of":[["billing","orders",0]],"do":[{row}]}}'.encode()
    assert decode_events(body) == LeaseRecord(7, [event])


def test_acks_of_one_place_share_a_row() -> None:
    events: list[PlacedEvent] = [(ORDERS, Acked(1, 2, 1)), (ORDERS, Acked(1, 9, 1)), (AUDIT, Acked(1, 2, 1))]
    body = encode_events(LeaseRecord(0, events))
    assert body.endswith(b'"do":[["a",0,[[1,2,"1"],[1,9,"1"]]],["a",1,[[1,2,"1"]]]]}')
    assert decode_events(body) == LeaseRecord(0, events)


def test_the_first_record_has_the_secret() -> None:
    record = LeaseRecord(3, [], bytes(range(4)))
    body = encode_events(record)
    assert body == b'{"since":3,"secret":"00010203","of":[],"do":[]}'
    assert decode_events(body) == record


@given(st.lists(st.tuples(st.sampled_from([ORDERS, AUDIT]), st.sampled_from([event for (_, event), _ in GOLDEN]))))
def test_what_is_written_is_read(events: list[PlacedEvent]) -> None:
    assert decode_events(encode_events(LeaseRecord(3, events))) == LeaseRecord(3, events)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b'{"since":1,"of":[],"do":[["s",0,1]]}',
        b'{"since":1,"of":[["g","t",0]],"do":[["?",0]]}',
        b'{"since":1,"of":[["g","t",0]],"do":[["s",0]]}',
        b'{"since":1,"of":[["g","t",0]],"do":[["s",0,"1"]]}',
        b'{"since":1,"of":[["g","t",0]],"do":[["a",0,[[1,2,"zz"]]]]}',
        b'{"since":1,"of":[["g","t"]],"do":[]}',
        b'{"of":[],"do":[]}',
        b'{"since":1,"secret":"xy","of":[],"do":[]}',
    ],
)
def test_other_bodies_are_corrupt(body: bytes) -> None:
    with pytest.raises(CorruptRecord, match="a record of leases cannot be read"):
        decode_events(body)

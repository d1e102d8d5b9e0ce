"""The body of a bulk fetch: round trips, refused bodies, and proof that no flipped bit of a record goes unnoticed."""

import struct
from collections.abc import Callable
from typing import Final, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.checksum import body_crc
from metaq.errors import StreamLost
from metaq.protocol.remoting.bulk import MISSING, UNIT_SIZE, are_intact, decode_bulk, encode_bulk_head, unit_columns
from tests.support.wire import stored_record

UNIT: Final = struct.Struct(">qii")
FIRST: Final = 1 << 40
TOPIC: Final = "orders"

int32 = st.integers(-(1 << 31), (1 << 31) - 1)
natural64 = st.integers(0, (1 << 63) - 1)
sizes = st.lists(st.integers(0, 300), max_size=40)


def fields(first: int, count: int) -> dict[str, str]:
    return {"nextBeginOffset": str(first + count), "minOffset": "0", "maxOffset": str(first + count)}


@given(st.lists(st.tuples(natural64, st.binary(max_size=50), int32), max_size=40), natural64)
def test_round_trip(rows: list[tuple[int, bytes, int]], least: int) -> None:
    """P47: units and records come out as they went in, as slices of what was received."""
    units = b"".join(UNIT.pack(offset, len(record), tag) for offset, record, tag in rows)
    records = b"".join(record for _, record, _ in rows)
    said = {"nextBeginOffset": str(FIRST + len(rows)), "minOffset": str(least), "maxOffset": str(1 << 62)}
    bulk = decode_bulk(FIRST, said, bytearray(encode_bulk_head(units) + records))
    assert (bulk.first, bytes(bulk.units), bytes(bulk.records)) == (FIRST, units, records)
    assert (bulk.next, bulk.least, bulk.most) == (FIRST + len(rows), least, 1 << 62)
    offsets, columns = unit_columns(bulk.units)
    assert list(zip(offsets, columns, strict=True)) == [(offset, len(record)) for offset, record, _ in rows]


def test_an_answer_without_a_body_has_no_messages() -> None:
    """P47: as at the end of a partition."""
    bulk = decode_bulk(7, fields(7, 0), b"")
    assert (bulk.first, len(bulk.units), len(bulk.records), bulk.next) == (7, 0, 0, 7)


@given(sizes, st.data())
def test_what_contradicts_itself_is_refused(some: list[int], data: st.DataObject) -> None:
    """F-PROTO: every body that is cut or has too much, wrong counts, ordinals that do not follow, negative sizes."""
    units = b"".join(UNIT.pack(0, size, 0) for size in some)
    body = encode_bulk_head(units) + bytes(sum(some))
    good = fields(FIRST, len(some))
    decode_bulk(FIRST, good, body)
    cut = data.draw(st.integers(1, len(body)))
    wrong = [(good, body[:cut]) if cut < len(body) else (good, body + b"x"), (good, body + bytes(cut))]
    wrong += [(fields(FIRST, len(some) + 1), body), (good, struct.pack(">i", -1) + body[4:])]
    wrong += [({**good, "minOffset": "x"}, body), ({"nextBeginOffset": "7"}, body), ({}, b"")]
    negative = encode_bulk_head(UNIT.pack(0, -5, 0) + UNIT.pack(0, 5, 0))
    wrong.append((fields(FIRST, 2), negative))
    for said, sent in wrong:
        with pytest.raises(StreamLost):
            decode_bulk(FIRST, said, sent)


@given(st.binary(max_size=200), st.integers(-(1 << 63), (1 << 63) - 1))
def test_garbage_is_refused_or_consistent(body: bytes, following: int) -> None:
    """F-PROTO: random bytes raise nothing but ``StreamLost``."""
    said = {"nextBeginOffset": str(following), "minOffset": "0", "maxOffset": "0"}
    try:
        bulk = decode_bulk(FIRST, said, body)
    except StreamLost:
        return
    assert not body or bulk.next - bulk.first == len(bulk.units) // UNIT_SIZE


class Run(NamedTuple):
    """Records of consecutive messages with other bytes between them."""

    data: bytes
    starts: list[int]
    offsets: list[int]
    sizes: list[int]


def make_run(bodies: list[tuple[bytes, bytes, int]]) -> Run:
    data, starts, offsets, lengths = b"", [], [], []
    for ordinal, (body, properties, gap) in enumerate(bodies):
        data += b"\xda" * gap
        starts.append(len(data))
        offsets.append(FIRST + len(data))
        place = {"partition": 3, "ordinal": FIRST + ordinal, "log_offset": FIRST + len(data)}
        data += stored_record(TOPIC, body, body_crc(body), flag=0, properties=properties, **place)
        lengths.append(len(data) - starts[-1])
    return Run(data, starts, offsets, lengths)


pairs = st.sampled_from([b"", b"TAGS\x01a\x02", b"KEYS\x01k1\x02TAGS\x01b\x02"])
runs = st.lists(st.tuples(st.binary(max_size=60), pairs, st.integers(0, 9)), min_size=1, max_size=12).map(make_run)


@given(runs, st.data())
def test_no_flipped_bit_goes_unnoticed(run: Run, data: st.DataObject) -> None:
    """F-BIT: whichever bit of whichever record; bytes between the records do not count."""
    assert are_intact(*run, TOPIC, 3, FIRST)
    index = data.draw(st.integers(0, len(run.sizes) - 1))
    bit = data.draw(st.integers(0, run.sizes[index] * 8 - 1))
    damaged = bytearray(run.data)
    damaged[run.starts[index] + bit // 8] ^= 1 << bit % 8
    assert not are_intact(bytes(damaged), *run[1:], TOPIC, 3, FIRST)


Change = Callable[[Run], bool]

OTHERS: Final[dict[str, Change]] = {
    "the end is missing": lambda run: are_intact(run.data[:-1], *run[1:], TOPIC, 3, FIRST),
    "another partition": lambda run: are_intact(*run, TOPIC, 4, FIRST),
    "another topic": lambda run: are_intact(*run, "order", 3, FIRST),
    "a longer topic": lambda run: are_intact(*run, "orders2", 3, FIRST),
    "another ordinal": lambda run: are_intact(*run, TOPIC, 3, FIRST + 1),
    "another place": lambda run: are_intact(*run[:2], [offset + 1 for offset in run.offsets], run.sizes, TOPIC, 3, FIRST),
}


@pytest.mark.parametrize("what", OTHERS)
@given(runs)
def test_a_record_of_another_place_is_not_taken(what: str, run: Run) -> None:
    """F-BIT: a whole record that a damaged unit leads to."""
    assert not OTHERS[what](run)


def test_a_missing_message_is_sixteen_zeros() -> None:
    """P48: and no record can have that unit, because none has the size 0."""
    assert UNIT.unpack(MISSING) == (0, 0, 0)

"""Columns of records, compared record by record with the record and property readers of the broker and the client."""

import random
import zlib
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.checksum import body_crc
from metaq.errors import CorruptRecord
from metaq.protocol.inflating import COMPRESSED_ZLIB
from metaq.protocol.properties import KEYS, UNIQUE_KEY
from metaq.protocol.record import (
    HEADER,
    HEADER_SIZE,
    MAGIC,
    TAGS,
    checksum_property,
    decode_properties,
    decode_record,
    host_bytes,
    record_tail,
)
from metaq.protocol.remoting.bulk import MISSING, Bulk
from metaq.protocol.sysflag import COMPRESSED
from metaq.spark.reading.columns import (
    MOST_BYTES,
    MOST_ROWS,
    NOT_USERS,
    SCHEMA,
    SCHEMA_WITH_HEADERS,
    STORE_TIME,
    UNIT,
    Piece,
    Shape,
    missing,
    piece_of,
    record_batches,
)

FIRST: Final = 1000
HOST: Final = host_bytes("10.0.0.1", 8123)

Row = dict[str, Any]


class Drawn(NamedTuple):
    """The parts that differ from record to record."""

    body: bytes
    properties: bytes = b""
    sys_flag: int = 0
    flag: int = 0
    store_ms: int = 1_400_000_000_000


def record_of(drawn: Drawn, ordinal: int, log_offset: int) -> bytes:
    tail = record_tail("t", drawn.properties)
    size = HEADER_SIZE + len(drawn.body) + len(tail) + 20
    numbers = (size, MAGIC, body_crc(drawn.body), 3, drawn.flag, ordinal, log_offset, drawn.sys_flag, 7, HOST)
    data = HEADER.pack(*numbers, drawn.store_ms, HOST, 0, 0, len(drawn.body)) + drawn.body + tail
    return data + checksum_property(data)


def bulk_of(drawn: Sequence[Drawn | None]) -> Bulk:
    """Return these messages as a broker answers them; ``None`` is a message that is lost."""
    units, records, size = [], [], 0
    for ordinal, one in enumerate(drawn, FIRST):
        if one is None:
            units.append(MISSING)
            continue
        records.append(record_of(one, ordinal, size))
        units.append(np.array((size, len(records[-1]), 0), UNIT).tobytes())
        size += len(records[-1])
    end = FIRST + len(drawn)
    return Bulk(FIRST, memoryview(b"".join(units)), memoryview(b"".join(records)), end, 0, end, verified=True)


def rows_of(bulk: Bulk | Piece, *, until: int = 1 << 60, headers: bool = True) -> list[Row]:
    piece = bulk if isinstance(bulk, Piece) else piece_of(bulk)
    batches = list(record_batches(piece, "t", 5, Shape(headers=headers), until=until))
    for batch in batches:
        assert batch.schema == (SCHEMA_WITH_HEADERS if headers else SCHEMA)
        batch.validate(full=True)
        assert 0 < batch.num_rows <= MOST_ROWS
    return [row for batch in batches for row in batch.to_pylist()]


def expected(drawn: Drawn, ordinal: int) -> Row:
    record = decode_record(record_of(drawn, ordinal, 0))
    pairs = decode_properties(record.properties)
    body = bytes(record.body)
    users = {name: value for name, value in pairs.items() if name not in NOT_USERS}
    return {
        "key": next(filter(None, pairs.get(KEYS, "").split(" ")), None),
        "value": zlib.decompress(body) if record.sys_flag & COMPRESSED else body,
        "topic": "t",
        "partition": 5,
        "offset": ordinal,
        "timestamp": datetime.fromtimestamp(record.store_ms / 1000, UTC),
        "timestampType": STORE_TIME,
        "tag": pairs.get(TAGS),
        "headers": users or None,
    }


def as_text(row: Row) -> Row:
    """Keys and the values of headers as the readers of properties give them: bytes that are no UTF-8 replaced."""
    row = dict(row)
    row["key"] = None if row["key"] is None else row["key"].decode(errors="replace")
    if row.get("headers") is not None:
        pairs = {pair["key"]: pair["value"].decode(errors="replace") for pair in row["headers"]}
        assert len(pairs) == len(row["headers"]), "a name twice"
        row["headers"] = pairs
    return row


names = st.sampled_from([KEYS, TAGS, UNIQUE_KEY, "METAQ_ID", "user", "other", "KEYZ", "TAG", "é"]).map(str.encode) | st.binary(
    max_size=5
)
values = st.sampled_from([b"", b"one", b" two  words ", b" ", "größe".encode(), b"\xff\xfe"]) | st.binary(max_size=20)
pieces = st.tuples(names, st.sampled_from([b"\x01", b"", b"\x01\x01"]), values).map(b"".join)
properties = st.just(b"") | st.lists(pieces, max_size=6).map(lambda found: b"".join(piece + b"\x02" for piece in found))
unclosed = st.lists(pieces, min_size=1, max_size=4).map(b"\x02".join)
plain = st.builds(
    Drawn,
    body=st.binary(max_size=60),
    properties=properties | unclosed,
    sys_flag=st.sampled_from([0, 8, 1 << 30]),
    flag=st.integers(-(1 << 31), (1 << 31) - 1),
    store_ms=st.integers(0, 4_000_000_000_000),
)
packed = st.builds(
    lambda body, found, kind: Drawn(zlib.compress(body), found, kind),
    st.binary(max_size=200),
    properties,
    st.sampled_from([COMPRESSED, COMPRESSED_ZLIB]),
)
drawns = st.lists(plain | packed | st.none(), max_size=12)


@given(drawns, st.integers(0, 14))
def test_rows_are_the_records(drawn: list[Drawn | None], count: int) -> None:
    """P47, MQ-011, MQ-012: value, key, tag, headers, offset and time of every message that is there, and no other rows."""
    bulk = bulk_of(drawn)
    until = FIRST + count
    wanted = [expected(one, ordinal) for ordinal, one in enumerate(drawn, FIRST) if one is not None and ordinal < until]
    assert [as_text(row) for row in rows_of(bulk, until=until)] == wanted
    without = [{name: value for name, value in row.items() if name != "headers"} for row in wanted]
    assert [as_text(row) for row in rows_of(bulk, until=until, headers=False)] == without
    lost = [ordinal for ordinal, one in enumerate(drawn, FIRST) if one is None and ordinal < until]
    assert [ordinal for run in missing(piece_of(bulk), until) for ordinal in run] == lost


@given(st.lists(plain, min_size=1, max_size=8), st.lists(st.integers(0, 30), min_size=8, max_size=8))
def test_records_may_be_anywhere_in_the_buffer(drawn: list[Drawn], gaps: list[int]) -> None:
    """P47, MQ-011: what stands between the records, as other partitions' do in a log, does not matter."""
    data, starts, sizes = b"", [], []
    for ordinal, (one, gap) in enumerate(zip(drawn, gaps, strict=False), FIRST):
        record = record_of(one, ordinal, 0)
        data += b"\x02" * gap
        starts.append(len(data))
        sizes.append(len(record))
        data += record
    piece = Piece(FIRST, np.array(starts), np.array(sizes), memoryview(data))
    assert [as_text(row) for row in rows_of(piece)] == [expected(one, ordinal) for ordinal, one in enumerate(drawn, FIRST)]


def test_batches_are_bounded_by_rows_and_bytes() -> None:
    """F-BIG: many small messages, and few large ones; one message larger than a batch has one of its own."""
    many = rows_count([Drawn(b"x")] * (2 * MOST_ROWS + 1))
    assert many == [MOST_ROWS, MOST_ROWS, 1]
    large = rows_count([Drawn(bytes(MOST_BYTES // 3))] * 5)
    assert large == [2, 2, 1]
    assert rows_count([Drawn(b"x"), Drawn(bytes(MOST_BYTES + 1)), Drawn(b"x")]) == [1, 1, 1]


def test_batches_are_bounded_by_what_bodies_are_inflated_to() -> None:
    """F-BIG: compressed bodies do not make a batch larger than others, unless one alone does; the order is kept."""
    bombs = [Drawn(zlib.compress(bytes([number]) * (MOST_BYTES // 2)), b"n\x01v\x02", COMPRESSED_ZLIB) for number in range(5)]
    drawn = [bombs[0], Drawn(b"x"), *bombs[1:], Drawn(b"y")]
    assert rows_count(drawn) == [4, 3]
    assert [row["value"] for row in rows_of(bulk_of(drawn))] == [expected(one, 0)["value"] for one in drawn]


def rows_count(drawn: list[Drawn]) -> list[int]:
    return [batch.num_rows for batch in record_batches(piece_of(bulk_of(drawn)), "t", 0, Shape(), until=1 << 60)]


def test_a_delayed_message_says_when_it_was_due() -> None:
    """MY-033: among the headers of its row; when it was parked and delivered is the broker's affair."""
    text = b"TIMER_OUT_MS\x011769860800000\x02TIMER_ENQUEUE_MS\x011\x02TIMER_DEQUEUE_MS\x012\x02TIMER_DELAY_MS\x013\x02"
    (row,) = rows_of(bulk_of([Drawn(b"body", text)]))
    assert row["headers"] == [{"key": "TIMER_OUT_MS", "value": b"1769860800000"}]


def test_an_empty_bulk_has_no_rows() -> None:
    """P47: at the end of a partition."""
    empty = Bulk(FIRST, memoryview(b""), memoryview(b""), FIRST, 0, FIRST, verified=True)
    assert rows_of(empty) == []
    assert missing(piece_of(empty), 1 << 60) == []
    lost = bulk_of([None, None])
    assert rows_of(lost) == []
    assert missing(piece_of(lost), 1 << 60) == [range(FIRST, FIRST + 2)]


def test_what_is_missing_is_told_in_runs() -> None:
    """P47: for the reader, which fails or reports them."""
    x = Drawn(b"x")
    bulk = bulk_of([None, x, x, None, None, x, None])
    assert missing(piece_of(bulk), 1 << 60) == [
        range(FIRST, FIRST + 1),
        range(FIRST + 3, FIRST + 5),
        range(FIRST + 6, FIRST + 7),
    ]
    assert missing(piece_of(bulk), FIRST + 4) == [range(FIRST, FIRST + 1), range(FIRST + 3, FIRST + 4)]
    assert missing(piece_of(bulk), FIRST) == []
    assert missing(piece_of(bulk), FIRST + 1) == [range(FIRST, FIRST + 1)]


@pytest.mark.parametrize("columns", [Shape(errors=True, most=1000), Shape(most=1000)])
def test_a_body_that_cannot_be_inflated_costs_no_other_row(columns: Shape, caplog: pytest.LogCaptureFixture) -> None:
    """F-PROTO: its row has the bytes that are stored, and says why; without the column the log does."""
    good = zlib.compress(b"good")
    drawn = [
        Drawn(good, sys_flag=COMPRESSED_ZLIB),
        Drawn(b"no zlib", sys_flag=COMPRESSED),
        Drawn(b"plain"),
        Drawn(b"way 4", sys_flag=COMPRESSED | 0x400),
        Drawn(good[:-1], sys_flag=COMPRESSED_ZLIB),
        Drawn(zlib.compress(bytes(1001)), sys_flag=COMPRESSED_ZLIB),
        Drawn(zlib.compress(bytes(1000)), sys_flag=COMPRESSED_ZLIB),
    ]
    batches = list(record_batches(piece_of(bulk_of(drawn)), "t", 5, columns, until=1 << 60))
    rows = [row for batch in batches for row in batch.to_pylist()]
    raw = [b"good", b"no zlib", b"plain", b"way 4", good[:-1], drawn[5].body, bytes(1000)]
    assert [row["value"] for row in rows] == raw
    if columns.errors:
        assert [row["error"] is None for row in rows] == [True, False, True, False, False, False, True]
        assert rows[5]["error"].endswith("inflates to more than 1000 (max_inflated_bytes)")
    else:
        assert "error" not in rows[0]
        assert f"partition=t-5 rows=4 first=offset {FIRST + 1}: a body of 7 bytes" in caplog.text


@given(st.integers(0, 1 << 32))
def test_bytes_that_are_no_records_are_refused(seed: int) -> None:
    """F-PROTO: whatever stands in a record's header, it is refused or read; nothing else is raised."""
    chance = random.Random(seed)
    bulk = bulk_of([Drawn(chance.randbytes(30), b"n\x01v\x02") for _ in range(3)])
    data = bytearray(bulk.records)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(data) - 12)
        data[at : at + 4] = chance.choice([b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\0\0\0\0", chance.randbytes(4)])
    try:
        for batch in record_batches(
            piece_of(bulk._replace(records=memoryview(data))), "t", 5, Shape(headers=True), until=1 << 60
        ):
            batch.validate(full=True)
    except CorruptRecord:
        return


@pytest.mark.parametrize(("at", "value"), [(0, 5), (4, 5), (20, 5), (84, -1), (84, 31), (84, 1 << 30)])
def test_a_header_that_contradicts_its_unit_is_an_error(at: int, value: int) -> None:
    """F-PROTO: size, magic, ordinal, length of the body."""
    bulk = bulk_of([Drawn(b"x"), Drawn(bytes(8))])
    data = bytearray(bulk.records)
    second = int(piece_of(bulk).starts[1])
    data[second + at : second + at + 4] = value.to_bytes(4, signed=True)
    with pytest.raises(CorruptRecord, match="t-5, message 1001: "):
        rows_of(bulk._replace(records=memoryview(data)))


def test_sizes_of_units_are_checked_before_records_are_read() -> None:
    """F-PROTO: a unit that names fewer bytes than any record has."""
    units = np.array([(0, 40, 0)], UNIT).tobytes()
    with pytest.raises(CorruptRecord, match="t-5, message 1000: "):
        rows_of(Bulk(FIRST, memoryview(units), memoryview(bytes(40)), FIRST + 1, 0, FIRST + 1, verified=True))


def test_no_row_is_a_copy_of_what_stands_around_it() -> None:
    """P47: a batch holds its columns, not the fetched bytes."""
    bulk = bulk_of([Drawn(b"x" * 10, b"a\x01b\x02") for _ in range(1000)])
    (batch,) = record_batches(piece_of(bulk), "t", 0, Shape(), until=1 << 60)
    assert batch.get_total_buffer_size() < len(bulk.records) / 1.5

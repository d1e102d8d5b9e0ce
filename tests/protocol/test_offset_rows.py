"""Rows of offsets are read as they were written."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.errors import BadRequest
from metaq.protocol.remoting.offsetrows import (
    Kind,
    OffsetPage,
    OffsetRow,
    decode_lines,
    decode_page,
    encode_row,
    encode_row_page,
)

TIMES = st.integers(0, 253_402_300_799_999)  # to the end of the year 9999
NUMBERS = st.integers(0, (1 << 63) - 1)
ROWS = st.builds(
    OffsetRow,
    ts=TIMES,
    broker=st.text(),
    group=st.text(),
    kind=st.sampled_from(list(Kind)).map(str),
    topic=st.text(),
    partition=st.integers(0, 1023),
    consumed=st.none() | NUMBERS,
    minimum=NUMBERS,
    maximum=NUMBERS,
    consumed_ts=st.none() | TIMES,
    minimum_ts=st.none() | TIMES,
    maximum_ts=st.none() | TIMES,
    owner=st.none() | st.text(),
    retention_ms=st.none() | NUMBERS,
    lag=st.none() | NUMBERS,
    in_flight=st.none() | NUMBERS,
    delayed=st.none() | NUMBERS,
)
OF_LEASES = ("lag", "in_flight", "delayed")
PAGES = st.builds(OffsetPage, st.lists(ROWS), st.none() | st.text(), st.none() | st.text())


@given(st.lists(ROWS))
def test_lines(rows: list[OffsetRow]) -> None:
    """SG-055: whatever stands in a name, a row is one line, which any reader of JSON takes."""
    lines = b"\n".join(map(encode_row, rows))
    assert lines.count(b"\n") == max(0, len(rows) - 1)
    assert decode_lines(lines) == rows
    assert [list(json.loads(line)) for line in lines.splitlines()] == [list(OffsetRow._fields)] * len(rows)


@given(PAGES)
def test_pages(page: OffsetPage) -> None:
    """SG-055."""
    assert decode_page(encode_row_page(map(encode_row, page.rows), page.next, page.problem)) == page


@pytest.mark.parametrize(
    "wrong",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"1",
        b"{}",
        b'{"rows":null,"next":null,"problem":null}',
        b'{"rows":[{}],"next":null,"problem":null}',
    ],
)
def test_a_page_that_is_none(wrong: bytes) -> None:
    """SG-055: what comes from elsewhere is refused in our words."""
    with pytest.raises(BadRequest):
        decode_page(wrong)


@given(ROWS, st.sampled_from([name for name in OffsetRow._fields if name not in OF_LEASES]))
def test_a_row_without_a_member(row: OffsetRow, name: str) -> None:
    """SG-055: refused; one that has more is not."""
    content = json.loads(encode_row(row))
    assert decode_lines(json.dumps({**content, "later": 1}).encode()) == [row]
    del content[name]
    with pytest.raises(BadRequest):
        decode_lines(json.dumps(content).encode())


@given(ROWS)
def test_a_row_of_before_there_were_leases(row: OffsetRow) -> None:
    """MY-033: of a group that leases nothing."""
    content = {name: value for name, value in json.loads(encode_row(row)).items() if name not in OF_LEASES}
    assert decode_lines(json.dumps(content).encode()) == [row._replace(lag=None, in_flight=None, delayed=None)]


@pytest.mark.parametrize("time", ["yesterday", 17, [], "2026-13-01T00:00:00Z"])
def test_a_time_that_is_none(time: object) -> None:
    """SG-055."""
    row = OffsetRow(0, "b", "g", "remoting", "t", 0, 1, 0, 2, 3, 4, 5, None, None)
    content = {**json.loads(encode_row(row)), "consumed_ts": time}
    with pytest.raises(BadRequest):
        decode_lines(json.dumps(content).encode())

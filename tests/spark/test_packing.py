"""Columns of a write as messages of a batch, compared with the result of the broker's own reader of batches."""

import zlib
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.errors import BadRequest
from metaq.protocol.properties import TIMER_OUT, WRITE, parse
from metaq.protocol.record import java_hash
from metaq.protocol.remoting.sending.batch import decode_batch
from metaq.spark.writing.packing import java_hashes, pack, written_keys

HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
TEXT = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\x01\x02"), max_size=8)
KEY = st.text(st.characters(blacklist_categories=["Cs", "Zs", "Zl", "Zp", "Cc"]), max_size=8)
NAME = st.text(st.sampled_from("abcé"), min_size=1, max_size=2)
ROW = st.fixed_dictionaries(
    {
        "value": st.binary(max_size=20),
        "key": st.none() | KEY.map(str.encode),
        "tag": st.none() | TEXT,
        "headers": st.none() | st.dictionaries(NAME, TEXT, max_size=3),
    }
)


def batch_of(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    def pairs(headers: dict[str, str] | None) -> list[dict[str, Any]] | None:
        return None if headers is None else [{"key": name, "value": value.encode()} for name, value in headers.items()]

    return pa.record_batch(
        {
            "headers": pa.array([pairs(row["headers"]) for row in rows], HEADERS),
            "value": pa.array([row["value"] for row in rows], pa.binary()),
            "key": pa.array([row["key"] for row in rows], pa.binary()),
            "tag": pa.array([row["tag"] for row in rows], pa.string()),
        }
    )


def found_in(packed: pa.LargeBinaryArray) -> list[tuple[bytes, dict[str, str]]]:
    """Body and properties of each message, one item a row."""
    found = []
    for data in packed.to_pylist():
        (item,) = decode_batch(data)
        assert item.flag == 0
        found.append((item.body, parse(item.properties)))
    return found


@given(st.lists(ROW, max_size=12), st.integers(0, 3))
def test_each_row_becomes_its_message(rows: list[dict[str, Any]], skipped: int) -> None:
    """P47: body, key, tag and headers of each row, and which row of which write it is; of a slice, too."""
    packed = pack(batch_of(rows).slice(skipped), "query/7/2", 1000)
    messages = found_in(packed)
    assert len(messages) == len(rows[skipped:])
    for number, (row, (body, properties)) in enumerate(zip(rows[skipped:], messages, strict=True)):
        assert body == row["value"]
        mark = properties.pop(WRITE)
        place, _, check = mark.rpartition("/")
        assert place == f"query/7/2/{1000 + number}"
        assert len(check) == 8
        named = {"KEYS": (row["key"] or b"").decode(), "TAGS": row["tag"], **(row["headers"] or {})}
        assert properties == {name: value for name, value in named.items() if value}


def test_the_check_is_of_body_and_properties() -> None:
    """P47: a row that stands where another one stood before is not taken for it."""
    plain: dict[str, Any] = {"value": b"body", "key": b"k", "tag": None, "headers": None}
    rows = [plain, {**plain, "value": b"other"}, {**plain, "key": b"l"}, {**plain, "headers": {"a": "1"}}]
    marks = [found_in(pack(batch_of([row]), "q/0/0", 5))[0][1][WRITE] for row in rows]
    assert marks[0] == f"q/0/0/5/{zlib.crc32(b'bodyKEYS' + bytes([1]) + b'k' + bytes([2])):08x}"
    assert len(set(marks)) == 4
    assert {mark.rpartition("/")[0] for mark in marks} == {"q/0/0/5"}


def test_a_message_that_is_written_on_has_the_mark_of_the_last_write() -> None:
    """P47: what was read with headers and is written again is no repeat of what it was made of."""
    row = {"value": b"body", "key": None, "tag": None, "headers": {WRITE: "old/0/0/0/00000000", "a": "1"}}
    ((_, properties),) = found_in(pack(batch_of([row]), "new/0/0", 0))
    assert properties.pop(WRITE).startswith("new/0/0/0/")
    assert properties == {"a": "1"}


def test_a_delayed_message_that_is_written_on_is_not_delayed_again() -> None:
    """MY-033: when it was due is read among its headers, and is none of what is written."""
    row = {"value": b"body", "key": None, "tag": None, "headers": {TIMER_OUT: "1769860800000", "a": "1"}}
    ((_, properties),) = found_in(pack(batch_of([row]), "new/0/0", 0))
    del properties[WRITE]
    assert properties == {"a": "1"}


@given(st.lists(st.none() | KEY, max_size=10))
def test_keys_have_the_hash_that_clients_give_them(keys: list[str | None]) -> None:
    """P47: so that a key's rows go where messages with it as ordering key go."""
    column = written_keys(pa.record_batch({"key": pa.array(keys, pa.string())}))
    assert java_hashes(column).tolist() == [java_hash(key or "") for key in keys]


@given(st.lists(st.text(st.characters(max_codepoint=127), max_size=60), max_size=10))
def test_long_keys_have_it_too(keys: list[str]) -> None:
    """P47: sums that wrap around."""
    assert java_hashes(pa.array([key.encode() for key in keys], pa.large_binary())).tolist() == [java_hash(key) for key in keys]


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ({"value": None}, "value is null.*coalesce"),
        ({"key": b"New York"}, "key is 'New York': it contains a blank"),
        ({"key": b"a\x02b"}, "key is .*the byte 1 or 2"),
        ({"key": b"\xff\xfe"}, "key is not UTF-8.*base64"),
        ({"tag": "a\x01b"}, "tag is .*the byte 1 or 2"),
        ({"headers": {"KEYS": "x"}}, "header KEYS is reserved"),
        ({"headers": {"a": "x\x02"}}, "header's value is .*the byte 1 or 2"),
        ({"headers": {"a": "x" * 40_000}}, "need 40.* bytes as properties; the limit is"),
    ],
)
def test_what_cannot_be_carried_is_told(row: dict[str, Any], error: str) -> None:
    """P14: with the value, and what to do."""
    with pytest.raises(BadRequest, match=error):
        pack(batch_of([{"value": b"", "key": None, "tag": None, "headers": None, **row}]), "q/0/0", 0)

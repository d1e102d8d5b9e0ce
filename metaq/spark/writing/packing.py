"""Rows of a Spark write as messages of batches (``metaq.protocol.remoting.sending.batch``), a column at a time.

::

    key, tag, headers  ->  properties: KEYS, TAGS, the headers, METAQ_WRITE
    value              ->  body

    METAQ_WRITE: QUERY/BATCH/PARTITION/ROW/CHECK

QUERY is the id of the streaming query, the same after each restart, or of the one batch write; BATCH the number of the
micro-batch, 0 in a batch write; PARTITION and ROW the row's place in Spark; CHECK eight hexadecimal digits, the CRC-32 of body
and other properties. A task that runs again writes its rows with the same values. Spark does not promise that rows after a
shuffle come in the same order again: then ROW is another row's, CHECK differs, and a reader that drops repeats keeps both.
Without CHECK it would lose one of them.
"""

from itertools import pairwise
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from metaq.checksum import crc32
from metaq.client.message import RESERVED
from metaq.errors import BadRequest
from metaq.protocol.properties import KEYS, MOST_BYTES, TIMER_OUT, WRITE
from metaq.protocol.record import TAGS, java_hash

_HEAD: Final = np.dtype([("size", ">i4"), ("magic", ">i4"), ("crc", ">i4"), ("flag", ">i4"), ("length", ">i4")])
_LENGTH: Final = np.dtype(">i2")
_FIXED: Final = _HEAD.itemsize + _LENGTH.itemsize
_SEPARATORS: Final = "[\x01\x02]"
_NOT_IN_KEYS: Final = r"[\x01\x02\s]"
_HEX: Final = np.frombuffer(b"".join(b"%02x" % number for number in range(256)), "<u2")
"""Each byte as two hexadecimal digits."""
_SHOWN: Final = 60
"""Characters of a bad value in an error."""


def pack(rows: pa.RecordBatch, write: str, first: int) -> pa.LargeBinaryArray:
    """Return each row as one message of a batch, back to back in the array's data.

    Args:
        rows: columns ``value``, and if they are there ``key``, ``tag``, ``headers``; others are ignored.
        write: QUERY/BATCH/PARTITION.
        first: ROW of the first row.

    Raises:
        BadRequest: a value is null, or a property cannot carry some text, or the properties are too long.
    """
    body = _column(rows, "value").cast(pa.large_binary())
    if body.null_count:
        raise BadRequest("a row's value is null, but every message has a body; write coalesce(value, '') for an empty one")
    shared = _join(
        _property(KEYS, _text(_column(rows, "key"), "key", _NOT_IN_KEYS)),
        _property(TAGS, _text(_column(rows, "tag"), "tag")),
        _headers(_column(rows, "headers")),
    )
    properties = _join(shared, _marks(_join(body, shared), write, first))
    sizes, lengths = _sizes(body), _sizes(properties)
    if len(rows) and lengths.max() > MOST_BYTES:
        raise BadRequest(f"key, tag and headers of a row need {lengths.max()} bytes as properties; the limit is {MOST_BYTES}")
    head = np.zeros(len(rows), _HEAD)
    head["size"], head["length"] = _FIXED + sizes + lengths, sizes
    return _join(_fixed(head), body, _fixed(lengths.astype(_LENGTH)), properties)


def written_keys(rows: pa.RecordBatch) -> pa.LargeBinaryArray:
    """Return the keys as they are written: null where there is none."""
    return _text(_column(rows, "key"), "key", _NOT_IN_KEYS)


def java_hashes(texts: pa.LargeBinaryArray) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return ``java_hash`` of each text; 0 for null."""
    ends = _offsets(texts)
    data = np.frombuffer(texts.buffers()[2] or b"", np.uint8)[ends[0] : ends[-1]]
    if len(data) and data.max() > 127:
        return np.array([0 if text is None else java_hash(text.decode()) for text in texts.to_pylist()], np.int64)
    ends -= ends[0]
    lengths = np.diff(ends)
    powers = np.ones(max(1, int(lengths.max(initial=0))), np.uint32)
    powers[1:] = 31
    powers = np.multiply.accumulate(powers, dtype=np.uint32)
    behind = np.repeat(ends[1:], lengths) - 1 - np.arange(len(data))
    sums = np.zeros(len(data) + 1, np.uint32)
    np.cumsum(data * powers[behind], dtype=np.uint32, out=sums[1:])
    # each byte is below 128, so it is one UTF-16 unit; sums wrap around, and their differences are still right modulo 2^32
    return (sums[ends[1:]] - sums[ends[:-1]]).astype(np.int32).astype(np.int64)


# -- properties -------------------------------------------------------------------------------------------------------


def _text(column: pa.Array, what: str, forbidden: str = _SEPARATORS) -> pa.LargeBinaryArray:
    """Return a column as the text that a property can carry; empty texts become null. ``BadRequest``."""
    try:
        texts = column.cast(pa.large_binary()).cast(pa.large_string()).cast(pa.large_binary())
    except pa.ArrowInvalid as error:
        raise BadRequest(f"a row's {what} is not UTF-8, but properties must be; write base64({what}): {error}") from error
    bad = pc.fill_null(pc.match_substring_regex(texts, forbidden), False)
    if pc.any(bad).as_py():
        shown = texts.filter(bad)[0].as_py().decode()[:_SHOWN]
        cause = "a blank, which separates keys, or the byte 1 or 2" if forbidden == _NOT_IN_KEYS else "the byte 1 or 2"
        raise BadRequest(f"a row's {what} is {shown!r}: it contains {cause}; replace it, or write base64({what})")
    return pc.if_else(pc.equal(pc.binary_length(texts), 0), pa.scalar(None, pa.large_binary()), texts)


def _property(name: str, values: pa.LargeBinaryArray) -> pa.LargeBinaryArray:
    """Return the property of each row, empty where the value is null."""
    return pc.fill_null(_join(f"{name}\x01".encode(), values, b"\x02"), b"")


def _headers(column: pa.Array) -> pa.LargeBinaryArray:
    """Return the headers of each row as properties. ``BadRequest`` for a reserved name.

    A header without a value makes no property. METAQ_WRITE, left by an earlier write, is dropped, and so is the time at which
    a delayed message was due.
    """
    if pa.types.is_null(column.type):
        return pa.array([b""] * len(column), pa.large_binary())
    ends = np.zeros(len(column) + 1, np.int64)
    np.cumsum(pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False), out=ends[1:])
    pairs = pc.list_flatten(column)
    names = _text(pc.struct_field(pairs, "key"), "header's name")
    values = _text(pc.struct_field(pairs, "value"), "header's value")
    found = {name.decode() for name in pc.unique(names).to_pylist() if name is not None}
    if taken := (RESERVED & found) - {TIMER_OUT}:
        raise BadRequest(f"the header {min(taken)} is reserved; use the column key for KEYS and the column tag for TAGS")
    each = _join(names, b"\x01", values, b"\x02")
    dropped = pc.is_in(names, pa.array([WRITE.encode(), TIMER_OUT.encode()], names.type))
    each = pc.if_else(dropped, b"", each)
    lists = pa.LargeListArray.from_arrays(pa.array(ends), pc.fill_null(each, b""))
    return pc.binary_join(lists, pa.scalar(b"", pa.large_binary()))


def _marks(contents: pa.LargeBinaryArray, write: str, first: int) -> pa.LargeBinaryArray:
    """Return METAQ_WRITE of each row. Only the checksums take a loop: Arrow and numpy have none."""
    data = memoryview(contents.buffers()[2] or b"")
    checks = [crc32(data[start:end]) for start, end in pairwise(_offsets(contents).tolist())]
    rows = pa.array(np.arange(first, first + len(contents))).cast(pa.large_string()).cast(pa.large_binary())
    digits = _fixed(_HEX[np.array(checks, ">u4").view(np.uint8)].view("S8"))
    return _join(f"{WRITE}\x01{write}/".encode(), rows, b"/", digits, b"\x02")


# -- arrays -----------------------------------------------------------------------------------------------------------


def _column(rows: pa.RecordBatch, name: str) -> pa.Array:
    return rows.column(name) if name in rows.schema.names else pa.nulls(len(rows))


def _join(*parts: pa.LargeBinaryArray | bytes) -> pa.LargeBinaryArray:
    """Return the parts of each row back to back; null where a part is null."""
    columns = [pa.scalar(part, pa.large_binary()) if isinstance(part, bytes) else part for part in parts]
    return pc.binary_join_element_wise(*columns, pa.scalar(b"", pa.large_binary()))


def _fixed(values: np.ndarray[Any, Any]) -> pa.LargeBinaryArray:
    """Return the bytes of each value."""
    ends = np.arange(len(values) + 1, dtype=np.int64) * values.itemsize
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(values), [None, pa.py_buffer(ends), pa.py_buffer(values)])


def _offsets(array: pa.LargeBinaryArray) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return where in the array's data each value begins, and where the last one ends."""
    ends = np.frombuffer(array.buffers()[1], np.int64)
    return ends[array.offset : array.offset + len(array) + 1].copy()


def _sizes(array: pa.LargeBinaryArray) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.diff(_offsets(array))

"""Arrow columns from the records of a partition, without a loop over messages.

Fields at fixed places are gathered by numpy, for all records at once. Byte strings are cut out by Arrow: it gets one array in
which a wanted string alternates with the bytes up to the next one, and takes every other string::

    record                    record
    88 bytes  body  the rest  88 bytes  body  the rest
              └─0──┘└───────1─────────┘└─2──┘└──3────┘     take 0, 2, 4, …: the column ``value``

So the bodies are copied once, by C code. Properties (``name 01 value 02``, repeated) are cut the same way, at the bytes 01
and 02. Only compressed bodies are handled one by one.

Checksums are not compared here: the broker or ``metaq.spark.reading.checking`` has done that.
"""

import logging
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from metaq.client.message import CORRELATION_ID, MESSAGE_TYPE, RESERVED, TTL
from metaq.errors import CorruptRecord, DecodeError
from metaq.protocol.inflating import MAX_INFLATED_BYTES, inflated
from metaq.protocol.properties import CLUSTER, KEYS, ORIGIN_ID, OWN, PREPARED_OFFSET, PRODUCER_GROUP, REPLY_TO, TIMER_OUT
from metaq.protocol.record import CHECKSUM_SIZE, FIXED_SIZE, HEADER_SIZE, MAGIC, TAGS
from metaq.protocol.remoting.bulk import Bulk
from metaq.protocol.sysflag import COMPRESSED

logger = logging.getLogger(__name__)

MOST_ROWS: Final = 20_000
MOST_BYTES: Final = 8 * 1024 * 1024
"""Limit of a batch, in bytes of records or of inflated bodies; a single larger message is a batch of its own."""

HEADERS: Final = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
SCHEMA: Final = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", pa.timestamp("us", "UTC")),
        ("timestampType", pa.int32()),
        ("tag", pa.string()),
    ]
)
"""The Kafka source's columns, and the tag. ``key`` is the first of the message's keys, ``timestamp`` the store time."""
SCHEMA_WITH_HEADERS: Final = SCHEMA.append(pa.field("headers", HEADERS))
"""``headers`` are the properties that users have set; null without any."""
ERROR: Final = pa.field("error", pa.string())
"""The last column, on request: why ``value`` could not be inflated and is as stored; null where it is as it was sent."""

STORE_TIME: Final = 1
"""The ``timestampType`` of all rows, which Kafka calls log append time."""

NOT_USERS: Final = RESERVED.union(
    OWN,
    (CLUSTER, ORIGIN_ID, PREPARED_OFFSET, PRODUCER_GROUP, REPLY_TO, CORRELATION_ID, MESSAGE_TYPE, TTL),
    ("1ST_POP_TIME", "ARRIVE_TIME", "BORN_TIMESTAMP", "BUYER_ID", "CONSUME_START_TIME", "CORRECTION_FLAG", "DUP_INFO"),
    ("EXTEND_UNIQ_INFO", "INNER_MULTI_QUEUE_OFFSET", "INSTANCE_ID", "MAX_OFFSET", "MAX_RECONSUME_TIMES", "MIN_OFFSET"),
    ("MQ2_FLAG", "MSG_REGION", "POP_CK", "POP_CK_OFFSET", "PUSH_REPLY_TIME", "RECONSUME_TIME", "TRACE_ON", "TRANSFER_FLAG"),
    ("TIMER_DELAY_LEVEL", "TIMER_DEL_UNIQKEY", "TIMER_DEQUEUE_MS", "TIMER_ENQUEUE_MS", "TIMER_ROLL_TIMES"),
    ("TRANSACTION_CHECK_TIMES", "__BORNHOST"),
) - {TIMER_OUT}
"""Properties that brokers and clients set: those that RocketMQ's clients reserve, and this broker's own. But when a delayed
message was due is told: nothing else in its row says so."""

Numbers = npt.NDArray[np.int64]
Truths = npt.NDArray[np.bool_]
Fields = npt.NDArray[np.void]
Bytes = npt.NDArray[np.uint8]

UNIT: Final = np.dtype([("log_offset", ">i8"), ("size", ">i4"), ("tag_hash", ">i4")])
HEADER: Final = np.dtype(
    {
        "names": ["size", "magic", "partition", "queue_offset", "log_offset", "sys_flag", "store_ms", "body_length"],
        "formats": [">i4", ">i4", ">i4", ">i8", ">i8", ">i4", ">i8", ">i4"],
        "offsets": [0, 4, 12, 20, 28, 36, 56, 84],
        "itemsize": HEADER_SIZE,
    }
)
"""The fields that are read from the 88 bytes at the beginning of a record (``metaq.protocol.record``)."""

SMALLEST_RECORD: Final = FIXED_SIZE + CHECKSUM_SIZE
_BEHIND_TOPIC: Final = FIXED_SIZE - HEADER_SIZE
"""Bytes of a record after its body that are the lengths of topic and properties."""
_NAME_END: Final = 1
_PAIR_END: Final = 2
_SPACE: Final = 0x20
_WORD: Final = np.dtype("<u4")
_MOST_TOLD: Final = 3
_NOWHERE: Final = np.iinfo(np.int64).max


class Piece(NamedTuple):
    """Consecutive messages of one partition, with their records anywhere in a buffer."""

    first: int
    """Offset of the first message."""
    starts: Numbers
    """Where in ``data`` each record begins: rising, and at most 1 GiB from the first to the last."""
    sizes: Numbers
    """Bytes of each record; 0 when the message is damaged or lost."""
    data: memoryview
    records: "Records | None" = None
    """The records of all messages that have one, where they are known to be sound."""


def piece_of(bulk: Bulk) -> Piece:
    """Return the messages of a bulk fetch."""
    sizes = np.frombuffer(bulk.units, UNIT)["size"].astype(np.int64)
    return Piece(bulk.first, np.cumsum(sizes) - sizes, sizes, bulk.records)


def missing(piece: Piece, until: int) -> list[range]:
    """Return the offsets before ``until`` whose messages are damaged or lost, as ranges."""
    lost = np.flatnonzero(piece.sizes[: max(0, until - piece.first)] == 0)
    breaks = np.flatnonzero(np.diff(lost) != 1)
    begins, ends = lost[np.append(0, breaks + 1)[: len(lost)]], lost[np.append(breaks, -1)[: len(lost)]]
    return [
        range(piece.first + begin, piece.first + end + 1) for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)
    ]


class Shape(NamedTuple):
    """The columns of rows, and how far their bodies are inflated."""

    headers: bool = False
    """Whether there is a column ``headers``."""
    errors: bool = False
    """Whether a column gives the reason for each body that could not be inflated; without it, the log does."""
    most: int = MAX_INFLATED_BYTES
    """Largest size in bytes to which one body is inflated."""

    @property
    def schema(self) -> pa.Schema:
        schema = SCHEMA_WITH_HEADERS if self.headers else SCHEMA
        return schema.append(ERROR) if self.errors else schema


def record_batches(piece: Piece, topic: str, partition: int, shape: Shape, *, until: int) -> Iterator[pa.RecordBatch]:
    """Yield the rows of the messages before the offset ``until``, at most ``MOST_ROWS`` and ``MOST_BYTES`` a batch.

    ``partition`` is the value of that column. Messages without a record have no row (``missing``). ``CorruptRecord`` for bytes
    that are no record.
    """
    there = np.flatnonzero(piece.sizes[: max(0, until - piece.first)])
    starts, sizes, ordinals = piece.starts[there], piece.sizes[there], there + piece.first
    records = piece.records
    if records is None:
        _check(sizes >= SMALLEST_RECORD, topic, partition, ordinals)
        records = Records(piece.data, starts, sizes)
        _check(records.are_sound(ordinals), topic, partition, ordinals)
    done = 0
    while done < len(there):
        rows = slice(done, done + fitting(sizes[done : done + MOST_ROWS]))
        batch = _batch(records.part(rows), topic, partition, ordinals[rows], shape)
        done += batch.num_rows
        yield batch


def _check(sound: Truths, topic: str, partition: int, ordinals: Numbers) -> None:
    if not sound.all():
        raise CorruptRecord(f"{topic}-{partition}, message {ordinals[np.argmin(sound)]}: its record is damaged")


def fitting(sizes: Numbers) -> int:
    """Return how many of the first sizes add up to at most ``MOST_BYTES``; 1 when the first alone is more."""
    return max(1, int(np.searchsorted(np.cumsum(sizes), MOST_BYTES, "right")))


class Records:
    """Records in a buffer, and where their parts are; each has at least ``SMALLEST_RECORD`` bytes there."""

    def __init__(self, data: memoryview, starts: Numbers, sizes: Numbers, fields: Fields | None = None) -> None:
        self.data = data
        self.starts = starts
        self.sizes = sizes
        self.fields: Fields = gathered(data, starts, HEADER) if fields is None else fields
        """The fields of ``HEADER``."""
        self.body_begins = starts + HEADER_SIZE
        self.body_ends = self.body_begins + self.fields["body_length"]
        self.properties_ends = starts + sizes - CHECKSUM_SIZE

    def part(self, rows: slice) -> "Records":
        """Return a slice of consecutive records."""
        return Records(self.data, self.starts[rows], self.sizes[rows], self.fields[rows])

    def are_sound(self, ordinals: Numbers) -> Truths:
        """Return for each record whether it can be that of a message with its offset; checksums are not compared."""
        fields = self.fields
        sound: Truths = (fields["size"] == self.sizes) & (fields["magic"] == MAGIC) & (fields["queue_offset"] == ordinals)
        sound &= (fields["body_length"] >= 0) & (self.body_ends + _BEHIND_TOPIC <= self.properties_ends)
        sound[sound] &= self.properties_begins(sound) <= self.properties_ends[sound]
        return sound

    def properties_begins(self, which: Truths | slice = slice(None)) -> Numbers:
        """Return where the properties of sound records begin."""
        ends = self.body_ends[which]
        begins: Numbers = ends + _BEHIND_TOPIC + np.frombuffer(self.data, np.uint8)[ends]
        return begins


def gathered(data: memoryview | Bytes, places: Numbers, fields: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return the fields that begin at each of the places."""
    size = fields.itemsize
    # a view with an element at every byte, so one index operation reads unaligned fields anywhere
    anywhere: npt.NDArray[Any] = np.ndarray((max(0, len(data) - size + 1),), f"V{size}", data, strides=(1,))
    return anywhere[places].view(fields)


def _batch(records: Records, topic: str, partition: int, ordinals: Numbers, shape: Shape) -> pa.RecordBatch:
    """Return the rows of sound records; only of the first ones when their inflated bodies are too large for one batch."""
    bodies = _cut(records.data, records.body_begins, records.body_ends)
    compressed = np.flatnonzero(records.fields["sys_flag"] & COMPRESSED)
    errors: dict[int, str] = {}
    if len(compressed):
        bodies, errors = _inflated(bodies, compressed, records.fields["sys_flag"], shape.most)
    if errors and not shape.errors:
        told = "; ".join(f"offset {ordinals[row]}: {error}" for row, error in list(errors.items())[:_MOST_TOLD])
        where = f"{topic}-{partition}"
        logger.warning("values are as they are stored partition=%s rows=%s first=%s", where, len(errors), told)
    count = len(bodies)
    properties = _properties(records)
    columns = [
        pa.nulls(count, pa.binary()) if properties is None else properties.keys()[:count],
        bodies,
        pa.repeat(pa.scalar(topic, pa.string()), count),
        pa.array(np.full(count, partition, np.int32)),
        pa.array(ordinals[:count]),
        pa.array(records.fields["store_ms"][:count].astype(np.int64) * 1000).view(pa.timestamp("us", "UTC")),
        pa.array(np.full(count, STORE_TIME, np.int32)),
        pa.nulls(count, pa.string()) if properties is None else properties.tags()[:count],
    ]
    if shape.headers:
        columns.append(pa.nulls(count, HEADERS) if properties is None else properties.headers()[:count])
    if shape.errors:
        columns.append(
            pa.array([errors.get(row) for row in range(count)], pa.string()) if errors else pa.nulls(count, pa.string())
        )
    return pa.RecordBatch.from_arrays(columns, schema=shape.schema)


def _cut(data: memoryview | Bytes, begins: Numbers, ends: Numbers) -> pa.BinaryArray:
    """Return the byte strings between these places, each of which begins at or after the end of the one before."""
    count = len(begins)
    if not count:
        return pa.array([], pa.binary())
    base = int(begins[0])
    offsets = np.empty(2 * count, np.int32)
    offsets[::2] = begins - base
    offsets[1::2] = ends - base
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data[base : int(ends[-1])])]
    alternating = pa.Array.from_buffers(pa.binary(), 2 * count - 1, buffers)
    return alternating.take(pa.array(np.arange(0, 2 * count, 2, dtype=np.int32)))


def _inflated(
    bodies: pa.BinaryArray, compressed: Numbers, sys_flags: npt.NDArray[np.int32], most: int
) -> tuple[pa.BinaryArray, dict[int, str]]:
    """Return the bodies with compressed ones inflated, and the reason for each that could not be, by its row.

    Only the first bodies are returned when all together would exceed ``MOST_BYTES``.
    """
    found = []
    errors = {}
    total, count = 0, len(bodies)
    for row in compressed.tolist():
        try:
            found.append(inflated(bodies[row].as_py(), int(sys_flags[row]), most))
        except DecodeError as error:
            found.append(bodies[row].as_py())
            errors[row] = str(error)
        total += len(found[-1])
        if total > MOST_BYTES:
            count = row + 1
            break
    choice = np.arange(count)
    choice[compressed[: len(found)]] = np.arange(len(found)) + count
    return pa.concat_arrays([bodies[:count], pa.array(found, pa.binary())]).take(pa.array(choice)), errors


def _properties(records: Records) -> "_Properties | None":
    """Return the records' properties; ``None`` when no record has any beside the checksum."""
    begins = records.properties_begins()
    if (begins == records.properties_ends).all():
        return None
    return _Properties(_cut(records.data, begins, records.properties_ends))


class _Properties:
    """The properties of many records, in the order of the records and in their order within each record.

    They are parsed as by ``metaq.protocol.record.decode_properties``: pieces without 01 or without a name are skipped, and of
    equal names in a record the last one counts.
    """

    def __init__(self, column: pa.BinaryArray) -> None:
        self._count = len(column)
        _, offsets, data = column.buffers()
        bounds = np.frombuffer(offsets, np.int32)[column.offset : column.offset + self._count + 1].astype(np.int64)
        self._data: Bytes = np.frombuffer(data, np.uint8)[: bounds[-1]]
        ends = np.flatnonzero(self._data == _PAIR_END)
        unclosed = bounds[1:][(np.diff(bounds) > 0) & (self._data[bounds[1:] - 1] != _PAIR_END)]
        if len(unclosed):
            ends = np.sort(np.concatenate([ends, unclosed]))
        begins = np.zeros_like(ends)
        begins[1:] = ends[:-1] + (self._data[ends[:-1]] == _PAIR_END)
        middles = np.flatnonzero(self._data == _NAME_END)
        if len(middles) != len(ends) or (middles < begins).any() or (middles >= ends).any():  # else each piece has exactly one
            middles = _first_from(middles, begins)
        pairs = (begins < middles) & (middles < ends)
        if not pairs.all():
            begins, middles, ends = begins[pairs], middles[pairs], ends[pairs]
        self._begins, self._middles, self._ends = begins, middles, ends
        self._rows = np.repeat(np.arange(self._count), np.diff(np.searchsorted(self._begins, bounds)))
        """The record of each pair."""

    def keys(self) -> pa.BinaryArray:
        """Return each record's first key, which is the first word of its property KEYS; null without one."""
        chosen = self._last_of(KEYS)
        begins, ends = self._middles[chosen] + 1, self._ends[chosen]
        spaces = self._data == _SPACE
        if spaces.any():
            begins = np.minimum(_first_from(np.flatnonzero(~spaces), begins), ends)
            ends = np.minimum(_first_from(np.flatnonzero(spaces), begins), ends)
        there = begins < ends
        return self._column(self._rows[chosen][there], _cut(self._data, begins[there], ends[there]))

    def tags(self) -> pa.StringArray:
        """Return each record's tag; null without one, which is not the same as an empty one."""
        chosen = self._last_of(TAGS)
        return self._column(self._rows[chosen], _texts(_cut(self._data, self._middles[chosen] + 1, self._ends[chosen])))

    def headers(self) -> pa.ListArray:
        """Return each record's pairs that users have set; null without any."""
        names = _texts(_cut(self._data, self._begins, self._middles)).dictionary_encode()
        users = np.array([name not in NOT_USERS for name in names.dictionary.to_pylist()], np.bool_)
        numbers = names.indices.to_numpy().astype(np.int64)
        chosen = np.flatnonzero(users[numbers])
        counts = np.bincount(self._rows[chosen], minlength=self._count)
        if counts.max() > 1:  # of equal names in a record the last one counts: the first one of the reversed array
            _, latest = np.unique((self._rows[chosen] * len(users) + numbers[chosen])[::-1], return_index=True)
            chosen = chosen[np.sort(len(chosen) - 1 - latest)]
            counts = np.bincount(self._rows[chosen], minlength=self._count)
        values = _cut(self._data, self._middles[chosen] + 1, self._ends[chosen])
        pairs = pa.StructArray.from_arrays(
            [names.dictionary.take(pa.array(numbers[chosen])), values], fields=list(HEADERS.value_type)
        )
        offsets = np.append(0, np.cumsum(counts)).astype(np.int32)
        return pa.ListArray.from_arrays(pa.array(offsets), pairs, type=HEADERS, mask=pa.array(counts == 0))

    def _last_of(self, name: str) -> Numbers:
        """Return the last pair with this name, which has four letters, of each record that has one."""
        found = np.flatnonzero(self._middles - self._begins == _WORD.itemsize)
        words = gathered(self._data, self._begins[found], _WORD)
        found = found[words == np.frombuffer(name.encode(), _WORD)]
        rows = self._rows[found]
        latest: Numbers = found[np.append(rows[1:] != rows[:-1], True)[: len(found)]]
        return latest

    def _column(self, rows: Numbers, values: pa.Array) -> pa.Array:
        """Return a column with the values in these rows and nulls in all others."""
        if len(rows) == self._count:
            return values
        choice = np.zeros(self._count, np.int64)
        choice[rows] = np.arange(len(rows))
        absent = np.ones(self._count, np.bool_)
        absent[rows] = False
        return values.take(pa.array(choice, mask=absent))


def _first_from(found: Numbers, places: Numbers) -> Numbers:
    """Return the first number at or after each place (both rising); ``_NOWHERE`` where there is none."""
    found = np.append(found, _NOWHERE)
    following: Numbers = found[np.searchsorted(found, places)]
    return following


def _texts(strings: pa.BinaryArray) -> pa.StringArray:
    """Return the strings as text; bytes that are not UTF-8 are replaced, as everywhere in the client."""
    try:
        return strings.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array([string.decode(errors="replace") for string in strings.to_pylist()], pa.string())

"""The commit-log record (specs: store format, section 1), which is also what a binary pull returns.

All integers big-endian and signed. Version 1 with IPv4 hosts, which is what this broker writes::

    at  size  field                      at   size  field
     0     4  total size                 56      8  store timestamp, ms
     4     4  magic DAA320A7             64      8  store host: 4 address bytes, port as int32
     8     4  CRC-32 of the body         72      4  reconsume times
    12     4  partition                  76      8  text position (RocketMQ: prepared transaction offset)
    16     4  flag                       84      4  body length n
    20     8  queue offset               88      n  body
    28     8  log offset               88+n      1  topic length t
    36     4  sys flag                   89+n    t  topic
    40     8  born timestamp, ms       89+n+t    2  properties length p
    48     8  born host                91+n+t    p  properties: name 01 value 02, repeated

The last property is always ``__CRC32#``, 20 bytes: the name, 01, ten decimal digits with the *least* significant digit
first, 02. It is the CRC-32 (top bit cleared) of all bytes before those 20. The top bit may go: a single flipped bit always
changes one of the other 31 in any record below 512 MiB.

A blank record ends a segment: 4 bytes size (the rest of the file), 4 bytes magic CBD43194.
"""

import struct
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from librt.strings import BytesWriter, read_i64_be, write_i16_be, write_i32_be, write_i64_be

from metaq.checksum import crc32

MAGIC: Final = -626843481
"""DAA320A7 as a number of 32 bits with a sign."""
MAGIC_BYTES: Final = b"\xda\xa3\x20\xa7"
BLANK_MAGIC: Final = -875286124
"""CBD43194"""

HEADER: Final = struct.Struct(">iiiiiqqiq8sq8siqi")
HEADER_SIZE: Final = 88
BLANK: Final = struct.Struct(">ii")
BLANK_SIZE: Final = 8
FIXED_SIZE: Final = 91
"""Bytes of a record other than body, topic and properties."""
CHECKSUM_SIZE: Final = 20
_CHECKSUM_NAME: Final = int.from_bytes(b"__CRC32#")
_DIGITS: Final = [int.from_bytes(f"{number:04}"[::-1].encode()) for number in range(10_000)]
_LAST_DIGITS: Final = [int.from_bytes(f"{number:02}"[::-1].encode()) for number in range(100)]
"""The digits of numbers in the order of a checksum property, least significant first, each as a number of as many bytes."""
_MOST_JOINED: Final = 4096
"""Bytes of a record that is copied to others: a larger one costs less as a part of its own."""
_PART_BYTES: Final = 128 * 1024

GROUP_MEMBER: Final = 1 << 30
"""Bit of the system flag: the record belongs to a group (``metaq.store.recordgroups``). Only the store sets it."""

MAX_TOPIC_LENGTH: Final = 127
MAX_PROPERTIES_LENGTH: Final = 32767
TAGS: Final = "TAGS"

MIDDLE_SIZE: Final = 40
"""Bytes of the ``constant_middle``."""

_MOST_WRITTEN: Final = 16 * 1024
"""Bytes of a body that a ``RecordWriter`` keeps memory for."""
_PLACE: Final = struct.Struct(">ii20xq")  # total, magic, log offset
_IDENTITY: Final = struct.Struct(">12xi4xq48xqi")  # partition, queue offset, text position, body length
_STORE_MS: Final = struct.Struct(">56xq")
_SYS_FLAG: Final = struct.Struct(">i")

assert _IDENTITY.size == HEADER_SIZE
assert HEADER.size == HEADER_SIZE


View = memoryview
"""An alias, because mypyc does not find the builtin in the body of a named tuple."""


class Record(NamedTuple):
    """One decoded record; ``body`` and ``properties`` are slices of the buffer that was decoded."""

    size: int
    body_crc: int
    partition: int
    flag: int
    queue_offset: int
    log_offset: int
    sys_flag: int
    born_ms: int
    born_host: bytes
    store_ms: int
    store_host: bytes
    reconsume_times: int
    text_position: int
    body: View
    topic: str
    properties: bytes
    """Without the checksum property."""


class RecordIdentity(NamedTuple):
    """The message that a record holds: its topic, partition and positions."""

    topic: str
    partition: int
    queue_offset: int
    text_position: int


def _write_checksum(out: BytesWriter, crc: int) -> None:
    """Write the checksum property with a CRC, whose top bit is left out."""
    crc &= 0x7FFFFFFF
    high = crc // 10_000
    highest = high // 10_000
    write_i64_be(out, _CHECKSUM_NAME)
    out.append(1)
    write_i32_be(out, _DIGITS[crc - high * 10_000])
    write_i32_be(out, _DIGITS[high - highest * 10_000])
    write_i16_be(out, _LAST_DIGITS[highest])
    out.append(2)


def checksum_property(data: bytes | memoryview) -> bytes:
    """Return the 20 bytes that close a record whose other bytes are ``data``."""
    return checksum_properties([data])


def checksum_properties(data: Sequence[bytes | memoryview]) -> bytes:
    """Return the checksum properties of many records, one after the other."""
    out = BytesWriter()
    for each in data:
        _write_checksum(out, crc32(each))
    return out.getvalue()


def add_closed(records: list[bytes], parts: list[bytes]) -> None:
    """Append records to ``parts``, each with its checksum property; small ones stand together in one part.

    Parts of two for each record, which are joined later, take twice as long.
    """
    out = BytesWriter()
    for record in records:
        size = len(record)
        if len(out) and (size > _MOST_JOINED or len(out) + size > _PART_BYTES):
            parts.append(out.getvalue())
            out.truncate(0)
        if size > _MOST_JOINED:
            parts.append(record)
        else:
            out.write(record)
        _write_checksum(out, crc32(record))
    if len(out):
        parts.append(out.getvalue())


def host_bytes(address: str, port: int) -> bytes:
    """Return an IPv4 address and port as a record's host field; anything else (a name, IPv6, a unix path) becomes 0.0.0.0."""
    parts = address.removeprefix("::ffff:").split(".")
    numbers = [int(part) for part in parts if part.isascii() and part.isdigit() and int(part) < 256]
    if len(parts) != 4 or len(numbers) != 4:
        numbers = [0, 0, 0, 0]
    return struct.pack(">4Bi", *numbers, port)


def constant_middle(
    sys_flag: int, born_ms: int, born_host: bytes, store_ms: int, store_host: bytes, reconsume_times: int = 0
) -> bytes:
    """Return the 40 header bytes that all records of one text session in one turn of the loop share."""
    out = BytesWriter()
    write_i32_be(out, sys_flag & ~GROUP_MEMBER)
    write_i64_be(out, born_ms)
    out.write(born_host)
    write_i64_be(out, store_ms)
    out.write(store_host)
    write_i32_be(out, reconsume_times)
    return out.getvalue()


class RecordWriter:
    """Makes records, one after the other in the same memory: half the cost of new memory for each."""

    def __init__(self) -> None:
        self._out = BytesWriter()

    def unchecked(
        self,
        size: int,
        crc: int,
        partition: int,
        flag: int,
        queue_offset: int,
        log_offset: int,
        middle: bytes,
        text_position: int,
        body: bytes,
        tail: bytes,
    ) -> bytes:
        """Return a record up to its checksum property, which ``size`` includes. Raise ``ValueError`` for a number out of range.

        ``middle`` is a ``constant_middle``: the fields around it are those that differ between the records of one connection in
        one turn of the loop. ``tail`` is a ``record_tail``.
        """
        out = self._out
        out.truncate(0)
        write_i32_be(out, size)
        write_i32_be(out, MAGIC)
        write_i32_be(out, crc)
        write_i32_be(out, partition)
        write_i32_be(out, flag)
        write_i64_be(out, queue_offset)
        write_i64_be(out, log_offset)
        out.write(middle)
        write_i64_be(out, text_position)
        write_i32_be(out, len(body))
        if len(body) > _MOST_WRITTEN:
            return out.getvalue() + body + tail
        out.write(body)
        out.write(tail)
        return out.getvalue()


def store_ms_of(middle: bytes) -> int:
    """Return the store time in a ``constant_middle``."""
    return read_i64_be(middle, 20)


def with_sys_flag(middle: bytes, bits: int) -> bytes:
    """Return a ``constant_middle`` with more bits set in its system flag."""
    sys_flag: int = _SYS_FLAG.unpack_from(middle)[0]
    return _SYS_FLAG.pack(sys_flag | bits) + middle[_SYS_FLAG.size :]


def record_tail(topic: str, properties: bytes) -> bytes:
    """Return the bytes after the body, up to the checksum property, which the length of the properties includes."""
    name = topic.encode("ascii")
    return b"%b%b%b%b" % (
        bytes((len(name),)),
        name,
        struct.pack(">h", len(properties) + CHECKSUM_SIZE),
        properties,
    )


def longer_tail(tail: bytes, properties: bytes) -> bytes:
    """Return a ``record_tail`` with properties, made from the same topic's tail without any: a third of the cost."""
    out = BytesWriter()
    out.write(tail)
    out.truncate(len(tail) - 2)
    write_i16_be(out, len(properties) + CHECKSUM_SIZE)
    out.write(properties)
    return out.getvalue()


class TailWriter:
    """Makes longer tails of the same topic, one after the other in the same memory: two thirds of the cost."""

    def __init__(self, tail: bytes) -> None:
        """Make it for a topic's tail without properties."""
        self._out = BytesWriter()
        self._out.write(tail)
        self._head_size = len(tail) - 2

    def longer(self, properties: bytes) -> bytes:
        """Return the same as ``longer_tail``."""
        out = self._out
        out.truncate(self._head_size)
        write_i16_be(out, len(properties) + CHECKSUM_SIZE)
        out.write(properties)
        return out.getvalue()


def encode_properties(properties: Iterable[tuple[str, str]]) -> bytes:
    """Return name-value pairs in the record's form; each pair ends in 02."""
    return "".join(f"{name}\x01{value}\x02" for name, value in properties).encode()


def decode_properties(data: bytes) -> dict[str, str]:
    """Return the values by name. Pieces without 01 or with an empty name are skipped; of equal names the last wins."""
    pairs: dict[str, str] = {}
    for piece in data.decode(errors="replace").split("\x02"):
        name, separator, value = piece.partition("\x01")
        if name and separator:
            pairs[name] = value
    return pairs


def java_hash(text: str) -> int:
    """Return Java's ``String.hashCode``: over UTF-16 code units, as a signed 32-bit number."""
    data = text.encode("utf-16-be", "surrogatepass")
    value = 0
    for unit in struct.unpack(f">{len(data) // 2}H", data):
        value = (31 * value + unit) & 0xFFFFFFFF
    return value - (1 << 32) if value & 0x80000000 else value


def is_intact(data: memoryview, log_offset: int) -> bool:
    """Return whether ``data`` is exactly one record of this store, written at ``log_offset``, with every bit as written."""
    size = len(data)
    if size < FIXED_SIZE + CHECKSUM_SIZE or _PLACE.unpack_from(data) != (size, MAGIC, log_offset):
        return False
    end = size - CHECKSUM_SIZE
    return data[end:] == checksum_property(data[:end])


def identity(data: memoryview) -> RecordIdentity:
    """Return which message an intact record holds, at a fraction of the cost of ``decode_record``."""
    partition, queue_offset, text_position, length = _IDENTITY.unpack_from(data)
    topic_at = HEADER_SIZE + length
    topic = str(data[topic_at + 1 : topic_at + 1 + data[topic_at]], "ascii")
    return RecordIdentity(topic, partition, queue_offset, text_position)


def text_position(data: memoryview) -> int:
    """Return the text position of the message in an intact record."""
    position: int = _IDENTITY.unpack_from(data)[2]
    return position


def store_ms(data: memoryview) -> int:
    """Return when an intact record was stored, in Unix milliseconds."""
    moment: int = _STORE_MS.unpack_from(data)[0]
    return moment


def decode_record(data: bytes | memoryview) -> Record:
    """Decode one whole record whose integrity is already known (``is_intact``)."""
    view = memoryview(data)
    fields = HEADER.unpack_from(view)
    body_end = HEADER_SIZE + fields[14]
    topic_end = body_end + 1 + view[body_end]
    return Record(
        size=fields[0],
        body_crc=fields[2],
        partition=fields[3],
        flag=fields[4],
        queue_offset=fields[5],
        log_offset=fields[6],
        sys_flag=fields[7],
        born_ms=fields[8],
        born_host=fields[9],
        store_ms=fields[10],
        store_host=fields[11],
        reconsume_times=fields[12],
        text_position=fields[13],
        body=view[HEADER_SIZE:body_end],
        topic=str(view[body_end + 1 : topic_end], "ascii"),
        properties=bytes(view[topic_end + 2 : fields[0] - CHECKSUM_SIZE]),
    )


def property_of(record: bytes | memoryview, mark: bytes) -> str | None:
    """Return a property of an intact record, ``None`` without it. ``mark`` is its name between the bytes 02 and 01."""
    pairs = b"\x02%b\x02" % decode_record(record).properties  # clients may leave the last separator out
    begin = pairs.find(mark)
    if begin < 0:
        return None
    begin += len(mark)
    return pairs[begin : pairs.find(b"\x02", begin)].decode(errors="replace")

"""The text form of many records, which gets are answered with."""

import struct

from hypothesis import given
from hypothesis import strategies as st

from metaq.checksum import crc32
from metaq.protocol.properties import MESSAGE_ID
from metaq.protocol.text.messages import Stored, encode_run, encode_stored, plain_overhead
from tests.support.wire import stored_record

TOPIC = "orders"
BASE = 3 << 47
START = 100
"""The log offset at which the part of the log begins."""
PROPERTIES = st.sampled_from([b"", b"TAGS\x01paid\x02", MESSAGE_ID.encode() + b"\x0112345\x02", b"KEYS\x01k\x02"])
BODIES = st.binary(max_size=60) | st.sampled_from([2000, 20_000, 70_000]).map(bytes)
GAPS = st.sampled_from([0, 0, 0, 90, 3000, 80_000])
"""Bytes of other partitions before a record."""
MESSAGES = st.lists(st.tuples(BODIES, st.sampled_from([0, 1, 6, -2]), PROPERTIES, GAPS), min_size=1, max_size=12)


@given(MESSAGES, st.integers(1, 1200) | st.integers(1, 1 << 18))
def test_a_run_is_encoded_as_each_of_its_records(messages: list[tuple[bytes, int, bytes, int]], limit: int) -> None:
    """SG-043: the first of any size, then as many as fit; small and large ones, close together and far from each other."""
    log, units = b"", list[tuple[int, int, int]]()
    for body, flag, properties, gap in messages:
        log += bytes(gap)
        data = stored_record(
            TOPIC, body, crc32(body) & 0x7FFFFFFF, flag=flag, log_offset=START + len(log), properties=properties
        )
        units.append((START + len(log), len(data), 0))
        log += data
    view, overhead = memoryview(log), plain_overhead(TOPIC)
    expected: list[bytes | memoryview] = []
    taken = total = 0
    for offset, size, _ in units:
        one: list[bytes | memoryview] = []
        more = encode_stored(Stored(view, offset - START, size, offset), overhead, BASE, one)
        if taken and total + more > limit:
            break
        expected += one
        taken, total = taken + 1, total + more
        if total >= limit:
            break
    out: list[bytes | memoryview] = []
    packed = b"".join([struct.pack(">qii", *unit) for unit in units])
    assert encode_run(view, START, packed, overhead, BASE, limit, out) == (taken, total)
    assert b"".join(out) == b"".join(expected)

"""The stored record and the text form of a message: round trips, and proof that no single flipped bit goes unnoticed."""

import random
import struct
from typing import Final, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.checksum import body_crc
from metaq.errors import BadRequest, CorruptRecord
from metaq.message import Message, TextPosition
from metaq.protocol.record import (
    CHECKSUM_SIZE,
    FIXED_SIZE,
    MAX_TOPIC_LENGTH,
    TAGS,
    decode_properties,
    decode_record,
    encode_properties,
    host_bytes,
    is_intact,
    java_hash,
)
from metaq.protocol.text.messages import (
    COMPRESSED_FLAG,
    HEADER_SIZE_TEXT,
    MAX_ATTRIBUTE_BYTES,
    decode_text_messages,
    join_attribute,
    split_attribute,
)
from tests.support.wire import BORN_MS, stored_record, text_form

EPOCH: Final = 3 << 47

int32 = st.integers(-(1 << 31), (1 << 31) - 1)
natural64 = st.integers(0, (1 << 63) - 1)
topics = st.text("abcXYZ019_-%|", min_size=1, max_size=MAX_TOPIC_LENGTH)
clean = st.characters(exclude_categories=["Cs"], exclude_characters="\x01\x02")
attributes = st.none() | st.just("") | st.text(clean, max_size=40)
properties = st.dictionaries(st.text(clean, min_size=1, max_size=20), st.text(clean, max_size=40), max_size=5)


class Drawn(NamedTuple):
    """The drawn parts of a put."""

    flag: int
    attribute: str | None
    payload: bytes


puts = st.builds(Drawn, int32, attributes, st.binary(max_size=200))


def record_of(put: Drawn, log_offset: int) -> bytes:
    tags = b"" if put.attribute is None else encode_properties([(TAGS, put.attribute)])
    return stored_record("t", put.payload, body_crc(put.payload), flag=put.flag, log_offset=log_offset, properties=tags)


@given(topics, st.binary(max_size=300), properties, int32, int32, natural64, natural64, natural64)
def test_records_round_trip(
    topic: str,
    body: bytes,
    pairs: dict[str, str],
    flag: int,
    partition: int,
    ordinal: int,
    log_offset: int,
    position: int,
) -> None:
    """MQ-011, MQ-014: every field of a record comes back as it was written."""
    encoded = encode_properties(pairs.items())
    data = stored_record(
        topic,
        body,
        body_crc(body),
        flag=flag,
        partition=partition,
        ordinal=ordinal,
        log_offset=log_offset,
        position=position,
        properties=encoded,
    )
    assert len(data) == FIXED_SIZE + len(body) + len(topic) + len(encoded) + CHECKSUM_SIZE
    assert is_intact(memoryview(data), log_offset)
    record = decode_record(memoryview(data))
    assert (record.size, record.topic, bytes(record.body), record.properties) == (len(data), topic, body, encoded)
    assert (record.flag, record.partition, record.queue_offset) == (flag, partition, ordinal)
    assert (record.log_offset, record.text_position, record.body_crc) == (log_offset, position, body_crc(body))
    assert (record.born_ms, record.store_ms) == (BORN_MS, BORN_MS + 1)
    assert (record.born_host, record.store_host) == (host_bytes("10.0.0.9", 40_000), host_bytes("10.0.0.1", 8123))
    assert (record.sys_flag, record.reconsume_times) == (0, 0)
    assert decode_properties(record.properties) == pairs


@given(topics, st.binary(max_size=40), attributes, natural64)
def test_every_flipped_bit_of_a_record_is_found(topic: str, body: bytes, attribute: str | None, log_offset: int) -> None:
    """No bit of a record, its checksum and its own size included, can change unnoticed."""
    tags = b"" if attribute is None else encode_properties([(TAGS, attribute)])
    data = bytearray(stored_record(topic, body, body_crc(body), log_offset=log_offset, properties=tags))
    view = memoryview(data)
    assert is_intact(view, log_offset)
    for bit in range(8 * len(data)):
        data[bit >> 3] ^= 1 << (bit & 7)
        assert not is_intact(view, log_offset), f"bit {bit & 7} of byte {bit >> 3} was flipped"
        data[bit >> 3] ^= 1 << (bit & 7)


@given(seed=st.integers(0, 1 << 32))
def test_flipped_bits_of_a_large_record_are_found(seed: int) -> None:
    """The checksum has lost its top bit; in a record of this size that hides no single flipped bit."""
    chance = random.Random(seed)
    body = chance.randbytes(chance.randrange(50_000, 100_000))
    data = bytearray(stored_record("t", body, body_crc(body)))
    view = memoryview(data)
    for _ in range(20):
        bit = chance.randrange(8 * len(data))
        data[bit >> 3] ^= 1 << (bit & 7)
        assert not is_intact(view, 0), f"bit {bit & 7} of byte {bit >> 3} was flipped"
        data[bit >> 3] ^= 1 << (bit & 7)
    assert is_intact(view, 0)


@given(puts, natural64, natural64, st.binary(min_size=1, max_size=200))
def test_a_record_is_intact_only_whole_and_in_its_place(put: Drawn, log_offset: int, other: int, rest: bytes) -> None:
    """A record found elsewhere in the log, cut or with more behind it, is not taken for one."""
    data = record_of(put, log_offset)
    view = memoryview(data)
    assert is_intact(view, log_offset)
    assert is_intact(view, other) == (other == log_offset)
    assert not is_intact(memoryview(data + rest), log_offset)
    assert not any(is_intact(view[:size], log_offset) for size in range(len(data)))


@given(st.binary(max_size=300))
def test_random_bytes_are_no_record(data: bytes) -> None:
    assert not is_intact(memoryview(data), 0)


@given(st.lists(puts, max_size=6), natural64.map(lambda offset: offset >> 20), st.integers(0, 1 << 40))
def test_messages_round_trip(drawn: list[Drawn], log_offset: int, position: int) -> None:
    """MQ-010, MQ-011, MQ-012: payload, attribute (none is not empty), flag bits and id survive the text form."""
    data = b""
    expected = []
    for one in drawn:
        put = one._replace(flag=one.flag & ~COMPRESSED_FLAG)  # bodies are not what that says
        record = record_of(put, log_offset)
        encoded = text_form("t", record, EPOCH, log_offset)
        start, position = position, position + len(encoded)
        flag = put.flag & ~1 | (put.attribute is not None)
        places = TextPosition(start), TextPosition(position)
        expected.append(Message(EPOCH | log_offset, flag, put.attribute, put.payload, *places))
        data += encoded
        log_offset += len(record)
    first = position - len(data)
    assert list(decode_text_messages(data, first)) == expected


@given(puts)
def test_the_text_form_holds_the_body_of_the_put(put: Drawn) -> None:
    """MQ-011, MQ-110: a reader gets the very bytes that the producer sent, under the producer's checksum."""
    bit, body = join_attribute(put.attribute, put.payload)
    flag = put.flag & ~1 | bit
    assert split_attribute(flag, body) == (put.attribute, put.payload)
    encoded = text_form("t", record_of(put, 0), EPOCH, 0)
    assert encoded == struct.pack(">iiqi", len(body), body_crc(body), EPOCH, flag) + body


@given(st.lists(puts, min_size=1, max_size=4), st.data())
def test_a_cut_reply_gives_the_whole_messages_in_it(drawn: list[Drawn], data: st.DataObject) -> None:
    """MQ-061: what a broker cut at `maxSize` is read as far as it is whole."""
    encoded = [text_form("t", record_of(put, 0), EPOCH, 0) for put in drawn]
    whole = b"".join(encoded)
    cut = data.draw(st.integers(0, len(whole)))
    messages = list(decode_text_messages(whole[:cut], 0))
    end = messages[-1].next_position if messages else 0
    assert [message.body for message in messages] == [put.payload for put in drawn[: len(messages)]]
    assert end <= cut
    assert len(messages) == len(drawn) or cut < end + len(encoded[len(messages)])


@given(puts, st.data())
def test_a_flipped_bit_of_a_body_is_found_by_its_reader(put: Drawn, data: st.DataObject) -> None:
    """MQ-110: a client never takes a changed body for the one that was put."""
    encoded = bytearray(text_form("t", record_of(put, 0), EPOCH, 0))
    covered = [*range(4, 8), *range(HEADER_SIZE_TEXT, len(encoded))]
    place, bit = data.draw(st.sampled_from(covered)), data.draw(st.integers(0, 7))
    encoded[place] ^= 1 << bit
    with pytest.raises(CorruptRecord, match="position 50"):
        list(decode_text_messages(bytes(encoded), 50))


@given(st.binary(max_size=200))
def test_bytes_that_are_no_messages_are_refused_or_cut(data: bytes) -> None:
    """A client that gets nonsense raises `CorruptRecord` or stops; it never reads beyond it or loops."""
    try:
        messages = list(decode_text_messages(data, 0))
    except CorruptRecord:
        return
    assert sum(HEADER_SIZE_TEXT for _ in messages) <= len(data)


@pytest.mark.parametrize(
    ("flag", "body", "reason"),
    [
        (1, b"", "its length does not fit a body of 0 bytes"),
        (1, b"\0\0\0", "its length does not fit a body of 3 bytes"),
        (1, b"\0\0\0\1", "its length does not fit a body of 4 bytes"),
        (-1, b"\xff\xff\xff\xff....", "its length does not fit a body of 8 bytes"),
        (3, b"\0\0\0\2a\xffb", "is not UTF-8"),
        (1, b"\0\0\0\1\1", "holds the byte 01 or 02"),
        (1, b"\0\0\0\1\2", "holds the byte 01 or 02"),
        (1, struct.pack(">i", MAX_ATTRIBUTE_BYTES + 1) + b"a" * (MAX_ATTRIBUTE_BYTES + 1), "is longer than 16384"),
    ],
)
def test_attributes_that_cannot_be_kept_are_refused(flag: int, body: bytes, reason: str) -> None:
    """MQ-012: an attribute is kept as it is or refused."""
    with pytest.raises(BadRequest, match=reason):
        split_attribute(flag, body)


def test_the_longest_attribute_is_taken() -> None:
    """MQ-012: 16 KiB."""
    longest = "a" * MAX_ATTRIBUTE_BYTES
    put = Drawn(1, longest, b"x")
    assert split_attribute(*join_attribute(longest, b"x")) == (longest, b"x")
    [message] = decode_text_messages(text_form("t", record_of(put, 0), EPOCH, 0), 0)
    assert message.attribute == longest


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", 0),
        ("a", 97),
        ("hello", 99162322),
        ("TagA", 2598919),
        ("polygenelubricants", -2147483648),
        ("\U0001f600", 31 * 0xD83D + 0xDE00),
        ("\ud83d", 0xD83D),
        ("属性", 31 * 0x5C5E + 0x6027),
    ],
)
def test_java_hash_of_known_strings(text: str, expected: int) -> None:
    """MQ-015: the tag's hash in an index unit is the one that Java clients compute."""
    assert java_hash(text) == expected


@given(st.text(max_size=50), st.text(max_size=50))
def test_java_hash_is_a_polynomial_in_31(first: str, second: str) -> None:
    """MQ-015: over UTF-16 code units, wrapped to 32 bits with sign."""
    units = len(second.encode("utf-16-be", "surrogatepass")) // 2
    together = java_hash(first + second)
    assert -(1 << 31) <= together < 1 << 31
    assert (together - java_hash(first) * pow(31, units, 1 << 32) - java_hash(second)) % (1 << 32) == 0


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1", b"\x7f\0\0\1"),
        ("255.255.255.255", b"\xff\xff\xff\xff"),
        ("256.0.0.1", b"\0\0\0\0"),
        ("1.2.3", b"\0\0\0\0"),
        ("1.2.3.4.5", b"\0\0\0\0"),
        ("1.2.3.-4", b"\0\0\0\0"),
        ("1.2.3.٤", b"\0\0\0\0"),
        ("::1", b"\0\0\0\0"),
        ("broker-1", b"\0\0\0\0"),
        ("", b"\0\0\0\0"),
    ],
)
def test_hosts_in_records(address: str, expected: bytes) -> None:
    assert host_bytes(address, 8123) == expected + b"\0\0\x1f\xbb"


@given(st.text(max_size=30) | st.ip_addresses().map(str))
def test_any_host_takes_eight_bytes(address: str) -> None:
    assert len(host_bytes(address, 65535)) == 8


@given(st.binary(max_size=200))
def test_any_properties_are_read(data: bytes) -> None:
    """Properties of foreign clients may be anything; what is no pair is skipped, and of equal names the last wins."""
    assert all(name and "\x02" not in name + value for name, value in decode_properties(data).items())
    assert decode_properties(data + b"\x02n\x01old\x02n\x01new")["n"] == "new"

"""Acks of many messages: both kinds of names, both forms of bits, and limits."""

import base64
import json
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.errors import BadRequest
from metaq.protocol.remoting.leases.acks import (
    MOST_ACKS,
    MOST_BIT_BYTES,
    MOST_OFFSETS,
    AckRow,
    BatchAck,
    acks_of,
    decode_batch_ack,
    encode_batch_ack,
)
from metaq.protocol.remoting.leases.receipts import Receipt

ROW: Final[dict[str, Any]] = {
    "c": "g", "t": "t", "r": "0", "so": 100, "q": 3, "rq": 4711, "pt": 1700000000123, "it": 60000, "b": "BQE=",
}  # fmt: skip
LONG: Final[dict[str, Any]] = {
    "consumerGroup": "g", "topic": "t", "retry": "0", "startOffset": 100, "queueId": 3, "reviveQueueId": 4711,
    "popTime": 1700000000123, "invisibleTime": 60000, "bitSet": [5, 1],
}  # fmt: skip
ACK: Final = AckRow("g", "t", 0, 100, 3, 4_711, 1_700_000_000_123, 60_000, b"\x05\x01")
GOLDEN: Final = (
    b'{"brokerName":"broker-a","acks":[{"c":"g","t":"t","r":"0","so":100,"q":3,"rq":4711,'
    b'"pt":1700000000123,"it":60000,"b":"BQE="}]}'
)

numbers = st.integers(0, (1 << 63) - 1)
int32s = st.integers(0, (1 << 31) - 1)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=10)
acks = st.builds(
    AckRow, texts, texts, st.integers(0, 2), numbers, int32s, int32s, numbers, numbers, st.binary(max_size=MOST_BIT_BYTES // 8)
)


def body_of(*rows: Any, **members: Any) -> bytes:
    return json.dumps({"brokerName": "broker-a", "acks": list(rows), **members}).encode()


def test_body_is_as_the_proxy_writes_it() -> None:
    """Golden bytes, there and back; bit i of the bits is the offset so + i."""
    batch = BatchAck("broker-a", (ACK,))
    assert encode_batch_ack(batch) == GOLDEN
    assert decode_batch_ack(GOLDEN) == batch
    assert list(ACK.offsets()) == [100, 102, 108]


@pytest.mark.parametrize(
    "row",
    [ROW, LONG, ROW | {"b": [5, 1]}, ROW | {"b": [5, 1, 0]}, LONG | {"bitSet": "BQE="}, ROW | {"r": None}, ROW | {"x": 1}],
)
def test_both_kinds_of_names_and_of_bits_are_read(row: dict[str, Any]) -> None:
    """RocketMQ's own broker reads short and long names; fastjson writes bytes as text or as a list."""
    (ack,) = decode_batch_ack(body_of(row)).acks
    assert ack._replace(bits=ACK.bits) == ACK
    assert list(ack.offsets()) == [100, 102, 108]


def test_bytes_of_a_list_may_be_negative() -> None:
    """Java's are."""
    (ack,) = decode_batch_ack(body_of(ROW | {"b": [-128, -1]})).acks
    assert ack.bits == b"\x80\xff"


@pytest.mark.parametrize("body", [b"{}", b'{"acks":null}', b'{"brokerName":null,"acks":[]}'])
def test_a_batch_may_be_empty(body: bytes) -> None:
    """What to answer is the broker's affair."""
    assert decode_batch_ack(body) == BatchAck("", ())


def test_an_ack_may_be_of_nothing() -> None:
    """Absent bits, or null, or none that is set."""
    for bits in (None, "", [], [0, 0], "AAA="):
        assert list(decode_batch_ack(body_of(ROW | {"b": bits})).acks[0].offsets()) == []


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "JSON"),
        (b"[]", "a list where a batch of acks should be"),
        (b'{"acks":{}}', "acks is not a list"),
        (body_of(7), "7 where a row of acks should be"),
        (body_of(ROW | {"c": None}), "c is None"),
        (body_of(ROW | {"q": "3"}), "q is '3'"),
        (body_of(ROW | {"q": 1 << 31}), "q is"),
        (body_of(ROW | {"q": -1}), "negative"),
        (body_of(ROW | {"so": -1}), "negative"),
        (body_of(ROW | {"so": 1.5}), "so is 1.5"),
        (body_of(ROW | {"so": True}), "so is True"),
        (body_of(ROW | {"r": "3"}), "r is '3'"),
        (body_of(ROW | {"b": "!"}), "b cannot be read as bits"),
        (body_of(ROW | {"b": "BQE"}), "b cannot be read as bits"),
        (body_of(ROW | {"b": "Bé=="}), "b cannot be read as bits"),
        (body_of(ROW | {"b": [256]}), "256 is not a byte"),
        (body_of(ROW | {"b": [-129]}), "-129 is not a byte"),
        (body_of(ROW | {"b": ["5"]}), "'5' is not a byte"),
        (body_of(ROW | {"b": 5}), "b is 5"),
        (body_of(ROW | {"b": {}}), "b is an object"),
        (body_of(brokerName=7), "brokerName is 7"),
    ],
)
def test_wrong_bodies_are_refused(body: bytes, why: str) -> None:
    """The error says what is wrong."""
    with pytest.raises(BadRequest, match=why):
        decode_batch_ack(body)


def test_bits_have_a_limit() -> None:
    """In either form: a start of 0 would make bits of any length."""
    for bits in (bytes(MOST_BIT_BYTES), bytes(MOST_BIT_BYTES + 1)):
        for written in (base64.b64encode(bits).decode(), list(bits)):
            if len(bits) <= MOST_BIT_BYTES:
                assert decode_batch_ack(body_of(ROW | {"b": written})).acks[0].bits == bits
            else:
                with pytest.raises(BadRequest, match="longer than 4096 bytes"):
                    decode_batch_ack(body_of(ROW | {"b": written}))


def test_acks_have_a_limit() -> None:
    """Their number, and that of the messages in all of them."""
    assert len(decode_batch_ack(body_of(*[ROW] * MOST_ACKS)).acks) == MOST_ACKS
    with pytest.raises(BadRequest, match="1025 acks in one request are more than 1024"):
        decode_batch_ack(body_of(*[ROW] * (MOST_ACKS + 1)))
    full = ROW | {"b": base64.b64encode(b"\xff" * MOST_BIT_BYTES).decode()}
    assert len(list(decode_batch_ack(body_of(full)).acks[0].offsets())) == MOST_OFFSETS
    with pytest.raises(BadRequest, match="acks of 32771 messages in one request are more than 32768"):
        decode_batch_ack(body_of(full, ROW))


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b"{1:"])
def test_depth_has_a_limit(opening: bytes) -> None:
    """No body makes the reader recurse without end."""
    with pytest.raises(BadRequest):
        decode_batch_ack(b'{"acks":' + opening * 5_000)


@given(st.lists(acks, max_size=5), texts)
def test_batches_round_trip(batch: list[AckRow], broker: str) -> None:
    """Property: every member, and exactly the offsets whose bits are set."""
    whole = BatchAck(broker, tuple(batch))
    assert decode_batch_ack(encode_batch_ack(whole)) == whole
    for ack in batch:
        count = 8 * len(ack.bits)
        bits = int.from_bytes(ack.bits, "little")
        assert list(ack.offsets()) == [ack.start_offset + bit for bit in range(count) if bits >> bit & 1]


@given(st.binary(max_size=80), st.integers(0, len(GOLDEN)), st.integers(0, 3))
def test_mutated_batches_are_read_or_refused(piece: bytes, at: int, cut: int) -> None:
    """No other error."""
    try:
        found = decode_batch_ack(GOLDEN[:at] + piece + GOLDEN[at + cut :])
    except BadRequest:
        return
    assert decode_batch_ack(encode_batch_ack(found)) == found


places = st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 100_000))


@given(st.sets(places, max_size=40), st.integers(0, 1 << 40))
def test_receipts_make_acks_of_the_same_messages(messages: set[tuple[int, int, int]], start: int) -> None:
    """Property: of each pop and queue exactly its offsets, within the limit of an ack's bits."""
    receipts = [Receipt(start, pop_ms, 60_000, 4_711, 0, "b", queue, start + offset) for pop_ms, queue, offset in messages]
    made = acks_of("g", "t", receipts)
    assert sorted((ack.pop_ms, ack.queue, offset - start) for ack in made for offset in ack.offsets()) == sorted(messages)
    assert all(len(ack.bits) <= MOST_BIT_BYTES and ack.bits[-1] for ack in made)
    assert decode_batch_ack(encode_batch_ack(BatchAck("b", tuple(made)))).acks == tuple(made)

"""The body of a batch: round trips, and lengths that contradict each other."""

import random
import struct
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.errors import MessageIllegal
from metaq.protocol.record import MAX_PROPERTIES_LENGTH
from metaq.protocol.remoting.sending.batch import BatchItem, decode_batch, encode_batch

SMALLEST: Final = 22

clean = st.characters(exclude_categories=["Cs"])
items = st.builds(BatchItem, st.integers(-(1 << 31), (1 << 31) - 1), st.binary(max_size=60), st.text(clean, max_size=30))
batches = st.lists(items, max_size=6)


def item(body: bytes = b"b", *, properties: bytes = b"", **lengths: int) -> bytes:
    """One item; ``size``, ``body_length`` and ``properties_length`` replace the right ones."""
    body_length = lengths.get("body_length", len(body))
    properties_length = lengths.get("properties_length", len(properties))
    size = lengths.get("size", SMALLEST + len(body) + len(properties))
    head = struct.pack(">iiiii", size, 0, 0, 0, body_length)
    return head + body + struct.pack(">h", properties_length) + properties


def test_magic_and_checksum_are_not_looked_at() -> None:
    """Clients send zeros there, so nothing can depend on them."""
    data = bytearray(item())
    data[4:12] = b"\xff" * 8
    assert list(decode_batch(bytes(data))) == [BatchItem(0, b"b", "")]


def test_an_empty_batch_and_empty_messages() -> None:
    """A batch may be empty, and so may its messages."""
    assert list(decode_batch(b"")) == []
    assert list(decode_batch(item(b""))) == [BatchItem(0, b"", "")]


@pytest.mark.parametrize(
    "wrong",
    [
        item(size=21),
        item(size=24),
        item(size=0),
        item(size=-1),
        item(size=(1 << 31) - 1),
        item(body_length=0),
        item(body_length=-1),
        item(body_length=-(1 << 31)),
        item(body_length=(1 << 31) - 1),
        item(properties=b"ab", properties_length=1),
        item(properties=b"ab", properties_length=3),
        item(properties=b"ab", properties_length=-1),
        item(properties=b"a\xff"),
        item()[:-1],
        item()[:19],
        item()[:3],
        b"\x00",
    ],
)
def test_lengths_that_contradict_each_other_are_refused(wrong: bytes) -> None:
    """The error names the message, here the second one, by the byte where it begins."""
    first = item(b"whole")
    with pytest.raises(MessageIllegal, match=f"message at byte {len(first)} of a batch of {len(first) + len(wrong)}"):
        list(decode_batch(first + wrong))


def test_properties_over_the_limit_are_not_written() -> None:
    """The error names the message by its number, and the limit."""
    longest = BatchItem(0, b"", "p" * MAX_PROPERTIES_LENGTH)
    assert list(decode_batch(encode_batch([longest]))) == [longest]
    with pytest.raises(MessageIllegal, match=f"message 2 of the batch: 32768 bytes of properties .* {MAX_PROPERTIES_LENGTH}"):
        encode_batch([longest, BatchItem(0, b"", "p" * (MAX_PROPERTIES_LENGTH + 1))])


@given(batches)
def test_batches_round_trip(batch: list[BatchItem]) -> None:
    """In order, every byte."""
    data = encode_batch(batch)
    assert len(data) == sum(SMALLEST + len(body) + len(properties.encode()) for _, body, properties in batch)
    assert list(decode_batch(data)) == batch


@given(batches.filter(bool), st.integers(0, 1 << 32))
def test_mutated_batches_are_read_or_refused(batch: list[BatchItem], seed: int) -> None:
    """No other error; what is read is as long as what was sent."""
    chance = random.Random(seed)
    data = bytearray(encode_batch(batch))
    for _ in range(chance.randint(1, 3)):
        data[chance.randrange(len(data))] = chance.choice((0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)))
    del data[len(data) - chance.choice((0, 0, 1, 5)) :]
    try:
        read = list(decode_batch(bytes(data)))
    except MessageIllegal as error:
        assert f"of a batch of {len(data)}" in str(error), data
    else:
        assert len(encode_batch(read)) == len(data)

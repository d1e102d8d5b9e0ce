"""Tokens of leases: their values, their range, and what each part of them is good for."""

from hypothesis import given
from hypothesis import strategies as st

from metaq.leases.tokens import LEAST_TOKEN, MOST_TOKEN, begun_in, bits_in, token_of

SECRET = bytes(range(32))

texts = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=20)
times = st.integers(0, (1 << 53) - 1)


def bits_of(secret: bytes, group: str, topic: str, partition: int, ordinal: int, pop_ms: int) -> int:
    return bits_in(begun_in(secret, group, topic, partition), ordinal, pop_ms)


def test_values_are_as_written() -> None:
    """Receipts of before a change of the code must stay good: the codes are those of ``openssl mac … BLAKE2BMAC``."""
    assert token_of(SECRET, "billing", "orders", 1_700_000_000_123) == 0x66B9A6A89C7DCA56 & MOST_TOKEN
    assert bits_of(SECRET, "billing", "orders", 3, 42, 1_700_000_000_123) == 0x546A723870DB68B1 >> 34


@given(st.binary(min_size=1, max_size=64), texts, texts, times)
def test_a_token_is_never_a_number_of_rocketmqs_own_queues(secret: bytes, group: str, topic: str, pop_ms: int) -> None:
    """It is an int of Java, and not 999, which means order there."""
    assert LEAST_TOKEN <= token_of(secret, group, topic, pop_ms) <= MOST_TOKEN == (1 << 31) - 1


@given(texts, texts, st.integers(0, 1023), st.integers(0, (1 << 63) - 1), times)
def test_bits_fit_the_token_of_an_id(group: str, topic: str, partition: int, ordinal: int, pop_ms: int) -> None:
    """An id has six digits in base 32."""
    assert 0 <= bits_of(SECRET, group, topic, partition, ordinal, pop_ms) < 1 << 30


def test_every_part_counts() -> None:
    """Another secret, group, topic or pop has another token, and names cannot be shifted from one to the next."""
    tokens = [
        token_of(SECRET, "g", "t", 7),
        token_of(SECRET[1:], "g", "t", 7),
        token_of(SECRET, "h", "t", 7),
        token_of(SECRET, "g", "u", 7),
        token_of(SECRET, "g", "t", 8),
        token_of(SECRET, "gt", "", 7),
    ]
    assert len(set(tokens)) == len(tokens)
    bits = [
        bits_of(SECRET, "g", "t", 1, 2, 7),
        bits_of(SECRET[1:], "g", "t", 1, 2, 7),
        bits_of(SECRET, "h", "t", 1, 2, 7),
        bits_of(SECRET, "g", "u", 1, 2, 7),
        bits_of(SECRET, "g", "t", 2, 2, 7),
        bits_of(SECRET, "g", "t", 1, 3, 7),
        bits_of(SECRET, "g", "t", 12, 2, 7),
        bits_of(SECRET, "g", "t", 1, 2, 8),
    ]
    assert len(set(bits)) == len(bits)

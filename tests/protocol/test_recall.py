"""The handles of delayed messages that RocketMQ's clients carry."""

from typing import Final

import pytest

from metaq.errors import BadRequest
from metaq.protocol.remoting.recall import MOST_CHARACTERS, RecallHandle, decode_recall, encode_recall

HANDLE: Final = RecallHandle("later", "metaq", 1769857200000, "7F00", "1769857200000-81920-0123456789abcdef")


@pytest.mark.parametrize("key", ["", " ", "a b", " a  b ", "7F00", "ключ"])
def test_a_handle_is_read_as_it_was_written(key: str) -> None:
    """E-12: blanks stand between the words, and in the unique key."""
    handle = HANDLE._replace(unique_key=key)
    assert decode_recall(encode_recall(handle)) == handle


def test_a_handle_without_room_for_the_unique_key_goes_without_it() -> None:
    """E-12: nobody takes a longer one; all that counts is there."""
    lengths = range(2 * MOST_CHARACTERS)
    texts = [encode_recall(HANDLE._replace(unique_key="k" * length)) for length in lengths]
    assert max(map(len, texts)) == MOST_CHARACTERS
    fits = [len(decode_recall(text).unique_key) == length for length, text in zip(lengths, texts, strict=True)]
    assert fits == sorted(fits, reverse=True) and sum(fits) > MOST_CHARACTERS // 2
    assert {decode_recall(text)._replace(unique_key="") for text in texts} == {HANDLE._replace(unique_key="")}


def test_what_is_no_handle() -> None:
    """E-12: it says so."""
    with pytest.raises(BadRequest, match="a recallHandle of 1025 characters is longer than 1024"):
        decode_recall("x" * (MOST_CHARACTERS + 1))
    for text in ("", "nonsense", encode_recall(HANDLE)[4:]):
        with pytest.raises(BadRequest, match="cannot be read"):
            decode_recall(text)

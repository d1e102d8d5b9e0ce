"""What is remembered of keys and tags takes little memory, however long those are that senders choose."""

import tracemalloc
from collections.abc import Callable
from typing import Final

from metaq.protocol.keys import KeyHasher, key_hash
from metaq.protocol.record import java_hash
from metaq.server.remoting.sending.tags import Tags

COUNT: Final = 50
LENGTH: Final = 2000


def held_after(use: Callable[[str], object]) -> int:
    """Use long texts; return the bytes that are held after that."""
    tracemalloc.start()
    try:
        for number in range(COUNT):
            use(f"{number}".ljust(LENGTH, "x"))
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def test_long_keys_are_not_remembered() -> None:
    """Their hashes are right all the same."""
    hasher = KeyHasher()
    assert held_after(lambda text: hasher.hash("t", text)) < COUNT * LENGTH // 2
    text = "x" * LENGTH
    assert hasher.hash("t", text) == key_hash("t", text)


def test_long_tags_are_not_remembered() -> None:
    """What they make of a record is right all the same."""
    tags = Tags()
    assert held_after(tags.of) < COUNT * LENGTH // 2
    short, long = tags.of(""), tags.of("x" * LENGTH)
    assert long.hash == java_hash("x" * LENGTH)
    assert long.text_size == short.text_size + LENGTH

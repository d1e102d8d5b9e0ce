"""Keys by which messages are found: which ones a message has, and their hashes (specs: store format, sections 3 and 6)."""

from operator import mul
from typing import Final

from metaq.message import INTERNAL_TOPICS
from metaq.protocol.record import decode_properties, java_hash

KEYS: Final = "KEYS"
UNIQ_KEY: Final = "UNIQ_KEY"
ROLLBACK: Final = 12
"""Both transaction bits of the system flag: a message that was rolled back."""


def keys_of(topic: str, sys_flag: int, properties: bytes) -> tuple[str, ...]:
    """The keys of a message, each once: UNIQ_KEY first, then the parts of KEYS between spaces.

    None for topics of the broker itself and for what was rolled back. ``properties`` as they stand in a record.
    """
    if b"KEYS\x01" not in properties and b"UNIQ_KEY\x01" not in properties:
        return ()
    if sys_flag & ROLLBACK == ROLLBACK or topic in INTERNAL_TOPICS:
        return ()
    pairs = decode_properties(properties)
    return tuple(dict.fromkeys(key for key in (pairs.get(UNIQ_KEY, ""), *pairs.get(KEYS, "").split(" ")) if key))


# -- hashes -----------------------------------------------------------------------------------------------------------

_MASK: Final = 0xFFFFFFFF
_POWERS: Final = tuple(pow(31, exponent, 1 << 32) for exponent in range(256))
_FALLING: Final = tuple(_POWERS[:length][::-1] for length in range(len(_POWERS)))
_TAIL: Final = 12
_KNOWN_MOST: Final = 4096


def _value(text: str) -> int:
    """The hash of an ASCII text before its last 32 bits are taken."""
    return sum(map(mul, text.encode(), _FALLING[len(text)]))


class KeyHasher:
    """Hashes of ``topic#key``, faster than ``key_hash`` when topics and the beginnings of keys come again.

    A hash is a sum over the characters, so it is put together from sums that are remembered. The unique ids of one producer
    differ in their last twelve characters only, the time and a counter.
    """

    def __init__(self) -> None:
        self._topics: dict[str, int] = {}
        self._stems: dict[str, int] = {}

    def hash(self, topic: str, key: str) -> int:
        """0 … 2³¹−1."""
        length = len(key)
        if length >= _LENGTHS or not key.isascii():
            return key_hash(topic, key)
        before = self._topics.get(topic)
        if before is None:
            before = _remember(self._topics, topic, java_hash(topic + "#"))
        if length <= _TAIL:
            value = _value(key)
        else:
            stem = key[:-_TAIL]
            known = self._stems.get(stem)
            if known is None:
                known = _remember(self._stems, stem, _value(stem) & _MASK)
            value = known * _TAIL_POWER + sum(map(mul, key[-_TAIL:].encode(), _TAIL_POWERS))
        value = (value + before * _POWERS[length]) & _MASK
        return value if value < 0x80000000 else (0x100000000 - value) & 0x7FFFFFFF


def _remember(known: dict[str, int], text: str, value: int) -> int:
    if len(known) >= _KNOWN_MOST:
        known.clear()
    known[text] = value
    return value


_LENGTHS: Final = len(_POWERS)
_TAIL_POWER: Final = _POWERS[_TAIL]
_TAIL_POWERS: Final = _FALLING[_TAIL]


def key_hash(topic: str, key: str) -> int:
    """The hash under which a key is entered, without the look-ups of ``KeyHasher``."""
    value = java_hash(f"{topic}#{key}")
    return 0 if value == -(1 << 31) else abs(value)

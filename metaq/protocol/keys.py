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
_TAIL: Final = 4
_TOPICS_MOST: Final = 64
_STEMS_MOST: Final = 1024
"""Beginnings of keys remembered per topic: some 8 MB in all at the most."""


class KeyHasher:
    """Hashes of ``topic#key``, faster than ``key_hash`` when the beginnings of keys come again.

    A hash is a sum over the characters, so it is put together from sums that are remembered. The unique ids that one producer
    makes in a millisecond differ in their last four characters only, a counter.
    """

    def __init__(self) -> None:
        self._topics: dict[str, dict[str, int]] = {}

    def hash(self, topic: str, key: str) -> int:
        """0 … 2³¹−1."""
        stem = key[:-_TAIL]
        if not stem:
            return key_hash(topic, key)
        try:
            first, second, third, last = key[-_TAIL:].encode()
            known = self._topics[topic][stem]
        except KeyError:
            known = self._remember(topic, stem)
        except ValueError:  # not four ASCII characters
            return key_hash(topic, key)
        value = (known + first * 29791 + second * 961 + third * 31 + last) & _MASK
        return value if value < 0x80000000 else (0x100000000 - value) & 0x7FFFFFFF

    def _remember(self, topic: str, stem: str) -> int:
        """What topic and stem add to the hash of every key that begins with the stem."""
        stems = self._topics.get(topic)
        if stems is None:
            if len(self._topics) >= _TOPICS_MOST:
                self._topics.clear()
            stems = self._topics[topic] = {}
        elif len(stems) >= _STEMS_MOST:
            stems.clear()
        stems[stem] = known = _hash_code(f"{topic}#{stem}") * 31**_TAIL & _MASK
        return known


def key_hash(topic: str, key: str) -> int:
    """The hash under which a key is entered, without the look-ups of ``KeyHasher``."""
    value = _hash_code(f"{topic}#{key}")
    return value if value < 0x80000000 else (0x100000000 - value) & 0x7FFFFFFF


def _hash_code(text: str) -> int:
    """Java's ``String.hashCode`` as an unsigned number."""
    if text.isascii() and len(text) < len(_FALLING):
        total: int = sum(map(mul, text.encode(), _FALLING[len(text)]))
        return total & _MASK
    return java_hash(text) & _MASK

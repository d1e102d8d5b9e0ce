"""Keys by which messages are looked up: which ones a message has, and their hashes (specs: store format, sections 3 and 6)."""

from operator import mul
from typing import Final

from metaq.message import INTERNAL_TOPICS
from metaq.protocol.record import decode_properties, java_hash
from metaq.protocol.sysflag import TRANSACTION_ROLLBACK

KEYS: Final = "KEYS"
UNIQ_KEY: Final = "UNIQ_KEY"


def keys_of(topic: str, sys_flag: int, properties: bytes) -> tuple[str, ...]:
    """Return the keys of a message, each once: UNIQ_KEY first, then the words of KEYS, which spaces separate.

    Messages of the broker's internal topics and messages that were rolled back have no keys. ``properties`` are in the form of
    a record.
    """
    # by ``in`` it would take twice as long: that first tries to take the name for a number
    if properties.find(b"KEYS\x01") < 0 and properties.find(b"UNIQ_KEY\x01") < 0:
        return ()
    if sys_flag & TRANSACTION_ROLLBACK == TRANSACTION_ROLLBACK or topic in INTERNAL_TOPICS:
        return ()
    pairs = decode_properties(properties)
    return tuple(dict.fromkeys(key for key in (pairs.get(UNIQ_KEY, ""), *pairs.get(KEYS, "").split(" ")) if key))


# -- hashes -----------------------------------------------------------------------------------------------------------

_MASK: Final = 0xFFFFFFFF
_POWERS: Final = tuple(pow(31, exponent, 1 << 32) for exponent in range(256))
_FALLING: Final = tuple(_POWERS[:length][::-1] for length in range(len(_POWERS)))
"""For each length of a text, the powers of 31 by which a hash multiplies its characters."""
_TAIL: Final = 4
_TOPICS_MOST: Final = 64
_STEMS_MOST: Final = 1024
"""Stems of keys remembered per topic."""
_STEM_LONGEST: Final = 64
"""Characters of a stem that is remembered: those of unique ids have 28 or 32. All stems take some 30 MB at most."""


class KeyHasher:
    """Hashes of ``topic#key``, faster than ``key_hash`` when many keys share their stem: all but the last four characters.

    A hash is a sum over the characters, so it can be made from the remembered sum of the stem. The unique ids that one producer
    makes within a millisecond differ only in their last four characters, a counter.
    """

    def __init__(self) -> None:
        self._topics: dict[str, dict[str, int]] = {}

    def hash(self, topic: str, key: str) -> int:
        """Return the same as ``key_hash``: 0 … 2³¹−1."""
        stem, tail = key[:-_TAIL], key[-_TAIL:].encode()
        if not stem or len(tail) != _TAIL:  # too short, or not four ASCII characters
            return key_hash(topic, key)
        stems = self._topics.get(topic)
        known = None if stems is None else stems.get(stem)
        if known is None:
            known = self._remember(topic, stem)
        value = (known + tail[0] * 29791 + tail[1] * 961 + tail[2] * 31 + tail[3]) & _MASK  # 31³, 31², 31
        return value if value < 0x80000000 else (0x100000000 - value) & 0x7FFFFFFF

    def _remember(self, topic: str, stem: str) -> int:
        """Return what topic and stem contribute to the hash of every key with this stem, and remember it unless it is long."""
        known = _hash_code(f"{topic}#{stem}") * 31**_TAIL & _MASK
        if len(stem) > _STEM_LONGEST:
            return known
        stems = self._topics.get(topic)
        if stems is None:
            if len(self._topics) >= _TOPICS_MOST:
                self._topics.clear()
            stems = self._topics[topic] = {}
        elif len(stems) >= _STEMS_MOST:
            stems.clear()
        stems[stem] = known
        return known


def key_hash(topic: str, key: str) -> int:
    """Return the hash under which an index holds a key, 0 … 2³¹−1, without the remembered sums of ``KeyHasher``."""
    value = _hash_code(f"{topic}#{key}")
    return value if value < 0x80000000 else (0x100000000 - value) & 0x7FFFFFFF


def _hash_code(text: str) -> int:
    """Return Java's ``String.hashCode`` as an unsigned 32-bit number."""
    if text.isascii() and len(text) < len(_FALLING):
        total: int = sum(map(mul, text.encode(), _FALLING[len(text)]))
        return total & _MASK
    return java_hash(text) & _MASK

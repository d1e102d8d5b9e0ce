"""Tokens of leases: what a receipt has that nobody can make up who was not given the message.

::

    number   BLAKE2b(secret, "lease", group 0 topic 0 POP_MS), its low 31 bits, at least 1,000
    bits     BLAKE2b(secret, "push", group 0 topic 0 partition 0 ordinal 0 POP_MS), its first 30 bits

BLAKE2b (RFC 7693) with a key, a purpose and a length of 8 bytes authenticates by itself, at a third of the cost of an HMAC.

Numbers are decimal, and 0 is a byte between the parts. RocketMQ's clients carry the number back as ``reviveQid``, where 999
means "in order" to RocketMQ's own brokers, and smaller numbers are their queues: so it is never one of these. Clients of the
text protocol carry the bits back as part of an id. The secret is in the records of the leases, so replicas share it.
"""

from functools import lru_cache
from hashlib import blake2b
from typing import Any, Final

LEAST_TOKEN: Final = 1_000
MOST_TOKEN: Final = (1 << 31) - 1

Begun = Any
"""A hash that has taken what is the same for all messages of a partition; the class has no name in ``hashlib``."""

_LEASE, _PUSH = b"lease", b"push"
_CODE_BYTES: Final = 8


@lru_cache(1024)  # acks of one pop come one after the other
def token_of(secret: bytes, group: str, topic: str, pop_ms: int) -> int:
    """Return the token of all messages that one pop at ``pop_ms`` (Unix time in milliseconds) gave a group of a topic."""
    text = f"{group}\0{topic}\0{pop_ms}".encode()
    code = blake2b(text, key=secret, person=_LEASE, digest_size=_CODE_BYTES).digest()
    return max(LEAST_TOKEN, int.from_bytes(code, "big") & MOST_TOKEN)


@lru_cache(256)
def begun_in(secret: bytes, group: str, topic: str, partition: int) -> Begun:
    """Return what ``bits_in`` needs for messages of one partition."""
    return blake2b(f"{group}\0{topic}\0{partition}\0".encode(), key=secret, person=_PUSH, digest_size=_CODE_BYTES)


def bits_in(begun: Begun, ordinal: int, pop_ms: int) -> int:
    """Return the token of one message that was pushed to a group at ``pop_ms``: 30 bits; see ``begun_in``."""
    code = begun.copy()
    code.update(b"%d\0%d" % (ordinal, pop_ms))
    return int.from_bytes(code.digest(), "big") >> 34

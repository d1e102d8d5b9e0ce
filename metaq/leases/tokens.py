"""Tokens of leases: what a receipt has that nobody can make up who was not given the message.

::

    number   HMAC-SHA-256(secret, "lease" 0 group 0 topic 0 POP_MS), the low 31 bits of its first 8 bytes, at least 1,000
    bits     HMAC-SHA-256(secret, "push" 0 group 0 topic 0 partition 0 ordinal 0 POP_MS), its first 30 bits

Numbers are decimal, and 0 is a byte between the parts. RocketMQ's clients carry the number back as ``reviveQid``, where 999
means "in order" to RocketMQ's own brokers, and smaller numbers are their queues: so it is never one of these. Clients of the
text protocol carry the bits back as part of an id. The secret is in the records of the leases, so replicas share it.
"""

from functools import lru_cache
from hashlib import sha256
from typing import Any, Final

LEAST_TOKEN: Final = 1_000
MOST_TOKEN: Final = (1 << 31) - 1

Begun = tuple[Any, Any]
"""The two hashes of an HMAC that have taken the secret, and the names: these are the same for many messages."""

_BLOCK_BYTES: Final = 64
_INNER: Final = bytes(byte ^ 0x36 for byte in range(256))
_OUTER: Final = bytes(byte ^ 0x5C for byte in range(256))
"""The two tables by which HMAC (RFC 2104) makes two keys of one."""


@lru_cache(1024)  # acks of one pop come one after the other
def token_of(secret: bytes, group: str, topic: str, pop_ms: int) -> int:
    """Return the token of all messages that one pop at ``pop_ms`` (Unix time in milliseconds) gave a group of a topic."""
    code = _code(_begun(secret, f"lease\0{group}\0{topic}\0"), b"%d" % pop_ms)
    return max(LEAST_TOKEN, int.from_bytes(code[:8], "big") & MOST_TOKEN)


def bits_of(secret: bytes, group: str, topic: str, partition: int, ordinal: int, pop_ms: int) -> int:
    """Return the token of one message that was pushed to a group at ``pop_ms``: 30 bits."""
    return bits_in(begun_in(secret, group, topic, partition), ordinal, pop_ms)


def begun_in(secret: bytes, group: str, topic: str, partition: int) -> Begun:
    """Return what ``bits_in`` needs for messages of one partition."""
    return _begun(secret, f"push\0{group}\0{topic}\0{partition}\0")


def bits_in(begun: Begun, ordinal: int, pop_ms: int) -> int:
    """Return the token of a message as ``bits_of`` does, with what ``begun_in`` has returned for its partition."""
    return int.from_bytes(_code(begun, b"%d\0%d" % (ordinal, pop_ms))[:4], "big") >> 2


def _code(begun: Begun, rest: bytes) -> bytes:
    """Return the HMAC of a text of which the two hashes have taken all but the rest."""
    inner, outer = begun[0].copy(), begun[1].copy()
    inner.update(rest)
    outer.update(inner.digest())
    code: bytes = outer.digest()
    return code


@lru_cache(256)
def _begun(secret: bytes, names: str) -> Begun:
    """Return the inner hash of the HMAC, which has taken the names, and the outer one."""
    key = (secret if len(secret) <= _BLOCK_BYTES else sha256(secret).digest()).ljust(_BLOCK_BYTES, b"\0")
    return sha256(key.translate(_INNER) + names.encode()), sha256(key.translate(_OUTER))

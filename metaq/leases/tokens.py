"""Tokens of leases: what a receipt has that nobody can make up who was not given the message.

::

    number   HMAC-SHA-256(secret, "lease" 0 group 0 topic 0 POP_MS), the low 31 bits of its first 8 bytes, at least 1,000
    bits     HMAC-SHA-256(secret, "push" 0 group 0 topic 0 partition 0 ordinal 0 POP_MS), its first 30 bits

Numbers are decimal, and 0 is a byte between the parts. RocketMQ's clients carry the number back as ``reviveQid``, where 999
means "in order" to RocketMQ's own brokers, and smaller numbers are their queues: so it is never one of these. Clients of the
text protocol carry the bits back as part of an id. The secret is in the records of the leases, so replicas share it.
"""

import hmac
from functools import lru_cache
from hashlib import sha256
from typing import Final

LEAST_TOKEN: Final = 1_000
MOST_TOKEN: Final = (1 << 31) - 1


@lru_cache(1024)  # acks of one pop come one after the other
def token_of(secret: bytes, group: str, topic: str, pop_ms: int) -> int:
    """Return the token of all messages that one pop at ``pop_ms`` (Unix time in milliseconds) gave a group of a topic."""
    first = int.from_bytes(_code(secret, "lease", group, topic, pop_ms)[:8], "big")
    return max(LEAST_TOKEN, first & MOST_TOKEN)


def bits_of(secret: bytes, group: str, topic: str, partition: int, ordinal: int, pop_ms: int) -> int:
    """Return the token of one message that was pushed to a group at ``pop_ms``: 30 bits."""
    return int.from_bytes(_code(secret, "push", group, topic, partition, ordinal, pop_ms)[:4], "big") >> 2


def _code(secret: bytes, *parts: str | int) -> bytes:
    return hmac.digest(secret, "\0".join(map(str, parts)).encode(), sha256)

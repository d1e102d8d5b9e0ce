"""PURE: the topics that queues and exchanges have, with names that brokers take."""

import hashlib
import re
from functools import lru_cache
from typing import Final

MOST_CHARACTERS: Final = 120
"""The longest name of a group: a queue's topic and its group have one name."""
ROOT: Final = "/"
"""The virtual host whose queues have no prefix."""
_OTHER: Final = re.compile(r"[^a-zA-Z0-9_-]")
_DIGEST_CHARACTERS: Final = 16
_KNOWN: Final = 1024
"""The names that are remembered, as most messages go to the same few queues."""


@lru_cache(_KNOWN)
def queue_topic(virtual_host: str, queue: str) -> str:
    """Return the topic of a queue, which is the name of its group, too."""
    return _joined([_quoted(queue)] if virtual_host == ROOT else [_quoted(virtual_host), _quoted(queue)])


@lru_cache(_KNOWN)
def exchange_topic(virtual_host: str, exchange: str) -> str:
    """Return the topic from which temporary queues read what is sent to an exchange; that of the default exchange is ``""``."""
    return _joined(["" if virtual_host == ROOT else _quoted(virtual_host), _quoted(exchange), "exchange"])


@lru_cache(_KNOWN)
def tag_of(routing_key: str) -> str:
    """Return the tag of messages with a routing key."""
    return _quoted(routing_key) or "-"


def _quoted(name: str) -> str:
    """Return a name with each byte that no topic can have as ``%`` and two digits, as in URLs."""
    return _OTHER.sub(lambda found: "".join(f"%{byte:02X}" for byte in found[0].encode()), name)


def _joined(parts: list[str]) -> str:
    """Return one name of parts; of one that is too long, the beginning and a digest of all."""
    name = "|".join(parts)
    if len(name) <= MOST_CHARACTERS:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:_DIGEST_CHARACTERS]
    return f"{name[: MOST_CHARACTERS - _DIGEST_CHARACTERS - 1]}-{digest}"

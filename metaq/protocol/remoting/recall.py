"""The handle of a delayed message as RocketMQ's clients carry it: base64 (URL alphabet) of words with blanks between them.

::

    v1 TOPIC BROKER TIME UNIQUE_KEY DUE-ID-CODE

Clients read the third word to find the broker. The last one is ours, and all that counts here; readers of the others ignore it.
Handles of RocketMQ's brokers end with the unique key. Ours have an empty one where it would make them too long; it may have
blanks.

A cancel of a message that was delivered before and one of an unknown message are both refused with 604; the first of them has
the field ``timerState`` with the value ``delivered``.
"""

import base64
from binascii import b2a_base64
from typing import Final, NamedTuple

from metaq.errors import BadRequest

VERSION: Final = "v1"
TIMER_STATE: Final = "timerState"
DELIVERED: Final = "delivered"
MOST_CHARACTERS: Final = 1024
_MOST_BYTES: Final = MOST_CHARACTERS // 4 * 3
_URL_ALPHABET: Final = bytes.maketrans(b"+/", b"-_")


class RecallHandle(NamedTuple):
    """The words of a handle after its version."""

    topic: str
    broker_name: str
    due_ms: int
    unique_key: str
    handle: str
    """In the form that people type (``metaq.timers.handles``); empty in a handle of another broker's kind."""


def encode_recall(handle: RecallHandle) -> str:
    """Return a handle for the field ``recallHandle``."""
    topic, broker_name, due_ms, unique_key, own = handle
    return encode_words(topic, broker_name, due_ms, unique_key, own)


def encode_words(topic: str, broker_name: str, due_ms: int, unique_key: str, own: str) -> str:
    """Return the handle of these words, which ``RecallHandle`` describes; without the unique key where it would be too long."""
    words = f"{VERSION} {topic} {broker_name} {due_ms} {unique_key} {own}".encode()
    if len(words) > _MOST_BYTES:
        words = f"{VERSION} {topic} {broker_name} {due_ms}  {own}".encode()
    return b2a_base64(words, newline=False).translate(_URL_ALPHABET).decode()


def decode_recall(text: str) -> RecallHandle:
    """Return the words of a handle. Raise ``BadRequest`` for what is none."""
    if len(text) > MOST_CHARACTERS:
        raise BadRequest(f"a recallHandle of {len(text)} characters is longer than {MOST_CHARACTERS}")
    try:
        version, topic, broker_name, due, rest = base64.urlsafe_b64decode(text.encode()).decode().split(" ", 4)
        if version != VERSION:
            raise ValueError(version)
        unique_key, blank, own = rest.rpartition(" ")
        return RecallHandle(topic, broker_name, int(due), unique_key if blank else rest, own if blank else "")
    except ValueError as error:
        raise BadRequest("the recallHandle cannot be read") from error

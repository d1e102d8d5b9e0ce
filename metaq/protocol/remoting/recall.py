"""The handle of a delayed message as RocketMQ's clients carry it: base64 (URL alphabet) of words with blanks between them.

::

    v1 TOPIC BROKER TIME UNIQUE_KEY DUE-ID-CODE

Clients read the third word to find the broker. The sixth is ours, and all that counts here; readers of the others ignore it.
Handles of RocketMQ's brokers have no sixth word.

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
    return encode_words(f"{VERSION} {topic} {broker_name} {due_ms} {unique_key} {own}")


def encode_words(words: str) -> str:
    """Return the words of a handle, with blanks between them, for the field ``recallHandle``."""
    return b2a_base64(words.encode(), newline=False).translate(_URL_ALPHABET).decode()


def decode_recall(text: str) -> RecallHandle:
    """Return the words of a handle. Raise ``BadRequest`` for what is none."""
    if len(text) > MOST_CHARACTERS:
        raise BadRequest(f"a recallHandle of {len(text)} characters is longer than {MOST_CHARACTERS}")
    try:
        words = base64.urlsafe_b64decode(text.encode()).decode().split(" ")
        version, topic, broker_name, due, unique_key = words[:5]
        if version != VERSION:
            raise ValueError(version)
        return RecallHandle(topic, broker_name, int(due), unique_key, words[5] if len(words) > 5 else "")
    except ValueError as error:
        raise BadRequest("the recallHandle cannot be read") from error

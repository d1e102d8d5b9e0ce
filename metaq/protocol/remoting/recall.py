"""The handle of a delayed message as RocketMQ's clients carry it: base64 (URL alphabet) of words with blanks between them.

::

    v1 TOPIC BROKER TIME UNIQUE_KEY DUE-ID-CODE

Clients read the third word to find the broker. The sixth is ours, and all that counts here; readers of the others ignore it.
"""

import base64
import binascii
from typing import Final, NamedTuple

from metaq.errors import BadRequest

VERSION: Final = "v1"
WORDS: Final = 6
MOST_CHARACTERS: Final = 1024


class RecallHandle(NamedTuple):
    """The words of a handle after its version."""

    topic: str
    broker_name: str
    due_ms: int
    unique_key: str
    handle: str
    """In the form that people type (``metaq.timers.handles``)."""


def encode_recall(handle: RecallHandle) -> str:
    """Return a handle for the field ``recallHandle``."""
    words = (VERSION, handle.topic, handle.broker_name, str(handle.due_ms), handle.unique_key, handle.handle)
    return base64.urlsafe_b64encode(" ".join(words).encode()).decode()


def decode_recall(text: str) -> RecallHandle:
    """Return the words of a handle. Raise ``BadRequest`` for what is none, or none of this broker's kind."""
    if len(text) > MOST_CHARACTERS:
        raise BadRequest(f"a recallHandle of {len(text)} characters is longer than {MOST_CHARACTERS}")
    try:
        words = base64.urlsafe_b64decode(text.encode()).decode().split(" ")
        version, topic, broker_name, due, unique_key, handle = words
        return RecallHandle(topic, broker_name, int(due), unique_key, _checked(version, handle))
    except (binascii.Error, ValueError) as error:
        raise BadRequest("the recallHandle cannot be read, or is not of a metaq broker") from error


def _checked(version: str, handle: str) -> str:
    if version != VERSION:
        raise ValueError(version)
    return handle

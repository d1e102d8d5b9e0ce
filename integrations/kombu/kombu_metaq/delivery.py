"""Deliveries: messages that a channel hands to its consumers, by one interface, and how they are read."""

from base64 import b64decode
from collections import deque
from typing import Any, Final, Protocol

from kombu.utils.json import loads

BASE64: Final = "base64"
"""The encoding of all bodies: a message is stored as JSON."""

ONCE: Final = "metaq_id"
"""The property by which brokers know a message again that kombu publishes again because no answer came."""

Raw = dict[str, Any]
"""A message as kombu's virtual channels have it."""


class Delivery(Protocol):
    """A message that was given to a consumer."""

    raw: Raw

    def ack(self) -> None:
        """Finish it."""

    def give_back(self) -> None:
        """Let it come again, to any consumer of the queue."""

    def reject(self) -> None:
        """Finish it without success."""


class LogDelivery:
    """A message of a temporary queue: nobody else has it."""

    def __init__(self, waiting: deque[Raw], raw: Raw) -> None:
        self._waiting = waiting
        self.raw = raw

    def ack(self) -> None:
        """Do nothing: it is nowhere else."""

    def give_back(self) -> None:
        """Let it come again, to this connection."""
        self._waiting.appendleft(self.raw)

    def reject(self) -> None:
        """Do nothing: it is nowhere else."""


def read(body: bytes) -> Raw:
    """Return the message of a body, with its own body decoded; ``ValueError`` for what kombu has not written."""
    try:
        raw: Raw = loads(body)
        properties = raw["properties"]
        if not isinstance(properties["delivery_info"]["routing_key"], str) or not isinstance(raw.get("headers") or {}, dict):
            raise TypeError
        properties.pop(ONCE, None)  # a program that publishes the message again with its properties means a new one
        if properties.pop("body_encoding", None) == BASE64:
            raw["body"] = b64decode(raw["body"])
    except Exception as error:  # whoever may send may send anything, and decoders of values raise what they like
        raise ValueError("not a message of kombu") from error
    return raw

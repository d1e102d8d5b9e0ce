"""Serializers, which make bodies of a program's values and values of bodies."""

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol, TypeVar

import orjson

from metaq.client import checks
from metaq.client.message import DecodedMessage, OutgoingMessage, ReceivedMessage
from metaq.errors import BadRequest

logger = logging.getLogger(__name__)

T = TypeVar("T")

CONTENT_TYPE: Final = "content-type"
"""The property that says how a body was made."""


class Serializer(Protocol[T]):
    """A maker of bodies from values, and of values from bodies. Threads share it."""

    @property
    def content_type(self) -> str:
        """The media type of its bodies, which producers send along in the property ``content-type``."""
        ...

    def dumps(self, value: T, /) -> bytes:
        """Return the body for a value.

        Args:
            value: the value.

        Raises:
            BadRequest: or any other error: the value has no body; the producer then raises ``BadRequest``.
        """
        ...

    def loads(self, body: bytes, /) -> T:
        """Return the value of a body.

        Args:
            body: the body.

        Raises:
            DecodeError: or any other error: it is no such body; the message then counts as failed.
        """
        ...


class _Json:
    """JSON in UTF-8. It also takes dataclasses, ``datetime``, enumerations and UUIDs, and gives back what JSON has of them."""

    content_type = "application/json"

    def dumps(self, value: Any, /) -> bytes:
        return orjson.dumps(value)

    def loads(self, body: bytes, /) -> Any:
        return orjson.loads(body)

    def __repr__(self) -> str:
        return "metaq.JSON"


JSON: Final[Serializer[Any]] = _Json()
"""JSON in UTF-8. It also takes dataclasses, ``datetime``, enumerations and UUIDs, and gives back what JSON has of them."""


def check_serializer(name: str, value: object) -> None:
    """Refuse what is neither a serializer nor ``None``."""
    is_one = all(callable(getattr(value, method, None)) for method in ("dumps", "loads"))
    if value is not None and not (is_one and isinstance(getattr(value, "content_type", None), str)):
        raise checks.wrong(name, value, "an object with dumps, loads and a content_type, such as metaq.JSON")


def serialized(serializer: Serializer[Any], value: object, properties: Mapping[str, str]) -> tuple[bytes, Mapping[str, str]]:
    """Return the body for a value, and the properties to send with it. ``BadRequest`` when there is no body for it."""
    try:
        body = serializer.dumps(value)
    except Exception as error:
        raise BadRequest(f"body of type {type(value).__name__} has no form in {serializer.content_type}: {error}") from error
    checks.properties(properties)
    return body, {CONTENT_TYPE: serializer.content_type, **properties}


def outgoing_of(serializer: Serializer[Any], message: object) -> OutgoingMessage:
    """Return a value, or a message whose body is one, as it is sent."""
    given: OutgoingMessage[Any] = message if isinstance(message, OutgoingMessage) else OutgoingMessage(message)
    body, properties = serialized(serializer, given.body, given.properties)
    return OutgoingMessage(body, given.tag, given.keys, properties, given.priority)


def decoded(message: ReceivedMessage, loads: Callable[[bytes], Any]) -> ReceivedMessage:
    """Return a message with its ``value``; one that has none gets an ``error`` instead."""
    if message.error is not None:
        return message
    try:
        value = loads(message.body)
    except Exception as error:  # noqa: BLE001 - whatever it raises, the body is not what it takes
        return message._damaged(f"the deserializer raised {type(error).__name__}: {error}")
    return DecodedMessage(message, value)

"""Leases by single commands of the text protocol, for people and scripts; programs subscribe (``TextClient.subscribe``)."""

import time
from collections.abc import Sequence
from typing import NamedTuple

from metaq.client.text.connection import Exchange, TextConnection
from metaq.errors import ProtocolError, Refused
from metaq.protocol.text.commands import Pop
from metaq.protocol.text.ids import MessageId
from metaq.protocol.text.messages import inflated_payload, split_attribute
from metaq.protocol.text.pushed import Pushed
from metaq.protocol.text.replies import NOT_FOUND, NOTHING_TO_POP, OK, Reply
from metaq.protocol.text.writing import write_pop


class PoppedMessage(NamedTuple):
    """A message that a group has leased."""

    id: MessageId
    topic: str
    partition: int
    position: int
    attempt: int
    """The number of this delivery: 1 for the first."""
    attribute: str | None
    key: str | None
    priority: int | None
    body: bytes
    error: Exception | None = None
    """The reason why a compressed body could not be inflated; ``body`` is then as it was put."""


def pop(connection: TextConnection, command: Pop, timeout_s: float) -> Sequence[PoppedMessage]:
    """Lease messages over a connection of its own, where all frames belong to this pop; none when there is nothing.

    ``Refused`` with the broker's reason, ``ConnectionFailed``, ``RequestTimeout``.
    """
    connection.take_pushes()
    opaque, exchange = connection.new_opaque(), Exchange()
    deadline = time.monotonic() + timeout_s + command.wait_ms / 1000
    connection.send(write_pop(command._replace(opaque=str(opaque))), [opaque], exchange, deadline)
    connection.wait(exchange, 0, deadline)
    reply = exchange.replies[opaque]
    text = reply.body.decode(errors="replace")
    if (reply.code, text) == (NOT_FOUND, NOTHING_TO_POP):
        return []
    if reply.code != OK:
        raise Refused(reply.code, text)
    if not text.isdecimal():
        raise ProtocolError(f"the broker answered {text[:80]!r} instead of the number of messages")
    return [_message(connection.next_push(deadline)) for _ in range(int(text))]


def _message(frame: Pushed | Reply | None) -> PoppedMessage:
    if not isinstance(frame, Pushed):
        raise ProtocolError("the broker sent fewer messages than it says")
    head = frame.head
    attribute, payload = split_attribute(head.flag, frame.body)
    body, error = inflated_payload(head.flag, payload)
    return PoppedMessage(
        head.id, head.topic, head.partition, head.position, head.attempt, attribute, head.key, head.priority, body, error
    )

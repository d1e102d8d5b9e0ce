"""A subscription over the text protocol: the broker pushes messages, each of which is finished by itself."""

import time
from collections.abc import Iterator
from types import TracebackType
from typing import Final, NamedTuple, Self

from metaq.client.connecting.forks import renewed_in_children
from metaq.client.text.connection import Exchange, TextConnection
from metaq.errors import ClientError, LeaseLost, Refused
from metaq.protocol.text.commands import Ack, Extend, Nack, Ready, Subscribe
from metaq.protocol.text.ids import MessageId
from metaq.protocol.text.messages import inflated_payload, split_attribute
from metaq.protocol.text.pushed import Pushed
from metaq.protocol.text.replies import NOT_FOUND, OK, Reply
from metaq.protocol.text.writing import write_ack, write_extend, write_nack, write_ready, write_subscribe

LOOK_S: Final = 3600.0
"""How long an iteration waits for a message before it looks again whether the subscription was closed."""


class PushedMessage(NamedTuple):
    """A message that a subscription has for a time."""

    subscription: "TextSubscription"
    id: MessageId
    topic: str
    partition: int
    position: int
    attempt: int
    """The number of this delivery: 1 for the first."""
    attribute: str | None
    body: bytes
    priority: int | None
    key: str | None
    error: Exception | None = None
    """The reason why a compressed body could not be inflated; ``body`` is then as it was put."""

    def ack(self) -> None:
        """Finish the message: it does not come again.

        ``LeaseLost`` when it was given to somebody else since, because its lease had ended, or when it was finished before.
        """
        self.subscription.ask_about(Ack((self.id,), self.topic, self.subscription.group, ""))

    def nack(self, delay_s: float = 0.0) -> None:
        """Give the message back: it comes again after ``delay_s`` seconds. ``LeaseLost`` as for ``ack``."""
        delay_ms = round(1000 * delay_s)
        self.subscription.ask_about(Nack((self.id,), delay_ms, False, self.topic, self.subscription.group, ""))

    def reject(self) -> None:
        """Send the message to the dead letters of the group. ``LeaseLost`` as for ``ack``."""
        self.subscription.ask_about(Nack((self.id,), None, True, self.topic, self.subscription.group, ""))

    def extend(self, seconds: float) -> None:
        """Let the lease end so many seconds from now, at least one. ``LeaseLost`` as for ``ack``."""
        ms = round(1000 * seconds)
        self.subscription.ask_about(Extend((self.id,), ms, self.topic, self.subscription.group, ""))


class TextSubscription:
    """Messages of a topic, pushed to a group over a connection of its own.

    ::

        with client.subscribe("orders", "billing", ready=10) as subscription:
            for message in subscription:
                handle(message.body)
                message.ack()

    One thread iterates; any thread may finish messages. When the connection is lost, the iteration raises ``ConnectionFailed``,
    and the broker gives what was out to others.
    """

    def __init__(self, connection: TextConnection, command: Subscribe, timeout_s: float) -> None:
        """Subscribe. ``Refused`` says why the broker refuses."""
        self.topic, self.group = command.topic, command.group
        self._connection = connection
        self._timeout_s = timeout_s
        self._closed = False
        renewed_in_children(self)
        connection.take_pushes()
        self._opaque = connection.new_opaque()
        reply = self._send(write_subscribe(command._replace(opaque=str(self._opaque))), self._opaque)
        if reply.code != OK:
            connection.lose("the subscription was refused")
            raise Refused(reply.code, reply.body.decode(errors="replace"))

    def _renew(self) -> None:
        """Become unusable in a child of a fork: what the broker pushes is for the parent."""
        self._connection.abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __iter__(self) -> Iterator[PushedMessage]:
        """Iterate over the messages as they come, until the subscription is closed."""
        while not self._closed:
            message = self.receive(LOOK_S)
            if message is not None:
                yield message

    def receive(self, timeout_s: float) -> PushedMessage | None:
        """Return the next message; ``None`` when none comes in time, or the subscription is closed meanwhile.

        ``ConnectionFailed`` when the connection is lost; ``Refused`` when the broker ends the subscription: with 301
        when another one has taken the partition over, with 403 when the user may lease no more, with 500 when the group was
        deleted and use creates none.
        """
        try:
            frame = self._connection.next_push(time.monotonic() + timeout_s)
        except ClientError:
            if self._closed:
                return None
            raise
        if isinstance(frame, Reply):
            raise Refused(frame.code, frame.body.decode(errors="replace"))
        return None if frame is None else self._message(frame)

    def ready(self, most: int) -> None:
        """Change how many messages may be out and not finished; with 0 nothing more comes."""
        self.ask_about(Ready(most, self.topic, self.group, ""))

    def ask_about(self, command: Ack | Nack | Extend | Ready) -> None:
        """Send a command, and wait for its reply. ``LeaseLost`` when it concerns a message that is not leased any more."""
        opaque = self._connection.new_opaque()
        reply = self._send(_write(command, str(opaque)), opaque)
        text = reply.body.decode(errors="replace")
        if reply.code == NOT_FOUND and not isinstance(command, Ready):
            raise LeaseLost(reply.code, text)
        if reply.code != OK:
            raise Refused(reply.code, text)

    def close(self) -> None:
        """End the subscription: the broker gives what is out to others. An iteration in another thread ends."""
        self._closed = True
        self._connection.lose("the subscription was closed")

    def _send(self, line: bytes, opaque: int) -> Reply:
        exchange, deadline = Exchange(), time.monotonic() + self._timeout_s
        self._connection.send(line, [opaque], exchange, deadline)
        self._connection.wait(exchange, 0, deadline)
        return exchange.replies[opaque]

    def _message(self, pushed: Pushed) -> PushedMessage:
        head = pushed.head
        attribute, payload = split_attribute(head.flag, pushed.body)
        body, error = inflated_payload(head.flag, payload)
        return PushedMessage(
            subscription=self,
            id=head.id,
            topic=head.topic,
            partition=head.partition,
            position=head.position,
            attempt=head.attempt,
            attribute=attribute,
            body=body,
            priority=head.priority,
            key=head.key,
            error=error,
        )


def _write(command: Ack | Nack | Extend | Ready, opaque: str) -> bytes:
    match command:
        case Ack():
            return write_ack(command._replace(opaque=opaque))
        case Nack():
            return write_nack(command._replace(opaque=opaque))
        case Extend():
            return write_extend(command._replace(opaque=opaque))
        case Ready():
            return write_ready(command._replace(opaque=opaque))

"""The seam for tracing: an interceptor is called before and after a message is sent, processed and settled."""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Protocol

from metaq.client.message import ReceivedMessage, SendResult
from metaq.errors import BadRequest
from metaq.message import MessageQueue

Sent = Callable[[Sequence[SendResult] | BaseException], None]
"""A function that is called when a send has ended, with one result for each message, or with the error."""
Ended = Callable[[BaseException | None], None]
"""A function that is called when something else has ended, with its error, if any."""


class SettledMessage(Protocol):
    """A message that is settled: a ``ReceivedMessage``, or the ``HalfMessage`` of a transaction."""

    @property
    def id(self) -> str: ...

    @property
    def topic(self) -> str: ...

    @property
    def properties(self) -> Mapping[str, str]: ...


class Interceptor:
    """A base class for what is told of the messages of this process: its methods do nothing. See ``metaq.intercept``.

    The methods are called where the program calls the client, or where the client calls the program, so that context variables
    hold. Three of them return a function, which is called once, at the end: for ``processing`` on the same thread, or in the
    same asyncio task; for the others perhaps on a thread that must not be blocked. None of all this may raise.
    """

    def sending(self, client: str, group: str, topic: str, messages: Sequence[MutableMapping[str, str]]) -> Sent:
        """Begin to send messages; return the function that is called with the results or the error.

        Args:
            client: the id of the client.
            group: the group of the producer.
            topic: the topic.
            messages: the properties of each message, in a batch those that the program gives. What is added to them is sent,
                too; names and values cannot contain the bytes 1 and 2.
        """
        return _nothing

    def written(self, sent: Sent, queue: MessageQueue) -> None:
        """Take note that messages were written to a connection; now the program waits for the answer, in ``Producer.send``
        and ``send_batch``. What is done here takes no time of a send, if it is done before the broker is.

        Args:
            sent: what ``sending`` has returned.
            queue: the queue to which they go. Another attempt may go to another one, and the result may name another one.
        """

    def received(self, client: str, group: str, messages: Sequence[ReceivedMessage]) -> None:
        """Take note that a program that asks for messages gets these.

        Args:
            client: the id of the client.
            group: the group of the consumer.
            messages: at least one.
        """

    def processing(self, client: str, group: str, messages: Sequence[ReceivedMessage]) -> Ended:
        """Begin to call a listener or a handler; return the function that is called with its error, if any.

        Args:
            client: the id of the client.
            group: the group of the consumer.
            messages: at least one; several for a listener that takes batches.
        """
        return _nothing

    def settling(self, client: str, group: str, action: str, message: SettledMessage) -> Ended:
        """Begin to tell a broker what becomes of a message; return the function that is called with the error, if any.

        Args:
            client: the id of the client.
            group: the group of the consumer, or of the producer of a transaction.
            action: ``ack``, ``nack`` or ``reject`` of a leased message, ``retry`` of another one that is to come again later,
                ``commit``, ``rollback`` or ``unknown`` of a transaction.
            message: the message.
        """
        return _nothing


def _nothing(outcome: object) -> None:
    """End what nobody has asked about."""


_current: Interceptor | None = None


def intercept(interceptor: Interceptor | None) -> None:
    """Have an interceptor told of the messages of all clients of this process from now on; with ``None`` no more.

    It is told of what ``Producer``, ``TransactionProducer`` and the consumers do, also those of ``metaq.aio``; not of
    ``TextClient``, ``XaSession`` and ``Producer.send_packed``. There is one at a time.

    Args:
        interceptor: an object of a subclass of ``metaq.Interceptor``.

    Raises:
        BadRequest: there is another interceptor already, or it is none.
    """
    global _current  # noqa: PLW0603 - tracing is of a process, whoever makes its clients
    if interceptor is not None:
        if not isinstance(interceptor, Interceptor):
            raise BadRequest(f"interceptor is {interceptor!r}; give an object of a subclass of metaq.Interceptor, or None")
        if _current is not None and _current is not interceptor:
            raise BadRequest(f"this process has the interceptor {_current!r}; metaq.intercept(None) ends that")
    _current = interceptor


def is_intercepted() -> bool:
    """Return whether there is an interceptor."""
    return _current is not None


def sending(client: str, group: str, topic: str, messages: Sequence[MutableMapping[str, str]]) -> Sent:
    """Tell the interceptor, if there is one, as its method of this name says; so do the functions below."""
    return _nothing if _current is None or not messages else _current.sending(client, group, topic, messages)


def written(sent: Sent, queue: MessageQueue) -> None:
    """Tell the interceptor to which queue messages were written."""
    if _current is not None:
        _current.written(sent, queue)


def received(client: str, group: str, messages: Sequence[ReceivedMessage]) -> None:
    """Tell the interceptor which messages a program gets."""
    if _current is not None:
        _current.received(client, group, messages)


def processing(client: str, group: str, messages: Sequence[ReceivedMessage]) -> Ended:
    """Tell the interceptor which messages a listener gets."""
    return _nothing if _current is None else _current.processing(client, group, messages)


def settling(client: str, group: str, action: str, message: SettledMessage) -> Ended:
    """Tell the interceptor what becomes of a message."""
    return _nothing if _current is None else _current.settling(client, group, action, message)

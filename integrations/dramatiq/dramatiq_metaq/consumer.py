"""A consumer of one queue: what a worker leases, and what becomes of it."""

import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final

from dramatiq.broker import Consumer, MessageProxy
from dramatiq.errors import DecodeError
from dramatiq.logging import get_logger
from dramatiq.message import Message, get_encoder

import metaq
from dramatiq_metaq.errors import told_to_dramatiq

_MOST_BATCH: Final = 32
"""Brokers give no more messages at once."""


def batch_of(prefetch: int) -> int:
    """Return how many messages come at once: half of those that a worker may have, so that it asks before it has none."""
    return min(_MOST_BATCH, max(1, prefetch // 2))


class LeasedProxy(MessageProxy):
    """A message that a worker has, and its lease, which goes on while the worker has it."""

    def __init__(self, message: Message[Any], leased: metaq.LeasedMessage) -> None:
        super().__init__(message)
        self.leased = leased
        self.again_s: float | None = None
        """The pause after which it must come again itself, as no copy of it could be sent; ``None`` when none was needed."""


class QueueConsumer(Consumer):
    """A consumer that has at most ``prefetch`` messages, with those that wait for its worker.

    Its messages are settled by other threads than the one that iterates.
    """

    def __init__(self, leases: metaq.LeaseConsumer, prefetch: int, timeout_s: float) -> None:
        """Consume what ``leases`` brings, which must come in batches of ``batch_of(prefetch)`` or less."""
        self.logger = get_logger(__name__, type(self))
        self._leases = leases
        self._most_held = prefetch - batch_of(prefetch)
        self._timeout_s = timeout_s
        self._changed = threading.Condition()  # guards what follows
        self._held: set[int] = set()
        """Those that the worker has, by identity."""

    def __next__(self) -> MessageProxy | None:
        """Return the next message, or ``None`` after some time. One that is no message of dramatiq becomes a dead letter."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._held) <= self._most_held, self._timeout_s):
                return None
        leased = self._leases.receive(self._timeout_s)
        if leased is None:
            return None
        try:
            message: Message[Any] = Message.decode(leased.body)
        except DecodeError:
            self.logger.exception("Failed to decode message %s using encoder %r.", leased.id, get_encoder())
            self._settle(leased, leased.reject)
            return None
        with self._changed:
            self._held.add(id(leased))
        return LeasedProxy(message, leased)

    def ack(self, message: MessageProxy) -> None:
        """Finish a message. If its retry could not be sent, it comes again itself."""
        proxy = _leased(message)
        if proxy.again_s is None:
            self._settle(proxy.leased, proxy.leased.ack)
        else:
            self._settle(proxy.leased, partial(proxy.leased.nack, proxy.again_s))

    def nack(self, message: MessageProxy) -> None:
        """Make a message a dead letter of its queue."""
        leased = _leased(message).leased
        self._settle(leased, leased.reject)

    def requeue(self, messages: Iterable[MessageProxy]) -> None:
        """Give messages back that were not begun. After a failure, the others come again when their leases end."""
        for message in messages:
            leased = _leased(message).leased
            self._settle(leased, partial(leased.nack, 0))

    def close(self) -> None:
        """Take no more messages, and give back those that the worker has not seen. What it has can still be settled."""
        self._leases.close()

    def _settle(self, leased: metaq.LeasedMessage, settle: Callable[[], None]) -> None:
        try:
            with told_to_dramatiq():
                settle()
        except metaq.LeaseLost as error:
            self.logger.warning("Message %s is not this worker's any more, so it may be processed twice: %s", leased.id, error)
        finally:
            with self._changed:
                self._held.discard(id(leased))
                self._changed.notify()


def _leased(message: MessageProxy) -> LeasedProxy:
    if not isinstance(message, LeasedProxy):
        raise TypeError(f"{message!r} did not come from a consumer of metaq")
    return message

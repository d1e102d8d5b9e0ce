"""Consuming leased messages with threads: by iteration, or by a handler."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDone
from datetime import timedelta
from types import TracebackType
from typing import Any, Final, Self

from metaq.client import checks
from metaq.client.connecting.core import Core
from metaq.client.consuming.fetching import subscription_to
from metaq.client.leasing.holder import LeaseHolder, handling
from metaq.client.leasing.lease import Lease
from metaq.client.leasing.requests import LeaseTerms
from metaq.client.message import ReceivedMessage
from metaq.client.retries import Retry, check_retry
from metaq.client.serializers import Serializer, check_serializer
from metaq.errors import RequestTimeout
from metaq.protocol.subscription import EVERYTHING

MOST_BATCH: Final = 32
"""Brokers give no more messages at once."""
DEFAULT_BATCH: Final = 16
DEFAULT_INVISIBLE_S: Final = 60.0
LEAST_INVISIBLE_S: Final = 1.0
DEFAULT_WAIT_S: Final = 15.0
DEFAULT_CONCURRENCY: Final = 8


class HeldMessage(ReceivedMessage):
    """A leased message, without what can be done with it."""

    __slots__ = ("_holder", "_lease")

    def __init__(self, holder: LeaseHolder, lease: Lease) -> None:
        self._become(lease.message)
        self._holder = holder
        self._lease = lease

    @property
    def value(self) -> Any:
        """The body as the ``deserializer`` of the consumer has decoded it; ``BadRequest`` without one."""
        return self._lease.message.value

    @property
    def attempt(self) -> int:
        """The number of this delivery: 1 for the first."""
        return self._lease.attempt


class LeasedMessage(HeldMessage):
    """A message that its consumer has for a time: it comes again, to any member of the group, unless it is finished by then.

    Each method returns when the broker has answered. They raise ``LeaseLost`` when the message is not this consumer's any more,
    and another ``ClientError`` when the broker cannot be reached or refuses; ``RequestTimeout``: the outcome is unknown.
    """

    __slots__ = ()

    def ack(self) -> None:
        """Finish the message: the group will not get it again. To ack it twice does no harm.

        There are tries until the client's time limit while the broker cannot be reached. An ack after the end of the lease
        counts if the message was not given again.

        Raises:
            LeaseLost: the message is not this consumer's any more.
            ConnectionFailed: the broker cannot be reached.
            Refused: the broker refuses.
            RequestTimeout: no answer in time; the outcome is unknown.
        """
        self._wait(self._holder.ack(self._lease))

    def nack(self, delay: timedelta | float | None = None) -> None:
        """Give the message back.

        Args:
            delay: the time until it comes again, a ``timedelta`` or in seconds; 0 for at once. By default 10 s after the first
                attempt, 30 s after the second, then 1, 2, 3, … 10 min, 20 min, 30 min, 1 h, 2 h.

        Raises:
            LeaseLost: the message is not this consumer's any more.
            ConnectionFailed: the broker cannot be reached.
            Refused: the broker refuses.
            RequestTimeout: no answer in time; the outcome is unknown.
            BadRequest: an argument is invalid.
        """
        self._wait(self._holder.nack(self._lease, None if delay is None else checks.span("delay", delay)))

    def extend(self, seconds: timedelta | float) -> None:
        """Let the lease end so many seconds from now, up to 12 hours after it began (``max_invisible_ms`` of the group).

        Args:
            seconds: the time from now on, a ``timedelta`` or in seconds.

        Raises:
            LeaseLost: the message is not this consumer's any more.
            ConnectionFailed: the broker cannot be reached.
            Refused: the broker refuses.
            RequestTimeout: no answer in time; the outcome is unknown.
            BadRequest: an argument is invalid.
        """
        self._wait(self._holder.extend(self._lease, checks.span("seconds", seconds)))

    def reject(self) -> None:
        """Make the message a dead letter of the group at once.

        Raises:
            LeaseLost: the message is not this consumer's any more.
            ConnectionFailed: the broker cannot be reached.
            Refused: the broker refuses.
            RequestTimeout: no answer in time; the outcome is unknown.
        """
        self._wait(self._holder.reject(self._lease))

    def _wait(self, told: Future[None]) -> None:
        limit_s = self._holder.answer_s
        try:
            told.result(limit_s)
        except NotDone:
            raise RequestTimeout(f"no answer about message {self.id} within {limit_s} s; its outcome is unknown") from None


class LeaseConsumer:
    """A member of a group that leases messages; made by ``Client.lease_consumer``, a context manager.

    ::

        with client.lease_consumer("orders", "billing") as consumer:
            for message in consumer:
                bill(message)
                message.ack()

    Iteration waits for messages, and ends when the consumer is closed. ``run`` calls a handler on several threads instead.
    Threads may share a consumer: each message goes to one of them.
    """

    def __init__(self, holder: LeaseHolder) -> None:
        self._holder = holder

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def group(self) -> str:
        """The name of its group."""
        return self._holder.group

    @property
    def closed(self) -> bool:
        """True when the consumer is closed."""
        return self._holder.closed

    def __iter__(self) -> Iterator[LeasedMessage]:
        """Yield messages until the consumer is closed."""
        while (message := self.receive()) is not None:
            yield message

    def receive(self, timeout_s: float | None = None) -> LeasedMessage | None:
        """Return the next message; ``None`` when none comes within ``timeout_s`` or the consumer is closed.

        Up to a batch from each broker waits in the consumer for the next calls; these leases are extended meanwhile. The lease
        of the message that is returned is not, unless the consumer was made with ``keep``: call its ``extend`` when it takes
        longer.

        Args:
            timeout_s: the most seconds to wait; by default without limit. With 0 it returns what is here, and asks the brokers
                for what the next call returns.

        Raises:
            BadRequest: an argument is invalid.
        """
        until_s = until_of(timeout_s)
        while (lease := self._holder.next(until_s, is_handled=False)) is not None:
            if self._holder.loads is None or self._holder.is_readable(lease):
                self._holder.received(lease)
                return LeasedMessage(self._holder, lease)
        return None

    def run(
        self,
        handler: Callable[[LeasedMessage], object],
        *,
        concurrency: int = DEFAULT_CONCURRENCY,
        retry: Retry | None = None,
    ) -> None:
        """Call a handler for each message, until the consumer is closed, by another thread or by the handler itself.

        Leases are extended while a handler runs. An exception in the thread that has called this, such as ``KeyboardInterrupt``
        or the ``SystemExit`` of a signal handler, leaves it at once; ``close`` then waits for the handlers.

        Args:
            handler: returns when the message is consumed, which is then acked, and raises to have it again later, after the
                pauses of ``LeasedMessage.nack``. It may also call one of the methods of the message, which then counts.
            concurrency: the number of threads that call it.
            retry: how often a message comes again whose handler has raised, before it becomes a dead letter, and the pauses
                before; by default the pauses of ``LeasedMessage.nack``, as often as the group allows (``retry_max_times``).

        Raises:
            BadRequest: an argument is invalid.
            ClientClosed: the consumer was closed.
        """
        checks.function("handler", handler, "takes a message")
        checks.number("concurrency", concurrency, 1)
        check_retry(retry)
        self._holder.begin_handlers(retry)
        threads = [
            threading.Thread(target=self._handle_all, args=(handler,), name=f"metaq-{self.group}-{number}", daemon=True)
            for number in range(concurrency)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._holder.settle()

    def _handle_all(self, handler: Callable[[LeasedMessage], object]) -> None:
        while (lease := self._holder.next(float("inf"), is_handled=True)) is not None:
            with handling(lease):
                self._handle(handler, lease)

    def _handle(self, handler: Callable[[LeasedMessage], object], lease: Lease) -> None:
        if not self._holder.is_readable(lease):
            return
        ended = self._holder.processing(lease)
        try:
            handler(LeasedMessage(self._holder, lease))
        except BaseException as error:  # noqa: BLE001 - logged there; asyncio.CancelledError would end only this thread
            self._holder.raised(lease)
            ended(error)
        else:
            self._holder.handled(lease)
            ended(None)

    def close(self) -> None:
        """Take no more messages, leave the group, give back what was not begun, and wait up to 10 s for running handlers.

        A handler that calls this is not waited for. The client stays open.
        """
        self._holder.close()


def until_of(timeout_s: float | None) -> float:
    """Return the reading of ``time.monotonic`` at which a wait is over; ``None``: it never is."""
    if timeout_s is None:
        return float("inf")
    checks.seconds("timeout_s", timeout_s)
    return time.monotonic() + timeout_s


def lease_consumer(
    core: Core,
    topic: str,
    group: str,
    *,
    tags: str = EVERYTHING,
    sql: str | None = None,
    batch: int,
    invisible: timedelta | float,
    wait: timedelta | float,
    from_first: bool,
    keep: bool,
    deserializer: Serializer[Any] | None,
) -> LeaseConsumer:
    """Make a consumer; see ``Client.lease_consumer``."""
    checks.subscription(topic, tags, sql)
    checks.group(group)
    checks.number("batch", batch, 1, MOST_BATCH)
    checks.flag("from_first", from_first)
    checks.flag("keep", keep)
    check_serializer("deserializer", deserializer)
    invisible_s, wait_s = checks.span("invisible", invisible, LEAST_INVISIBLE_S), checks.span("wait", wait)
    subscription = subscription_to(topic, tags, sql, time.time_ns() // 1_000_000)
    terms = LeaseTerms(topic, group, subscription, round(invisible_s * 1000), from_first)
    loads = None if deserializer is None else deserializer.loads
    return LeaseConsumer(LeaseHolder(core, terms, batch=batch, wait_s=wait_s, keep=keep, loads=loads))

"""Consuming leased messages for asyncio: by iteration, or by a handler."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from datetime import timedelta
from types import TracebackType
from typing import Self

import metaq.client as blocking
from metaq.aio.faces import Threads, outcome_of, soon
from metaq.client import checks
from metaq.client.leasing.consumer import DEFAULT_CONCURRENCY, HeldMessage, until_of
from metaq.client.leasing.holder import handling
from metaq.client.leasing.lease import Lease
from metaq.client.retries import Retry, check_retry
from metaq.errors import RequestTimeout


class LeasedMessage(HeldMessage):
    """See ``metaq.LeasedMessage``. A call that is cancelled is not undone."""

    __slots__ = ()

    async def ack(self) -> None:
        """Finish the message: see ``metaq.LeasedMessage.ack``."""
        await self._wait(self._holder.ack(self._lease))

    async def nack(self, delay: timedelta | float | None = None) -> None:
        """Give the message back: see ``metaq.LeasedMessage.nack``."""
        await self._wait(self._holder.nack(self._lease, None if delay is None else checks.span("delay", delay)))

    async def extend(self, seconds: timedelta | float) -> None:
        """Let the lease end so many seconds from now: see ``metaq.LeasedMessage.extend``."""
        await self._wait(self._holder.extend(self._lease, checks.span("seconds", seconds)))

    async def reject(self) -> None:
        """Make the message a dead letter of the group at once: see ``metaq.LeasedMessage.reject``."""
        await self._wait(self._holder.reject(self._lease))

    async def _wait(self, told: Future[None]) -> None:
        limit_s = self._holder.answer_s
        answer = asyncio.shield(asyncio.wrap_future(told))
        try:
            await asyncio.wait_for(answer, limit_s)
        except TimeoutError:
            raise RequestTimeout(f"no answer about message {self.id} within {limit_s} s; its outcome is unknown") from None


AsyncHandler = Callable[[LeasedMessage], Awaitable[object]]


class LeaseConsumer:
    """See ``metaq.LeaseConsumer``; made by ``Client.lease_consumer``. Tasks may share it."""

    def __init__(self, consumer: blocking.LeaseConsumer, threads: Threads) -> None:
        self._holder = consumer._holder
        self._threads = threads
        self._changed = asyncio.Event()
        self._holder.on_change = soon(self._changed.set)

    @property
    def closed(self) -> bool:
        """True when the consumer is closed."""
        return self._holder.closed

    @property
    def group(self) -> str:
        """The name of its group."""
        return self._holder.group

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def __aiter__(self) -> AsyncIterator[LeasedMessage]:
        """Yield messages until the consumer is closed."""
        while (message := await self.receive()) is not None:
            yield message

    async def receive(self, timeout_s: float | None = None) -> LeasedMessage | None:
        """Return the next message: see ``metaq.LeaseConsumer.receive``."""
        until_s = until_of(timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                while (lease := await self._next(until_s, is_handled=False)) is not None:
                    if self._holder.loads is None or self._holder.is_readable(lease):
                        self._holder.received(lease)
                        return LeasedMessage(self._holder, lease)
        except TimeoutError:
            pass
        return None

    async def _next(self, until_s: float, *, is_handled: bool) -> Lease | None:
        """Return the next message; ``None`` when the consumer is closed."""
        with self._holder.waiting(until_s):
            while True:
                self._changed.clear()
                lease = self._holder.take(is_handled=is_handled)
                if lease is not None or self._holder.closed:
                    return lease
                await self._changed.wait()

    async def run(self, handler: AsyncHandler, *, concurrency: int = DEFAULT_CONCURRENCY, retry: Retry | None = None) -> None:
        """Call a coroutine for each message, in ``concurrency`` tasks, until the consumer is closed by another task or by it.

        See ``metaq.LeaseConsumer.run``. When this is cancelled, the handlers are, too, and their messages are given back.
        """
        checks.function("handler", handler, "takes a message")
        checks.number("concurrency", concurrency, 1)
        check_retry(retry)
        self._holder.begin_handlers(retry)
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(self._handle_all(handler))
        await self._threads.start(self._holder.settle)

    async def _handle_all(self, handler: AsyncHandler) -> None:
        while (lease := await self._next(float("inf"), is_handled=True)) is not None:
            with handling(lease):
                await self._handle(handler, lease)

    async def _handle(self, handler: AsyncHandler, lease: Lease) -> None:
        if not self._holder.is_readable(lease):
            return
        ended = self._holder.processing(lease)
        try:
            await outcome_of(handler(LeasedMessage(self._holder, lease)))
        except Exception as error:  # noqa: BLE001 - logged there, with its trace
            self._holder.raised(lease)
            ended(error)
        except BaseException as error:
            self._holder.failed(lease, 0.0)
            ended(error)
            raise
        else:
            self._holder.handled(lease)
            ended(None)

    async def close(self) -> None:
        """Take no more messages, leave the group, give back what was not begun, and wait up to 10 s for running handlers."""
        await self._threads.start(self._holder.close)

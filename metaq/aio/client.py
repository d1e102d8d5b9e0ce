"""The client, producers and consumers for asyncio: faces of the blocking classes (``metaq.aio.faces``)."""

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from datetime import datetime
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Final, Generic, ParamSpec, Self, TypeVar, Unpack, cast, overload

import metaq.client as blocking
from metaq.aio.admin import Admin
from metaq.aio.faces import OneByOne, Threads, alone, awaited, made, makes, on_loop, outcome_of, requested, soon, threaded
from metaq.aio.leases import LeaseConsumer
from metaq.aio.xa import XaSession
from metaq.client import checks, intercepting
from metaq.client.consuming.beginning import ConsumeFrom
from metaq.client.consuming.offsets import OFFSETS_FOLDER
from metaq.client.consuming.pull import MOST_POLLED
from metaq.client.consuming.push import DEFAULT_THREADS
from metaq.client.consuming.sharing import Model
from metaq.client.keywords import suggests_options
from metaq.client.message import Body, ReceivedMessage
from metaq.client.retries import Retry
from metaq.client.sending.producer import BATCH_BYTES, DEFAULT_GROUP, ProducerOptions
from metaq.client.serializers import Serializer, decoded
from metaq.client.transactions.transactions import (
    Execution,
    HalfMessage,
    Outcome,
    TransactionResult,
    check_functions,
)
from metaq.protocol.subscription import EVERYTHING
from metaq.registry.assign import Assign, average

P = ParamSpec("P")
T = TypeVar("T")

_NONE: Final[Mapping[str, str]] = MappingProxyType({})

AsyncListener = Callable[[ReceivedMessage], Awaitable[object]]
AsyncBatchListener = Callable[[list[ReceivedMessage]], Awaitable[object]]
"""Listeners: they return when the message is consumed, or all are, and raise to have it, or all, delivered again later."""

AsyncExecute = Callable[[HalfMessage, Any], Awaitable[Outcome]]
AsyncCheck = Callable[[HalfMessage], Awaitable[Outcome]]
"""The two coroutine functions of a transaction producer (``metaq.client.transactions.transactions``)."""


class Producer(Generic[Body]):
    """See ``metaq.Producer``; made by ``Client.producer``. Sends that are awaited together may arrive in any order."""

    def __init__(self, producer: blocking.Producer[Body], threads: Threads) -> None:
        self._blocking = producer
        self._threads = threads

    send = awaited(blocking.Producer[Body].send_async)
    send_oneway = threaded(blocking.Producer[Body].send_oneway)
    send_batch = threaded(blocking.Producer[Body].send_batch)
    request = requested(blocking.Producer[Body].request)
    reply = threaded(blocking.Producer[Body].reply)
    send_packed = threaded(blocking.Producer[Body].send_packed)
    queues = threaded(blocking.Producer[Body].queues)
    close = threaded(blocking.Producer[Body].close)

    @property
    def group(self) -> str:
        """The name of its group."""
        return self._blocking.group

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class TransactionProducer:
    """See ``metaq.TransactionProducer``; made by ``Client.transaction_producer``.

    No thread is occupied while ``execute`` runs. A send that is cancelled continues in the background, so that its local
    transaction is not cut short.
    """

    def __init__(self, producer: blocking.TransactionProducer, execute: AsyncExecute, threads: Threads) -> None:
        self._blocking = producer
        self._execute = execute
        self._threads = threads
        self._sends: set[asyncio.Task[TransactionResult]] = set()  # an event loop holds only weak references to its tasks

    close = threaded(blocking.TransactionProducer.close)
    _begin = threaded(blocking.TransactionProducer._begin)
    _end = threaded(blocking.TransactionProducer._end)

    @property
    def group(self) -> str:
        """The name of its group."""
        return self._blocking.group

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def send(
        self,
        topic: str,
        body: bytes,
        *,
        tag: str | None = None,
        keys: str | Iterable[str] = (),
        properties: Mapping[str, str] = _NONE,
        argument: object = None,
        timeout_s: float | None = None,
    ) -> TransactionResult:
        """Send a message and run its local transaction: see ``metaq.TransactionProducer.send``."""
        begin = self._begin(topic, body, tag=tag, keys=keys, properties=properties, timeout_s=timeout_s)
        send = asyncio.ensure_future(self._send(begin, argument))
        self._sends.add(send)
        send.add_done_callback(self._sends.discard)
        return await asyncio.shield(send)

    async def _send(self, begin: Awaitable[Execution], argument: object) -> TransactionResult:
        execution = await begin
        with execution:
            if execution.is_due:
                execution.decide(await outcome_of(self._execute(execution.message, argument)))
        return await self._end(execution)


class SimpleConsumer:
    """See ``metaq.SimpleConsumer``; made by ``Client.consumer``. One task at a time iterates."""

    def __init__(self, consumer: blocking.SimpleConsumer, threads: Threads) -> None:
        self._blocking = consumer
        self._threads = threads
        self._calls = OneByOne(threads)
        self._changed = _changes(consumer)
        self._refused: ReceivedMessage | None = None
        """The last unreadable message that no broker has taken back: the program gets it."""

    subscribe = alone(blocking.SimpleConsumer.subscribe)
    commit = alone(blocking.SimpleConsumer.commit)
    retry_later = alone(blocking.SimpleConsumer.retry_later)
    close = alone(blocking.SimpleConsumer.close)
    assignment = threaded(blocking.SimpleConsumer.assignment)

    @property
    def closed(self) -> bool:
        """True when the consumer is closed."""
        return self._blocking.closed

    @property
    def group(self) -> str:
        """The name of its group."""
        return self._blocking.group

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def __aiter__(self) -> AsyncIterator[ReceivedMessage]:
        """Yield messages until the consumer is closed."""
        while (message := await self.receive()) is not None:
            yield message

    async def receive(self, timeout_s: float | None = None) -> ReceivedMessage | None:
        """Return the next message; ``None`` when none comes in time: see ``metaq.SimpleConsumer.receive``."""
        if timeout_s is not None:
            checks.seconds("timeout_s", timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    self._changed.clear()
                    async with self._calls.turn:
                        message = self._blocking._next(time.monotonic())
                        unreadable = None
                        if message is not None and self._blocking._loads is not None:
                            message = decoded(message, self._blocking._loads)
                            if message.error is not None and message is not self._refused:
                                unreadable = message
                                self._blocking._take_back(message)
                    if unreadable is not None:
                        await self._calls.call(functools.partial(self._send_back, unreadable))
                        continue
                    if message is not None:
                        intercepting.received(self._blocking._core.id, self.group, (message,))
                    if message is not None or self._blocking.closed:
                        return message
                    await self._changed.wait()
        except TimeoutError:
            return None

    def _send_back(self, unreadable: ReceivedMessage) -> None:
        """Send the next message back, on a thread, even after ``receive`` has ended; it stays the next one if that fails."""
        message = self._blocking._next(time.monotonic())
        if message is unreadable and self._blocking._went_back(unreadable):
            return
        self._refused = unreadable
        if message is not None:
            self._blocking._take_back(message)


class PushConsumer:
    """See ``metaq.PushConsumer``; made by ``Client.listen``. The listener's coroutines run on the event loop."""

    def __init__(self, consumer: blocking.PushConsumer, threads: Threads) -> None:
        self._blocking = consumer
        self._threads = threads

    subscribe = threaded(blocking.PushConsumer.subscribe)
    assignment = threaded(blocking.PushConsumer.assignment)
    close = threaded(blocking.PushConsumer.close)

    @property
    def group(self) -> str:
        """The name of its group."""
        return self._blocking.group

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class PullConsumer:
    """See ``metaq.PullConsumer``; made by ``Client.pull_consumer``. One task at a time uses it."""

    def __init__(self, consumer: blocking.PullConsumer, threads: Threads) -> None:
        self._blocking = consumer
        self._calls = OneByOne(threads)
        self._changed = _changes(consumer)

    partitions = alone(blocking.PullConsumer.partitions)
    begin_offset = alone(blocking.PullConsumer.begin_offset)
    end_offset = alone(blocking.PullConsumer.end_offset)
    offset_at = alone(blocking.PullConsumer.offset_at)
    committed = alone(blocking.PullConsumer.committed)
    assign = alone(blocking.PullConsumer.assign)
    read_from = alone(blocking.PullConsumer.read_from)
    assignment = alone(blocking.PullConsumer.assignment)
    position = alone(blocking.PullConsumer.position)
    seek = alone(blocking.PullConsumer.seek)
    seek_to_begin = alone(blocking.PullConsumer.seek_to_begin)
    seek_to_end = alone(blocking.PullConsumer.seek_to_end)
    seek_to_time = alone(blocking.PullConsumer.seek_to_time)
    commit = alone(blocking.PullConsumer.commit)
    close = alone(blocking.PullConsumer.close)
    fetch = alone(blocking.PullConsumer.fetch)
    take = alone(blocking.PullConsumer.take)

    @property
    def topic(self) -> str:
        """The topic that it reads."""
        return self._blocking.topic

    @property
    def closed(self) -> bool:
        """True when the consumer is closed."""
        return self._blocking.closed

    @property
    def group(self) -> str:
        """The name of its group."""
        return self._blocking.group

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def poll(self, timeout_s: float = 0.0, max_messages: int = MOST_POLLED) -> list[ReceivedMessage]:
        """Return messages of one assigned queue, in order: see ``metaq.PullConsumer.poll``."""
        checks.seconds("timeout_s", timeout_s)
        checks.number("max_messages", max_messages, 1)
        await self.fetch()
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    self._changed.clear()
                    async with self._calls.turn:
                        messages = self._blocking.take(max_messages)
                    if messages or self._blocking.closed:
                        return messages
                    await self._changed.wait()
        except TimeoutError:
            return []


class Client:
    """See ``metaq.Client``; made by ``connect``, an asynchronous context manager."""

    def __init__(self, client: blocking.Client) -> None:
        self._blocking = client
        self._threads = Threads()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def id(self) -> str:
        """The id by which brokers know the client: ``address@instance``."""
        return self._blocking.id

    async def close(self) -> None:
        """Stop the consumers, unregister from the brokers, and close the connections."""
        await self._threads.start(self._blocking.close)
        self._threads.close()

    @overload
    def producer(self, group: str = ..., *, serializer: None = ..., **options: Unpack[ProducerOptions]) -> Producer: ...

    @overload
    def producer(self, group: str = ..., *, serializer: Serializer[T], **options: Unpack[ProducerOptions]) -> Producer[T]: ...

    @suggests_options
    def producer(
        self,
        group: str = DEFAULT_GROUP,
        *,
        linger_ms: int = 0,
        batch_bytes: int = BATCH_BYTES,
        serializer: Serializer[Any] | None = None,
        retry: Retry | None = None,
    ) -> Producer[Any]:
        """Return a producer: see ``metaq.Client.producer``."""
        options: ProducerOptions = {"linger_ms": linger_ms, "batch_bytes": batch_bytes, "retry": retry}
        producer: blocking.Producer[Any] = self._blocking.producer(group, serializer=serializer, **options)
        return Producer(producer, self._threads)

    cancel = threaded(blocking.Client.cancel)
    consumer = made(blocking.Client.consumer, SimpleConsumer)
    lease_consumer = made(blocking.Client.lease_consumer, LeaseConsumer)
    pull_consumer = makes(blocking.Client.pull_consumer, PullConsumer)
    xa_session = makes(blocking.Client.xa_session, XaSession)
    admin = makes(blocking.Client.admin, Admin)

    @suggests_options
    def transaction_producer(self, group: str, execute: AsyncExecute, *, check: AsyncCheck) -> TransactionProducer:
        """Make a producer of transactional messages: see ``metaq.Client.transaction_producer``."""
        check_functions(execute, check)
        producer = self._blocking.transaction_producer(group, on_loop(execute), check=on_loop(check))
        return TransactionProducer(producer, execute, self._threads)

    @suggests_options
    async def listen(
        self,
        topic: str,
        group: str,
        listener: AsyncListener | AsyncBatchListener,
        *,
        tags: str = EVERYTHING,
        sql: str | None = None,
        ordered: bool = False,
        threads: int = DEFAULT_THREADS,
        batch_size: int | None = None,
        model: Model = Model.CLUSTERING,
        consume_from: ConsumeFrom | datetime = ConsumeFrom.LAST,
        assign: Assign = average,
        max_reconsume_times: int | None = None,
        offsets_folder: Path = OFFSETS_FOLDER,
        deserializer: Serializer[Any] | None = None,
        retry: Retry | None = None,
    ) -> PushConsumer:
        """Call a coroutine for each message, at most ``threads`` of them at a time: see ``metaq.Client.listen``."""
        checks.function("listener", listener, "takes a message")
        begin = functools.partial(
            self._blocking.listen,
            topic,
            group,
            on_loop(cast(AsyncListener, listener)),
            tags=tags,
            sql=sql,
            ordered=ordered,
            threads=threads,
            batch_size=batch_size,
            model=model,
            consume_from=consume_from,
            assign=assign,
            max_reconsume_times=max_reconsume_times,
            offsets_folder=offsets_folder,
            deserializer=deserializer,
            retry=retry,
        )
        return PushConsumer(await self._threads.make(begin), self._threads)


def _face(connect: Callable[P, blocking.Client]) -> Callable[P, Client]:
    @functools.wraps(connect)
    def connected(*arguments: P.args, **named: P.kwargs) -> Client:
        return Client(connect(*arguments, **named))

    return connected


connect = _face(blocking.connect)


def _changes(consumer: blocking.SimpleConsumer | blocking.PullConsumer) -> asyncio.Event:
    """Return an event that is set, on this loop, when a consumer may have messages and when it is closed."""
    changed = asyncio.Event()
    consumer._when_changed(soon(changed.set))
    return changed

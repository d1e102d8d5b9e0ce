"""Faces of the blocking client's classes. Each holds the blocking object and does its calls on the client's threads."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Concatenate, Final, ParamSpec, Protocol, Self, TypeVar

import metaq.client as blocking
from metaq.client.forks import renewed_in_children
from metaq.client.message import ReceivedMessage
from metaq.client.producer import DEFAULT_GROUP
from metaq.client.pull import DEFAULT_GROUP as PULL_GROUP
from metaq.client.pull import MOST_POLLED
from metaq.client.transactions import HalfMessage, Outcome, TransactionResult

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
S_co = TypeVar("S_co", covariant=True)
T = TypeVar("T")

AsyncListener = Callable[[ReceivedMessage], Awaitable[object]]
"""Returns when the message is consumed; raises to have it again later."""

AsyncExecute = Callable[[HalfMessage, Any], Awaitable[Outcome]]
AsyncCheck = Callable[[HalfMessage], Awaitable[Outcome]]
"""The two coroutine functions of a transaction producer; see ``metaq.client.transactions``."""

_THREADS: Final = 16
"""Calls that block at a time; sends in flight take none."""


class _Threads:
    """Where the blocking calls of one client are made."""

    def __init__(self) -> None:
        self.renew()
        renewed_in_children(self)

    def renew(self) -> None:
        """Have none yet, in a child of a fork."""
        self._executor = ThreadPoolExecutor(_THREADS, "metaq-aio")

    def start(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Begin a call."""
        return asyncio.get_running_loop().run_in_executor(self._executor, function)

    def close(self) -> None:
        """Make no more calls."""
        self._executor.shutdown(wait=False)


class _OneByOne:
    """Where the calls of one blocking object are made that only one thread at a time may use.

    None begins before the one before has ended, whether or not anybody still waits for that one.
    """

    def __init__(self, threads: _Threads) -> None:
        self._threads = threads
        self.turn = asyncio.Lock()
        """Held while the object is used, also by what uses it on the event loop."""

    async def call(self, function: Callable[[], T]) -> T:
        """Make a call when its turn has come. One that is cancelled then goes on by itself."""
        await self.turn.acquire()
        try:
            begun = self._threads.start(function)
        except BaseException:
            self.turn.release()
            raise
        begun.add_done_callback(lambda done: self.turn.release())
        return await asyncio.shield(begun)


class _Face(Protocol[S_co]):
    """An object here, and the blocking one behind it."""

    @property
    def _threads(self) -> _Threads: ...

    @property
    def _blocking(self) -> S_co: ...


def _threaded(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[_Face[S], P], Coroutine[Any, Any, T]]:
    """A blocking method, to be awaited."""

    @functools.wraps(method)
    async def call(self: _Face[S], /, *arguments: P.args, **named: P.kwargs) -> T:
        return await self._threads.start(functools.partial(method, self._blocking, *arguments, **named))

    return call


class _LoneFace(Protocol[S_co]):
    """The same, of an object that one thread at a time may use."""

    @property
    def _calls(self) -> _OneByOne: ...

    @property
    def _blocking(self) -> S_co: ...


def _alone(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[_LoneFace[S], P], Coroutine[Any, Any, T]]:
    """A blocking method, to be awaited, that nothing else is done beside."""

    @functools.wraps(method)
    async def call(self: _LoneFace[S], /, *arguments: P.args, **named: P.kwargs) -> T:
        return await self._calls.call(functools.partial(method, self._blocking, *arguments, **named))

    return call


def _awaited(
    method: Callable[Concatenate[S, P], Future[T]],
) -> Callable[Concatenate[_Face[S], P], Coroutine[Any, Any, T]]:
    """A method that returns a future, to be awaited: no thread is kept while the answer is on its way."""

    @functools.wraps(method)
    async def call(self: _Face[S], /, *arguments: P.args, **named: P.kwargs) -> T:
        begun = await self._threads.start(functools.partial(method, self._blocking, *arguments, **named))
        return await asyncio.wrap_future(begun)

    return call


def _made(
    method: Callable[Concatenate[S, P], R], face: Callable[[R, _Threads], T]
) -> Callable[Concatenate[_Face[S], P], Coroutine[Any, Any, T]]:
    """A blocking method that makes something, to be awaited; ``face`` is what it makes here."""

    @functools.wraps(method)
    async def call(self: _Face[S], /, *arguments: P.args, **named: P.kwargs) -> T:
        begun = self._threads.start(functools.partial(method, self._blocking, *arguments, **named))
        return face(await begun, self._threads)

    return call


class Producer:
    """See ``metaq.Producer``; made by ``Client.producer``. Sends that are awaited together may arrive in any order."""

    def __init__(self, producer: blocking.Producer, threads: _Threads) -> None:
        self._blocking = producer
        self._threads = threads

    send = _awaited(blocking.Producer.send_async)
    send_oneway = _threaded(blocking.Producer.send_oneway)
    send_batch = _threaded(blocking.Producer.send_batch)
    request = _threaded(blocking.Producer.request)
    reply = _threaded(blocking.Producer.reply)
    close = _threaded(blocking.Producer.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class TransactionProducer:
    """See ``metaq.TransactionProducer``; made by ``Client.transaction_producer``.

    No thread is kept while ``execute`` runs. A send that is cancelled goes on by itself: its local transaction is not torn.
    """

    def __init__(self, producer: blocking.TransactionProducer, execute: AsyncExecute, threads: _Threads) -> None:
        self._blocking = producer
        self._execute = execute
        self._threads = threads
        self._sends: set[asyncio.Task[TransactionResult]] = set()  # an event loop alone does not keep its tasks

    close = _threaded(blocking.TransactionProducer.close)
    _begin = _threaded(blocking.TransactionProducer.begin)
    _end = _threaded(blocking.TransactionProducer.end)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def send(self, topic: str, body: bytes, *, argument: object = None, **options: Any) -> TransactionResult:
        """See ``metaq.TransactionProducer.send``, which has the same options."""
        send = asyncio.ensure_future(self._send(topic, body, argument, options))
        self._sends.add(send)
        send.add_done_callback(self._sends.discard)
        return await asyncio.shield(send)

    async def _send(self, topic: str, body: bytes, argument: object, options: dict[str, Any]) -> TransactionResult:
        execution = await self._begin(topic, body, **options)
        with execution:
            if execution.is_due:
                execution.decide(await self._execute(execution.message, argument))
        return await self._end(execution)


class SimpleConsumer:
    """See ``metaq.SimpleConsumer``; made by ``Client.consumer``. One task at a time iterates."""

    def __init__(self, consumer: blocking.SimpleConsumer, threads: _Threads) -> None:
        self._blocking = consumer
        self._calls = _OneByOne(threads)
        self._changed = _changes(consumer)

    subscribe = _alone(blocking.SimpleConsumer.subscribe)
    commit = _alone(blocking.SimpleConsumer.commit)
    retry_later = _alone(blocking.SimpleConsumer.retry_later)
    close = _alone(blocking.SimpleConsumer.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def __aiter__(self) -> AsyncIterator[ReceivedMessage]:
        while (message := await self.receive()) is not None:
            yield message

    async def receive(self, timeout_s: float | None = None) -> ReceivedMessage | None:
        """The next message; ``None`` when none came in time, or the consumer is closed."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    self._changed.clear()
                    async with self._calls.turn:
                        message = self._blocking.receive(timeout_s=0.0)
                    if message is not None or self._blocking.closed:
                        return message
                    await self._changed.wait()
        except TimeoutError:
            return None


class PushConsumer:
    """See ``metaq.PushConsumer``; made by ``Client.listen``. The listener's coroutines run on the event loop."""

    def __init__(self, consumer: blocking.PushConsumer, threads: _Threads) -> None:
        self._blocking = consumer
        self._threads = threads

    subscribe = _threaded(blocking.PushConsumer.subscribe)
    close = _threaded(blocking.PushConsumer.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class PullConsumer:
    """See ``metaq.PullConsumer``; made by ``Client.pull_consumer``. One task at a time uses it."""

    def __init__(self, consumer: blocking.PullConsumer, threads: _Threads) -> None:
        self._blocking = consumer
        self._calls = _OneByOne(threads)
        self._changed = _changes(consumer)

    partitions = _alone(blocking.PullConsumer.partitions)
    begin_offset = _alone(blocking.PullConsumer.begin_offset)
    end_offset = _alone(blocking.PullConsumer.end_offset)
    offset_at = _alone(blocking.PullConsumer.offset_at)
    committed = _alone(blocking.PullConsumer.committed)
    assign = _alone(blocking.PullConsumer.assign)
    assignment = _alone(blocking.PullConsumer.assignment)
    position = _alone(blocking.PullConsumer.position)
    seek = _alone(blocking.PullConsumer.seek)
    seek_to_begin = _alone(blocking.PullConsumer.seek_to_begin)
    seek_to_end = _alone(blocking.PullConsumer.seek_to_end)
    seek_to_time = _alone(blocking.PullConsumer.seek_to_time)
    commit = _alone(blocking.PullConsumer.commit)
    close = _alone(blocking.PullConsumer.close)
    _fetch = _alone(blocking.PullConsumer.fetch)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def poll(self, timeout_s: float = 0.0, max_messages: int = MOST_POLLED) -> list[ReceivedMessage]:
        """Messages of one assigned queue, in order; none when none came in time."""
        await self._fetch()
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


class Admin:
    """See ``metaq.Admin``; made by ``Client.admin``."""

    def __init__(self, admin: blocking.Admin, threads: _Threads) -> None:
        self._blocking = admin
        self._threads = threads

    brokers = _threaded(blocking.Admin.brokers)
    broker_info = _threaded(blocking.Admin.broker_info)
    topics = _threaded(blocking.Admin.topics)
    route = _threaded(blocking.Admin.route)
    create_topic = _threaded(blocking.Admin.create_topic)
    delete_topic = _threaded(blocking.Admin.delete_topic)
    queues = _threaded(blocking.Admin.queues)
    groups = _threaded(blocking.Admin.groups)
    members = _threaded(blocking.Admin.members)
    group_lag = _threaded(blocking.Admin.group_lag)
    offsets = _threaded(blocking.Admin.offsets)
    reset_offset = _threaded(blocking.Admin.reset_offset)
    query_by_key = _threaded(blocking.Admin.query_by_key)
    query_by_id = _threaded(blocking.Admin.query_by_id)
    replay = _threaded(blocking.Admin.replay)

    async def dead_letters(self, group: str) -> list[ReceivedMessage]:
        """What a group has failed to consume."""
        return await self._threads.start(lambda: list(self._blocking.dead_letters(group)))


class Client:
    """See ``metaq.Client``; made by ``connect``, an asynchronous context manager."""

    def __init__(self, client: blocking.Client) -> None:
        self._blocking = client
        self._threads = _Threads()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def id(self) -> str:
        """What brokers know it by: address@instance."""
        return self._blocking.id

    async def close(self) -> None:
        """Stop consumers, tell brokers what they still have to know, and close the connections."""
        await self._threads.start(self._blocking.close)
        self._threads.close()

    def producer(self, group: str = DEFAULT_GROUP) -> Producer:
        """See ``metaq.Client.producer``."""
        return Producer(self._blocking.producer(group), self._threads)

    def transaction_producer(self, group: str, execute: AsyncExecute, *, check: AsyncCheck) -> TransactionProducer:
        """See ``metaq.Client.transaction_producer``."""
        producer = self._blocking.transaction_producer(group, _on_loop(execute), check=_on_loop(check))
        return TransactionProducer(producer, execute, self._threads)

    consumer = _made(blocking.Client.consumer, SimpleConsumer)

    async def listen(self, topic: str, group: str, listener: AsyncListener, **options: Any) -> PushConsumer:
        """See ``metaq.Client.listen``, which has the same options; ``threads`` is how many messages are consumed at a time."""
        begin = functools.partial(self._blocking.listen, topic, group, _on_loop(listener), **options)
        return PushConsumer(await self._threads.start(begin), self._threads)

    def pull_consumer(self, topic: str, group: str = PULL_GROUP, **options: Any) -> PullConsumer:
        """See ``metaq.Client.pull_consumer``, which has the same options."""
        return PullConsumer(self._blocking.pull_consumer(topic, group, **options), self._threads)

    def admin(self) -> Admin:
        """See ``metaq.Client.admin``."""
        return Admin(self._blocking.admin(), self._threads)


def connect(address: str, **options: Any) -> Client:
    """See ``metaq.connect``, which has the same options."""
    return Client(blocking.connect(address, **options))


def _on_loop(function: Callable[P, Awaitable[T]]) -> Callable[P, T]:
    """For threads: a function that waits for its coroutine on this loop."""
    loop = asyncio.get_running_loop()

    async def work(*arguments: P.args, **named: P.kwargs) -> T:
        return await function(*arguments, **named)

    def wait(*arguments: P.args, **named: P.kwargs) -> T:
        return asyncio.run_coroutine_threadsafe(work(*arguments, **named), loop).result()

    return wait


def _changes(consumer: blocking.SimpleConsumer | blocking.PullConsumer) -> asyncio.Event:
    """Is set, on this loop, when a consumer may have something, and when it is closed."""
    loop, changed = asyncio.get_running_loop(), asyncio.Event()

    def tell() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits any more
            loop.call_soon_threadsafe(changed.set)

    consumer.when_changed(tell)
    return changed

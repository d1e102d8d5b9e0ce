"""Wrappers that make an asyncio class, a *face*, of a class of the blocking client, method by method.

A face holds a blocking object, and each of its methods has the types and the docstring of the blocking method that it calls.
Calls that may wait run on the threads of the client, never on the event loop.
"""

import asyncio
import contextlib
import contextvars
import functools
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, Concatenate, Final, ParamSpec, Protocol, TypeVar

from metaq.client.connecting.forks import renewed_in_children

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
S_co = TypeVar("S_co", covariant=True)
T = TypeVar("T")


class Closable(Protocol):
    """An object that must be closed."""

    def close(self) -> None: ...


Closes = TypeVar("Closes", bound=Closable)

_AT_ONCE: Final = 64
"""The most items of an iterator that one call on a thread fetches."""
_THREADS: Final = 16
"""The most blocking calls at a time; sends in flight occupy no thread."""
_REQUESTS: Final = 256
"""The most requests that wait for replies at a time. They have threads of their own, because a reply may need another one."""


class Threads:
    """The threads on which the blocking calls of one client run."""

    def __init__(self) -> None:
        self._renew()
        renewed_in_children(self)

    def _renew(self) -> None:
        """Start with new, empty pools, in a child of a fork and after the client was closed."""
        self._executor = ThreadPoolExecutor(_THREADS, "metaq-aio")
        self._requests = ThreadPoolExecutor(_REQUESTS, "metaq-aio-request")

    def start(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Start a call on a thread, with the context variables of this task; return its future on the running event loop."""
        return asyncio.wrap_future(self.submit(function))

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Start a call as ``start`` does; return its future on the thread, which is done only when the call has ended."""
        return _submitted(self._executor, function)

    def request(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Start a call that waits for another program, as ``start`` does."""
        return asyncio.wrap_future(_submitted(self._requests, function))

    async def make(self, function: Callable[[], Closes]) -> Closes:
        """Return what a call on a thread makes. When this is cancelled, that is closed as soon as it is made."""
        begun = self.submit(function)
        try:
            return await asyncio.wrap_future(begun)
        except asyncio.CancelledError:
            begun.add_done_callback(self._unmake)
            raise

    def _unmake(self, made: Future[Closes]) -> None:
        if not made.cancelled() and made.exception() is None:
            self.close_soon(made.result())

    def close_soon(self, it: Closable) -> None:
        """Close an object on a thread, without waiting for that; nothing is done when the program ends."""
        with contextlib.suppress(RuntimeError):  # no thread can begin any more
            self._executor.submit(it.close)

    def close(self) -> None:
        """End the threads after the calls that run, without waiting for them.

        A later call has a new thread, on which the closed client says that it is closed.
        """
        executor, requests = self._executor, self._requests
        self._renew()
        executor.shutdown(wait=False)
        requests.shutdown(wait=False)


def _submitted(executor: ThreadPoolExecutor, function: Callable[[], T]) -> Future[T]:
    return executor.submit(contextvars.copy_context().run, function)


class OneByOne:
    """The calls of one blocking object that only one thread at a time may use.

    A call begins only after the previous one has ended, even when the previous one was cancelled.
    """

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self.turn = asyncio.Lock()
        """A lock that is held while the object is used, on a thread or on the event loop."""

    async def call(self, function: Callable[[], T]) -> T:
        """Make a call when its turn has come. If it is cancelled after that, it still runs to its end on the thread."""
        await self.turn.acquire()
        try:
            begun = self._threads.start(function)
        except BaseException:
            self.turn.release()
            raise
        begun.add_done_callback(lambda done: self.turn.release())
        return await asyncio.shield(begun)


class Face(Protocol[S_co]):
    """An asyncio object that wraps a blocking one."""

    @property
    def _threads(self) -> Threads: ...

    @property
    def _blocking(self) -> S_co: ...


def threaded(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[Face[S], P], Coroutine[Any, Any, T]]:
    """Turn a blocking method into a coroutine method that runs it on a thread."""

    @functools.wraps(method)
    async def call(self: Face[S], /, *arguments: P.args, **named: P.kwargs) -> T:
        return await self._threads.start(functools.partial(method, self._blocking, *arguments, **named))

    return call


def requested(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[Face[S], P], Coroutine[Any, Any, T]]:
    """Turn a blocking method that waits for another program into a coroutine method; many such calls keep no other waiting."""

    @functools.wraps(method)
    async def call(self: Face[S], /, *arguments: P.args, **named: P.kwargs) -> T:
        return await self._threads.request(functools.partial(method, self._blocking, *arguments, **named))

    return call


class LoneFace(Protocol[S_co]):
    """A face whose blocking object only one thread at a time may use."""

    @property
    def _calls(self) -> OneByOne: ...

    @property
    def _blocking(self) -> S_co: ...


def alone(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[LoneFace[S], P], Coroutine[Any, Any, T]]:
    """Turn a blocking method into a coroutine method whose calls run one at a time for each object."""

    @functools.wraps(method)
    async def call(self: LoneFace[S], /, *arguments: P.args, **named: P.kwargs) -> T:
        return await self._calls.call(functools.partial(method, self._blocking, *arguments, **named))

    return call


def awaited(
    method: Callable[Concatenate[S, P], Future[T]],
) -> Callable[Concatenate[Face[S], P], Coroutine[Any, Any, T]]:
    """Turn a method that returns a future into a coroutine method; no thread is occupied while the answer is outstanding."""

    @functools.wraps(method)
    async def call(self: Face[S], /, *arguments: P.args, **named: P.kwargs) -> T:
        begun = await self._threads.start(functools.partial(method, self._blocking, *arguments, **named))
        return await asyncio.wrap_future(begun)

    return call


def made(
    method: Callable[Concatenate[S, P], Closes], face: Callable[[Closes, Threads], T]
) -> Callable[Concatenate[Face[S], P], Coroutine[Any, Any, T]]:
    """Turn a blocking method that makes an object into a coroutine method that returns the object's ``face``."""

    @functools.wraps(method)
    async def call(self: Face[S], /, *arguments: P.args, **named: P.kwargs) -> T:
        made = await self._threads.make(functools.partial(method, self._blocking, *arguments, **named))
        return face(made, self._threads)

    return call


def makes(method: Callable[Concatenate[S, P], R], face: Callable[[R, Threads], T]) -> Callable[Concatenate[Face[S], P], T]:
    """Turn a method that makes an object without waiting into a plain method that returns the object's ``face``."""

    @functools.wraps(method)
    def call(self: Face[S], /, *arguments: P.args, **named: P.kwargs) -> T:
        return face(method(self._blocking, *arguments, **named), self._threads)

    return call


def iterated(
    method: Callable[Concatenate[S, P], Iterator[T]],
) -> Callable[Concatenate[Face[S], P], AsyncIterator[T]]:
    """Turn a method that returns a blocking iterator into one for ``async for``.

    When that is cancelled while a thread waits for items, a generator is closed as soon as it has them.
    """

    @functools.wraps(method)
    async def iterate(self: Face[S], /, *arguments: P.args, **named: P.kwargs) -> AsyncIterator[T]:
        items = await self._threads.start(functools.partial(method, self._blocking, *arguments, **named))
        reading: Future[tuple[list[T], Exception | None]] | None = None
        try:
            while True:
                reading = self._threads.submit(functools.partial(_some, items))
                some, error = await asyncio.wrap_future(reading)
                for item in some:
                    yield item
                if error is not None:
                    raise error
                if not some:
                    break
        finally:
            if isinstance(items, Generator):
                if reading is None or reading.done():
                    await self._threads.start(items.close)
                else:
                    reading.add_done_callback(lambda done: self._threads.close_soon(items))

    return iterate


def _some(items: Iterator[T]) -> tuple[list[T], Exception | None]:
    """Return the next items, none at the end, and the error that came instead of one more."""
    some: list[T] = []
    try:
        for item in itertools.islice(items, _AT_ONCE):
            some.append(item)  # noqa: PERF402 - those before an error are kept
    except Exception as error:  # noqa: BLE001 - raised where the items are awaited
        return some, error
    return some, None


def on_loop(function: Callable[P, Awaitable[T]]) -> Callable[P, T]:
    """Return a function that runs the coroutine function on this loop and waits for it; it is called on other threads."""
    loop = asyncio.get_running_loop()

    async def work(*arguments: P.args, **named: P.kwargs) -> T:
        return await function(*arguments, **named)

    def wait(*arguments: P.args, **named: P.kwargs) -> T:
        return asyncio.run_coroutine_threadsafe(work(*arguments, **named), loop).result()

    return wait


async def outcome_of(work: Awaitable[T]) -> T:
    """Await a coroutine of the program, in a task that does not end when only something that it awaits was cancelled.

    Raises ``concurrent.futures.CancelledError`` for that, as threads see it: an exception like any other.
    """
    try:
        return await work
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise CancelledError("cancelled by others while it was awaited") from error


def soon(function: Callable[[], object]) -> Callable[[], None]:
    """Return a function that any thread may call, and which calls ``function`` on this loop soon afterwards."""
    loop = asyncio.get_running_loop()

    def call() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, so no task waits any more
            loop.call_soon_threadsafe(function)

    return call

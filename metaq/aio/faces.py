"""How a class of the blocking client becomes one for asyncio: method by method, each with the types of the one that it calls.

A *face* holds a blocking object. What may wait there is done on the threads of the client, never on the event loop.
"""

import asyncio
import functools
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Concatenate, Final, ParamSpec, Protocol, TypeVar

from metaq.client.connecting.forks import renewed_in_children

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
S_co = TypeVar("S_co", covariant=True)
T = TypeVar("T")

_AT_ONCE: Final = 64
"""Items of an iterator that one visit to a thread brings."""
_THREADS: Final = 16
"""Calls that block at a time; sends in flight take none."""


class Threads:
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


class OneByOne:
    """Where the calls of one blocking object are made that only one thread at a time may use.

    None begins before the one before has ended, whether or not anybody still waits for that one.
    """

    def __init__(self, threads: Threads) -> None:
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


class Face(Protocol[S_co]):
    """An object here, and the blocking one behind it."""

    @property
    def _threads(self) -> Threads: ...

    @property
    def _blocking(self) -> S_co: ...


def threaded(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[Face[S], P], Coroutine[Any, Any, T]]:
    """A blocking method, to be awaited."""

    @functools.wraps(method)
    async def call(self: Face[S], /, *arguments: P.args, **named: P.kwargs) -> T:
        return await self._threads.start(functools.partial(method, self._blocking, *arguments, **named))

    return call


class LoneFace(Protocol[S_co]):
    """The same, of an object that one thread at a time may use."""

    @property
    def _calls(self) -> OneByOne: ...

    @property
    def _blocking(self) -> S_co: ...


def alone(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[LoneFace[S], P], Coroutine[Any, Any, T]]:
    """A blocking method, to be awaited, that nothing else is done beside."""

    @functools.wraps(method)
    async def call(self: LoneFace[S], /, *arguments: P.args, **named: P.kwargs) -> T:
        return await self._calls.call(functools.partial(method, self._blocking, *arguments, **named))

    return call


def awaited(
    method: Callable[Concatenate[S, P], Future[T]],
) -> Callable[Concatenate[Face[S], P], Coroutine[Any, Any, T]]:
    """A method that returns a future, to be awaited: no thread is kept while the answer is on its way."""

    @functools.wraps(method)
    async def call(self: Face[S], /, *arguments: P.args, **named: P.kwargs) -> T:
        begun = await self._threads.start(functools.partial(method, self._blocking, *arguments, **named))
        return await asyncio.wrap_future(begun)

    return call


def made(
    method: Callable[Concatenate[S, P], R], face: Callable[[R, Threads], T]
) -> Callable[Concatenate[Face[S], P], Coroutine[Any, Any, T]]:
    """A blocking method that makes something, and may wait for that; ``face`` is what it makes here."""

    @functools.wraps(method)
    async def call(self: Face[S], /, *arguments: P.args, **named: P.kwargs) -> T:
        begun = self._threads.start(functools.partial(method, self._blocking, *arguments, **named))
        return face(await begun, self._threads)

    return call


def makes(method: Callable[Concatenate[S, P], R], face: Callable[[R, Threads], T]) -> Callable[Concatenate[Face[S], P], T]:
    """A method that makes something without waiting; ``face`` is what it makes here."""

    @functools.wraps(method)
    def call(self: Face[S], /, *arguments: P.args, **named: P.kwargs) -> T:
        return face(method(self._blocking, *arguments, **named), self._threads)

    return call


def iterated(
    method: Callable[Concatenate[S, P], Iterator[T]],
) -> Callable[Concatenate[Face[S], P], AsyncIterator[T]]:
    """A blocking iterator, to be iterated over with ``async for``."""

    @functools.wraps(method)
    async def iterate(self: Face[S], /, *arguments: P.args, **named: P.kwargs) -> AsyncIterator[T]:
        items = await self._threads.start(functools.partial(method, self._blocking, *arguments, **named))
        try:
            while some := await self._threads.start(lambda: list(itertools.islice(items, _AT_ONCE))):
                for item in some:
                    yield item
        finally:
            if isinstance(items, Generator):
                await self._threads.start(items.close)

    return iterate


def on_loop(function: Callable[P, Awaitable[T]]) -> Callable[P, T]:
    """For threads: a function that waits for its coroutine on this loop."""
    loop = asyncio.get_running_loop()

    async def work(*arguments: P.args, **named: P.kwargs) -> T:
        return await function(*arguments, **named)

    def wait(*arguments: P.args, **named: P.kwargs) -> T:
        return asyncio.run_coroutine_threadsafe(work(*arguments, **named), loop).result()

    return wait

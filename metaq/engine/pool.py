"""Blocking system calls off the event loop: in the hub's thread pool, and syncs of the log in a thread of their own.

Readers that are far behind may fill the pool with slow reads, and puts wait for syncs, so syncs do not use the pool. A call to
a thread of their own also takes half the time (28 µs instead of 60): it needs no task queue, and no watcher for each call.
"""

import threading
from collections import deque
from collections.abc import Callable
from functools import cache
from queue import SimpleQueue
from typing import Any, TypeVar

from gevent.hub import Waiter, get_hub

T = TypeVar("T")


def _attempt(call: Callable[[], T]) -> tuple[T, None] | tuple[None, Exception]:
    """Return the result or the error as a value: the pool itself would print every error, handled or not."""
    try:
        return call(), None
    except Exception as error:  # noqa: BLE001 - raised again by ``_result``
        return None, error


def _result(attempted: Any) -> Any:
    outcome, error = attempted
    if error is not None:
        raise error
    return outcome


def run_in_pool(call: Callable[[], T]) -> T:
    """Make one system call in the hub's thread pool; return its result or raise its error. Only the calling greenlet waits."""
    return _result(get_hub().threadpool.apply(_attempt, (call,)))  # type: ignore[no-any-return]


def run_sync(call: Callable[[], T]) -> T:
    """Make one system call in the thread for syncs of the log, in the order of the calls; only the calling greenlet waits."""
    return _syncs().run(call)


@cache
def _syncs() -> "_OwnThread":
    return _OwnThread("syncs")


class _OwnThread:
    """A thread that makes one call after the other, for as long as the process lives.

    The event loop never waits for a lock that the thread holds: it only puts calls into a queue, and a watcher wakes it.
    """

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[tuple[Any, Callable[[], Any]]] = SimpleQueue()
        self._done: deque[tuple[Any, Any]] = deque()
        self._watcher = get_hub().loop.async_()
        self._watcher.start(self._tell)
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def run(self, call: Callable[[], T]) -> T:
        waiter: Any = Waiter()
        self._calls.put((waiter, call))
        return _result(waiter.get())  # type: ignore[no-any-return]

    def _work(self) -> None:
        while True:
            waiter, call = self._calls.get()
            self._done.append((waiter, _attempt(call)))
            self._watcher.send()

    def _tell(self) -> None:
        while self._done:
            waiter, attempted = self._done.popleft()
            waiter.switch(attempted)  # harmless if the waiting greenlet was killed

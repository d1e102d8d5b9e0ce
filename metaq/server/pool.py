"""System calls in the hub's thread pool."""

from collections.abc import Callable
from typing import Any, TypeVar

from gevent.hub import get_hub

T = TypeVar("T")


def _attempt(call: Callable[[], T]) -> tuple[T, None] | tuple[None, Exception]:
    """Bring a failure home as a value: the pool itself would print it, handled or not."""
    try:
        return call(), None
    except Exception as error:  # noqa: BLE001 - raised again by ``run_in_pool``
        return None, error


def run_in_pool(call: Callable[[], T]) -> T:
    """Make one system call in the hub's thread pool; only the calling greenlet waits."""
    outcome: Any
    outcome, error = get_hub().threadpool.apply(_attempt, (call,))
    if error is not None:
        raise error
    return outcome  # type: ignore[no-any-return]

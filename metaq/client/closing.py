"""The close of a consumer, for which others that close it, too, wait."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_MOST_S: Final = 30.0
"""The longest time that others wait: more than a close takes whose brokers answer."""


class Closing:
    """A close that happens once. Thread-safe."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._thread = 0

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Note that this thread closes, and when it has ended, in whatever way."""
        self._thread = threading.get_ident()
        try:
            yield
        finally:
            self._ended.set()

    def wait(self) -> None:
        """Wait for the end, within limits; not on the thread that closes, as in a signal handler."""
        if threading.get_ident() != self._thread:
            self._ended.wait(_MOST_S)

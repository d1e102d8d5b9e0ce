"""A bell that wakes a connection: a thread that waits for messages, or an event loop that watches a descriptor."""

import contextlib
import os
import threading

_guard = threading.Lock()
"""Held while descriptors are made, used or closed: the number of a closed one may be another file's."""


class Bell:
    """Rung by any thread, answered by one. Who is woken clears it first and looks for messages afterwards."""

    def __init__(self) -> None:
        self._rung = threading.Event()
        self._ends: tuple[int, int] | None = None

    def ring(self) -> None:
        """Wake who waits, or who waits next."""
        if self._rung.is_set():
            return
        self._rung.set()
        with _guard:
            if self._ends is not None:
                with contextlib.suppress(BlockingIOError):  # full is loud enough
                    os.write(self._ends[1], b"\0")

    def wait(self, timeout_s: float | None) -> None:
        """Wait until it is rung, at most so long, and clear it."""
        self._rung.wait(timeout_s)
        self._rung.clear()

    def fileno(self) -> int:
        """Return a descriptor that is readable when it was rung."""
        with _guard:
            if self._ends is None:
                self._ends = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            return self._ends[0]

    def answer(self) -> None:
        """Clear it for who watches the descriptor. Reading comes first: a ring in between must find it cleared, or be seen."""
        with _guard:
            if self._ends is not None:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._ends[0], 4096)
        self._rung.clear()

    def close(self) -> None:
        """Close the descriptors, if there are any."""
        with _guard:
            ends, self._ends = self._ends or (), None
            for end in ends:
                os.close(end)


def _renew() -> None:
    """Make the lock anew in a child of a fork: a thread of the parent may have held it."""
    global _guard  # noqa: PLW0603 - one for all bells, so that a child has one to make anew
    _guard = threading.Lock()


os.register_at_fork(after_in_child=_renew)

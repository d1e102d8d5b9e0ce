"""A bell that wakes a connection: a thread that waits for messages, or an event loop that watches a descriptor."""

import contextlib
import os
import threading


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
        if self._ends is not None:
            with contextlib.suppress(BlockingIOError, OSError):  # full is loud enough; closed: nobody listens any more
                os.write(self._ends[1], b"\0")

    def wait(self, timeout_s: float | None) -> None:
        """Wait until it is rung, at most so long, and clear it."""
        self._rung.wait(timeout_s)
        self._rung.clear()

    def fileno(self) -> int:
        """Return a descriptor that is readable when it was rung."""
        if self._ends is None:
            self._ends = os.pipe()
            for end in self._ends:
                os.set_blocking(end, False)
        return self._ends[0]

    def answer(self) -> None:
        """Clear it for who watches the descriptor. Reading comes first: a ring in between must find it cleared, or be seen."""
        if self._ends is not None:
            with contextlib.suppress(BlockingIOError):
                os.read(self._ends[0], 4096)
        self._rung.clear()

    def close(self) -> None:
        """Close the descriptors, if there are any."""
        if self._ends is not None:
            ends, self._ends = self._ends, None
            for end in ends:
                os.close(end)

"""The writing side of a connection: frames in the order of the calls, many of them in one system call."""

import contextlib
import logging
import math
import queue
import threading
import time
from collections import deque
from typing import Final

from metaq.client.connecting.connection import STALL_S, LinkConnection
from metaq.errors import ClientError, NotConnected, RequestTimeout

logger = logging.getLogger(__name__)

LARGE_BYTES: Final = 16 * 1024
"""A frame from this size on is written at once: a system call costs little beside it."""
MOST_WAITING: Final = 512
"""The most frames that wait to be written; whoever brings one more writes them, so that a slow broker slows the program."""


class LinkWriter:
    """A writer of frames to one connection. Thread-safe.

    A frame is written by its caller, or ``soon``: then by a thread of the writer's own, which writes all frames that have come
    while it was busy or waited for a processor. Every caller that writes takes along what waits, so that nothing overtakes it.
    """

    def __init__(self, connection: LinkConnection) -> None:
        self._connection = connection
        self._turn = threading.Lock()  # held by the thread that writes
        self._limit_s = STALL_S
        self._waiting: deque[bytes] = deque()
        self._calls: queue.SimpleQueue[bool] = queue.SimpleQueue()
        """Calls to the writer's own thread: true to write, false to end."""
        self._is_called = False
        self._guard = threading.Lock()  # guards the start of the thread
        self._own_thread: threading.Thread | None = None

    def write(self, frame: bytes, deadline: float) -> None:
        """Write what waits, and the frame after it.

        ``RequestTimeout`` when the deadline has passed, or other writers do not end by then; ``NotConnected`` when the
        connection was lost before, ``ConnectionFailed`` when it is lost meanwhile: also when it accepts no data until the
        deadline, because part of a frame is written then.
        """
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise RequestTimeout(f"the time of a request to {self._connection.address} was over before it was sent")
        if not self._turn.acquire(timeout=left_s):
            raise RequestTimeout(f"{self._connection.address} accepts no data")
        try:
            self._flush(deadline - time.monotonic(), frame)
        finally:
            self._turn.release()

    def soon(self, frame: bytes, deadline: float) -> None:
        """Have the frame written, together with others. It raises what ``write`` raises if the caller must write it."""
        is_own_turn = len(frame) >= LARGE_BYTES or len(self._waiting) >= MOST_WAITING
        if is_own_turn or (self._own_thread is None and not self._start()):
            self.write(frame, deadline)
            return
        self._waiting.append(frame)
        if not self._is_called:
            self._is_called = True
            self._calls.put(True)

    def end(self) -> None:
        """End the writer's own thread, after the connection was given up."""
        self._calls.put(False)
        with self._turn:
            self._connection.outgoing.close()

    def _limit(self, seconds: float) -> None:
        """Let a write take so long, at most ``STALL_S``; in whole seconds, because a change costs a system call."""
        limit_s = STALL_S if seconds > STALL_S - 1.0 else max(1.0, float(math.ceil(seconds)))
        if limit_s != self._limit_s:
            self._limit_s = limit_s
            self._connection.outgoing.settimeout(limit_s)

    def _flush(self, seconds: float, frame: bytes = b"") -> None:
        connection = self._connection
        if connection.lost:  # its socket may be closed
            raise NotConnected(str(connection.failure()))
        self._limit(seconds)
        if self._waiting:
            frames = [self._waiting.popleft() for _ in range(len(self._waiting))]
            frame = b"".join((*frames, frame))
        if not frame:
            return
        try:
            connection.outgoing.sendall(frame)
        # Callbacks are not called here: one may take a lock that the writing thread already holds.
        except OSError as error:
            connection.give_up(f"sending failed: {error}")
            raise connection.failure() from error
        except BaseException:
            connection.give_up("a request was interrupted in the middle")
            raise

    def _start(self) -> bool:
        """Start the writer's own thread, unless another caller has; return false when the system has no room for one now."""
        with self._guard:
            if self._own_thread is None:
                name = f"metaq-write-{self._connection.address}"
                thread = threading.Thread(target=self._write_on_call, name=name, daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:
                    logger.debug("no thread to write, callers do it address=%s reason=%s", self._connection.address, error)
                    return False
                self._own_thread = thread
            return True

    def _write_on_call(self) -> None:
        while self._calls.get():
            self._is_called = False  # before the frames are taken: one that comes now calls again
            with self._turn, contextlib.suppress(ClientError):  # who waits for an answer is told by whoever reads
                self._flush(STALL_S)

"""The reading side of a connection: a caller that waits for an answer reads it itself when nobody else reads.

One thread at a time reads. ::

    its own thread reads ── has answered a caller, and nothing is in flight ──▶ rests: callers may read
            ▲                                                                        │
            └── something is in flight that no caller waits for, or no caller has read for a moment

A caller that asks again and again therefore reads its answers without waking another thread for them. Only the reader's own
thread runs callbacks: a caller may hold locks that these take, so it hands over what is not for a caller.
"""

import os
import select
import threading
import time
from collections.abc import Callable
from typing import Final, Protocol

from metaq.client.connecting.connection import LinkConnection
from metaq.client.connecting.transport import Waiter
from metaq.errors import ProtocolError
from metaq.protocol.remoting.frames import FrameReader, RemotingCommand
from metaq.reasons import reason_of

_RECEIVE_BYTES: Final = 64 * 1024
"""Large, because a reader may wait up to 5 ms for the interpreter's lock, and should then receive everything that came."""
_REST_S: Final = 0.002
"""The time without a caller that reads after which the reader's own thread reads again. A request of the broker may wait up to
twice as long after a caller's answer; a broker that has made one is always read."""
_QUICK_S: Final = 0.0002
"""The longest time for which a caller asks again and again for its answer before it sleeps. To sleep and to be woken takes 30
to 60 µs, as much as an answer of a broker at MEMORY. Where the last answer took longer than this, that is not worth saving."""
_HAS_PROCESSORS: Final = (os.cpu_count() or 1) > 1
"""With a single one, the broker may need it to answer."""
_LONGEST_WAIT_S: Final = 86400.0
"""The longest time for which a poll is asked to wait; the kernel takes no more than 24 days."""


class Receiver(Protocol):
    """The taker of frames."""

    def answered(self, frame: RemotingCommand) -> bool:
        """Give the frame to the caller that waits for it; false when it is for nobody who waits."""
        ...

    def take(self, frame: RemotingCommand) -> None:
        """Take any other frame. It may run callbacks."""
        ...

    def in_flight(self) -> bool:
        """Return whether any request has no answer yet."""
        ...

    def ended(self) -> None:
        """Fail what is in flight, because the connection is lost."""
        ...


class LinkReader:
    """A reader of frames from one connection. Thread-safe."""

    def __init__(self, connection: LinkConnection, receiver: Receiver) -> None:
        self._connection = connection
        self._receiver = receiver
        self._frames = FrameReader()
        self._poll = select.poll()
        self._poll.register(connection.incoming.fileno(), select.POLLIN)
        self._changed = threading.Condition(threading.Lock())  # guards what follows
        self._rests = False
        """Whether the reader's own thread leaves reading to callers."""
        self._led = False
        """Whether a caller reads."""
        self._leads = 0
        """How often a caller has begun to read."""
        self._handed: list[RemotingCommand] = []
        """Frames that a caller has read and not taken."""
        self._is_waiting = False
        """Whether the reader's own thread waits until the caller that reads is done."""
        self._is_quick = False
        """Whether the last answer that a caller has read came within ``_QUICK_S``, so that the next one is likely to."""
        self._is_asked = False
        """Whether the broker has ever asked something over this connection."""

    def start(self) -> None:
        """Start the reader's own thread, which reads until the connection is lost."""
        threading.Thread(target=self._run, name=f"metaq-link-{self._connection.address}", daemon=True).start()

    def read_for(self, waiter: Waiter, deadline: float) -> None:
        """Read until the waiter has its outcome or the deadline has come; return at once when another thread reads."""
        with self._changed:
            if self._led or not self._rests:
                return
            self._led = True
            self._leads += 1
        try:
            while not waiter.is_set and not self._connection.lost:
                left = deadline - time.monotonic()
                if left <= 0:
                    return
                if self._is_readable(min(left, _LONGEST_WAIT_S)):
                    self._read_for_callers()
        finally:
            self._led = False  # before any call, in which an interrupt could come
            self._leave()

    def expect(self) -> None:
        """Have the reader's own thread read, because something is in flight that no caller will read."""
        if self._rests:
            with self._changed:
                self._changed.notify()

    def _is_readable(self, limit_s: float) -> bool:
        """Wait for data at most for a time; at first without sleeping, when it is likely to come at once."""
        began = time.monotonic()
        ready = False
        while self._is_quick and not ready:
            ready = bool(self._poll.poll(0))
            self._is_quick = time.monotonic() - began < _QUICK_S
        if not ready:
            ready = bool(self._poll.poll(limit_s * 1000))
            self._is_quick = _HAS_PROCESSORS and time.monotonic() - began < _QUICK_S
        return ready

    def _read_for_callers(self) -> None:
        try:
            others = [frame for frame in self._receive() if not self._receiver.answered(frame)]
            if others:
                with self._changed:
                    self._handed += others
                    self._changed.notify()
        except BaseException:  # an interrupt, of which it is unknown what it has cut off
            self._connection.give_up("a reply was interrupted in the middle")
            raise

    def _leave(self) -> None:
        with self._changed:
            if self._is_waiting or self._connection.lost or self._receiver.in_flight():
                self._changed.notify()

    def _receive(self) -> list[RemotingCommand]:
        """Return the frames that have come; when that fails, the connection is given up, and there may be none."""
        try:
            data = self._connection.incoming.recv(_RECEIVE_BYTES)
            frames = self._frames.receive(data)
        except BlockingIOError:
            return []  # no whole TLS record yet
        except OSError as error:
            self._connection.give_up(reason_of(error))
            return []
        except (ProtocolError, MemoryError) as error:
            self._connection.give_up(str(error) or "memory is short")
            return []
        if not data:
            self._connection.give_up("the other side closed it")
        elif self._frames.error is not None:
            self._connection.give_up(f"this is not the port of a broker or a registry: {self._frames.error}")
        return frames

    # -- the reader's own thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        connection, receiver = self._connection, self._receiver
        while not connection.lost:
            has_answered = False
            for frame in self._next():
                if receiver.answered(frame):
                    has_answered = True
                else:
                    self._is_asked = self._is_asked or not frame.is_response
                    receiver.take(frame)
            if has_answered and not self._is_asked:
                self._rest()
        with self._changed:
            self._await_leave(lambda: not self._led)
            left = self._handed
        for frame in left:
            receiver.take(frame)
        receiver.ended()
        connection.incoming.close()

    def _rest(self) -> None:
        with self._changed:
            self._rests = not self._receiver.in_flight()

    def _next(self) -> list[RemotingCommand]:
        """Return frames as soon as there are some; none when something has changed."""
        with self._changed:
            if self._handed:
                handed, self._handed = self._handed, []
                return handed
            if self._rests:
                self._await_callers()
                return []
        self._poll.poll()
        return self._receive()

    def _await_callers(self) -> None:
        """Wait a moment, or until it has something to do; then it reads again, unless a caller reads, or has read meanwhile."""
        leads = self._leads
        self._changed.wait(_REST_S)
        if self._led and self._leads == leads:
            self._await_leave(lambda: not self._led or bool(self._handed))
        elif not self._led and (self._leads == leads or self._receiver.in_flight()):
            self._rests = False

    def _await_leave(self, is_over: Callable[[], bool]) -> None:
        self._is_waiting = True
        self._changed.wait_for(is_over)
        self._is_waiting = False

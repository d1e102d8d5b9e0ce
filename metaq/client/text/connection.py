"""One TCP connection that several threads share, with requests matched to their replies by opaque."""

import contextlib
import itertools
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import Final

from metaq.address import Address
from metaq.client.connecting.access import OPEN, Access
from metaq.errors import ConnectionFailed, ProtocolError, Refused, RequestTimeout, StreamLost
from metaq.protocol.text.commands import NO_OPAQUE
from metaq.protocol.text.pushed import Pushed
from metaq.protocol.text.replies import BAD_REQUEST, OK, Reply, TextReader
from metaq.protocol.text.writing import write_line
from metaq.reasons import reason_of

_RECEIVE_BYTES: Final = 256 * 1024
_LEAST_TIMEOUT_S: Final = 0.001  # a socket takes 0 for "do not wait" and has no negative timeout


class Exchange:
    """The requests that one call has in flight, and their replies by opaque."""

    __slots__ = ("in_flight", "refused", "replies")

    def __init__(self) -> None:
        self.in_flight = 0
        self.replies: dict[int, Reply] = {}
        self.refused = False
        """True when one of the replies is an error."""


class TextConnection:
    """A connection on which any number of threads send requests and wait for their replies.

    It has no thread of its own: one of the waiting threads reads for all. An error on the stream fails every request in flight,
    and the connection is lost. Deadlines are readings of ``time.monotonic``.
    """

    def __init__(self, host: str, port: int, timeout_s: float, access: Access = OPEN) -> None:
        """Connect and log in.

        ``ConnectionFailed`` when the connection fails or exceeds ``timeout_s``, ``Refused`` when the login is wrong, and
        ``BadRequest`` for a user or a password that the text protocol cannot carry.
        """
        login = access.words()
        self._address = Address(host, port)
        self._outgoing = access.connect(self._address, timeout_s)
        # A timeout belongs to the socket object, and both directions may wait at once, with different threads' deadlines.
        self._incoming = self._outgoing.dup()
        self._reader = TextReader()
        self._sending = threading.Lock()
        self._opaques = itertools.count()
        self._changed = threading.Condition()  # guards what follows
        self._waiting: dict[int, Exchange] = {}
        self._someone_reads = False
        self._pushed: deque[Pushed | Reply] | None = None
        self._lost = ""
        self._last_words = ""
        if login is not None:
            self._log_in(login, time.monotonic() + timeout_s)

    def _log_in(self, login: tuple[str, str], deadline: float) -> None:
        exchange, opaque = Exchange(), self.new_opaque()
        self.send(write_line("auth", *login, opaque), [opaque], exchange, deadline)
        self.wait(exchange, 0, deadline)
        reply = exchange.replies[opaque]
        if reply.code != OK:
            self.lose("the login was refused")
            raise Refused(reply.code, f"{self._address}: {reply.body.decode(errors='replace')}")

    def usable(self) -> bool:
        """Return whether the connection is still open. Call it before a request, because brokers close idle connections."""
        with self._changed:
            if self._lost or self._waiting or self._someone_reads:
                return not self._lost
            try:
                self._incoming.settimeout(0)
                while True:
                    self._deliver(self._receive())
            except BlockingIOError:
                return True
            except (OSError, ProtocolError) as error:
                self.lose(str(error))
                return False

    def new_opaque(self) -> int:
        """Return an opaque that no request in flight has."""
        return next(self._opaques) % int(NO_OPAQUE)

    def send(self, frames: bytes, opaques: Iterable[int], exchange: Exchange, deadline: float) -> None:
        """Send complete requests, whose replies go to ``exchange``. ``ConnectionFailed``, ``RequestTimeout``."""
        with self._changed:
            self._check()
            for opaque in opaques:
                self._waiting[opaque] = exchange
                exchange.in_flight += 1
        with self._sending:
            try:
                self._outgoing.settimeout(max(_LEAST_TIMEOUT_S, deadline - time.monotonic()))
                self._outgoing.sendall(frames)
            except TimeoutError as error:
                raise self._timed_out() from error
            except OSError:
                # The broker's last replies, and perhaps its reason to close, can still be read; then reading fails, too.
                with contextlib.suppress(OSError):
                    self._outgoing.shutdown(socket.SHUT_WR)
            except BaseException:
                self.lose("a request was interrupted in the middle")
                raise

    def wait(self, exchange: Exchange, at_most: int, deadline: float) -> None:
        """Wait until at most ``at_most`` requests of the exchange are unanswered. ``ConnectionFailed``, ``RequestTimeout``."""
        with self._changed:
            while exchange.in_flight > at_most:
                self._check()
                if not self._someone_reads:
                    try:
                        self._read_for_all(deadline)
                    except TimeoutError as error:
                        raise self._timed_out() from error
                elif not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    raise self._timed_out()

    def take_pushes(self) -> None:
        """Keep what comes without being the reply to a request, for ``next_push``."""
        self._pushed = deque()

    def next_push(self, deadline: float) -> Pushed | Reply | None:
        """Return the next message that was pushed, or another reply to the request that had them pushed; ``None`` if none comes
        in time. Raise ``ConnectionFailed``."""
        assert self._pushed is not None
        with self._changed:
            while not self._pushed:
                self._check()
                if not self._someone_reads:
                    try:
                        self._read_for_all(deadline)
                    except TimeoutError:
                        return None
                elif not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    return None
            return self._pushed.popleft()

    def lose(self, reason: str) -> None:
        """Close the connection; requests in flight and later ones fail with ``reason``."""
        with self._changed:
            if self._lost:
                return
            self._lost = reason
            self._changed.notify_all()
        with contextlib.suppress(OSError):  # the other side may have closed it
            self._incoming.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads
        self._incoming.close()
        self._outgoing.close()

    def abandon(self) -> None:
        """Mark the connection as lost in a child of a fork, and close its descriptors without shutting down the parent's."""
        self._sending = threading.Lock()
        self._changed = threading.Condition()
        self._waiting, self._someone_reads = {}, False
        self._lost = self._lost or "it belongs to the process that this one was forked from"
        for handle in (self._incoming, self._outgoing):
            with contextlib.suppress(OSError):
                handle.close()

    def _read_for_all(self, deadline: float) -> None:
        """Receive once, and deliver the replies; ``TimeoutError`` when nothing comes in time.

        The lock is held on entry and on return, but not while waiting for data.
        """
        self._someone_reads = True
        self._changed.release()
        try:
            self._incoming.settimeout(max(_LEAST_TIMEOUT_S, deadline - time.monotonic()))
            replies = self._receive()
        except OSError as error:
            if isinstance(error, TimeoutError) and error.errno is None:  # with a number, the system has given up the other host
                raise
            raise self._failed(reason_of(error)) from error
        except ProtocolError as error:
            raise self._failed(f"this is not the text port of a broker, by default 8123: {error}") from error
        except BaseException:
            self.lose("a reply was interrupted in the middle")
            raise
        finally:
            self._changed.acquire()
            self._someone_reads = False
            self._changed.notify_all()
        self._deliver(replies)

    def _receive(self) -> list[Reply | Pushed]:
        data = self._incoming.recv(_RECEIVE_BYTES)
        if not data:
            raise ConnectionResetError(f"the broker closed the connection{self._last_words}")
        frames = self._reader.receive(data)
        if self._pushed is None and any(isinstance(frame, Pushed) for frame in frames):
            raise StreamLost("a message was pushed, though nothing is subscribed")
        return frames

    def _deliver(self, frames: list[Reply | Pushed]) -> None:
        for reply in frames:
            if isinstance(reply, Pushed):
                assert self._pushed is not None  # see _receive
                self._pushed.append(reply)
                continue
            exchange = self._waiting.pop(reply.opaque, None)
            if exchange is None:
                # not an answer to a request: the reason why the broker is about to close the connection, or to push no more
                if self._pushed is not None:
                    self._pushed.append(reply)
                self._last_words = f", saying {reply.code}: {reply.body.decode(errors='replace')}"
                continue
            exchange.replies[reply.opaque] = reply
            exchange.in_flight -= 1
            exchange.refused |= reply.code >= BAD_REQUEST

    def _check(self) -> None:
        if self._lost:
            raise ConnectionFailed(f"the connection to {self._address} is lost: {self._lost}")

    def _failed(self, reason: str) -> ConnectionFailed:
        self.lose(reason)
        return ConnectionFailed(f"the connection to {self._address} is lost: {self._lost}")

    def _timed_out(self) -> RequestTimeout:
        self.lose("a request on it was not answered in time")
        return RequestTimeout(
            f"no answer from {self._address} in time (timeout_s): the request may or may not have been carried out"
        )

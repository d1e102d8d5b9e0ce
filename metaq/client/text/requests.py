"""Requests of the text protocol and their replies, over one connection that is opened again when it was lost."""

import re
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from metaq.client import checks
from metaq.client.connecting.access import Access, Tls
from metaq.client.connecting.forks import renewed_in_children
from metaq.client.text.connection import Exchange, TextConnection
from metaq.errors import BadRequest, ClientError, Refused
from metaq.protocol.text.replies import OK, Reply

DEFAULT_PORT: Final = 8123
_NAME: Final = re.compile("[!-~]+")


class TextRequests:
    """A connection that threads share, and the requests over it: the base class of ``TextClient``."""

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = DEFAULT_PORT,
        *,
        timeout_s: float = 10.0,
        user: str = "",
        password: str = "",
        tls: Tls = False,
    ) -> None:
        """Connect.

        Args:
            host: the broker's host.
            port: its port.
            timeout_s: limits the wait for a connection and for each answer; an attribute that can be changed.
            user: the user's name, when the broker has users.
            password: the user's secret.
            tls: as ``metaq.connect`` takes it.

        Raises:
            ConnectionFailed: the broker cannot be reached.
            Refused: user or password are wrong.
        """
        self._access = Access(user, password, tls)
        self._host = host
        self._port = port
        self.timeout_s = timeout_s
        self._closed = False
        self._connecting = threading.Lock()  # guards what follows
        self._connection = TextConnection(host, port, timeout_s, self._access)
        renewed_in_children(self)

    def _renew(self) -> None:
        """Drop the connection in a child of a fork, where the next call opens a new one."""
        self._connecting = threading.Lock()
        self._connection.abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the client for good. Requests of other threads that are in flight raise ``ConnectionFailed``."""
        with self._connecting:
            self._closed = True
            self._connection.lose("the client was closed")

    def _ask(self, write: Callable[[int], bytes], held_s: float = 0.0) -> Reply:
        """Send the request that ``write`` makes for an opaque, and return the reply, whatever its code.

        The time limit is ``timeout_s`` plus ``held_s``, for which the broker may hold the request.
        """
        connection = self._usable_connection()
        exchange = Exchange()
        opaque = connection.new_opaque()
        deadline = self._deadline(held_s)
        connection.send(write(opaque), [opaque], exchange, deadline)
        connection.wait(exchange, 0, deadline)
        return exchange.replies[opaque]

    def _deadline(self, held_s: float = 0.0) -> float:
        return time.monotonic() + self.timeout_s + held_s

    def _usable_connection(self) -> TextConnection:
        with self._connecting:
            if self._closed:
                raise ClientError("this client was closed")
            if not self._connection.usable():
                self._connection = TextConnection(self._host, self._port, self.timeout_s, self._access)
            return self._connection


def check_name(field: str, name: str) -> None:
    """Refuse a name that the protocol cannot carry."""
    checks.text(field, name)
    if not _NAME.fullmatch(name):
        raise BadRequest(f"{field} {name!r} is not made of printable ASCII characters without blanks")


def text_in(reply: Reply) -> str:
    """Return what a reply says."""
    return reply.body.decode(errors="replace")


def refusal_of(reply: Reply) -> Refused:
    """Return the error for a reply that is a refusal."""
    return Refused(reply.code, text_in(reply))


def accepted(reply: Reply) -> Reply:
    """Return a reply that accepts; raise ``Refused`` for another one."""
    if reply.code != OK:
        raise refusal_of(reply)
    return reply


def number_in(reply: Reply) -> int:
    """Return the number in a reply; ``ClientError`` when there is none."""
    try:
        return int(reply.body)
    except ValueError as error:
        raise ClientError(f"the broker answered {reply.body[:80]!r} instead of a number") from error

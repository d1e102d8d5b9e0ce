"""The opening of a connection: its first byte selects the protocol (specs: remoting protocol, sections 1.1 and 1.8).

=================================  ==============================================================================
0x16                               a TLS handshake; after it the first byte of what it carries decides
0x00, 0x01                         a frame: no frame is longer than 16 MiB
a lower-case letter, CR, LF        the text protocol
anything else                      one ``result 400``, and the connection is closed
=================================  ==============================================================================
"""

import logging
import socket
from typing import Any, Final, Protocol

from metaq.protocol.text.commands import NO_OPAQUE
from metaq.protocol.text.replies import BAD_REQUEST, write_result
from metaq.replication.peers import TLS
from metaq.server.wire.session import READABLE, RECEIVE_BYTES, Session, SessionHost, Stream
from metaq.server.wire.tls import TlsContext, TlsStream

logger = logging.getLogger(__name__)

FRAME: Final = b"\x00\x01"
TEXT: Final = b"abcdefghijklmnopqrstuvwxyz\r\n"


class Door(SessionHost, Protocol):
    """The parts of the broker that an opening connection needs."""

    handshake_timeout_s: float
    tls: TlsContext | None

    def timer(self, seconds: float) -> Any: ...

    def text(self, connection: Stream, address: Any) -> Session:
        """Return a new session of the text protocol."""
        ...

    def remoting(self, connection: Stream, address: Any) -> Session:
        """Return a new session of the remoting protocol."""
        ...

    def opened(self, opening: "Opening", session: Session | None) -> None:
        """Take note that the opening is over; without a session the connection was closed."""
        ...


class Opening:
    """A connection that has not sent anything yet."""

    __slots__ = ("_connection", "_door", "_timer", "_watcher", "address", "last_io")

    is_expected: Final = False

    def __init__(self, connection: socket.socket, address: Any, door: Door) -> None:
        self._connection: socket.socket | TlsStream = connection
        self.address = address
        self._door = door
        self.last_io = door.now()
        self._watcher = door.io(connection.fileno(), READABLE)
        self._watcher.start(self.on_readable)
        self._timer = door.timer(door.handshake_timeout_s)
        self._timer.start(self._expire)

    def on_readable(self) -> None:
        """Select the protocol, if something has arrived."""
        try:
            if isinstance(self._connection, socket.socket):
                first = self._connection.recv(1, socket.MSG_PEEK)
                if first and first[0] == TLS:
                    self._secure(self._connection)
                    return
            data = self._connection.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            logger.debug("connection lost while opening peer=%s reason=%s", self.address, error)
            self.close()
            return
        if data:
            self._choose(data)
        else:
            self.close()

    def _secure(self, connection: socket.socket) -> None:
        if self._door.tls is None:
            logger.warning("TLS refused peer=%s reason=no certificate is configured (tls_certificate)", self.address)
            self.close()
        else:
            self._connection = self._door.tls.secured(connection)
            self.on_readable()

    def _choose(self, data: bytes) -> None:
        first = data[0]
        if first in FRAME:
            make = self._door.remoting
        elif first in TEXT:
            make = self._door.text
        else:
            self._refuse(first)
            return
        self._release()
        session = make(self._connection, self.address)
        self._door.opened(self, session)
        session.receive(data)

    def _refuse(self, first: int) -> None:
        text = f"the first byte {first:#04x} begins neither a command nor a frame nor a TLS handshake"
        try:
            self._connection.send(write_result(BAD_REQUEST, text, NO_OPAQUE))
        except OSError as error:
            logger.debug("connection lost while opening peer=%s reason=%s", self.address, error)
        self.close()

    def _expire(self) -> None:
        logger.info("connection silent, closed peer=%s", self.address)
        self.close()

    def _release(self) -> None:
        self._watcher.close()
        self._timer.close()

    def close(self) -> None:
        self._release()
        self._connection.close()
        self._door.opened(self, None)

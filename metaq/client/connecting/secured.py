"""TLS connections of clients; imported by those that use TLS."""

import socket
import ssl
import threading
from collections.abc import Callable
from typing import Final, TypeVar, cast

from metaq.errors import BadRequest
from metaq.reasons import reason_of

_RECEIVE_BYTES: Final = 64 * 1024

T = TypeVar("T")


def context_of(tls: bool | str | ssl.SSLContext) -> ssl.SSLContext:
    """Return the context that a client's choice asks for. ``BadRequest`` for certificates that cannot be read."""
    if isinstance(tls, ssl.SSLContext):
        return tls
    if not isinstance(tls, bool | str):
        raise BadRequest(f"tls is of type {type(tls).__name__}; it takes True, the name of a file (PEM), or an ssl.SSLContext")
    try:
        context = ssl.create_default_context(cafile=tls if isinstance(tls, str) else None)
    except OSError as error:
        raise BadRequest(f"the certificates {tls} cannot be used: {reason_of(error)}") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


class Secured:
    """A TLS connection that one thread may read while others write, as with a plain socket.

    OpenSSL does not allow that for one connection, and Python's TLS sockets cannot be duplicated. So the bytes go through
    memory buffers, and no thread holds the lock while it waits for the network.
    """

    def __init__(self, raw: socket.socket, tls: ssl.SSLObject, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO) -> None:
        self._raw = raw
        self._tls = tls
        self._incoming = incoming
        self._outgoing = outgoing
        self._guard = threading.Lock()  # guards the three above
        self._sending = threading.Lock()

    @classmethod
    def agree(cls, raw: socket.socket, context: ssl.SSLContext, name: str) -> "Secured":
        """Do the handshake, and return the connection; ``OSError`` when it fails."""
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = context.wrap_bio(incoming, outgoing, server_hostname=name)
        while True:
            try:
                tls.do_handshake()
            except ssl.SSLWantReadError:
                raw.sendall(outgoing.read())
                data = raw.recv(_RECEIVE_BYTES)
                if not data:
                    raise ConnectionResetError("the other side closed the connection") from None
                incoming.write(data)
            else:
                raw.sendall(outgoing.read())
                return cls(raw, tls, incoming, outgoing)

    def dup(self) -> "Secured":
        other = Secured(self._raw.dup(), self._tls, self._incoming, self._outgoing)
        other._guard, other._sending = self._guard, self._sending
        return other

    def fileno(self) -> int:
        return self._raw.fileno()

    def recv(self, size: int, /) -> bytes:
        """Return all that has come. A caller that polls the descriptor would never see what stays here.

        That may be more than ``size``: what is received completes a TLS record of up to 16 KiB that began before it.
        """
        return self._received(lambda: self._all(size)) or b""

    def _all(self, size: int) -> bytes:
        data = self._tls.read(size)
        try:
            while data and (more := self._tls.read(size)):
                data += more
        except (ssl.SSLWantReadError, ssl.SSLZeroReturnError, ssl.SSLEOFError):
            pass  # the next call tells of the end
        return data

    def recv_into(self, buffer: memoryview, /) -> int:
        # typeshed does not know that a read into a buffer returns the number of bytes
        return self._received(lambda: cast(int, self._tls.read(len(buffer), buffer))) or 0

    def _received(self, read: Callable[[], T]) -> T | None:
        """Wait until ``read`` returns something, and return that; ``None`` at the end of the stream."""
        while True:
            with self._guard:
                try:
                    return read()
                except ssl.SSLWantReadError:
                    pass
                except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                    return None
            data = self._raw.recv(_RECEIVE_BYTES)
            with self._guard:
                if data:
                    self._incoming.write(data)
                else:
                    self._incoming.write_eof()

    def sendall(self, data: bytes, /) -> None:
        with self._sending:
            with self._guard:
                self._tls.write(data)
                records = self._outgoing.read()  # includes the records that reading had to send
            self._raw.sendall(records)

    def settimeout(self, seconds: float | None, /) -> None:
        self._raw.settimeout(seconds)

    def shutdown(self, how: int, /) -> None:
        self._raw.shutdown(how)

    def close(self) -> None:
        self._raw.close()

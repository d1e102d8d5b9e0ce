"""Authentication and TLS for connections to brokers and registries."""

import socket
import ssl
import threading
from collections.abc import Callable, Mapping
from typing import Final, Protocol, TypeVar, cast

from metaq.address import Address
from metaq.errors import BadRequest, NotConnected
from metaq.protocol.remoting.signature import Credentials
from metaq.reasons import reason_of

Tls = bool | str | ssl.SSLContext
"""The choice of TLS: none, with the certificates of this machine, with those in a file (PEM), or with a context."""

_RECEIVE_BYTES: Final = 64 * 1024

T = TypeVar("T")


class BlockingStream(Protocol):
    """The methods of a socket that the clients use."""

    def fileno(self) -> int: ...

    def recv(self, size: int, /) -> bytes: ...

    def recv_into(self, buffer: memoryview, /) -> int: ...

    def sendall(self, data: bytes, /) -> None: ...

    def settimeout(self, seconds: float | None, /) -> None: ...

    def dup(self) -> "BlockingStream":
        """Return another handle of the same connection, with a time limit of its own."""
        ...

    def shutdown(self, how: int, /) -> None: ...

    def close(self) -> None: ...


class Access:
    """The credentials of a client and its use of TLS; it may have both, one or neither."""

    def __init__(self, user: str = "", password: str = "", tls: Tls = False) -> None:
        """Check the arguments: ``BadRequest`` for a user without a password, and for certificates that cannot be read."""
        if bool(user) != bool(password):
            raise BadRequest("give both a user and a password, or neither")
        self.user = user
        self.password = password
        self.credentials = Credentials(user, password) if user else None
        self.tls = _context(tls)

    def signed(self, fields: Mapping[str, str] | None, body: bytes) -> Mapping[str, str] | None:
        """Return the fields of a remoting request with this user's signature; unchanged when there is no user."""
        return fields if self.credentials is None else self.credentials.signed(fields, body)

    def words(self) -> tuple[str, str] | None:
        """Return user and password for the text protocol's login, ``None`` without a user.

        ``BadRequest`` when they hold blanks or other characters than printable ASCII, which a command line cannot carry.
        """
        if self.credentials is None:
            return None
        for what, word in (("user", self.user), ("password", self.password)):
            if not (word.isascii() and word.isprintable()) or " " in word:
                raise BadRequest(f"the {what} cannot log in: the text protocol allows only printable ASCII without blanks")
        return self.user, self.password

    def connect(self, address: Address, timeout_s: float) -> BlockingStream:
        """Connect, with a TLS handshake if TLS is used; ``NotConnected`` when that fails or exceeds ``timeout_s``."""
        try:
            connection = socket.create_connection(address, timeout_s)
        except OSError as error:
            raise NotConnected(f"cannot connect to {address}: {reason_of(error)}; check that metaq listens there") from error
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self.tls is None:
            return connection
        try:
            return _Secured.agree(connection, self.tls, address.host)
        except OSError as error:
            connection.close()
            advice = "check that the broker has a tls_certificate for this name, of an issuer that is trusted here"
            raise NotConnected(f"no TLS with {address}: {reason_of(error)}; {advice}") from error


def _context(tls: Tls) -> ssl.SSLContext | None:
    if isinstance(tls, ssl.SSLContext):
        return tls
    if not tls:
        return None
    if not isinstance(tls, bool | str):
        raise BadRequest(f"tls is of type {type(tls).__name__}; it takes True, the name of a file (PEM), or an ssl.SSLContext")
    try:
        context = ssl.create_default_context(cafile=tls if isinstance(tls, str) else None)
    except OSError as error:
        raise BadRequest(f"the certificates {tls} cannot be used: {reason_of(error)}") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


OPEN: Final = Access()
"""Access without a user and without TLS."""


class _Secured:
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
    def agree(cls, raw: socket.socket, context: ssl.SSLContext, name: str) -> "_Secured":
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

    def dup(self) -> "_Secured":
        other = _Secured(self._raw.dup(), self._tls, self._incoming, self._outgoing)
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

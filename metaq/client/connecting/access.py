"""Authentication and TLS for connections to brokers and registries."""

import socket
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

from metaq.address import Address
from metaq.errors import BadRequest, NotConnected
from metaq.reasons import reason_of

if TYPE_CHECKING:
    import ssl

    from metaq.protocol.remoting.signature import Credentials

Tls: TypeAlias = "bool | str | ssl.SSLContext"
"""The choice of TLS: none, with the certificates of this machine, with those in a file (PEM), or with a context."""

_VANISHED_MS: Final = 30_000
"""How long what was sent may stay unacknowledged; then the other host is taken for vanished, and the connection is lost."""
_PROBE_S: Final = 10
"""After how long without a byte the other host is asked whether it is there, and how often: a program that only receives would
never hear that it has vanished. ``_VANISHED_MS`` counts then, too, so that two questions may be lost before the third."""


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
        self.credentials: Credentials | None = None
        if user:
            from metaq.protocol.remoting import signature  # noqa: PLC0415 - brings OpenSSL's hashes

            self.credentials = signature.Credentials(user, password)
        self.tls: ssl.SSLContext | None = None
        if tls:
            from metaq.client.connecting.secured import context_of  # noqa: PLC0415 - OpenSSL takes 10 ms and some MB

            self.tls = context_of(tls)

    def signed(self, fields: Mapping[str, str] | None, body: bytes) -> Mapping[str, str] | None:
        """Return the fields of a remoting request with this user's signature; unchanged when there is no user."""
        return fields if self.credentials is None else self.credentials.signed(fields, body)

    def words(self) -> tuple[str, str] | None:
        """Return user and password for the text protocol's login, ``None`` without a user.

        ``BadRequest`` when one of them has characters that a command line cannot carry.
        """
        if self.credentials is None:
            return None
        for what, word in (("user", self.user), ("password", self.password)):
            if not word.isprintable() or " " in word:
                raise BadRequest(f"the {what} cannot log in: the text protocol allows only printable characters without blanks")
        return self.user, self.password

    def connect(self, address: Address, timeout_s: float) -> BlockingStream:
        """Connect, with a TLS handshake if TLS is used; ``NotConnected`` when that fails or exceeds ``timeout_s``."""
        try:
            connection = socket.create_connection(address, timeout_s)
        except OSError as error:
            raise NotConnected(f"cannot connect to {address}: {reason_of(error)}; check that metaq listens there") from error
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if sys.platform == "linux":  # other systems notice such a host later
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _VANISHED_MS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
        if self.tls is None:
            return connection
        try:
            from metaq.client.connecting.secured import Secured  # noqa: PLC0415 - see above

            return Secured.agree(connection, self.tls, address.host)
        except OSError as error:
            connection.close()
            advice = "check that the broker has a tls_certificate for this name, of an issuer that is trusted here"
            raise NotConnected(f"no TLS with {address}: {reason_of(error)}; {advice}") from error


OPEN: Final = Access()
"""Access without a user and without TLS."""

"""Authentication of registries, masters and slaves: TLS, and proofs that both sides have an administrator's secret.

::

    slave   hello                                     (``metaq.replication.frames``)
    master  control  challenge: 32 hexadecimal digits; without users the proof is left out on both sides
    slave   proof    4 length │ JSON: user, nonce, proof
    master  control  the answer to the hello, with the master's proof as one more member

    proof = hexadecimal HMAC-SHA-256(secret, side │ 0 │ challenge │ 0 │ nonce │ 0 │ the hello's JSON); side is slave or master
"""

import hashlib
import hmac
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, Self

import orjson
from gevent import socket

from metaq.errors import AccessDenied, ConfigError, ProtocolError
from metaq.protocol.remoting.signature import Credentials
from metaq.reasons import reason_of
from metaq.replication.frames import LENGTH

if TYPE_CHECKING:
    from gevent import ssl

SLAVE: Final = b"slave"
MASTER: Final = b"master"
MOST_PROOF: Final = 1024
TLS: Final = 0x16
"""The first byte of a TLS handshake; no hello of a slave begins with it."""

Credential = Callable[[], Credentials | None]


class Doorkeeper(Protocol):
    """A master's access to its users, to check those that connect."""

    def secret_of(self, name: str, address: str, proves: Callable[[str], bool]) -> str | None:
        """Return an administrator's secret if ``proves`` accepts it, otherwise ``None``.

        Raises ``AccessDenied`` after too many wrong proofs.
        """
        ...


class Proof(NamedTuple):
    """A slave's answer to a challenge."""

    user: str
    nonce: str
    proof: str

    def encode(self) -> bytes:
        body = orjson.dumps(self._asdict())
        return LENGTH.pack(len(body)) + body

    @classmethod
    def decode(cls, body: bytes) -> Self:
        """Decode the JSON of a proof; raise ``ProtocolError`` when it is none."""
        try:
            proof = cls(**orjson.loads(body))
        except (orjson.JSONDecodeError, TypeError) as error:
            raise ProtocolError("the answer to the challenge is not a proof") from error
        if not all(isinstance(part, str) and part.isascii() for part in proof):
            raise ProtocolError("the values of a proof must be text")
        return proof


def prove(secret: str, side: bytes, challenge: str, nonce: str, hello: bytes) -> str:
    """Return the proof of one side, in hexadecimal digits."""
    said = b"\0".join((side, challenge.encode(), nonce.encode(), hello))
    return hmac.new(secret.encode(), said, hashlib.sha256).hexdigest()


class Peers:
    """The settings with which this process connects to registries and masters."""

    def __init__(self, credentials: Credential, tls_ca: str) -> None:
        """Create it; ``credentials`` returns the current ones, if any. Raises ``ConfigError`` for an unusable ``tls_ca``."""
        self.credentials = credentials
        self._tls: Any = None
        if tls_ca:
            from gevent import ssl  # noqa: PLC0415 - only with TLS: with its libraries it takes 1.5 MB

            # not create_default_context: it makes a context of the standard library, whose sockets would block the loop
            self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            self._tls.minimum_version = ssl.TLSVersion.TLSv1_2
            try:
                self._tls.load_verify_locations(cafile=tls_ca)
            except OSError as error:
                raise ConfigError(f"cluster_tls_ca {tls_ca}: cannot be used: {reason_of(error)}") from error

    def connect(self, address: tuple[str, int], timeout_s: float) -> socket.socket:
        """Return a new connection, in TLS if that is configured; raise ``OSError`` when it fails."""
        connection = _connect(address, timeout_s)
        if self._tls is None:
            return connection
        try:
            secured: socket.socket = self._tls.wrap_socket(connection, server_hostname=address[0])
        except BaseException:
            connection.close()
            raise
        return secured


def _connect(address: tuple[str, int], timeout_s: float) -> socket.socket:
    """Return a new connection. Only a name is looked up: gevent's resolver takes 0.5 MB."""
    if not _is_ipv4(address[0]):
        return socket.create_connection(address, timeout_s)
    connection = socket.socket()
    try:
        connection.settimeout(timeout_s)
        connection.connect(address)
    except BaseException:
        connection.close()
        raise
    return connection


def _is_ipv4(host: str) -> bool:
    try:
        socket.inet_pton(socket.AF_INET, host)
    except OSError:
        return False
    return True


STRANGER: Final = Peers(lambda: None, "")
"""A peer that neither proves who it is nor uses TLS."""


class Certificate:
    """The server's side of TLS, on a port that takes connections with and without it."""

    def __init__(self, chain: str, key: str) -> None:
        """Load a certificate chain and its key from files; raise ``ConfigError`` when they cannot be used."""
        from gevent import ssl  # noqa: PLC0415 - only with TLS: with its libraries it takes 1.5 MB

        self._tls: Any = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._tls.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            self._tls.load_cert_chain(chain, key or None)
        except OSError as error:
            raise ConfigError(
                f"tls_certificate {chain}{f', tls_key {key}' if key else ''}: cannot be used: {reason_of(error)}"
            ) from error

    def secured(self, connection: socket.socket) -> "ssl.SSLSocket":
        """Return the connection in TLS; the caller still has to do the handshake (``do_handshake``)."""
        secured: ssl.SSLSocket = self._tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return secured


class Claim:
    """A slave's side of the mutual proof, on one connection."""

    def __init__(self, credentials: Credentials | None, hello: bytes) -> None:
        """Create it for the JSON of the slave's hello."""
        self._credentials = credentials
        self._hello = hello
        self._expected = ""

    def answer(self, challenge: str) -> bytes:
        """Return the proof to send; raise ``ProtocolError`` without credentials, or when the master asks twice."""
        if self._credentials is None:
            raise ProtocolError("the master has users and asks for a login; set cluster_user")
        if self._expected:
            raise ProtocolError("the master asks twice for a login")
        name, secret = self._credentials
        nonce = secrets.token_hex(16)
        self._expected = prove(secret, MASTER, challenge, nonce, self._hello)
        return Proof(name, nonce, prove(secret, SLAVE, challenge, nonce, self._hello)).encode()

    def check(self, proof: str) -> None:
        """Raise ``ProtocolError`` when the master has to prove itself, because credentials are set, and its proof is wrong."""
        if self._credentials is None:
            return
        if not self._expected or not hmac.compare_digest(self._expected.encode(), proof.encode()):
            raise ProtocolError("the master does not prove that it knows the secret of cluster_user; check its users_file")


def check_claim(keeper: Doorkeeper, proof: Proof, challenge: str, hello: bytes, address: str) -> str:
    """Check the proof of a slave at the host ``address``; return the master's own, or raise ``AccessDenied`` if it is wrong."""

    def is_made_with(secret: str) -> bool:
        return hmac.compare_digest(prove(secret, SLAVE, challenge, proof.nonce, hello), proof.proof)

    secret = keeper.secret_of(proof.user, address, is_made_with)
    if secret is None:
        raise AccessDenied(
            "the slave does not prove that it is an administrator; check cluster_user and users_file on both sides"
        )
    return prove(secret, MASTER, challenge, proof.nonce, hello)

"""TLS for sessions: a stream with the interface of a non-blocking socket."""

import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from metaq.errors import ConfigError
from metaq.reasons import reason_of
from metaq.server.wire.session import Buffer

if TYPE_CHECKING:
    import ssl

MOST_JOINED: Final = 64 * 1024
"""Bytes of one send; TLS divides them into records of at most 16 KiB."""


class TlsContext:
    """A certificate with its key, for TLS 1.2 or newer."""

    def __init__(self, certificate: str, key: str) -> None:
        """Load them from files; ``key`` may be empty when it is in the certificate's file. Raise ``ConfigError``."""
        import ssl  # noqa: PLC0415 - only with TLS: with its libraries it takes 1.5 MB

        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._would_block = (ssl.SSLWantReadError, ssl.SSLWantWriteError)
        try:
            self._context.load_cert_chain(certificate, key or None)
        except OSError as error:
            raise ConfigError(
                f"tls_certificate {certificate}{f', tls_key {key}' if key else ''}: cannot be used: {reason_of(error)}"
            ) from error

    def secured(self, connection: socket.socket) -> "TlsStream":
        """Return the server's side of TLS over a connection; its handshake happens with the first ``recv``."""
        secured = self._context.wrap_socket(
            connection, server_side=True, do_handshake_on_connect=False, suppress_ragged_eofs=True
        )
        return TlsStream(secured, self._would_block)


class TlsStream:
    """The server's side of one TLS connection."""

    def __init__(self, connection: "ssl.SSLSocket", would_block: tuple[type[OSError], ...]) -> None:
        """Take the errors by which ``connection`` says that it would block."""
        self._tls = connection
        self._would_block = would_block

    def fileno(self) -> int:
        return self._tls.fileno()

    def recv(self, size: int, /) -> bytes:
        """Return all bytes that have arrived: no watcher would report those that stay inside the TLS layer."""
        parts: list[bytes] = []
        while True:
            try:
                part = self._tls.recv(size)
            except self._would_block:
                break
            parts.append(part)
            if not part or not self._tls.pending():
                break
        if not parts:
            raise BlockingIOError
        return b"".join(parts)

    def send(self, data: Buffer, /) -> int:
        try:
            return self._tls.send(data[:MOST_JOINED])  # a repeated send must not be shorter than the one before
        except self._would_block as error:
            raise BlockingIOError from error

    def sendmsg(self, buffers: Sequence[Buffer], /) -> int:
        joined = bytearray()
        for buffer in buffers:
            joined += buffer[: MOST_JOINED - len(joined)]
            if len(joined) == MOST_JOINED:
                break
        return self.send(bytes(joined))

    def close(self) -> None:
        self._tls.close()

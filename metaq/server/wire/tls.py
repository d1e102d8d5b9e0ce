"""TLS for sessions: a stream with the interface of a non-blocking socket."""

import socket
import ssl
from collections.abc import Sequence
from typing import Final

from metaq.errors import ConfigError
from metaq.server.wire.session import Buffer

TlsContext = ssl.SSLContext

MOST_JOINED: Final = 64 * 1024
"""Bytes of one send; TLS divides them into records of at most 16 KiB."""


def make_context(certificate: str, key: str) -> TlsContext:
    """Return a server context for TLS 1.2 or newer; ``key`` may be empty when it is in the certificate's file.

    Raise ``ConfigError``.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key or None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"tls_certificate {certificate}, tls_key {key}: cannot be used: {error}") from error
    return context


class TlsStream:
    """The server's side of one TLS connection."""

    def __init__(self, connection: socket.socket, context: TlsContext) -> None:
        self._tls = context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False, suppress_ragged_eofs=True)

    def fileno(self) -> int:
        return self._tls.fileno()

    def recv(self, size: int, /) -> bytes:
        """Return all bytes that have arrived: no watcher would report those that stay inside the TLS layer."""
        parts: list[bytes] = []
        while True:
            try:
                part = self._tls.recv(size)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
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
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
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

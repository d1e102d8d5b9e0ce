"""TLS below the client's connections: all that has come is returned, however it is cut."""

import contextlib
import fcntl
import select
import socket
import ssl
import struct
import termios
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from metaq.address import Address
from metaq.client.connecting.access import Access, BlockingStream
from tests.support.broker import wait_until
from tests.support.tls import issue

RECEIVE_BYTES: Final = 64 * 1024
"""What the reader of a connection asks for."""
RECORD_BYTES: Final = 16 * 1024
DEADLINE_S: Final = 60.0


class Server:
    """A listener that sends one client TLS records, cut where a test wants it."""

    def __init__(self, chain: Path) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(chain)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(DEADLINE_S)
        self.address = Address(*self._listener.getsockname())
        self._connection: socket.socket | None = None
        self._thread = threading.Thread(target=self._greet)
        self._thread.start()

    def _greet(self) -> None:
        self._connection, _ = self._listener.accept()
        self._connection.settimeout(DEADLINE_S)
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._connection.sendall(self._outgoing.read())
                self._incoming.write(self._connection.recv(RECEIVE_BYTES))
            else:
                self._connection.sendall(self._outgoing.read())
                return

    def records(self, *sizes: int) -> bytes:
        """Return these records, encrypted."""
        self._thread.join(DEADLINE_S)
        for size in sizes:
            self._tls.write(bytes(size))
        return self._outgoing.read()

    def send(self, data: bytes) -> None:
        assert self._connection is not None
        self._connection.sendall(data)

    def close(self) -> None:
        self._thread.join(DEADLINE_S)
        self._listener.close()
        if self._connection is not None:
            self._connection.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    started = Server(issue(tmp_path).chain)
    yield started
    started.close()


def test_nothing_that_has_come_stays_where_a_poll_does_not_see_it(server: Server, tmp_path: Path) -> None:
    """A record that began before and as many bytes as are received at once are more than was asked for; all are returned."""
    stream = Access(tls=str(tmp_path / "ca.pem")).connect(server.address, DEADLINE_S)
    stream.settimeout(0.0)
    sizes = [RECORD_BYTES, *[4096] * 15]
    data = server.records(*sizes)
    begun = RECORD_BYTES - 100
    server.send(data[:begun])
    received = _received(stream)
    server.send(data[begun:])
    wait_until(lambda: _waiting(stream) == min(len(data) - begun, RECEIVE_BYTES), DEADLINE_S, "all has come")
    received += _received(stream)
    assert received == bytes(sum(sizes))
    stream.close()


def _received(stream: BlockingStream) -> bytes:
    """Read as a poll says that something has come, until it says so no more."""
    poll, received = select.poll(), b""
    poll.register(stream.fileno(), select.POLLIN)
    while poll.poll(100):
        with contextlib.suppress(BlockingIOError):  # no whole record yet
            received += stream.recv(RECEIVE_BYTES)
    return received


def _waiting(stream: BlockingStream) -> int:
    """Return the bytes that the kernel holds, at most as many as are received at once."""
    (count,) = struct.unpack("i", fcntl.ioctl(stream.fileno(), termios.FIONREAD, bytes(4)))
    return min(int(count), RECEIVE_BYTES)

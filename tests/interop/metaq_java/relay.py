"""A relay between a client and a broker that keeps every byte of both directions."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from types import TracebackType

READ_BYTES = 65_536


class Relay:
    """Accepts on a loopback port and passes each connection on to ``upstream``.

    ``requests`` and ``answers`` hold the bytes of all connections in the order in which they came. The port stays the
    same while ``upstream`` is replaced, as it does for a broker that is started again. A connection that comes while
    nothing listens upstream is closed at once.
    """

    def __init__(self, host: str, port: int) -> None:
        self.upstream = (host, port)
        self.requests = bytearray()
        self.answers = bytearray()
        self.connections = 0
        self._changed = threading.Condition()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]

    def __enter__(self) -> Relay:
        self._start(threading.Thread(target=self._accept))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        hang_up(self._listener)
        accepting, *_ = self._threads
        accepting.join()
        for endpoint in self._sockets:
            hang_up(endpoint)
        for thread in self._threads:
            thread.join()

    def wait_for_request(self, pattern: bytes, seconds: float = 60) -> re.Match[bytes]:
        """Return the first match of ``pattern`` in what clients sent; TimeoutError if none comes in time."""
        return self._wait(self.requests, pattern, seconds)

    def wait_for_answer(self, pattern: bytes, seconds: float = 60) -> re.Match[bytes]:
        """Return the first match of ``pattern`` in what brokers answered; TimeoutError if none comes in time."""
        return self._wait(self.answers, pattern, seconds)

    def wait_for_connections(self, count: int, seconds: float = 60) -> None:
        """Wait until that many connections in all have reached a broker; TimeoutError if they do not in time."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.connections >= count, seconds):
                raise TimeoutError(f"{self.connections} connections instead of {count} after {seconds} s")

    def _wait(self, recorded: bytearray, pattern: bytes, seconds: float) -> re.Match[bytes]:
        with self._changed:
            found = self._changed.wait_for(lambda: re.search(pattern, bytes(recorded)), seconds)
            if found is None:
                raise TimeoutError(f"no {pattern!r} within {seconds} s in {bytes(recorded[-1000:])!r}")
            return found

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # hung up: the relay ends
                self._listener.close()
                return
            try:
                broker = socket.create_connection(self.upstream, timeout=5)
            except OSError:  # no broker at present: the client sees a closed connection and comes again
                client.close()
                continue
            broker.settimeout(None)
            with self._changed:
                self._sockets += [client, broker]
                self.connections += 1
                self._changed.notify_all()
            for source, target, recorded in ((client, broker, self.requests), (broker, client, self.answers)):
                self._start(threading.Thread(target=self._pass_on, args=(source, target, recorded)))

    def _start(self, thread: threading.Thread) -> None:
        self._threads.append(thread)
        thread.start()

    def _pass_on(self, source: socket.socket, target: socket.socket, recorded: bytearray) -> None:
        with contextlib.suppress(OSError):  # one end is gone, so the other is hung up
            while data := source.recv(READ_BYTES):
                with self._changed:
                    recorded += data
                    self._changed.notify_all()
                target.sendall(data)
        hang_up(source)
        hang_up(target)
        source.close()


def hang_up(endpoint: socket.socket) -> None:
    """End both directions, which also wakes the thread that reads or accepts there; closing alone would not."""
    with contextlib.suppress(OSError):  # the other side was first
        endpoint.shutdown(socket.SHUT_RDWR)

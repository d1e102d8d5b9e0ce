"""A fake server of the remoting protocol with scripted answers, which may do what a real one never does on purpose."""

import contextlib
import itertools
import socket
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import NamedTuple, Self

from metaq.protocol.remoting.codes import READ, WRITE, Request
from metaq.protocol.remoting.frames import FrameReader, RemotingCommand, encode_request, encode_response
from metaq.protocol.remoting.routes import BrokerData, QueueData, TopicRoute, encode_route


class Reply(NamedTuple):
    """The answer to a request."""

    code: int = 0
    fields: Mapping[str, str] | None = None
    body: bytes = b""
    remark: str | None = None


Script = Callable[[RemotingCommand], Reply | None]
"""The answer to a request; ``None`` for none at all."""


class FakeRemoting:
    """Listens on loopback; answers each request as the script of its code says, and 3 where there is none."""

    def __init__(self, **scripts: Script) -> None:
        self.scripts = {Request[name.upper()]: script for name, script in scripts.items()}
        self.requests: list[RemotingCommand] = []
        self.connections: list[socket.socket] = []
        self._opaques = itertools.count(1000)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._accepting = threading.Thread(target=self._accept, daemon=True)

    def __enter__(self) -> Self:
        self._accepting.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        self._listener.close()
        self.hang_up()

    def hang_up(self) -> None:
        """Close every connection that there is now."""
        connections, self.connections = self.connections, []  # a client that notices the first connects anew meanwhile
        for connection in connections:
            with contextlib.suppress(OSError):  # it may be closed already
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def count(self, code: Request) -> int:
        """How many requests of the code have come."""
        return sum(request.code == code for request in self.requests)

    def push(self, code: Request, fields: Mapping[str, str], body: bytes = b"", *, oneway: bool = False) -> int:
        """Ask the client that connected last; the opaque of the request."""
        opaque = next(self._opaques)
        self.connections[-1].sendall(encode_request(code, opaque, fields, body, oneway=oneway))
        return opaque

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        reader = FrameReader()
        with contextlib.suppress(OSError):  # the client may close first
            while data := connection.recv(1 << 20):
                for request in reader.receive(data):
                    self.requests.append(request)
                    if not request.is_response:
                        self._answer(connection, request)

    def _answer(self, connection: socket.socket, request: RemotingCommand) -> None:
        script = self.scripts.get(Request(request.code))
        reply = Reply(3, remark="no script") if script is None else script(request)
        if reply is not None and not request.is_oneway:
            head = encode_response(request, reply.code, reply.fields, reply.remark, len(reply.body))
            connection.sendall(head + reply.body)


def route_to(brokers: Mapping[str, str], queues: int = 4, permission: int = READ | WRITE) -> Script:
    """Every topic has so many queues on each broker; ``brokers`` are addresses of masters by name."""
    rows = tuple(QueueData(name, queues, queues, permission) for name in brokers)
    route = TopicRoute(rows, tuple(BrokerData("DefaultCluster", name, {0: address}) for name, address in brokers.items()))
    return lambda request: Reply(body=encode_route(route))


def accept(request: RemotingCommand) -> Reply:
    """Take a message: its offset is always 7."""
    return Reply(fields={"msgId": "AB" * 16, "queueId": request.fields["e"], "queueOffset": "7"})

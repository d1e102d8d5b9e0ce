"""A fake broker with scripted answers, which may do what a real one never does on purpose."""

import contextlib
import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from metaq.checksum import body_crc
from metaq.protocol.text.codec import CommandReader, TextLimits
from metaq.protocol.text.commands import Command, Put, Quit
from metaq.protocol.text.messages import HEADER
from metaq.protocol.text.replies import write_result, write_value_head

Answer = Callable[[list[Command]], bytes | None]


class FakeBroker:
    """Answers what one ``recv`` brought with what ``answer`` makes of it; on ``None`` it closes the connection."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.closes_after_answer = False
        self.closes_orderly = True
        """Without resetting the connection although the client still sends."""
        self.received: list[Command] = []
        self.connections: list[socket.socket] = []
        self._serving: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._accepting = threading.Thread(target=self._accept)

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
        for connection in list(self.connections):
            with contextlib.suppress(OSError):  # it may be closed already
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._serving:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections.append(connection)
            self._serving.append(threading.Thread(target=self._serve, args=(connection,)))
            self._serving[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        reader = CommandReader(TextLimits())
        with connection, contextlib.suppress(OSError):  # the client may close first
            while data := connection.recv(1 << 20):
                commands = reader.receive(data)
                self.received += commands
                answer = self.answer(commands)
                if answer is None:
                    break
                connection.sendall(answer)
                if self.closes_after_answer:
                    break
            if self.closes_orderly:
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(1 << 20):
                    pass


def opaque(command: Command) -> str:
    assert not isinstance(command, Quit)
    return command.opaque


def each(answer_one: Callable[[Command], bytes]) -> Answer:
    return lambda commands: b"".join(map(answer_one, commands))


def answering(code: int, body: str) -> Answer:
    return each(lambda command: write_result(code, body, opaque(command)))


def store(command: Command) -> bytes:
    """Stores a put whose body is its number, at ten times that number."""
    assert isinstance(command, Put)
    number = int(command.body)
    return write_result(200, f"{number} {max(0, command.partition)} {10 * number}", opaque(command))


def record(body: bytes, message_id: int = 1, flag: int = 0) -> bytes:
    return HEADER.pack(len(body), body_crc(body), message_id, flag) + body


def value(command: Command, records: bytes, word: bytes = b"value") -> bytes:
    return write_value_head(len(records), opaque(command)).replace(b"value", word) + records

"""The text protocol frame by frame: requests as a test spells them, and their replies."""

import socket
from itertools import count
from types import TracebackType
from typing import NamedTuple, Self

from metaq.errors import StreamLost
from metaq.message import Message
from metaq.protocol.text.commands import END_OF_LOG
from metaq.protocol.text.messages import decode_text_messages, join_attribute
from metaq.protocol.text.pushed import Pushed
from metaq.protocol.text.replies import MAX_BODY_BYTES, NOT_FOUND, OK, VALUE, Reply, TextReader
from metaq.protocol.text.writing import write_get, write_line, write_offset, write_put
from tests.support.broker import BrokerProcess

SESSION = "S1"
MAX_BYTES = 1 << 20


class Placed(NamedTuple):
    """The values in the answer to a put."""

    id: int
    partition: int
    position: int


class ReplyReader:
    """The parser of a client that never subscribes or pops, and so is sent replies only."""

    def __init__(self, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self._reader = TextReader(max_body_bytes)

    def receive(self, data: bytes) -> list[Reply]:
        """Return the replies that are complete now; ``StreamLost`` when the bytes are not replies."""
        replies: list[Reply] = []
        for frame in self._reader.receive(data):
            if isinstance(frame, Pushed):
                raise StreamLost(f"the message {frame.head.id} was pushed, though nothing is subscribed")
            replies.append(frame)
        return replies


class Talk:
    """One connection to a broker, whose replies come in the order of the commands."""

    def __init__(self, broker: BrokerProcess) -> None:
        self.socket = broker.connect()
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reader = ReplyReader()
        self._replies: list[Reply] = []
        self._opaques = count(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Hang up."""
        self.socket.close()

    # -- frames -------------------------------------------------------------------------------------------------------

    def step(self, key: str, kind: str, *extra: str | int) -> bytes:
        """A ``transaction`` line."""
        return write_line("transaction", key, SESSION, kind, *extra, next(self._opaques))

    def put_of(self, topic: str, body: bytes, key: str | None, partition: int = 0, attribute: str | None = None) -> bytes:
        """A ``put`` with its body, in a transaction or not."""
        flag, data = join_attribute(attribute, body)
        return write_put(topic, partition, flag, data, next(self._opaques), transaction=key)

    # -- asking -------------------------------------------------------------------------------------------------------

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def replies(self, number: int) -> list[Reply]:
        """The next replies."""
        while len(self._replies) < number:
            received = self.socket.recv(1 << 16)
            assert received, f"the connection is closed after {self._replies}"
            self._replies += self._reader.receive(received)
        taken, self._replies = self._replies[:number], self._replies[number:]
        return taken

    def ask(self, *frames: bytes) -> list[tuple[int, str]]:
        """Send frames that are answered in one write; codes and texts."""
        self.send(b"".join(frames))
        return [(reply.code, reply.body.decode()) for reply in self.replies(len(frames))]

    def transaction(self, key: str, kind: str, *extra: str | int) -> tuple[int, str]:
        """The answer to one step."""
        return self.ask(self.step(key, kind, *extra))[0]

    def done(self, key: str, *kinds: str) -> None:
        """Steps that succeed."""
        for kind in kinds:
            code, text = self.transaction(key, kind)
            assert code == OK, f"{kind} {key}: {text}"

    def put(
        self, topic: str, body: bytes, key: str | None = None, partition: int = 0, attribute: str | None = None
    ) -> tuple[int, str]:
        """The answer to one put."""
        return self.ask(self.put_of(topic, body, key, partition, attribute))[0]

    def placed(
        self, topic: str, body: bytes, key: str | None = None, partition: int = 0, attribute: str | None = None
    ) -> Placed:
        """Put a message, which must succeed, and return the values of the answer."""
        code, text = self.put(topic, body, key, partition, attribute)
        assert code == OK, text
        return Placed(*map(int, text.split(" ")))

    def recover(self, *qualifier: str) -> list[str]:
        """The keys that RECOVER lists."""
        code, text = self.transaction("null", "RECOVER", *qualifier)
        assert code == OK, text
        return text.split("\r\n") if text else []

    # -- reading ------------------------------------------------------------------------------------------------------

    def end(self, topic: str, partition: int = 0) -> int:
        """The position behind the last message."""
        ((code, text),) = self.ask(write_offset(topic, "g", partition, END_OF_LOG, next(self._opaques)))
        return 0 if code == NOT_FOUND else int(text)

    def messages(self, topic: str, partition: int = 0, position: int = 0) -> list[Message]:
        """All messages from a position on."""
        found: list[Message] = []
        while True:
            self.send(write_get(topic, "g", partition, position, MAX_BYTES, next(self._opaques)))
            (reply,) = self.replies(1)
            if reply.code == NOT_FOUND:
                return found
            assert reply.code == VALUE, reply
            found += decode_text_messages(reply.body, position)
            position = found[-1].next_position

    def bodies(self, topic: str, partition: int = 0) -> list[bytes]:
        return [message.body for message in self.messages(topic, partition)]

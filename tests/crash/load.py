"""Puts and gets on several connections at once, from one thread, until the broker is killed."""

import random
import selectors
import socket
import time
from collections import deque
from typing import Final

from metaq.protocol.text.commands import BROKER_CHOOSES
from metaq.protocol.text.messages import decode_text_messages
from metaq.protocol.text.replies import NOT_FOUND, VALUE, Reply
from metaq.protocol.text.writing import write_get
from tests.crash.command import Violation, expect
from tests.crash.history import PARTITIONS, History
from tests.crash.lives import ANSWERED_S
from tests.support.broker import BrokerProcess
from tests.support.talk import ReplyReader

RECEIVE_BYTES: Final = 256 * 1024
GROUP: Final = "kills"
OPAQUE: Final = 7
"""Of all gets: one at a time is asked."""
NEXT_ANSWER_S: Final = 0.05
EITHER: Final = selectors.EVENT_READ | selectors.EVENT_WRITE


class Link:
    """One connection. ``receive`` and ``send`` never wait."""

    def __init__(self, connection: socket.socket, history: History, rng: random.Random) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.history = history
        self.rng = rng
        self.unsent = bytearray()
        self._replies = ReplyReader()

    def send(self) -> None:
        """Say what is to be said now, as far as the kernel takes it."""
        self.refill()
        try:
            while self.unsent:
                del self.unsent[: self.connection.send(self.unsent)]
        except BlockingIOError:
            return
        except (BrokenPipeError, ConnectionResetError):
            self.unsent.clear()  # whatever was answered before can still be received

    def receive(self) -> bool:
        """Take in what has arrived; whether the connection still stands."""
        try:
            data = self.connection.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return True
        except ConnectionResetError:
            return False
        for reply in self._replies.receive(data) if data else ():
            self.answered(reply)
        return bool(data)

    def refill(self) -> None:
        """Put into ``unsent`` what is to be sent next."""
        raise NotImplementedError

    def answered(self, reply: Reply) -> None:
        raise NotImplementedError


class Producer(Link):
    """Keeps a number of puts in flight; the broker answers them in order."""

    def __init__(self, connection: socket.socket, history: History, rng: random.Random) -> None:
        super().__init__(connection, history, rng)
        self._stream = history.new_stream()
        self._depth = rng.choice((1, 4, 16, 64))
        self._in_flight: deque[int] = deque()

    def refill(self) -> None:
        while len(self._in_flight) < self._depth:
            topic, partition = self.rng.choice(PARTITIONS)
            if self.rng.random() < 0.2:
                partition = BROKER_CHOOSES
            self._in_flight.append(len(self.history.sent))
            self.unsent += self.history.put(self._stream, topic, partition)

    def answered(self, reply: Reply) -> None:
        expected = self._in_flight.popleft()
        expect(reply.opaque == expected, "replies come in the order of the commands", reply, expected)
        self.history.answered(reply)


class Consumer(Link):
    """Reads one partition from somewhere to its end and waits there, then another one."""

    def __init__(self, connection: socket.socket, history: History, rng: random.Random) -> None:
        super().__init__(connection, history, rng)
        self._asked = False
        self._choose()

    def _choose(self) -> None:
        self._partition = self.rng.choice(PARTITIONS)
        self._position = self.history.some_position(self._partition, self.rng)

    def refill(self) -> None:
        if not self._asked:
            self._asked = True
            topic, partition = self._partition
            size, wait_ms = self.rng.choice((1, 1000, 20_000, 1 << 20)), self.rng.choice((0, 20))
            self.unsent += write_get(topic, GROUP, partition, self._position, size, OPAQUE, wait_ms)

    def answered(self, reply: Reply) -> None:
        self._asked = False
        expect(reply.opaque == OPAQUE and reply.code in (VALUE, NOT_FOUND), "a valid position is served", reply)
        if reply.code == NOT_FOUND:
            self._choose()
            return
        messages = list(decode_text_messages(reply.body, self._position))
        expect(bool(messages), "a message is delivered whole", self._partition, self._position, reply)
        for message in messages:
            self.history.delivered(self._partition, message)
        self._position = messages[-1].next_position


def put_and_get(broker: BrokerProcess, history: History, rng: random.Random, seconds: float, least: int) -> None:
    """Load the broker for so long, and until so many puts are acknowledged; then kill it and take in what it had answered."""
    makers: list[type[Link]] = [Producer] * rng.randint(1, 4) + [Consumer] * rng.randint(0, 2)
    links = [maker(broker.connect(), history, rng) for maker in makers]
    with selectors.DefaultSelector() as selector:
        for link in links:
            selector.register(link.connection, EITHER, link)
        end, enough = time.monotonic() + seconds, history.acknowledged + least
        while (left := end - time.monotonic()) > 0 or history.acknowledged < enough:
            expect(left > -ANSWERED_S, "puts are answered", enough - history.acknowledged)
            for key, events in selector.select(left if left > 0 else NEXT_ANSWER_S):
                link = key.data
                if events & selectors.EVENT_READ and not link.receive():
                    raise Violation(f"the broker closed a connection: {broker.stderr()[-2000:]}")
                link.send()
                selector.modify(link.connection, EITHER if link.unsent else selectors.EVENT_READ, link)
        if rng.random() < 0.5:
            selector.select(NEXT_ANSWER_S)  # an answer given too early shows best in the moment after it
        broker.kill()
    for link in links:
        link.connection.setblocking(True)
        while link.receive():
            pass
        link.connection.close()

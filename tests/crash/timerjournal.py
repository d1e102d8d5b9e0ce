"""What happened to delayed messages: which were acknowledged, cancelled and read, and a connection that tells it.

``Journal.check`` says what must hold of each of them in the end (``tests.crash.timers``).
"""

import random
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from metaq.protocol.text.replies import OK, Reply
from metaq.protocol.text.writing import write_line
from tests.crash.command import expect
from tests.support.broker import BrokerProcess
from tests.support.talk import ReplyReader

TOPIC: Final = "later"
HOUR_MS: Final = 3_600_000
CANCELLED, FORGOTTEN, DELIVERED, NOT_NOW = 200, 404, 409, 503


@dataclass(slots=True)
class Timer:
    """One delayed message: what was asked, what was answered and what was read."""

    least_due_ms: int
    """By the broker's clock."""
    handle: str | None = None
    answers: set[int] = field(default_factory=set)
    """Codes of the answers to its cancels."""
    asked: int = 0
    """Cancels, answered or not."""
    is_refused: bool = False
    copies: list[int] = field(default_factory=list)
    """Ids of the messages that readers got."""

    @property
    def due_ms(self) -> int:
        return self.least_due_ms if self.handle is None else int(self.handle.partition("-")[0])


class Journal:
    """Everything that was asked of one data folder and answered by it; several threads write to it."""

    def __init__(self, rng: random.Random) -> None:
        self._lock = threading.Lock()
        self._rng = rng
        self.timers: list[Timer] = []
        self.acknowledged = 0
        self._open: list[int] = []  # numbers that were acknowledged and, as far as is known, neither delivered nor cancelled

    def begin(self, least_due_ms: int) -> int:
        with self._lock:
            self.timers.append(Timer(least_due_ms))
            return len(self.timers) - 1

    def parked(self, number: int, handle: str) -> None:
        with self._lock:
            self.acknowledged += 1
            self.timers[number].handle = handle
            self._open.append(number)

    def some_open(self) -> int | None:
        """Return a timer to cancel, mostly one that is not over."""
        with self._lock:
            while self._open:
                at = self._rng.randrange(len(self._open))
                number = self._open[at]
                timer = self.timers[number]
                if (timer.copies or timer.answers) and self._rng.random() < 0.9:
                    self._open[at] = self._open[-1]
                    self._open.pop()
                    continue
                timer.asked += 1
                return number
            return None

    def cancelled(self, number: int, reply: Reply) -> None:
        """Take an answer to a cancel; one that says that it cannot be told, now or any more, is none."""
        if reply.code not in (NOT_NOW, FORGOTTEN):
            expect(reply.code in (CANCELLED, DELIVERED), "a cancel is answered", number, reply, self.timers[number])
            with self._lock:
                self.timers[number].answers.add(reply.code)

    def read(self, number: int, message_id: int, now_ms: int | None) -> None:
        """Take a message that a reader got, by a clock that has not been set since it was delivered, or ``None``."""
        expect(number < len(self.timers), "nothing is delivered that was not sent", number)
        with self._lock:
            timer = self.timers[number]
            timer.copies.append(message_id)
        expect(len(timer.copies) == 1, "delivered once", number, timer)
        expect(CANCELLED not in timer.answers, "what was cancelled is not delivered", number, timer)
        expect(not timer.is_refused, "what was refused is not delivered", number, timer)
        expect(now_ms is None or now_ms >= timer.due_ms, "not before its time", number, timer, now_ms)

    @property
    def owed(self) -> int:
        """The number of messages that are still to be delivered, whatever became of what was not answered."""
        with self._lock:
            return sum(timer.handle is not None and not timer.asked and not timer.copies for timer in self.timers)

    def check(self) -> None:
        """Compare it all, once nothing is pending any more."""
        for number, timer in enumerate(self.timers):
            expect(len(timer.answers) < 2, "a timer is cancelled or delivered", number, timer)
            if CANCELLED in timer.answers:
                expect(not timer.copies, "what was cancelled is not delivered", number, timer)
            elif DELIVERED in timer.answers or (timer.handle is not None and not timer.asked):
                expect(len(timer.copies) == 1, "what was acknowledged is delivered", number, timer)

    def counts(self) -> dict[str, int]:
        return {
            "parked": self.acknowledged,
            "delivered": sum(bool(timer.copies) for timer in self.timers),
            "cancelled": sum(CANCELLED in timer.answers for timer in self.timers),
            "cancelled too late": sum(DELIVERED in timer.answers for timer in self.timers),
        }


class Connection:
    """One connection that asks, and waits for the answer."""

    def __init__(self, broker: BrokerProcess, journal: Journal, clock: Callable[[], int]) -> None:
        self._socket = broker.connect()
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._replies = ReplyReader()
        self._journal = journal
        self._clock = clock

    def close(self) -> None:
        self._socket.close()

    def _ask(self, data: bytes) -> Reply:
        self._socket.sendall(data)
        while True:
            received = self._socket.recv(1 << 16)
            if not received:
                raise ConnectionError("closed")
            for reply in self._replies.receive(received):
                return reply

    def park(self, delay_ms: int, partition: int, body_bytes: int) -> int:
        """Park a message; return its number."""
        number = self._journal.begin(self._clock() + delay_ms)
        body = number.to_bytes(8) + bytes(body_bytes)
        head = f"put {TOPIC} {partition} {len(body)} 0 delay={delay_ms} {number}\r\n"
        reply = self._ask(head.encode() + body)
        if reply.code == NOT_NOW:  # the index is being read or opened again
            self._journal.timers[number].is_refused = True
            time.sleep(0.02)
            return number
        expect(reply.code == OK, "a message is parked", number, reply)
        words = reply.body.decode().split(" ")
        expect(len(words) == 4, "a delayed message has a handle", number, reply)
        self._journal.parked(number, words[3])
        return number

    def cancel(self, number: int) -> int:
        """Cancel a timer; return the code of the answer."""
        reply = self._ask(write_line("cancel", self._journal.timers[number].handle or "", number))
        self._journal.cancelled(number, reply)
        return reply.code

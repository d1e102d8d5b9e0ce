"""The time until a held get on a slave returns a message that its master has acknowledged."""

import selectors
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from benchmarks.figures import MeasurementError
from benchmarks.peers import REPLY_SECONDS
from benchmarks.textlink import TextLink
from metaq.protocol.text.messages import decode_text_messages
from metaq.protocol.text.replies import NOT_FOUND, OK, VALUE
from metaq.protocol.text.writing import write_get, write_put

TOPIC = "probe"
GROUP = "bench"
EVERY_SECONDS = 0.005
"""Between two messages, whatever became of those before: of a stall each message that is put meanwhile tells."""
HOLD_MS = 1000 * REPLY_SECONDS
GET_BYTES = 1 << 20


@dataclass(frozen=True)
class Lag:
    """Milliseconds of each message until a get on the slave was answered with it."""

    from_answer_ms: list[float]
    """Since its put was answered; 0 when it was there before."""
    from_put_ms: list[float]
    """Since its put was handed to the kernel."""


class Prober:
    """Puts messages of a topic of its own at a master and reads them from its slave."""

    def __init__(self, master_port: int, slave_port: int) -> None:
        self._puts = TextLink(master_port)
        self._gets = TextLink(slave_port)
        self._position = 0
        self._sent: list[float] = []
        self._answered: list[float] = []
        self._seen: list[float] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._puts.__exit__(kind, error, at)
        self._gets.__exit__(kind, error, at)

    def measure(self, messages: int) -> Lag:
        """Put so many, one each EVERY_SECONDS. A slave on which none comes for twice REPLY_SECONDS raises.

        The very first message makes the topic, which takes longer.
        """
        self._sent, self._answered, self._seen = [], [], []
        self._run(messages)
        rows = list(zip(self._sent, self._answered, self._seen, strict=True))
        return Lag(
            [1000 * max(0.0, seen - answered) for _, answered, seen in rows],
            [1000 * (seen - sent) for sent, _, seen in rows],
        )

    def _run(self, messages: int) -> None:
        with selectors.EpollSelector() as selector:
            for link in (self._puts, self._gets):
                selector.register(link, selectors.EVENT_READ)
            self._get()
            due = last = time.perf_counter()
            while min(len(self._seen), len(self._answered)) < messages:
                now = time.perf_counter()
                if now - last > 2 * REPLY_SECONDS:
                    raise MeasurementError(f"message {len(self._seen)} is not on the slave after {now - last:.0f} s")
                if len(self._sent) < messages and now >= due:
                    self._put(now)
                    due += EVERY_SECONDS
                left = due - time.perf_counter() if len(self._sent) < messages else REPLY_SECONDS
                for key, _ in selector.select(max(0.0, left)):
                    before = len(self._seen)
                    self._take_answers() if key.fileobj is self._puts else self._take_messages(messages)
                    last = time.perf_counter() if len(self._seen) > before else last

    def _put(self, now: float) -> None:
        number = len(self._sent)
        self._sent.append(now)
        self._puts.send(write_put(TOPIC, 0, 0, b"%d" % number, number))

    def _get(self) -> None:
        self._gets.send(write_get(TOPIC, GROUP, 0, self._position, GET_BYTES, 0, HOLD_MS))

    def _take_answers(self) -> None:
        for reply in self._puts.replies():
            if reply.code != OK:
                raise MeasurementError(f"a put was answered with {reply.code}: {reply.body[:200]!r}")
            self._answered.append(time.perf_counter())

    def _take_messages(self, wanted: int) -> None:
        for reply in self._gets.replies():
            now = time.perf_counter()
            if reply.code not in {VALUE, NOT_FOUND}:
                raise MeasurementError(f"a get on the slave was answered with {reply.code}: {reply.body[:200]!r}")
            for message in decode_text_messages(reply.body, self._position) if reply.code == VALUE else ():
                if message.body != b"%d" % len(self._seen):
                    raise MeasurementError(f"message {len(self._seen)} of the slave is {message.body[:20]!r}")
                self._seen.append(now)
                self._position = message.next_position
            if len(self._seen) < wanted:
                self._get()

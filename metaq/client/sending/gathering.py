"""Gathering: messages of asynchronous sends that wait a moment for others, and then go as one batch (``linger_ms``)."""

import functools
import itertools
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from metaq.client.connecting.core import EXPIRY_S, Core
from metaq.client.connecting.forks import renewed_in_children
from metaq.client.message import properties_text
from metaq.client.sending.asynchronous import AsyncSend, SendFuture, Sent
from metaq.client.sending.batches import outgoing_batch
from metaq.client.sending.sending import ELSEWHERE, Outgoing, QueueChoice, Sending, compose
from metaq.errors import BrokerBusy, ClientClosed, ClientError, MetaqError, Refused
from metaq.message import MessageQueue
from metaq.protocol.properties import KEYS, UNIQUE_KEY
from metaq.protocol.remoting.sending.batch import MOST, BatchItem, encode_batch

LARGE_BYTES: Final = 4096
"""A message with a body or properties from this size on is sent on its own: its body may be worth compressing."""
MOST_BYTES: Final = 16 * 1024 * 1024
"""The most bytes that wait in one producer; at more, everything is sent."""


class _Letter(NamedTuple):
    """A message that waits to be sent."""

    body: bytes
    properties: Mapping[str, str]
    ordering_key: str | None
    deadline: float
    future: SendFuture


@dataclass
class _Batch:
    """The messages that will go together."""

    topic: str
    due: float
    """When they are sent at the latest."""
    letters: list[_Letter] = field(default_factory=list)
    items: list[bytes] = field(default_factory=list)
    """The messages, encoded."""
    size: int = 0

    def add(self, letter: _Letter, item: bytes) -> None:
        self.letters.append(letter)
        self.items.append(item)
        self.size += len(item)

    def outgoing(self, group: str) -> Outgoing:
        """Return the batch as it is sent, to the partition of its first message's ordering key, or to any without keys."""
        ids = [letter.properties[UNIQUE_KEY] for letter in self.letters]
        keys = [key for letter in self.letters for key in letter.properties.get(KEYS, "").split()]
        return outgoing_batch(group, self.topic, b"".join(self.items), ids, self.letters[0].ordering_key, keys)


class Gatherer:
    """The messages of one producer that wait for others. Thread-safe.

    Messages with ordering keys wait with those for the same partition; those without, with the others of their topic. Batches
    leave in the order in which their messages were added. A batch is stored or refused as a whole; when it is refused, its
    messages are sent one by one, so that one bad message does not stop the others.
    """

    def __init__(self, core: Core, choice: QueueChoice, group: str, linger_s: float, batch_bytes: int) -> None:
        self._core = core
        self._choice = choice
        self._group = group
        self._linger_s = linger_s
        self._batch_bytes = batch_bytes
        self._closed = False
        self._renew()
        core.add_part(self)
        renewed_in_children(self)

    def _renew(self) -> None:
        """Start empty in a child of a fork: what waits is sent by the parent."""
        self._turn = threading.Lock()  # guards what follows, and the order in which batches are sent
        self._batches: dict[tuple[str, MessageQueue | None], _Batch] = {}
        self._bytes = 0
        self._is_timed = False
        self._answered = threading.Condition()  # guards what follows
        self._in_flight = 0
        """The number of batches without an outcome."""
        self._latest = 0.0
        """The latest deadline of a message."""

    def add(
        self,
        topic: str,
        body: bytes,
        properties: Mapping[str, str],
        ordering_key: str | None,
        deadline: float,
        future: SendFuture,
    ) -> bool:
        """Have a message sent, and settle its future; return false for one that must go on its own.

        ``ClientClosed`` when the producer is closed.
        """
        text = properties_text(properties)
        if len(body) >= LARGE_BYTES or len(text) >= LARGE_BYTES:
            return False
        queue: MessageQueue | None = None
        if ordering_key:
            try:
                queue = self._choice.of_key(topic, ordering_key, deadline)
            except MetaqError as error:
                future.settle(error)
                return True
        item = encode_batch((BatchItem(0, body, text),))
        letter = _Letter(body, properties, ordering_key, deadline, future)
        with self._turn:
            if self._closed:
                raise ClientClosed("this producer was closed")
            self._put((topic, queue), letter, item)
        return True

    def flush(self, topic: str | None = None) -> None:
        """Send what waits, for one topic or for all."""
        if self._batches:
            with self._turn:
                self._send_all(topic)

    def close(self) -> None:
        """Send what waits, and return when all batches are answered or have failed."""
        with self._turn:
            self._closed = True
            self._send_all()
        with self._answered:
            limit_s = max(0.0, self._latest - time.monotonic()) + 2 * EXPIRY_S
            self._answered.wait_for(lambda: not self._in_flight, limit_s)

    def _put(self, place: tuple[str, MessageQueue | None], letter: _Letter, item: bytes) -> None:
        batch = self._batches.get(place)
        if batch is not None and batch.size + len(item) > self._batch_bytes:
            self._send(place)
            batch = None
        if batch is None:
            batch = self._batches[place] = _Batch(place[0], time.monotonic() + self._linger_s)
        batch.add(letter, item)
        self._bytes += len(item)
        if batch.size >= self._batch_bytes or len(batch.letters) >= MOST:
            self._send(place)
        elif self._bytes > MOST_BYTES:
            self._send_all()
        elif not self._is_timed:
            self._is_timed = True
            self._core.scheduler.after(self._linger_s, self._send_due)

    def _send_due(self) -> None:
        with self._turn:
            now = time.monotonic()
            for place in [place for place, batch in self._batches.items() if batch.due <= now]:
                self._send(place)
            self._is_timed = bool(self._batches)
            if self._is_timed:
                due = min(batch.due for batch in self._batches.values())
                self._core.scheduler.after(due - now, self._send_due)

    def _send_all(self, topic: str | None = None) -> None:
        for place in [place for place in self._batches if topic in (None, place[0])]:
            self._send(place)

    def _send(self, place: tuple[str, MessageQueue | None]) -> None:
        batch = self._batches.pop(place)
        self._bytes -= batch.size
        deadline = min(letter.deadline for letter in batch.letters)
        with self._answered:
            self._in_flight += 1
            self._latest = max(self._latest, *(letter.deadline for letter in batch.letters))
        sending = Sending(batch.outgoing(self._group), self._choice, deadline)
        AsyncSend(self._core, sending, lambda sent: self._sent(batch, sent)).step()

    def _sent(self, batch: _Batch, sent: Sent) -> None:
        """Tell the outcome of a batch to its messages, on a thread that must not be blocked."""
        letters = batch.letters
        is_refused = isinstance(sent, Refused) and sent.code not in ELSEWHERE and not isinstance(sent, BrokerBusy)
        if is_refused and len(letters) > 1 and self._core.scheduler.run(lambda: self._send_one_by_one(batch)):
            return
        for number, letter in enumerate(letters):
            letter.future.settle(_of_letter(sent, letter) if isinstance(sent, MetaqError) else (sent[number],))
        self._end()

    def _send_one_by_one(self, batch: _Batch) -> None:
        ended = itertools.count(1)

        def done(letter: _Letter, sent: Sent) -> None:
            letter.future.settle(sent)
            if next(ended) == len(batch.letters):
                self._end()

        for letter in batch.letters:
            outgoing = compose(self._group, batch.topic, letter.body, letter.properties, ordering_key=letter.ordering_key)
            sending = Sending(outgoing, self._choice, letter.deadline)
            AsyncSend(self._core, sending, functools.partial(done, letter)).step()

    def _end(self) -> None:
        with self._answered:
            self._in_flight -= 1
            self._answered.notify_all()


def _of_letter(error: MetaqError, letter: _Letter) -> MetaqError:
    """Return an error of a batch as that of one of its messages: each future may be raised by another thread."""
    own = type(error).__new__(type(error), *error.args)
    own.__dict__.update(error.__dict__)
    own.__dict__.pop("__notes__", None)  # of the batch, in a list that all would share
    own.__cause__ = error.__cause__
    ident = letter.properties[UNIQUE_KEY]
    if isinstance(own, ClientError) and own.context is not None:
        own.context = own.context._replace(ids=(ident,), keys=tuple(letter.properties.get(KEYS, "").split()))
        own.add_note(str(own.context))
    own.add_note(f"message {ident}, which was sent in a batch")
    return own

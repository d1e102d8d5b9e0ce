"""The text protocol for Python programs: plain sockets, usable from several threads."""

import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Final, NamedTuple, Self

from metaq.client import checks
from metaq.client.connecting.access import Access, Tls
from metaq.client.connecting.forks import renewed_in_children
from metaq.client.text.connection import Connection, Exchange
from metaq.errors import BadRequest, ClientError, ConnectionFailed, Refused, RequestTimeout
from metaq.message import Message, PutResult, TextPosition
from metaq.protocol.text.codec import write_get, write_line, write_offset, write_put
from metaq.protocol.text.commands import BROKER_CHOOSES, END_OF_LOG
from metaq.protocol.text.messages import decode_messages, join_attribute
from metaq.protocol.text.replies import MOVED, NOT_FOUND, OK, VALUE, Reply

DEFAULT_PORT: Final = 8123
DEFAULT_GROUP: Final = "metaq"
DEFAULT_MAX_BYTES: Final = 1024 * 1024

# put_many sends chunks of about so much, and so many of them ahead of their replies: the broker has always something to
# do, and a million small bodies are still only some thousand messages in flight.
_CHUNK_MESSAGES: Final = 256
_CHUNK_BYTES: Final = 64 * 1024
_CHUNKS_AHEAD: Final = 8

_HOLD_MS: Final = 10_000
_PAUSE_S: Final = 0.1
"""A follower's wait between two gets that the broker answers at once, as one that does not know ``wait=`` does."""

_NAME: Final = re.compile("[!-~]+")


class Batch(NamedTuple):
    """What one get found."""

    messages: list[Message]
    next_position: TextPosition
    """Where to go on. Without messages: the position that was asked for when there is nothing yet, another one when the
    broker sends the reader there (the oldest message it keeps, or the end)."""


class PutManyFailed(ClientError):
    """Not all messages of a ``put_many`` were acknowledged."""

    def __init__(self, results: list[PutResult | ClientError]) -> None:
        self.results = results
        """One entry for each body taken from the iterable, in order: where it is stored, or why it was refused
        (``Refused``), or why that is unknown (``RequestTimeout``, ``ConnectionFailed``)."""
        failed = [(index, result) for index, result in enumerate(results) if isinstance(result, ClientError)]
        self.first_failed, self.reason = failed[0]
        """Index of the first body that was not acknowledged, and why; those before it are stored."""
        super().__init__(
            f"{len(results) - len(failed)} of {len(results)} messages are stored; message {self.first_failed}: {self.reason}"
        )


class TextClient:
    """A client of one broker.

    ::

        with TextClient("127.0.0.1", 8123) as client:
            sent = client.put("orders", b"paid 2003")
            for message in client.iterate("orders", position=sent.position):
                print(message.body)

    Threads may share it: their requests travel on one connection and each gets its own replies. A broker handles the
    requests of one connection in order, so whoever waits for messages (``wait_ms``, ``follow``) wants a client of its own.

    A call that gets no answer raises ``RequestTimeout`` or ``ConnectionFailed``: what it asked for may or may not have
    happened. The connection is then closed, and the next call makes one attempt to open a new one. No request is ever sent
    twice. ``Refused`` is an answer: it leaves the connection open.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = DEFAULT_PORT,
        *,
        timeout_s: float = 10.0,
        user: str = "",
        password: str = "",
        tls: Tls = False,
    ) -> None:
        """Connect. ``timeout_s`` limits the wait for a connection and for each answer; as an attribute it can be changed.

        ``user`` and ``password`` log in, ``Refused`` when they are wrong; ``tls`` as for ``metaq.connect``.
        """
        self._access = Access(user, password, tls)
        self._host = host
        self._port = port
        self.timeout_s = timeout_s
        self._closed = False
        self._connecting = threading.Lock()  # guards what follows
        self._connection = Connection(host, port, timeout_s, self._access)
        renewed_in_children(self)

    def renew(self) -> None:
        """Go on in a child of a fork; the next call connects."""
        self._connecting = threading.Lock()
        self._connection.abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close for good. Requests of other threads that are still in flight raise ``ConnectionFailed``."""
        with self._connecting:
            self._closed = True
            self._connection.lose("the client was closed")

    def put(self, topic: str, body: bytes, *, partition: int = BROKER_CHOOSES, attribute: str | None = None) -> PutResult:
        """Store one message. Once this returns it is as safe as the broker's durability level promises.

        A ``Refused`` with code 500 and a text that begins with ``stored at`` means: stored, but not known to be safe yet.
        """
        _check_name("topic", topic)
        checks.body(body)
        flag, data = join_attribute(attribute, body)
        return _put_result(_ok(self.ask(lambda opaque: write_put(topic, partition, flag, data, opaque))))

    def put_many(
        self, topic: str, bodies: Iterable[bytes], *, partition: int = BROKER_CHOOSES, attribute: str | None = None
    ) -> list[PutResult]:
        """Store messages in order, many of them in flight at a time; one result for each body.

        Stops sending at the first error: ``PutManyFailed`` says what became of each body.
        """
        _check_name("topic", topic)
        connection = self._usable_connection()
        exchange = Exchange()
        opaques: list[int] = []
        ahead: deque[int] = deque(maxlen=_CHUNKS_AHEAD)
        failure: ClientError | None = None
        try:
            for chunk in _chunks(bodies):
                numbers = [connection.new_opaque() for _ in chunk]
                opaques += numbers
                puts = [join_attribute(attribute, body) for body in chunk]
                frames = [write_put(topic, partition, *put, opaque) for put, opaque in zip(puts, numbers, strict=True)]
                ahead.append(len(chunk))
                connection.send(b"".join(frames), numbers, exchange, self._deadline())
                connection.wait(exchange, sum(ahead), self._deadline())
                if exchange.refused:
                    break
            connection.wait(exchange, 0, self._deadline())
        except (ConnectionFailed, RequestTimeout) as error:
            failure = error
        return _all_stored([exchange.replies.get(opaque) for opaque in opaques], failure)

    def get(
        self,
        topic: str,
        position: int = 0,
        *,
        partition: int = 0,
        group: str = DEFAULT_GROUP,
        max_bytes: int = DEFAULT_MAX_BYTES,
        wait_ms: int = 0,
    ) -> Batch:
        """The messages from ``position`` on, at most ``max_bytes`` of them and at least one.

        ``position`` is 0, the ``next_position`` of a batch or message, or the answer to ``offset``. Where there is none,
        or no such topic, the batch is empty; with ``wait_ms`` the broker waits that long for one first.
        """
        _check_name("topic", topic)
        _check_name("group", group)
        reply = self.ask(
            lambda opaque: write_get(topic, group, partition, position, max_bytes, opaque, wait_ms), wait_ms / 1000
        )
        if reply.code == MOVED:
            return Batch([], TextPosition(_number(reply)))
        if reply.code == NOT_FOUND:
            # Whoever asks for the end of a partition that has no message yet must not miss its first.
            return Batch([], TextPosition(0 if position == END_OF_LOG else position))
        if reply.code != VALUE:
            raise _refusal(reply)
        messages = list(decode_messages(reply.body, position))
        if not messages:
            raise ClientError(f"{max_bytes} bytes hold no whole message of {topic}-{partition} at {position}; raise max_bytes")
        return Batch(messages, messages[-1].next_position)

    def batches(
        self,
        topic: str,
        *,
        partition: int = 0,
        position: int = 0,
        group: str = DEFAULT_GROUP,
        max_bytes: int = DEFAULT_MAX_BYTES,
        follow: bool = False,
    ) -> Iterator[Batch]:
        """The messages from ``position`` to the end, as they arrive; with ``follow`` also those to come, without end."""
        at = TextPosition(position)
        while True:
            asked = time.monotonic()
            wait_ms = _HOLD_MS if follow else 0
            batch = self.get(topic, at, partition=partition, group=group, max_bytes=max_bytes, wait_ms=wait_ms)
            if batch.messages:
                yield batch
            elif batch.next_position == at:
                if not follow:
                    return
                if time.monotonic() - asked < _PAUSE_S:
                    time.sleep(_PAUSE_S)
            at = batch.next_position

    def iterate(
        self,
        topic: str,
        *,
        partition: int = 0,
        position: int = 0,
        group: str = DEFAULT_GROUP,
        max_bytes: int = DEFAULT_MAX_BYTES,
        follow: bool = False,
    ) -> Iterator[Message]:
        """The messages of ``batches``, one by one."""
        for batch in self.batches(
            topic, partition=partition, position=position, group=group, max_bytes=max_bytes, follow=follow
        ):
            yield from batch.messages

    def offset(self, topic: str, position: int, *, partition: int = 0, group: str = DEFAULT_GROUP) -> TextPosition:
        """The valid position nearest to ``position``: 0 asks for the oldest message, ``END_OF_LOG`` for the end."""
        _check_name("topic", topic)
        _check_name("group", group)
        reply = self.ask(lambda opaque: write_offset(topic, group, partition, position, opaque))
        return TextPosition(_number(_ok(reply)))

    def create(self, topic: str, partitions: int) -> int:
        """Create a topic, or give it more partitions; returns how many it has now."""
        _check_name("topic", topic)
        return _number(_ok(self.ask(lambda opaque: write_line("create", topic, partitions, opaque))))

    def stats(self, item: str = "") -> str:
        """Statistics as the broker's text: of the broker, of a topic, or ``topics``, ``offsets``, ``realtime``, ``help``.

        ``parse_stats`` takes it apart.
        """
        if item:
            _check_name("item", item)
        return _text(_ok(self.ask(lambda opaque: write_line("stats", item, opaque))))

    def version(self) -> str:
        """The broker's version."""
        return _text(_ok(self.ask(lambda opaque: write_line("version", opaque))))

    def ask(self, write: Callable[[int], bytes], held_s: float = 0.0) -> Reply:
        """The reply, whatever its code, to the request that ``write`` makes for an opaque; ``held_s`` longer to wait for it."""
        connection = self._usable_connection()
        exchange = Exchange()
        opaque = connection.new_opaque()
        deadline = self._deadline(held_s)
        connection.send(write(opaque), [opaque], exchange, deadline)
        connection.wait(exchange, 0, deadline)
        return exchange.replies[opaque]

    def _deadline(self, held_s: float = 0.0) -> float:
        return time.monotonic() + self.timeout_s + held_s

    def _usable_connection(self) -> Connection:
        with self._connecting:
            if self._closed:
                raise ClientError("this client was closed")
            if not self._connection.usable():
                self._connection = Connection(self._host, self._port, self.timeout_s, self._access)
            return self._connection


def parse_stats(text: str) -> dict[str, str]:
    """The lines of a statistics text by name; a line of ``stats offsets`` is named ``<topic> part <number>``."""
    values = {}
    for line in text.splitlines():
        tokens = line.split(" ")
        if tokens not in (["STATS"], ["END"]):
            named_by = 3 if tokens[1:2] == ["part"] else 1
            values[" ".join(tokens[:named_by])] = " ".join(tokens[named_by:])
    return values


def _check_name(field: str, name: str) -> None:
    checks.text(field, name)
    if not _NAME.fullmatch(name):
        raise BadRequest(f"{field} {name!r} is not made of printable ASCII characters without blanks")


def _chunks(bodies: Iterable[bytes]) -> Iterator[list[bytes]]:
    chunk: list[bytes] = []
    size = 0
    for body in bodies:
        checks.body(body, "each of bodies")
        chunk.append(body)
        size += len(body)
        if size >= _CHUNK_BYTES or len(chunk) == _CHUNK_MESSAGES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _text(reply: Reply) -> str:
    return reply.body.decode(errors="replace")


def _refusal(reply: Reply) -> Refused:
    return Refused(reply.code, _text(reply))


def _ok(reply: Reply) -> Reply:
    if reply.code != OK:
        raise _refusal(reply)
    return reply


def _number(reply: Reply) -> int:
    try:
        return int(reply.body)
    except ValueError as error:
        raise ClientError(f"the broker answered {reply.body[:80]!r} where a number is due") from error


def _put_result(reply: Reply) -> PutResult:
    try:
        message_id, partition, position = map(int, reply.body.split())
    except ValueError as error:
        raise ClientError(
            f"the broker answered {reply.body[:80]!r} to a put where id, partition and position are due"
        ) from error
    return PutResult(message_id, partition, TextPosition(position))


def _all_stored(replies: list[Reply | None], failure: ClientError | None) -> list[PutResult]:
    """The results of a ``put_many``; ``failure`` is why some replies are missing."""
    stored = [_put_result(reply) for reply in replies if reply is not None and reply.code == OK]
    if len(stored) == len(replies):
        return stored
    results: list[PutResult | ClientError] = []
    following = iter(stored)
    for reply in replies:
        if reply is None:
            assert failure is not None
            results.append(failure)
        else:
            results.append(next(following) if reply.code == OK else _refusal(reply))
    raise PutManyFailed(results) from failure

"""The client of the text protocol, which several threads may share."""

import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from types import TracebackType
from typing import Final, NamedTuple, Self

from metaq.client import checks
from metaq.client.connecting.access import Access, Tls
from metaq.client.connecting.forks import renewed_in_children
from metaq.client.message import milliseconds, unix_ms
from metaq.client.text.connection import Exchange, TextConnection
from metaq.client.text.leasing import PoppedMessage, pop
from metaq.client.text.subscription import TextSubscription
from metaq.errors import BadRequest, ClientError, ConnectionFailed, Refused, RequestTimeout, TooLate, UnknownHandle
from metaq.message import Message, PutResult, TextPosition
from metaq.protocol.text.commands import BROKER_CHOOSES, END_OF_LOG, Ack, Due, Nack, Pop, PutOptions, Subscribe
from metaq.protocol.text.ids import MessageId
from metaq.protocol.text.messages import decode_text_messages, join_attribute
from metaq.protocol.text.replies import CONFLICT, MOVED, NOT_FOUND, OK, VALUE, Reply
from metaq.protocol.text.writing import write_ack, write_get, write_line, write_nack, write_offset, write_put

DEFAULT_PORT: Final = 8123
DEFAULT_GROUP: Final = "metaq"
DEFAULT_MAX_BYTES: Final = 1024 * 1024

# put_many sends chunks of about this size, up to eight of them ahead of their replies: the broker is always busy, and even with
# a million small bodies only about two thousand messages are in flight.
_CHUNK_MESSAGES: Final = 256
_CHUNK_BYTES: Final = 64 * 1024
_CHUNKS_AHEAD: Final = 8

_HOLD_MS: Final = 10_000
_PAUSE_S: Final = 0.1
"""The pause of a follower between two empty gets that a broker answers at once, as one that does not know ``wait=`` does."""

_CANCEL_ERRORS: Final = {CONFLICT: TooLate, NOT_FOUND: UnknownHandle}

_NAME: Final = re.compile("[!-~]+")


class Batch(NamedTuple):
    """The result of one get."""

    messages: list[Message]
    next_position: TextPosition
    """The position to continue at. Without messages it is the requested position when there are none yet, or another one to
    which the broker sends the reader (the oldest message it keeps, or the end)."""


class PutManyFailed(ClientError):
    """Not all messages of a ``put_many`` were acknowledged."""

    def __init__(self, results: list[PutResult | ClientError]) -> None:
        self.results = results
        """One entry for each body taken from the iterable, in order: its place, or the refusal (``Refused``), or the reason why
        its fate is unknown (``RequestTimeout``, ``ConnectionFailed``)."""
        failed = [(index, result) for index, result in enumerate(results) if isinstance(result, ClientError)]
        self.first_failed, self.reason = failed[0]
        """The index of the first body that was not acknowledged, and the reason; all bodies before it are stored."""
        super().__init__(
            f"{len(results) - len(failed)} of {len(results)} messages are stored; message {self.first_failed}: {self.reason}"
        )


class TextClient:
    """A client of one broker over the text protocol.

    ::

        with TextClient("127.0.0.1", 8123) as client:
            sent = client.put("orders", b"paid 2003")
            for message in client.iterate("orders", position=sent.position):
                print(message.body)

    Threads may share it: their requests use one connection, and each thread gets its own replies. A broker handles the requests
    of one connection in order, so a thread that waits for messages (``wait_ms``, ``follow``) should have a client of its own.

    A call that gets no answer raises ``RequestTimeout`` or ``ConnectionFailed``: the request may or may not have been carried
    out. The connection is then closed, and the next call makes one attempt to open a new one. No request is ever sent twice.
    ``Refused`` is an answer, and leaves the connection open.
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
        """Connect. ``timeout_s`` limits the wait for a connection and for each answer; it is an attribute that can be changed.

        ``user`` and ``password`` log in, with ``Refused`` when they are wrong; ``tls`` is that of ``metaq.connect``.
        """
        self._access = Access(user, password, tls)
        self._host = host
        self._port = port
        self.timeout_s = timeout_s
        self._closed = False
        self._connecting = threading.Lock()  # guards what follows
        self._connection = TextConnection(host, port, timeout_s, self._access)
        renewed_in_children(self)

    def _renew(self) -> None:
        """Drop the connection in a child of a fork, where the next call opens a new one."""
        self._connecting = threading.Lock()
        self._connection.abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the client for good. Requests of other threads that are in flight raise ``ConnectionFailed``."""
        with self._connecting:
            self._closed = True
            self._connection.lose("the client was closed")

    def put(
        self,
        topic: str,
        body: bytes,
        *,
        partition: int = BROKER_CHOOSES,
        attribute: str | None = None,
        delay: timedelta | None = None,
        deliver_at: datetime | None = None,
    ) -> PutResult:
        """Store one message. When this returns, the message is as safe as the broker's durability level promises.

        With ``delay``, or ``deliver_at``, a time with a time zone, it is delivered later; the result has a handle to cancel it.

        ``Refused`` with code 500 and a text that begins with ``stored at`` means that it is stored but not known to be safe.
        """
        _check_name("topic", topic)
        checks.body(body)
        checks.delay(0, delay, deliver_at)
        flag, data = join_attribute(attribute, body)
        due = None if delay is None else Due(milliseconds(delay), is_delay=True)
        if deliver_at is not None:
            due = Due(unix_ms(deliver_at), is_delay=False)
        reply = _ok(self._ask(lambda opaque: write_put(topic, partition, flag, data, opaque, options=PutOptions(due))))
        return _put_result(reply) if due is None else _delayed_result(reply)

    def cancel(self, handle: str) -> None:
        """Cancel a delayed message by its ``PutResult.handle``; when this returns, it will not be delivered.

        To cancel it again does no harm. ``TooLate`` when it was delivered before, ``UnknownHandle`` when no message is delayed
        under the handle, and ``Refused`` when it cannot be read.
        """
        _check_name("handle", handle)
        reply = self._ask(lambda opaque: write_line("cancel", handle, opaque))
        if reply.code in _CANCEL_ERRORS:
            raise _CANCEL_ERRORS[reply.code](reply.code, _text(reply))
        _ok(reply)

    def put_many(
        self, topic: str, bodies: Iterable[bytes], *, partition: int = BROKER_CHOOSES, attribute: str | None = None
    ) -> list[PutResult]:
        """Store messages in order, with many in flight at a time, and return one result for each body.

        It stops sending at the first error; ``PutManyFailed`` then has the result or the error of each body.
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
        """Return the messages from ``position`` on, at most ``max_bytes`` of them.

        ``position`` is 0, the ``next_position`` of a batch or message, or the answer to ``offset``. Where there is no message,
        or no such topic, the batch is empty; with ``wait_ms`` the broker first waits that long for a message. ``ClientError``
        when ``max_bytes`` is less than the first message needs.
        """
        _check_name("topic", topic)
        _check_name("group", group)
        reply = self._ask(
            lambda opaque: write_get(topic, group, partition, position, max_bytes, opaque, wait_ms), wait_ms / 1000
        )
        if reply.code == MOVED:
            return Batch([], TextPosition(_number(reply)))
        if reply.code == NOT_FOUND:
            # A reader that asks for the end of a partition without messages must not miss the first one.
            return Batch([], TextPosition(0 if position == END_OF_LOG else position))
        if reply.code != VALUE:
            raise _refusal(reply)
        messages = list(decode_text_messages(reply.body, position))
        if not messages:
            raise ClientError(
                f"no whole message of {topic}-{partition} at {position} fits into {max_bytes} bytes; raise max_bytes"
            )
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
        """Yield batches of messages from ``position`` to the end; with ``follow`` wait for further messages forever."""
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
        """Yield the messages of ``batches``, one by one."""
        for batch in self.batches(
            topic, partition=partition, position=position, group=group, max_bytes=max_bytes, follow=follow
        ):
            yield from batch.messages

    def offset(self, topic: str, position: int, *, partition: int = 0, group: str = DEFAULT_GROUP) -> TextPosition:
        """Return the valid position nearest to ``position``: 0 asks for the oldest message, ``END_OF_LOG`` for the end."""
        _check_name("topic", topic)
        _check_name("group", group)
        reply = self._ask(lambda opaque: write_offset(topic, group, partition, position, opaque))
        return TextPosition(_number(_ok(reply)))

    def subscribe(
        self,
        topic: str,
        group: str,
        *,
        ready: int = 1,
        invisible_s: float | None = None,
        partition: int | None = None,
        attribute: str | None = None,
        from_first: bool = True,
        owns: bool = False,
    ) -> TextSubscription:
        """Have messages of a topic pushed, over a connection of its own, until the subscription is closed.

        Args:
            topic: the topic, which must exist.
            group: the group; each message goes to one member of it, and comes again if that does not finish it.
            ready: messages that may be out and not finished, up to 10,000.
            invisible_s: the time in which a message must be finished, 1 s to 12 h; ``None``: a minute.
            partition: take messages of this partition only.
            attribute: take messages with this attribute only.
            from_first: begin at the oldest message, if the group is new; otherwise after the newest one.
            owns: have partitions of its own, which no other member of the group gets.

        Raises ``Refused`` with the broker's reason.
        """
        for field, name in (("topic", topic), ("group", group), *((("attribute", attribute),) if attribute else ())):
            _check_name(field, name)
        invisible_ms = None if invisible_s is None else round(1000 * invisible_s)
        command = Subscribe(
            topic=topic,
            group=group,
            ready=ready,
            invisible_ms=invisible_ms,
            from_first=from_first,
            partition=partition,
            attribute=attribute,
            owns=owns,
            name=None,
            with_crc=False,
            opaque="",
        )
        return TextSubscription(TextConnection(self._host, self._port, self.timeout_s, self._access), command, self.timeout_s)

    def pop(
        self,
        topic: str,
        group: str,
        most: int = 1,
        *,
        invisible: timedelta | None = None,
        wait: timedelta = timedelta(0),
        attribute: str | None = None,
        from_first: bool = True,
    ) -> Sequence[PoppedMessage]:
        """Lease up to ``most`` messages to a group, and wait up to ``wait`` for the first; none when there is nothing.

        They stay leased for the time ``invisible``, a minute by default, whatever becomes of this client: ``ack`` and ``nack``
        take their ids. ``from_first`` as for ``subscribe``. ``Refused`` with the broker's reason.
        """
        for field, name in (("topic", topic), ("group", group), *((("attribute", attribute),) if attribute else ())):
            _check_name(field, name)
        invisible_ms = None if invisible is None else milliseconds(invisible)
        command = Pop(topic, group, most, invisible_ms, milliseconds(wait), from_first, attribute, "")
        connection = TextConnection(self._host, self._port, self.timeout_s, self._access)
        try:
            return pop(connection, command, self.timeout_s)
        finally:
            connection.lose("the pop is over")

    def ack(self, topic: str, group: str, ids: Sequence[MessageId]) -> int:
        """Finish messages that a group has leased; return how many: those that were not finished, or given again, before."""
        return self._end(topic, group, lambda opaque: write_ack(Ack(tuple(ids), topic, group, str(opaque))))

    def nack(self, topic: str, group: str, ids: Sequence[MessageId], *, delay: timedelta | None = None) -> int:
        """Give messages back, to be given again at once or after a delay; return how many were leased."""
        delay_ms = None if delay is None else milliseconds(delay)
        return self._end(topic, group, lambda opaque: write_nack(Nack(tuple(ids), delay_ms, False, topic, group, str(opaque))))

    def reject(self, topic: str, group: str, ids: Sequence[MessageId]) -> int:
        """Send messages to the dead letters of the group; return how many were leased."""
        return self._end(topic, group, lambda opaque: write_nack(Nack(tuple(ids), None, True, topic, group, str(opaque))))

    def _end(self, topic: str, group: str, write: Callable[[int], bytes]) -> int:
        _check_name("topic", topic)
        _check_name("group", group)
        reply = self._ask(write)
        return 0 if reply.code == NOT_FOUND else _number(_ok(reply))

    def create(self, topic: str, partitions: int) -> int:
        """Create a topic, or give it more partitions, and return the number of partitions that it has now."""
        _check_name("topic", topic)
        return _number(_ok(self._ask(lambda opaque: write_line("create", topic, partitions, opaque))))

    def stats(self, item: str = "") -> str:
        """Return statistics as the broker's text, which ``parse_stats`` parses.

        ``item`` is a topic, or ``topics``, ``offsets``, ``realtime`` or ``help``; without it the statistics are the broker's.
        """
        if item:
            _check_name("item", item)
        return _text(_ok(self._ask(lambda opaque: write_line("stats", item, opaque))))

    def version(self) -> str:
        """Return the broker's version."""
        return _text(_ok(self._ask(lambda opaque: write_line("version", opaque))))

    def _ask(self, write: Callable[[int], bytes], held_s: float = 0.0) -> Reply:
        """Send the request that ``write`` makes for an opaque, and return the reply, whatever its code.

        The time limit is ``timeout_s`` plus ``held_s``, for which the broker may hold the request.
        """
        connection = self._usable_connection()
        exchange = Exchange()
        opaque = connection.new_opaque()
        deadline = self._deadline(held_s)
        connection.send(write(opaque), [opaque], exchange, deadline)
        connection.wait(exchange, 0, deadline)
        return exchange.replies[opaque]

    def _deadline(self, held_s: float = 0.0) -> float:
        return time.monotonic() + self.timeout_s + held_s

    def _usable_connection(self) -> TextConnection:
        with self._connecting:
            if self._closed:
                raise ClientError("this client was closed")
            if not self._connection.usable():
                self._connection = TextConnection(self._host, self._port, self.timeout_s, self._access)
            return self._connection


def parse_stats(text: str) -> dict[str, str]:
    """Return the lines of a statistics text by name; a line of ``stats offsets`` is named ``<topic> part <number>``."""
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
        raise ClientError(f"the broker answered {reply.body[:80]!r} instead of a number") from error


def _put_result(reply: Reply) -> PutResult:
    try:
        message_id, partition, position = map(int, reply.body.split())
    except ValueError as error:
        raise ClientError(f"the broker answered {reply.body[:80]!r} to a put instead of id, partition and position") from error
    return PutResult(message_id, partition, TextPosition(position))


def _delayed_result(reply: Reply) -> PutResult:
    """Return the result of a delayed put: a handle follows the place, unless the message was delivered at once."""
    words = reply.body.split()
    result = _put_result(reply._replace(body=b" ".join(words[:3])))
    return result._replace(handle=words[3].decode()) if len(words) > 3 else result


def _all_stored(replies: list[Reply | None], failure: ClientError | None) -> list[PutResult]:
    """Return the results of a ``put_many``, or raise ``PutManyFailed``; ``failure`` is the reason for missing replies."""
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

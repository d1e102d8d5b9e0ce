"""The client of the text protocol, which several threads may share."""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from typing import Final, NamedTuple

from metaq.client import checks
from metaq.client.message import milliseconds, unix_ms
from metaq.client.text.connection import Exchange
from metaq.client.text.leases import LeaseRequests
from metaq.client.text.requests import accepted, check_name, number_in, refusal_of, text_in
from metaq.errors import ClientError, ConnectionFailed, RequestTimeout, TooLate, UnknownHandle
from metaq.message import Message, PutResult, TextPosition
from metaq.protocol.text.commands import BROKER_CHOOSES, END_OF_LOG, Due, PutOptions
from metaq.protocol.text.messages import decode_text_messages, join_attribute
from metaq.protocol.text.replies import CONFLICT, MOVED, NOT_FOUND, OK, VALUE, Reply
from metaq.protocol.text.writing import write_get, write_line, write_offset, write_put
from metaq.reasons import reason_of

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
        its fate is unknown (``RequestTimeout``, ``ConnectionFailed``). The last may be another ``ClientError``: that body was
        not sent, since it is not ``bytes``, or the iterable raised an error instead."""
        failed = [(index, result) for index, result in enumerate(results) if isinstance(result, ClientError)]
        self.first_failed, self.reason = failed[0]
        """The index of the first body that was not acknowledged, and the reason; all bodies before it are stored."""
        super().__init__(
            f"{len(results) - len(failed)} of {len(results)} messages are stored; message {self.first_failed}: {self.reason}"
        )


class TextClient(LeaseRequests):
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

        Args:
            topic: the name of the topic.
            body: the body.
            partition: the number of the partition; by default each in turn.
            attribute: one word by which readers can choose messages.
            delay: the time after which it is delivered; the result then has a handle to cancel it.
            deliver_at: instead of ``delay``, the time at which it is delivered; with a time zone.

        Raises:
            Refused: the broker does not take it; with code 500 and a text that begins with ``stored at`` it is stored but not
                known to be safe.
            BadRequest: an argument is invalid.
            ConnectionFailed: the connection broke; it may have been carried out.
            RequestTimeout: no answer in time; it may have been carried out.
        """
        check_name("topic", topic)
        checks.body(body)
        checks.delay(0, delay, deliver_at)
        flag, data = join_attribute(attribute, body)
        due = None if delay is None else Due(milliseconds(delay), is_delay=True)
        if deliver_at is not None:
            due = Due(unix_ms(deliver_at), is_delay=False)
        reply = accepted(self._ask(lambda opaque: write_put(topic, partition, flag, data, opaque, options=PutOptions(due))))
        return _put_result(reply) if due is None else _delayed_result(reply)

    def cancel(self, handle: str) -> None:
        """Cancel a delayed message; when this returns, it will not be delivered. To cancel it again does no harm.

        Args:
            handle: the ``handle`` of a ``PutResult``.

        Raises:
            TooLate: the message was delivered before.
            UnknownHandle: no message is delayed under the handle.
            Refused: the handle cannot be read.
            ConnectionFailed: the connection broke; it may have been carried out.
            RequestTimeout: no answer in time; it may have been carried out.
        """
        check_name("handle", handle)
        reply = self._ask(lambda opaque: write_line("cancel", handle, opaque))
        if reply.code in _CANCEL_ERRORS:
            raise _CANCEL_ERRORS[reply.code](reply.code, text_in(reply))
        accepted(reply)

    def put_many(
        self, topic: str, bodies: Iterable[bytes], *, partition: int = BROKER_CHOOSES, attribute: str | None = None
    ) -> list[PutResult]:
        """Store messages in order, with many in flight at a time, and return one result for each body.

        It stops sending at the first error. One of the iterable itself is raised as it is when nothing has been sent.

        Args:
            topic: the name of the topic.
            bodies: the bodies.
            partition: the number of the partition; by default each in turn.
            attribute: one word by which readers can choose messages.

        Raises:
            PutManyFailed: one failed; it has the result or the error of each body.
            BadRequest: an argument is invalid; nothing was sent.
        """
        check_name("topic", topic)
        connection = self._usable_connection()
        exchange = Exchange()
        opaques: list[int] = []
        ahead: deque[int] = deque(maxlen=_CHUNKS_AHEAD)
        failure: ClientError | None = None
        source = _Source(bodies)
        try:
            for chunk in source.chunks():
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
        if source.error is not None and not opaques:
            raise source.error
        return _all_stored([exchange.replies.get(opaque) for opaque in opaques], failure, source.error)

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

        Where there is no message, or no such topic, the batch is empty; with ``wait_ms`` the broker first waits that long.

        Args:
            topic: the name of the topic.
            position: where to begin: 0, the ``next_position`` of a batch or message, or the answer to ``offset``.
            partition: the number of the partition.
            group: the name of the reader, for the broker's statistics.
            max_bytes: the most bytes of one answer.
            wait_ms: how long the broker waits for a message when there is none.

        Raises:
            ClientError: ``max_bytes`` is less than the first message needs.
            Refused: the broker refuses; ``text`` says why.
            ConnectionFailed: the connection broke.
            RequestTimeout: no answer in time.
        """
        check_name("topic", topic)
        check_name("group", group)
        reply = self._ask(
            lambda opaque: write_get(topic, group, partition, position, max_bytes, opaque, wait_ms), wait_ms / 1000
        )
        if reply.code == MOVED:
            return Batch([], TextPosition(number_in(reply)))
        if reply.code == NOT_FOUND:
            # A reader that asks for the end of a partition without messages must not miss the first one.
            return Batch([], TextPosition(0 if position == END_OF_LOG else position))
        if reply.code != VALUE:
            raise refusal_of(reply)
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
        """Yield batches of messages from ``position`` to the end; with ``follow`` wait for further messages forever.

        Args:
            topic: the name of the topic.
            partition: the number of the partition.
            position: where to begin: 0, the ``next_position`` of a batch or message, or the answer to ``offset``.
            group: the name of the reader, for the broker's statistics.
            max_bytes: the most bytes of one answer.
            follow: wait for further messages forever.

        Raises:
            Refused: the broker refuses; ``text`` says why.
            ConnectionFailed: the connection broke.
            RequestTimeout: no answer in time.
        """
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
        """Yield the messages of ``batches``, one by one.

        Args:
            topic: the name of the topic.
            partition: the number of the partition.
            position: where to begin: 0, the ``next_position`` of a batch or message, or the answer to ``offset``.
            group: the name of the reader, for the broker's statistics.
            max_bytes: the most bytes of one answer.
            follow: wait for further messages forever.

        Raises:
            Refused: the broker refuses; ``text`` says why.
            ConnectionFailed: the connection broke.
            RequestTimeout: no answer in time.
        """
        for batch in self.batches(
            topic, partition=partition, position=position, group=group, max_bytes=max_bytes, follow=follow
        ):
            yield from batch.messages

    def offset(self, topic: str, position: int, *, partition: int = 0, group: str = DEFAULT_GROUP) -> TextPosition:
        """Return the valid position nearest to ``position``.

        Args:
            topic: the name of the topic.
            position: 0 for the oldest message, ``END_OF_LOG`` for the end, or any number.
            partition: the number of the partition.
            group: the name of the reader, for the broker's statistics.

        Raises:
            Refused: the broker refuses; ``text`` says why.
            ConnectionFailed: the connection broke.
            RequestTimeout: no answer in time.
        """
        check_name("topic", topic)
        check_name("group", group)
        reply = self._ask(lambda opaque: write_offset(topic, group, partition, position, opaque))
        return TextPosition(number_in(accepted(reply)))

    def create(self, topic: str, partitions: int) -> int:
        """Create a topic, or give it more partitions, and return the number of partitions that it has now.

        Args:
            topic: the name of the topic.
            partitions: how many partitions it shall have.

        Raises:
            Refused: the broker refuses; ``text`` says why.
            ConnectionFailed: the connection broke; it may have been carried out.
            RequestTimeout: no answer in time; it may have been carried out.
        """
        check_name("topic", topic)
        return number_in(accepted(self._ask(lambda opaque: write_line("create", topic, partitions, opaque))))

    def stats(self, item: str = "") -> str:
        """Return statistics as the broker's text, which ``parse_stats`` parses.

        Args:
            item: a topic, or ``topics``, ``offsets``, ``realtime`` or ``help``; by default the broker's own.

        Raises:
            Refused: the broker refuses; ``text`` says why.
            ConnectionFailed: the connection broke.
            RequestTimeout: no answer in time.
        """
        if item:
            check_name("item", item)
        return text_in(accepted(self._ask(lambda opaque: write_line("stats", item, opaque))))

    def version(self) -> str:
        """Return the broker's version.

        Raises:
            Refused: the broker refuses; ``text`` says why.
            ConnectionFailed: the connection broke.
            RequestTimeout: no answer in time.
        """
        return text_in(accepted(self._ask(lambda opaque: write_line("version", opaque))))


def parse_stats(text: str) -> dict[str, str]:
    """Return the lines of a statistics text by name; a line of ``stats offsets`` is named ``<topic> part <number>``."""
    values = {}
    for line in text.splitlines():
        tokens = line.split(" ")
        if tokens not in (["STATS"], ["END"]):
            named_by = 3 if tokens[1:2] == ["part"] else 1
            values[" ".join(tokens[:named_by])] = " ".join(tokens[named_by:])
    return values


class _Source:
    """The bodies of a ``put_many``, up to the first error."""

    def __init__(self, bodies: Iterable[bytes]) -> None:
        self._bodies = bodies
        self.error: Exception | None = None
        """The reason why there was no next body, or why it cannot be sent."""

    def chunks(self) -> Iterator[list[bytes]]:
        """Yield the bodies in chunks; none when the error comes before the first chunk is full."""
        chunk: list[bytes] = []
        size, is_first = 0, True
        try:
            for body in self._bodies:
                checks.body(body, "each of bodies")
                chunk.append(body)
                size += len(body)
                if size >= _CHUNK_BYTES or len(chunk) == _CHUNK_MESSAGES:
                    yield chunk
                    chunk, size, is_first = [], 0, False
        except Exception as error:  # noqa: BLE001 - whatever the iterable raises, what was sent has results
            self.error = error
        if chunk and not (is_first and self.error is not None):
            yield chunk


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


def _all_stored(replies: list[Reply | None], failure: ClientError | None, unsent: Exception | None) -> list[PutResult]:
    """Return the results of a ``put_many``, or raise ``PutManyFailed``.

    ``failure`` is the reason for missing replies, ``unsent`` that for which one more body was not sent.
    """
    stored = [_put_result(reply) for reply in replies if reply is not None and reply.code == OK]
    if len(stored) == len(replies) and unsent is None:
        return stored
    results: list[PutResult | ClientError] = []
    following = iter(stored)
    for reply in replies:
        if reply is None:
            assert failure is not None
            results.append(failure)
        else:
            results.append(next(following) if reply.code == OK else refusal_of(reply))
    if unsent is not None:
        results.append(ClientError(f"it was not sent: {reason_of(unsent) if isinstance(unsent, OSError) else unsent}"))
    raise PutManyFailed(results) from failure or unsent

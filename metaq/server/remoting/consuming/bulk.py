"""Bulk fetches, 30030: large parts of a partition in one answer, which is never held.

``metaq.protocol.remoting.bulk`` defines the format.
"""

import time
from collections.abc import Sequence
from typing import Final

from gevent.lock import BoundedSemaphore

from metaq.engine.context import Context
from metaq.errors import Overloaded
from metaq.message import TopicPartition
from metaq.protocol.remoting.bulk import UNIT_SIZE, BulkFetch, encode_bulk_head
from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.protocol.remoting.headers import decode_header
from metaq.server.remoting.consuming.pull import check_readable
from metaq.server.remoting.reads import RemotingRead
from metaq.server.remoting.session import Answer, Kept, RemotingSession, RequestHandler
from metaq.server.wire.reads import StoreReads
from metaq.server.wire.session import Buffer
from metaq.store.bulk import BulkPiece, BulkReader
from metaq.store.files.filecache import ColdRead, Read
from metaq.store.queues.consumequeue import ConsumeQueue

MOST_BYTES: Final = 8 * 1024 * 1024
"""Bytes of records in one answer, unless the first one alone is larger; with its units an answer stays below the frame
limit."""
MOST_MESSAGES: Final = 128 * 1024
"""Messages in one answer: 2 MiB of units."""
MOST_S: Final = 0.003
"""Seconds that building an answer from memory may take, during which the loop does nothing else; then the answer ends."""
MOST_READING_S: Final = 1.0
"""Seconds that reading an answer from the disk may take: the messages of one partition may lie far apart."""
MOST_READING: Final = 8
"""Fetches that read from the disk at once, and so hold up to 8 MiB each; the others wait in line."""
RETRY_MS: Final = 100


class BulkHandler:
    """Handles bulk fetches."""

    def __init__(self, context: Context, reads: StoreReads) -> None:
        self.context = context
        self.reader = BulkReader(context.store.log, context.store.reader)
        self.line = BoundedSemaphore(MOST_READING)
        self.owing: set[RemotingSession] = set()
        """Sessions with a fetch that reads from the disk, or waits in line for that."""
        self._reads = reads

    def requests(self) -> dict[int, RequestHandler]:
        return {Request.BULK_FETCH: self.fetch}

    def fetch(self, session: RemotingSession, request: RemotingCommand) -> Answer | None:
        """Answer one fetch, now or owed.

        A session may owe only one at a time, so a client can make the broker hold at most one answer besides those that it has
        not read. Raise ``Overloaded`` for a second one.
        """
        header = decode_header(BulkFetch, request.fields)
        self.context.counters.get.add(1)
        self.context.topic_counters(header.topic).get.add(1)
        check_readable(self.context, session.principal, header.topic, header.queue_id)
        if session in self.owing:
            raise Overloaded("a connection can have one bulk fetch at a time", retry_after_ms=RETRY_MS)
        self._reads.start(_Fetch(self, session, request, header))
        return None


class _Fetch(RemotingRead):
    """A fetch in progress."""

    __slots__ = ("_handler", "_header")

    def __init__(self, handler: BulkHandler, session: RemotingSession, request: RemotingCommand, header: BulkFetch) -> None:
        super().__init__(session, request)
        self._handler = handler
        self._header = header

    @property
    def _owed(self) -> bool:
        """True when it may wait for the disk."""
        return isinstance(self._request, Kept)

    def read(self, read: Read) -> Answer:
        if not self._owed:
            return self._build(read)
        try:
            with self._handler.line:
                return self._build(read)
        finally:
            self._handler.owing.discard(self.session)

    def _build(self, read: Read) -> Answer:
        header, store = self._header, self._handler.context.store
        queue = store.queues.get(TopicPartition(header.topic, header.queue_id))
        offset, least, end = header.queue_offset, 0, 0
        if queue is not None and queue.readable:
            least, end = store.first(queue, read)[0], queue.readable
        pieces: list[BulkPiece] = []
        if queue is not None and least <= offset < end:
            pieces = self._pieces(queue, offset, end, read)
            least = store.first(queue, read)[0]  # what is missing may have been deleted meanwhile
        if offset < least:
            return _answer(Response.PULL_OFFSET_MOVED, least, least, end, f"{offset} lies before the oldest message, {least}")
        if pieces:
            units = b"".join([piece.units for piece in pieces])
            body = [encode_bulk_head(units), *(buffer for piece in pieces for buffer in piece.records)]
            verified = all(piece.verified for piece in pieces)
            return _answer(Response.SUCCESS, offset + len(units) // UNIT_SIZE, least, end, body=body, verified=verified)
        stays = not self._handler.context.replicas.is_master or (queue is not None and offset <= queue.next)
        if offset == end or stays:  # what its reader has read is missing on this slave, or hidden on a new master
            return _answer(Response.PULL_NOT_FOUND, offset, least, end)
        return _answer(Response.PULL_OFFSET_MOVED, end, least, end, f"{offset} lies behind the end of the partition, {end}")

    def _pieces(self, queue: ConsumeQueue, offset: int, end: int, read: Read) -> list[BulkPiece]:
        """Return the contents of the answer, at least one message. Raise ``ColdRead`` when they must be read from the disk."""
        reader, now = self._handler.reader, time.monotonic
        end = min(end, offset + min(max(self._header.max_msg_nums, 1), MOST_MESSAGES))
        left = min(self._header.max_bytes, MOST_BYTES)
        pieces: list[BulkPiece] = []
        deadline = now() + (MOST_READING_S if self._owed else MOST_S)
        # while this waits for the disk, retention may remove files at the begin, and a slave's log may be cut at the end
        while queue.base <= offset < min(end, queue.readable) and not (pieces and (left <= 0 or now() > deadline)):
            piece = reader.hot(queue, offset, end - offset, left, read)
            if piece is None:
                if not self._owed:
                    raise ColdRead
                piece = None if self._header.verified else reader.raw(queue, offset, end - offset, left, read)
                piece = piece or reader.cold(queue, offset, end - offset, left, read)
            left -= piece.size
            if pieces and left < 0:
                break
            pieces.append(piece)
            offset += len(piece.units) // UNIT_SIZE
        return pieces

    def defer(self) -> None:
        self._handler.owing.add(self.session)
        super().defer()


def _answer(
    code: int,
    following: int,
    least: int,
    end: int,
    remark: str | None = None,
    body: Sequence[Buffer] = (),
    *,
    verified: bool = True,
) -> Answer:
    fields = {"nextBeginOffset": str(following), "minOffset": str(least), "maxOffset": str(end)}
    return Answer(code, fields | {"verified": "true" if verified else "false"}, remark, body)

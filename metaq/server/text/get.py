"""``get`` and ``offset``: answers follow the original broker (specs: text protocol, sections 3.2, 3.3 and 4.8)."""

from collections.abc import Callable
from typing import Any, Final

from metaq.engine.context import Context
from metaq.engine.reading.hold import Holds
from metaq.errors import AccessDenied
from metaq.message import TopicPartition
from metaq.protocol.remoting.codes import READ
from metaq.protocol.text.commands import END_OF_LOG, Get, Offset
from metaq.protocol.text.messages import encode_run, id_base
from metaq.protocol.text.replies import BAD_REQUEST, FORBIDDEN, MOVED, NOT_FOUND, OK, write_result, write_value_head
from metaq.server.access.permissions import Action, Principal, demand
from metaq.server.text.reads import TextRead
from metaq.server.text.session import TextSession
from metaq.server.wire.reads import StoreReads
from metaq.server.wire.session import Buffer
from metaq.store.files.filecache import Read
from metaq.store.queues.consumequeue import UNIT_SIZE, ConsumeQueue
from metaq.store.reading import UNITS_AT_FIRST, UNITS_AT_ONCE, RecordRun

Answer = list[Buffer]

MOST_MESSAGES: Final = 4096
"""Messages in one answer: one that is not copied needs two buffers, which cost more than the bytes of a tiny message."""


class GetHandler:
    """Handles reads: answered at once from the page cache, or from the disk in a greenlet."""

    def __init__(self, context: Context, holds: Holds, reads: StoreReads, loop: Any) -> None:
        self._context = context
        self.reads = reads
        self._store = context.store
        self._holds = holds
        self._loop = loop
        self._epochs = context.epochs

    def commands(self) -> dict[type, Callable[..., None]]:
        """Return the handler methods by command."""
        return {Get: self.get, Offset: self.offset}

    # -- entry points -------------------------------------------------------------------------------------------------

    def get(self, session: TextSession, get: Get) -> None:
        """Answer a get, now or owed."""
        self._context.counters.get.add(1)
        self._context.topic_counters(get.topic).get.add(1)
        refusal = self._refuse(session, get)
        if refusal is not None:
            session.reply(write_result(*refusal, get.opaque))
            return
        if get.position != END_OF_LOG and self._queue(get) is not None:
            self._context.observed.asked(get, session.address)
        self.reads.start(_GetRead(self, session, get))

    def offset(self, session: TextSession, offset: Offset) -> None:
        """Answer a request for a valid position, now or owed."""
        self._context.counters.offset.add(1)
        self._context.topic_counters(offset.topic).offset.add(1)
        try:
            _check_reader(session.principal, offset)
        except AccessDenied as error:
            session.reply(write_result(error.status, str(error), offset.opaque))
        else:
            self.reads.start(_OffsetRead(self, session, offset))

    def _refuse(self, session: TextSession, get: Get) -> tuple[int, str] | None:
        topic = self._context.topics.get(get.topic)
        try:
            _check_reader(session.principal, get)
        except AccessDenied as error:
            return error.status, str(error)
        if topic is not None and not topic.permission & READ:
            return FORBIDDEN, f"topic {get.topic} does not answer gets (accept_subscribe)"
        if not self._context.topics.permission & READ:
            return FORBIDDEN, "this broker does not answer gets now (broker_permission)"
        if get.max_size <= 0 and self._queue(get) is not None:
            return BAD_REQUEST, f"Bad request,invalid max size:{get.max_size}"
        return None

    # -- waiting ---------------------------------------------------------------------------------------------------------

    def hold(self, request: "_GetRead") -> bool:
        """Hold a get for which there is nothing to read yet; return false when its client does not or may not wait."""
        get, session = request.place, request.session
        if not (get.wait_ms and self._may_hold(session)):
            return False
        request.defer()
        request.place = get._replace(wait_ms=0)  # it is held only once
        timer = self._loop.timer(min(get.wait_ms, self._context.settings.max_hold_ms) / 1000)
        session.held = self._holds.hold(TopicPartition(get.topic, get.partition), timer, request.woken)
        return True

    def missed(self, place: Get | Offset) -> bytes:
        """Count a request for which there is nothing to read, and return its answer."""
        self._context.counters.get_miss.add(1)
        self._context.topic_counters(place.topic).get_miss.add(1)
        return self._nothing(place)

    def _may_hold(self, session: TextSession) -> bool:
        return not session.ended and self._holds.has_room(self._context.settings.max_held_gets)

    # -- the work -----------------------------------------------------------------------------------------------------

    def _queue(self, place: Get | Offset) -> ConsumeQueue | None:
        """Return the partition, or ``None`` when it never had a message."""
        queue = self._store.queues.get(TopicPartition(place.topic, place.partition))
        return queue if queue is not None and queue.readable else None

    def read_messages(self, get: Get, read: Read) -> Answer | None:
        """Return the answer, or ``None`` when there is nothing to read at the position."""
        queue = self._queue(get)
        if queue is None:
            return None
        store = self._store
        position = get.position
        if position >= queue.readable_text_end:
            if position == END_OF_LOG:
                return [write_result(MOVED, str(queue.readable_text_end), get.opaque)]
            return None
        ordinal, start = store.locate(queue, position, read)
        if start != position:
            return [write_result(MOVED, str(start), get.opaque)]
        limit = min(get.max_size, self._context.settings.max_transfer_bytes)
        out: Answer = [b""]
        taken, total = self._take(queue, ordinal, limit, out, read)
        if not taken:  # a sequential reader has come to a damaged message
            _, following = store.reader.next_intact(queue, ordinal + 1, read)
            return [write_result(MOVED, str(following), get.opaque)]
        store.reader.remember(queue, position + total, ordinal + taken)
        self._context.statistics.got(get.group, get.topic, taken, total)
        out[0] = write_value_head(total, get.opaque)
        return out

    def _take(self, queue: ConsumeQueue, ordinal: int, limit: int, out: Answer, read: Read) -> tuple[int, int]:
        """Append messages up to one that is damaged or lost; return how many, and their size."""
        taken = total = 0
        at_once = UNITS_AT_FIRST
        while taken < MOST_MESSAGES and total < limit:
            most = min(at_once, MOST_MESSAGES - taken)
            found = self._run(queue, ordinal + taken, most, limit - total, read)
            if found is None:
                break
            run, base = found
            kept = len(out)
            count, size = encode_run(run.view, run.base, run.units, queue.overhead, base, limit - total, out)
            if taken and total + size > limit:  # the first of a run is appended whatever its size
                del out[kept:]
                break
            taken += count
            total += size
            if count * UNIT_SIZE < len(run.units):
                break
            at_once = UNITS_AT_ONCE
        return taken, total

    def _run(self, queue: ConsumeQueue, ordinal: int, most: int, most_bytes: int, read: Read) -> tuple[RecordRun, int] | None:
        """Return intact records of one epoch, and its ``id_base``; ``None`` when there is none at ``ordinal``."""
        reader, number, newest = self._store.reader, self._context.settings.broker_number, self._epochs.current
        run = reader.hot_run(queue, ordinal, most, newest.start, read)
        if run is not None:
            return run, id_base(number, newest.number)
        run = reader.checked_run(queue, ordinal, most, most_bytes, read)
        if run is None:
            return None
        epoch, end = self._epochs.at(run.first)
        return run.before(end), id_base(number, epoch)

    def read_position(self, offset: Offset, read: Read) -> Answer | None:
        """Return the answer, or ``None`` when the partition never had a message."""
        queue = self._queue(offset)
        if queue is None:
            return None
        _, position = self._store.locate(queue, offset.position, read)
        return [write_result(OK, str(position), offset.opaque)]

    def _nothing(self, place: Get | Offset) -> bytes:
        queue = self._store.queues.get(TopicPartition(place.topic, place.partition))
        if queue is None or not queue.next:  # not ``readable``: all of it may be hidden until replicas have it
            text = f"The topic `{place.topic}` in partition `{place.partition}` is not exists"
        else:
            text = f"Could not find message at position {place.position}"
        return write_result(NOT_FOUND, text, place.opaque)


def _check_reader(principal: Principal, place: Get | Offset) -> None:
    demand(principal, Action.SUBSCRIBE, place.topic)
    demand(principal, Action.CONSUME, place.group)


class _GetRead(TextRead):
    """A get in progress."""

    __slots__ = ("_handler", "place")

    def __init__(self, handler: GetHandler, session: TextSession, get: Get) -> None:
        super().__init__(session, get.opaque)
        self._handler = handler
        self.place = get

    def read(self, read: Read) -> Answer | None:
        return self._handler.read_messages(self.place, read)

    def found(self, result: Answer | None) -> None:
        if result is not None:
            self.settle(*result)
        elif not self._handler.hold(self):
            self.settle(self._handler.missed(self.place))

    def woken(self) -> None:
        """Read again at the end of the hold, and answer with whatever is found."""
        self.session.held = None
        self._handler.reads.start(self)


class _OffsetRead(TextRead):
    """A request for a valid position in progress."""

    __slots__ = ("_handler", "_place")

    def __init__(self, handler: GetHandler, session: TextSession, offset: Offset) -> None:
        super().__init__(session, offset.opaque)
        self._handler = handler
        self._place = offset

    def read(self, read: Read) -> Answer | None:
        return self._handler.read_position(self._place, read)

    def found(self, result: Answer | None) -> None:
        self.settle(*(result or [self._handler.missed(self._place)]))

"""Sending: 10, 310, 320 (specs: remoting protocol, section 3.2.1)."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

from metaq.checksum import crc32
from metaq.config import Settings
from metaq.dedupe.records import First, StoredAs, id_in, pack_first
from metaq.engine.context import Context
from metaq.engine.deadletters import most_retries
from metaq.engine.dedupe.asking import ColdIds
from metaq.engine.dedupe.dedupe import Dedupe
from metaq.engine.halfmessages import HalfMessages, is_half, is_transactional
from metaq.engine.placing import place
from metaq.engine.priorities.levels import prioritize
from metaq.engine.timers.staged import short_to_park
from metaq.engine.timers.timers import Timers
from metaq.engine.turn import Turns
from metaq.engine.writing import CLEARED, Placed
from metaq.errors import MessageIllegal, MetaqError
from metaq.message import HALF_TOPIC, RETRY_PREFIX
from metaq.protocol import properties
from metaq.protocol.delays import MAY_DELAY, as_delayed, due_ms
from metaq.protocol.record import CHECKSUM_SIZE, HEADER_SIZE, TailWriter, constant_middle, longer_tail
from metaq.protocol.remoting.codes import Request
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.protocol.remoting.leases.plainacks import PlainAcks
from metaq.protocol.remoting.recall import encode_words
from metaq.protocol.remoting.requests import Received
from metaq.protocol.remoting.sending.batch import BatchColumns
from metaq.protocol.remoting.sending.plain import PlainSend, SendHead, plain_send
from metaq.protocol.sysflag import TRANSACTION_TYPE
from metaq.server.access.permissions import Action, allowed, demand
from metaq.server.remoting.sending.batches import NO_BATCH, columns_of_batch, level_of_batch
from metaq.server.remoting.sending.header import draft_of, read_header
from metaq.server.remoting.sending.outcome import RECALL_HANDLE, SENT_BYTES, SendOutcome, Sent
from metaq.server.remoting.sending.partitions import Partitions
from metaq.server.remoting.sending.tags import NO_TAG, Tag, Tags
from metaq.server.remoting.session import Answer, RemotingSession, RequestHandler, RunHandler, failure
from metaq.server.wire.session import Session
from metaq.store.files.filecache import ColdRead, Read, read_cached, read_here
from metaq.store.queues.consumequeue import ConsumeQueue, has_record
from metaq.timers.handles import Handle
from metaq.timers.records import PARKS

BATCH_GROWTH: Final = 4
"""A batch takes at most this many times ``max_message_bytes`` in the log, where each of its messages is a whole record."""
PLAIN: Final = int(StoredAs.PLAIN)
PUBLISH: Final = Action.PUBLISH
_new: Final = tuple.__new__
"""Costs a third of the named tuple's own constructor."""

Filled = tuple[bytes | None, Tag, tuple[str, ...]]
"""The part of a record that comes from the message's properties: its tail, tag and keys."""


class FilledBatch(NamedTuple):
    """The same of the messages of a batch, in columns as in ``BatchColumns``, and the bytes of their records in the log."""

    tails: list[bytes]
    tags: list[Tag]
    keys: list[tuple[str, ...]]
    size: int


class SendHandler:
    """Stages messages sent by RocketMQ clients."""

    def __init__(
        self,
        context: Context,
        turns: Turns,
        halves: HalfMessages,
        timers: Timers,
        dedupe: Dedupe,
        partitions: Partitions,
    ) -> None:
        self._context = context
        self._turns = turns
        self._halves = halves
        self._timers = timers
        self._dedupe = dedupe
        self._windows = dedupe.windows
        self._partitions = partitions
        self._known = partitions.known
        self._store = context.store
        self._host = context.store_host.hex().upper()
        self._tags = Tags()
        self.configure(context.settings)

    def configure(self, settings: Settings) -> None:
        """Take over the limits for the size of a message and a batch."""
        self._partitions.configure(settings)
        self._most_bytes = self._partitions.most_bytes
        self._segment_bytes = settings.segment_bytes
        self._broker_name = settings.broker_name
        self._most_batch_bytes = min(BATCH_GROWTH * settings.max_message_bytes, self._partitions.room)

    def requests(self) -> dict[int, RequestHandler]:
        return {
            Request.SEND_MESSAGE: partial(self._counted, self.send),
            Request.SEND_MESSAGE_V2: partial(self._counted, self.send),
            Request.SEND_BATCH_MESSAGE: partial(self._counted, self.send_batch),
        }

    def runs(self) -> dict[int, RunHandler]:
        """Return what stages runs of plain sends and batches, by code."""
        return {Request.SEND_MESSAGE_V2: self.sends, Request.SEND_BATCH_MESSAGE: self.batches}

    def _counted(
        self, handle: RequestHandler, session: RemotingSession, request: RemotingCommand, failed: MetaqError | None = None
    ) -> Answer | None:
        """Handle a send, and count it as a failed put when it is refused at once, or because of ``failed``."""
        try:
            if failed is not None:
                raise failed
            try:
                return handle(session, request)
            except ColdIds as cold:
                self._ask(cold, handle, session, request)
                return None
        except MetaqError as error:
            context = self._context
            context.counters.put.add(1, len(request.body))
            context.counters.refuse(error, 1)
            context.topic_counters(request.fields.get("b") or request.fields.get("topic", "")).put_failed.add(1)
            raise

    def _ask(self, cold: ColdIds, handle: RequestHandler, session: RemotingSession, request: RemotingCommand) -> None:
        """Have the index asked for the ids of a send, which is owed then, and handle it again. Raise ``Overloaded``."""

        def handle_again() -> Callable[[], None]:
            try:
                try:
                    answer = self._counted(handle, session, request, cold.failure)
                except MetaqError as error:
                    answer = failure(error)
                if answer is not None:
                    return session.payment(kept, answer)
            except AssertionError:
                raise  # the broker's own state is wrong: the process ends
            except Exception:  # noqa: BLE001 - logged with its trace; see break_off
                session.break_off()
            return partial(session.answer, 1, kept.size)  # it is owed once more, or nobody is there

        self._dedupe.asking.ask(cold, handle_again)
        kept = session.owe(request, len(request.body))  # not before: what cannot be asked is refused

    # -- one message --------------------------------------------------------------------------------------------------

    def sends(self, session: Session, requests: Sequence[Received], at: int) -> int:
        """Stage the run of plain sends at ``at``; each reply is owed from then on. Return where the run ends."""
        try:
            self._partitions.refresh()
        except MetaqError:
            return at  # the slow path reports the error
        sent: list[Sent] = []
        size = 0
        end = at
        now_ms, born = self._store.clock.now_ms(), session.born_host
        known: SendHead | None = None  # of the previous send
        queue: ConsumeQueue | None = None  # where such sends go
        middle, middle_ms, middle_flag = b"", 0, 0  # of the previous send, too: many are made in the same millisecond
        for request in requests[at:] if at else requests:
            if isinstance(request, PlainAcks):
                break
            send = request if isinstance(request, PlainSend) else plain_send(request)
            if send is None:
                break
            head, opaque, born_ms, text, body = send  # cheaper than by name
            if head is not known:
                known, queue = head, None if head.is_batch else self._queue_of(session, head)
            if queue is None or len(body) > self._most_bytes:
                break
            try:
                if not middle or born_ms != middle_ms or head.sys_flag != middle_flag:
                    middle_ms, middle_flag = born_ms, head.sys_flag
                    middle = constant_middle(middle_flag, born_ms, born, now_ms, self._context.store_host)
                staged = self._stage(head, opaque, text, body, queue, middle, now_ms)
            except (KeyError, ValueError, MetaqError, ColdIds):
                break
            if staged is None:
                break
            end += 1
            size += len(body)
            if not head.is_oneway:
                sent.append(staged)
        if end > at:
            self._owe(session, size, sent, end - at)
        return end

    def _queue_of(self, session: Session, head: SendHead) -> ConsumeQueue | None:
        """Return the partition that a plain send names; ``None`` when only the slow path can say whether it takes it."""
        queue = self._known.get((head.topic, head.queue))
        return queue if queue is not None and allowed(session.principal, PUBLISH, head.topic) else None

    def _stage(
        self, head: SendHead, opaque: int, text: str, body: bytes, queue: ConsumeQueue, middle: bytes, now_ms: int
    ) -> Sent | None:
        """Stage one message on the fast path. Return ``None``, or raise, with nothing done yet, when it needs the slow path."""
        key: bytes | None = None
        tail: bytes | None = None
        tag = NO_TAG
        keys: tuple[str, ...] = ()
        has_window = head.topic in self._windows
        if has_window and self._dedupe.asking.is_busy:
            return None  # it has to come after those that wait for the index
        if text:
            if MAY_DELAY in text and not (has_window and id_in(text)):
                return self._park_short(opaque, head.serialization, queue, head.flag, body, middle, text, now_ms)
            kept = properties.as_sent(text)
            if kept is None:
                return None
            data, tag_name, keys, ident = kept
            tail = longer_tail(queue.tail, data)
            if tag_name is not None:
                tag = self._tags.of(tag_name)
            if has_window and (ident := ident or id_in(text)) is not None:
                key = self._dedupe.new_key(head.topic, ident, now_ms)
                if key is None:
                    key, first = self._dedupe.look(head.topic, ident, now_ms)
                    if first is not None:
                        return self._sent_before(opaque, head.serialization, first)
        ordinal, position = queue.next, queue.text_end
        # RocketMQ stores the body CRC without its highest bit, as a non-negative int
        crc = crc32(body) & 0x7FFFFFFF
        offset = self._store.put(queue, head.flag, body, crc, middle, tag.text_size + len(body), tail, tag.hash, keys)
        if key is not None:
            self._dedupe.stage(key, pack_first(PLAIN, queue.partition, ordinal, offset, position), now_ms)
        return _new(Sent, (opaque, head.serialization, queue.partition, ordinal, offset, (), None))

    def _park_short(
        self,
        opaque: int,
        serialization: int,
        queue: ConsumeQueue,
        flag: int,
        body: bytes,
        middle: bytes,
        text: str,
        now_ms: int,
    ) -> Sent | None:
        """Stage a message for its time. Return ``None``, with nothing done yet, when it needs the slow path for that."""
        delayed = as_delayed(text)
        if delayed is None:
            return None
        _, name, value, tag_name, unique_key = delayed
        due = due_ms(name, value, now_ms)
        kept = short_to_park(delayed, due, queue, self._segment_bytes - len(body)) if due > now_ms else None
        if kept is None:
            return None
        tag = NO_TAG if tag_name is None else self._tags.of(tag_name)
        parks = self._store.queues.get(PARKS)
        if parks is None:
            parks = self._store.queue(*PARKS)
        tail = longer_tail(parks.tail, kept)
        crc = crc32(body) & 0x7FFFFFFF
        text_size = tag.text_size + len(body)
        handle = self._timers.park_record((parks, flag, body, crc, middle, text_size, tail, tag.hash, ()), due, now_ms)
        more = self._recall(queue.topic, unique_key, handle)
        return _new(Sent, (opaque, serialization, queue.partition, 0, handle.ident, (), more))

    def _sent_before(self, opaque: int, serialization: int, first: First) -> Sent | None:
        """Return the reply to a message that was stored before; ``None`` when it has more than a plain one."""
        if first.kind != StoredAs.PLAIN:
            return None
        self._dedupe.duplicates += 1
        return Sent(opaque, serialization, first.partition, first.ordinal, first.log_offset)

    def _fill(self, queue: ConsumeQueue, text: str | None) -> Filled | None:
        """Return what properties become in a record, or ``None`` when they require work by the broker."""
        if not text:
            return None, NO_TAG, ()
        kept = properties.as_sent(text)
        if kept is None:
            return None
        data, tag, keys, _ = kept
        return longer_tail(queue.tail, data), NO_TAG if tag is None else self._tags.of(tag), keys

    def send(self, session: RemotingSession, request: RemotingCommand) -> Answer | None:
        """Stage one message, whatever it asks for; the reply is owed."""
        header = read_header(request)
        if header.batch:
            return self.send_batch(session, request)
        given_up_by = None
        if header.topic.startswith(RETRY_PREFIX):  # a consumer could not send a message back, and publishes it itself
            demand(session.principal, Action.PUBLISH, header.topic)
            group = self._context.groups.ensure(header.topic.removeprefix(RETRY_PREFIX))  # no topic without its group
            if header.reconsume_times >= most_retries(group, request.version, header.max_reconsume_times):
                given_up_by = group
        queue = self._partitions.admit(session, header, request.body)
        draft = draft_of(header, request.body, queue, session.born_host)
        if header.sys_flag & TRANSACTION_TYPE and not is_transactional(draft.properties):
            raise MessageIllegal(
                f"sysFlag {header.sys_flag} marks a transaction, the property {properties.TRANSACTION} does not"
            )
        if not is_half(draft):
            prioritize(self._context.topics, draft)
        unique_key = draft.properties.get(properties.UNIQUE_KEY, "")
        placed, first = self._dedupe.once(
            draft, partial(place, self._halves, self._timers, draft, header.producer_group, given_up_by)
        )
        if first is not None:
            if first.kind == StoredAs.HALF and is_half(draft):
                self._halves.check_repeat(draft, first)
            self._dedupe.duplicates += 1
        # A delayed or transactional message is answered with the partition that was requested, and the place where it is
        # parked.
        sent = Sent(
            opaque=request.opaque,
            serialization=request.serialization,
            partition=draft.partition if first is None else first.partition,
            queue_offset=placed.ordinal,
            log_offset=placed.log_offset,
            more=self._more(header.topic, unique_key, placed),
        )
        self._owe(session, len(request.body), [] if request.is_oneway else [sent])
        return None

    def _more(self, topic: str, unique_key: str, placed: Placed) -> tuple[str, str] | None:
        """Return the field that the answer has because the message is transactional or delayed."""
        if placed.handle is not None:
            return self._recall(topic, unique_key, placed.handle)
        if placed.queue.topic == HALF_TOPIC and unique_key:
            return "transactionId", unique_key
        return None

    def _recall(self, topic: str, unique_key: str, handle: Handle) -> tuple[str, str]:
        due_ms, ident, code = handle  # the last word is written here: two tuples and two calls more cost as much as all words
        return RECALL_HANDLE, encode_words(topic, self._broker_name, due_ms, unique_key, f"{due_ms}-{ident}-{code}")

    # -- many ---------------------------------------------------------------------------------------------------------

    def batches(self, session: Session, requests: Sequence[Received], at: int) -> int:
        """Stage the run of plain batches at ``at``, as ``sends`` does with plain sends."""
        try:
            self._partitions.refresh()
        except MetaqError:
            return at
        end = at
        for request in requests[at:] if at else requests:
            if not isinstance(request, PlainSend) or not request.head.is_batch:
                break
            head, opaque, born_ms, text, body = request
            queue = self._queue_of(session, head)
            if queue is None or len(body) > self._most_bytes:
                break
            now_ms = self._store.clock.now_ms()
            middle = constant_middle(head.sys_flag, born_ms, session.born_host, now_ms, self._context.store_host)
            try:
                sent = self._stage_batch(queue, text, body, middle, now_ms, opaque, head.serialization)
            except (MetaqError, ColdIds):
                break
            self._owe(session, len(body), [] if head.is_oneway else [sent])
            end += 1
        return end

    def send_batch(self, session: RemotingSession, request: RemotingCommand) -> Answer | None:
        """Stage all messages of a batch, or none; they become visible together, and one reply is owed."""
        header = read_header(request)
        if header.sys_flag & TRANSACTION_TYPE:
            raise MessageIllegal(NO_BATCH)
        queue = self._partitions.admit(session, header, request.body)
        topic = self._context.topics.get(queue.topic)
        if topic is not None and topic.has_priorities:
            level = level_of_batch(topic.partitions, queue.partition, header.properties or "", request.body)
            queue = self._store.queue(topic.name, level)
        now_ms = self._store.clock.now_ms()
        middle = constant_middle(
            sys_flag=header.sys_flag & CLEARED,
            born_ms=header.born_timestamp,
            born_host=session.born_host,
            store_ms=now_ms,
            store_host=self._context.store_host,
            reconsume_times=header.reconsume_times,
        )
        text, body = header.properties or "", request.body
        sent = self._stage_batch(queue, text, body, middle, now_ms, request.opaque, request.serialization)
        self._owe(session, len(body), [] if request.is_oneway else [sent])
        return None

    def _stage_batch(
        self, queue: ConsumeQueue, shared: str, data: bytes, middle: bytes, now_ms: int, opaque: int, serialization: int
    ) -> Sent:
        """Stage a batch, unless it was stored before; return its reply. Raise ``MetaqError`` or ``ColdIds`` with nothing done.

        ``shared`` are the properties that all its messages have.
        """
        ordinal, position = queue.next, queue.text_end
        batch = columns_of_batch(shared, data)
        filled = self._fill_batch(queue, batch)
        first, ids = self._look_batch(queue.topic, batch.properties, now_ms)
        if first is None:
            self._store.log.reserve(filled.size)
            places = self._put_batch(queue, middle, batch, filled)
            first = First(StoredAs.PLAIN, queue.partition, ordinal, places[0], position)
            self._stage_ids(ids, first, places, batch, filled.tags, now_ms)
        else:
            places = self._places(batch, queue.topic, first, now_ms)
            self._dedupe.duplicates += len(batch.bodies)
        return Sent(opaque, serialization, first.partition, first.ordinal, first.log_offset, places[1:])

    def _put_batch(self, queue: ConsumeQueue, middle: bytes, batch: BatchColumns, filled: FilledBatch) -> list[int]:
        """Stage the messages of a batch, for which there is room; return their log offsets."""
        flags, bodies, _ = batch
        tails, tags, keys, _ = filled
        store = self._store
        places: list[int] = []
        for at, body in enumerate(bodies):
            tag = tags[at]
            crc, text_size = crc32(body) & 0x7FFFFFFF, tag.text_size + len(body)
            places.append(store.put(queue, flags[at], body, crc, middle, text_size, tails[at], tag.hash, keys[at]))
        return places

    def _look_batch(self, topic: str, texts: list[str], now_ms: int) -> tuple[First | None, list[bytes | None]]:
        """Return the first message of the same batch that was stored before, if there is one; else the keys of all ids."""
        ident = id_in(texts[0]) if topic in self._windows else None
        if ident is None:
            self._dedupe.come_after(topic)
            return None, []
        key, first = self._dedupe.look(topic, ident, now_ms)
        if first is not None:
            return first, []
        others = [id_in(text) for text in texts[1:]]
        return None, [key, *(None if ident is None else self._dedupe.key(topic, ident, now_ms) for ident in others)]

    def _stage_ids(
        self, ids: list[bytes | None], first: First, places: list[int], batch: BatchColumns, tags: list[Tag], now_ms: int
    ) -> None:
        """Take the ids of a batch that was just staged: a message of it may be sent again alone."""
        position = first.detail
        for at, key in enumerate(ids):
            if key is not None:
                value = pack_first(PLAIN, first.partition, first.ordinal + at, places[at], position)
                self._dedupe.stage(key, value, now_ms)
            position += tags[at].text_size + len(batch.bodies[at])

    def _places(self, batch: BatchColumns, topic: str, first: First, now_ms: int) -> list[int]:
        """Return the log offsets of a batch that was stored before: that of its first message where one has none any more.

        Raise ``ColdIds`` when they must be read from the disk.
        """
        queue = self._store.queue(topic, first.partition)
        ordinals = range(first.ordinal + 1, min(first.ordinal + len(batch.bodies), queue.next))

        def read_places(read: Read) -> list[int]:
            units = [queue.unit(ordinal, read) for ordinal in ordinals]
            return [offset if has_record(size) else first.log_offset for offset, size, _ in units]

        # after the disk was read for them, a read that may wait: not each file system says what its page cache has
        read = read_here if self._dedupe.asking.has_read else read_cached
        try:
            return [first.log_offset, *read_places(read)]
        except ColdRead:
            ident = id_in(batch.properties[0])
            keys = [] if ident is None else self._dedupe.keys(topic, ident, now_ms)  # the index has to be asked again, too
            raise ColdIds(keys, read_places) from None

    def _fill_batch(self, queue: ConsumeQueue, batch: BatchColumns) -> FilledBatch:
        """Return what the properties of a batch become in its records. Raise ``MessageIllegal``."""
        _, bodies, texts = batch
        tails: list[bytes] = []
        tags: list[Tag] = []
        keys: list[tuple[str, ...]] = []
        tail_writer = TailWriter(queue.tail)
        size, latest, tag = 0, "", NO_TAG
        for at, text in enumerate(texts):
            kept = properties.as_sent(text) if text else properties.NO_PROPERTIES
            if kept is None:
                raise MessageIllegal(NO_BATCH)
            data, name, names, _ = kept
            if name is None:
                latest, tag = "", NO_TAG
            elif name != latest:
                latest, tag = name, self._tags.of(name)
            tail = tail_writer.longer(data) if data else queue.tail
            size += HEADER_SIZE + len(bodies[at]) + len(tail) + CHECKSUM_SIZE
            if size > self._most_batch_bytes:
                limit = f"over the limit of {self._most_batch_bytes} bytes (from max_message_bytes)"
                raise MessageIllegal(f"the records of a batch, its properties repeated in each, are {limit}")
            tails.append(tail)
            tags.append(tag)
            keys.append(names)
        return FilledBatch(tails, tags, keys, size)

    # -- what both need -----------------------------------------------------------------------------------------------

    def _owe(self, session: Session, size: int, sent: list[Sent], requests: int = 1) -> None:
        """Make the replies owed; they are sent when the turn's append is as durable as promised."""
        turns, outcome = self._turns, session.outcome
        if outcome is None or outcome.turn != turns.number:
            session.outcome = outcome = SendOutcome(session, turns.number, self._context.counters, self._host)
            turns.staged(outcome)
        outcome.requests += requests
        outcome.sent += sent
        outcome.size += size
        turns.waiting_bytes += size
        session.owed += len(sent)
        session.owed_bytes += size + SENT_BYTES * len(sent)

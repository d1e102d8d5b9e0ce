"""Sending: 10, 310, 320 (specs: remoting protocol, section 3.2.1)."""

import random
import struct
import zlib
from collections.abc import Sequence
from functools import partial
from typing import Final, NamedTuple

from metaq.config import Settings
from metaq.engine.context import Context
from metaq.engine.figures.counters import Counters
from metaq.engine.halfmessages import HalfMessages, half_of, is_half, is_transactional
from metaq.engine.tables.topics import DEFAULT_TOPIC, FORBIDDEN, HALF_TOPIC, RETRY_PREFIX, Topic
from metaq.engine.turn import Short, Turns
from metaq.engine.writing import CLEARED, Draft, Placed, delayed, stage
from metaq.errors import AccessDenied, MessageIllegal, MetaqError, UnknownTopic, WrongPartition
from metaq.protocol import properties
from metaq.protocol.record import CHECKSUM_SIZE, CONSTANT_MIDDLE, HEADER_SIZE, constant_middle, java_hash, longer_tail
from metaq.protocol.remoting.batch import decode_batch
from metaq.protocol.remoting.codes import INHERIT, JSON, ONEWAY_FLAG, VERSION, WRITE, Request, Response
from metaq.protocol.remoting.frames import HEAD, RemotingCommand, encode_response
from metaq.protocol.remoting.headers import Int32, SendMessage, decode_header, with_names
from metaq.protocol.sysflag import COMPRESSED, COMPRESSION_KIND, TRANSACTION_TYPE
from metaq.protocol.text.messages import HEADER_SIZE_TEXT
from metaq.server.access.permissions import Action, Principal, allowed, demand, denied
from metaq.server.remoting.consuming.sendback import dead_letter, most_retries, report_dead_letter
from metaq.server.remoting.session import Answer, RemotingSession, RequestHandler
from metaq.store.newrecord import Fields
from metaq.store.queues.consumequeue import ConsumeQueue

NO_BATCH: Final = "a message of a batch can be neither delayed nor transactional nor a request"
BESIDE_BODY: Final = 33 * 1024
"""Bytes of a record besides the body: at most 32 KiB of properties and less than 1 KiB of everything else."""
BATCH_GROWTH: Final = 4
"""A batch takes at most this many times ``max_message_bytes`` in the log, where each of its messages is a whole record."""
MOST_BATCH_PROPERTIES: Final = 1 << 20
"""Characters of properties in a batch, its shared properties counted once per message: they are parsed for each message."""
UNUSUAL: Final = ~(COMPRESSED | COMPRESSION_KIND)
"""Bits of a sender's sysFlag that exclude a message from the fast path."""
SEND_V2: Final = int(Request.SEND_MESSAGE_V2)
_INT32: Final = 1 << 31
_new: Final = tuple.__new__
"""Costs a third of the named tuple's own constructor."""

_SENT_JSON: Final = (
    b'{"code":%d,"extFields":{"queueId":"%d","TRACE_ON":"true","MSG_REGION":"DefaultRegion","msgId":"%b","queueOffset":"%d"'
    b'},"flag":1,"language":"JAVA","opaque":%d,"serializeTypeCurrentRPC":"JSON","version":%d}'
)
_KNOWN_TAGS: Final = 1024


Filled = tuple[int, bytes | None, int, tuple[str, ...]]
"""The last fields of a ``NewRecord``: text size, tail, tag and keys."""


class Sent(NamedTuple):
    """The reply to one send, which is valid when the turn's append succeeds.

    It keeps no reference to the request: freed at once, the request's memory is still in the processor's cache for the next
    one.
    """

    opaque: int
    serialization: int
    partition: int
    queue_offset: int
    ids: bytes
    """Offset message ids, separated by commas."""
    transaction_id: str
    """The unique id of a transactional message; empty for others."""

    def encode(self, code: int) -> bytes:
        opaque, serialization, partition, queue_offset, ids, transaction_id = self
        if serialization == JSON and not transaction_id:
            header = _SENT_JSON % (code, partition, ids, queue_offset, opaque, VERSION)
            return HEAD.pack(4 + len(header), len(header)) + header
        fields = {
            "queueId": str(partition),
            "TRACE_ON": "true",
            "MSG_REGION": "DefaultRegion",
            "msgId": ids.decode(),
            "queueOffset": str(queue_offset),
        }
        if transaction_id:
            fields["transactionId"] = transaction_id
        return encode_response(self, code, fields)


class SendOutcome:
    """The replies to one session's sends of one turn."""

    __slots__ = ("_counters", "_session", "requests", "sent", "size", "turn")

    def __init__(self, session: RemotingSession, turn: int, counters: Counters) -> None:
        self._session = session
        self._counters = counters
        self.turn = turn
        self.requests = 0
        self.sent: list[Sent] = []
        """The replies due: one per request, except one-way requests."""
        self.size = 0

    def stored(self) -> None:
        self._pay([sent.encode(Response.SUCCESS) for sent in self.sent])

    def late(self, short: Short) -> None:
        self._pay([sent.encode(short.code) for sent in self.sent])

    def refused(self, error: MetaqError, outcome: str) -> None:
        remark = f"the message {outcome}: {error}"
        self._counters.refuse(error, self.requests)
        self._pay([encode_response(sent, error.code, remark=remark) for sent in self.sent])

    def _pay(self, replies: list[bytes]) -> None:
        self._counters.put.add(self.requests, self.size)
        self._session.answer(len(replies), self.size, b"".join(replies))


class SendHandler:
    """Stages messages sent by RocketMQ clients."""

    def __init__(self, context: Context, turns: Turns, halves: HalfMessages) -> None:
        self._context = context
        self._turns = turns
        self._halves = halves
        self._store = context.store
        self._host = context.store_host.hex().upper().encode()
        self.configure(context.settings)
        self._known: dict[tuple[str, str], ConsumeQueue] = {}  # by topic and number as sent: those that take messages
        self._tags: dict[str, tuple[int, int]] = {}  # hash, and text size without body
        self._known_for = -1  # the version of the topic table for which _known is valid

    def configure(self, settings: Settings) -> None:
        """Take over the limits for the size of a message and a batch."""
        room = settings.segment_bytes - BESIDE_BODY
        self._most_bytes = min(settings.max_message_bytes, room)
        self._most_batch_bytes = min(BATCH_GROWTH * settings.max_message_bytes, room)

    def requests(self) -> dict[int, RequestHandler]:
        return {
            Request.SEND_MESSAGE: partial(self._counted, self.send),
            Request.SEND_MESSAGE_V2: partial(self._counted, self.send),
            Request.SEND_BATCH_MESSAGE: partial(self._counted, self.send_batch),
        }

    def _counted(self, handle: RequestHandler, session: RemotingSession, request: RemotingCommand) -> Answer | None:
        """Handle a send, and count it as a failed put when it is refused at once."""
        try:
            return handle(session, request)
        except MetaqError as error:
            context = self._context
            context.counters.put.add(1, len(request.body))
            context.counters.refuse(error, 1)
            context.topic_counters(request.fields.get("b") or request.fields.get("topic", "")).put_failed.add(1)
            raise

    # -- one message --------------------------------------------------------------------------------------------------

    def sends(self, session: RemotingSession, requests: Sequence[RemotingCommand], at: int) -> int:
        """Stage the run of plain sends at ``at``; each reply is owed from then on. Return where the run ends."""
        try:
            self._refresh()
        except MetaqError:
            return at  # the slow path reports the error
        sent: list[Sent] = []
        size = 0
        end = at
        now_ms = self._store.clock.now_ms()
        for request in requests[at:] if at else requests:
            staged = self._stage_short(session, request, now_ms) if request[0] == SEND_V2 else None
            if staged is None:
                break
            end += 1
            size += len(request.body)
            if not request.flag & ONEWAY_FLAG:
                sent.append(staged)
        if end > at:
            self._owe(session, size, sent, end - at)
        return end

    def _stage_short(self, session: RemotingSession, request: RemotingCommand, now_ms: int) -> Sent | None:
        """Stage one message on the fast path. Return ``None``, with nothing done yet, when the message needs the slow path."""
        fields, body = request.fields, request.body
        try:
            topic = fields["b"]
            queue = self._known[topic, fields["e"]]
            sys_flag, flag = int(fields["f"]), int(fields["h"])
            if sys_flag & UNUSUAL or not -_INT32 <= flag < _INT32 or len(body) > self._most_bytes:
                return None
            if (
                fields.get("j", "0") != "0"
                or fields.get("m") == "true"
                or not allowed(session.principal, Action.PUBLISH, topic)
            ):
                return None
            born_ms = int(fields["g"])
            middle = CONSTANT_MIDDLE.pack(sys_flag, born_ms, session.born_host, now_ms, self._context.store_host, 0)
            filled = self._fill(queue, fields.get("i"), body)
            if filled is None:
                return None
            ordinal = queue.next
            # RocketMQ stores the body CRC without its highest bit, as a non-negative int
            text_size, tail, tag, keys = filled  # unpacked by the call, they would cost a compiled broker a quarter of the put
            crc = zlib.crc32(body) & 0x7FFFFFFF
            offset = self._store.put(queue, flag, body, crc, middle, text_size, tail, tag, keys)
        except (KeyError, ValueError, struct.error, MetaqError):
            return None
        return _new(
            Sent, (request.opaque, request.serialization, queue.partition, ordinal, b"%b%016X" % (self._host, offset), "")
        )

    def _fill(self, queue: ConsumeQueue, text: str | None, body: bytes) -> Filled | None:
        """Return what a message adds to its record, or ``None`` when its properties require work by the broker."""
        if not text:
            return HEADER_SIZE_TEXT + len(body), None, 0, ()
        kept = properties.as_sent(text)
        if kept is None:
            return None
        data, tag, keys = kept
        tail = longer_tail(queue.tail, data)
        if tag is None:
            return HEADER_SIZE_TEXT + len(body), tail, 0, keys
        known = self._tags.get(tag)
        if known is None:
            if len(self._tags) == _KNOWN_TAGS:
                self._tags.clear()
            self._tags[tag] = known = (java_hash(tag), HEADER_SIZE_TEXT + 4 + len(tag.encode()))
        return known[1] + len(body), tail, known[0], keys

    def send(self, session: RemotingSession, request: RemotingCommand) -> Answer | None:
        """Stage one message; the reply is owed."""
        header = read_header(request)
        if header.batch:
            return self.send_batch(session, request)
        group = None
        if header.topic.startswith(RETRY_PREFIX):  # a consumer could not send a message back, and publishes it itself
            demand(session.principal, Action.PUBLISH, header.topic)
            group = self._context.groups.ensure(header.topic.removeprefix(RETRY_PREFIX))  # no topic without its group
        queue = self.admit(session, header, request.body)
        draft = Draft(
            topic=queue.topic,
            partition=queue.partition,
            body=request.body,
            properties=properties.parse(header.properties or ""),
            flag=header.flag,
            sys_flag=header.sys_flag & CLEARED,
            born_ms=header.born_timestamp,
            born_host=session.born_host,
            reconsume_times=header.reconsume_times,
        )
        if group is not None and header.reconsume_times >= most_retries(group, request.version, header.max_reconsume_times):
            draft = dead_letter(self._context, group, draft)
        prepared = self._prepare(header, draft)
        placed = stage(self._context, prepared)
        if draft.topic != header.topic:
            report_dead_letter(self._context, draft)
        transaction_id = ""
        if prepared.topic == HALF_TOPIC:
            self._halves.staged()
            transaction_id = prepared.properties.get(properties.UNIQUE_KEY, "")
        # A delayed or transactional message is answered with the partition that was requested, and the place where it is
        # parked.
        place = (queue.partition, placed.ordinal, self.message_id(placed))
        sent = Sent(request.opaque, request.serialization, *place, transaction_id)
        self._owe(session, len(request.body), [] if request.is_oneway else [sent])
        return None

    def _prepare(self, header: SendMessage, draft: Draft) -> Draft:
        """Return the message as the broker stores it: parked if it is delayed or transactional. Raise ``MessageIllegal``."""
        pairs = draft.properties
        if properties.REPLY_TO in pairs:  # the consumer derives the reply topic from the cluster's name
            pairs[properties.CLUSTER] = self._context.settings.cluster_name
        if is_half(draft):
            return half_of(draft, header.producer_group)
        if header.sys_flag & TRANSACTION_TYPE and not is_transactional(pairs):
            raise MessageIllegal(f"sysFlag {header.sys_flag} is transactional and the property {properties.TRANSACTION} is not")
        return delayed(draft)

    # -- many ---------------------------------------------------------------------------------------------------------

    def send_batch(self, session: RemotingSession, request: RemotingCommand) -> Answer | None:
        """Stage all messages of a batch, or none; they become visible together, and one reply is owed."""
        header = read_header(request)
        if header.sys_flag & TRANSACTION_TYPE:
            raise MessageIllegal(NO_BATCH)
        queue = self.admit(session, header, request.body)
        store, ordinal = self._store, queue.next
        middle = constant_middle(
            sys_flag=header.sys_flag & CLEARED,
            born_ms=header.born_timestamp,
            born_host=session.born_host,
            store_ms=store.clock.now_ms(),
            store_host=self._context.store_host,
            reconsume_times=header.reconsume_times,
        )
        records, size = self._read_batch(queue, middle, header.properties or "", request.body)
        store.log.reserve(size)
        places = store.put_all(records)
        ids = (self._host + b"%016X,") * len(places) % tuple(places)
        sent = Sent(request.opaque, request.serialization, queue.partition, ordinal, ids[:-1], "")
        self._owe(session, len(request.body), [] if request.is_oneway else [sent])
        return None

    def _read_batch(self, queue: ConsumeQueue, middle: bytes, shared: str, data: bytes) -> tuple[list[Fields], int]:
        """Return the records of a batch, and their bytes in the log; ``shared`` are properties of all messages.

        Raise ``MessageIllegal``.
        """
        records: list[Fields] = []
        size, short_tail = 0, len(queue.tail)
        kept = properties.as_sent(shared)
        if kept is not None and not kept[0]:
            shared = ""  # only meant for the broker
        items = decode_batch(data)
        characters = sum(len(item.properties) for item in items) + len(items) * len(shared)
        if characters > MOST_BATCH_PROPERTIES:
            limit = f"over the limit of {MOST_BATCH_PROPERTIES}"
            raise MessageIllegal(f"the properties of a batch have {characters} characters, {limit}: send several batches")
        for flag, body, text in items:
            filled = self._fill(queue, f"{text}\x02{shared}" if shared else text, body)
            if filled is None:
                raise MessageIllegal(NO_BATCH)
            text_size, tail, tag, keys = filled
            size += HEADER_SIZE + len(body) + (short_tail if tail is None else len(tail)) + CHECKSUM_SIZE
            if size > self._most_batch_bytes:
                limit = f"over the limit of {self._most_batch_bytes} bytes (from max_message_bytes)"
                raise MessageIllegal(f"the records of a batch, its properties repeated in each, are {limit}")
            # in the order of NewRecord
            records.append((queue, flag, body, zlib.crc32(body) & 0x7FFFFFFF, middle, text_size, tail, tag, keys))
        if not records:
            raise MessageIllegal("a batch without messages")
        return records, size

    # -- what both need -----------------------------------------------------------------------------------------------

    def message_id(self, placed: Placed) -> bytes:
        """Return the offset message id: host, port and log offset in hexadecimal digits."""
        return b"%b%016X" % (self._host, placed.log_offset)

    def _owe(self, session: RemotingSession, size: int, sent: list[Sent], requests: int = 1) -> None:
        """Make the replies owed; they are sent when the turn's append is as durable as promised."""
        turns, outcome = self._turns, session.outcome
        if outcome is None or outcome.turn != turns.number:
            session.outcome = outcome = SendOutcome(session, turns.number, self._context.counters)
            turns.staged(outcome)
        outcome.requests += requests
        outcome.sent += sent
        outcome.size += size
        turns.waiting_bytes += size
        session.owed += len(sent)
        session.owed_bytes += size

    def admit(self, session: RemotingSession, header: SendMessage, body: bytes) -> ConsumeQueue:
        """Return the partition for a message. Raise ``MetaqError`` when the message cannot be taken."""
        self._refresh()
        queue = self._partition(session, header)
        if len(body) > self._most_bytes:
            raise MessageIllegal(f"a body of {len(body)} bytes is longer than {self._most_bytes} (max_message_bytes)")
        return queue

    def _refresh(self) -> None:
        """Raise the reason why no message at all can be taken now, if there is one.

        Forget known partitions when topics have changed.
        """
        if self._turns.overloaded or not self._store.writable:
            self._turns.check_load()
            self._store.check_writable()
        version = self._context.topics.version
        if self._known_for != version:
            self._known.clear()
            self._known_for = version

    def _partition(self, session: RemotingSession, header: SendMessage) -> ConsumeQueue:
        name = header.topic
        if name in FORBIDDEN:
            raise AccessDenied(f"nobody may send to the topic {name}")
        if not allowed(session.principal, Action.PUBLISH, name):
            raise denied(session.principal, Action.PUBLISH, name)
        topic = self._context.topics.get(name) or self._create(session.principal, header)
        self._context.topics.check(topic, WRITE)
        number: int = header.queue_id
        if number < 0:
            number = random.randrange(topic.partitions) if topic.partitions else topic.all_partitions
        if number >= topic.all_partitions:
            raise WrongPartition(f"the topic {name} has {topic.partitions} partitions, {number} is none of them")
        queue = self._store.queue(name, number)
        if number == header.queue_id and not name.startswith(RETRY_PREFIX):
            self._known[name, str(number)] = queue
        return queue

    def _create(self, principal: Principal, header: SendMessage) -> Topic:
        """Create the topic to which a client sends, and return it.

        Raise ``UnknownTopic`` with the reason why that is not possible.
        """
        topics, name = self._context.topics, header.topic
        template = topics.get(header.default_topic)
        reason = f"there is no template topic {header.default_topic}"
        if header.default_topic == DEFAULT_TOPIC and not self._context.settings.auto_create_topics:
            reason = "topics are not created by sending to them (auto_create_topics)"
        elif template is not None and template.permission & INHERIT:
            demand(principal, Action.CREATE, name)
            partitions = min(max(0, header.default_topic_queue_nums), template.partitions)
            return topics.put(Topic(name, partitions, partitions, template.permission & ~INHERIT))
        elif template is not None:
            reason = f"the topic {header.default_topic} is no template"
        if name.startswith(RETRY_PREFIX):
            return topics.put(Topic(name, 1, 1))
        raise UnknownTopic(f"the topic {name} does not exist and is not created: {reason}")


def read_header(request: RemotingCommand) -> SendMessage:
    """Return a send's header, with fields named in full for 10 and 324, by letters for the others.

    Raise ``BadRequest`` for a bad field.
    """
    fields = request.fields
    if request.code in NAMED:
        return decode_header(SendMessage, fields)
    get = fields.get
    try:
        header = SendMessage(
            producer_group=fields["a"],
            topic=fields["b"],
            default_topic=fields["c"],
            default_topic_queue_nums=Int32(int(fields["d"])),
            queue_id=Int32(int(fields["e"])),
            sys_flag=Int32(int(fields["f"])),
            born_timestamp=int(fields["g"]),
            flag=Int32(int(fields["h"])),
            properties=get("i"),
            reconsume_times=Int32(int(get("j", "0"))),
            unit_mode=get("k") == "true",
            max_reconsume_times=None if "l" not in fields else Int32(int(fields["l"])),
            batch=get("m") == "true",
        )
        numbers = (header.sys_flag, header.flag, header.reconsume_times)
        struct.pack(">iiiq", *numbers, header.born_timestamp)
    except (KeyError, ValueError, struct.error):
        return decode_header(SendMessage, with_names(fields))
    return header


NAMED: Final = (Request.SEND_MESSAGE, Request.SEND_REPLY_MESSAGE)

"""Sending: 10, 310, 320 (specs: remoting protocol, section 3.2.1)."""

import random
import struct
import zlib
from typing import Final, NamedTuple

from metaq.errors import AccessDenied, MessageIllegal, MetaqError, RequestFailed, UnknownTopic, WrongPartition
from metaq.protocol import properties
from metaq.protocol.batch import decode_batch
from metaq.protocol.codes import (
    INHERIT,
    JSON,
    TRANSACTION_TYPE,
    VERSION,
    WRITE,
    Request,
    Response,
)
from metaq.protocol.headers import Int32, SendMessage, decode_header, with_names
from metaq.protocol.record import constant_middle
from metaq.protocol.remoting import HEAD, RemotingCommand, encode_response
from metaq.protocol.textmessage import HEADER_SIZE_TEXT
from metaq.server.context import Context
from metaq.server.front import RequestHandler
from metaq.server.permissions import Action, allowed
from metaq.server.remoting import Answer, RemotingSession
from metaq.server.tables import DEFAULT_TOPIC, FORBIDDEN, RETRY_PREFIX, Topic
from metaq.server.turn import Turns
from metaq.server.writing import CLEARED, Draft, Placed, delayed, stage
from metaq.store.consumequeue import ConsumeQueue

NO_TRANSACTIONS: Final = "transactional messages are not available yet in this version of metaq"
BESIDE_BODY: Final = 33 * 1024
"""Of a record: at most 32 KiB of properties and less than 1 KiB of everything else."""
_INT32: Final = 1 << 31

_SENT_JSON: Final = (
    '{"code":%d,"extFields":{"queueId":"%d","TRACE_ON":"true","MSG_REGION":"DefaultRegion","msgId":"%s","queueOffset":"%d"'
    '%s},"flag":1,"language":"JAVA","opaque":%d,"serializeTypeCurrentRPC":"JSON","version":' + str(VERSION) + "}"
)


class Sent(NamedTuple):
    """The reply to one send, which holds when the turn's append succeeds."""

    request: RemotingCommand
    partition: int
    queue_offset: int
    ids: str
    """Offset message ids, separated by commas."""

    def encode(self, code: int) -> bytes:
        request = self.request
        if request.serialization == JSON:
            header = (_SENT_JSON % (code, self.partition, self.ids, self.queue_offset, "", request.opaque)).encode()
            return HEAD.pack(4 + len(header), len(header)) + header
        fields = {
            "queueId": str(self.partition),
            "TRACE_ON": "true",
            "MSG_REGION": "DefaultRegion",
            "msgId": self.ids,
            "queueOffset": str(self.queue_offset),
        }
        return encode_response(request, code, fields)


class SendOutcome:
    """The replies to one session's sends of one turn."""

    __slots__ = ("_owed", "_session", "sent", "size", "turn")

    def __init__(self, session: RemotingSession, turn: int) -> None:
        self._session = session
        self.turn = turn
        self.sent: list[Sent] = []
        self._owed = 0
        self.size = 0

    def stored(self) -> None:
        self._pay([sent.encode(Response.SUCCESS) for sent in self.sent])

    def late(self) -> None:
        self._pay([sent.encode(Response.FLUSH_DISK_TIMEOUT) for sent in self.sent])

    def refused(self, error: MetaqError, outcome: str) -> None:
        remark = f"the message {outcome}: {error}"
        self._pay([encode_response(sent.request, error.code, remark=remark) for sent in self.sent])

    def _pay(self, replies: list[bytes]) -> None:
        self._session.answer(len(replies), self.size, b"".join(replies))


class SendHandler:
    """Stages messages sent by RocketMQ clients."""

    def __init__(self, context: Context, turns: Turns) -> None:
        self._context = context
        self._turns = turns
        self._store = context.store
        self._host = context.store_host.hex().upper()
        settings = context.settings
        self._most_bytes = min(settings.max_message_bytes, settings.segment_bytes - BESIDE_BODY)
        self._known: dict[tuple[str, int], ConsumeQueue] = {}  # partitions that are known to take messages
        self._known_for = -1  # the version of the topic table that this holds for

    def requests(self) -> dict[int, RequestHandler]:
        return {
            Request.SEND_MESSAGE: self.send,
            Request.SEND_MESSAGE_V2: self.send,
            Request.SEND_BATCH_MESSAGE: self.send_batch,
        }

    # -- one message --------------------------------------------------------------------------------------------------

    def send(self, session: RemotingSession, request: RemotingCommand) -> Answer | None:
        """Stage one message; the reply is owed."""
        header = read_header(request)
        if header.batch:
            return self.send_batch(session, request)
        queue = self._admit(session, header)
        body = request.body
        self._check_size(body)
        text = header.properties
        sys_flag = header.sys_flag & CLEARED
        if text:
            pairs = properties.parse(text)
            draft = Draft(
                *(queue.topic, queue.partition, body, pairs, header.flag, sys_flag, header.born_timestamp),
                *(session.born_host, header.reconsume_times),
            )
            placed = stage(self._context, self._prepare(draft))
        else:
            placed = self._stage_bare(session, header, queue, body, sys_flag)
        # a delayed message answers with the partition that was asked for, and its place in the schedule
        self._owe(session, len(body), Sent(request, queue.partition, placed.ordinal, self.message_id(placed)))
        return None

    def _prepare(self, draft: Draft) -> Draft:
        """What the broker does to a message before it is stored."""
        pairs = draft.properties
        if pairs.get(properties.TRANSACTION) == "true":
            raise RequestFailed(Response.SYSTEM_ERROR, NO_TRANSACTIONS)
        if properties.REPLY_TO in pairs:  # who answers derives the topic of replies from it
            pairs[properties.CLUSTER] = self._context.settings.cluster_name
        return delayed(draft)

    def _stage_bare(
        self, session: RemotingSession, header: SendMessage, queue: ConsumeQueue, body: bytes, sys_flag: int
    ) -> Placed:
        store = self._store
        middle = constant_middle(
            *(sys_flag, header.born_timestamp, session.born_host, store.clock.now_ms(), self._context.store_host),
            header.reconsume_times,
        )
        ordinal = queue.next
        crc = zlib.crc32(body) & 0x7FFFFFFF
        offset = store.put(queue, header.flag, body, crc, middle, HEADER_SIZE_TEXT + len(body))
        return Placed(queue, ordinal, offset)

    # -- many ---------------------------------------------------------------------------------------------------------

    def send_batch(self, session: RemotingSession, request: RemotingCommand) -> Answer | None:
        """Stage all messages of a batch, which become visible together; one reply is owed."""
        header = read_header(request)
        queue = self._admit(session, header)
        self._check_size(request.body)
        shared = header.properties or ""
        if header.sys_flag & TRANSACTION_TYPE or properties.DELAY in properties.parse(shared):
            raise MessageIllegal("a batch can be neither delayed nor transactional")
        placed = []
        for item in decode_batch(request.body):
            pairs = properties.parse(item.properties + "\x02" + shared) if shared else properties.parse(item.properties)
            draft = Draft(
                *(queue.topic, queue.partition, item.body, pairs, item.flag, header.sys_flag & CLEARED),
                *(header.born_timestamp, session.born_host, header.reconsume_times),
            )
            placed.append(stage(self._context, draft))
        if not placed:
            raise MessageIllegal("a batch without messages")
        ids = ",".join(map(self.message_id, placed))
        self._owe(session, len(request.body), Sent(request, queue.partition, placed[0].ordinal, ids))
        return None

    # -- what both need -----------------------------------------------------------------------------------------------

    def message_id(self, placed: Placed) -> str:
        """The offset message id: host, port and log offset in hexadecimal digits."""
        return f"{self._host}{placed.log_offset:016X}"

    def _owe(self, session: RemotingSession, size: int, sent: Sent) -> None:
        turns, outcome = self._turns, session.outcome
        if outcome is None or outcome.turn != turns.number:
            session.outcome = outcome = SendOutcome(session, turns.number)
            turns.staged(outcome)
        if not sent.request.is_oneway:
            outcome.sent.append(sent)
            session.owed += 1
        outcome.size += size
        turns.waiting_bytes += size
        session.owed_bytes += size

    def _check_size(self, body: bytes) -> None:
        if len(body) > self._most_bytes:
            raise MessageIllegal(f"a body of {len(body)} bytes is longer than {self._most_bytes} (max_message_bytes)")

    def _admit(self, session: RemotingSession, header: SendMessage) -> ConsumeQueue:
        """The partition that a message goes to, when it may."""
        if self._turns.overloaded or not self._store.writable:
            self._turns.check_load()
            self._store.check_writable()
        topics = self._context.topics
        if self._known_for != topics.version:
            self._known.clear()
            self._known_for = topics.version
        if header.sys_flag & TRANSACTION_TYPE:
            raise RequestFailed(Response.SYSTEM_ERROR, NO_TRANSACTIONS)
        queue = self._known.get((header.topic, header.queue_id))
        if queue is None:
            queue = self._partition(session, header)
        elif not allowed(session.principal, Action.PUBLISH, header.topic):
            raise AccessDenied(f"{session.principal} may not publish to {header.topic}")
        return queue

    def _partition(self, session: RemotingSession, header: SendMessage) -> ConsumeQueue:
        name = header.topic
        if name in FORBIDDEN:
            raise AccessDenied(f"nobody may send to the topic {name}")
        if not allowed(session.principal, Action.PUBLISH, name):
            raise AccessDenied(f"{session.principal} may not publish to {name}")
        topic = self._context.topics.get(name) or self._create(header)
        if not topic.permission & WRITE:
            raise AccessDenied(f"the topic {name} does not take messages (perm {topic.permission})")
        number: int = header.queue_id
        if number < 0:
            number = random.randrange(topic.partitions) if topic.partitions else 0
        if number >= topic.all_partitions:
            raise WrongPartition(f"the topic {name} has {topic.partitions} partitions, {number} is none of them")
        queue = self._store.queue(name, number)
        if number == header.queue_id:
            self._known_for = self._context.topics.version
            self._known[name, number] = queue
        return queue

    def _create(self, header: SendMessage) -> Topic:
        """The topic that a client creates by sending to it; ``UnknownTopic`` says why it may not."""
        topics, name = self._context.topics, header.topic
        template = topics.get(header.default_topic)
        reason = f"there is no template topic {header.default_topic}"
        if header.default_topic == DEFAULT_TOPIC and not self._context.settings.auto_create_topics:
            reason = "topics are not created by sending to them (auto_create_topics)"
        elif template is not None and template.permission & INHERIT:
            partitions = min(max(0, header.default_topic_queue_nums), template.partitions)
            return topics.put(Topic(name, partitions, partitions, template.permission & ~INHERIT))
        elif template is not None:
            reason = f"the topic {header.default_topic} is no template"
        if name.startswith(RETRY_PREFIX):
            return topics.put(Topic(name, 1, 1))
        raise UnknownTopic(f"the topic {name} does not exist and is not created: {reason}")


def read_header(request: RemotingCommand) -> SendMessage:
    """The header of 10 or 324 by names, of the others by letters; ``BadRequest`` names what is wrong."""
    fields = request.fields
    if request.code in NAMED:
        return decode_header(SendMessage, fields)
    get = fields.get
    try:
        header = SendMessage(
            *(fields["a"], fields["b"], fields["c"], Int32(int(fields["d"])), Int32(int(fields["e"]))),
            *(Int32(int(fields["f"])), int(fields["g"]), Int32(int(fields["h"])), get("i"), Int32(int(get("j", "0")))),
            *(get("k") == "true", None if "l" not in fields else Int32(int(fields["l"])), get("m") == "true"),
        )
        numbers = (header.sys_flag, header.flag, header.reconsume_times)
        struct.pack(">iiiq", *numbers, header.born_timestamp)
    except (KeyError, ValueError, struct.error):
        return decode_header(SendMessage, with_names(fields))
    return header


NAMED: Final = (Request.SEND_MESSAGE, Request.SEND_REPLY_MESSAGE)

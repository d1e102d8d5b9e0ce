"""``put``: check, stage, and the reply, which is valid when the turn's append succeeds."""

from collections.abc import Sequence
from typing import Final

from metaq.checksum import crc32
from metaq.engine.context import Context
from metaq.engine.tables.topics import FORBIDDEN
from metaq.engine.turn import Turns
from metaq.errors import (
    AccessDenied,
    BrokerError,
    ChecksumMismatch,
    MetaqError,
    ProtocolError,
    StoreError,
    UnknownTopic,
    WrongPartition,
)
from metaq.message import TopicPartition
from metaq.protocol.record import MAX_PROPERTIES_LENGTH, TAGS, constant_middle, encode_properties, java_hash, record_tail
from metaq.protocol.remoting.codes import WRITE
from metaq.protocol.text.commands import BROKER_CHOOSES, NO_CHECKSUM, Command, Put
from metaq.protocol.text.messages import HEADER_SIZE_TEXT, id_base, split_attribute
from metaq.server.access.permissions import Action, Principal, allowed, demand, denied
from metaq.server.text.session import REPLY_BYTES, TextOutcome, TextSession, result
from metaq.store.queues.consumequeue import ConsumeQueue

_LENGTHS: Final = tuple(map(str, range(64)))
"""The lengths of replies as text: with id, partition and position they have at most 50 characters."""


class PutHandler:
    """Stages puts. Texts and the order of the checks follow the original broker (specs: text protocol, section 3.1)."""

    def __init__(self, context: Context, turns: Turns) -> None:
        self._context = context
        self._turns = turns
        self._store = context.store
        self._id_base = id_base(context.settings.broker_number, context.store.epoch)
        self._partitions: dict[tuple[str, int], ConsumeQueue] = {}  # partitions known to take puts
        self._known_for = -1  # the version of the topic table for which _partitions is valid
        self._rotation: dict[str, int] = {}

    def puts(self, session: TextSession, commands: Sequence[Command], at: int) -> int:
        """Stage the run of puts at ``at``; each reply is owed to the session from then on. Return where the run ends."""
        store, known, base = self._store, self._partitions, self._id_base
        now_ms = store.clock.now_ms()
        middle = constant_middle(0, now_ms, session.born_host, now_ms, self._context.store_host)
        replies: list[str] = []
        size = 0
        topic, asked = "", -1  # of the previous put: runs to one partition are looked up once
        between = ""  # the partition's number, as it stands in its replies
        if self._known_for != self._context.topics.version:
            known.clear()
            self._known_for = self._context.topics.version
        obstacle = None if store.writable and not self._turns.overloaded else self._obstacle()
        for put in commands[at:] if at else commands:
            if type(put) is not Put:
                break
            put_topic, number, flag, checksum, transaction, opaque, body = put  # cheaper than by name
            if transaction is not None:
                break
            size += len(body)
            try:
                if obstacle is not None:
                    raise obstacle
                if put_topic != topic or number != asked or number < 0:
                    self._check_allowed(session, put)
                    queue = known.get((put_topic, number)) or self._partition(session.principal, put)
                    topic, asked, between = put_topic, number, f" {queue.partition} "
                position = queue.text_end
                if flag & 1:
                    offset = self._put_with_attribute(queue, put, middle)
                else:
                    crc = crc32(body) & 0x7FFFFFFF
                    if crc != checksum != NO_CHECKSUM:
                        raise checksum_mismatch()
                    # by position, which is cheaper than by name
                    offset = store.put(queue, flag, body, crc, middle, HEADER_SIZE_TEXT + len(body))
            except (BrokerError, ProtocolError, StoreError) as error:
                self._context.counters.refuse(error, 1)
                self._context.topic_counters(put.topic).put_failed.add(1)
                replies.append(self.refusal(put, error))
            else:
                ident, place = str(base | offset), str(position)
                length = _LENGTHS[len(ident) + len(between) + len(place)]
                replies.append(f"result 200 {length} {opaque}\r\n{ident}{between}{place}")
        counters = self._context.counters
        counters.put.add(len(replies), size)
        self.owe(session, replies, size)
        return at + len(replies)

    def owe(self, session: TextSession, replies: list[str], size: int) -> None:
        """Make the replies owed; they are sent when the turn's append is as durable as promised."""
        turns, outcome = self._turns, session.outcome
        if outcome is None or outcome.turn != turns.number:
            session.outcome = outcome = TextOutcome(session, turns.number, self._context.counters)
            turns.staged(outcome)
        outcome.replies += replies
        outcome.size += size
        turns.waiting_bytes += size
        session.owed += len(replies)
        session.owed_bytes += size + REPLY_BYTES * len(replies)

    def _obstacle(self) -> MetaqError | None:
        """Return the reason why no put at all can be taken now, or ``None``."""
        try:
            self._turns.check_load()
            self._store.check_writable()
        except MetaqError as error:
            return error
        return None

    def partition(self, session: TextSession, put: Put) -> ConsumeQueue:
        """Return the partition of a put that is not a plain one. Raise ``MetaqError`` when no message may be put there now."""
        if (obstacle := self._obstacle()) is not None:
            raise obstacle
        if self._known_for != self._context.topics.version:
            self._partitions.clear()
            self._known_for = self._context.topics.version
        self._check_allowed(session, put)
        return self._partitions.get((put.topic, put.partition)) or self._partition(session.principal, put)

    def _check_allowed(self, session: TextSession, put: Put) -> None:
        if not allowed(session.principal, Action.PUBLISH, put.topic):
            raise denied(session.principal, Action.PUBLISH, put.topic)

    def _partition(self, principal: Principal, put: Put) -> ConsumeQueue:
        """Return the partition that a put names or leaves open; create its topic if that is allowed.

        Raise ``MetaqError`` otherwise.
        """
        context = self._context
        if put.topic in FORBIDDEN:
            raise AccessDenied(f"nobody may put to the topic {put.topic}")
        topic = context.topics.get(put.topic)
        if topic is None:
            if not context.settings.auto_create_topics:
                raise UnknownTopic(f"The server do not accept topic {put.topic}")
            demand(principal, Action.CREATE, put.topic)
            topic = context.topics.ensure(put.topic, context.settings.default_partitions)
        if not topic.permission & WRITE:
            raise AccessDenied(f"topic {put.topic} does not accept puts (accept_publish)")
        context.topics.check(topic, WRITE)
        number = put.partition
        if number == BROKER_CHOOSES and topic.partitions:
            number = self._rotation.get(topic.name, 0) % topic.partitions
            self._rotation[topic.name] = number + 1
        if not 0 <= number < topic.partitions:
            raise WrongPartition(f"wrong partition {put.partition}")
        if topic.has_priorities:
            number = 0  # a message without a priority has the lowest
        queue = self._store.queue(topic.name, number)
        if put.partition == number or topic.has_priorities:
            self._partitions[topic.name, put.partition] = queue
        return queue

    def _put_with_attribute(self, queue: ConsumeQueue, put: Put, middle: bytes) -> int:
        """Store the attribute as the TAGS property, so that clients of the remoting protocol see payload and tag."""
        check_body(put)
        attribute, payload = split_attribute(put.flag, put.body)
        assert attribute is not None
        properties = encode_properties([(TAGS, attribute)])
        assert len(properties) <= MAX_PROPERTIES_LENGTH
        return self._store.put(
            queue=queue,
            flag=put.flag,
            body=payload,
            crc=crc32(payload) & 0x7FFFFFFF,
            middle=middle,
            text_size=HEADER_SIZE_TEXT + len(put.body),
            tail=record_tail(queue.topic, properties),
            tag=java_hash(attribute),
        )

    def refusal(self, put: Put, error: MetaqError) -> str:
        """Return the reply that refuses a put."""
        where = TopicPartition(put.topic, put.partition)
        text = f"Put message to [broker '{self._context.url}'] [partition '{where}'] failed.Detail:{error}"
        return result(error.status, text, put.opaque)


def check_body(put: Put) -> None:
    """Raise ``ChecksumMismatch`` when the body of a put does not have the checksum that the put announces."""
    if (crc32(put.body) & 0x7FFFFFFF) != put.checksum != NO_CHECKSUM:
        raise checksum_mismatch()


def checksum_mismatch() -> ChecksumMismatch:
    # the original broker's words, misspelling included: users search clients' logs for them
    return ChecksumMismatch("Checksum failure,message may be corrupted when transfering on networking.")

"""Offsets and queue locks of consumers: 14, 15, 29 to 32, 41 to 43 (specs: remoting protocol, sections 3.2.4 and 3.2.7)."""

from collections.abc import Sequence
from typing import Final

from metaq.engine.context import Context
from metaq.engine.locklog import LockLog
from metaq.engine.offsets.offsetlog import OffsetLog
from metaq.engine.reading.young import is_young
from metaq.engine.turn import Short
from metaq.errors import MetaqError, RequestFailed, UnknownTopic, WrongPartition
from metaq.message import MessageQueue, TopicPartition
from metaq.protocol.record import decode_record
from metaq.protocol.remoting import fastjson
from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.protocol.remoting.headers import QueryConsumerOffset, QueueOnly, SearchOffset, UpdateConsumerOffset, decode_header
from metaq.protocol.remoting.heartbeats import decode_queue_set, encode_locked
from metaq.server.access.permissions import Action, Principal, demand
from metaq.server.remoting.consuming.heartbeat import EMPTY
from metaq.server.remoting.later import Later
from metaq.server.remoting.session import DONE, Answer, Kept, RemotingSession, RequestHandler
from metaq.store.files.filecache import Read
from metaq.store.queues.consumequeue import ConsumeQueue

UPPER: Final = "UPPER"


class ConsumerHandler:
    """Handles requests about the offsets of groups and partitions, and about queue locks."""

    def __init__(self, context: Context, later: Later, locks: LockLog, offsets: OffsetLog) -> None:
        self._context = context
        self._store = context.store
        self._later = later
        self._locks = locks
        self._offsets = offsets

    def requests(self) -> dict[int, RequestHandler]:
        return {
            Request.QUERY_CONSUMER_OFFSET: self.offset,
            Request.UPDATE_CONSUMER_OFFSET: self.commit,
            Request.SEARCH_OFFSET_BY_TIMESTAMP: self.offset_at,
            Request.GET_MAX_OFFSET: self.most,
            Request.GET_MIN_OFFSET: self.least,
            Request.GET_EARLIEST_MSG_STORETIME: self.oldest,
            Request.LOCK_BATCH_MQ: self.lock,
            Request.UNLOCK_BATCH_MQ: self.unlock,
            Request.GET_ALL_CONSUMER_OFFSET: self.all_offsets,
        }

    # -- offsets of groups --------------------------------------------------------------------------------------------

    def offset(self, session: RemotingSession, request: RemotingCommand) -> Answer | None:
        """Return the group's offset (14).

        If there is none, return 0 for a young partition, otherwise code 22: then the client decides.
        """
        header = decode_header(QueryConsumerOffset, request.fields)
        _check_member(session.principal, header.consumer_group, header.topic)
        place = (header.consumer_group, header.topic, header.queue_id)
        known = self._context.offsets.get(*place)
        if known is not None:
            self._context.offsets.taken_up(*place)
            return _offset(known)
        if header.set_zero_if_not_found is False:
            raise _no_offset(header)
        queue = self._store.queues.get(TopicPartition(header.topic, header.queue_id))
        if queue is None or not queue.readable:
            return _offset(0)

        def work(read: Read) -> Answer:
            if is_young(self._store, queue, read):
                return _offset(0)
            raise _no_offset(header)

        self._later.read(session, request, work)
        return None

    def commit(self, session: RemotingSession, request: RemotingCommand) -> Answer:
        """Commit a group's offset (15).

        A consumer can only move it forward, unless the partition has lost messages in a power cut. An administrator's tool can
        set it freely when the group has no members.

        A master that may have been replaced refuses, since the next master would not know the commit. Raise ``Overloaded`` when
        the replicas have lacked earlier commits for too long.
        """
        self._store.check_master()
        self._offsets.check()
        header = decode_header(UpdateConsumerOffset, request.fields)
        _check_member(session.principal, header.consumer_group, header.topic)
        group, place = header.consumer_group, TopicPartition(header.topic, header.queue_id)
        clients = self._context.clients
        by_command = clients.administers(session) and clients.consumer_group(group) is None
        commit(self._context, group, place, header.commit_offset, by_command=by_command)
        return EMPTY

    def all_offsets(self, session: RemotingSession, request: RemotingCommand) -> Answer:
        """Return all offsets of all groups (43)."""
        demand(session.principal, Action.INSPECT)
        table = {f"{topic}@{group}": dict(offsets) for group, topic, offsets in self._context.offsets}
        return Answer(body=(fastjson.encode({"offsetTable": table}),))

    # -- offsets of partitions ----------------------------------------------------------------------------------------

    def most(self, session: RemotingSession, request: RemotingCommand) -> Answer:
        """Return the offset of the next message to come (30)."""
        queue = self._queue(session, decode_header(QueueOnly, request.fields))
        return _offset(0 if queue is None else queue.readable)

    def least(self, session: RemotingSession, request: RemotingCommand) -> Answer | None:
        """Return the offset of the oldest message (31)."""
        queue = self._queue(session, decode_header(QueueOnly, request.fields))
        if queue is None:
            return _offset(0)
        self._later.read(session, request, lambda read: _offset(self._store.first(queue, read)[0]))
        return None

    def offset_at(self, session: RemotingSession, request: RemotingCommand) -> Answer | None:
        """Return the offset of the first message stored at a time or later, or the end if there is none (29).

        With the boundary UPPER, return that of the last message stored until then.
        """
        header = decode_header(SearchOffset, request.fields)
        queue = self._queue(session, QueueOnly(header.topic, header.queue_id))
        if queue is None:
            return _offset(0)
        upper = header.boundary_type.upper() == UPPER
        at_time = self._store.reader.at_time
        self._later.read(session, request, lambda read: _offset(at_time(queue, header.timestamp, read, upper=upper)))
        return None

    def oldest(self, session: RemotingSession, request: RemotingCommand) -> Answer | None:
        """Return when the oldest message was stored, or -1 if there is none (32)."""
        queue = self._queue(session, decode_header(QueueOnly, request.fields))
        if queue is None:
            return Answer(fields={"timestamp": "-1"})

        def work(read: Read) -> Answer:
            stored = next(self._store.records(queue, self._store.first(queue, read)[0], 1, read), None)
            time_ms = -1 if stored is None else decode_record(stored.buffer[stored.at : stored.at + stored.size]).store_ms
            return Answer(fields={"timestamp": str(time_ms)})

        self._later.read(session, request, work)
        return None

    def _queue(self, session: RemotingSession, header: QueueOnly) -> ConsumeQueue | None:
        """Return the partition; ``None`` when it never had a message."""
        demand(session.principal, Action.SUBSCRIBE, header.topic)
        return self._store.queues.get(TopicPartition(header.topic, header.queue_id))

    # -- locks --------------------------------------------------------------------------------------------------------

    def lock(self, session: RemotingSession, request: RemotingCommand) -> Answer | None:
        """Lock queues for a client and return those that it has locked (41)."""
        wanted = decode_queue_set(request.body)
        demand(session.principal, Action.CONSUME, wanted.group)
        owner = f"{session.principal.name}@{session.address[0]}"
        taken = self._locks.lock(wanted, owner, lambda taken: _Locking(session, session.owe(request), _locked(taken)))
        return None if taken is None else _locked(taken)

    def unlock(self, session: RemotingSession, request: RemotingCommand) -> Answer:
        """Unlock queues of a client (42)."""
        given = decode_queue_set(request.body)
        demand(session.principal, Action.CONSUME, given.group)
        self._locks.unlock(given)
        return DONE


def _check_member(principal: Principal, group: str, topic: str) -> None:
    demand(principal, Action.CONSUME, group)
    demand(principal, Action.SUBSCRIBE, topic)


def commit(context: Context, group: str, partition: TopicPartition, offset: int, *, by_command: bool = False) -> None:
    """Store the offset that a consumer commits.

    Nothing is stored for a broadcasting group, whose clients keep their own offsets. Raise ``UnknownTopic`` or
    ``WrongPartition``.
    """
    topic = context.topics.get(partition.topic)
    if topic is None:
        raise UnknownTopic(f"the topic {partition.topic} does not exist on this broker")
    if not 0 <= partition.partition < topic.all_partitions:
        raise WrongPartition(
            f"the topic {topic.name} has {topic.all_partitions} partitions, and {partition.partition} is not one of them"
        )
    context.groups.ensure(group)
    connected = context.clients.consumer_group(group)
    queue, known = context.store.queues.get(partition), context.offsets.get(group, *partition) or 0
    end = 0 if queue is None else queue.next
    untrue = known > end >= offset and not (connected is not None and connected.broadcasts)
    if offset >= 0 and (by_command or untrue):  # an offset beyond the end is of messages lost in a power cut
        context.offsets.reset(group, *partition, offset)
    elif connected is None or not connected.broadcasts:
        context.offsets.commit(group, *partition, offset, context.store.clock.monotonic())


def _offset(offset: int) -> Answer:
    return Answer(fields={"offset": str(offset)})


def _no_offset(header: QueryConsumerOffset) -> RequestFailed:
    reason = f"the group {header.consumer_group} has no offset of {header.topic}-{header.queue_id} yet"
    return RequestFailed(Response.QUERY_NOT_FOUND, reason)


def _locked(taken: Sequence[MessageQueue]) -> Answer:
    return Answer(body=(encode_locked(taken),))


class _Locking:
    """A client that waits for its locks to become durable. Until then it has none of them."""

    __slots__ = ("_answer", "_request", "_session", "size")

    def __init__(self, session: RemotingSession, request: Kept, answer: Answer) -> None:
        self._session = session
        self._request = request
        self._answer = answer
        self.size = 0

    def stored(self) -> None:
        self._session.pay(self._request, self._answer)

    def refused(self, error: MetaqError, outcome: str) -> None:
        self._session.pay(self._request, Answer(error.code, remark=f"the lock {outcome}: {error}"))

    def late(self, short: Short) -> None:
        self._session.pay(self._request, Answer(short.code, remark=f"the lock is stored, but not {short.lacks}; ask again"))

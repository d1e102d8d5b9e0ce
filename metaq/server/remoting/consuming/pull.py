"""Pulling: 11 and 361, with long polling (specs: remoting protocol, section 3.2.3)."""

import time
from typing import Any, Final, NamedTuple

from metaq.engine.context import Context
from metaq.engine.reading.collecting import collect_messages
from metaq.engine.reading.filters import Filter, filter_of, parse_cached
from metaq.engine.reading.hold import Holds
from metaq.engine.tables.groups import Group
from metaq.errors import AccessDenied, RequestFailed, UnknownTopic, WrongPartition
from metaq.message import TopicPartition
from metaq.protocol.remoting import codes
from metaq.protocol.remoting.codes import PULL_COMMITS_OFFSET, PULL_HAS_SUBSCRIPTION, PULL_SUSPENDS, Request, Response
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.protocol.remoting.headers import PullMessage, decode_header
from metaq.protocol.subscription import EVERYTHING, ExpressionKind, Subscription
from metaq.server.access.permissions import Action, Principal, demand
from metaq.server.remoting.consuming.consumer import commit
from metaq.server.remoting.consuming.heartbeat import NO_SQL_FILTER
from metaq.server.remoting.reads import RemotingRead
from metaq.server.remoting.session import Answer, Kept, RemotingSession, RequestHandler
from metaq.server.wire.reads import StoreReads
from metaq.server.wire.session import Buffer
from metaq.store.files.filecache import Read
from metaq.store.messagestore import MessageStore
from metaq.store.queues.consumequeue import has_record

MOST_MESSAGES: Final = 1024
"""Messages in one answer, whatever the client asks for."""


class Found(NamedTuple):
    """The result of one read of a partition."""

    code: int
    status: str
    next: int
    """The offset at which the consumer goes on."""
    least: int
    most: int
    """The offsets of the partition: that of the oldest message, and the one after the newest."""
    body: list[Buffer]
    messages: int = 0
    """The number of messages in the body."""
    behind_bytes: int = 0
    """The bytes of the log after the first message that was looked at."""


class PullHandler:
    """Answers pulls. A pull at the end of its partition is held until a message arrives."""

    def __init__(self, context: Context, holds: Holds, reads: StoreReads, loop: Any) -> None:
        self.context = context
        self.reads = reads
        self.loop = loop
        self.holds = holds

    def requests(self) -> dict[int, RequestHandler]:
        return {Request.PULL_MESSAGE: self.pull, Request.LITE_PULL_MESSAGE: self.pull}

    def pull(self, session: RemotingSession, request: RemotingCommand) -> Answer | None:
        """Answer one pull, now or owed. An offset that comes with it is committed at once, even when the pull is held."""
        header = decode_header(PullMessage, request.fields)
        self.context.counters.get.add(1)
        self.context.topic_counters(header.topic).get.add(1)
        group = self._check(session, header)
        wanted = self._filter(session, header, group)
        online = self.context.clients.consumer_group(group.name)
        if online is not None:
            online.reads(session, header.topic, header.queue_id)
        if header.sys_flag & PULL_COMMITS_OFFSET and self.context.replicas.is_master:
            commit(self.context, group.name, TopicPartition(header.topic, header.queue_id), header.commit_offset)
        self.reads.start(_Pull(self, session, request, header, wanted))
        return None

    def _check(self, session: RemotingSession, header: PullMessage) -> Group:
        demand(session.principal, Action.CONSUME, header.consumer_group)
        groups, is_master = self.context.groups, self.context.replicas.is_master
        group = (groups.ensure if is_master else groups.imagine)(header.consumer_group)
        if not group.consume_enable:
            raise AccessDenied(f"the group {group.name} may not consume (consumeEnable is false)")
        check_readable(self.context, session.principal, header.topic, header.queue_id)
        return group

    def _filter(self, session: RemotingSession, header: PullMessage, group: Group) -> Filter:
        """Return the filter for a pull: from the pull itself, or else from the consumer's heartbeats."""
        if header.sys_flag & PULL_HAS_SUBSCRIPTION:
            expression = EVERYTHING if header.subscription is None else header.subscription
            subscription = parse_cached(header.topic, expression, kind=header.expression_type or ExpressionKind.TAG)
        else:
            subscription = self._subscription(session, header, group)
        if subscription.kind is ExpressionKind.SQL92 and not self.context.settings.sql_filter:
            raise RequestFailed(Response.SYSTEM_ERROR, NO_SQL_FILTER)
        return filter_of(subscription)

    def _subscription(self, session: RemotingSession, header: PullMessage, group: Group) -> Subscription:
        connected = self.context.clients.consumer_group(group.name)
        known = None if connected is None else connected.subscription(session, header.topic)
        if connected is None or known is None:
            reason = f"the group {group.name} does not subscribe to {header.topic}: send a heartbeat first"
            raise RequestFailed(Response.SUBSCRIPTION_NOT_EXIST, reason)
        if connected.broadcasts and not group.consume_broadcast_enable:
            raise AccessDenied(f"the group {group.name} may not broadcast (consumeBroadcastEnable is false)")
        if known.version < header.sub_version:
            reason = f"the broker knows version {known.version}, the pull has {header.sub_version}: send a heartbeat"
            raise RequestFailed(Response.SUBSCRIPTION_NOT_LATEST, f"subscription to {header.topic}: {reason}")
        return known

    def may_hold(self, session: RemotingSession) -> bool:
        return not session.closed and self.holds.has_room(self.context.settings.max_held_gets)


def check_readable(context: Context, principal: Principal, name: str, partition: int) -> None:
    """Raise the reason why a principal may not read a partition: ``AccessDenied``, ``UnknownTopic`` or ``WrongPartition``."""
    demand(principal, Action.SUBSCRIBE, name)
    topic = context.topics.get(name)
    if topic is None:
        raise UnknownTopic(f"the topic {name} does not exist on this broker")
    context.topics.check(topic, codes.READ)
    if not 0 <= partition < topic.read_partitions:
        raise WrongPartition(
            f"the topic {name} has {topic.read_partitions} partitions to read, and {partition} is not one of them"
        )


class _Pull(RemotingRead):
    """A pull in progress."""

    __slots__ = ("_deadline", "_filter", "_handler", "_header", "_hold", "_offset")

    def __init__(
        self,
        handler: PullHandler,
        session: RemotingSession,
        request: RemotingCommand,
        header: PullMessage,
        wanted: Filter,
    ) -> None:
        super().__init__(session, request)
        self._handler = handler
        self._header = header
        self._filter = wanted
        self._offset = header.queue_offset
        wait_ms = header.suspend_timeout_millis if header.sys_flag & PULL_SUSPENDS else 0
        wait_ms = min(wait_ms, handler.context.settings.max_hold_ms)
        self._deadline = time.monotonic() + wait_ms / 1000 if wait_ms > 0 else 0.0
        self._hold: Any = None

    def read(self, read: Read) -> Found:
        header, context = self._header, self._handler.context
        store = context.store
        most = min(max(header.max_msg_nums, 1), MOST_MESSAGES)
        key = TopicPartition(header.topic, header.queue_id)
        found = read_of_replica(context, key, self._offset, most, self._filter, read)
        if found.least <= self._offset < found.most:
            log_offset, size, _ = store.queues[key].unit(self._offset, read)
            if has_record(size):  # else nobody knows where its message is
                return found._replace(behind_bytes=store.log.end - log_offset)
        return found

    def found(self, result: Found) -> None:
        """Answer; at the end of the partition, hold the pull for as long as the consumer is willing to wait.

        A pull that has not been held yet and has skipped messages is answered at once, so that the consumer moves on.
        """
        self._offset = result.next
        nothing = result.code in (Response.PULL_NOT_FOUND, Response.PULL_RETRY_IMMEDIATELY)
        moved = self._hold is None and result.next != self._header.queue_offset
        if nothing and result.next >= result.most and not moved and self._wait():
            return
        self._count(result)
        code = result.code
        if code == Response.PULL_NOT_FOUND and result.next != self._header.queue_offset:
            code = Response.PULL_RETRY_IMMEDIATELY  # messages that did not match were skipped: 19 would not move the consumer
        fields = {
            "suggestWhichBrokerId": str(self._suggested(result)),
            "nextBeginOffset": str(result.next),
            "minOffset": str(result.least),
            "maxOffset": str(result.most),
        }
        self.session.settle(self._request, Answer(code, fields, result.status, result.body))

    def _suggested(self, answer: Found) -> int:
        context = self._handler.context
        group = context.groups.get(self._header.consumer_group)
        standby, preferred = (0, 0) if group is None else (group.broker_id, group.which_broker_when_consume_slowly)
        return context.replicas.reader_goes_to(standby, preferred, answer.behind_bytes)

    def _count(self, answer: Found) -> None:
        context, header = self._handler.context, self._header
        if answer.messages:
            context.statistics.got(header.consumer_group, header.topic, answer.messages, sum(map(len, answer.body)))
        else:
            context.counters.get_miss.add(1)
            context.topic_counters(header.topic).get_miss.add(1)

    def _wait(self) -> bool:
        handler = self._handler
        remaining = self._deadline - time.monotonic()
        if remaining <= 0 or not handler.may_hold(self.session):
            return False
        self.defer()
        key = TopicPartition(self._header.topic, self._header.queue_id)
        self._hold = handler.holds.hold(key, handler.loop.timer(remaining), self._woken)
        self.session.at_close(self._hold.cancel)
        return True

    def _woken(self) -> None:
        self.session.not_at_close(self._hold.cancel)
        self._handler.reads.start(self)

    def defer(self) -> None:
        if not isinstance(self._request, Kept):
            super().defer()
            self._header = self._header._replace(subscription=None)  # it may be long, and the filter has it


# -- reading a partition ----------------------------------------------------------------------------------------------


def read_of_replica(context: Context, key: TopicPartition, offset: int, most: int, wanted: Filter, read: Read) -> Found:
    """Return what ``read_partition`` does; on a slave, a reader that is ahead of it stays where it is.

    The slave has yet to copy what that reader has already read from the master: moving it back would repeat messages.
    """
    found = read_partition(context.store, key, offset, most, wanted, read)
    if offset > found.most and not context.replicas.is_master:
        return found._replace(code=Response.PULL_NOT_FOUND, next=offset)
    return found


def read_partition(store: MessageStore, key: TopicPartition, offset: int, most: int, wanted: Filter, read: Read) -> Found:
    """Return at most ``most`` messages of a partition from an offset on that readers may see and that match ``wanted``.

    Raise ``ColdRead`` as ``read`` does.
    """
    queue = store.queues.get(key)
    if queue is not None and queue.readable < offset <= queue.next:
        # the reader was given what is hidden now by the master before: moving it back would repeat messages
        least = store.first(queue, read)[0] if queue.readable else 0
        return Found(Response.PULL_NOT_FOUND, "OFFSET_OVERFLOW_ONE", offset, least, queue.readable, [])
    if queue is None or not queue.readable:
        code = Response.PULL_OFFSET_MOVED if offset else Response.PULL_NOT_FOUND
        return Found(code, "NO_MESSAGE_IN_QUEUE", 0, 0, 0, [])
    least, end = store.first(queue, read)[0], queue.readable
    if offset == end:
        return Found(Response.PULL_NOT_FOUND, "OFFSET_OVERFLOW_ONE", offset, least, end, [])
    if offset > end:
        return Found(Response.PULL_OFFSET_MOVED, "OFFSET_OVERFLOW_BADLY", end, least, end, [])
    if offset < least:
        return Found(Response.PULL_OFFSET_MOVED, "OFFSET_TOO_SMALL", least, least, end, [])
    body, ordinals, following = collect_messages(store, queue, offset, most, wanted, read)
    if body:
        return Found(Response.SUCCESS, "FOUND", following, least, end, body, len(ordinals))
    return Found(Response.PULL_RETRY_IMMEDIATELY, "NO_MATCHED_MESSAGE", following, least, end, [])

"""Pops: 200050, with long polling, and the questions whether there is something to pop: 200052, 200054, 200055."""

from functools import partial
from typing import Final

from metaq.address import Address
from metaq.engine.context import Context
from metaq.engine.leases.leasing import Leasing
from metaq.engine.leases.planning import PopRequest
from metaq.engine.leases.popping import GivenPart, PopResult
from metaq.engine.leases.waiting import Waiting
from metaq.engine.reading.collecting import collect_messages
from metaq.engine.reading.filters import EVERY_MESSAGE, Filter, filter_of, parse_cached
from metaq.engine.tables.groups import Group
from metaq.engine.tables.topics import Topic
from metaq.errors import AccessDenied, Fenced, RequestFailed, StoreError
from metaq.leases.tokens import token_of
from metaq.message import TopicPartition
from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.protocol.remoting.headers import Int32, decode_header, encode_header
from metaq.protocol.remoting.leases.pop import (
    ALL_QUEUES,
    FROM_END,
    FROM_FIRST,
    Notification,
    NotificationAnswer,
    PeekMessage,
    PollingAnswer,
    PollingInfo,
    PopAnswer,
    PopMessage,
    PoppedQueue,
    describe_popped,
)
from metaq.protocol.subscription import ExpressionKind
from metaq.server.access.permissions import Action, demand
from metaq.server.remoting.consuming.heartbeat import NO_SQL_FILTER
from metaq.server.remoting.consuming.pull import check_readable
from metaq.server.remoting.later import Later
from metaq.server.remoting.reads import RemotingRead
from metaq.server.remoting.session import Answer, RemotingSession, RequestHandler, failure
from metaq.server.wire.pops import LineRead, PopRead
from metaq.server.wire.reads import StoreReads
from metaq.store.files.filecache import Read

MOST_MESSAGES: Final = 32
"""Messages in one answer; Java's clients ask for no more."""
MOST_NAME_CHARS: Final = 255
"""Characters of the name of an attempt, of which one is kept for each partition."""
SHORTEST_MS: Final = 1000
"""The shortest lease."""
LATE_MS: Final = 500
"""A pop whose time is over by more is answered at once: its client does not wait any more."""
MOST_APART_MS: Final = 2000
"""A client's clock that differs by more from the broker's is not believed."""


class PopHandler:
    """Answers pops. A pop that finds nothing waits in line until there are messages."""

    def __init__(self, context: Context, leasing: Leasing, reads: StoreReads, later: Later) -> None:
        self.context = context
        self.leasing = leasing
        self.reads = reads
        self._later = later

    def requests(self) -> dict[int, RequestHandler]:
        return {
            Request.POP_MESSAGE: self.pop,
            Request.PEEK_MESSAGE: self.peek,
            Request.NOTIFICATION: self.notify,
            Request.POLLING_INFO: self.polling,
        }

    # -- pops ---------------------------------------------------------------------------------------------------------

    def pop(self, session: RemotingSession, request: RemotingCommand) -> Answer | None:
        """Lease messages of one partition or of all (200050)."""
        header = decode_header(PopMessage, request.fields)
        group, topic = self._check(session, header.consumer_group, header.topic, header.queue_id, of_master=True)
        self.context.counters.get.add(1)
        self.context.topic_counters(header.topic).get.add(1)
        _check_count(header.max_msg_nums)
        if not SHORTEST_MS <= header.invisible_time <= group.max_invisible_ms:
            reason = f"invisibleTime is {header.invisible_time}, not from {SHORTEST_MS} to {group.max_invisible_ms} ms"
            raise RequestFailed(Response.INVALID_PARAMETER, f"{reason} (max_invisible_ms of the group)")
        if header.init_mode not in (FROM_FIRST, FROM_END):
            raise RequestFailed(
                Response.INVALID_PARAMETER, f"initMode is {header.init_mode}, neither {FROM_FIRST} nor {FROM_END}"
            )
        client = str(Address(*session.address[:2]))
        self.leasing.clocks.note(group.name, client, header.born_time, header.invisible_time)
        online = self.context.clients.consumer_group(group.name)
        if online is not None and header.queue_id != ALL_QUEUES:
            online.reads(session, header.topic, header.queue_id)
        wanted = PopRequest(
            group=group,
            topic=topic,
            partitions=_partitions(header.queue_id),
            most=header.max_msg_nums,
            invisible_ms=header.invisible_time,
            wanted=self._filter(header),
            from_first=header.init_mode == FROM_FIRST,
            in_order=header.order,
            attempt=_attempt_of(header),
        )
        wait_ms = self._wait_ms(header.poll_time, header.born_time)
        _Pop(session, request).start(self.leasing, self.reads, wanted, wait_ms)
        return None

    def _check(
        self, session: RemotingSession, group_name: str, topic_name: str, queue: int, *, of_master: bool = False
    ) -> tuple[Group, Topic]:
        """Return the group and the topic of a request; raise why they may not be used. Only a master makes the group."""
        demand(session.principal, Action.CONSUME, group_name)
        if of_master:
            self.context.store.check_master()
        groups, is_master = self.context.groups, self.context.replicas.is_master
        group = (groups.ensure if is_master else groups.imagine)(group_name)
        if not group.consume_enable:
            raise AccessDenied(f"the group {group.name} may not consume (consumeEnable is false)")
        check_readable(self.context, session.principal, topic_name, 0)
        topic = self.context.topics.get(topic_name)
        assert topic is not None
        if queue != ALL_QUEUES and not 0 <= queue < topic.read_partitions:
            reason = f"queueId is {queue}: the topic {topic_name} has {topic.read_partitions} partitions to read"
            raise RequestFailed(Response.INVALID_PARAMETER, reason)
        return group, topic

    def _filter(self, header: PopMessage) -> Filter:
        if not header.exp:
            return EVERY_MESSAGE
        subscription = parse_cached(header.topic, header.exp, kind=header.exp_type or ExpressionKind.TAG)
        if subscription.kind is ExpressionKind.SQL92 and not self.context.settings.sql_filter:
            raise RequestFailed(Response.SYSTEM_ERROR, NO_SQL_FILTER)
        return filter_of(subscription)

    def _wait_ms(self, poll_ms: int, born_ms: int) -> int:
        """Return how long a request may wait: its time runs from when it was made, if its clock can be believed.

        Negative: its time is over.
        """
        wait_ms = min(max(0, poll_ms), self.context.settings.max_hold_ms)
        age_ms = self.context.store.clock.now_ms() - born_ms if born_ms else 0
        if not wait_ms or age_ms < -MOST_APART_MS:
            return wait_ms
        if age_ms > poll_ms + LATE_MS:
            return -1 if age_ms <= poll_ms + LATE_MS + MOST_APART_MS else wait_ms
        return min(wait_ms, max(1, poll_ms - max(0, age_ms)))

    # -- questions ----------------------------------------------------------------------------------------------------

    def peek(self, session: RemotingSession, request: RemotingCommand) -> Answer | None:
        """Return messages that were never given, without a lease (200052)."""
        header = decode_header(PeekMessage, request.fields)
        group, topic = self._check(session, header.consumer_group, header.topic, header.queue_id)
        _check_count(header.max_msg_nums)
        partitions = range(topic.read_partitions) if header.queue_id == ALL_QUEUES else (header.queue_id,)
        self._later.read(session, request, lambda read: self._peek(group, topic, partitions, header.max_msg_nums, read))
        return None

    def _peek(self, group: Group, topic: Topic, partitions: "range | tuple[int, ...]", most: int, read: Read) -> Answer:
        store, body, rest = self.context.store, [], 0
        for partition in partitions:
            queue = store.queues.get(TopicPartition(topic.name, partition))
            if queue is None or not queue.readable:
                continue
            state = self.leasing.leases.of(group.name, topic.name).get(partition)
            known = self.context.offsets.get(group.name, topic.name, partition) or 0
            first = max(known if state is None else state.next, store.first(queue, read)[0])
            rest += max(0, queue.readable - first)
            if most > 0 and first < queue.readable:
                found = collect_messages(store, queue, first, most, EVERY_MESSAGE, read)
                body += found.body
                most -= len(found.ordinals)
                rest -= len(found.ordinals)
        answer = PopAnswer(store.clock.now_ms(), 0, Int32(0), rest)
        return Answer(Response.SUCCESS if body else Response.PULL_NOT_FOUND, encode_header(answer), body=body)

    def notify(self, session: RemotingSession, request: RemotingCommand) -> Answer | None:
        """Return whether there may be messages to pop, once there are or the time is over (200054)."""
        header = decode_header(Notification, request.fields)
        group, topic = self._check(session, header.consumer_group, header.topic, header.queue_id, of_master=True)
        asked = PopRequest(
            group=group,
            topic=topic,
            partitions=_partitions(header.queue_id),
            most=1,
            invisible_ms=0,
            wanted=EVERY_MESSAGE,
            from_first=True,
            in_order=header.order,
            attempt=_attempt_of(header),
        )
        _Notice(session, request).start(self.leasing, asked, self._wait_ms(header.poll_time, header.born_time))
        return None

    def polling(self, session: RemotingSession, request: RemotingCommand) -> Answer:
        """Return how many consumers of a group wait for messages of a topic (200055)."""
        header = decode_header(PollingInfo, request.fields)
        self._check(session, header.consumer_group, header.topic, header.queue_id)
        count = self.leasing.lines.count_of(header.consumer_group, header.topic)
        return Answer(fields=encode_header(PollingAnswer(count)))


def _check_count(count: int) -> None:
    if not 1 <= count <= MOST_MESSAGES:
        raise RequestFailed(Response.INVALID_PARAMETER, f"maxMsgNums is {count}, not from 1 to {MOST_MESSAGES}")


def _attempt_of(header: PopMessage | Notification) -> str | None:
    if header.attempt_id is not None and len(header.attempt_id) > MOST_NAME_CHARS:
        reason = f"attemptId has {len(header.attempt_id)} characters, more than {MOST_NAME_CHARS}"
        raise RequestFailed(Response.INVALID_PARAMETER, reason)
    return header.attempt_id or None


def _partitions(queue: int) -> tuple[int, ...] | None:
    """Return the partitions that a ``queueId`` means; ``None``: all."""
    return None if queue == ALL_QUEUES else (queue,)


def _noticed(*, has_message: bool, is_full: bool) -> Answer:
    return Answer(fields=encode_header(NotificationAnswer(has_message, is_full)))


class _Waits(LineRead, RemotingRead):
    """A request of this protocol that may wait in line."""

    def hold(self, place: Waiting) -> None:
        self.session.closing.append(place.cancel)

    def release(self, place: Waiting) -> None:
        if place.cancel in self.session.closing:
            self.session.closing.remove(place.cancel)


class _Pop(PopRead, _Waits):
    """A pop in progress."""

    def give_nothing(self, *, is_full: bool) -> None:
        answer = PopAnswer(self.clock.now_ms(), self.wanted.invisible_ms, Int32(0), 0)
        code = Response.POLLING_FULL if is_full else Response.POLLING_TIMEOUT
        self.session.settle(self._request, Answer(code, encode_header(answer), "there is nothing to pop"))

    def give(self, result: PopResult) -> None:
        wanted, leases = self.wanted, self.leasing.leases
        token = token_of(leases.log.secret, wanted.group.name, wanted.topic.name, result.pop_ms)
        queues = [_described(part, with_times=wanted.in_order) for part in result.given]
        header = PopAnswer(result.pop_ms, wanted.invisible_ms, Int32(token), result.rest, *describe_popped(queues))
        body = [each for part in result.given for each in part.body]
        self.count(result)
        answer = Answer(Response.SUCCESS, encode_header(header), "FOUND", body)
        leases.turns.after_append(partial(self._answer, answer))

    def _answer(self, answer: Answer, error: StoreError | None) -> None:
        """Answer. Leases for which the disk has no room are kept in memory, but a master that was replaced gives none."""
        self.session.settle(self._request, failure(error) if isinstance(error, Fenced) else answer)


def _described(part: GivenPart, *, with_times: bool) -> PoppedQueue:
    return PoppedQueue(part.partition, part.ordinals, part.times if with_times else None)


class _Notice(_Waits):
    """A question whether there is something to pop, in progress."""

    def start(self, leasing: Leasing, asked: PopRequest, wait_ms: int) -> None:
        """Answer now, or once there are messages."""
        self.begin(leasing, wait_ms)
        self._asked = asked
        self.look()

    def look(self) -> None:
        asked = self._asked
        is_ready = self.leasing.pops.may_give(asked)
        is_full = self.may_wait and not self.leasing.lines.has_room()
        if not is_ready and self.may_wait and not is_full:
            self.wait(asked.group.name, asked.topic.name, asked.partitions)
        else:
            self.session.settle(self._request, _noticed(has_message=is_ready, is_full=is_full and not is_ready))

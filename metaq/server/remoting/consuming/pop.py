"""Pops: 200050, with long polling, and the questions whether there is something to pop: 200052, 200054, 200055."""

from functools import partial
from typing import Final

from metaq.engine.context import Context
from metaq.engine.leases.leasing import Leasing
from metaq.engine.leases.popping import GivenPart, Plan, PopRequest, PopResult
from metaq.engine.leases.waiting import Waiting
from metaq.engine.reading.collecting import collect_messages
from metaq.engine.reading.filters import EVERY_MESSAGE, Filter, filter_of, parse_cached
from metaq.engine.tables.groups import Group
from metaq.engine.tables.topics import Topic
from metaq.errors import AccessDenied, Fenced, Overloaded, RequestFailed, StoreError
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
from metaq.server.wire.reads import StoreReads
from metaq.store.files.filecache import Read

MOST_MESSAGES: Final = 32
"""Messages in one answer; Java's clients ask for no more."""
SHORTEST_MS: Final = 1000
"""The shortest lease."""
LATE_MS: Final = 500
"""A pop whose time is over by more is answered at once: its client does not wait any more."""
MOST_APART_MS: Final = 2000
"""A client's clock that differs by more from the broker's is not believed."""
TRIES: Final = 8
"""Plans for one pop, when others change the leases meanwhile or nothing matches; then it waits in line."""
RETRY_MS: Final = 100


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
        group, topic = self._check(session, header.consumer_group, header.topic, header.queue_id)
        self.context.store.check_master()
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
        online = self.context.clients.consumer_group(group.name)
        if online is not None and header.queue_id != ALL_QUEUES:
            online.reads(session, header.topic, header.queue_id)
        wanted = PopRequest(
            group=group,
            topic=topic,
            partition=None if header.queue_id == ALL_QUEUES else header.queue_id,
            most=header.max_msg_nums,
            invisible_ms=header.invisible_time,
            wanted=self._filter(header),
            from_first=header.init_mode == FROM_FIRST,
            in_order=header.order,
        )
        wait_ms = self._wait_ms(header.poll_time, header.born_time)
        self.reads.start(_Pop(self, session, request, wanted, wait_ms))
        return None

    def _check(self, session: RemotingSession, group_name: str, topic_name: str, queue: int) -> tuple[Group, Topic]:
        """Return the group and the topic of a request; raise why they may not be used."""
        demand(session.principal, Action.CONSUME, group_name)
        group = self.context.groups.ensure(group_name)
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
        self._check(session, header.consumer_group, header.topic, header.queue_id)
        self.context.store.check_master()
        partition = None if header.queue_id == ALL_QUEUES else header.queue_id
        if self.leasing.pops.is_ready(header.consumer_group, header.topic, partition):
            return _noticed(has_message=True)
        wait_ms = self._wait_ms(header.poll_time, header.born_time)
        if wait_ms <= 0:
            return _noticed(has_message=False)
        lines = self.leasing.lines
        if session.closed or not lines.has_room():
            return _noticed(has_message=False, is_full=True)
        _Notice(self, session, request, header, wait_ms)
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


def _noticed(*, has_message: bool, is_full: bool = False) -> Answer:
    return Answer(fields=encode_header(NotificationAnswer(has_message, is_full)))


class _Waits(RemotingRead):
    """A request that waits in line for messages, for a limited time."""

    def __init__(self, leasing: Leasing, session: RemotingSession, request: RemotingCommand, wait_ms: int) -> None:
        super().__init__(session, request)
        self._leasing = leasing
        self._clock = leasing.leases.context.store.clock
        self._deadline = self._clock.monotonic() + wait_ms / 1000
        self._number = 0
        self._place: Waiting | None = None

    def _wait(self, group: str, topic: str, partition: int | None) -> bool:
        """Wait in line, at the place that the request had there before; return false when its time is over."""
        seconds = self._deadline - self._clock.monotonic()
        lines = self._leasing.lines
        if seconds <= 0 or self.session.closed:
            return False
        self.defer()
        self._number = self._number or lines.next_number()
        again, number = self._woken, self._number
        self._place = lines.wait(group, topic, number=number, again=again, partition=partition, seconds=seconds)
        self.session.closing.append(self._place.leave)
        return True

    def _woken(self) -> None:
        assert self._place is not None
        if self._place.leave in self.session.closing:
            self.session.closing.remove(self._place.leave)
        self._look()

    def _look(self) -> None:
        raise NotImplementedError


class _Pop(_Waits):
    """A pop in progress."""

    def __init__(
        self, handler: PopHandler, session: RemotingSession, request: RemotingCommand, wanted: PopRequest, wait_ms: int
    ) -> None:
        super().__init__(handler.leasing, session, request, wait_ms)
        self._handler = handler
        self._wanted = wanted
        self._tries = 0

    def read(self, read: Read) -> Plan:
        return self._leasing.pops.plan(self._wanted, read)

    def found(self, plan: Plan) -> None:
        """Take the plan and answer; plan again when others were faster, and wait in line when there is nothing."""
        result = self._leasing.pops.take(self._wanted, plan)
        if plan and (result is None or not result.given):
            self._tries += 1
            if self._tries < TRIES:
                self._look()
                return
        if result is None:
            raise Overloaded(f"others took the messages of {TRIES} plans of this pop", retry_after_ms=RETRY_MS)
        if result.given:
            self._give(result)
        else:
            self._find_nothing()

    def _look(self) -> None:
        self._handler.reads.start(self)

    def _find_nothing(self) -> None:
        self._tries = 0
        context, wanted = self._handler.context, self._wanted
        lines = self._leasing.lines
        if self._deadline > self._clock.monotonic() and not lines.has_room():
            code = Response.POLLING_FULL
        elif self._wait(wanted.group.name, wanted.topic.name, wanted.partition):
            return
        else:
            code = Response.POLLING_TIMEOUT
        context.counters.get_miss.add(1)
        context.topic_counters(wanted.topic.name).get_miss.add(1)
        answer = PopAnswer(context.store.clock.now_ms(), wanted.invisible_ms, Int32(0), 0)
        self.session.settle(self._request, Answer(code, encode_header(answer), "there is nothing to pop"))

    def _give(self, result: PopResult) -> None:
        """Answer once the leases are in the log."""
        wanted = self._wanted
        token = token_of(self._leasing.leases.log.secret, wanted.group.name, wanted.topic.name, result.pop_ms)
        queues = [_described(part, with_times=wanted.in_order) for part in result.given]
        header = PopAnswer(result.pop_ms, wanted.invisible_ms, Int32(token), result.rest, *describe_popped(queues))
        body = [each for part in result.given for each in part.body]
        self.defer()
        messages = sum(len(part.ordinals) for part in result.given)
        self._handler.context.statistics.got(wanted.group.name, wanted.topic.name, messages, sum(map(len, body)))
        answer = Answer(Response.SUCCESS, encode_header(header), "FOUND", body)
        self._leasing.leases.turns.after_append(partial(self._answer, answer))

    def _answer(self, answer: Answer, error: StoreError | None) -> None:
        """Answer. Leases for which the disk has no room are kept in memory, but a master that was replaced gives none."""
        self.session.settle(self._request, failure(error) if isinstance(error, Fenced) else answer)


def _described(part: GivenPart, *, with_times: bool) -> PoppedQueue:
    return PoppedQueue(part.partition, part.ordinals, part.times if with_times else None)


class _Notice(_Waits):
    """A question whether there is something to pop, in progress."""

    def __init__(
        self, handler: PopHandler, session: RemotingSession, request: RemotingCommand, header: Notification, wait_ms: int
    ) -> None:
        super().__init__(handler.leasing, session, request, wait_ms)
        self._header = header
        self._partition = None if header.queue_id == ALL_QUEUES else header.queue_id
        self._look()

    def _look(self) -> None:
        header = self._header
        is_ready = self._leasing.pops.is_ready(header.consumer_group, header.topic, self._partition)
        if not is_ready and self._wait(header.consumer_group, header.topic, self._partition):
            return
        self.session.settle(self._request, _noticed(has_message=is_ready))

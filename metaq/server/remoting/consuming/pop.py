"""Pops: 200050, with long polling, and the questions whether there is something to pop: 200052, 200054, 200055."""

from typing import Final

from metaq.engine.context import Context
from metaq.engine.leases.leasing import Leasing
from metaq.engine.leases.planning import PopRequest
from metaq.engine.reading.collecting import MOST_BYTES, collect_messages
from metaq.engine.reading.filters import EVERY_MESSAGE, Filter, exact_filter, parse_cached
from metaq.engine.tables.groups import Group
from metaq.engine.tables.topics import Topic
from metaq.errors import AccessDenied, RequestFailed
from metaq.message import RETRY_PREFIX, TopicPartition
from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.protocol.remoting.headers import Int32, decode_header, encode_header
from metaq.protocol.remoting.leases.pop import (
    ALL_QUEUES,
    FROM_END,
    FROM_FIRST,
    Notification,
    PeekMessage,
    PollingAnswer,
    PollingInfo,
    PopAnswer,
    PopMessage,
)
from metaq.protocol.subscription import EVERYTHING, ExpressionKind
from metaq.server.access.permissions import Action, demand
from metaq.server.remoting.consuming.heartbeat import NO_SQL_FILTER
from metaq.server.remoting.consuming.popanswers import give_records
from metaq.server.remoting.consuming.popheader import read_pop_header
from metaq.server.remoting.consuming.popwaits import NoticeWait, PopWait, partitions_of
from metaq.server.remoting.consuming.pull import check_readable
from metaq.server.remoting.later import Later
from metaq.server.remoting.session import Answer, RemotingSession, RequestHandler
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
        header = read_pop_header(request.fields)
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
        self.leasing.clocks.note(group.name, session.address, header.born_time, header.invisible_time)
        online = self.context.clients.consumer_group(group.name)
        if online is not None and header.queue_id != ALL_QUEUES:
            online.reads(session, header.topic, header.queue_id)
        wanted = PopRequest(
            group=group,
            topic=topic,
            partitions=partitions_of(header.queue_id),
            most=header.max_msg_nums,
            invisible_ms=header.invisible_time,
            wanted=self._filter(header),
            from_first=header.init_mode == FROM_FIRST,
            in_order=header.order,
            attempt=_attempt_of(header),
        )
        wait_ms = self._wait_ms(header.poll_time, header.born_time)
        result = self.leasing.pops.now(wanted)
        if result is not None:
            give_records(self.leasing.leases, session, session.owe_bare(request), wanted, result)
        else:
            PopWait(session, request).start(self.leasing, self.reads, wanted, wait_ms)
        return None

    def _check(
        self, session: RemotingSession, group_name: str, topic_name: str, queue: int, *, of_master: bool = False
    ) -> tuple[Group, Topic]:
        """Return the group and the topic of a request; raise why they may not be used. Only a master makes the group."""
        demand(session.principal, Action.CONSUME, group_name)
        if topic_name.startswith(RETRY_PREFIX):  # receipts cannot name its messages
            raise RequestFailed(Response.NO_PERMISSION, f"{topic_name[:255]} is a retry topic: those are always pulled")
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
        if not header.exp or (header.exp == EVERYTHING and header.exp_type in (None, "", ExpressionKind.TAG)):
            return EVERY_MESSAGE
        subscription = parse_cached(header.topic, header.exp, kind=header.exp_type or ExpressionKind.TAG)
        if subscription.kind is ExpressionKind.SQL92 and not self.context.settings.sql_filter:
            raise RequestFailed(Response.SYSTEM_ERROR, NO_SQL_FILTER)
        return exact_filter(subscription)

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
        store, body, rest, room = self.context.store, list[bytes | memoryview](), 0, MOST_BYTES
        for partition in partitions:
            queue = store.queues.get(TopicPartition(topic.name, partition))
            if queue is None or not queue.readable:
                continue
            state = self.leasing.leases.of(group.name, topic.name).get(partition)
            known = self.context.offsets.get(group.name, topic.name, partition) or 0
            first = max(known if state is None else state.next, store.first(queue, read)[0])
            rest += max(0, queue.readable - first)
            if most > 0 and room > 0 and first < queue.readable:
                found = collect_messages(store, queue, first, most, EVERY_MESSAGE, read, room)
                body += found.body
                room -= sum(map(len, found.body))
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
            partitions=partitions_of(header.queue_id),
            most=1,
            invisible_ms=0,
            wanted=EVERY_MESSAGE,
            from_first=True,
            in_order=header.order,
            attempt=_attempt_of(header),
        )
        NoticeWait(session, request).start(self.leasing, asked, self._wait_ms(header.poll_time, header.born_time))
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

"""The progress of groups, and moving them, for administrators: 208, 303, 317, 222 with 220, 314, 308, 321.

(Specs: remoting protocol, section 3.3.)
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Final

import gevent

from metaq.address import Address
from metaq.engine.context import Context
from metaq.engine.leases.figures import LeaseFigures
from metaq.engine.tables.modes import Mode
from metaq.engine.tables.topics import Topic
from metaq.errors import BadRequest, RequestFailed, UnknownTopic, WrongPartition
from metaq.message import GroupPartition, MessageQueue, TopicPartition
from metaq.protocol.remoting.adminbodies import (
    ConsumeStats,
    LeaseProgress,
    QueueEntry,
    QueueProgress,
    TimeSpan,
    decode_places,
    encode_all_consume_stats,
    encode_consume_stats,
    encode_corrections,
    encode_offset_list,
    encode_offsets,
    encode_queue_entries,
    encode_time_spans,
)
from metaq.protocol.remoting.codes import VERSION_WITH_RESET, Request, Response
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.protocol.remoting.headers import (
    BrokerConsumeStats,
    CloneOffset,
    CorrectionOffset,
    GetConsumeStats,
    GroupAndTopic,
    QueryConsumeQueue,
    ResetOffset,
    decode_header,
)
from metaq.protocol.subscription import ExpressionKind, Subscription
from metaq.server.access.permissions import Action, demand
from metaq.server.remoting.admin.groups import topics_of_group
from metaq.server.remoting.later import Later
from metaq.server.remoting.session import DONE, Answer, RemotingSession, RequestHandler
from metaq.store.files.filecache import Read, Run, read_through
from metaq.store.queues.consumequeue import UNIT, ConsumeQueue

END: Final = -1
"""Stands for the end of a queue in the place of a time."""
NO_OFFSET: Final = -1
"""What clients 5.x send as the offset when they reset to a time."""
BEYOND: Final = (1 << 63) - 1
"""Stands for "no limit" in the answer to 308."""
MOST_ENTRIES: Final = 1024
"""Entries in one answer to 321."""
CPP: Final = "CPP"
REST_S: Final = 0.001
"""Pause after each topic when all are requested; with a sleep of 0, connections would not go on."""


class OffsetAdminHandler:
    """Shows and sets the offsets of groups."""

    def __init__(self, context: Context, leases: LeaseFigures, later: Later, address: Address, run: Run) -> None:
        """Prepare. ``address`` is the one that clients receive."""
        self._context = context
        self._leases = leases
        self._store = context.store
        self._later = later
        self._address = str(address)
        self._read = read_through(run)

    def requests(self) -> dict[int, RequestHandler]:
        """Return the handler methods by request code."""
        return {
            Request.GET_CONSUME_STATS: self.stats,
            Request.GET_BROKER_CONSUME_STATS: self.all_stats,
            Request.QUERY_CONSUME_TIME_SPAN: self.time_spans,
            Request.INVOKE_BROKER_TO_RESET_OFFSET: self.reset,
            Request.CLONE_GROUP_OFFSET: self.clone,
            Request.QUERY_CORRECTION_OFFSET: self.corrections,
            Request.QUERY_CONSUME_QUEUE: self.entries,
        }

    # -- how far a group is -------------------------------------------------------------------------------------------

    def stats(self, session: RemotingSession, request: RemotingCommand) -> None:
        """Return a group's progress in one topic, or in all topics that it consumes (208)."""
        header = decode_header(GetConsumeStats, request.fields)
        group = header.consumer_group
        demand(session.principal, Action.INSPECT, group)
        self._context.clients.administer(session)
        names = [header.topic] if header.topic else self._consumed(group)

        def work(read: Read) -> Answer:
            each = [self._progress(group, topic, read) for topic in self._known(names)]
            queues = {queue: progress for stats in each for queue, progress in stats.queues.items()}
            return Answer(body=(encode_consume_stats(ConsumeStats(sum(stats.tps for stats in each), queues)),))

        self._later.read(session, request, work)

    def all_stats(self, session: RemotingSession, request: RemotingCommand) -> None:
        """Return the progress of all groups (317); with ``is_order`` only in ordered topics."""
        ordered = decode_header(BrokerConsumeStats, request.fields).is_order
        demand(session.principal, Action.INSPECT)
        self._later.run(session, request, partial(self._all_stats, ordered))

    def _all_stats(self, ordered: bool) -> Answer:
        """Collect the progress of one group and one topic at a time, since there may be very many of both."""
        table: dict[str, list[ConsumeStats]] = {}
        for group in list(self._context.groups):
            gevent.sleep(0)
            for topic in self._known(self._consumed(group.name)):
                if topic.order or not ordered:
                    table.setdefault(group.name, []).append(self._progress(group.name, topic, self._read))
                    gevent.sleep(REST_S)
        return Answer(body=(encode_all_consume_stats(self._address, table),))

    def _consumed(self, group: str) -> list[str]:
        """Return the topics in which a group has progress; for a connected group only those to which it still subscribes."""
        online = self._context.clients.consumer_group(group)
        if online is not None and online.subscriptions:
            return sorted(online.subscriptions)
        return sorted(topics_of_group(self._context, group))

    def _known(self, names: list[str]) -> Iterator[Topic]:
        return filter(None, map(self._context.topics.get, names))

    def _progress(self, group: str, topic: Topic, read: Read) -> ConsumeStats:
        offsets = self._context.offsets.of(group, topic.name)
        queues = {}
        for number in range(topic.all_partitions):
            queue = self._store.queues.get(TopicPartition(topic.name, number))
            offset = offsets.get(number, 0)
            consumed_ms = self._stored_ms(queue, offset - 1, read) if offset else 0
            given = self._context.offsets.given(group, topic.name, number) or 0
            end = 0 if queue is None else queue.readable
            leased = self._leased(GroupPartition(group, topic.name, number))
            queues[self._queue(topic, number)] = QueueProgress(end, offset, consumed_ms, given, leased)
        return ConsumeStats(self._context.statistics.got_per_second(group, topic.name), queues)

    def _leased(self, place: GroupPartition) -> LeaseProgress | None:
        figures = self._leases.of(place)
        return None if figures is None else LeaseProgress(figures.next, figures.lag, figures.in_flight, figures.delayed)

    def _queue(self, topic: Topic, number: int) -> MessageQueue:
        return MessageQueue(topic.name, self._context.settings.broker_name, number)

    def _stored_ms(self, queue: ConsumeQueue | None, ordinal: int, read: Read) -> int:
        """Return when a message was stored; 0 when it does not exist."""
        if queue is None or not self._store.first(queue, read)[0] <= ordinal < queue.readable:
            return 0
        return self._store.reader.store_time(queue, ordinal, read) or 0

    def time_spans(self, session: RemotingSession, request: RemotingCommand) -> None:
        """Return, for each partition of a topic, the time span of its messages and the group's place in it (303)."""
        header = decode_header(GroupAndTopic, request.fields)
        demand(session.principal, Action.INSPECT, header.group)
        topic = self._topic(header.topic or "")

        def work(read: Read) -> Answer:
            spans = [self._time_span(header.group, topic, number, read) for number in range(topic.all_partitions)]
            return Answer(body=(encode_time_spans(spans),))

        self._later.read(session, request, work)

    def _time_span(self, group: str, topic: Topic, number: int, read: Read) -> TimeSpan:
        queue = self._store.queues.get(TopicPartition(topic.name, number))
        if queue is None:
            return TimeSpan(self._queue(topic, number), 0, 0, 0, 0)
        first, offset = self._store.first(queue, read)[0], self._context.offsets.get(group, topic.name, number) or 0
        oldest_ms = self._stored_ms(queue, first, read)
        waiting_ms = self._stored_ms(queue, max(first, offset), read)
        return TimeSpan(
            self._queue(topic, number),
            oldest_ms,
            self._stored_ms(queue, queue.readable - 1, read),
            self._stored_ms(queue, offset - 1, read) or oldest_ms,
            self._store.clock.now_ms() - waiting_ms if waiting_ms else 0,
        )

    def _topic(self, name: str) -> Topic:
        topic = self._context.topics.get(name)
        if topic is None:
            raise UnknownTopic(f"the topic {name} does not exist on this broker")
        return topic

    # -- moving a group -----------------------------------------------------------------------------------------------

    def reset(self, session: RemotingSession, request: RemotingCommand) -> None:
        """Move a group to a time, or (5.x) in one partition to an offset, or with a body in several to an offset each (222).

        Its members are notified with 220, and drop the messages that they hold. A group in POP mode needs no members for that:
        the broker decides alone which messages come next.
        """
        header = decode_header(ResetOffset, request.fields)
        demand(session.principal, Action.ADMINISTER, header.group)
        topic = self._context.topics.get(header.topic)
        if topic is None:
            raise RequestFailed(Response.SYSTEM_ERROR, f"the topic {header.topic} does not exist on this broker")
        numbers = range(topic.all_partitions) if header.queue_id == END else range(header.queue_id, header.queue_id + 1)
        places: Mapping[int, int | None] = dict.fromkeys(numbers, None if header.offset == NO_OFFSET else header.offset)
        if request.body:
            places = decode_places(bytes(request.body))
        elif header.queue_id == END and header.offset not in (None, NO_OFFSET):
            raise BadRequest("an offset needs a partition, but queueId is missing")
        for number in places:
            if not 0 <= number < topic.all_partitions:
                raise WrongPartition(
                    f"the topic {topic.name} has {topic.all_partitions} partitions, and {number} is not one of them"
                )
        if self._context.modes.get(header.topic, header.group).mode is not Mode.POP:
            self._check_members(header.group)
        self._later.read(session, request, partial(self._reset, header, topic, places))

    def _check_members(self, name: str) -> None:
        """Raise why a group has no members that can take over other offsets."""
        group = self._context.clients.consumer_group(name)
        if group is None:
            raise RequestFailed(Response.CONSUMER_NOT_ONLINE, f"no consumer of the group {name} is connected")
        for member in group.members.values():
            if member.client.version < VERSION_WITH_RESET:
                who = f"the client {member.client.client_id} of version {member.client.version}"
                raise RequestFailed(Response.SYSTEM_ERROR, f"{who} cannot reset its offsets: its version is too old")

    def _reset(self, header: ResetOffset, topic: Topic, places: Mapping[int, int | None], read: Read) -> Answer:
        """Reset partitions to the given offsets; to the time in the header where there is none."""
        wanted = {number: self._target(header, number, offset, read) for number, offset in places.items()}
        offsets, now_s = self._context.offsets, self._store.clock.monotonic()
        group = self._context.clients.consumer_group(header.group)
        for number, offset in wanted.items():  # no step from here on waits or fails
            known = offsets.get(header.group, topic.name, number)
            if not header.is_force and known is not None and known < offset:
                wanted[number] = known
            elif group is None or not group.broadcasts:
                offsets.reset(header.group, topic.name, number, offset, now_s)
        table = {self._queue(topic, number): offset for number, offset in wanted.items()}
        fields = {"topic": header.topic, "group": header.group, "timestamp": str(header.timestamp)}
        fields["isForce"] = str(header.is_force).lower()
        online = self._context.clients.consumer_group(header.group)  # look again: sending to one may close others
        for member in [] if online is None else list(online.members.values()):
            encode: Callable[[dict[MessageQueue, int]], bytes]
            encode = encode_offset_list if member.client.language == CPP else encode_offsets
            member.session.tell(Request.RESET_CONSUMER_CLIENT_OFFSET, fields, encode(table))
        return Answer(body=(encode_offsets(table),))

    def _target(self, header: ResetOffset, number: int, offset: int | None, read: Read) -> int:
        queue = self._store.queues.get(TopicPartition(header.topic, number))
        least, end = (0, 0) if queue is None else (self._store.first(queue, read)[0], queue.readable)
        if offset is not None:
            if not least <= offset <= end:
                raise BadRequest(f"the offset {offset} is not between {least} and {end}, where {header.topic}-{number} is")
            return offset
        if queue is None or header.timestamp == END:
            return end
        return self._store.reader.at_time(queue, header.timestamp, read)

    def clone(self, session: RemotingSession, request: RemotingCommand) -> Answer:
        """Set a group's offsets to those of another group, in one topic or in all (314)."""
        header = decode_header(CloneOffset, request.fields)
        demand(session.principal, Action.ADMINISTER, header.dest_group)
        offsets, now_s = self._context.offsets, self._store.clock.monotonic()
        online = self._context.clients.consumer_group(header.src_group)
        self._context.groups.ensure(header.dest_group)
        for topic in [header.topic] if header.topic else offsets.topics_of(header.src_group):
            left = not header.offline and online is not None and topic not in online.subscriptions
            for number, offset in {} if left else dict(offsets.of(header.src_group, topic)).items():
                offsets.reset(header.dest_group, topic, number, offset, now_s)
        return DONE

    def corrections(self, session: RemotingSession, request: RemotingCommand) -> Answer:
        """Return, per partition, the offset of the slowest group except ``filter_groups``; ``BEYOND`` where ``compare_group``
        is slower than all of these (308)."""
        header = decode_header(CorrectionOffset, request.fields)
        demand(session.principal, Action.INSPECT, header.topic)
        offsets, left_out = self._context.offsets, (header.filter_groups or "").split(",")
        groups = [group for group in offsets.groups_of(header.topic) if group not in left_out]
        corrected = {}
        for number, compared in offsets.of(header.compare_group, header.topic).items():
            slowest = min((offsets.of(group, header.topic).get(number, BEYOND) for group in groups), default=BEYOND)
            corrected[number] = BEYOND if slowest > compared else slowest
        return Answer(body=(encode_corrections(corrected),))

    # -- what is in a queue -------------------------------------------------------------------------------------------

    def entries(self, session: RemotingSession, request: RemotingCommand) -> None:
        """Return units of a consume queue (321); ``eval`` in each is whether the group's tag subscription accepts it."""
        header = decode_header(QueryConsumeQueue, request.fields)
        demand(session.principal, Action.INSPECT, header.topic)
        topic = self._topic(header.topic)
        if not 0 <= header.queue_id < topic.all_partitions:
            raise WrongPartition(
                f"the topic {topic.name} has {topic.all_partitions} partitions, and {header.queue_id} is not one of them"
            )
        if header.index_ < 0 or not 0 < header.count_ <= MOST_ENTRIES:
            raise BadRequest(f"index is {header.index_} and count {header.count_}; count must be from 1 to {MOST_ENTRIES}")
        online = self._context.clients.consumer_group(header.consumer_group or "")
        subscription = None if online is None else online.subscriptions.get(topic.name)
        absent = None
        if header.consumer_group and subscription is None:
            absent = f"the group {header.consumer_group} is not connected or does not subscribe to {topic.name}"
        elif subscription is not None and subscription.kind is ExpressionKind.SQL92:
            absent = "an SQL92 expression is not evaluated here: it needs the messages"
        self._later.read(session, request, partial(self._entries, header, subscription, absent))

    def _entries(
        self, header: QueryConsumeQueue, subscription: Subscription | None, filter_data: str | None, read: Read
    ) -> Answer:
        queue = self._store.queues.get(TopicPartition(header.topic, header.queue_id))
        if queue is None:
            return Answer(body=(encode_queue_entries(0, 0, (), subscription, filter_data),))
        least = self._store.first(queue, read)[0]
        index, units = max(header.index_, least), []
        end = min(queue.readable, index + header.count_)
        while index < end:
            data = queue.units(index, end - index, read)
            units += list(UNIT.iter_unpack(data))
            index += len(data) // UNIT.size
        entries = [
            QueueEntry(offset, size, tag, subscription is None or subscription.matches_code(tag)) for offset, size, tag in units
        ]
        return Answer(body=(encode_queue_entries(least, queue.readable, entries, subscription, filter_data),))

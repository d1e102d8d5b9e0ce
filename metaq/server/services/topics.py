"""Topics: which there are, where their partitions begin and end, and their settings."""

from typing import Annotated, Any

from msgspec import Meta

from metaq.engine.tables.topics import Topic
from metaq.errors import UnknownTopic
from metaq.message import DEFAULT_TOPIC, MAX_PARTITIONS, TopicPartition
from metaq.protocol.remoting.attributes import (
    DEDUPE_WINDOW_MS,
    MESSAGE_TYPE,
    NORMAL_TYPE,
    PRIORITY_MAX_WAIT_MS,
    PRIORITY_TYPE,
    write_changes,
)
from metaq.protocol.remoting.codes import READ, WRITE, Request
from metaq.protocol.remoting.headers import CreateTopic, Int32, TopicOnly
from metaq.server.access.permissions import Action
from metaq.server.services.call import Call
from metaq.server.services.rows import Done, Input, Milliseconds, Name, NamesQuery, Number, Output, RowPage, UnixMs, page_of
from metaq.store.queues.consumequeue import ConsumeQueue


class TopicsQuery(NamesQuery, frozen=True):
    """The topics that are wanted."""

    system: Annotated[bool, Meta(description="Also those that belong to the broker.")] = False


class TopicSummary(Output, frozen=True):
    """One topic."""

    topic: str
    partitions: Annotated[int, Meta(description="Partitions that take messages.")]
    read_partitions: Annotated[int, Meta(description="Partitions that give messages.")]
    readable: bool
    writable: bool
    ordered: bool
    priority: Annotated[bool, Meta(description="Whether each partition is a level of priority.")]
    priority_max_wait_ms: Milliseconds
    dedupe_window_ms: Milliseconds
    system: Annotated[bool, Meta(description="Whether it belongs to the broker.")]
    messages: Annotated[int, Meta(description="Messages that readers can see now.")]


class PartitionEnds(Output, frozen=True):
    """The begin and the end of one partition."""

    partition: int
    begin: Annotated[int, Meta(description="The offset of the oldest message.")]
    end: Annotated[int, Meta(description="The offset after the newest one.")]
    updated_ms: Annotated[UnixMs | None, Meta(description="When the newest message was stored.")]


class TopicDetail(TopicSummary, frozen=True):
    """One topic, with its partitions and the groups that consume it."""

    ends: list[PartitionEnds]
    groups: list[str]


_Partitions = Annotated[int, Meta(ge=1, le=MAX_PARTITIONS)]


class TopicSettingsInput(Input, frozen=True):
    """The settings of a topic; those that are left out stay as they are, or are the defaults in a new topic."""

    partitions: Annotated[_Partitions | None, Meta(description="Partitions that take messages.")] = None
    read_partitions: Annotated[
        _Partitions | None,
        Meta(description="Partitions that give messages; by default all that take some, and none less than before."),
    ] = None
    readable: bool | None = None
    writable: bool | None = None
    ordered: bool | None = None
    priority: bool | None = None
    priority_max_wait_ms: Milliseconds | None = None
    dedupe_window_ms: Milliseconds | None = None


NEW_PARTITIONS = 4
"""Partitions of a topic that is made without a number, as by ``metaq topic create``."""


def list_topics(call: Call, query: TopicsQuery) -> RowPage[TopicSummary]:
    """Return a page of the topics, by name."""
    call.demand(Action.INSPECT)
    topics = call.context.topics
    wanted = (topic for topic in topics if query.system or not topics.is_system(topic.name))
    return page_of(call, wanted, query, lambda topic: topic.name, lambda topic: TopicSummary(**_summary(call, topic)))


def show_topic(call: Call, topic: Name) -> TopicDetail:
    """Return one topic."""
    call.demand(Action.INSPECT, topic)
    known, context = topic_of(call, topic), call.context
    groups = {*context.clients.consumers_of(topic), *context.offsets.groups_of(topic)}
    ends = [_ends(call, known, number) for number in range(known.all_partitions)]
    return TopicDetail(**_summary(call, known), ends=ends, groups=sorted(groups))


def put_topic(call: Call, topic: Name, body: TopicSettingsInput) -> TopicDetail:
    """Create a topic, or change it, and return it."""
    known = call.context.topics.get(topic)
    before = known or Topic(topic, NEW_PARTITIONS, 0)
    count = before.partitions if body.partitions is None else body.partitions
    # what the partitions have that take no more messages is still to be read
    read_count = max(count, before.read_partitions) if body.read_partitions is None else body.read_partitions
    header = CreateTopic(
        topic,
        DEFAULT_TOPIC,
        Int32(read_count),
        Int32(count),
        Int32(_permission(before.permission, body)),
        topic_sys_flag=Int32(before.sys_flag),
        order=before.order if body.ordered is None else body.ordered,
        attributes=write_changes(_changes(before, body)) or None,
    )
    call.ask(Request.UPDATE_AND_CREATE_TOPIC, header)
    return show_topic(call, topic)


def delete_topic(call: Call, topic: Name) -> Done:
    """Delete a topic with its messages on this broker; registries and other brokers keep theirs."""
    topic_of(call, topic, Action.ADMINISTER)
    call.ask(Request.DELETE_TOPIC_IN_BROKER, TopicOnly(topic))
    return Done()


def topic_of(call: Call, name: str, action: Action = Action.INSPECT) -> Topic:
    """Return a topic. Raise ``UnknownTopic``, or ``AccessDenied`` to those who may not do this to it."""
    call.demand(action, name)
    topic = call.context.topics.get(name)
    if topic is None:
        raise UnknownTopic(f"the topic {name} does not exist on this broker")
    return topic


def _permission(before: int, body: TopicSettingsInput) -> int:
    for bit, wanted in ((READ, body.readable), (WRITE, body.writable)):
        if wanted is not None:
            before = before | bit if wanted else before & ~bit
    return before


def _changes(before: Topic, body: TopicSettingsInput) -> dict[str, str]:
    changes = {}
    if body.priority is not None and body.priority != before.has_priorities:  # a type without priorities is more than normal
        changes[f"+{MESSAGE_TYPE}"] = PRIORITY_TYPE if body.priority else NORMAL_TYPE
    if body.priority_max_wait_ms is not None:
        changes[f"+{PRIORITY_MAX_WAIT_MS}"] = str(body.priority_max_wait_ms)
    if body.dedupe_window_ms is not None:
        changes[f"+{DEDUPE_WINDOW_MS}"] = str(body.dedupe_window_ms)
    return changes


def _summary(call: Call, topic: Topic) -> dict[str, Any]:
    return {
        "topic": topic.name,
        "partitions": topic.partitions,
        "read_partitions": topic.read_partitions,
        "readable": bool(topic.permission & READ),
        "writable": bool(topic.permission & WRITE),
        "ordered": topic.order,
        "priority": topic.has_priorities,
        "priority_max_wait_ms": topic.priority_max_wait_ms,
        "dedupe_window_ms": topic.dedupe_window_ms,
        "system": call.context.topics.is_system(topic.name),
        "messages": _messages(call, topic),
    }


def _messages(call: Call, topic: Topic) -> int:
    """Return how many messages of a topic readers can see."""
    queues = (_queue(call, topic, number) for number in range(topic.all_partitions))
    return sum(end - begin for begin, end in (_span(call, queue) for queue in queues if queue is not None))


def _queue(call: Call, topic: Topic, number: int) -> ConsumeQueue | None:
    return call.context.store.queues.get(TopicPartition(topic.name, number))


def _span(call: Call, queue: ConsumeQueue) -> tuple[int, int]:
    """Return the offset of the oldest message of a partition, and the one after the newest."""
    return call.context.store.first(queue, call.interior.read)[0], queue.readable


def _ends(call: Call, topic: Topic, number: int) -> PartitionEnds:
    queue = _queue(call, topic, number)
    if queue is None:
        return PartitionEnds(partition=number, begin=0, end=0, updated_ms=None)
    begin, end = _span(call, queue)
    newest = call.context.store.reader.store_time(queue, end - 1, call.interior.read) if begin < end else None
    return PartitionEnds(partition=number, begin=begin, end=end, updated_ms=newest)


def number_of_messages(call: Call, name: str) -> Number:
    """Return how many messages of a topic readers can see, without discarded dead letters; 0 when it does not exist."""
    topic = call.context.topics.get(name)
    if topic is None:
        return 0
    queue = _queue(call, topic, 0)
    return _messages(call, topic) - (0 if queue is None else topic.discarded.count(*_span(call, queue)))

"""Consumer groups: their settings, members, lag and offsets."""

import enum
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from metaq.address import Address
from metaq.client.admin.views import LagView, read_lags
from metaq.engine.tables.groups import Group, check_group_name
from metaq.errors import BadRequest, RequestFailed
from metaq.message import DEAD_PREFIX, GroupPartition, MessageQueue, TopicPartition
from metaq.protocol.remoting import fastjson
from metaq.protocol.remoting.adminbodies import LeaseProgress, encode_places
from metaq.protocol.remoting.attributes import GROUP_ATTRIBUTES
from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.headers import DeleteGroup, GetConsumeStats, Int32, ResetOffset, UpdateConsumerOffset
from metaq.server.access.permissions import Action
from metaq.server.services.call import Call
from metaq.server.services.rows import (
    Done,
    Input,
    Name,
    NamesQuery,
    Number,
    Output,
    Partition,
    RowPage,
    UnixMs,
    page_of,
)
from metaq.server.services.topics import number_of_messages, topic_of

END_MS = -1
"""Stands for the end of a partition in the place of a time."""


class GroupsQuery(NamesQuery, frozen=True):
    """The groups that are wanted."""

    system: Annotated[bool, Meta(description="Also those that belong to the broker.")] = False


class GroupSummary(Output, frozen=True):
    """One group."""

    group: str
    consume_enabled: bool
    broadcast_enabled: bool
    retry_max_times: int
    attributes: Annotated[dict[str, str], Meta(description="Settings that are not the defaults.")]
    system: Annotated[bool, Meta(description="Whether it belongs to the broker.")]
    members: Annotated[int, Meta(description="Consumers that are connected.")]
    leasing: Annotated[bool, Meta(description="Whether consumers lease its messages, or wait for some, without being members.")]
    dead_letters: int


class ConnectedConsumer(Output, frozen=True):
    """A consumer that is connected."""

    client_id: str
    address: str
    language: str
    version: int
    user: str
    subscriptions: Annotated[dict[str, str], Meta(description="Filter expressions by topic.")]


class GroupDetail(GroupSummary, frozen=True):
    """One group, with its members and topics."""

    topics: Annotated[list[str], Meta(description="Topics to which it subscribes, or in which it has offsets.")]
    connected: list[ConnectedConsumer]
    differences: Annotated[list[str], Meta(description="Topics to which members subscribe differently.")]


class GroupSettingsInput(Input, frozen=True):
    """The settings of a group; those that are left out stay as they are."""

    consume_enabled: bool | None = None
    broadcast_enabled: bool | None = None
    retry_max_times: Annotated[int, Meta(ge=0, le=(1 << 31) - 1)] | None = None
    attributes: Annotated[
        dict[str, str], Meta(description=f"Of {', '.join(GROUP_ATTRIBUTES)}; an empty text restores the default.")
    ] = msgspec.field(default_factory=dict)


class LagQuery(Input, frozen=True):
    """The topic whose lag is wanted."""

    topic: Annotated[str, Meta(max_length=255, description="By default all topics of the group.")] = ""


class PartitionLag(Output, frozen=True):
    """The progress of a group in one partition."""

    topic: str
    partition: int
    committed: int
    end: int
    lag: Annotated[int, Meta(description="Messages that wait for the group.")]
    consumed_ms: Annotated[UnixMs | None, Meta(description="When the last message that was consumed had been stored.")]
    in_flight: Annotated[int | None, Meta(description="Leased messages; null where the group leases none.")]
    delayed: Annotated[int | None, Meta(description="Messages that wait to be given again.")]


class GroupLag(Output, frozen=True):
    """The progress of a group."""

    group: str
    lag: int
    partitions: list[PartitionLag]


class OffsetsInput(Input, frozen=True):
    """Offsets to commit, in one topic."""

    topic: Name
    offsets: Annotated[dict[str, Number], Meta(min_length=1, max_length=1024, description="By number of the partition.")]


class ResetTo(enum.Enum):
    """The ends of a partition, to which a reset leads without an offset or a time."""

    FIRST = "first"
    LAST = "last"


class ResetInput(Input, frozen=True):
    """The place where a group goes on in a topic: exactly one of `to`, `time_ms` and `offset`."""

    topic: Name
    to: Annotated[ResetTo | None, Meta(description="The oldest message, or the end.")] = None
    time_ms: Annotated[UnixMs | None, Meta(description="The first message that was stored then or later.")] = None
    offset: Annotated[
        Number | None, Meta(description="An offset; where a partition does not have it, the nearer of its ends.")
    ] = None
    partitions: Annotated[list[Partition], Meta(min_length=1, max_length=1024)] | None = None
    apply: Annotated[bool, Meta(description="Make the change; otherwise it is only shown.")] = False


class OffsetMove(Output, frozen=True):
    """The change of a group's offset in one partition."""

    partition: int
    before: int | None
    after: int


class ResetResult(Output, frozen=True):
    """The changes that a reset makes, or would make."""

    group: str
    topic: str
    applied: bool
    changes: list[OffsetMove]


def list_groups(call: Call, query: GroupsQuery) -> RowPage[GroupSummary]:
    """Return a page of the groups, by name."""
    call.demand(Action.INSPECT)
    groups = call.context.groups
    wanted = (group for group in groups if query.system or not groups.is_system(group.name))
    return page_of(call, wanted, query, lambda group: group.name, lambda group: GroupSummary(**_summary(call, group)))


def show_group(call: Call, group: Name) -> GroupDetail:
    """Return one group."""
    call.demand(Action.INSPECT, group)
    return _detail(call, group_of_call(call, group))


def put_group(call: Call, group: Name, body: GroupSettingsInput) -> GroupDetail:
    """Create a group, or change it, and return it."""
    check_group_name(group)
    known = call.context.groups.get(group) or Group(group)
    row = known.row()
    given = {
        "consumeEnable": body.consume_enabled,
        "consumeBroadcastEnable": body.broadcast_enabled,
        "retryMaxTimes": body.retry_max_times,
    }
    row.update({name: value for name, value in given.items() if value is not None})
    row["attributes"] = {
        f"+{name}" if value else f"-{name}": value
        for name, value in body.attributes.items()
        if value or name in known.attributes or name not in GROUP_ATTRIBUTES  # others have their default already
    }
    call.ask(Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=fastjson.encode(row))
    return _detail(call, group_of_call(call, group))


def delete_group(call: Call, group: Name) -> Done:
    """Delete a group with its offsets."""
    call.demand(Action.ADMINISTER, group)
    group_of_call(call, group)
    call.ask(Request.DELETE_SUBSCRIPTIONGROUP, DeleteGroup(group, remove_offset=True, clean_offset=True))
    return Done()


def show_lag(call: Call, group: Name, query: LagQuery) -> GroupLag:
    """Return how far a group is in each partition of a topic, or of all its topics."""
    call.demand(Action.INSPECT, group)
    group_of_call(call, group)
    if query.topic:
        topic_of(call, query.topic)
    rows = [_lag(view) for view in sorted(lags_of(call, group, query.topic))]
    return GroupLag(group=group, lag=sum(row.lag for row in rows), partitions=rows)


def commit_offsets(call: Call, group: Name, body: OffsetsInput) -> GroupLag:
    """Commit offsets of a group in a topic, and return how far it is in these partitions; a commit only moves forward."""
    topic = topic_of(call, body.topic, Action.SUBSCRIBE)
    offsets = {_partition(name, topic.all_partitions): offset for name, offset in body.offsets.items()}
    for partition, offset in offsets.items():
        header = UpdateConsumerOffset(group, topic.name, Int32(partition), offset)
        call.ask(Request.UPDATE_CONSUMER_OFFSET, header)
    rows = [_lag(_committed(call, group, topic.name, partition)) for partition in sorted(offsets)]
    return GroupLag(group=group, lag=sum(row.lag for row in rows), partitions=rows)


def _committed(call: Call, group: str, topic: str, partition: int) -> LagView:
    """Return the progress of a group in a partition, which who commits may know without the right to look into the broker."""
    queue = call.context.store.queues.get(TopicPartition(topic, partition))
    committed, end = call.context.offsets.get(group, topic, partition) or 0, 0 if queue is None else queue.readable
    figures = call.interior.leases.of(GroupPartition(group, topic, partition))
    leased = None if figures is None else LeaseProgress(figures.next, figures.lag, figures.in_flight, figures.delayed)
    return LagView(MessageQueue(topic, call.broker, partition), committed, end, 0, leased)


def reset_offsets(call: Call, group: Name, body: ResetInput) -> ResetResult:
    """Show where a group would go on in a topic, and with `apply` make it go on there, its members included."""
    call.demand(Action.ADMINISTER if body.apply else Action.INSPECT, group)
    if sum(given is not None for given in (body.to, body.time_ms, body.offset)) != 1:
        raise BadRequest("a reset needs exactly one of to, time_ms and offset")
    topic = topic_of(call, body.topic)
    wanted = body.partitions if body.partitions is not None else range(topic.read_partitions)
    if strangers := [number for number in wanted if number >= topic.all_partitions]:
        raise BadRequest(f"the topic {topic.name} has {topic.all_partitions} partitions, and {strangers[0]} is not one of them")
    offsets = call.context.offsets.of(group, topic.name)
    before = dict(offsets)
    changes = [
        OffsetMove(partition=number, before=before.get(number), after=_target(call, body, number)) for number in sorted(wanted)
    ]
    if body.apply and changes:
        lags_of(call, group, topic.name)  # who has asked for these is an administrator's tool, whose commits may go back
        _reset(call, group, topic.name, changes)
    return ResetResult(group=group, topic=topic.name, applied=body.apply, changes=changes)


def _reset(call: Call, group: str, topic: str, changes: list[OffsetMove]) -> None:
    """Reset partitions, as ``metaq group reset-offset`` does: without connected members offsets are committed for the group.

    Members hear of all of them at once, as each time a Java client waits ten seconds before it acts on it.
    """
    body = encode_places({change.partition: change.after for change in changes})
    header = ResetOffset(topic, group, END_MS, is_force=True)
    answer = call.ask(Request.INVOKE_BROKER_TO_RESET_OFFSET, header, body, also=(Response.CONSUMER_NOT_ONLINE,))
    if answer.code == Response.CONSUMER_NOT_ONLINE:
        for change in changes:
            header_of_one = UpdateConsumerOffset(group, topic, Int32(change.partition), change.after)
            call.ask(Request.UPDATE_CONSUMER_OFFSET, header_of_one)


def _target(call: Call, body: ResetInput, number: int) -> int:
    store, read = call.context.store, call.interior.read
    queue = store.queues.get(TopicPartition(body.topic, number))
    if queue is None:
        return 0
    if body.time_ms is not None:
        return store.reader.at_time(queue, body.time_ms, read)
    least = store.first(queue, read)[0]
    if body.offset is not None:
        return min(max(body.offset, least), queue.readable)
    return least if body.to is ResetTo.FIRST else queue.readable


def is_leasing(call: Call, group: str) -> bool:
    """Return whether consumers have messages of a group on lease, or wait for some. They need not be members of it."""
    figures = call.interior.leases
    return any(figures.has_consumers(group, topic) for topic in call.context.offsets.topics_of(group))


def group_of_call(call: Call, name: str) -> Group:
    """Return a group; raise ``RequestFailed`` with code 26 when there is none."""
    group = call.context.groups.get(name)
    if group is None:
        raise RequestFailed(Response.SUBSCRIPTION_GROUP_NOT_EXIST, f"the group {name} does not exist on this broker")
    return group


def _partition(text: str, partitions: int) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 9 and int(text) < partitions):
        raise BadRequest(f"offsets has the partition {text[:20]!r}, not a number below {partitions}")
    return int(text)


def lags_of(call: Call, group: str, topic: str) -> list[LagView]:
    """Return the progress of a group in a topic; in all of its topics when ``topic`` is empty."""
    return read_lags(bytes(call.ask(Request.GET_CONSUME_STATS, GetConsumeStats(group, topic or None)).body))


def _lag(view: LagView) -> PartitionLag:
    leased = view.leased
    return PartitionLag(
        topic=view.queue.topic,
        partition=view.queue.partition,
        committed=view.committed,
        end=view.end,
        lag=view.lag,
        consumed_ms=view.consumed_ms or None,
        in_flight=None if leased is None else leased.in_flight,
        delayed=None if leased is None else leased.delayed,
    )


def _summary(call: Call, group: Group) -> dict[str, Any]:
    online = call.context.clients.consumer_group(group.name)
    return {
        "group": group.name,
        "consume_enabled": group.consume_enable,
        "broadcast_enabled": group.consume_broadcast_enable,
        "retry_max_times": group.retry_max_times,
        "attributes": dict(group.attributes),
        "system": call.context.groups.is_system(group.name),
        "members": 0 if online is None else len(online.members),
        "leasing": online is None and is_leasing(call, group.name),
        "dead_letters": number_of_messages(call, f"{DEAD_PREFIX}{group.name}"),
    }


def _detail(call: Call, group: Group) -> GroupDetail:
    context = call.context
    online = context.clients.consumer_group(group.name)
    topics = {*context.offsets.topics_of(group.name), *(() if online is None else online.subscriptions)}
    members = [] if online is None else list(online.members.values())
    return GroupDetail(
        **_summary(call, group),
        topics=sorted(topics),
        connected=[
            ConnectedConsumer(
                client_id=member.client.client_id,
                address=str(Address(*member.session.address[:2])),
                language=member.client.language,
                version=member.client.version,
                user=member.session.principal.name,
                subscriptions={each.topic: each.expression for each in member.subscriptions},
            )
            for member in members
        ],
        differences=[] if online is None else [str(difference) for difference in online.differences],
    )

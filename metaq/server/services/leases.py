"""Leased messages: each is given to one consumer for a time, and again unless it is finished until then."""

import enum
from typing import Annotated

from msgspec import Meta

from metaq.client.admin.views import read_leases
from metaq.client.consuming.records import decode_messages
from metaq.leases.figures import LeaseSums
from metaq.message import TopicPartition
from metaq.protocol.remoting import fastjson
from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.headers import Int32, decode_header
from metaq.protocol.remoting.leases.pop import (
    ALL_QUEUES,
    FROM_END,
    FROM_FIRST,
    REJECT_MS,
    AckMessage,
    ChangeInvisibleTime,
    PopAnswer,
    PopMessage,
    receipts_of,
)
from metaq.protocol.remoting.leases.receipts import decode_receipt
from metaq.protocol.subscription import EVERYTHING, ExpressionKind
from metaq.server.access.permissions import Action
from metaq.server.services.call import Call
from metaq.server.services.messages import WAIT_MS, StoredMessage, row_of
from metaq.server.services.rows import (
    After,
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

MOST_LEASED = 32
"""Messages that one request leases."""
MOST_PAGE = 100
ReceiptText = Annotated[str, Meta(min_length=1, max_length=512, description="The `receipt` that came with the message.")]


class LeaseInput(Input, frozen=True):
    """The messages that a consumer wants, and the time for which it does."""

    topic: Name
    limit: Annotated[int, Meta(ge=1, le=MOST_LEASED)] = 1
    invisible_ms: Annotated[int, Meta(ge=1000, le=(1 << 40), description="How long a message is leased, in milliseconds.")] = (
        60_000
    )
    wait_ms: Annotated[int, Meta(ge=0, le=WAIT_MS, description="How long to wait when there is none.")] = 0
    tags: Annotated[str, Meta(max_length=1024)] = EVERYTHING
    from_first: Annotated[bool, Meta(description="A group without an offset begins with the oldest message.")] = True


class MessageLease(Output, frozen=True):
    """A message, and the receipt by which its lease is ended."""

    message: StoredMessage
    receipt: str


class MessageLeases(Output, frozen=True):
    """Messages that are leased now."""

    messages: list[MessageLease]


class AckInput(Input, frozen=True):
    """A message to finish."""

    topic: Name
    receipt: ReceiptText


class NackInput(AckInput, frozen=True):
    """A message to give back: at once, later, or to the dead letters."""

    delay_ms: Annotated[int, Meta(ge=0, le=(1 << 40), description="After so many milliseconds it is given again.")] = 0
    reject: Annotated[bool, Meta(description="Make it a dead letter.")] = False


class ExtendInput(AckInput, frozen=True):
    """A message whose lease ends later."""

    invisible_ms: Annotated[int, Meta(ge=1, le=(1 << 40), description="From now on, as far as the group allows it.")]


class LeasesQuery(Input, frozen=True):
    """The topic whose leases are wanted."""

    topic: Annotated[str, Meta(max_length=255, description="By default all topics of the group.")] = ""
    after: After = ""
    limit: Annotated[int, Meta(ge=1, le=MOST_PAGE)] = MOST_PAGE


class LeasedPartition(Output, frozen=True):
    """The leases of a group in one partition; offsets are those of the partition, all else counts messages."""

    topic: str
    partition: int
    base: Annotated[int, Meta(description="The lowest message that is not finished: the group's offset.")]
    next: Annotated[int, Meta(description="The first message that was never given.")]
    end: int
    lag: int
    ready: Annotated[int, Meta(description="Messages that can be given now.")]
    in_flight: Annotated[int, Meta(description="Messages that consumers have.")]
    waiting: Annotated[int, Meta(description="Those of them whose leases have ended, or whose turn in their key has come.")]
    delayed: Annotated[int, Meta(description="Messages that were given back with a delay which goes on.")]
    lined: Annotated[int, Meta(description="Messages that were never given: others with their keys are before them.")]
    oldest_ms: UnixMs | None


class LeasingGroup(Output, frozen=True):
    """The leases of a group in one topic, in all partitions together."""

    group: str
    topic: str
    ready: Annotated[int, Meta(description="Messages that can be given now.")]
    in_flight: Annotated[int, Meta(description="Messages that consumers have.")]
    delayed: Annotated[int, Meta(description="Messages that were given back with a delay which goes on.")]
    lined: Annotated[int, Meta(description="Messages that were never given: others with their keys are before them.")]
    oldest_ms: Annotated[UnixMs | None, Meta(description="When the lowest message that is not finished was first given.")]


class OpenQuery(Input, frozen=True):
    """The begin and the length of a page of open messages."""

    after: Annotated[Number | None, Meta(description="The `next` of the page before.")] = None
    limit: Annotated[int, Meta(ge=1, le=MOST_PAGE)] = MOST_PAGE


class OpenState(enum.Enum):
    """The states of an open message."""

    LEASED = "leased"
    DELAYED = "delayed"
    LINED = "lined"
    WAITING = "waiting"
    DYING = "dying"


class OpenLease(Output, frozen=True):
    """A message that was given and is not finished, or is passed over because of its key."""

    ordinal: Annotated[int, Meta(description="Its offset.")]
    times: Annotated[int, Meta(description="Its deliveries so far.")]
    state: OpenState
    first_ms: Annotated[UnixMs, Meta(description="When it was first given; 0: never.")]
    due_ms: Annotated[UnixMs, Meta(description="When its lease or its delay ends, or ended; 0 if it was never given.")]


class OpenLeases(Output, frozen=True):
    """Some open messages."""

    rows: list[OpenLease]
    next: int | None


def lease(call: Call, group: Name, body: LeaseInput) -> MessageLeases:
    """Lease messages of a topic to a consumer of a group; none when there is none in time."""
    header = PopMessage(
        group,
        body.topic,
        Int32(ALL_QUEUES),
        Int32(body.limit),
        body.invisible_ms,
        body.wait_ms,
        Int32(FROM_FIRST if body.from_first else FROM_END),
        exp_type=ExpressionKind.TAG.value,
        exp=body.tags,
        bname=call.broker,
    )
    empty = (Response.POLLING_TIMEOUT, Response.PULL_NOT_FOUND)
    answer = call.ask(Request.POP_MESSAGE, header, also=empty, wait_s=body.wait_ms / 1000)
    if answer.code in empty:
        return MessageLeases(messages=[])
    found = decode_messages(bytes(answer.body), call.broker, body.topic, damaged_too=True)
    places = [(TopicPartition(one.queue.topic, one.partition), int(one.queue_offset)) for one in found]
    receipts = receipts_of(decode_header(PopAnswer, answer.fields), call.broker, places)
    pairs = zip(found, receipts, strict=True)
    return MessageLeases(messages=[MessageLease(message=row_of(one), receipt=str(receipt)) for one, receipt in pairs])


def ack(call: Call, group: Name, body: AckInput) -> Done:
    """Finish a leased message."""
    receipt = decode_receipt(body.receipt)
    header = AckMessage(group, body.topic, Int32(receipt.queue), body.receipt, receipt.offset, call.broker)
    call.ask(Request.ACK_MESSAGE, header)
    return Done()


def nack(call: Call, group: Name, body: NackInput) -> Done:
    """Give a leased message back."""
    return _change(call, group, body, REJECT_MS if body.reject else body.delay_ms)


def extend(call: Call, group: Name, body: ExtendInput) -> Done:
    """Let a lease end later."""
    return _change(call, group, body, body.invisible_ms)


def list_leasing(call: Call, query: NamesQuery) -> RowPage[LeasingGroup]:
    """Return a page of the groups that lease messages, each with the topics, by name; none on a slave."""
    call.demand(Action.INSPECT)
    pairs = sorted(call.interior.leases.pairs())
    return page_of(call, pairs, query, lambda pair: f"{pair[0]} {pair[1]}", lambda pair: _leasing(call, *pair))


def _leasing(call: Call, group: str, topic: str) -> LeasingGroup:
    figures = call.interior.leases
    sums = LeaseSums.of(filter(None, map(figures.of, figures.partitions(group, topic))))
    return LeasingGroup(
        group=group,
        topic=topic,
        ready=sums.ready,
        in_flight=sums.in_flight,
        delayed=sums.delayed,
        lined=sums.lined,
        oldest_ms=sums.oldest_ms,
    )


def list_leases(call: Call, group: Name, query: LeasesQuery) -> RowPage[LeasedPartition]:
    """Return a page of the partitions in which a group leases messages, by topic and number."""
    members = {"group": group, "topic": query.topic, "after": query.after, "limit": query.limit}
    rows, following = read_leases(bytes(call.ask(Request.LIST_LEASES, body=fastjson.encode(members)).body))
    return RowPage(rows=[LeasedPartition(**row) for row in rows], next=None if following is None else str(following))


def list_open(call: Call, group: Name, topic: Name, partition: Partition, query: OpenQuery) -> OpenLeases:
    """Return a page of the messages of a partition that were given to a group and are not finished, the lowest first."""
    members: dict[str, object] = {"group": group, "topic": topic, "partition": partition, "limit": query.limit}
    if query.after is not None:
        members["after"] = query.after
    rows, following = read_leases(bytes(call.ask(Request.LIST_OPEN_MESSAGES, body=fastjson.encode(members)).body))
    found = [OpenLease(**{**row, "state": OpenState(row["state"])}) for row in rows]
    return OpenLeases(rows=found, next=None if following is None else int(following))


def _change(call: Call, group: str, body: AckInput, invisible_ms: int) -> Done:
    receipt = decode_receipt(body.receipt)
    queue = Int32(receipt.queue)
    header = ChangeInvisibleTime(group, body.topic, queue, body.receipt, receipt.offset, invisible_ms, call.broker)
    call.ask(Request.CHANGE_MESSAGE_INVISIBLETIME, header)
    return Done()

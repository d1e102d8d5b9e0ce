"""Dead letters: messages that groups have given up, to look at, to send again, and to discard."""

import enum
from base64 import b64encode
from collections.abc import Iterator, Sequence
from typing import Annotated, Final

import gevent
from msgspec import Meta

from metaq.client.message import ReceivedMessage
from metaq.client.sending.again import properties_again
from metaq.engine.pool import run_in_pool
from metaq.errors import BadRequest, MetaqError, RequestFailed
from metaq.message import DEAD_PREFIX, RETRY_PREFIX, TopicPartition
from metaq.protocol.properties import DEDUPE_ID, DELAY, RETRY_TOPIC, SHARDING_KEY, UNIQUE_KEY
from metaq.protocol.remoting.attributes import discarding
from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.headers import TopicOnly
from metaq.protocol.spans import Spans
from metaq.server.access.permissions import Action
from metaq.server.services.call import REST_S, Call, CutOff, InDoubt, Late
from metaq.server.services.messages import (
    MOST_BODY,
    MessagesRead,
    PartitionReader,
    StoredMessage,
    by_offset_id,
    inflate,
    topic_of_reader,
)
from metaq.server.services.outgoing import PreparedSend, new_id, outgoing, sent_again
from metaq.server.services.rows import Input, Name, NamesQuery, Number, OffsetId, Output, RowPage, page_of
from metaq.server.services.sending import MessageInput, send_all
from metaq.server.services.topics import number_of_messages, topic_of

MOST_LETTERS = 256
"""Dead letters in one request."""
MOST_READS = 16
"""Reads for one page, which may meet nothing but letters that were discarded."""

Letters = Annotated[list[OffsetId], Meta(min_length=1, max_length=MOST_LETTERS)]


class DeadGroup(Output, frozen=True):
    """A group that has dead letters."""

    group: str
    dead_letters: int


class DeadQuery(Input, frozen=True):
    """The begin and the length of a page of dead letters."""

    offset: Annotated[Number, Meta(description="The `next` of the page before.")] = 0
    limit: Annotated[int, Meta(ge=1, le=MOST_LETTERS)] = 32


class ReplayTarget(enum.Enum):
    """The place to which dead letters are sent."""

    TOPIC = "topic"
    GROUP = "group"


_TO: Final = (
    "The topic that they came from, for all its groups, or this group's retry topic, which consumers that lease do not read."
)


class ReplayInput(Input, frozen=True):
    """The dead letters to send again, and where to."""

    offset_ids: Letters
    to: Annotated[ReplayTarget, Meta(description=_TO)] = ReplayTarget.TOPIC
    discard: Annotated[bool, Meta(description="Discard those that were sent; otherwise they also remain dead letters.")] = False


class Replayed(Output, frozen=True):
    """A dead letter that was sent again, or why it was not."""

    offset_id: str
    id: Annotated[str | None, Meta(description="The id under which it was sent.")] = None
    refused: Annotated[str | None, Meta(description="Why it was not sent, or may not have been.")] = None
    in_doubt: Annotated[bool, Meta(description="Whether it may have been sent all the same.")] = False


class ReplayResult(Output, frozen=True):
    """The dead letters of a request, each once, with what became of it."""

    sent: int
    letters: list[Replayed]
    not_discarded: Annotated[
        str | None, Meta(description="Why those that were sent also remain dead letters, although they were to be discarded.")
    ] = None


class DiscardInput(Input, frozen=True):
    """The dead letters to discard."""

    offset_ids: Letters


class Discarded(Output, frozen=True):
    """Dead letters that were discarded."""

    discarded: int


# -- looking ----------------------------------------------------------------------------------------------------------


def list_dead_groups(call: Call, query: NamesQuery) -> RowPage[DeadGroup]:
    """Return a page of the groups that have dead letters, by name."""
    call.demand(Action.INSPECT)
    topics = [topic.name for topic in call.context.topics if topic.name.startswith(DEAD_PREFIX)]
    counted = ((name.removeprefix(DEAD_PREFIX), number_of_messages(call, name)) for name in topics)
    found = (pair for pair in counted if pair[1])
    return page_of(call, found, query, lambda pair: pair[0], lambda pair: DeadGroup(group=pair[0], dead_letters=pair[1]))


def list_dead(call: Call, group: Name, query: DeadQuery) -> MessagesRead:
    """Return dead letters of a group, the oldest first."""
    return _dead(call, group, query, MOST_BODY)


def _dead(call: Call, group: str, query: DeadQuery, most_body: int) -> MessagesRead:
    topic = f"{DEAD_PREFIX}{group}"
    call.demand(Action.SUBSCRIBE, topic)
    known = call.context.topics.get(topic)
    if known is None:  # the first dead letter creates the topic
        return MessagesRead(messages=[], next=0, begin=0, end=0)
    topic_of_reader(call, topic, 0)
    reader, letters, discarded = PartitionReader(call, topic, 0), list[StoredMessage](), known.discarded
    read = reader.read(query.offset, query.limit, most_body)
    for _ in range(MOST_READS):
        letters = [letter for letter in read.messages if letter.offset not in discarded]
        if letters or read.next >= read.end:
            break
        read = reader.read(read.next, query.limit, most_body)
    return MessagesRead(messages=letters, next=read.next, begin=read.begin, end=read.end)


def all_dead(call: Call, group: Name) -> Iterator[list[StoredMessage]]:
    """Yield all dead letters that a group has now, the oldest first and with whole bodies, some at a time.

    Raise ``Fenced`` when the broker stops, or changes its role, before the last.
    """
    at, end = 0, list_dead(call, group, DeadQuery(limit=1)).end
    while at < end:
        call.check_goes_on()
        read = _dead(call, group, DeadQuery(offset=at), call.context.settings.max_message_bytes)
        yield [letter for letter in read.messages if letter.offset < end]
        if read.next <= at:
            return
        at = read.next
        gevent.sleep(REST_S)


# -- sending again ----------------------------------------------------------------------------------------------------


def replay_dead(call: Call, group: Name, body: ReplayInput) -> ReplayResult:
    """Send dead letters again; they also remain dead letters, unless they are to be discarded."""
    call.demand(Action.ADMINISTER if body.discard else Action.SUBSCRIBE, f"{DEAD_PREFIX}{group}")
    with call.interior.replays.of(group):  # who asks at the same time finds what was discarded here to be no dead letter
        letters = _replay(call, group, list(dict.fromkeys(body.offset_ids)), body.to)
        sent = [letter.offset_id for letter in letters if letter.id is not None]
        why = None
        if body.discard and sent:
            try:
                discard_some(call, group, DiscardInput(offset_ids=sent))
            except MetaqError as error:  # as an error of the request it would hide that they were sent
                why = str(error)
    return ReplayResult(sent=len(sent), letters=letters, not_discarded=why)


def _replay(call: Call, group: str, offset_ids: Sequence[str], to: ReplayTarget) -> list[Replayed]:
    drafts = []
    for number, offset_id in enumerate(offset_ids, 1):
        drafts.append(_draft(call, group, offset_id, to))
        call.rest_after(number)
    outcomes = iter(send_all(call, [draft for draft in drafts if isinstance(draft, PreparedSend)]))
    return [
        _replayed(offset_id, next(outcomes)) if isinstance(draft, PreparedSend) else Replayed(offset_id, refused=str(draft))
        for offset_id, draft in zip(offset_ids, drafts, strict=True)
    ]


def _draft(call: Call, group: str, offset_id: str, to: ReplayTarget) -> PreparedSend | MetaqError:
    """Return a dead letter as it is sent again, or why it cannot be."""
    try:
        letter = _letter(call, group, offset_id)
        return (_to_group if to is ReplayTarget.GROUP else _to_topic)(call, group, letter)
    except MetaqError as error:
        return error


def _replayed(offset_id: str, outcome: str | MetaqError) -> Replayed:
    if isinstance(outcome, MetaqError):
        return Replayed(offset_id=offset_id, refused=str(outcome), in_doubt=isinstance(outcome, (Late, CutOff, InDoubt)))
    return Replayed(offset_id=offset_id, id=outcome)


def _to_group(call: Call, group: str, letter: ReceivedMessage) -> PreparedSend:
    """Return a dead letter as it goes to its group, as if for the first time."""
    if RETRY_TOPIC not in letter.properties:
        raise BadRequest(f"{letter!r} does not say which topic it came from; it may not be a dead letter")
    properties = {name: value for name, value in letter.properties.items() if name not in (DELAY, DEDUPE_ID)}
    properties[UNIQUE_KEY] = new_id()
    body, sys_flag = run_in_pool(letter._packed)
    return sent_again(f"{RETRY_PREFIX}{group}", body, properties, sys_flag, letter.flag)


def _to_topic(call: Call, group: str, letter: ReceivedMessage) -> PreparedSend:
    """Return a dead letter as it goes to the topic that it came from, as a new message."""
    if letter.topic == letter.queue.topic:
        raise BadRequest(f"{letter!r} does not say which topic it came from; send it to its group")
    inflate(letter)
    if letter.error is not None:
        raise BadRequest(f"{letter!r}: {letter.error}; send it to its group, as it is stored")
    message = MessageInput(
        body_base64=b64encode(letter.body).decode(),
        tag=letter.tag,
        keys=[*letter.keys, letter.id],
        properties=properties_again(letter, group),
        ordering_key=letter.properties.get(SHARDING_KEY),
        priority=letter.priority,
    )
    return outgoing(call.context, letter.topic, message)


# -- discarding -------------------------------------------------------------------------------------------------------


def discard_dead(call: Call, group: Name) -> Discarded:
    """Discard all dead letters that a group has now."""
    topic = f"{DEAD_PREFIX}{group}"
    call.demand(Action.ADMINISTER, topic)
    found = number_of_messages(call, topic)
    if call.context.topics.get(topic) is not None:  # the next dead letter creates it again, behind those
        call.ask(Request.DELETE_TOPIC_IN_BROKER, TopicOnly(topic))
    return Discarded(discarded=found)


def discard_some(call: Call, group: Name, body: DiscardInput) -> Discarded:
    """Discard some dead letters of a group: they are not shown and not sent again any more."""
    name = f"{DEAD_PREFIX}{group}"
    call.demand(Action.ADMINISTER, name)
    ordinals = set[int]()
    for number, offset_id in enumerate(body.offset_ids, 1):
        ordinals.add(_letter(call, group, offset_id).queue_offset)
        call.rest_after(number)
    topic = topic_of(call, name, Action.ADMINISTER)
    begin = call.context.store.first(call.context.store.queues[TopicPartition(name, 0)], call.interior.read)[0]
    partitions = topic.read_partitions, topic.partitions
    header = discarding(name, partitions, topic.permission, Spans.of(ordinals, begin))
    call.ask(Request.UPDATE_AND_CREATE_TOPIC, header)
    return Discarded(discarded=len(ordinals))


def _letter(call: Call, group: str, offset_id: str) -> ReceivedMessage:
    """Return a dead letter of a group. Raise ``RequestFailed`` when it is none, or was discarded."""
    letter, name, store = by_offset_id(call, offset_id), f"{DEAD_PREFIX}{group}", call.context.store
    topic, queue = call.context.topics.get(name), store.queues.get(TopicPartition(name, letter.queue.partition))
    if (
        letter.queue.topic != name
        or topic is None
        or queue is None
        or letter.queue_offset in topic.discarded
        or letter.queue_offset < store.first(queue, call.interior.read)[0]  # it was discarded with the topic
    ):
        raise RequestFailed(Response.QUERY_NOT_FOUND, f"the message {offset_id} is no dead letter of the group {group}")
    return letter

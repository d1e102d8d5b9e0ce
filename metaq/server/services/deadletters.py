"""Dead letters: messages that groups have given up, to look at, to send again, and to discard."""

import enum
from base64 import b64encode
from typing import Annotated

from msgspec import Meta

from metaq.client.message import ReceivedMessage
from metaq.client.sending.again import properties_again
from metaq.errors import BadRequest, MetaqError, RequestFailed
from metaq.message import DEAD_PREFIX, RETRY_PREFIX
from metaq.protocol.properties import DEDUPE_ID, DELAY, RETRY_TOPIC, SHARDING_KEY, UNIQUE_KEY
from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.headers import TopicOnly
from metaq.server.access.permissions import Action
from metaq.server.services.call import Call
from metaq.server.services.messages import MessagesRead, PartitionReader, by_offset_id, topic_of_reader
from metaq.server.services.rows import Input, Name, Number, OffsetId, Output
from metaq.server.services.sending import MessageInput, new_id, publish, send_again
from metaq.server.services.topics import number_of_messages

MOST_REPLAYED = 256
"""Dead letters in one request."""


class DeadQuery(Input, frozen=True):
    """The begin and the length of a page of dead letters."""

    offset: Annotated[Number, Meta(description="The `next` of the page before.")] = 0
    limit: Annotated[int, Meta(ge=1, le=256)] = 32


class ReplayTarget(enum.Enum):
    """The place to which dead letters are sent."""

    TOPIC = "topic"
    GROUP = "group"


class ReplayInput(Input, frozen=True):
    """The dead letters to send again, and where to."""

    offset_ids: Annotated[list[OffsetId], Meta(min_length=1, max_length=MOST_REPLAYED)]
    to: Annotated[ReplayTarget, Meta(description="The topic that they came from, for all its groups, or this group only.")] = (
        ReplayTarget.TOPIC
    )


class Replayed(Output, frozen=True):
    """A dead letter that was sent again, or why it was not."""

    offset_id: str
    id: Annotated[str | None, Meta(description="The id under which it was sent.")] = None
    refused: Annotated[str | None, Meta(description="Why it was not sent.")] = None


class ReplayResult(Output, frozen=True):
    """The dead letters of a request, each with what became of it."""

    sent: int
    letters: list[Replayed]


class Discarded(Output, frozen=True):
    """Dead letters that were discarded."""

    discarded: int


def list_dead(call: Call, group: Name, query: DeadQuery) -> MessagesRead:
    """Return dead letters of a group, the oldest first."""
    topic = f"{DEAD_PREFIX}{group}"
    call.demand(Action.SUBSCRIBE, topic)
    if call.context.topics.get(topic) is None:  # the first dead letter creates the topic
        return MessagesRead(messages=[], next=0, begin=0, end=0)
    topic_of_reader(call, topic, 0)
    return PartitionReader(call, topic, 0).read(query.offset, query.limit)


def replay_dead(call: Call, group: Name, body: ReplayInput) -> ReplayResult:
    """Send dead letters again; they also remain dead letters."""
    letters = [_replayed(call, group, offset_id, body.to) for offset_id in body.offset_ids]
    return ReplayResult(sent=sum(letter.id is not None for letter in letters), letters=letters)


def discard_dead(call: Call, group: Name) -> Discarded:
    """Discard all dead letters that a group has now."""
    topic = f"{DEAD_PREFIX}{group}"
    call.demand(Action.ADMINISTER, topic)
    found = number_of_messages(call, topic)
    if call.context.topics.get(topic) is not None:  # the next dead letter creates it again, behind those
        call.ask(Request.DELETE_TOPIC_IN_BROKER, TopicOnly(topic))
    return Discarded(discarded=found)


def _replayed(call: Call, group: str, offset_id: str, to: ReplayTarget) -> Replayed:
    try:
        letter = by_offset_id(call, offset_id)
        if letter.queue.topic != f"{DEAD_PREFIX}{group}":
            raise RequestFailed(Response.QUERY_NOT_FOUND, f"the message {offset_id} is no dead letter of the group {group}")
        send = _to_group if to is ReplayTarget.GROUP else _to_topic
        return Replayed(offset_id=offset_id, id=send(call, group, letter))
    except MetaqError as error:
        return Replayed(offset_id=offset_id, refused=str(error))


def _to_group(call: Call, group: str, letter: ReceivedMessage) -> str:
    """Send a dead letter to its group, as if for the first time; return the id under which it goes."""
    if RETRY_TOPIC not in letter.properties:
        raise BadRequest(f"{letter!r} does not say which topic it came from; it may not be a dead letter")
    ident = new_id()
    properties = {name: value for name, value in letter.properties.items() if name not in (DELAY, DEDUPE_ID)}
    body, sys_flag = letter._packed()
    send_again(call, f"{RETRY_PREFIX}{group}", body, {**properties, UNIQUE_KEY: ident}, sys_flag, letter.flag, 0)
    return ident


def _to_topic(call: Call, group: str, letter: ReceivedMessage) -> str:
    """Send a dead letter to the topic that it came from, as a new message; return the id under which it goes."""
    if letter.topic == letter.queue.topic:
        raise BadRequest(f"{letter!r} does not say which topic it came from; send it to its group")
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
    return publish(call, letter.topic, message).id

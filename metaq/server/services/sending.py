"""Messages that users publish: one or many, to any partition, now or later."""

from base64 import b64decode
from binascii import Error as NotBase64
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from metaq.client.connecting.identity import UniqueIds
from metaq.client.message import SendStatus, message_properties
from metaq.client.sending.sending import send_fields
from metaq.errors import BadRequest, MetaqError
from metaq.message import LONGEST_WINDOW_MS
from metaq.protocol.properties import DEDUPE_ID, PRIORITY, SHARDING_KEY, TIMER_DELAY, TIMER_DELIVER, UNIQUE_KEY
from metaq.protocol.record import java_hash
from metaq.protocol.remoting.codes import Request
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.protocol.remoting.recall import decode_recall
from metaq.server.remoting.sending.outcome import RECALL_HANDLE
from metaq.server.services.call import Call, failed
from metaq.server.services.rows import Input, Name, Output, Partition, UnixMs

MOST_MESSAGES = 1000
"""Messages in one request."""
PRODUCER = "metaq_rest"
"""The producer group under which messages are sent."""
_STATUSES = {status.value: status.name for status in SendStatus}
_ids = UniqueIds("127.0.0.1")
_turns = count()

Text = Annotated[str, Meta(max_length=4096)]


class MessageInput(Input, frozen=True):
    """A message to publish. Its body is a text, or bytes in base64."""

    body: str = ""
    body_base64: str | None = None
    tag: Text | None = None
    keys: Annotated[list[Text], Meta(max_length=64, description="By which it can be found.")] = msgspec.field(
        default_factory=list
    )
    properties: Annotated[dict[str, Text], Meta(max_length=256)] = msgspec.field(default_factory=dict)
    partition: Annotated[Partition | None, Meta(description="By default each in turn, or as the ordering key says.")] = None
    ordering_key: Annotated[
        Text | None, Meta(description="Messages with the same key go to the same partition, in the order of publishing.")
    ] = None
    priority: Annotated[int, Meta(ge=0, le=1023)] | None = None
    delay_ms: Annotated[int, Meta(ge=0, le=LONGEST_WINDOW_MS, description="How long it waits, in milliseconds.")] | None = None
    deliver_at_ms: Annotated[UnixMs | None, Meta(description="When it comes; a time that has passed means at once.")] = None
    id: Annotated[
        Name | None, Meta(description="In a topic with a window, a message whose id was stored before is not stored again.")
    ] = None


class MessagesInput(Input, frozen=True):
    """Messages to publish. They are stored one by one: some may be refused."""

    messages: Annotated[list[MessageInput], Meta(min_length=1, max_length=MOST_MESSAGES)]


class Published(Output, frozen=True):
    """A message that was stored."""

    id: str
    offset_id: Annotated[str, Meta(description="The id that the broker made: its address and the place in its log.")]
    topic: str
    partition: int
    offset: Annotated[int, Meta(description="Its offset in the partition; 0 while it is delayed.")]
    status: Annotated[str, Meta(description="`SEND_OK`, or what of the promised durability is not known yet.")]
    handle: Annotated[str | None, Meta(description="What cancels it, if it is delayed.")]


class RefusedMessage(Output, frozen=True):
    """A message that was not stored."""

    detail: str
    code: int
    retriable: bool


class MessageOutcome(Output, frozen=True):
    """One of many messages, stored or refused: one of both is there."""

    published: Published | None = None
    refused: RefusedMessage | None = None


class PublishedMany(Output, frozen=True):
    """Many messages, each stored or refused, in their order."""

    published: int
    refused: int
    outcomes: list[MessageOutcome]


class PreparedSend(NamedTuple):
    """A message as it is sent: the id that it gets, and the fields and the body of the request that sends it."""

    id: str
    fields: Mapping[str, str]
    body: bytes


def publish(call: Call, topic: Name, body: MessageInput) -> Published:
    """Store one message, and return where it is."""
    made = outgoing(call, topic, body)
    [answer] = call.ask_all(Request.SEND_MESSAGE_V2, [made[1:]])
    if isinstance(answer, MetaqError):
        raise answer
    if answer.code not in _STATUSES:
        raise failed(answer)
    return _published(topic, made.id, answer)


def publish_many(call: Call, topic: Name, body: MessagesInput) -> PublishedMany:
    """Store messages one by one; say of each where it is, or why it was refused."""
    made = []
    for number, message in enumerate(body.messages, 1):  # all are looked at before the first is stored
        made.append(outgoing(call, topic, message))
        call.rest_after(number)
    answers = call.ask_all(Request.SEND_MESSAGE_V2, [each[1:] for each in made])
    outcomes = [_outcome(topic, each.id, answer) for each, answer in zip(made, answers, strict=True)]
    refused = sum(outcome.refused is not None for outcome in outcomes)
    return PublishedMany(published=len(outcomes) - refused, refused=refused, outcomes=outcomes)


def send_all(call: Call, messages: Sequence[PreparedSend]) -> list[str | MetaqError]:
    """Send messages and return their ids in their order, or why one was refused."""
    answers = call.ask_all(Request.SEND_MESSAGE_V2, [message[1:] for message in messages]) if messages else []
    return [
        answer if isinstance(answer, MetaqError) else message.id if answer.code in _STATUSES else failed(answer)
        for message, answer in zip(messages, answers, strict=True)
    ]


def sent_again(call: Call, topic: str, body: bytes, properties: Mapping[str, str], sys_flag: int, flag: int) -> PreparedSend:
    """Return a stored message as it is sent to the first partition of a topic with these properties."""
    text = "".join(f"{name}\x01{value}\x02" for name, value in properties.items())
    return PreparedSend(properties[UNIQUE_KEY], {**send_fields(PRODUCER, topic, text, sys_flag, flag), "e": "0"}, body)


def new_id() -> str:
    """Return an id that no other message has."""
    return _ids.next()


def body_bytes(text: str, encoded: str | None) -> bytes:
    """Return the bytes of a body that is given as text, or in base64. Raise ``BadRequest``."""
    if encoded is None:
        return text.encode()
    if text:
        raise BadRequest("a message has a body or a body_base64, not both")
    try:
        return b64decode(encoded, validate=True)
    except (NotBase64, ValueError) as error:
        raise BadRequest(f"body_base64 is not base64: {error}") from error


def outgoing(call: Call, topic: str, message: MessageInput) -> PreparedSend:
    """Return a message as it is sent. Raise ``BadRequest``."""
    if message.delay_ms is not None and message.deliver_at_ms is not None:
        raise BadRequest("a message has a delay_ms or a deliver_at_ms, not both")
    ident = new_id()
    own = {
        SHARDING_KEY: message.ordering_key,
        PRIORITY: None if message.priority is None else str(message.priority),
        TIMER_DELAY: None if message.delay_ms is None else str(message.delay_ms),
        TIMER_DELIVER: None if message.deliver_at_ms is None else str(message.deliver_at_ms),
        DEDUPE_ID: message.id,
    }
    given = {name: value for name, value in own.items() if value}
    properties = message_properties(ident, message.tag, message.keys, message.properties, given)
    text = "".join(f"{name}\x01{value}\x02" for name, value in properties.items())
    fields = {**send_fields(PRODUCER, topic, text), "e": str(_partition(call, topic, message))}
    return PreparedSend(ident, fields, body_bytes(message.body, message.body_base64))


def _partition(call: Call, topic: str, message: MessageInput) -> int:
    if message.partition is not None:
        return message.partition
    partitions = _partitions(call, topic)
    if not partitions:
        return 0
    if message.ordering_key is not None:
        return abs(java_hash(message.ordering_key)) % partitions
    return next(_turns) % partitions


def _partitions(call: Call, topic: str) -> int:
    known = call.context.topics.get(topic)
    return 0 if known is None else known.partitions


def _outcome(topic: str, ident: str, answer: RemotingCommand | MetaqError) -> MessageOutcome:
    if isinstance(answer, RemotingCommand):
        if answer.code in _STATUSES:
            return MessageOutcome(published=_published(topic, ident, answer))
        answer = failed(answer)
    return MessageOutcome(refused=RefusedMessage(detail=str(answer), code=answer.code, retriable=answer.retriable))


def _published(topic: str, ident: str, answer: RemotingCommand) -> Published:
    fields = answer.fields
    return Published(
        id=ident,
        offset_id=fields["msgId"],
        topic=topic,
        partition=int(fields["queueId"]),
        offset=int(fields["queueOffset"]),
        status=_STATUSES[answer.code],
        handle=decode_recall(fields[RECALL_HANDLE]).handle if RECALL_HANDLE in fields else None,
    )

"""Messages that users publish: one or many, to any partition, now or later."""

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from metaq.client.message import SendStatus
from metaq.errors import MetaqError
from metaq.protocol.remoting.codes import Request
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.protocol.remoting.recall import decode_recall
from metaq.protocol.text.replies import IN_DOUBT
from metaq.server.remoting.sending.outcome import RECALL_HANDLE
from metaq.server.services.call import ANSWER_S, Call, CutOff, InDoubt, failed
from metaq.server.services.outgoing import PreparedSend, outgoing
from metaq.server.services.rows import Input, Milliseconds, Name, Output, Partition, UnixMs

MOST_MESSAGES = 1000
"""Messages in one request."""
_STATUSES = {status.value: status.name for status in SendStatus}

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
    delay_ms: Annotated[Milliseconds, Meta(description="How long it waits, in milliseconds.")] | None = None
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


def publish(call: Call, topic: Name, body: MessageInput) -> Published:
    """Store one message, and return where it is."""
    made = outgoing(call.context, topic, body)
    [answer] = call.ask_all(Request.SEND_MESSAGE_V2, [made[1:]])
    if isinstance(answer, MetaqError):
        raise answer
    if answer.code not in _STATUSES:
        raise failed(answer)
    return _answered(topic, made.id, answer)


def publish_many(call: Call, topic: Name, body: MessagesInput) -> PublishedMany:
    """Store messages one by one; say of each where it is, or why it was refused."""
    made = []
    for number, message in enumerate(body.messages, 1):  # all are looked at before the first is stored
        made.append(outgoing(call.context, topic, message))
        call.rest_after(number)
    answers = call.ask_all(Request.SEND_MESSAGE_V2, [each[1:] for each in made])
    outcomes = [_outcome(topic, each.id, answer) for each, answer in zip(made, answers, strict=True)]
    refused = sum(outcome.refused is not None for outcome in outcomes)
    return PublishedMany(published=len(outcomes) - refused, refused=refused, outcomes=outcomes)


def send_all(call: Call, messages: Sequence[PreparedSend]) -> list[str | MetaqError]:
    """Send messages and return their ids in their order, or why one was not stored.

    It may be stored all the same after ``Late``, ``CutOff`` and ``InDoubt``.
    """
    try:
        answers = call.ask_each(Request.SEND_MESSAGE_V2, [message[1:] for message in messages], ANSWER_S) if messages else []
    except CutOff as error:
        return [error] * len(messages)
    return [_id_or_error(message.id, answer) for message, answer in zip(messages, answers, strict=True)]


def _id_or_error(ident: str, answer: RemotingCommand | MetaqError) -> str | MetaqError:
    if isinstance(answer, MetaqError):
        return answer
    if answer.code in _STATUSES:
        return ident
    if answer.remark is not None and IN_DOUBT in answer.remark:
        return InDoubt(answer.code, answer.remark)
    return failed(answer)


def _outcome(topic: str, ident: str, answer: RemotingCommand | MetaqError) -> MessageOutcome:
    if isinstance(answer, RemotingCommand):
        if answer.code in _STATUSES:
            return MessageOutcome(published=_answered(topic, ident, answer))
        answer = failed(answer)
    return MessageOutcome(refused=RefusedMessage(detail=str(answer), code=answer.code, retriable=answer.retriable))


def _answered(topic: str, ident: str, answer: RemotingCommand) -> Published:
    fields = answer.fields
    place = int(fields["queueId"]), int(fields["queueOffset"])
    return published(topic, ident, answer.code, fields["msgId"], *place, fields.get(RECALL_HANDLE))


def published(topic: str, ident: str, code: int, offset_id: str, partition: int, offset: int, recall: str | None) -> Published:
    """Return what is said of a message that was stored; ``recall`` is its handle in RocketMQ's form."""
    return Published(
        id=ident,
        offset_id=offset_id,
        topic=topic,
        partition=partition,
        offset=offset,
        status=_STATUSES[code],
        handle=None if recall is None else decode_recall(recall).handle,
    )

"""Bodies about clients and their subscriptions (specs: remoting protocol, sections 3.2.6 and 3.2.7).

The functions that decode a body raise ``BadRequest`` when they cannot read it.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from metaq.errors import BadRequest
from metaq.message import MessageQueue
from metaq.protocol.remoting import fastjson
from metaq.protocol.subscription import (
    EVERYTHING,
    MAX_EXPRESSION_LENGTH,
    ExpressionKind,
    Subscription,
    parse_subscription,
)

BROADCASTING: Final = "BROADCASTING"
CLUSTERING: Final = "CLUSTERING"
PUSH: Final = "CONSUME_PASSIVELY"
FROM_END: Final = "CONSUME_FROM_LAST_OFFSET"
MOST_GROUPS: Final = 256
"""Groups of producers and consumers in one heartbeat, and on one connection."""
MOST_SUBSCRIPTIONS: Final = 1024
"""Subscriptions in one heartbeat, and on one connection."""
MOST_QUEUES: Final = 1024
"""Queues in one request for locks: as many as a topic can have partitions."""


class ConsumerData(NamedTuple):
    """A client's membership in one consumer group, as its heartbeat describes it."""

    group: str
    subscriptions: tuple[Subscription, ...]
    consume_type: str = PUSH
    message_model: str = CLUSTERING
    consume_from: str = FROM_END
    """Where the group begins in a queue for which it has no offset yet."""
    unit_mode: bool = False


class Heartbeat(NamedTuple):
    """The body of a heartbeat (34)."""

    client_id: str
    producers: tuple[str, ...]
    """The producer groups of the client."""
    consumers: tuple[ConsumerData, ...]


class QueueSet(NamedTuple):
    """The body of 41 and 42: queues that a consumer wants to lock, so that only it consumes them, or to unlock."""

    client_id: str
    group: str
    queues: tuple[MessageQueue, ...]


class AssignmentQuery(NamedTuple):
    """The body of 400: a client asks for its queues of a topic."""

    topic: str
    group: str
    client_id: str
    strategy: str
    """Empty when the client named none."""
    broadcasting: bool


def decode_heartbeat(body: bytes) -> Heartbeat:
    """Return the heartbeat in the body of 34. ``SubscriptionInvalid`` for a wrong tag expression; SQL92 is not checked here."""
    content = _content(body, "heartbeat")
    rows = fastjson.rows_of(content, "producerDataSet")
    consuming = [fastjson.members_of(row, "consumer") for row in fastjson.rows_of(content, "consumerDataSet")]
    _check_count("groups", len(rows) + len(consuming), MOST_GROUPS)
    wanted = [fastjson.rows_of(row, "subscriptionDataSet") for row in consuming]
    _check_count("subscriptions", sum(map(len, wanted)), MOST_SUBSCRIPTIONS)
    texts = [
        fastjson.text_of(fastjson.members_of(one, "subscription"), "subString", EVERYTHING)
        for subscriptions in wanted
        for one in subscriptions
    ]
    _check_count("characters of expressions", sum(map(len, texts)), MAX_EXPRESSION_LENGTH)
    producers = tuple(fastjson.text_of(fastjson.members_of(row, "producer"), "groupName") for row in rows)
    consumers = tuple(map(_consumer, consuming, wanted))
    return Heartbeat(fastjson.text_of(content, "clientID"), producers, consumers)


def decode_client_check(body: bytes) -> Subscription:
    """Return the subscription that a client wants to have checked (46). ``SubscriptionInvalid`` for a wrong tag expression."""
    content = _content(body, "client check")
    return _subscription(fastjson.members_of(content.get("subscriptionData"), "subscription"))


def decode_queue_set(body: bytes) -> QueueSet:
    """Return the queues to lock or unlock from the body of 41 or 42."""
    content = _content(body, "set of queues")
    rows = fastjson.rows_of(content, "mqSet")
    _check_count("queues", len(rows), MOST_QUEUES)
    queues = (fastjson.members_of(row, "queue") for row in rows)
    return QueueSet(
        fastjson.text_of(content, "clientId"),
        fastjson.text_of(content, "consumerGroup"),
        tuple(
            MessageQueue(
                fastjson.text_of(row, "topic"), fastjson.text_of(row, "brokerName"), fastjson.number_of(row, "queueId")
            )
            for row in queues
        ),
    )


def encode_locked(queues: Iterable[MessageQueue]) -> bytes:
    """Return the body of the answer to 41: the queues that the client has locked."""
    return fastjson.encode({"lockOKMQSet": list(queues)})


def decode_assignment_query(body: bytes) -> AssignmentQuery:
    """Return what a client asks in the body of 400."""
    content = _content(body, "query of queues")
    return AssignmentQuery(
        fastjson.text_of(content, "topic"),
        fastjson.text_of(content, "consumerGroup"),
        fastjson.text_of(content, "clientId"),
        fastjson.text_of(content, "strategyName", ""),
        fastjson.text_of(content, "messageModel", CLUSTERING) == BROADCASTING,
    )


def encode_assignments(queues: Iterable[MessageQueue] | None, mode: str) -> bytes:
    """Return the body of the answer to 400: a client's queues and how it reads them, PULL or POP.

    ``None`` tells the client to keep what it has.
    """
    rows = None if queues is None else [{"messageQueue": queue, "mode": mode, "attachments": None} for queue in queues]
    return fastjson.encode({"messageQueueAssignments": rows})


def subscription_row(subscription: Subscription) -> dict[str, Any]:
    """Return a subscription as bodies show it."""
    return {
        "classFilterMode": False,
        "codeSet": sorted(subscription.codes),
        "expressionType": subscription.kind.value,
        "subString": subscription.expression,
        "subVersion": subscription.version,
        "tagsSet": sorted(subscription.tags),
        "topic": subscription.topic,
    }


# -- reading ----------------------------------------------------------------------------------------------------------


def _content(body: bytes, what: str) -> Mapping[str, Any]:
    return fastjson.members_of(fastjson.decode_plain(body), what)


def _check_count(what: str, count: int, most: int) -> None:
    if count > most:
        raise BadRequest(f"{count} {what} in one request are more than {most}")


def _consumer(row: Mapping[str, Any], subscriptions: Iterable[Any]) -> ConsumerData:
    return ConsumerData(
        fastjson.text_of(row, "groupName"),
        tuple(_subscription(fastjson.members_of(one, "subscription")) for one in subscriptions),
        fastjson.text_of(row, "consumeType", PUSH),
        fastjson.text_of(row, "messageModel", CLUSTERING),
        fastjson.text_of(row, "consumeFromWhere", FROM_END),
        row.get("unitMode") is True,
    )


def _subscription(row: Mapping[str, Any]) -> Subscription:
    kind = fastjson.text_of(row, "expressionType", ExpressionKind.TAG)
    return parse_subscription(
        fastjson.text_of(row, "topic"),
        fastjson.text_of(row, "subString", EVERYTHING),
        fastjson.number_of(row, "subVersion", 0, bits=64),
        kind,
    )

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


def decode_heartbeat(body: bytes) -> Heartbeat:
    """Return the heartbeat in the body of 34. ``SubscriptionInvalid`` for a wrong tag expression; SQL92 is not checked here."""
    content = _content(body, "heartbeat")
    rows = _rows(content, "producerDataSet")
    consuming = [_members(row, "consumer") for row in _rows(content, "consumerDataSet")]
    _check_count("groups", len(rows) + len(consuming), MOST_GROUPS)
    wanted = [_rows(row, "subscriptionDataSet") for row in consuming]
    _check_count("subscriptions", sum(map(len, wanted)), MOST_SUBSCRIPTIONS)
    texts = [_text(_members(one, "subscription"), "subString", EVERYTHING) for subscriptions in wanted for one in subscriptions]
    _check_count("characters of expressions", sum(map(len, texts)), MAX_EXPRESSION_LENGTH)
    producers = tuple(_text(_members(row, "producer"), "groupName") for row in rows)
    consumers = tuple(map(_consumer, consuming, wanted))
    return Heartbeat(_text(content, "clientID"), producers, consumers)


def decode_client_check(body: bytes) -> Subscription:
    """Return the subscription that a client wants to have checked (46). ``SubscriptionInvalid`` for a wrong tag expression."""
    content = _content(body, "client check")
    return _subscription(_members(content.get("subscriptionData"), "subscription"))


def decode_queue_set(body: bytes) -> QueueSet:
    """Return the queues to lock or unlock from the body of 41 or 42."""
    content = _content(body, "set of queues")
    rows = _rows(content, "mqSet")
    _check_count("queues", len(rows), MOST_QUEUES)
    queues = (_members(row, "queue") for row in rows)
    return QueueSet(
        _text(content, "clientId"),
        _text(content, "consumerGroup"),
        tuple(MessageQueue(_text(row, "topic"), _text(row, "brokerName"), _number(row, "queueId")) for row in queues),
    )


def encode_locked(queues: Iterable[MessageQueue]) -> bytes:
    """Return the body of the answer to 41: the queues that the client has locked."""
    return fastjson.encode({"lockOKMQSet": list(queues)})


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
    return _members(fastjson.decode_plain(body), what)


def _check_count(what: str, count: int, most: int) -> None:
    if count > most:
        raise BadRequest(f"{count} {what} in one request are more than {most}")


def _consumer(row: Mapping[str, Any], subscriptions: Iterable[Any]) -> ConsumerData:
    return ConsumerData(
        _text(row, "groupName"),
        tuple(_subscription(_members(one, "subscription")) for one in subscriptions),
        _text(row, "consumeType", PUSH),
        _text(row, "messageModel", CLUSTERING),
        _text(row, "consumeFromWhere", FROM_END),
        row.get("unitMode") is True,
    )


def _subscription(row: Mapping[str, Any]) -> Subscription:
    kind = _text(row, "expressionType", ExpressionKind.TAG)
    return parse_subscription(
        _text(row, "topic"), _text(row, "subString", EVERYTHING), _number(row, "subVersion", 0, bits=64), kind
    )


def _members(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise BadRequest(f"JSON body: {fastjson.shown(value)} where a {what} should be, an object")
    return value


def _rows(members: Mapping[str, Any], name: str) -> list[Any]:
    rows = members.get(name)
    if rows is None:
        return []
    if not isinstance(rows, list):
        raise BadRequest(f"JSON body: {name} is not a list")
    return rows


def _text(members: Mapping[str, Any], name: str, default: str | None = None) -> str:
    value = members.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, str):
        raise BadRequest(f"JSON body: {name} is {fastjson.shown(value)}, not a text")
    return value


def _number(members: Mapping[str, Any], name: str, default: int | None = None, *, bits: int = 32) -> int:
    value = members.get(name)
    if value is None and default is not None:
        return default
    if type(value) is not int or not -(1 << bits - 1) <= value < 1 << bits - 1:
        raise BadRequest(f"JSON body: {name} is {fastjson.shown(value)}, not a number of {bits} bits")
    return value

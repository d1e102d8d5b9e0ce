"""Bodies of requests from administrators and of the answers to them (specs: remoting protocol, section 3.3).

Maps by message queue have objects as keys, as Java writes them (``metaq.protocol.remoting.fastjson``). Times are Unix
milliseconds.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from metaq.errors import BadRequest
from metaq.message import MessageQueue
from metaq.protocol.remoting import fastjson
from metaq.protocol.remoting.heartbeats import ConsumerData, subscription_row
from metaq.protocol.subscription import Subscription

Offsets = Mapping[MessageQueue, int]


class QueueSpan(NamedTuple):
    """The range of offsets that a broker has of a queue."""

    least: int
    most: int
    """The oldest offset, and the one after the newest."""
    updated_ms: int
    """When the newest message was stored; 0 without any."""


class QueueProgress(NamedTuple):
    """The offset of a group in a queue, and the end of the queue."""

    broker_offset: int
    """The end of the queue: the offset after its newest message."""
    consumer_offset: int
    """The next offset for the group; -1 when that is not known."""
    consumed_ms: int
    """When the last message that the group has consumed was stored; 0 when there is none."""
    given_offset: int
    """The offset after the newest message that the group was given, where it leases messages; otherwise as
    ``consumer_offset``."""
    leased: "LeaseProgress | None" = None
    """What there is more to say when the group leases messages."""

    @property
    def lag(self) -> int:
        return self.broker_offset - max(0, self.consumer_offset) if self.leased is None else self.leased.lag


class LeaseProgress(NamedTuple):
    """A group that leases the messages of a queue."""

    next: int
    """The first message that was never given. RocketMQ calls it the pull offset."""
    lag: int
    """Messages that are not finished."""
    in_flight: int
    """Those of them that consumers have."""
    delayed: int
    """Those that were given back with a delay which goes on."""


class ConsumeStats(NamedTuple):
    """The offsets of a group by queue, and how many messages a second it receives."""

    tps: float
    queues: Mapping[MessageQueue, QueueProgress]


class ConnectedClient(NamedTuple):
    """A client in a group."""

    address: str
    client_id: str
    language: str
    version: int
    beat_ms: int = 0
    """When its last heartbeat came."""


class TimeSpan(NamedTuple):
    """The time span in which the messages of a queue were stored, and the point in it that a group has reached."""

    queue: MessageQueue
    oldest_ms: int
    newest_ms: int
    consumed_ms: int
    delay_ms: int
    """How long the oldest message that the group has not consumed has been waiting."""


class Rate(NamedTuple):
    """The count of something within a span of time."""

    sum: int
    per_second: float
    average: float
    """The sum divided by the number of events: bytes per message, for example."""


class Rates(NamedTuple):
    """One statistic over a minute, an hour and a day (315)."""

    minute: Rate
    hour: Rate
    day: Rate


class QueueEntry(NamedTuple):
    """One unit of a consume queue."""

    log_offset: int
    size: int
    tag: int
    matches: bool
    """Whether the subscription that was asked about lets it pass."""


# -- topics and groups ------------------------------------------------------------------------------------------------


def encode_topic_stats(queues: Mapping[MessageQueue, QueueSpan]) -> bytes:
    """Return the body of the answer to 202: the range of offsets of each queue of a topic."""
    rows = {
        queue: {"lastUpdateTimestamp": span.updated_ms, "maxOffset": span.most, "minOffset": span.least}
        for queue, span in queues.items()
    }
    return fastjson.encode({"offsetTable": rows})


def _stats_value(stats: ConsumeStats) -> dict[str, Any]:
    rows = {
        queue: {
            "brokerOffset": progress.broker_offset,
            "consumerOffset": progress.consumer_offset,
            "lastTimestamp": progress.consumed_ms,
            "pullOffset": progress.given_offset,
            **({} if progress.leased is None else _lease_value(progress.leased)),
        }
        for queue, progress in stats.queues.items()
    }
    return {"consumeTps": stats.tps, "offsetTable": rows}


def _lease_value(leased: LeaseProgress) -> dict[str, int]:
    figures = {"metaqLag": leased.lag, "metaqInFlight": leased.in_flight, "metaqDelayed": leased.delayed}
    return {"pullOffset": leased.next, **figures}


def encode_consume_stats(stats: ConsumeStats) -> bytes:
    """Return the body of the answer to 208: the offsets of a group."""
    return fastjson.encode(_stats_value(stats))


def encode_all_consume_stats(address: str, groups: Mapping[str, list[ConsumeStats]]) -> bytes:
    """Return the body of the answer to 317: the offsets of all groups, one list item for each topic of a group.

    ``totalDiff`` is the sum of the lags; an offset beyond the end of its queue counts as a lag of 0.
    """
    rows = [{group: [_stats_value(one) for one in stats]} for group, stats in groups.items()]
    diff = sum(max(0, progress.lag) for stats in groups.values() for one in stats for progress in one.queues.values())
    return fastjson.encode({"brokerAddr": address, "consumeStatsList": rows, "totalDiff": diff})


def encode_time_spans(spans: Iterable[TimeSpan]) -> bytes:
    """Return the body of the answer to 303: the time spans of a group in a topic."""
    rows = [
        {
            "consumeTimeStamp": span.consumed_ms,
            "delayTime": span.delay_ms,
            "maxTimeStamp": span.newest_ms,
            "messageQueue": span.queue,
            "minTimeStamp": span.oldest_ms,
        }
        for span in spans
    ]
    return fastjson.encode({"consumeTimeSpanSet": rows})


def encode_group_list(groups: Iterable[str]) -> bytes:
    """Return the body of the answer to 300: the groups that consume a topic."""
    return fastjson.encode({"groupList": list(groups)})


def encode_corrections(offsets: Mapping[int, int]) -> bytes:
    """Return the body of the answer to 308: the offset of the slowest group, by queue number."""
    return fastjson.encode({"correctionOffsets": dict(offsets)})


# -- clients ----------------------------------------------------------------------------------------------------------


def _connection_row(connection: ConnectedClient) -> dict[str, Any]:
    return {
        "clientAddr": connection.address,
        "clientId": connection.client_id,
        "language": connection.language,
        "version": connection.version,
    }


def encode_producers(connections: Iterable[ConnectedClient]) -> bytes:
    """Return the body of the answer to 204: the connections of a producer group."""
    return fastjson.encode({"connectionSet": list(map(_connection_row, connections))})


def encode_consumers(
    connections: Iterable[ConnectedClient],
    latest: ConsumerData,
    subscriptions: Mapping[str, Subscription],
    differences: Mapping[str, Mapping[str, list[str]]],
) -> bytes:
    """Return the body of the answer to 203: the members of a consumer group and its subscriptions.

    ``differences`` is metaq's own addition: for each topic to which members subscribe differently, their client ids by
    expression.
    """
    content: dict[str, Any] = {
        "connectionSet": list(map(_connection_row, connections)),
        "consumeFromWhere": latest.consume_from,
        "consumeType": latest.consume_type,
        "messageModel": latest.message_model,
        "subscriptionTable": {topic: subscription_row(one) for topic, one in subscriptions.items()},
    }
    if differences:
        content["differences"] = differences
    return fastjson.encode(content)


def encode_all_producers(groups: Mapping[str, Iterable[ConnectedClient]]) -> bytes:
    """Return the body of the answer to 328: the connections of all producer groups."""
    rows = {
        group: [
            {
                "clientId": connection.client_id,
                "language": connection.language,
                "lastUpdateTimestamp": connection.beat_ms,
                "remoteIP": f"/{connection.address}",
                "version": connection.version,
            }
            for connection in connections
        ]
        for group, connections in groups.items()
    }
    return fastjson.encode({"data": rows})


def encode_subscription(group: str, topic: str, subscription: Subscription | None) -> bytes:
    """Return the body of the answer to 345: the subscription of a group to a topic, if there is one."""
    row = {} if subscription is None else {"subscriptionData": subscription_row(subscription)}
    return fastjson.encode({"group": group, "topic": topic, **row})


# -- offsets ----------------------------------------------------------------------------------------------------------


def encode_offsets(offsets: Offsets) -> bytes:
    """Return the body of 220 and of the answer to 222: offsets by message queue."""
    return fastjson.encode({"offsetTable": dict(offsets)})


def encode_offset_list(offsets: Offsets) -> bytes:
    """Return the body of 220 in the form that clients in C++ read: a list."""
    rows = [
        {"brokerName": queue.broker_name, "offset": offset, "queueId": queue.partition, "topic": queue.topic}
        for queue, offset in offsets.items()
    ]
    return fastjson.encode({"offsetTable": rows})


def decode_offsets(body: bytes, most_lenient: int = fastjson.MAX_LENIENT_BYTES) -> dict[MessageQueue, int]:
    """Return the offsets in the body of 220 and of the answers to 221 and 222.

    ``BadRequest`` when there is no such table, and whenever ``fastjson.decode`` raises it.
    """
    content = fastjson.decode(body, most_lenient)
    table = content.get("offsetTable", content.get("messageQueueTable")) if isinstance(content, dict) else None
    if not isinstance(table, dict) or not all(isinstance(key, MessageQueue) and type(table[key]) is int for key in table):
        raise BadRequest("the body has no table of offsets for message queues")
    return table


def encode_places(offsets: Mapping[int, int]) -> bytes:
    """Return the body of 222 that resets several partitions at once: offsets by number of the partition."""
    return fastjson.encode({"offsets": {str(number): offset for number, offset in offsets.items()}})


def decode_places(body: bytes) -> dict[int, int]:
    """Return the offsets that 222 sets, by number of the partition; raise ``BadRequest`` when the body is something else."""
    content = fastjson.decode(body)
    places = content.get("offsets") if isinstance(content, dict) else None
    if not isinstance(places, dict) or not places:
        raise BadRequest("the body has no offsets by partition")
    for number, offset in places.items():
        text = str(number)  # keys of Java's maps are numbers without quotes
        if not (text.isascii() and text.isdecimal() and len(text) <= 9) or type(offset) is not int:
            raise BadRequest(f"the offsets have {text[:20]!r}, which is no number of a partition, or has no number as offset")
    return {int(number): offset for number, offset in places.items()}


def encode_consumer_status(clients: Mapping[str, Offsets]) -> bytes:
    """Return the body of the answer to 223: the offsets of each client, by its id."""
    table = {client: dict(offsets) for client, offsets in clients.items()}
    return fastjson.encode({"consumerTable": table, "messageQueueTable": {}})


# -- settings ---------------------------------------------------------------------------------------------------------


def encode_settings(settings: Mapping[str, object]) -> bytes:
    """Return the body of the answers to 26 and 319: settings as lines of NAME=VALUE."""
    values = {name: str(value).lower() if isinstance(value, bool) else value for name, value in settings.items()}
    return "".join(f"{name}={value}\n" for name, value in values.items()).encode()


def decode_settings(body: bytes) -> dict[str, str]:
    """Return the settings in the body of 25 or 318: lines of NAME=VALUE, among empty lines and comments that begin with #.

    ``BadRequest`` when the body is not UTF-8, or a line is none of these.
    """
    try:
        lines = body.decode().splitlines()
    except UnicodeDecodeError as error:
        raise BadRequest(f"the body is not text: {error}") from error
    return dict(_setting(line.strip()) for line in lines if line.strip() and not line.lstrip().startswith("#"))


def _setting(line: str) -> tuple[str, str]:
    name, separator, value = line.partition("=")
    if not separator:
        raise BadRequest(f"the line {line[:40]!r} is not NAME=VALUE")
    return name.strip(), value.strip()


# -- statistics and queues --------------------------------------------------------------------------------------------


def encode_rates(rates: Rates) -> bytes:
    """Return the body of the answer to 315: one statistic over a minute, an hour and a day."""
    rows = {
        name: {"avgpt": rate.average, "sum": rate.sum, "tps": rate.per_second}
        for name, rate in (("statsDay", rates.day), ("statsHour", rates.hour), ("statsMinute", rates.minute))
    }
    return fastjson.encode(rows)


def encode_queue_entries(
    least: int, most: int, entries: Iterable[QueueEntry], subscription: Subscription | None, filter_data: str | None
) -> bytes:
    """Return the body of the answer to 321: units of a consume queue, and its range from ``least`` to ``most``."""
    rows = [
        {"eval": entry.matches, "physicOffset": entry.log_offset, "physicSize": entry.size, "tagsCode": entry.tag}
        for entry in entries
    ]
    content: dict[str, Any] = {"maxQueueIndex": most, "minQueueIndex": least, "queueData": rows}
    if subscription is not None:
        content["subscriptionData"] = subscription_row(subscription)
    if filter_data is not None:
        content["filterData"] = filter_data
    return fastjson.encode(content)

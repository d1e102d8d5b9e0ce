"""Bodies for administrators (specs: remoting protocol, section 3.3).

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
    """What a broker has of a queue."""

    least: int
    most: int
    """The oldest offset, and the one after the newest."""
    updated_ms: int
    """When the newest message was stored; 0 without any."""


class QueueProgress(NamedTuple):
    """How far a group is in a queue."""

    broker_offset: int
    """Where the queue ends."""
    consumer_offset: int
    """Where the group goes on; -1 when that is not known."""
    consumed_ms: int
    """When the last message before that was stored; 0 when there is none."""

    @property
    def lag(self) -> int:
        return self.broker_offset - max(0, self.consumer_offset)


class ConsumeStats(NamedTuple):
    """How far a group is, and how many messages a second it gets."""

    tps: float
    queues: Mapping[MessageQueue, QueueProgress]


class Connection(NamedTuple):
    """A client in a group."""

    address: str
    client_id: str
    language: str
    version: int
    beat_ms: int = 0
    """When it was last heard of."""


class TimeSpan(NamedTuple):
    """From when to when the messages of a queue were stored, and where between a group is."""

    queue: MessageQueue
    oldest_ms: int
    newest_ms: int
    consumed_ms: int
    delay_ms: int
    """How long the oldest message that was not consumed has been waiting."""


class Rate(NamedTuple):
    """What was counted within a span of time."""

    sum: int
    per_second: float
    average: float
    """Of the sum by what it came with: of bytes by message, say."""


class Rates(NamedTuple):
    """Body of the answer to 315."""

    minute: Rate
    hour: Rate
    day: Rate


class QueueEntry(NamedTuple):
    """One unit of a consume queue."""

    log_offset: int
    size: int
    tag: int
    matches: bool
    """Whether the subscription that was asked about wants it."""


# -- topics and groups ------------------------------------------------------------------------------------------------


def encode_topic_stats(queues: Mapping[MessageQueue, QueueSpan]) -> bytes:
    """Body of the answer to 202."""
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
        }
        for queue, progress in stats.queues.items()
    }
    return {"consumeTps": stats.tps, "offsetTable": rows}


def encode_consume_stats(stats: ConsumeStats) -> bytes:
    """Body of the answer to 208."""
    return fastjson.encode(_stats_value(stats))


def encode_all_consume_stats(address: str, groups: Mapping[str, list[ConsumeStats]]) -> bytes:
    """Body of the answer to 317: of each group, one member a topic. Offsets beyond the end make up for no lag elsewhere."""
    rows = [{group: [_stats_value(one) for one in stats]} for group, stats in groups.items()]
    diff = sum(max(0, progress.lag) for stats in groups.values() for one in stats for progress in one.queues.values())
    return fastjson.encode({"brokerAddr": address, "consumeStatsList": rows, "totalDiff": diff})


def encode_time_spans(spans: Iterable[TimeSpan]) -> bytes:
    """Body of the answer to 303."""
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
    """Body of the answer to 300."""
    return fastjson.encode({"groupList": list(groups)})


def encode_corrections(offsets: Mapping[int, int]) -> bytes:
    """Body of the answer to 308: by number of the queue."""
    return fastjson.encode({"correctionOffsets": dict(offsets)})


# -- clients ----------------------------------------------------------------------------------------------------------


def _connection_row(connection: Connection) -> dict[str, Any]:
    return {
        "clientAddr": connection.address,
        "clientId": connection.client_id,
        "language": connection.language,
        "version": connection.version,
    }


def encode_producers(connections: Iterable[Connection]) -> bytes:
    """Body of the answer to 204."""
    return fastjson.encode({"connectionSet": list(map(_connection_row, connections))})


def encode_consumers(
    connections: Iterable[Connection],
    latest: ConsumerData,
    subscriptions: Mapping[str, Subscription],
    differences: Mapping[str, Mapping[str, list[str]]],
) -> bytes:
    """Body of the answer to 203.

    ``differences`` is ours: per topic of which members want different things, their client ids by expression.
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


def encode_all_producers(groups: Mapping[str, Iterable[Connection]]) -> bytes:
    """Body of the answer to 328."""
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
    """Body of the answer to 345."""
    row = {} if subscription is None else {"subscriptionData": subscription_row(subscription)}
    return fastjson.encode({"group": group, "topic": topic, **row})


# -- offsets ----------------------------------------------------------------------------------------------------------


def encode_offsets(offsets: Offsets) -> bytes:
    """Body of 220 and of the answer to 222."""
    return fastjson.encode({"offsetTable": dict(offsets)})


def encode_offset_list(offsets: Offsets) -> bytes:
    """Body of 220 for clients in C++."""
    rows = [
        {"brokerName": queue.broker_name, "offset": offset, "queueId": queue.partition, "topic": queue.topic}
        for queue, offset in offsets.items()
    ]
    return fastjson.encode({"offsetTable": rows})


def decode_offsets(body: bytes, most_lenient: int = fastjson.MAX_LENIENT_BYTES) -> dict[MessageQueue, int]:
    """The offsets in the body of 220 and of the answers to 221 and 222; ``BadRequest``, also as of ``fastjson.decode``."""
    content = fastjson.decode(body, most_lenient)
    table = content.get("offsetTable", content.get("messageQueueTable")) if isinstance(content, dict) else None
    if not isinstance(table, dict) or not all(isinstance(key, MessageQueue) and type(table[key]) is int for key in table):
        raise BadRequest("the body has no table of offsets by message queue")
    return table


def encode_consumer_status(clients: Mapping[str, Offsets]) -> bytes:
    """Body of the answer to 223: by client id."""
    table = {client: dict(offsets) for client, offsets in clients.items()}
    return fastjson.encode({"consumerTable": table, "messageQueueTable": {}})


# -- settings ---------------------------------------------------------------------------------------------------------


def encode_settings(settings: Mapping[str, object]) -> bytes:
    """Body of the answers to 26 and 319: lines of NAME=VALUE."""
    values = {name: str(value).lower() if isinstance(value, bool) else value for name, value in settings.items()}
    return "".join(f"{name}={value}\n" for name, value in values.items()).encode()


def decode_settings(body: bytes) -> dict[str, str]:
    """Body of 25 and 318: lines of NAME=VALUE, empty ones, and comments that begin with #. ``BadRequest``."""
    try:
        lines = body.decode().splitlines()
    except UnicodeDecodeError as error:
        raise BadRequest(f"the body is no text: {error}") from error
    return dict(_setting(line.strip()) for line in lines if line.strip() and not line.lstrip().startswith("#"))


def _setting(line: str) -> tuple[str, str]:
    name, separator, value = line.partition("=")
    if not separator:
        raise BadRequest(f"the line {line[:40]!r} is not NAME=VALUE")
    return name.strip(), value.strip()


# -- statistics and queues --------------------------------------------------------------------------------------------


def encode_rates(rates: Rates) -> bytes:
    """Body of the answer to 315."""
    rows = {
        name: {"avgpt": rate.average, "sum": rate.sum, "tps": rate.per_second}
        for name, rate in (("statsDay", rates.day), ("statsHour", rates.hour), ("statsMinute", rates.minute))
    }
    return fastjson.encode(rows)


def encode_queue_entries(
    least: int, most: int, entries: Iterable[QueueEntry], subscription: Subscription | None, filter_data: str | None
) -> bytes:
    """Body of the answer to 321."""
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

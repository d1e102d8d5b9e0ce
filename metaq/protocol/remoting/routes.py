"""Bodies about routes and registration (specs: remoting protocol, sections 2.2 to 2.4).

Bodies are written as strict JSON on one line without spaces, every key quoted: one client splits the text of a route at commas
and colons instead of parsing it. When they are read, keys may be bare integers too. The functions that decode a body raise
``BadRequest`` when they cannot read it.
"""

import struct
import zlib
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any, Final, NamedTuple, TypeVar

import orjson

from metaq.errors import BadRequest
from metaq.protocol.remoting import fastjson
from metaq.protocol.remoting.codes import READ, VERSION_WITH_TOPIC_VERSION, WRITE
from metaq.protocol.remoting.headers import parse_int

MAX_INFLATED_BYTES: Final = 4 << 20
"""Bytes of a compressed registration once it is inflated: as many as may be sent without compression."""
MOST_TOPICS: Final = 20_000
"""Topics in one registration: that many take a registry some 15 ms to enter."""
MOST_LENIENT: Final = 1 << 18
"""Bytes of a registration that is not plain JSON, as one with mappings of static topics may be."""
DEFLATE_LEVEL: Final = 9
NO_LIVE_BROKER: Final = "no live broker has it"
"""In the remark of a missing route (code 17): the topic existed, but the brokers that had it are gone."""

_LENGTH: Final = struct.Struct(">i")
SINGLE_TAG: Final = "SINGLE_TAG"
NO_STATE: Final = -1
NO_ATTRIBUTES: Final[Mapping[str, str]] = {}

T = TypeVar("T")


class DataVersion(NamedTuple):
    """The version of a broker's topics: when they last changed, and how often."""

    timestamp: int
    counter: int
    state: int = NO_STATE
    """Only 5.x brokers send it."""

    def same(self, other: "DataVersion") -> bool:
        """Return whether nothing changed between the two versions; a missing ``state`` equals any other."""
        states = self.state == other.state or NO_STATE in (self.state, other.state)
        return states and (self.timestamp, self.counter) == (other.timestamp, other.counter)


class TopicConfig(NamedTuple):
    """The settings of a topic on a broker."""

    name: str
    read_queues: int
    write_queues: int
    permission: int = READ | WRITE
    sys_flag: int = 0
    order: bool = False
    filter_type: str = SINGLE_TAG
    attributes: Mapping[str, str] = NO_ATTRIBUTES
    """Settings by name (``metaq.protocol.remoting.attributes``)."""


class TopicConfigs(NamedTuple):
    """A broker's topics by name: all, or those that changed."""

    version: DataVersion
    topics: dict[str, TopicConfig]


class QueueData(NamedTuple):
    """The queues of a topic on one broker."""

    broker_name: str
    read_queues: int
    write_queues: int
    permission: int
    sys_flag: int = 0


class BrokerData(NamedTuple):
    """The processes that share one broker name: the master has id 0, replicas have others."""

    cluster: str
    name: str
    addresses: dict[int, str]


class TopicRoute(NamedTuple):
    """The brokers and queues of a topic: the body of the answer to 105, and of 217."""

    queues: tuple[QueueData, ...]
    brokers: tuple[BrokerData, ...]
    order_conf: str | None = None
    """``broker-a:4;broker-b:4`` for an ordered topic."""


class ClusterInfo(NamedTuple):
    """The body of the answer to 106: brokers by name, broker names by cluster."""

    brokers: dict[str, BrokerData]
    clusters: dict[str, list[str]]


# -- reading: from JSON values ----------------------------------------------------------------------------------------


def _reader(what: str) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Return a decorator that turns the errors of reading a body into ``BadRequest``."""

    def decorate(read: Callable[..., T]) -> Callable[..., T]:
        @wraps(read)
        def checked(*arguments: Any) -> T:
            try:
                return read(*arguments)
            except (KeyError, TypeError, ValueError, AttributeError, struct.error, zlib.error) as error:
                raise BadRequest(f"the body is not a {what}: {error!r}"[:200]) from error

        return checked

    return decorate


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"{fastjson.shown(value)} where a text should be")
    return value


def _number(value: Any, bits: int = 32) -> int:
    """Return an integer that fits ``bits`` bits: what a broker registers goes into the routes that all clients read."""
    if type(value) is not int or not -(1 << bits - 1) <= value < 1 << bits - 1:
        raise ValueError(f"{fastjson.shown(value)} where a number of {bits} bits should be")
    return value


def _version(value: Mapping[str, Any]) -> DataVersion:
    numbers = (value["timestamp"], value["counter"], value.get("stateVersion", NO_STATE))
    return DataVersion(*(_number(number, 64) for number in numbers))


def _topic(name: str, row: Mapping[str, Any]) -> TopicConfig:
    return TopicConfig(
        name,
        _number(row["readQueueNums"]),
        _number(row["writeQueueNums"]),
        _number(row.get("perm", READ | WRITE)),
        _number(row.get("topicSysFlag", 0)),
        bool(row.get("order", False)),
        _text(row.get("topicFilterType", SINGLE_TAG)),
        {name: _text(value) for name, value in (row.get("attributes") or NO_ATTRIBUTES).items()},
    )


def _table(value: Mapping[str, Any]) -> TopicConfigs:
    _check_count(len(value["topicConfigTable"]))
    topics = {name: _topic(name, row) for name, row in value["topicConfigTable"].items()}
    return TopicConfigs(_version(value["dataVersion"]), topics)


def _check_count(topics: int) -> None:
    if topics > MOST_TOPICS:
        raise BadRequest(f"the table has {topics} topics; at most {MOST_TOPICS} can be registered")


def _queue(row: Mapping[str, Any]) -> QueueData:
    numbers = (row["readQueueNums"], row["writeQueueNums"], row["perm"], row.get("topicSysFlag", 0))
    return QueueData(_text(row["brokerName"]), *map(_number, numbers))


def _broker(row: Mapping[str, Any]) -> BrokerData:
    addresses = {parse_int("brokerAddrs", str(key)): _text(address) for key, address in row["brokerAddrs"].items()}
    return BrokerData(_text(row.get("cluster", "")), _text(row["brokerName"]), addresses)


@_reader("data version")
def decode_data_version(body: bytes) -> DataVersion:
    """Return the version in the body of 322 or of its answer."""
    return _version(fastjson.decode_plain(body))


@_reader("topic table")
def decode_topic_table(body: bytes) -> TopicConfigs:
    """Return the topics in a body that RocketMQ calls TopicConfigSerializeWrapper."""
    return _table(fastjson.decode(body))


@_reader("topic")
def decode_topic(body: bytes) -> TopicConfig:
    """Return the topic in the body of the answer to 351."""
    row = fastjson.decode(body)
    return _topic(_text(row["topicName"]), row)


@_reader("registration")
def decode_registration(body: bytes, version: int, compressed: bool) -> TopicConfigs:
    """Return the topics in the body of 103, of a request of protocol ``version``. An empty body means no topics yet."""
    if not body:
        return TopicConfigs(DataVersion(0, 0), {})
    if compressed:
        return _deflated_table(body)
    content = fastjson.decode(body, MOST_LENIENT)
    return _table(content if version < VERSION_WITH_TOPIC_VERSION else content["topicConfigSerializeWrapper"])


def _deflated_table(body: bytes) -> TopicConfigs:
    """Return the topics in a compressed registration. Filter servers and mappings of static topics, after them, are ignored."""
    stream = zlib.decompressobj()
    data = stream.decompress(body, MAX_INFLATED_BYTES)
    if not stream.eof:
        raise BadRequest(f"the compressed registration is incomplete, or longer than {MAX_INFLATED_BYTES} bytes")
    at = 0

    def number() -> int:
        nonlocal at
        at += _LENGTH.size
        return int(_LENGTH.unpack_from(data, at - _LENGTH.size)[0])

    def part() -> bytes:
        nonlocal at
        size = number()
        if not 0 <= size <= len(data) - at:
            raise BadRequest(f"a part of the registration has {size} bytes, but only {len(data) - at} are left")
        at += size
        return data[at - size : at]

    version = _version(fastjson.decode_plain(part()))
    topics: dict[str, TopicConfig] = {}
    count = number()
    _check_count(count)
    for _ in range(count):
        # five words and a blank, after which 5.x brokers put the topic's attributes
        name, *words, filter_type, _ = part().decode().split(" ", 5)
        read, write, permission = (parse_int(f"of topic {name[:40]} in a registration", word, 32) for word in words)
        topics[name] = TopicConfig(name, read, write, permission, filter_type=filter_type)
    return TopicConfigs(version, topics)


@_reader("topic route")
def decode_route(body: bytes) -> TopicRoute:
    """Return the route in the body of the answer to 105, or of 217 (RocketMQ's TopicRouteData)."""
    content = fastjson.decode(body)
    queues = tuple(map(_queue, content.get("queueDatas") or ()))
    brokers = tuple(map(_broker, content.get("brokerDatas") or ()))
    order = content.get("orderTopicConf")
    return TopicRoute(queues, brokers, None if order is None else _text(order))


@_reader("cluster information")
def decode_cluster_info(body: bytes) -> ClusterInfo:
    """Return the clusters and brokers in the body of the answer to 106."""
    content = fastjson.decode(body)
    brokers = {name: _broker(row) for name, row in content["brokerAddrTable"].items()}
    return ClusterInfo(brokers, {name: list(map(_text, names)) for name, names in content["clusterAddrTable"].items()})


@_reader("list of topics")
def decode_topic_list(body: bytes) -> list[str]:
    """Return the topics in the body of the answers to 206, 224, 304 and 311 to 313."""
    return list(map(_text, fastjson.decode(body)["topicList"]))


@_reader("table of keys")
def decode_kv_table(body: bytes) -> dict[str, str]:
    """Return the keys and values in the body of the answers to 103 and 219; an absent body is an empty table."""
    return {key: _text(value) for key, value in fastjson.decode(body)["table"].items()} if body else {}


@_reader("member group")
def decode_member_group(body: bytes) -> BrokerData:
    """Return the members of a broker name in the body of the answer to 901."""
    return _broker(fastjson.decode(body)["brokerMemberGroup"])


# -- writing ----------------------------------------------------------------------------------------------------------


def _dump(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)


def _version_value(version: DataVersion) -> dict[str, int]:
    value = {"counter": version.counter, "timestamp": version.timestamp}
    return value if version.state == NO_STATE else {**value, "stateVersion": version.state}


def topic_row(topic: TopicConfig) -> dict[str, Any]:
    """Return a topic as JSON values; attributes only if there are any, as 4.9 knows none."""
    own = {"attributes": dict(topic.attributes)} if topic.attributes else {}
    return {
        **own,
        "order": topic.order,
        "perm": topic.permission,
        "readQueueNums": topic.read_queues,
        "topicFilterType": topic.filter_type,
        "topicName": topic.name,
        "topicSysFlag": topic.sys_flag,
        "writeQueueNums": topic.write_queues,
    }


def _table_value(table: TopicConfigs) -> dict[str, Any]:
    rows = {topic.name: topic_row(topic) for topic in table.topics.values()}
    return {"dataVersion": _version_value(table.version), "topicConfigTable": rows}


def _broker_value(broker: BrokerData) -> dict[str, Any]:
    addresses = {str(number): address for number, address in broker.addresses.items()}
    return {"brokerAddrs": addresses, "brokerName": broker.name, "cluster": broker.cluster}


def encode_data_version(version: DataVersion) -> bytes:
    """Return the body that ``decode_data_version`` reads."""
    return _dump(_version_value(version))


def encode_topic_table(table: TopicConfigs) -> bytes:
    """Return the body that ``decode_topic_table`` reads."""
    return _dump(_table_value(table))


def encode_registration(table: TopicConfigs, *, compressed: bool = False) -> bytes:
    """Return the body that ``decode_registration`` reads. The compressed form carries no order, flags or attributes."""
    if not compressed:
        return _dump({"filterServerList": [], "topicConfigSerializeWrapper": _table_value(table)})
    parts = [_part(encode_data_version(table.version)), _LENGTH.pack(len(table.topics))]
    for topic in table.topics.values():
        words = (topic.name, topic.read_queues, topic.write_queues, topic.permission, topic.filter_type)
        parts.append(_part(f"{' '.join(map(str, words))} ".encode()))
    parts.append(_part(b"[]"))
    return zlib.compress(b"".join(parts), DEFLATE_LEVEL)


def _part(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


def encode_route(route: TopicRoute) -> bytes:
    """Return the body that ``decode_route`` reads."""
    content: dict[str, Any] = {
        "brokerDatas": [_broker_value(broker) for broker in route.brokers],
        "filterServerTable": {},
        "queueDatas": [
            {
                "brokerName": queue.broker_name,
                "perm": queue.permission,
                "readQueueNums": queue.read_queues,
                "topicSysFlag": queue.sys_flag,
                "writeQueueNums": queue.write_queues,
            }
            for queue in route.queues
        ],
    }
    if route.order_conf is not None:
        content["orderTopicConf"] = route.order_conf
    return _dump(content)


def encode_cluster_info(info: ClusterInfo) -> bytes:
    """Return the body that ``decode_cluster_info`` reads."""
    brokers = {name: _broker_value(broker) for name, broker in info.brokers.items()}
    return _dump({"brokerAddrTable": brokers, "clusterAddrTable": info.clusters})


def encode_topic_list(topics: Iterable[str], broker_address: str | None = None) -> bytes:
    """Return the body that ``decode_topic_list`` reads; the answer to 304 also has the address of some broker."""
    content: dict[str, Any] = {"topicList": list(topics)}
    return _dump(content if broker_address is None else {"brokerAddr": broker_address, **content})


def encode_kv_table(table: Mapping[str, str]) -> bytes:
    """Return the body that ``decode_kv_table`` reads."""
    return _dump({"table": dict(table)})


def encode_member_group(broker: BrokerData) -> bytes:
    """Return the body that ``decode_member_group`` reads."""
    return _dump({"brokerMemberGroup": _broker_value(broker)})

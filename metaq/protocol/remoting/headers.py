"""Typed headers: the fields of requests, code by code (specs: remoting protocol, sections 2 and 3).

Each class lists its fields in the order of the specification. A field's name on the wire is its name here in camel case (an
underscore at the end avoids the names of a tuple's own methods). A field without a default is required. ``Int32`` fields are
limited to 32 bits, ``int`` fields to 64. Requests without fields have no class. Those of which only a topic or a group is read
share a class (``TopicOnly``, ``GroupOnly`` and the like).
"""

from collections.abc import Callable, Mapping
from functools import cache
from types import NoneType
from typing import Any, Final, NamedTuple, NewType, TypeVar, get_args, get_type_hints

from metaq.errors import BadRequest

Int32 = NewType("Int32", int)

H = TypeVar("H", bound=tuple[Any, ...])


class TopicOnly(NamedTuple):
    """Ask for a topic's route (105), statistics (202) or groups (300), delete it from a broker (215), or register it (217)."""

    topic: str


class GroupOnly(NamedTuple):
    """Ask for the topics (343) or the settings (352) of a group."""

    group: str


class ConsumerGroupOnly(NamedTuple):
    """Ask for the members (38) or the connections (203) of a group, or report to a client that its members changed (40)."""

    consumer_group: str


class ProducerGroupOnly(NamedTuple):
    """Ask for the connections of a producer group (204)."""

    producer_group: str


# -- registry ---------------------------------------------------------------------------------------------------------


class Namespace(NamedTuple):
    """Ask a registry for all keys of a namespace (219)."""

    namespace: str


class KvKey(NamedTuple):
    """Ask a registry for the value of a key (101), or delete the key (102)."""

    namespace: str
    key: str


class KvPair(NamedTuple):
    """Set the value of a key in a registry (100)."""

    namespace: str
    key: str
    value: str


class RegisterBroker(NamedTuple):
    """Register a broker and its topics (103)."""

    broker_name: str
    broker_addr: str
    cluster_name: str
    ha_server_addr: str
    broker_id: int
    compressed: bool = False
    body_crc32: int = 0
    heartbeat_timeout_millis: int | None = None


class BrokerOnly(NamedTuple):
    """Unregister a broker (104), or ask for the version of its topics (322)."""

    broker_name: str
    broker_addr: str
    cluster_name: str
    broker_id: int


class BrokerNameOnly(NamedTuple):
    """Withdraw (205) or restore (327) the write permission of a broker in the routes."""

    broker_name: str


class ClusterOnly(NamedTuple):
    """Ask a registry for the topics of a cluster (224)."""

    cluster: str


class BrokerGroup(NamedTuple):
    """Ask a registry for the processes that share a broker name (901)."""

    cluster_name: str
    broker_name: str


class BrokerBeat(NamedTuple):
    """Tell a registry that a broker is alive (904)."""

    cluster_name: str
    broker_addr: str
    broker_name: str


class DeleteTopicInRegistry(NamedTuple):
    """Delete a topic from a registry (216), in one cluster or in all."""

    topic: str
    cluster_name: str | None = None


# -- sending and reading ----------------------------------------------------------------------------------------------


class SendMessage(NamedTuple):
    """Send a message (10, 310), a batch (320) or a reply (324, 325). 310, 320 and 325 abbreviate the names to letters."""

    producer_group: str
    topic: str
    default_topic: str
    default_topic_queue_nums: Int32
    queue_id: Int32
    sys_flag: Int32
    born_timestamp: int
    flag: Int32
    properties: str | None = None
    reconsume_times: Int32 = Int32(0)
    unit_mode: bool = False
    max_reconsume_times: Int32 | None = None
    batch: bool = False


class SendBack(NamedTuple):
    """Send back a message that could not be consumed, to be delivered to the group again later (36)."""

    offset: int
    group: str
    delay_level: Int32
    origin_msg_id: str | None = None
    origin_topic: str | None = None
    unit_mode: bool = False
    max_reconsume_times: Int32 | None = None


class PullMessage(NamedTuple):
    """Pull messages of a queue (11, 361)."""

    consumer_group: str
    topic: str
    queue_id: Int32
    queue_offset: int
    max_msg_nums: Int32
    sys_flag: Int32
    commit_offset: int
    suspend_timeout_millis: int
    sub_version: int
    subscription: str | None = None
    expression_type: str | None = None
    max_msg_bytes: Int32 | None = None


class QueryConsumerOffset(NamedTuple):
    """Ask for the committed offset of a group in a queue (14)."""

    consumer_group: str
    topic: str
    queue_id: Int32
    set_zero_if_not_found: bool | None = None


class UpdateConsumerOffset(NamedTuple):
    """Commit the offset of a group in a queue (15)."""

    consumer_group: str
    topic: str
    queue_id: Int32
    commit_offset: int


class QueueOnly(NamedTuple):
    """Ask for the end (30) or the oldest offset (31) of a queue, or when its oldest message was stored (32)."""

    topic: str
    queue_id: Int32


class SearchOffset(NamedTuple):
    """Ask for the offset in a queue at a time (29)."""

    topic: str
    queue_id: Int32
    timestamp: int
    boundary_type: str = "LOWER"


class QueryMessage(NamedTuple):
    """Look up messages by a key (12)."""

    topic: str
    key: str
    max_num: Int32
    begin_timestamp: int
    end_timestamp: int


class ViewMessage(NamedTuple):
    """Read the message at a log offset (33)."""

    offset: int


class UnregisterClient(NamedTuple):
    """Remove a client from its groups (35)."""

    client_id: str
    producer_group: str | None = None
    consumer_group: str | None = None


class EndTransaction(NamedTuple):
    """Commit or roll back a half message (37)."""

    producer_group: str
    tran_state_table_offset: int
    commit_log_offset: int
    commit_or_rollback: Int32
    msg_id: str
    from_transaction_check: bool = False
    transaction_id: str | None = None


class RecallMessage(NamedTuple):
    """Cancel a delayed message (370)."""

    topic: str
    recall_handle: str
    producer_group: str = ""


class CheckTransaction(NamedTuple):
    """Ask a producer what became of a half message (39). The broker sends it; the body is the half message as a record."""

    tran_state_table_offset: int
    commit_log_offset: int
    msg_id: str | None = None
    transaction_id: str | None = None
    offset_msg_id: str | None = None


class ResumeCheck(NamedTuple):
    """Ask the broker to check a half message again (323); the id is an offset id."""

    msg_id: str


class PushReply(NamedTuple):
    """Deliver a reply to the client that sent the request (326). The broker sends it."""

    producer_group: str
    topic: str
    default_topic: str
    default_topic_queue_nums: Int32
    queue_id: Int32
    sys_flag: Int32
    born_timestamp: int
    flag: Int32
    born_host: str
    store_host: str
    store_timestamp: int
    properties: str | None = None
    reconsume_times: Int32 = Int32(0)
    unit_mode: bool = False


# -- administration ---------------------------------------------------------------------------------------------------


class CreateTopic(NamedTuple):
    """Create a topic or change it (17)."""

    topic: str
    default_topic: str
    read_queue_nums: Int32
    write_queue_nums: Int32
    perm: Int32
    topic_filter_type: str = "SINGLE_TAG"
    topic_sys_flag: Int32 = Int32(0)
    order: bool = False
    attributes: str = ""
    """Changes of attributes, ``+name=value`` and ``-name``, with commas between them."""


class DeleteGroup(NamedTuple):
    """Delete a consumer group (207); 4.9 tools set ``remove_offset``, 5.x tools ``clean_offset``."""

    group_name: str
    remove_offset: bool = False
    clean_offset: bool = False


class GetConsumeStats(NamedTuple):
    """Ask for the offsets and the lag of a group (208), in one topic or in all."""

    consumer_group: str
    topic: str | None = None


class GroupAndTopic(NamedTuple):
    """Ask for the time spans of a group in a topic's queues (303), or for its subscription to the topic (345)."""

    group: str
    topic: str | None = None


class ResetOffset(NamedTuple):
    """Reset a group's offsets on a broker (222), or in a client of the group (220). A ``timestamp`` of -1 means the end."""

    topic: str
    group: str
    timestamp: int
    is_force: bool = False
    queue_id: Int32 = Int32(-1)
    offset: int | None = None


class ConsumerStatus(NamedTuple):
    """Ask the clients of a group for their offsets, through the broker (223) or directly (221)."""

    topic: str
    group: str
    client_addr: str | None = None


class RunningInfo(NamedTuple):
    """Ask a client, through its broker, for its internal state (307)."""

    consumer_group: str
    client_id: str
    jstack_enable: bool = False


class ConsumeDirectly(NamedTuple):
    """Have a client consume one stored message now (309)."""

    consumer_group: str
    client_id: str | None = None
    msg_id: str | None = None
    broker_name: str | None = None


class CloneOffset(NamedTuple):
    """Copy the offsets of one group to another (314), in one topic or in all."""

    src_group: str
    dest_group: str
    topic: str | None = None
    offline: bool = False


class ViewStats(NamedTuple):
    """Ask for one of the broker's statistics by name and key (315)."""

    stats_name: str
    stats_key: str


class BrokerConsumeStats(NamedTuple):
    """Ask for the offsets and the lag of all groups on a broker (317), or only in ordered topics."""

    is_order: bool = False


class QueryConsumeQueue(NamedTuple):
    """Show units of a consume queue (321)."""

    topic: str
    queue_id: Int32
    index_: int
    count_: Int32
    consumer_group: str | None = None


class CorrectionOffset(NamedTuple):
    """Ask for the offsets of the slowest group of a topic (308)."""

    compare_group: str
    topic: str
    filter_groups: str | None = None


# -- reading and writing them -----------------------------------------------------------------------------------------

LETTERS: Final = {
    "a": "producerGroup",
    "b": "topic",
    "c": "defaultTopic",
    "d": "defaultTopicQueueNums",
    "e": "queueId",
    "f": "sysFlag",
    "g": "bornTimestamp",
    "h": "flag",
    "i": "properties",
    "j": "reconsumeTimes",
    "k": "unitMode",
    "l": "maxReconsumeTimes",
    "m": "batch",
}
"""The names that the letters of 310, 320 and 325 stand for."""
_LETTER_OF: Final = {name: letter for letter, name in LETTERS.items()}


def decode_header(kind: type[H], fields: Mapping[str, str]) -> H:
    """Return the typed header in ``fields``; unknown fields are ignored. ``BadRequest`` names a missing or wrong field."""
    values = []
    for wire, convert, default, required in _plan(kind):
        text = fields.get(wire)
        if text is not None:
            values.append(convert(wire, text))
        elif required:
            raise BadRequest(f"the field {wire} is missing")
        else:
            values.append(default)
    return kind(*values)


def encode_header(header: tuple[Any, ...]) -> dict[str, str]:
    """Return the fields of a typed header; those that are ``None`` are left out."""
    plan = _plan(type(header))
    return {wire: _as_text(value) for (wire, _, _, _), value in zip(plan, header, strict=True) if value is not None}


def with_names(fields: Mapping[str, str]) -> dict[str, str]:
    """Return fields with their letters replaced by names."""
    return {LETTERS.get(letter, letter): value for letter, value in fields.items()}


def with_letters(fields: Mapping[str, str]) -> dict[str, str]:
    """Return fields with their names replaced by letters."""
    return {_LETTER_OF.get(name, name): value for name, value in fields.items()}


def parse_int(name: str, text: str, bits: int = 64) -> int:
    """Return a signed decimal number of ``bits`` bits. ``BadRequest`` names the field when ``text`` is not one."""
    digits = text[1:] if text[:1] == "-" else text
    if digits.isascii() and digits.isdigit() and len(digits) < 20:
        number = int(text)
        if -(1 << bits - 1) <= number < 1 << bits - 1:
            return number
    raise BadRequest(f"the field {name} is {text[:40]!r}, not a number of {bits} bits")


@cache
def _plan(kind: type[Any]) -> list[tuple[str, Callable[[str, str], Any], Any, bool]]:
    """Return for each field the name on the wire, the converter, the default, and whether it is required."""
    defaults: dict[str, Any] = kind._field_defaults
    plan = []
    for name, hint in get_type_hints(kind).items():
        given = next(part for part in (*get_args(hint), hint) if part is not NoneType)
        plan.append((_UNUSUAL.get((kind, name)) or _camel(name), _CONVERTERS[given], defaults.get(name), name not in defaults))
    return plan


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)


def _as_text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


_UNUSUAL: Final = {(UnregisterClient, "client_id"): "clientID"}
_CONVERTERS: Final[dict[Any, Callable[[str, str], Any]]] = {
    str: lambda _, text: text,
    bool: lambda _, text: text.lower() == "true",
    int: parse_int,
    Int32: lambda name, text: parse_int(name, text, 32),
}

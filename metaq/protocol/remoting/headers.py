"""Typed headers: what the fields of a request mean, code by code (specs: remoting protocol, sections 2 and 3).

Each class lists its fields in the order of the specification. A field's name on the wire is its name here in camel case (an
underscore at the end keeps clear of a tuple's own methods); one without a default must be there. ``Int32`` fields are held to
32 bits, ``int`` fields to 64. Requests without fields have no class; neither have those whose handlers read nothing but a
topic or a group (``TopicOnly``, ``GroupOnly``).
"""

from collections.abc import Callable, Mapping
from functools import cache
from types import NoneType
from typing import Any, Final, NamedTuple, NewType, TypeVar, get_args, get_type_hints

from metaq.errors import BadRequest

Int32 = NewType("Int32", int)

H = TypeVar("H", bound=tuple[Any, ...])


class TopicOnly(NamedTuple):
    """105, 202, 215, 216, 300 and others."""

    topic: str


class GroupOnly(NamedTuple):
    """343, 352."""

    group: str


class ConsumerGroupOnly(NamedTuple):
    """38, 40, 203."""

    consumer_group: str


class ProducerGroupOnly(NamedTuple):
    """204."""

    producer_group: str


# -- registry ---------------------------------------------------------------------------------------------------------


class Namespace(NamedTuple):
    """219."""

    namespace: str


class KvKey(NamedTuple):
    """101, 102."""

    namespace: str
    key: str


class KvPair(NamedTuple):
    """100."""

    namespace: str
    key: str
    value: str


class RegisterBroker(NamedTuple):
    """103."""

    broker_name: str
    broker_addr: str
    cluster_name: str
    ha_server_addr: str
    broker_id: int
    compressed: bool = False
    body_crc32: int = 0
    heartbeat_timeout_millis: int | None = None


class BrokerIdentity(NamedTuple):
    """104, 322."""

    broker_name: str
    broker_addr: str
    cluster_name: str
    broker_id: int


class BrokerNameOnly(NamedTuple):
    """205, 327."""

    broker_name: str


class ClusterOnly(NamedTuple):
    """224."""

    cluster: str


class BrokerGroup(NamedTuple):
    """901."""

    cluster_name: str
    broker_name: str


class BrokerBeat(NamedTuple):
    """904."""

    cluster_name: str
    broker_addr: str
    broker_name: str


class DeleteTopicInRegistry(NamedTuple):
    """216."""

    topic: str
    cluster_name: str | None = None


# -- sending and reading ----------------------------------------------------------------------------------------------


class SendMessage(NamedTuple):
    """10 and 324 by these names, 310, 320 and 325 by letters."""

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
    """36."""

    offset: int
    group: str
    delay_level: Int32
    origin_msg_id: str | None = None
    origin_topic: str | None = None
    unit_mode: bool = False
    max_reconsume_times: Int32 | None = None


class PullMessage(NamedTuple):
    """11, 361."""

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
    """14."""

    consumer_group: str
    topic: str
    queue_id: Int32
    set_zero_if_not_found: bool | None = None


class UpdateConsumerOffset(NamedTuple):
    """15."""

    consumer_group: str
    topic: str
    queue_id: Int32
    commit_offset: int


class QueueOnly(NamedTuple):
    """30, 31, 32."""

    topic: str
    queue_id: Int32


class SearchOffset(NamedTuple):
    """29."""

    topic: str
    queue_id: Int32
    timestamp: int
    boundary_type: str = "LOWER"


class QueryMessage(NamedTuple):
    """12."""

    topic: str
    key: str
    max_num: Int32
    begin_timestamp: int
    end_timestamp: int


class ViewMessage(NamedTuple):
    """33."""

    offset: int


class UnregisterClient(NamedTuple):
    """35."""

    client_id: str
    producer_group: str | None = None
    consumer_group: str | None = None


class EndTransaction(NamedTuple):
    """37."""

    producer_group: str
    tran_state_table_offset: int
    commit_log_offset: int
    commit_or_rollback: Int32
    msg_id: str
    from_transaction_check: bool = False
    transaction_id: str | None = None


class CheckTransaction(NamedTuple):
    """39, from the broker to a producer; the body is the half message as a record."""

    tran_state_table_offset: int
    commit_log_offset: int
    msg_id: str | None = None
    transaction_id: str | None = None
    offset_msg_id: str | None = None


class ResumeCheck(NamedTuple):
    """323; the id is an offset id."""

    msg_id: str


class PushReply(NamedTuple):
    """326, from the broker to a client."""

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
    """17."""

    topic: str
    default_topic: str
    read_queue_nums: Int32
    write_queue_nums: Int32
    perm: Int32
    topic_filter_type: str = "SINGLE_TAG"
    topic_sys_flag: Int32 = Int32(0)
    order: bool = False


class DeleteGroup(NamedTuple):
    """207: ``remove_offset`` from 4.9, ``clean_offset`` from 5.x tools."""

    group_name: str
    remove_offset: bool = False
    clean_offset: bool = False


class ConsumeStats(NamedTuple):
    """208."""

    consumer_group: str
    topic: str | None = None


class GroupAndTopic(NamedTuple):
    """303, 345."""

    group: str
    topic: str | None = None


class ResetOffset(NamedTuple):
    """220, 222. A ``timestamp`` of -1 means the end."""

    topic: str
    group: str
    timestamp: int
    is_force: bool = False
    queue_id: Int32 = Int32(-1)
    offset: int | None = None


class ConsumerStatus(NamedTuple):
    """221, 223."""

    topic: str
    group: str
    client_addr: str | None = None


class RunningInfo(NamedTuple):
    """307."""

    consumer_group: str
    client_id: str
    jstack_enable: bool = False


class ConsumeDirectly(NamedTuple):
    """309."""

    consumer_group: str
    client_id: str | None = None
    msg_id: str | None = None
    broker_name: str | None = None


class CloneOffset(NamedTuple):
    """314."""

    src_group: str
    dest_group: str
    topic: str | None = None
    offline: bool = False


class ViewStats(NamedTuple):
    """315."""

    stats_name: str
    stats_key: str


class BrokerConsumeStats(NamedTuple):
    """317."""

    is_order: bool = False


class QueryConsumeQueue(NamedTuple):
    """321."""

    topic: str
    queue_id: Int32
    index_: int
    count_: Int32
    consumer_group: str | None = None


class CorrectionOffset(NamedTuple):
    """308."""

    compare_group: str
    topic: str
    filter_groups: str | None = None


class MessageId(NamedTuple):
    """323."""

    msg_id: str


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
"""What the single letters of 310, 320 and 325 stand for."""
_LETTER_OF: Final = {name: letter for letter, name in LETTERS.items()}


def decode_header(kind: type[H], fields: Mapping[str, str]) -> H:
    """The typed header that ``fields`` holds; unknown fields are ignored. ``BadRequest`` names the field that is wrong."""
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
    """The fields that carry a typed header; those that are ``None`` are left out."""
    plan = _plan(type(header))
    return {wire: _as_text(value) for (wire, _, _, _), value in zip(plan, header, strict=True) if value is not None}


def with_names(fields: Mapping[str, str]) -> dict[str, str]:
    """Fields by letters as fields by names."""
    return {LETTERS.get(letter, letter): value for letter, value in fields.items()}


def with_letters(fields: Mapping[str, str]) -> dict[str, str]:
    """Fields by names as fields by letters."""
    return {_LETTER_OF.get(name, name): value for name, value in fields.items()}


def parse_int(name: str, text: str, bits: int = 64) -> int:
    """A decimal number of so many bits, as Java would read it."""
    digits = text[1:] if text[:1] == "-" else text
    if digits.isascii() and digits.isdigit() and len(digits) < 20:
        number = int(text)
        if -(1 << bits - 1) <= number < 1 << bits - 1:
            return number
    raise BadRequest(f"the field {name} is {text[:40]!r}, not a number of {bits} bits")


@cache
def _plan(kind: type[Any]) -> list[tuple[str, Callable[[str, str], Any], Any, bool]]:
    """Per field: wire name, converter, default, whether it must be there."""
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

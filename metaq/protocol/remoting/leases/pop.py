"""Leased messages in RocketMQ's form: pops, acks and changes of invisible times (200050 to 200055).

The answer to a pop has the records as they are in the log. Fields of its header describe them, entry by entry::

    startOffsetInfo   MARK ' ' QUEUE ' ' OFFSET { ';' … }                         the first offset of each queue
    msgOffsetInfo     MARK ' ' QUEUE ' ' OFFSET { ',' OFFSET } { ';' … }          all offsets, in the order of the body
    orderCountInfo    MARK ' ' QUEUE ' ' TIMES { ';' … }                          the fewest deliveries of a message before this
                      MARK ' ' 'qo' QUEUE '%' OFFSET ' ' TIMES                    ... and where a message has more

A client makes a *receipt* for each message from them (``metaq.protocol.remoting.leases.receipts``), which it sends back with an
ack or a change.

MARK says where a message comes from: 0 the topic itself, 1 and 2 the two kinds of retry topics of RocketMQ's own brokers. Here
it is always 0. The same queue must not come twice in a field, and both fields about offsets must have the order of the body:
otherwise a Java client drops the whole answer.

All requests have a field ``bname``, the broker that is meant, which may be absent.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Final, NamedTuple

from metaq.errors import BadRequest
from metaq.message import RETRY_PREFIX, TopicPartition
from metaq.protocol.remoting.headers import Int32, parse_int
from metaq.protocol.remoting.leases.receipts import OWN, SHOWN, Receipt

RETRY: Final = 1
RETRY_V2: Final = 2
"""The marks of retry topics."""
ALL_QUEUES: Final = -1
"""The ``queueId`` of a request that concerns all queues of the broker."""
FROM_FIRST: Final = 0
FROM_END: Final = 1
"""The values of ``initMode``: where a group begins that has no offset."""
REJECT_MS: Final = -1
"""The invisible time that makes a message a dead letter."""


# -- headers ----------------------------------------------------------------------------------------------------------


class PopMessage(NamedTuple):
    """Lease messages of a queue, or of all queues (200050)."""

    consumer_group: str
    topic: str
    queue_id: Int32
    max_msg_nums: Int32
    invisible_time: int
    poll_time: int
    """Milliseconds to wait when there is no message; 0: do not wait."""
    init_mode: Int32
    born_time: int = 0
    """When the request was made, by the client's clock; 0: the broker takes its own."""
    exp_type: str | None = None
    exp: str | None = None
    order: bool = False
    attempt_id: str | None = None
    bname: str | None = None


class PopAnswer(NamedTuple):
    """The answer to a pop, and to a peek, which sets ``rest_num`` only."""

    pop_time: int
    invisible_time: int
    revive_qid: Int32
    rest_num: int
    start_offset_info: str | None = None
    msg_offset_info: str | None = None
    order_count_info: str | None = None


class AckMessage(NamedTuple):
    """Finish a leased message (200051)."""

    consumer_group: str
    topic: str
    queue_id: Int32
    extra_info: str
    offset: int
    bname: str | None = None


class ChangeInvisibleTime(NamedTuple):
    """Let a lease end at another time, counted from now (200053)."""

    consumer_group: str
    topic: str
    queue_id: Int32
    extra_info: str
    offset: int
    invisible_time: int
    bname: str | None = None


class ChangeAnswer(NamedTuple):
    """The answer to 200053: the lease now ends at ``pop_time + invisible_time``."""

    pop_time: int
    invisible_time: int
    revive_qid: Int32


class PeekMessage(NamedTuple):
    """Read messages that a pop would give, without a lease (200052)."""

    topic: str
    queue_id: Int32
    max_msg_nums: Int32
    consumer_group: str
    bname: str | None = None


class Notification(NamedTuple):
    """Ask whether there is something to pop; waits for it (200054)."""

    consumer_group: str
    topic: str
    queue_id: Int32
    poll_time: int
    born_time: int
    order: bool = False
    attempt_id: str | None = None
    bname: str | None = None


class NotificationAnswer(NamedTuple):
    """The answer to 200054; ``polling_full``: too many requests wait already."""

    has_msg: bool
    polling_full: bool


class PollingInfo(NamedTuple):
    """Ask how many pops wait for messages (200055)."""

    consumer_group: str
    topic: str
    queue_id: Int32
    bname: str | None = None


class PollingAnswer(NamedTuple):
    """The answer to 200055."""

    polling_num: int


# -- receipts ---------------------------------------------------------------------------------------------------------


def receipts_of(answer: PopAnswer, broker_name: str, records: Iterable[tuple[TopicPartition, int]]) -> list[Receipt]:
    """Return the receipt of each record of an answer, as RocketMQ's clients make it.

    Args:
        answer: the header of the answer.
        broker_name: the name of the broker that gave it.
        records: the topic, queue and offset of each record, in the order of the body.

    Raises ``BadRequest`` when the header does not describe the records.
    """
    places = [((_mark_of(queue.topic), queue.partition), offset) for queue, offset in records]
    in_body: dict[tuple[int, int], list[int]] = defaultdict(list)
    for queue, offset in places:
        in_body[queue].append(offset)
    starts = _entries("startOffsetInfo", answer.start_offset_info or "")
    described = _entries("msgOffsetInfo", answer.msg_offset_info or "")
    receipts = []
    for queue, offset in places:
        start = starts.get(queue, in_body[queue])[0]
        index = in_body[queue].index(offset)
        if len(described.get(queue, ())) != len(in_body[queue]):
            raise BadRequest(f"msgOffsetInfo does not have the messages of queue {queue[1]} (mark {queue[0]})")
        receipts.append(
            Receipt(
                start, answer.pop_time, answer.invisible_time, answer.revive_qid, queue[0], broker_name, queue[1],
                described[queue][index],
            )
        )  # fmt: skip
    return receipts


def _mark_of(topic: str) -> int:
    if not topic.startswith(RETRY_PREFIX):
        return OWN
    return RETRY_V2 if "+" in topic else RETRY


def _entries(name: str, info: str) -> dict[tuple[int, int], list[int]]:
    """Return the offsets of ``startOffsetInfo`` or ``msgOffsetInfo`` by mark and queue."""
    found: dict[tuple[int, int], list[int]] = {}
    for entry in filter(None, info.split(";")):
        words = entry.split(" ")
        if len(words) != 3:
            raise BadRequest(f"{name} has {entry[:SHOWN]!r}, not a mark, a queue and offsets")
        queue = parse_int(name, words[0]), parse_int(name, words[1])
        if queue in found:
            raise BadRequest(f"{name} has queue {queue[1]} (mark {queue[0]}) twice")
        found[queue] = [parse_int(name, offset) for offset in words[2].split(",")]
    return found

"""Decoding of pulled records to messages, the client's hottest loop (specs: store format, section 1)."""

import struct
from typing import Final

from metaq.checksum import crc32
from metaq.client.message import ReceivedMessage
from metaq.errors import ChecksumMismatch, StreamLost
from metaq.message import MessageQueue
from metaq.protocol.inflating import MAX_INFLATED_BYTES
from metaq.protocol.record import HEADER, HEADER_SIZE, MAGIC
from metaq.protocol.sysflag import BORN_HOST_IPV6, COMPRESSED, STORE_HOST_IPV6

_MAGIC_LONG_TOPIC: Final = struct.unpack(">i", b"\xda\xa3\x20\xab")[0]
_SPECIAL: Final = BORN_HOST_IPV6 | STORE_HOST_IPV6 | COMPRESSED
_SYS_FLAG: Final = struct.Struct(">36xi")
_LENGTH: Final = struct.Struct(">h")
_CRC_MASK: Final = 0x7FFFFFFF
_IPV6_HOST: Final = "20s"
_IPV4_HOST: Final = "8s"


def decode_messages(
    data: bytes, broker_name: str, topic: str = "", *, most: int = MAX_INFLATED_BYTES, damaged_too: bool = False
) -> list[ReceivedMessage]:
    """Decode the messages in a broker's answer, in order. ``topic`` is the topic of all of them, if it is known.

    Bodies are inflated later, on access, and may then have at most ``most`` bytes. With ``damaged_too`` a message whose body
    does not match its checksum is returned with an ``error``; otherwise ``ChecksumMismatch`` is raised. ``StreamLost`` when the
    bytes are not records.
    """
    messages: list[ReceivedMessage] = []
    append, unpack, new = messages.append, HEADER.unpack_from, ReceivedMessage
    queues: dict[int, MessageQueue] = {}
    name_size = len(topic)
    at, end = 0, len(data)
    try:
        while at < end:
            head = unpack(data, at)
            size, partition = head[0], head[3]
            body_at = at + HEADER_SIZE
            topic_at = body_at + head[14]
            if not topic or head[1] != MAGIC or head[7] & _SPECIAL or data[topic_at] != name_size:
                append(_decode_any(data, at, broker_name, most, damaged_too=damaged_too))
                at += size
                continue
            body = data[body_at:topic_at]
            if crc32(body) & _CRC_MASK != head[2]:
                append(_decode_any(data, at, broker_name, most, damaged_too=damaged_too))
                at += size
                continue
            queue = queues.get(partition)
            if queue is None:
                queue = queues[partition] = MessageQueue(topic, broker_name, partition)
            at += size
            append(new(head, body, data[topic_at + name_size + 3 : at], queue))
    except (struct.error, IndexError) as error:
        raise StreamLost(f"the records that {broker_name} sent end in the middle of one: {error}") from error
    if at != end:
        raise StreamLost(f"the records that {broker_name} sent end {at - end} bytes early")
    return messages


def _decode_any(data: bytes, at: int, broker_name: str, most: int, *, damaged_too: bool) -> ReceivedMessage:
    """Decode one record of any kind: with IPv6 hosts, a long or unknown topic, a compressed or a damaged body."""
    size, magic = struct.unpack_from(">ii", data, at)
    if magic not in {MAGIC, _MAGIC_LONG_TOPIC} or size < HEADER_SIZE:
        raise StreamLost(f"{broker_name} sent a record of {size} bytes with the mark {magic & 0xFFFFFFFF:08x}")
    sys_flag = _SYS_FLAG.unpack_from(data, at)[0]
    layout = _layout(sys_flag)
    head = layout.unpack_from(data, at)
    body_at = at + layout.size
    topic_at = body_at + head[14]
    body = data[body_at:topic_at]
    if magic == MAGIC:
        name_at, name_size = topic_at + 1, data[topic_at]
    else:
        name_at, name_size = topic_at + 2, _LENGTH.unpack_from(data, topic_at)[0]
    properties_at = name_at + name_size
    queue = MessageQueue(data[name_at:properties_at].decode(errors="replace"), broker_name, head[3])
    properties = data[properties_at + 2 : at + size]
    message = ReceivedMessage(head, body, properties, queue, most if sys_flag & COMPRESSED else 0)
    if crc32(body) & _CRC_MASK == head[2]:
        return message
    reason = f"message {head[5]} of partition {head[3]} on {broker_name} does not have its checksum"
    if not damaged_too:
        raise ChecksumMismatch(reason)
    return message._damaged(reason)


def _layout(sys_flag: int) -> struct.Struct:
    born = _IPV6_HOST if sys_flag & BORN_HOST_IPV6 else _IPV4_HOST
    store = _IPV6_HOST if sys_flag & STORE_HOST_IPV6 else _IPV4_HOST
    return struct.Struct(f">iiiiiqqiq{born}q{store}iqi")

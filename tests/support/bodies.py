"""The largest bodies that requests may have, in the worst shapes, valid and invalid."""

import json
import zlib
from collections.abc import Callable, Mapping
from functools import cache
from itertools import islice, product
from string import ascii_letters
from typing import Final

from metaq.protocol.remoting.codes import Request
from metaq.protocol.remoting.heartbeats import MOST_GROUPS, MOST_QUEUES, MOST_SUBSCRIPTIONS
from metaq.protocol.remoting.routes import DataVersion, TopicConfig, TopicConfigs, encode_registration
from metaq.protocol.remoting.sending.batch import MOST, BatchItem, encode_batch
from metaq.protocol.sql92 import MAX_LENGTH, MOST_SEARCHES
from metaq.protocol.subscription import MAX_EXPRESSION_LENGTH
from metaq.server.remoting.admission import REGISTRATION_BYTES

BODY: Final = 4 << 20
"""The largest body of a message by default."""


def bracketed(part: bytes, size: int, begin: bytes = b"[", end: bytes = b"]") -> bytes:
    """A list of the same again and again, of at most this size."""
    count = (size - len(begin) - len(end) + 1) // (len(part) + 1)
    return begin + b",".join([part] * count) + end


def numbered(form: bytes, size: int, begin: bytes, end: bytes) -> bytes:
    """The same with different numbers."""
    count = (size - len(begin) - len(end)) // (len(form % 999_999) + 1)
    return begin + b",".join(form % number for number in range(count)) + end


@cache
def shapes(size: int) -> tuple[bytes, ...]:
    """Bodies that mean nothing to anybody."""
    half = size // 2
    return (
        bytes(size),
        b"\xff" * size,
        b"[" * size,
        b"[" * half + b"]" * half,
        b"[" * 60 + bracketed(b"0", size - 120) + b"]" * 60,
        bracketed(b"0", size),
        bracketed(b'""', size),
        bracketed(b'{"a":{}}', size),
        bracketed(b'{"{":"{"}', size),
        numbered(b"%d:0", size, b"{", b"}"),
        numbered(b'"%d":""', size, b"{", b"}"),
        numbered(b'"{%d":{}', size, b"{", b"}"),
        numbered(b'"{\\"topic\\":\\"t\\",\\"brokerName\\":\\"b\\",\\"queueId\\":%d}":1', size, b'{"offsetTable":{', b"}}"),
        b'{"%b":1}' % (b"k" * (size - 6)),
        b'"%b' % (b"\\n" * ((size - 1) // 2)),
        b"{1:%b}" % (b"9" * (size - 4)),
        b"a=b\n" * (size // 4),
        b"\n" * size,
    )


def tags(size: int, length: int = 2) -> str:
    """A tag expression with as many tags as it may have."""
    words = map("".join, product(ascii_letters, repeat=length))
    return "||".join(islice(words, size // (length + 2)))[:size].rstrip("|")


def heartbeat(consuming: int, topics: int, expression: str, *, producing: int = 0, same: bool = False) -> bytes:
    """One that keeps all limits, if the arguments do."""
    wanted = [{"topic": "t" if same else f"t{number}", "subString": expression} for number in range(topics)]
    consumers = [{"groupName": f"g{number}", "subscriptionDataSet": wanted} for number in range(consuming)]
    producers = [{"groupName": f"p{number}"} for number in range(producing)]
    content = {"clientID": "c", "producerDataSet": producers, "consumerDataSet": consumers}
    return json.dumps(content, separators=(",", ":")).encode()


def checked(expression: str, kind: str) -> bytes:
    row = {"topic": "t", "subString": expression, "expressionType": kind}
    return json.dumps({"clientId": "c", "group": "g", "subscriptionData": row}).encode()


def queues() -> bytes:
    rows = [{"topic": "t", "brokerName": "metaq", "queueId": number} for number in range(MOST_QUEUES)]
    return json.dumps({"clientId": "c", "consumerGroup": "g", "mqSet": rows}).encode()


@cache
def registrations() -> tuple[bytes, ...]:
    """Return registrations of as many topics as there is room for, and one that is small until it is inflated."""
    topics = {f"{number}": TopicConfig(f"{number}", 1, 1, 6) for number in range(16_000)}
    plain = encode_registration(TopicConfigs(DataVersion(1, 1), topics))
    while len(plain) > REGISTRATION_BYTES:
        for name in list(topics)[-1000:]:
            del topics[name]
        plain = encode_registration(TopicConfigs(DataVersion(1, 1), topics))
    deflated = encode_registration(TopicConfigs(DataVersion(1, 1), topics), compressed=True)
    bare = b'{"topicConfigSerializeWrapper":{"topicConfigTable":{},"dataVersion":{"timestamp":1,"counter":1},"m":{%b}}}'
    mapped = bare % b",".join([b"1:1"] * ((256 << 10) // 4 - 100))  # what is read in Python
    return plain, deflated, mapped, zlib.compress(bytes(16 * REGISTRATION_BYTES))


def batches() -> tuple[bytes, ...]:
    most = encode_batch([BatchItem(0, b"", "")] * MOST)
    pairs = "".join(f"{number}\x01v\x02" for number in range(150))
    return (
        most,
        encode_batch([BatchItem(0, b"", "")]) * (BODY // 22),
        encode_batch([BatchItem(0, b"", pairs)] * MOST)[:BODY],
        encode_batch([BatchItem(0, b"x" * 900, "KEYS\x01k\x02")] * MOST),
    )


LEGAL: Final[Mapping[int, Callable[[], tuple[bytes, ...]]]] = {
    Request.HEART_BEAT: lambda: (
        heartbeat(0, 0, "", producing=MOST_GROUPS),
        heartbeat(MOST_GROUPS, MOST_SUBSCRIPTIONS // MOST_GROUPS, "*"),
        heartbeat(1, MOST_SUBSCRIPTIONS, tags(MAX_EXPRESSION_LENGTH // MOST_SUBSCRIPTIONS, 1)),
        heartbeat(1, MOST_SUBSCRIPTIONS, tags(MAX_EXPRESSION_LENGTH // MOST_SUBSCRIPTIONS, 1), same=True),
        heartbeat(1, 1, tags(MAX_EXPRESSION_LENGTH)),
        heartbeat(1, 2, "x" * (MAX_EXPRESSION_LENGTH // 2)),
    ),
    Request.CHECK_CLIENT_CONFIG: lambda: (
        checked(tags(MAX_EXPRESSION_LENGTH), "TAG"),
        checked(" OR ".join(["a=1"] * (MAX_LENGTH // 8)), "SQL92"),
        checked(" OR ".join(["a CONTAINS 'x'"] * MOST_SEARCHES), "SQL92"),
        checked("NOT " * (MAX_LENGTH // 4 - 2) + "a=1", "SQL92"),
        checked(f"a IN ({','.join(['1'.join(chr(39) * 2)] * (MAX_LENGTH // 4 - 4))})", "SQL92"),
    ),
    **dict.fromkeys((Request.LOCK_BATCH_MQ, Request.UNLOCK_BATCH_MQ), lambda: (queues(),)),
    **dict.fromkeys((Request.SEND_MESSAGE, Request.SEND_MESSAGE_V2, Request.SEND_BATCH_MESSAGE), batches),
    Request.REGISTER_BROKER: registrations,
}
"""Codes → the largest bodies that are taken."""

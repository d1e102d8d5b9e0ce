"""No request takes the loop for long: every code, with the largest bodies that it may have, in the worst shapes."""

import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import islice, product
from string import ascii_letters
from typing import Final

import pytest

from metaq.protocol.batch import MOST, BatchItem, encode_batch
from metaq.protocol.codes import COMPACT, JSON, Request
from metaq.protocol.heartbeats import MOST_GROUPS, MOST_QUEUES, MOST_SUBSCRIPTIONS
from metaq.protocol.properties import MOST_BYTES
from metaq.protocol.remoting import MAX_HEADER_BYTES, MOST_FIELDS
from metaq.protocol.routes import DataVersion, TopicConfig, TopicTable, encode_registration
from metaq.protocol.sql92 import MAX_LENGTH, MOST_SEARCHES
from metaq.protocol.subscription import MAX_EXPRESSION_LENGTH
from metaq.server.admission import ADMITTED, REGISTRATION_BYTES, TABLE_BYTES, admission
from tests.broker.test_access import FIELDS, TO_CLIENTS
from tests.support.broker import BrokerProcess
from tests.support.metrics import Values
from tests.support.remoting import RemotingClient

MOST_S: Final = "0.02"
"""Of the processor for one turn."""
TRIES: Final = 4
"""One of them must keep to that: the processor's time, too, is longer where others take its cache away."""
BODY: Final = 4 << 20
"""The largest body of a message by default."""
SETTINGS: Final = ("--failed-logins-per-minute", "1000", "--max-groups", "100000", "--max-topics", "100000")


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
    """Of as many topics as there is room for, and one that is small until it is inflated."""
    topics = {f"{number}": TopicConfig(f"{number}", 1, 1, 6) for number in range(16_000)}
    plain = encode_registration(TopicTable(DataVersion(1, 1), topics))
    while len(plain) > REGISTRATION_BYTES:
        for name in list(topics)[-1000:]:
            del topics[name]
        plain = encode_registration(TopicTable(DataVersion(1, 1), topics))
    deflated = encode_registration(TopicTable(DataVersion(1, 1), topics), compressed=True)
    return plain, deflated, zlib.compress(bytes(16 * REGISTRATION_BYTES))


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


def headers() -> Iterator[tuple[dict[str, str], int]]:
    """The longest ones, in both serializations."""
    pairs, wanted = "a\x01b\x02" * (MOST_BYTES // 4), tags(MAX_EXPRESSION_LENGTH, 1)
    name = "x" * (MAX_HEADER_BYTES // 2 - 4096)
    for serialization in (JSON, COMPACT):
        yield {**FIELDS, "maxMsgNums": "1024"}, serialization
        yield {**FIELDS, "i": pairs, "subscription": wanted}, serialization
        yield {**FIELDS, "properties": pairs}, serialization
        yield {**FIELDS, "expressionType": "SQL92", "subscription": "NOT " * (MAX_LENGTH // 4 - 2) + "a=1"}, serialization
        yield {**FIELDS, "m": "true", "batch": "true"}, serialization
        yield {**FIELDS, **{f"f{number}": "" for number in range(MOST_FIELDS - len(FIELDS))}}, serialization
        yield {**FIELDS, "topic": name, "b": name}, serialization


Frame = tuple[dict[str, str], bytes, int]
"""Fields, body and serialization of a request."""


class Loop:
    """A broker's loop, watched."""

    def __init__(self, broker: BrokerProcess) -> None:
        self._broker = broker

    def check(self, code: Request, frames: list[Frame]) -> None:
        """Ask all of this, which the loop should hardly notice; what it does is asked once more by itself."""
        if not self._stretches(code, frames):
            return
        for number, frame in enumerate(frames):
            if all(self._stretches(code, [frame]) for _ in range(TRIES)):
                fields, body, _ = frame
                shown = f"frame {number}: {str(fields)[:200]} {body[:60]!r} of {len(body)} bytes"
                raise AssertionError(f"{code.name}: a turn took longer than {MOST_S} s in each of {TRIES} tries of {shown}")

    def _stretches(self, code: Request, frames: list[Frame]) -> bool:
        """Whether a turn takes longer than it may. The end of a connection is looked at, too."""
        before = self._long_turns()
        for some in [[frame] for frame in frames] if code in LEGAL else [frames]:
            with RemotingClient(self._broker.host, self._broker.port) as client:
                for fields, body, serialization in some:
                    client.call(code, fields, body, serialization=serialization)
        return self._long_turns() > before

    def _long_turns(self) -> float:
        found = Values(self._broker)
        return found.get("metaq_turn_seconds_count") - found.get("metaq_turn_seconds_bucket", {"le": MOST_S})


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loop]:
    with BrokerProcess(tmp_path_factory.mktemp("turns") / "data", *SETTINGS) as broker:
        yield Loop(broker)


def test_every_code_says_what_it_needs() -> None:
    """E-05: who may ask it, and how long its body may be; without that no handler can be registered."""
    assert set(ADMITTED) | TO_CLIENTS == set(Request)
    with pytest.raises(LookupError, match="does not say who may ask 29999"):
        admission(29_999)


@pytest.mark.parametrize("code", sorted(ADMITTED))
def test_no_body_takes_the_loop_for_long(loop: Loop, code: int) -> None:
    """E-05: of no code, and neither does the end of the connection that sent it."""
    size = min(ADMITTED[code].most_bytes, BODY)
    bodies = (*LEGAL.get(code, tuple)(), *shapes(min(size, TABLE_BYTES)), bytes(size))
    frames = [({**FIELDS, "compressed": str(body[:1] == b"\x78").lower()}, body, JSON) for body in bodies]
    loop.check(Request(code), frames + [(fields, bodies[0], serialization) for fields, serialization in headers()])

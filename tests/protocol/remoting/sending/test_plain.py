"""Sends whose headers are known: they mean what they mean to the parser of all frames, however they are cut."""

import struct
from typing import Final

import orjson
from hypothesis import example, given, settings
from hypothesis import strategies as st

from metaq.protocol.remoting.codes import COMPACT, JSON, Request
from metaq.protocol.remoting.frames import FrameReader, RemotingCommand, encode_request
from metaq.protocol.remoting.leases.plainacks import PlainAcks
from metaq.protocol.remoting.requests import Received, RequestReader
from metaq.protocol.remoting.sending.plain import HEADS_KEPT, LONGEST_HEAD, KnownHeads, PlainSend, plain_send
from tests.support.wire import feed, feed_until_error, random_slices

JAVA: Final = (
    '{"code":310,"extFields":{"a":"group","b":"orders","c":"TBW102","d":"4","e":"%d","f":"0","g":"%s","h":"0","i":"%s",'
    '"j":"0","k":"false","m":"false"},"flag":0,"language":"JAVA","opaque":%s,"serializeTypeCurrentRPC":"JSON","version":413}'
)
"""As the Java client writes it."""
BORN: Final = 1_790_000_000_000
KEY: Final = r"UNIQ_KEY\u00010A\u0002"

BORNS: Final = st.sampled_from(
    ["1790000000000", "0", "01790000000001", " 1790000000000", "179000000000x", "9" * 19]
) | st.integers(BORN, BORN + 9).map(str)
OPAQUES: Final = st.sampled_from(["0", "-1", "007", "1.5", "1e3", "", "2147483647", "2147483648", "null"]) | st.integers(
    0, 1 << 31
).map(str)
TEXTS: Final = st.sampled_from(
    ["", KEY, r"a\u0001\"b\u0002", r"a\\", '"', "\\", "ü", r"\ud800", r'","i":"x', r"a\u0001\n"]
) | st.text(st.characters(codec="utf-8"), max_size=8)


def frame(header: bytes, body: bytes = b"", serialization: int = JSON) -> bytes:
    """Return a frame with any header."""
    return struct.pack(">iI", 4 + len(header) + len(body), serialization << 24 | len(header)) + header + body


def send(
    opaque: object = 1, *, born: object = BORN, text: str = KEY, queue: int = 0, body: bytes = b"", code: int = 310
) -> bytes:
    """Return a send as the Java client writes it; a batch has the code 320."""
    return frame((JAVA % (queue, born, text, opaque)).replace("310", str(code), 1).encode(), body)


def as_commands(received: list[Received]) -> list[RemotingCommand]:
    """Return requests in the form in which any are; there are no acks among them."""
    found: list[RemotingCommand] = []
    for each in received:
        assert not isinstance(each, PlainAcks)
        found.append(each.command() if isinstance(each, PlainSend) else each)
    return found


def test_a_header_that_comes_again_is_not_parsed() -> None:
    """The second send of each partition, of any client of the broker."""
    known: KnownHeads = {}
    readers = RequestReader(known), RequestReader(known)
    assert [type(each) for each in readers[0].receive(send(queue=0) + send(queue=1))] == [RemotingCommand] * 2
    for reader in readers:
        first, second = reader.receive(
            send(7, born=BORN + 1, body=b"first") + send(123_456_789, queue=1, text="", body=b"second")
        )
        assert isinstance(first, PlainSend)
        assert isinstance(second, PlainSend)
        assert (first.head.topic, first.head.queue, first.opaque, first.born_ms) == ("orders", "0", 7, BORN + 1)
        assert (first.properties, first.body) == ("UNIQ_KEY\x010A\x02", b"first")
        assert (second.head.queue, second.opaque, second.properties, second.body) == ("1", 123_456_789, "", b"second")


@st.composite
def sends(draw: st.DrawFn) -> bytes:
    """A send as the Java client writes it, with values that it may have or not, and perhaps one byte changed."""
    data = bytearray(
        send(
            draw(OPAQUES),
            born=draw(BORNS),
            text=draw(TEXTS),
            queue=draw(st.integers(0, 2)),
            body=draw(st.binary(max_size=9)),
            code=draw(st.sampled_from([310, 310, 320])),
        )
    )
    if draw(st.integers(0, 3)) == 0:
        data[draw(st.integers(8, len(data) - 1))] = draw(st.sampled_from(b'",:{}\\019 x\x00\xff'))
    return bytes(data)


@given(st.lists(sends(), max_size=8), st.integers(0, 1 << 32))
@example([send(), send("00")], 0)
@example([send(), frame((JAVA % (0, BORN, KEY, "")).encode())], 0)
@example([send(), frame((JAVA % (0, BORN, KEY, 1)).encode()[:60], (JAVA % (0, BORN, KEY, 1)).encode()[60:])], 0)
@settings(max_examples=300)
def test_it_means_what_it_means_to_the_parser(parts: list[bytes], seed: int) -> None:
    """The same requests and the same end of the stream as without known headers."""
    data = send() + send(queue=1) + send(code=320) + b"".join(parts)
    plain, reader = FrameReader(), RequestReader({})
    expected = plain.receive(data)
    found = feed_until_error(reader, random_slices(data, seed))
    assert as_commands(found) == [
        each._replace(fields={**each.fields, "g": str(int(each.fields["g"]))}) if isinstance(seen, PlainSend) else each
        for each, seen in zip(expected, found, strict=True)
    ]
    assert str(reader.error) == str(plain.error)


def test_other_sends_are_parsed() -> None:
    """Those of other clients, signed ones, and those that ask for more than to be stored."""
    fields = orjson.loads(JAVA % (0, BORN, KEY, 1))["extFields"]
    others = {
        "another request": encode_request(Request.SEND_MESSAGE, 1, fields),
        "compact": encode_request(Request.SEND_MESSAGE_V2, 1, fields, serialization=COMPACT),
        "signed": encode_request(Request.SEND_MESSAGE_V2, 1, {**fields, "AccessKey": "me"}),
        "a batch": encode_request(Request.SEND_MESSAGE_V2, 1, {**fields, "m": "true"}),
        "a retry": encode_request(Request.SEND_MESSAGE_V2, 1, {**fields, "j": "3"}),
        "a half message": encode_request(Request.SEND_MESSAGE_V2, 1, {**fields, "f": "4"}),
        "a large flag": encode_request(Request.SEND_MESSAGE_V2, 1, {**fields, "h": str(1 << 31)}),
        "opaque before": frame(b'{"opaque":1,' + (JAVA % (0, BORN, KEY, 1)).replace('"opaque":1,', "").encode()[1:]),
    }
    for name, data in others.items():
        known: KnownHeads = {}
        reader = RequestReader(known)
        assert [type(each) for each in feed(reader.receive, [data, data])] == [RemotingCommand] * 2, name
        assert not known, name


def test_a_request_is_a_plain_send_or_not() -> None:
    """As which it can be stored, in any form of its header."""
    fields = orjson.loads(JAVA % (0, BORN, KEY, 1))["extFields"]
    for serialization in (JSON, COMPACT):
        (request,) = FrameReader().receive(encode_request(310, 5, fields, b"body", serialization=serialization))
        found = plain_send(request)
        assert found is not None
        assert found.command() == request
        assert plain_send(request._replace(fields={**fields, "m": "true"})) is None
        batch = plain_send(request._replace(code=Request.SEND_BATCH_MESSAGE, fields={**fields, "m": "true"}))
        assert batch is not None
        assert (batch.head.is_batch, found.head.is_batch, batch.code) == (True, False, Request.SEND_BATCH_MESSAGE)
        assert plain_send(request._replace(fields={**fields, "g": "soon"})) is None
        assert plain_send(request._replace(fields={})) is None


def test_what_is_known_is_bounded() -> None:
    known: KnownHeads = {}
    reader = RequestReader(known)
    for queue in range(HEADS_KEPT + 10):
        reader.receive(send(queue=queue))
    assert 0 < len(known) <= HEADS_KEPT
    kept = len(known)
    long = frame((JAVA % (0, BORN, KEY, 1)).replace('"group"', f'"{"g" * LONGEST_HEAD}"').encode())
    assert [type(each) for each in reader.receive(long + long)] == [RemotingCommand] * 2
    assert len(known) == kept

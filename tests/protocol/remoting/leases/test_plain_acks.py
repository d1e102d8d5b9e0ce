"""Acks whose header is known: they mean what they mean to the parser of all frames, however they are cut."""

from typing import Final

import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from metaq.protocol.remoting.codes import VERSION, Request
from metaq.protocol.remoting.frames import FrameReader, RemotingCommand, encode_bare, encode_done, encode_request
from metaq.protocol.remoting.leases.plainacks import LONGEST_ACK, PlainAcks, plain_ack
from metaq.protocol.remoting.requests import Received, RequestReader
from tests.protocol.remoting.sending.test_plain import frame, send
from tests.support.wire import feed, feed_until_error, random_slices

JAVA: Final = (
    '{"code":200051,"extFields":{"queueId":"0","extraInfo":"40 1790000000000 60000 4711 0 broker-a 0 %s","offset":"%s",'
    '"consumerGroup":"billing","topic":"orders"},"flag":0,"language":"JAVA","opaque":%s,"serializeTypeCurrentRPC":"JSON",'
    '"version":413}'
)
"""As the Java client writes it."""
GO: Final = (
    '{"code":200051,"language":"GO","version":317,"opaque":%s,"flag":0,"remark":"","extFields":{"consumerGroup":"billing",'
    '"offset":"%s","topic":"orders","queueId":"0","extraInfo":"40 1790000000000 60000 4711 0 broker-a 0 %s"}}'
)
"""As the Go client writes it: the opaque first, and the two others in the other order."""

OFFSETS: Final = st.sampled_from(["0", "-1", "007", "", "9" * 18, "1" + "0" * 18, "12 34", '5","x":"5']) | st.integers(
    41, 45
).map(str)
OPAQUES: Final = st.sampled_from(["0", "-1", "007", "1.5", "1e3", "", "2147483647", "2147483648", "null"]) | st.integers(
    1, 1 << 31
).map(str)


def ack(offset: object, opaque: object = 1, *, info: object = None, body: bytes = b"") -> bytes:
    """Return an ack as the Java client writes it."""
    return frame((JAVA % (offset if info is None else info, offset, opaque)).encode(), body)


def as_commands(received: list[Received]) -> list[RemotingCommand]:
    """Return requests as they come one by one."""
    found: list[RemotingCommand] = []
    for each in received:
        if isinstance(each, PlainAcks):
            found += each.commands()
        else:
            assert isinstance(each, RemotingCommand)
            found.append(each)
    return found


@pytest.mark.parametrize("form", [JAVA, GO])
def test_acks_of_one_pop_are_one_request(form: str) -> None:
    """In whatever order a client writes the three numbers; the next bytes begin another one."""
    headers = [
        form % ((offset, offset, 7 * offset) if form == JAVA else (7 * offset, offset, offset))
        for offset in (41, 40, 1234567, 9)
    ]
    frames = [frame(header.encode()) for header in headers]
    reader = RequestReader({})
    (run,) = reader.receive(b"".join(frames))
    assert isinstance(run, PlainAcks)
    assert (run.code, run.flag) == (Request.ACK_MESSAGE, 0)
    assert (run.offsets, run.opaques) == ([41, 40, 1234567, 9], [287, 280, 8641969, 63])
    (more,) = reader.receive(frames[2])
    assert isinstance(more, PlainAcks)
    assert (more.offsets, more.opaques) == ([1234567], [8641969])
    assert as_commands([run, more]) == feed(FrameReader().receive, [*frames, frames[2]])


def test_other_requests_end_the_run() -> None:
    """Those of another pop, and those that are no acks; the headers after them are compared all the same."""
    reader = RequestReader({})
    other = ack(50).replace(b'"40 ', b'"50 ')
    pop = encode_request(Request.POP_MESSAGE, 5, {"topic": "orders"})
    data = [ack(41), ack(42), pop, ack(43), send(), ack(44), ack(45, body=b"x"), other, ack(46)]
    runs = [each.offsets if isinstance(each, PlainAcks) else each.code for each in reader.receive(b"".join(data))]
    assert runs == [[41, 42], Request.POP_MESSAGE, [43], Request.SEND_MESSAGE_V2, [44], Request.ACK_MESSAGE, [50], [46]]


@st.composite
def acks(draw: st.DrawFn) -> bytes:
    """An ack as the Java client writes it, with numbers that it may have or not, and perhaps one byte changed."""
    offset = draw(OFFSETS)
    info = draw(st.sampled_from([None, None, None, "41", f"{offset} 5", f"5{offset}"]))
    data = bytearray(ack(offset, draw(OPAQUES), info=info, body=draw(st.sampled_from([b"", b"", b"", b"1"]))))
    if draw(st.integers(0, 3)) == 0:
        data[draw(st.integers(8, len(data) - 1))] = draw(st.sampled_from(b'",:{}\\019 x\x00\xff'))
    return bytes(data)


@given(st.lists(acks(), max_size=8), st.integers(0, 1 << 32))
@example([ack(41), ack("042")], 0)
@example([ack(41), ack(42, "007")], 0)
@example([ack(41), ack(42, info=41)], 0)
@example([ack(41), frame((JAVA % (42, 42, 1)).encode()[:90], (JAVA % (42, 42, 1)).encode()[90:])], 0)
@example([frame((JAVA % (41, 41, 1)).replace('"topic"', '"offset":"41","topic"').encode()), ack(42)], 0)
@example([frame((JAVA % (41, 41, 1)).replace('"topic"', r'"\u006fffset":"41","topic"').encode())] * 2, 0)
@settings(max_examples=300)
def test_they_mean_what_they_mean_to_the_parser(parts: list[bytes], seed: int) -> None:
    """The same requests and the same end of the stream as without a known header."""
    data = ack(40) + b"".join(parts)
    plain, reader = FrameReader(), RequestReader({})
    expected = plain.receive(data)
    found = feed_until_error(reader, random_slices(data, seed))
    assert as_commands(found) == expected
    assert str(reader.error) == str(plain.error)


@pytest.mark.parametrize("name", ["offset", "extraInfo", "opaque"])
@pytest.mark.parametrize("written", ["{}", r"\u00{:02x}"])
def test_a_header_that_names_a_number_twice_is_not_compared(name: str, written: str) -> None:
    """The last one counts, and it stays as it is where the first one differs."""
    other = written.format(name) if written == "{}" else written.format(ord(name[0])) + name[1:]
    value = {"offset": '"41"', "extraInfo": '"40 1790000000000 60000 4711 0 broker-a 0 41"', "opaque": "1"}[name]
    headers = []
    for offset in (41, 42):
        header = JAVA % (offset, offset, offset)
        twice = header.replace('"version"', f'"{other}":{value},"version"')
        headers.append(twice if name == "opaque" else header.replace('"topic"', f'"{other}":{value},"topic"'))
    data = b"".join(frame(each.encode()) for each in headers)
    assert as_commands(RequestReader({}).receive(data)) == FrameReader().receive(data)


def test_other_acks_are_parsed() -> None:
    """Signed ones, and those whose header is long."""
    fields = orjson.loads(JAVA % (41, 41, 1))["extFields"]
    others = {
        "signed": encode_request(Request.ACK_MESSAGE, 1, {**fields, "Signature": "x"}),
        "long": encode_request(Request.ACK_MESSAGE, 1, {**fields, "more": "x" * LONGEST_ACK}),
        "an answer": encode_request(Request.ACK_MESSAGE, 1, fields).replace(b'"flag":0', b'"flag":1'),
        "a receipt with a log offset": encode_request(
            Request.ACK_MESSAGE, 1, {**fields, "extraInfo": f"{fields['extraInfo']} 7"}
        ),
    }
    for name, data in others.items():
        found = RequestReader({}).receive(data + data)
        assert len(found) == 2, name
        assert as_commands(found) == FrameReader().receive(data + data), name


def test_a_request_is_a_plain_ack_or_not() -> None:
    """Its receipt ends with its offset."""
    fields = orjson.loads(JAVA % (41, 41, 1))["extFields"]
    (request,) = FrameReader().receive(encode_request(Request.ACK_MESSAGE, 5, fields))
    found = plain_ack(request)
    assert found == (request, [41], [5])
    assert found.commands() == [request]
    assert plain_ack(request._replace(fields={**fields, "offset": "42"})) is None
    assert plain_ack(request._replace(fields={**fields, "offset": "1"})) is None
    assert plain_ack(request._replace(flag=1)) is None
    assert plain_ack(request._replace(body=b"x")) is None
    assert plain_ack(request._replace(code=310)) is None
    assert plain_ack(request._replace(fields={})) is None


def test_answers_in_one_piece_are_those_of_each() -> None:
    """Whatever the length of the opaque."""
    opaques = [1, 0, 4711, -1, (1 << 31) - 1, -(1 << 31)]
    assert encode_done(opaques) == b"".join(encode_bare(0, each) for each in opaques)
    assert encode_done([]) == b""
    golden = b'{"code":0,"flag":1,"language":"JAVA","opaque":4711,"serializeTypeCurrentRPC":"JSON","version":%d}' % VERSION
    assert encode_done([4711]) == frame(golden)

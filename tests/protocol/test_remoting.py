"""Frames of the remoting protocol: round trips in both serializations, and refused frames."""

import struct
import tracemalloc
from typing import Final

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from metaq.dedupe.records import id_in
from metaq.errors import BadRequest
from metaq.protocol import properties
from metaq.protocol.keys import keys_of
from metaq.protocol.record import decode_properties
from metaq.protocol.remoting.codes import COMPACT, JSON, LANGUAGES, ONEWAY_FLAG, RESPONSE_FLAG, VERSION
from metaq.protocol.remoting.frames import MAX_FRAME_BYTES, FrameReader, RemotingCommand, encode_request, encode_response
from tests.support.wire import feed, random_slices

INT16: Final = st.integers(-(1 << 15), (1 << 15) - 1)
INT32: Final = st.integers(-(1 << 31), (1 << 31) - 1)
TEXT: Final = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
"""Without lone surrogates, which neither form can carry."""
FIELDS: Final = st.dictionaries(TEXT.filter(bool), TEXT.filter(bool), max_size=8)
BODIES: Final = st.binary(max_size=200)
SERIALIZATIONS: Final = st.sampled_from((JSON, COMPACT))


@st.composite
def requests(draw: st.DrawFn) -> tuple[RemotingCommand, bytes]:
    """A request and its bytes."""
    code, opaque, fields, body = draw(INT16), draw(INT32), draw(FIELDS), draw(BODIES)
    language, oneway, serialization = draw(st.sampled_from(LANGUAGES)), draw(st.booleans()), draw(SERIALIZATIONS)
    flag = ONEWAY_FLAG if oneway else 0
    request = RemotingCommand(
        code=code,
        opaque=opaque,
        flag=flag,
        fields=fields,
        body=body,
        remark=None,
        language=language,
        version=VERSION,
        serialization=serialization,
    )
    return request, encode_request(code, opaque, fields, body, oneway=oneway, language=language, serialization=serialization)


@given(st.lists(requests(), max_size=5), st.integers(0, 1 << 32))
def test_requests_come_as_they_were_written(sent: list[tuple[RemotingCommand, bytes]], seed: int) -> None:
    """SG-093, SG-095, SG-096, SG-097, RD-020, RD-021: several behind each other, however they are cut."""
    reader = FrameReader()
    data = b"".join(data for _, data in sent)
    assert feed(reader.receive, random_slices(data, seed)) == [request for request, _ in sent]
    assert reader.error is None


@given(requests(), INT16, st.none() | FIELDS, st.none() | TEXT, BODIES)
def test_responses_come_as_they_were_written(
    sent: tuple[RemotingCommand, bytes], code: int, fields: dict[str, str] | None, remark: str | None, body: bytes
) -> None:
    """SG-096: with the request's opaque and in its serialization; an absent remark and an empty one are the same."""
    request, _ = sent
    (response,) = FrameReader().receive(encode_response(request, code, fields, remark, len(body)) + body)
    assert response._replace(remark=response.remark or None) == RemotingCommand(
        code=code,
        opaque=request.opaque,
        flag=RESPONSE_FLAG,
        fields=fields or {},
        body=body,
        remark=remark or None,
        language="JAVA",
        version=VERSION,
        serialization=request.serialization,
    )


@pytest.mark.parametrize("opaque", [1 << 31, -(1 << 31) - 1])
def test_an_opaque_has_32_bits(opaque: int) -> None:
    """SG-097."""
    with pytest.raises(BadRequest):
        encode_request(10, opaque)


# -- garbage ----------------------------------------------------------------------------------------------------------

HEADS: Final = st.builds(struct.Struct(">iI").pack, INT32, st.integers(0, (1 << 32) - 1))
SMALL_HEADS: Final = st.builds(
    lambda length, kind, header: struct.pack(">iI", length, kind << 24 | header),
    st.integers(0, 64),
    st.integers(0, 2),
    st.integers(0, 64),
)


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """Requests with some bytes changed, lost or added."""
    data = bytearray(b"".join(data for _, data in draw(st.lists(requests(), min_size=1, max_size=3))))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        data[at : at + draw(st.integers(0, 4))] = draw(st.binary(max_size=4))
    return bytes(data)


def framed(header: bytes) -> bytes:
    """Return a frame with a JSON header, and without a body."""
    return struct.pack(">iI", 4 + len(header), len(header)) + header


GARBAGE: Final = st.binary(max_size=300) | st.lists(HEADS | SMALL_HEADS | BODIES, max_size=6).map(b"".join) | mutated()


@given(GARBAGE, st.integers(0, 1 << 32))
@example(b"\x00\x00\x00\x08\x00\x00\x00\x04" + b"null", 0)
@example(b"\x00\x00\x00\x06\x00\x00\x00\x02" + b"[]", 0)
@example(b"\x00\x00\x00\x28\x00\x00\x00\x24" + b'{"code":1,"opaque":2,"extFields":[]}', 0)
@example(b"\x00\x00\x00\x2b\x00\x00\x00\x27" + b'{"code":1,"opaque":2,"extFields":[3,4]}', 0)
@example(b"\x00\x00\x00\x24\x00\x00\x00\x20" + b'{"code":1,"opaque":2,"remark":0}', 0)
@example(framed(b'{"code":1,"opaque":2,"remark":' + b"[" * 1000 + b"]" * 1000 + b"}"), 0)
@settings(max_examples=500)
def test_garbage_is_read_or_ends_the_stream(data: bytes, seed: int) -> None:
    """SG-096: never another exception; the same frames and the same end however it is cut; nothing behind the end."""
    whole = FrameReader()
    frames = whole.receive(data)
    sliced = FrameReader()
    found = []
    for piece in random_slices(data, seed):
        found += sliced.receive(piece)
        if sliced.error is not None:
            break
    assert found == frames
    assert str(sliced.error) == str(whole.error)
    for frame in frames:
        assert all(type(name) is str and type(value) is str for name, value in frame.fields.items())
        assert isinstance(frame.remark, str | None)
        assert -(1 << 31) <= frame.code < 1 << 31


@given(st.integers(MAX_FRAME_BYTES + 1, (1 << 31) - 1) | st.integers(-(1 << 31), 3), st.integers(0, (1 << 32) - 1))
def test_a_frame_that_is_too_large_is_not_waited_for(length: int, header: int) -> None:
    """SG-096: the first eight bytes are enough."""
    reader = FrameReader()
    assert reader.receive(struct.pack(">iI", length, header)) == []
    assert reader.error is not None


def test_what_is_kept_of_an_incomplete_frame_is_bounded() -> None:
    """SG-096: no more than the frame's own size, however small its pieces are."""
    size = 4 * 1024 * 1024
    reader = FrameReader()
    reader.receive(struct.pack(">iI", size, 0))
    piece = bytes(1000)
    tracemalloc.start()
    try:
        for _ in range(size // len(piece) - 10):
            assert reader.receive(piece) == []
        assert tracemalloc.get_traced_memory()[1] < 2.5 * size
    finally:
        tracemalloc.stop()


NAMES: Final = [
    "UNIQ_KEY",
    "KEYS",
    "TAGS",
    "WAIT",
    "DELAY",
    "DEDUPE_ID",
    "METAQ_WRITE",
    "traceparent",
    "TIMER_DEQUEUE_MS",
    "a",
    "MYKEYS",
    "XUNIQ_KEY",
    "",
]
PIECES = st.lists(
    st.one_of(
        st.tuples(
            st.sampled_from(NAMES),
            st.sampled_from(["true", "x", "k1 k2", " ", "", "7F01", "a\x01b", "ü", "KEYS", "UNIQ_KEY", "k  k"]),
        ).map("\x01".join),
        st.sampled_from(["", "junk"]),
    ),
    max_size=6,
)


@given(PIECES, st.sampled_from(["", "\x02"]))
def test_properties_of_a_known_shape_are_kept_like_all_others(pieces: list[str], end: str) -> None:
    """SG-132: the short way, which cuts two values out and in, and the pairs themselves say the same."""
    text = "\x02".join(pieces) + end
    for _ in range(3):  # looked into, then remembered, then known
        kept = properties.as_sent(text)
        if kept is not None:
            data, tag, keys, ident = kept
            assert ident in (None, id_in(text))
            pairs = decode_properties(data)
            assert {**decode_properties(text.encode()), "WAIT": ""} == {**pairs, "WAIT": ""}
            assert tag == (pairs.get("TAGS") or None)
            assert tuple(dict.fromkeys(keys)) == keys_of("t", 0, data)


@pytest.mark.parametrize("names", [["DEDUPE_ID"], ["traceparent"], ["DEDUPE_ID", "traceparent"]])
def test_what_differs_in_each_message_is_no_part_of_their_shape(names: list[str]) -> None:
    """The shape that is learned from one of them holds for all."""

    def kept(number: int) -> object:
        ids = "".join(f"{name}\x01id{number}\x02" for name in names)
        found = properties.as_sent(f"UNIQ_KEY\x01key{number}\x02WAIT\x01true\x02{ids}")
        assert found is not None
        assert found[:3] == (f"UNIQ_KEY\x01key{number}\x02{ids}".encode(), None, (f"key{number}",))
        return found[3]

    for _ in range(2):
        kept(0)
    known, met = dict(properties._shapes), set(properties._met)
    assert kept(1) == ("id1" if "DEDUPE_ID" in names else "key1")
    assert (properties._shapes, properties._met) == (known, met)


def test_rows_of_a_spark_write_have_one_shape() -> None:
    """Their METAQ_WRITE is another in each row, and they have KEYS but no UNIQ_KEY."""

    def kept(row: int, keys: str) -> object:
        return properties.as_sent(f"KEYS\x01{keys}\x02TAGS\x01t\x02METAQ_WRITE\x016f1c/0/3/{row}/8a05\x02")

    met = set(properties._met)
    for row in range(2):
        assert kept(row, "k") == (b"KEYS\x01k\x02TAGS\x01t\x02METAQ_WRITE\x016f1c/0/3/%d/8a05\x02" % row, "t", ("k",), None)
    known = dict(properties._shapes)
    assert any("TAGS\x01t" in rest for rest, _ in known)
    assert kept(2, "k2 k3 k2") == (
        b"KEYS\x01k2 k3 k2\x02TAGS\x01t\x02METAQ_WRITE\x016f1c/0/3/2/8a05\x02",
        "t",
        ("k2", "k3"),
        None,
    )
    assert properties._shapes == known
    assert not any("METAQ_WRITE" in rest for rest in properties._met - met)
    alone = properties.as_sent("METAQ_WRITE\x016f1c/0/3/4/8a05\x02")
    assert alone == (b"METAQ_WRITE\x016f1c/0/3/4/8a05\x02", None, (), None)


def test_a_shape_is_learned_when_it_comes_again() -> None:
    """What differs in each message in another property would only drive out the shapes that others have."""

    def learned(number: int) -> bool:
        properties.as_sent(f"UNIQ_KEY\x01key\x02place\x01{number:032x}\x02")
        return any("place" in rest for rest, _ in properties._shapes)

    assert not any(learned(number) for number in range(1000))
    assert learned(999)

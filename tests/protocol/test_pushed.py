"""Message frames: bytes, meaning, and how they stand between replies."""

import dataclasses
import zlib
from collections.abc import Mapping
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.checksum import body_crc
from metaq.errors import StreamLost
from metaq.message import LogOffset
from metaq.protocol.properties import NONE, PRIORITY, SHARDING_KEY
from metaq.protocol.record import TAGS, encode_properties
from metaq.protocol.text.ids import DIGITS, MessageId
from metaq.protocol.text.messages import Stored, join_attribute, split_attribute
from metaq.protocol.text.pushed import MOST_COPIED, Push, Pushed, PushedHead, encode_pushed, read_pushed_line
from metaq.protocol.text.replies import VALUE, Reply, TextReader, write_result, write_value_head
from metaq.protocol.text.tokens import INT32, INT64, OPAQUE
from tests.support.talk import ReplyReader
from tests.support.wire import feed, random_slices, slicings, stored_record

ID: Final = MessageId(0, 17, "4q9zk2")
PUSH: Final = Push("1", ID, "orders", 425, 1, with_crc=False)
HEAD: Final = PushedHead(5, 1, ID, "orders", 0, 425, 1, 0, None, None, None)
PLAIN: Final = b"message 5 1 0-17-4q9zk2 orders 0 425 1 0\r\nhello"


def written(push: Push, stored: Stored) -> bytes:
    out: list[bytes | memoryview] = []
    size = encode_pushed(push, stored, out)
    data = b"".join(out)
    assert size == len(data)
    return data


def record(body: bytes, pairs: Mapping[str, str] = NONE, flag: int = 0) -> Stored:
    """A record with the properties that ``pairs`` name in short."""
    named = {"tag": TAGS, "priority": PRIORITY, "key": SHARDING_KEY}
    properties = encode_properties([(named[name], value) for name, value in pairs.items()])
    data = stored_record("orders", body, zlib.crc32(body) & 0x7FFFFFFF, flag=flag, properties=properties)
    return Stored(memoryview(data), 0, len(data), LogOffset(0))


GOLDEN: Final[list[tuple[Push, Stored, bytes, Pushed]]] = [
    (PUSH, record(b"hello"), PLAIN, Pushed(HEAD, b"hello")),
    (
        PUSH._replace(opaque="-7", attempt=3, position=0, with_crc=True),
        record(b"", flag=6),
        b"message 0 -7 0-17-4q9zk2 orders 0 0 3 6 crc=0\r\n",
        Pushed(HEAD._replace(length=0, opaque=-7, attempt=3, position=0, flag=6, crc=0), b""),
    ),
    (
        PUSH._replace(with_crc=True),
        record(b"hello", {"tag": "red", "priority": "7", "key": "é"}),
        b"message 12 1 0-17-4q9zk2 orders 0 425 1 1 priority=7 key=\xc3\xa9 crc=%d\r\n\0\0\0\3redhello"
        % body_crc(b"\0\0\0\3redhello"),
        Pushed(
            HEAD._replace(length=12, flag=1, priority=7, key="é", crc=body_crc(b"\0\0\0\3redhello")),
            b"\0\0\0\3redhello",
        ),
    ),
]


@pytest.mark.parametrize(("push", "stored", "data", "pushed"), GOLDEN, ids=["plain", "empty", "all"])
def test_a_frame_and_what_it_means(push: Push, stored: Stored, data: bytes, pushed: Pushed) -> None:
    """MY-020, MY-022: written so, and read so between replies, in any slices."""
    assert written(push, stored) == data
    stream = write_result(200, "1", "2") + data + data + write_value_head(3, "4") + b"abc" + data
    expected = [Reply(200, 2, b"1"), pushed, pushed, Reply(VALUE, 4, b"abc"), pushed]
    for name, pieces in slicings(stream, 1):
        assert feed(TextReader().receive, pieces) == expected, name


def test_a_long_body_is_not_copied() -> None:
    body = bytes(MOST_COPIED + 1)
    for pairs in (NONE, {"tag": "red"}):
        out: list[bytes | memoryview] = []
        encode_pushed(PUSH, record(body, pairs), out)
        assert isinstance(out[-1], memoryview)
        assert bytes(out[-1]) == body


@given(st.binary(max_size=40), st.dictionaries(st.sampled_from(["tag", "priority", "key"]), st.sampled_from(["7", "TAGS"])))
def test_frames_tell_of_properties_wherever_their_names_stand(body: bytes, pairs: dict[str, str]) -> None:
    """Names in the body mean nothing."""
    body = b"TAGS\x01PRIORITY\x01__SHARDINGKEY\x01" + body
    data = written(PUSH, record(body, pairs))
    line, _, rest = data.partition(b"\r\n")
    head = read_pushed_line(line)
    tag = pairs.get("tag")
    assert rest == (b"" if tag is None else len(tag).to_bytes(4) + tag.encode()) + body
    priority = 7 if pairs.get("priority") == "7" else None
    assert (head.priority, head.key, head.flag) == (priority, pairs.get("key"), int(tag is not None))


@pytest.mark.parametrize(
    "pairs", [{"key": "two words"}, {"key": "a\r\nquit"}, {"key": "k" * 256}, {"priority": "high"}, {"priority": "-1"}]
)
def test_properties_that_a_line_cannot_carry_stay_out_of_it(pairs: dict[str, str]) -> None:
    """Senders of the remoting protocol may set any: the message still arrives, and the stream stays in step."""
    assert written(PUSH, record(b"hello", pairs)) == PLAIN


def test_words_that_a_reader_does_not_know_are_skipped() -> None:
    data = PLAIN.replace(b" 0\r\n", b" 0 first=99 new priority=2 more=a=b \r\n")
    assert TextReader().receive(data) == [Pushed(HEAD._replace(priority=2), b"hello")]


def test_the_body_is_that_of_a_put() -> None:
    """Attribute and payload come out of it as they went into a put."""
    flag, body = join_attribute("red", b"hello")
    (frame,) = TextReader().receive(written(PUSH, record(b"hello", {"tag": "red"})))
    assert isinstance(frame, Pushed)
    assert (frame.head.flag, frame.body) == (flag, body)
    assert split_attribute(frame.head.flag, frame.body) == ("red", b"hello")


def test_a_client_that_never_subscribes_is_sent_none() -> None:
    """It cannot say what such a message is for, so the stream is lost."""
    with pytest.raises(StreamLost, match="0-17-4q9zk2 was pushed, though nothing is subscribed"):
        ReplyReader().receive(PLAIN)


WRONG: Final = {
    "a negative length": (b"message 5 ", b"message -5 "),
    "a length above the limit": (b"message 5 ", b"message 99999 "),
    "an ID that is none": (b"0-17-4q9zk2", b"0-17-"),
    "an ID without end": (b"0-17-4q9zk2", b"0-17-4q9zk2aaa"),
    "a position that is too great": (b" 425 ", b" 9999999999999999999 "),
    "no attempt": (b" 425 1 0", b" 425 0 0"),
    "a flag of more than 32 bits": (b" 425 1 0", b" 425 1 4294967296"),
    "a missing word": (b" 425 1 0", b" 425 1"),
    "a priority that is no number": (b" 1 0\r", b" 1 0 priority=high\r"),
    "a key that is no UTF-8": (b" 1 0\r", b" 1 0 key=\xff\r"),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_line_that_is_none_loses_the_stream(wrong: tuple[bytes, bytes]) -> None:
    data = PLAIN.replace(*wrong)
    assert data != PLAIN
    with pytest.raises(StreamLost):
        TextReader(max_body_bytes=1000).receive(data)


# -- drawn ------------------------------------------------------------------------------------------------------------

words = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters=" \xa0"), min_size=1, max_size=60)
ids = st.builds(MessageId, st.integers(0, 1023), st.integers(0, INT64[1]), st.text(DIGITS, min_size=1, max_size=8))


@dataclasses.dataclass(frozen=True)
class Drawn:
    data: bytes
    frame: Reply | Pushed


@st.composite
def pushed_frames(draw: st.DrawFn) -> Drawn:
    one, opaque, with_crc = draw(ids), draw(st.integers(*OPAQUE)), draw(st.booleans())
    position, attempt = draw(st.integers(0, INT64[1])), draw(st.integers(1, INT32[1]))
    body, flag = draw(st.binary(max_size=60)), draw(st.integers(*INT32))
    pairs: dict[str, Any] = {"tag": draw(st.none() | words), "key": draw(st.none() | words)}
    priority = draw(st.none() | st.integers(0, INT32[1]))
    pairs["priority"] = None if priority is None else str(priority)
    stored = record(body, {name: value for name, value in pairs.items() if value is not None}, flag & ~1)
    bit, text_body = join_attribute(pairs["tag"], body)
    head = PushedHead(
        length=len(text_body),
        opaque=opaque,
        id=one,
        topic="orders",
        partition=one.partition,
        position=position,
        attempt=attempt,
        flag=flag & ~1 | bit,
        priority=priority,
        key=pairs["key"],
        crc=body_crc(text_body) if with_crc else None,
    )
    data = written(Push(str(opaque), one, "orders", position, attempt, with_crc), stored)
    return Drawn(data, Pushed(head, text_body))


replies = st.tuples(st.binary(max_size=60), st.integers(*OPAQUE)).map(
    lambda t: Drawn(write_value_head(len(t[0]), str(t[1])) + t[0], Reply(VALUE, t[1], t[0]))
)


@given(st.lists(pushed_frames() | replies, max_size=8), st.integers(0, 1 << 32))
def test_frames_written_are_read_back(drawn: list[Drawn], seed: int) -> None:
    """MY-020, MY-022, MY-028: with the replies between them, in their order."""
    data = b"".join(one.data for one in drawn)
    expected = [one.frame for one in drawn]
    assert feed(TextReader().receive, random_slices(data, seed)) == expected


@given(st.binary(max_size=200), st.integers(0, 60), st.integers(0, 1 << 32))
def test_garbage_raises_nothing_but_a_lost_stream(noise: bytes, at: int, seed: int) -> None:
    reader = TextReader()
    try:
        for piece in random_slices(PLAIN[:at] + noise + PLAIN[at:], seed):
            reader.receive(piece)
    except StreamLost as error:
        assert str(error)

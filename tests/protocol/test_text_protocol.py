"""The text protocol under drawn input: all that is written is read back, and no input does harm."""

import random
import re
import tracemalloc
from typing import Final

from hypothesis import given
from hypothesis import strategies as st

from metaq.checksum import body_crc
from metaq.errors import BadRequest, StreamLost
from metaq.protocol.text.codec import CommandReader, PutHead, TextLimits
from metaq.protocol.text.commands import (
    NO_CHECKSUM,
    NO_OPAQUE,
    Auth,
    Command,
    Create,
    Get,
    Help,
    Invalid,
    Offset,
    Put,
    Quit,
    Stats,
    Sync,
    Transaction,
    Version,
)
from metaq.protocol.text.lines import TRANSACTION_TYPES
from metaq.protocol.text.replies import VALUE, Reply, write_result, write_value_head
from metaq.protocol.text.tokens import INT32, INT64, OPAQUE, is_option
from metaq.protocol.text.writing import write_get, write_line, write_offset, write_put
from tests.support.talk import ReplyReader
from tests.support.wire import comparable, feed, random_slices

Frame = tuple[bytes, list[Command]]
"""Bytes, and the commands that they are."""

LIMITS: Final = TextLimits(max_line_bytes=256, max_body_bytes=64)
WORDS: Final = ["put", "get", "offset", "stats", "version", "help", "quit", "create", "auth", "transaction", "sync"]
ODD_TOKENS: Final = ["", "0", "-1", "+1", "1_0", "9" * 30, "²", "wait=", "wait=5", "\n", "\r", "\t", "TX:S1:1", "BEGIN"]

int32 = st.integers(*INT32)
opaques = st.integers(*OPAQUE)
names = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=20)
keys = names.filter(lambda key: not (key[0].isdigit() or key[0] == "-" or is_option(key)))
bodies = st.binary(max_size=LIMITS.max_body_bytes) | st.sampled_from([b"", b"\r\n", b"\r\nquit\r\n", b"put t 0 1 0 1\r\n"])
seeds = st.integers(0, 1 << 32)


@st.composite
def put_frames(draw: st.DrawFn) -> Frame:
    topic, partition, flag, body, opaque = draw(st.tuples(names, int32, int32, bodies, opaques))
    key = draw(st.none() | keys)
    old = draw(st.booleans())
    checksum = NO_CHECKSUM if old else body_crc(body)
    frame = write_put(topic, partition, flag, body, opaque, transaction=key, old=old)
    return frame, [Put(topic, partition, flag, checksum, key, str(opaque), body)]


@st.composite
def get_frames(draw: st.DrawFn) -> Frame:
    topic, group, partition = draw(st.tuples(names, names, int32))
    position, max_size, opaque, wait_ms = draw(st.tuples(st.integers(*INT64), int32, opaques, st.integers(0, INT32[1])))
    frame = write_get(topic, group, partition, position, max_size, opaque, wait_ms)
    return frame, [Get(topic, group, partition, position, max_size, str(opaque), wait_ms)]


@st.composite
def offset_frames(draw: st.DrawFn) -> Frame:
    topic, group, partition, position, opaque = draw(st.tuples(names, names, int32, st.integers(*INT64), opaques))
    return write_offset(topic, group, partition, position, opaque), [Offset(topic, group, partition, position, str(opaque))]


@st.composite
def transaction_frames(draw: st.DrawFn) -> Frame:
    key, session, kind, opaque = draw(st.tuples(names, names, st.sampled_from(sorted(TRANSACTION_TYPES)), opaques))
    timeout, qualifier = draw(st.none() | st.integers(0, INT32[1])), draw(st.none() | names)
    if timeout is None and qualifier is not None and qualifier.isdecimal():
        timeout, qualifier = int(qualifier) & INT32[1], None
    extra = [str(token) for token in (timeout, qualifier) if token is not None]
    frame = write_line("transaction", key, session, kind, *extra, opaque)
    return frame, [Transaction(key, session, kind, timeout or 0, qualifier or "", str(opaque))]


def short_frames() -> st.SearchStrategy[Frame]:
    """Commands that are a word and a few tokens."""
    return st.one_of(
        st.tuples(names | st.just(""), opaques).map(
            lambda t: (write_line("stats", *t), [Stats(t[0], str(t[1]), item_only=False)])
        ),
        names.map(lambda item: (write_line("stats", item), [Stats(item, NO_OPAQUE, item_only=True)])),
        opaques.map(lambda opaque: (write_line("version", opaque), [Version(str(opaque))])),
        opaques.map(lambda opaque: (write_line("help", opaque), [Help(str(opaque))])),
        st.just((write_line("quit"), [Quit()])),
        st.just((b"\r\n", [])),
        st.tuples(names, st.integers(1, INT32[1]), opaques).map(
            lambda t: (write_line("create", *t), [Create(t[0], t[1], False, str(t[2]))])
        ),
        st.tuples(names, names, opaques).map(lambda t: (write_line("auth", *t), [Auth(t[0], t[1], str(t[2]))])),
        st.tuples(names, int32, st.integers(*INT64), bodies, opaques).map(
            lambda t: (write_line("sync", t[0], 0, len(t[3]), t[1], t[2], t[4]) + t[3], [Sync(str(t[4]))])
        ),
        st.tuples(opaques, bodies).map(lambda t: (write_line("value", len(t[1]), t[0]) + t[1], [])),
    )


frames = put_frames() | get_frames() | offset_frames() | transaction_frames() | short_frames()


@st.composite
def odd_lines(draw: st.DrawFn) -> bytes:
    """A line without CR LF inside: known and unknown words, tokens that fit and tokens that do not."""
    word = draw(st.sampled_from(WORDS) | st.text(st.characters(max_codepoint=255), max_size=8))
    tokens = draw(st.lists(st.sampled_from(ODD_TOKENS) | names | int32.map(str), max_size=9))
    return re.sub("\r\n+", "\r", " ".join([word, *tokens])).encode("latin-1")[: LIMITS.max_line_bytes]


@st.composite
def in_step_frames(draw: st.DrawFn) -> bytes:
    """Whatever it says, its end is known: a line, or a put or sync with a body of the announced length."""
    line = draw(odd_lines())
    if line.split(b" ")[0] not in (b"put", b"sync", b"value", b"result"):
        return line + b"\r\n"
    word, body = draw(st.sampled_from(["put", "sync"])), draw(bodies | st.binary(max_size=300))
    tokens = draw(st.lists(st.sampled_from(ODD_TOKENS) | names | int32.map(str), max_size=6))
    return " ".join([word, "t", "0", str(len(body)), *tokens]).encode("latin-1") + b"\r\n" + body


@st.composite
def garbage(draw: st.DrawFn) -> bytes:
    """Frames, good and odd, some of them with bytes changed, lost or added."""
    pieces = draw(st.lists(frames.map(lambda frame: frame[0]) | in_step_frames() | st.binary(max_size=300), max_size=8))
    data = bytearray(b"".join(pieces))
    chance = random.Random(draw(seeds))
    for _ in range(draw(st.integers(0, 4))):
        at = chance.randrange(len(data) + 1)
        data[at : at + chance.randrange(3)] = chance.choice((b"", b"\r\n", b" ", b"-", b"9", chance.randbytes(3)))
    return bytes(data)


@given(st.lists(frames, max_size=12), seeds)
def test_commands_written_are_read_back(drawn: list[Frame], seed: int) -> None:
    """MQ-057…MQ-060, MQ-063, MQ-064, MQ-109, MQ-110: any run of commands means the same in any slices."""
    data = b"".join(frame for frame, _ in drawn)
    expected = [command for _, commands in drawn for command in commands]
    reader = CommandReader(LIMITS)
    assert feed(reader.receive, random_slices(data, seed)) == expected
    assert feed(reader.receive, [data] if data else []) == expected
    assert reader.buffered == 0


@given(garbage(), seeds)
def test_no_input_raises_or_is_kept_beyond_the_limits(data: bytes, seed: int) -> None:
    """MQ-057: garbage becomes refusals, never an exception, and what a frame may hold back is bounded by the limits."""
    reader = CommandReader(LIMITS)
    for piece in random_slices(data, seed):
        reader.receive(piece)
        assert reader.buffered <= LIMITS.max_line_bytes + 2 + LIMITS.max_body_bytes


@given(garbage(), seeds)
def test_slices_do_not_change_what_garbage_means(data: bytes, seed: int) -> None:
    """MQ-057: however a stream is cut, the same commands and refusals come of it, also where heads are remembered."""
    whole = [comparable(command) for command in CommandReader(LIMITS).receive(data)]
    heads: dict[bytes, PutHead] = {}
    for slicing in (seed, seed + 1):
        reader = CommandReader(LIMITS, heads)
        assert [comparable(command) for command in feed(reader.receive, random_slices(data, slicing))] == whole


@given(st.lists(in_step_frames(), max_size=5), seeds)
def test_a_refused_frame_leaves_the_stream_in_step(odd: list[bytes], seed: int) -> None:
    """MQ-057, MQ-062: after frames that are refused, however wrong, the next command is understood."""
    data = b"".join(odd) + write_line("version", 1)
    commands = feed(CommandReader(LIMITS).receive, random_slices(data, seed))
    assert commands[-1] == Version("1")
    assert len(commands) <= len(odd) + 1
    assert all(isinstance(command.error, BadRequest) for command in commands if isinstance(command, Invalid))


@given(garbage())
def test_nothing_is_read_behind_a_lost_stream(data: bytes) -> None:
    """MQ-057: when the end of a frame is unknown, what follows is not taken for commands."""
    reader = CommandReader(LIMITS)
    reader.receive(b"put t 0 -1 0 7\r\n")
    assert reader.receive(data) == []
    assert reader.buffered == 0


def test_a_trickled_body_takes_little_more_memory_than_its_bytes() -> None:
    """A body that comes two bytes at a time must not take the memory of an object for each two."""
    size = 1 << 18
    data = b"put t 0 %d 0 1\r\n" % size + bytes(size)
    reader = CommandReader(TextLimits())
    tracemalloc.start()
    try:
        for at in range(0, len(data) - 1, 2):
            assert reader.receive(data[at : min(at + 2, len(data) - 1)]) == []
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert reader.buffered == len(data) - 1
    assert held < 2 * size
    assert reader.receive(data[-1:]) == [Put("t", 0, 0, NO_CHECKSUM, None, "1", bytes(size))]


def test_remembered_heads_take_little_memory() -> None:
    """Puts to topics that cannot be, each another one, must not fill what readers remember of earlier puts."""
    reader = CommandReader(TextLimits(), {})
    tracemalloc.start()
    try:
        for number in range(2000):
            topic = f"{number}".ljust(4000, "t")
            assert len(reader.receive(write_put(topic, 0, 0, b"", 1))) == 1
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 100_000


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
replies = st.one_of(
    st.tuples(st.sampled_from([200, 301, 400, 403, 404, 500, 503]), texts, opaques).map(
        lambda t: (write_result(t[0], t[1], str(t[2])), Reply(t[0], t[2], t[1].encode()))
    ),
    st.tuples(bodies, opaques).map(
        lambda t: (write_value_head(len(t[0]), str(t[1])) + t[0], Reply(VALUE, t[1], t[0])),
    ),
)


@given(st.lists(replies, max_size=12), seeds)
def test_replies_written_are_read_back(drawn: list[tuple[bytes, Reply]], seed: int) -> None:
    """MQ-058, MQ-061, MQ-062: any run of replies means the same in any slices."""
    data = b"".join(frame for frame, _ in drawn)
    expected = [reply for _, reply in drawn]
    reader = ReplyReader()
    assert feed(reader.receive, random_slices(data, seed)) == expected
    assert feed(reader.receive, [data]) == expected


@given(st.lists(replies.map(lambda reply: reply[0]) | st.binary(max_size=200) | garbage(), max_size=6), seeds)
def test_what_is_no_reply_is_a_lost_stream(pieces: list[bytes], seed: int) -> None:
    """MQ-062: a client that talks to anything but a broker gets `StreamLost`, no other exception."""
    reader = ReplyReader()
    received: list[Reply] = []
    try:
        for piece in random_slices(b"".join(pieces), seed):
            received += reader.receive(piece)
    except StreamLost as error:
        assert str(error)
    assert all(isinstance(reply, Reply) for reply in received)

"""Messages that are put through one protocol are read unchanged through the other, and through their own."""

import zlib
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import pytest

from metaq.client import TextClient
from metaq.message import Message
from metaq.protocol.ids import decode_offset_id
from metaq.protocol.record import Record, decode_record
from metaq.protocol.remoting.codes import PULL_HAS_SUBSCRIPTION, Request, Response
from metaq.protocol.remoting.headers import Int32, PullMessage, encode_header
from metaq.protocol.remoting.sending.batch import BatchItem, encode_batch
from metaq.protocol.sysflag import COMPRESSED
from metaq.protocol.text.messages import COMPRESSED_FLAG, EPOCH_SHIFT, join_attribute
from metaq.protocol.text.replies import OK
from metaq.protocol.text.writing import write_put
from tests.support.broker import BrokerProcess
from tests.support.messages import count, pairs_of, records, send, send_header, sent
from tests.support.remoting import RemotingClient
from tests.support.talk import ReplyReader

ALL_BITS: Final = -1 & ~COMPRESSED_FLAG
"""Of a flag; the compressed ones show in bit 16 of a text reader's flag what they are."""
LONG: Final = b"0123456789" * 1000
PACKED: Final = zlib.compress(LONG)


class Case(NamedTuple):
    """Messages that are put, and what both readers must get of each: all in one partition of one topic."""

    put: str
    """Through which protocol."""
    name: str
    bodies: tuple[bytes, ...]
    """As they are stored."""
    flag: int = 0
    tag: str | None = None
    properties: tuple[tuple[str, str], ...] = ()
    """Beside the tag."""
    sys_flag: int = 0
    batch: bool = False


CASES: Final = [
    Case("text", "plain", (b"hello",)),
    Case("text", "empty", (b"",)),
    Case("text", "all bits of the flag", (b"\x00\xff" * 100,), ALL_BITS & ~1),
    Case("text", "attribute", (b"hello",), tag="TagA"),
    Case("text", "attribute that is not ASCII", ("körper".encode(),), ALL_BITS, tag="größe 中"),
    Case("text", "many in one go", tuple(b"%d" % number for number in range(100))),
    Case("remoting", "plain", (b"hello",)),
    Case("remoting", "all bits of the flag", (b"\x00\xff" * 100,), ALL_BITS),
    Case("remoting", "tag", (b"hello",), tag="TagA"),
    Case("remoting", "tag that is not ASCII", ("körper".encode(),), ALL_BITS, tag="größe 中"),
    Case("remoting", "keys", (b"hello",), tag="TagA", properties=(("KEYS", "k1 k2"), ("UNIQ_KEY", "U1"))),
    Case("remoting", "properties", (b"hello",), properties=(("colour", "grün"), ("size", "7"))),
    Case("remoting", "batch", tuple(b"%d" % number for number in range(100)), 5, "T", (("KEYS", "k"),), batch=True),
    Case("remoting", "compressed", (PACKED,), 4, "zip", sys_flag=COMPRESSED),
    Case("remoting", "compressed in another way", (b"not zlib",), sys_flag=COMPRESSED | 0x100),
]


class Reachable(NamedTuple):
    """One broker, over both protocols."""

    broker: BrokerProcess
    text: TextClient
    remoting: RemotingClient


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reachable]:
    with (
        BrokerProcess(tmp_path_factory.mktemp("both") / "data") as broker,
        TextClient(broker.host, broker.port) as text,
        RemotingClient(broker.host, broker.port) as remoting,
    ):
        yield Reachable(broker, text, remoting)


def put(both: Reachable, case: Case, topic: str) -> list[int]:
    """Put a case's messages; their log offsets, as the answers tell them."""
    if case.put == "text":
        return put_text(both, case, topic)
    pairs = "".join(f"{name}\x01{value}\x02" for name, value in tagged(case).items())
    header = send_header(topic, pairs, flag=case.flag, sys_flag=case.sys_flag)
    if not case.batch:
        opaques = [send(both.remoting, header, body) for body in case.bodies]
        return [decode_offset_id(sent(both.remoting, opaque)["msgId"]).log_offset for opaque in opaques]
    items = [BatchItem(case.flag, body, pairs) for body in case.bodies]
    header = header._replace(batch=True, properties="")
    ids = sent(both.remoting, send(both.remoting, header, encode_batch(items), Request.SEND_BATCH_MESSAGE))["msgId"]
    return [decode_offset_id(text).log_offset for text in ids.split(",")]


def put_text(both: Reachable, case: Case, topic: str) -> list[int]:
    with both.broker.connect() as connection:
        frames = []
        for opaque, payload in enumerate(case.bodies):
            bit, body = join_attribute(case.tag, payload)
            frames.append(write_put(topic, 0, case.flag & ~1 | bit, body, opaque))
        connection.sendall(b"".join(frames))
        reader = ReplyReader()
        offsets: list[int] = []
        while len(offsets) < len(frames):
            for reply in reader.receive(connection.recv(1 << 16)):
                assert reply.code == OK, reply.body
                offsets.append(int(reply.body.split()[0]) - (1 << EPOCH_SHIFT))
    return offsets


def tagged(case: Case) -> dict[str, str]:
    return dict(case.properties) | ({} if case.tag is None else {"TAGS": case.tag})


def got_by_text(both: Reachable, topic: str) -> list[Message]:
    return list(both.text.iterate(topic))


def check_text(case: Case, found: list[Message], offsets: list[int]) -> None:
    """Bodies inflated, the attribute, the flag without bit 0 and with bit 16, ids, positions."""
    flag = case.flag & ~1 | (case.tag is not None) | (COMPRESSED_FLAG if case.sys_flag & COMPRESSED else 0)
    assert [message.body for message in found] == [LONG if body == PACKED else body for body in case.bodies]
    assert {message.attribute for message in found} == {case.tag}
    assert {message.flag for message in found} == {flag}
    assert [message.id for message in found] == [1 << EPOCH_SHIFT | offset for offset in offsets]
    position = 0
    for message, body in zip(found, case.bodies, strict=True):
        assert message.position == position
        position += 20 + len(body) + (0 if case.tag is None else 4 + len(case.tag.encode()))
        assert message.next_position == position


def check_remoting(case: Case, found: list[Record], offsets: list[int]) -> None:
    """Bodies as they are stored, properties, flags, places."""
    assert [bytes(record.body) for record in found] == list(case.bodies)
    assert [record.log_offset for record in found] == offsets
    assert [record.queue_offset for record in found] == list(range(len(case.bodies)))
    flag = case.flag & ~1 | (case.tag is not None) if case.put == "text" else case.flag
    for record in found:
        assert pairs_of(record) == tagged(case)
        assert (record.flag, record.sys_flag, record.body_crc) == (flag, case.sys_flag, zlib.crc32(record.body) & 0x7FFFFFFF)


READERS: Final[dict[str, Callable[[Reachable, Case, str, list[int]], None]]] = {
    "text": lambda both, case, topic, offsets: check_text(case, got_by_text(both, topic), offsets),
    "remoting": lambda both, case, topic, offsets: check_remoting(case, records(both.remoting, topic), offsets),
}


@pytest.mark.parametrize("got", READERS)
@pytest.mark.parametrize("case", [pytest.param(case, id=f"{case.put}, {case.name}") for case in CASES])
def test_both_see_the_same_messages(both: Reachable, case: Case, got: str) -> None:
    """SG-098, MQ-012: whoever put it, through whichever protocol, and whoever gets it."""
    topic = f"t{CASES.index(case)}-{got}"
    READERS[got](both, case, topic, put(both, case, topic))


@pytest.mark.parametrize("case", [pytest.param(case, id=f"{case.put}, {case.name}") for case in CASES])
def test_a_message_is_viewed_by_the_place_in_its_id(both: Reachable, case: Case) -> None:
    """RD-106: the log offset in the id of either protocol leads to the message."""
    offset = put(both, case, f"v{CASES.index(case)}")[-1]
    answer = both.remoting.call(Request.VIEW_MESSAGE_BY_ID, {"offset": str(offset)})
    assert answer.code == Response.SUCCESS
    assert bytes(decode_record(answer.body).body) == case.bodies[-1]


def test_an_attribute_is_a_tag_to_subscribe_to(both: Reachable) -> None:
    """SG-098: consumers that ask for a tag get what was put with that attribute, and nothing else."""
    topic = "tags"
    for tag in ("a", "b", "a", None, ""):
        both.text.put(topic, f"with {tag}".encode(), attribute=tag)
    assert count(both.remoting, topic) == 5
    assert [pairs_of(record).get("TAGS") for record in records(both.remoting, topic)] == ["a", "b", "a", None, None]
    numbers = (Int32(0), 0, Int32(32), Int32(PULL_HAS_SUBSCRIPTION), 0, 0, 0)
    answer = both.remoting.call(Request.PULL_MESSAGE, encode_header(PullMessage("tags", topic, *numbers, "a", "TAG")))
    assert answer.code == Response.SUCCESS
    first = decode_record(answer.body)
    second = decode_record(answer.body[first.size :])
    assert [bytes(first.body), bytes(second.body)] == [b"with a", b"with a"]
    assert first.size + second.size == len(answer.body)

"""Golden vectors V17 to V24, V33 and V34 of the text protocol's transactions (specs: section 11), sent to a real broker.

All replies of a conversation are compared as one stream of bytes. Only ids differ from the golden ones: a message in a
transaction has a negative one of the broker's own. So each is read from its reply, checked, and put in the place of the
golden id, with the length that follows from it; everything else is the golden bytes.
"""

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import pytest

from metaq.checksum import body_crc
from metaq.protocol.text.messages import HEADER
from metaq.protocol.text.replies import write_result, write_value_head
from metaq.protocol.text.writing import write_get, write_line
from tests.crash.attack import converse
from tests.crash.garbage import read_replies
from tests.protocol.test_golden_vectors import HEX
from tests.support.broker import BrokerProcess
from tests.support.talk import Talk
from tests.support.wire import slicings

TOPIC: Final = "meta-test"
FIRST, SECOND = "XID:100:0a0b:0c0d:myapp-host1", "XID:101:0a0b:0c0e:myapp-host1"
GOLDEN_ID: Final = b"403090815569625089"
SEED: Final = 20

Template = bytes | Callable[[list[int]], bytes]
"""A reply, made of the ids when it has one."""


class Exchange(NamedTuple):
    """A request, and what it is answered with."""

    request: bytes
    reply: Template


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path_factory.mktemp("broker") / "data", "--default-partitions", "2") as process:
        with Talk(process) as talk:  # so that no partition is empty: an empty one is answered otherwise
            talk.placed(TOPIC, b"before", partition=0)
            talk.placed(TOPIC, b"before", partition=1)
        yield process


def golden(name: str) -> bytes:
    return bytes.fromhex(HEX[name])


def done(opaque: int) -> bytes:
    return golden("V17r").replace(b" 9\r\n", b" %d\r\n" % opaque)


def put(opaque: int, partition: int, number: int) -> Template:
    """V18r with another opaque, partition and id."""

    def reply(ids: list[int]) -> bytes:
        body = golden("V18r").partition(b"\r\n")[2].replace(GOLDEN_ID + b" 0", b"%d %d" % (ids[number], partition))
        return write_result(200, body.decode(), str(opaque))

    return reply


def stored(opaque: int, body: bytes, number: int) -> Template:
    return lambda ids: (
        write_value_head(HEADER.size + len(body), str(opaque)) + HEADER.pack(len(body), body_crc(body), ids[number], 0) + body
    )


def get(partition: int, position: int, opaque: int) -> bytes:
    return write_get(TOPIC, "example", partition, position, 1024, opaque)


def nothing(position: int, opaque: int) -> bytes:
    return write_result(404, f"Could not find message at position {position}", str(opaque))


def second(data: bytes) -> bytes:
    """Return the bytes with the second branch in place of the first one."""
    return data.replace(FIRST.encode(), SECOND.encode())


def step(key: str, kind: str, opaque: int) -> bytes:
    return write_line("transaction", key, "S1", kind, opaque)


def local(position: int) -> list[Exchange]:
    """Scenario 3 of the specification, and puts in a transaction that was never begun and in the form before 1.4.4."""
    unknown = golden("V34").replace(b" 26\r\n", b" 25\r\n")
    return [
        Exchange(golden("V17"), golden("V17r")),
        Exchange(golden("V18"), put(10, 0, 0)),
        Exchange(get(0, position, 101), nothing(position, 101)),
        Exchange(golden("V19"), done(11)),
        Exchange(get(0, position, 102), stored(102, b"t1", 0)),
        Exchange(unknown, golden("V33")),
        Exchange(step("TX:S1:1", "BEGIN", 103), done(103)),
        Exchange(golden("V34"), put(26, 0, 1)),
        Exchange(step("TX:S1:1", "ROLLBACK", 104), done(104)),
    ]


def branches(position: int) -> list[Exchange]:
    """Scenario 4 of the specification, and both branches to their ends."""
    return [
        Exchange(golden("V20"), done(12)),
        Exchange(golden("V21"), put(13, 1, 2)),
        Exchange(golden("V22"), golden("V22r")),
        Exchange(second(golden("V20")), done(12)),
        Exchange(second(golden("V21")), put(13, 1, 3)),
        Exchange(second(golden("V22")), golden("V22r")),
        Exchange(golden("V23"), golden("V23r")),
        Exchange(get(1, position, 105), nothing(position, 105)),
        Exchange(step(FIRST, "COMMIT_TWO_PHASE", 106), done(106)),
        Exchange(step(SECOND, "ROLLBACK", 107), done(107)),
        Exchange(get(1, position, 108), stored(108, b"x1", 2)),
        Exchange(step(FIRST, "COMMIT_TWO_PHASE", 17), golden("V24")),
    ]


def ids_in(data: bytes) -> list[int]:
    """The ids that puts in transactions were answered with."""
    bodies = [reply.body for reply in read_replies(data, may_be_cut=False)]
    return [int(body.split(b" ")[0]) for body in bodies if body.endswith(b" -1")]


def test_golden_conversation_in_any_slices(broker: BrokerProcess) -> None:
    """MQ-058, MQ-059, MQ-075, MQ-076, MQ-108, MQ-109: requests and replies byte for byte, whole and however they are cut."""
    ids: list[int] = []
    for way, _ in slicings(b"".join(exchange.request for exchange in local(0) + branches(0)), SEED):
        with Talk(broker) as talk:
            exchanges = local(talk.end(TOPIC, 0)) + branches(talk.end(TOPIC, 1))
        pieces = dict(slicings(b"".join(exchange.request for exchange in exchanges), SEED))[way]
        with broker.connect() as connection:
            data, _ = converse(connection, pieces)
        found = ids_in(data)
        expected = [exchange.reply if isinstance(exchange.reply, bytes) else exchange.reply(found) for exchange in exchanges]
        assert data == b"".join(expected), way
        ids += found
    assert all(message_id < 0 for message_id in ids)
    assert len(set(ids)) == len(ids)
    assert ids == sorted(ids, reverse=True)


def test_one_write_of_a_whole_branch(broker: BrokerProcess) -> None:
    """MQ-058, MQ-075: V20, V21 and V22 in one segment are answered with 12, 13 and 15; END, opaque 14, never."""
    with Talk(broker) as talk:
        talk.send(golden("V20") + golden("V21") + golden("V22"))
        assert [reply.opaque for reply in talk.replies(3)] == [12, 13, 15]
        talk.done(FIRST, "ROLLBACK")  # a reply to END would come before

"""Streams of plain puts, transactions and mistakes over one connection against a model, however they are cut."""

import random
from collections.abc import Iterator
from typing import Final

import pytest

from metaq.protocol.text.messages import HEADER_SIZE_TEXT
from metaq.protocol.text.replies import ERROR, OK
from tests.support.broker import BrokerProcess
from tests.support.talk import Talk
from tests.support.wire import random_slices

PARTITIONS: Final = 2
LOCAL: Final = ("TX:a:1", "TX:a:2")
XA: Final = ("XID:1:01:01:m", "XID:1:02:01:m")
STEPS: Final = ("BEGIN", "BEGIN", "PREPARE", "COMMIT_ONE_PHASE", "COMMIT_TWO_PHASE", "ROLLBACK")
FRAMES: Final = 400
WRONG_CHECKSUM: Final = "Checksum failure,message may be corrupted when transfering on networking."

Reply = tuple[int, str]
Message = tuple[int, bytes, str | None]
"""Partition, body, attribute."""


class Model:
    """A model of the messages in the partitions, and of those that each transaction holds."""

    def __init__(self) -> None:
        self.stored: list[list[Message]] = [[] for _ in range(PARTITIONS)]
        self.open: dict[str, list[Message]] = {}
        self.prepared: dict[str, list[Message]] = {}

    def position(self, partition: int) -> int:
        sizes = [len(body) + (0 if tag is None else 4 + len(tag)) for _, body, tag in self.stored[partition]]
        return sum(sizes) + len(sizes) * HEADER_SIZE_TEXT

    def unknown(self, key: str, *, of_put: bool) -> Reply:
        if key in LOCAL:
            return ERROR, f"Local transaction '{key}' has not been started."
        text = f"XA transaction '{key}' has not been started."
        return ERROR, text if of_put else f"XAException:code=-4,msg={text}"

    def put(self, key: str | None, message: Message) -> Reply:
        """The answer without the id."""
        if key is None:
            position = self.position(message[0])
            self.stored[message[0]].append(message)
            return OK, f"{message[0]} {position}"
        if key in self.prepared:
            return ERROR, f"XAException:code=-6,msg=Cannot put into XA transaction '{key}': it has been prepared."
        if key not in self.open:
            return self.unknown(key, of_put=True)
        self.open[key].append(message)
        return OK, f"{message[0]} -1"

    def step(self, key: str, kind: str) -> Reply:
        if kind == "BEGIN":
            if key not in self.prepared:
                self.open.setdefault(key, [])
            return OK, ""
        if key not in self.open and key not in self.prepared:
            return self.unknown(key, of_put=False)
        if kind == "PREPARE":
            return self.prepare(key)
        if kind == "COMMIT_TWO_PHASE" and key in XA and key in self.open:
            return ERROR, "XAException:code=-6,msg=Cannot do 2 phase commit if the transaction has not been prepared."
        held = self.open.pop(key) if key in self.open else self.prepared.pop(key)
        for message in held if kind != "ROLLBACK" else ():
            self.stored[message[0]].append(message)
        return OK, ""

    def prepare(self, key: str) -> Reply:
        if key in LOCAL:
            return ERROR, "XAException:code=-3,msg=Prepare not implemented on Local Transactions."
        if key in self.prepared:
            return ERROR, "XAException:code=-6,msg=Cannot call prepare now."
        held = self.open.pop(key)
        if not held:
            return OK, "3"
        self.prepared[key] = held
        return OK, "0"


@pytest.fixture(scope="module", params=["disk", "memory"])
def broker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    data = tmp_path_factory.mktemp("broker") / "data"
    with BrokerProcess(data, "--default-partitions", str(PARTITIONS), durability=request.param) as process:
        yield process


def draw(chance: random.Random, talk: Talk, model: Model, topic: str) -> tuple[bytes, Reply]:
    """A frame, and what it must be answered with."""
    if chance.random() < 0.25:
        name, kind = chance.choice(LOCAL + XA), chance.choice(STEPS)
        return talk.step(name, kind), model.step(name, kind)
    key = chance.choice((None, *LOCAL, *XA))
    message = chance.randrange(PARTITIONS), chance.randbytes(chance.choice((0, 1, 40))), chance.choice((None, None, "", "tag"))
    frame = talk.put_of(topic, message[1], key, message[0], message[2])
    if key is None or chance.random() < 0.9:
        return frame, model.put(key, message)
    line, end, body = frame.partition(b"\r\n")
    tokens = line.split(b" ")
    refused: Reply
    match chance.randrange(3):
        case 0:
            tokens[2], refused = b"-1", (ERROR, "Invalid partition for transaction command:-1")
        case 1:
            tokens[2], refused = b"9", (ERROR, "wrong partition 9")
        case _:
            tokens[5], refused = b"7", (ERROR, WRONG_CHECKSUM)
    known = key in model.open
    return b" ".join(tokens) + end + body, refused if known else (ERROR, "")


def agrees(expected: Reply, code: int, text: str, ids: list[int]) -> bool:
    if code == OK and expected[1].count(" ") == 1:  # a put
        message_id, _, rest = text.partition(" ")
        ids.append(int(message_id))
        return expected == (code, rest)
    return expected == (code, text) or (expected == (ERROR, "") and code == ERROR and text != "")


@pytest.mark.parametrize("seed", range(4))
def test_random_streams(broker: BrokerProcess, seed: int) -> None:
    """MQ-058, MQ-059, MQ-072, MQ-075, MQ-076, MQ-108: each answer, and every message where the model has it."""
    chance = random.Random(seed)
    topic, model = f"stream-{seed}", Model()
    with Talk(broker) as talk:
        for partition in range(PARTITIONS):
            first = partition, b"first", None
            model.put(None, first)
            talk.placed(topic, b"first", partition=partition)
        drawn = [draw(chance, talk, model, topic) for _ in range(FRAMES)]
        drawn += [(talk.step(key, "ROLLBACK"), (OK, "")) for key in (*model.open, *model.prepared)]
        for piece in random_slices(b"".join(frame for frame, _ in drawn), seed):
            talk.send(piece)
        ids: list[int] = []
        for (frame, expected), reply in zip(drawn, talk.replies(len(drawn)), strict=True):
            assert agrees(expected, reply.code, reply.body.decode(), ids), f"seed {seed}: {frame!r}: {reply}, not {expected}"
        assert len(set(ids)) == len(ids)
        for partition, stored in enumerate(model.stored):
            found = talk.messages(topic, partition)
            assert [(partition, message.body, message.attribute) for message in found] == stored, f"seed {seed}"
            assert {message.id for message in found[1:]} <= set(ids)

"""Batches whose header is known: they are stored, answered and refused as those of which the header is parsed."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import gevent
import pytest

from metaq.engine.dedupe.dedupe import Dedupe
from metaq.engine.halfmessages import HalfMessages
from metaq.engine.timers.timers import Timers
from metaq.errors import ReadFailed
from metaq.message import TopicPartition
from metaq.protocol.properties import DEDUPE_ID, DELAY
from metaq.protocol.record import Record, decode_record
from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.protocol.remoting.headers import encode_header, with_letters
from metaq.protocol.remoting.requests import Received
from metaq.protocol.remoting.sending.batch import BatchItem, encode_batch
from metaq.server.remoting.sending.partitions import Partitions
from metaq.server.remoting.sending.send import SendHandler
from metaq.server.wire.session import Session
from metaq.store.files.disk import Disk, RealDisk, RealFile
from metaq.store.files.filecache import read_here, run_here
from metaq.tx.halves import Halves
from tests.support.broker import wait_until
from tests.support.inprocess import Parts, Remoting
from tests.support.messages import send_header

TOPIC: Final = "orders"
DEADLINE_S: Final = 30.0
WINDOW: Final = "600000"
IDS: Final = encode_batch(BatchItem(0, b"paid", f"{DEDUPE_ID}\x01{number}\x02") for number in range(3))
BODIES: Final[dict[str, bytes]] = {
    "one": encode_batch([BatchItem(7, b"paid", "")]),
    "tags and keys": encode_batch(
        BatchItem(0, b"paid %d" % number, f"KEYS\x01{number}\x02TAGS\x01{'ab'[number % 2]}\x02") for number in range(5)
    ),
    "ids": IDS,
    "the same ids": IDS,
    "none": b"",
    "contradicting lengths": encode_batch([BatchItem(0, b"paid", "")])[:-1],
    "a delayed one": encode_batch([BatchItem(0, b"paid", ""), BatchItem(0, b"later", f"{DELAY}\x013\x02")]),
    "too many bytes": encode_batch([BatchItem(0, bytes(30_000), "")] * 4),
    "after all": encode_batch([BatchItem(0, b"last", "")]),
}


class Sends:
    """A broker in this process that takes batches, and the number of those that its run handler has taken."""

    def __init__(self, data: Path, *, has_runs: bool, disk: Disk | None = None) -> None:
        topics = {TOPIC: {"partitions": 1, "dedupe_window_ms": WINDOW}}
        self.parts = parts = Parts(data, topics=topics, disk=disk, max_message_bytes=65_536)
        self._timers = Timers(parts.context, parts.turns, run_here)
        self._dedupe = Dedupe(parts.context, parts.turns, self._timers.parked_handle, run_here)
        self.asking = self._dedupe.asking
        self._dedupe.start()
        wait_until(self._knows_ids, DEADLINE_S, "the log is read for ids")
        halves = HalfMessages(parts.context, parts.turns, Halves(parts.store, data.with_suffix(".halves"), 1000), self._dedupe)
        partitions = Partitions(parts.context, parts.turns)
        self.handler = SendHandler(parts.context, parts.turns, halves, self._timers, self._dedupe, partitions)
        parts.endpoint.answer(self.handler.requests())
        self.taken = 0
        if has_runs:
            parts.endpoint.answer_runs({**self.handler.runs(), Request.SEND_BATCH_MESSAGE: self._batches})

    def _knows_ids(self) -> bool:
        gevent.sleep(0)
        return self._dedupe.numbers()["dedupe_index"] == "yes"

    def _batches(self, session: Session, requests: Sequence[Received], at: int) -> int:
        end = self.handler.batches(session, requests, at)
        self.taken += end - at
        return end

    def answers(self) -> list[RemotingCommand]:
        """Send each of the bodies with the same header twice, a turn for each; return the answers."""
        client, header = Remoting(self.parts), send_header(TOPIC, "TAGS\x01x\x02")._replace(batch=True)
        fields = with_letters(encode_header(header))
        found: list[RemotingCommand] = []
        for body in [BODIES["one"], *BODIES.values()]:
            client.send_fields(Request.SEND_BATCH_MESSAGE, fields, body)
            self.parts.end_turn()
            found += client.answers()
        return found

    def records(self) -> list[Record]:
        queue = self.parts.store.queue(*TopicPartition(TOPIC, 0))
        stored = list(self.parts.store.records(queue, 0, 1 << 20, read_here))
        return [decode_record(bytes(each.buffer[each.at : each.at + each.size])) for each in stored if each is not None]

    def cover(self) -> None:
        """Have the index know all ids, so that the next broker on this folder reads none of them from the log."""
        self.parts.store.sync()
        self._dedupe.apply()
        for _ in range(2):
            self._dedupe.flush()

    def close(self) -> None:
        self._dedupe.stop()
        self._dedupe.close()
        self._timers.close()
        self.parts.close()


@contextmanager
def sends(data: Path, *, has_runs: bool, disk: Disk | None = None) -> Iterator[Sends]:
    made = Sends(data, has_runs=has_runs, disk=disk)
    yield made
    made.close()


def test_known_headers_change_nothing(tmp_path: Path) -> None:
    """SG-057: only the first batches have their headers parsed; those that are refused are handled by themselves."""
    with sends(tmp_path / "short", has_runs=True) as short, sends(tmp_path / "long", has_runs=False) as long:
        answers = short.answers()
        assert answers == long.answers()
        assert short.records() == long.records()
        refused = [answer.code != Response.SUCCESS for answer in answers]
        assert refused == [False] * 5 + [True] * 4 + [False]
        assert answers[3].fields == answers[4].fields  # of the same ids: nothing is stored again
        assert (short.taken, len(short.records())) == (4, 2 + 5 + 3 + 1)  # a header with the opaque 0 is not kept


class UncachedFile(RealFile):
    """A file of a file system that does not say what its page cache has."""

    def read_cached(self, size: int, offset: int) -> bytes | None:
        return None


class BadFile(UncachedFile):
    """One that cannot be read."""

    def read(self, size: int, offset: int) -> bytes:
        raise ReadFailed("cannot read: input/output error")


class QueueDisk(RealDisk):
    """A real one on which the queue of the topic has such files."""

    def __init__(self, make: type[UncachedFile]) -> None:
        self._make = make

    def open(self, path: Path) -> RealFile:
        plain = super().open(path)
        is_of_queue = path.parent.parent.name == TOPIC
        return self._make(path, os.dup(plain._fd)) if is_of_queue else plain  # the plain one closes its own descriptor


def send_again(broker: Sends) -> RemotingCommand:
    """Send a batch with ids, and return its answer, which may have to wait for the disk."""
    client, fields = Remoting(broker.parts), with_letters(encode_header(send_header(TOPIC)._replace(batch=True)))
    answers: list[RemotingCommand] = []

    def has_answer() -> bool:
        gevent.sleep(0)
        broker.parts.end_turn()
        answers.extend(client.answers())
        return bool(answers)

    client.send_fields(Request.SEND_BATCH_MESSAGE, fields, IDS)
    wait_until(has_answer, DEADLINE_S, "the answer")
    queue = broker.parts.store.queue(TOPIC, 0)
    queue.write()
    assert queue.next == 3
    return answers[0]


def test_a_batch_sent_again_whose_units_are_on_the_disk(tmp_path: Path) -> None:
    """D-2: it does not wait without end where no file says what its page cache has, and only the index knows its id."""
    found = []
    for _ in range(2):
        with sends(tmp_path / "data", has_runs=False, disk=QueueDisk(UncachedFile)) as broker:
            found += [send_again(broker), send_again(broker)]
            broker.cover()
    first = found[0]
    assert first.code == Response.SUCCESS and len(set(first.fields["msgId"].split(","))) == 3
    assert all((answer.code, answer.fields) == (first.code, first.fields) for answer in found)


def test_a_batch_sent_again_whose_units_cannot_be_read(tmp_path: Path) -> None:
    """SG-018, D-2: it is stored, and is not stored again; those that cannot be found have the id of the first."""
    with sends(tmp_path / "data", has_runs=False, disk=QueueDisk(BadFile)) as broker:
        first, again = send_again(broker), send_again(broker)
        assert (again.code, again.fields["queueOffset"]) == (Response.SUCCESS, first.fields["queueOffset"])
        assert again.fields["msgId"].split(",") == 3 * first.fields["msgId"].split(",")[:1]


@pytest.mark.parametrize("code", [Request.SEND_MESSAGE_V2, Request.SEND_BATCH_MESSAGE])
def test_sends_and_batches_come_in_any_order(tmp_path: Path, code: int) -> None:
    """A run of the one ends where the other begins."""
    with sends(tmp_path / "data", has_runs=True) as broker:
        client, header = Remoting(broker.parts), send_header(TOPIC)
        fields = {
            Request.SEND_MESSAGE_V2: with_letters(encode_header(header)),
            Request.SEND_BATCH_MESSAGE: with_letters(encode_header(header._replace(batch=True))),
        }
        other = Request.SEND_BATCH_MESSAGE if code == Request.SEND_MESSAGE_V2 else Request.SEND_MESSAGE_V2
        for each in [code, other, code, code, other, other, code]:
            client.send_fields(each, fields[Request(each)], BODIES["one"])
        broker.parts.end_turn()
        answers = client.answers()
        assert [(answer.code, answer.fields["queueOffset"]) for answer in answers] == [(0, str(at)) for at in range(7)]

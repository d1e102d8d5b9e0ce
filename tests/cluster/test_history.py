"""The checker of histories finds each kind of violation."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from metaq.client import TextClient
from metaq.message import TopicPartition
from tests.cluster.history import OFFSET_BITS, TOPICS, Commit, History, Progress
from tests.crash.command import Violation
from tests.support.broker import BrokerProcess

PLACE = TopicPartition("orders", 0)


class Case:
    """One broker, and what its client claims."""

    def __init__(self, broker: BrokerProcess) -> None:
        self.broker = broker
        self.history = History(1)
        self.stream = self.history.new_stream()
        self.client = TextClient(broker.host, broker.port)
        for topic, partitions in TOPICS.items():
            self.client.create(topic, partitions)

    def put(self, *, stored: bool = True) -> tuple[int, bytes, int]:
        """Number, body and id of a message that the broker takes."""
        number, body = self.history.send(PLACE, self.stream)
        message_id = self.client.put(PLACE.topic, body, partition=PLACE.partition).id
        if stored:
            self.history.stored(number, message_id)
        return number, body, message_id

    def again(self, body: bytes) -> None:
        self.client.put(PLACE.topic, body, partition=PLACE.partition)


@pytest.fixture
def case(tmp_path: Path) -> Iterator[Case]:
    with BrokerProcess(tmp_path / "data") as broker:
        case = Case(broker)
        case.put()
        yield case
        case.client.close()


def lost(case: Case) -> None:
    case.history.stored(case.history.send(PLACE, case.stream)[0])


def phantom(case: Case) -> None:
    case.again(bytes(100))
    case.again((99).to_bytes(8))


def refused(case: Case) -> None:
    case.history.refused(case.put(stored=False)[0])


def corrupt(case: Case) -> None:
    _, body = case.history.send(PLACE, case.stream)
    case.again(body + b"!")


def twice(case: Case) -> None:
    case.again(case.put()[1])


def another_id(case: Case) -> None:
    number, _, message_id = case.put(stored=False)
    case.history.stored(number, message_id + 1)


def another_ordinal(case: Case) -> None:
    number, _, message_id = case.put(stored=False)
    case.history.stored(number, message_id, ordinal=0)


def reordered(case: Case) -> None:
    _, first = case.history.send(PLACE, case.stream)
    case.put()
    case.again(first)


def old_epoch(case: Case) -> None:
    """A put that is sent when another client's was acknowledged in a later epoch."""
    newer, _ = case.history.send(PLACE, case.history.new_stream())
    case.history.stored(newer)
    _, _, old_id = case.put()
    case.history._check_epochs({0: (0, 0), newer: (1, old_id + (1 << OFFSET_BITS)), newer + 1: (2, old_id)})


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lost, "lost: 1"),
        (phantom, "corrupt|phantom"),
        (refused, "phantom: it was refused"),
        (corrupt, "corrupt"),
        (twice, "duplicate or moved"),
        (another_id, "another id"),
        (another_ordinal, "ordinal"),
        (reordered, "reordered"),
        (old_epoch, "under an old epoch"),
    ],
)
def test_harm_is_found(case: Case, harm: Callable[[Case], None], words: str) -> None:
    """F-FAIL: each kind of violation, where all else is right."""
    case.history.check(case.broker.host, case.broker.port)
    with pytest.raises(Violation, match=words):
        harm(case)
        case.history.check(case.broker.host, case.broker.port)


def test_an_offset_may_go_back_by_a_second_of_commits() -> None:
    """F-FAIL, MQ-035: not by more, however late the machine is."""
    now = time.monotonic()
    progress = Progress(lambda start, end: 100.0)
    progress._commits = [Commit(now - 3, now - 3, 5), Commit(now - 0.9, now - 0.8, 9), Commit(now, now, 10)]
    progress.fault_at = now
    progress.found(5)
    assert progress.most_back_s == pytest.approx(0.8)
    progress._commits = [Commit(now - 3, now - 2, 5), Commit(now - 0.5, now, 6)]
    with pytest.raises(Violation, match=r"went back by 1\.50 s of commits"):
        progress.found(4)


@pytest.mark.parametrize(("late_s", "excused"), [(2.5, True), (1.5, False)])
def test_a_commit_is_kept_within_seconds(late_s: float, *, excused: bool) -> None:
    """F-FAIL, MQ-035: and of the time that the machine was late."""
    now = time.monotonic()
    progress = Progress(lambda start, end: late_s)
    progress._commits = [Commit(now - 5, now - 5, 5)]
    progress.fault_at = now
    if excused:
        progress.found(4)
        assert progress.excused == 1
    else:
        with pytest.raises(Violation, match=r"a commit was lost after 5\.00 s"):
            progress.found(4)

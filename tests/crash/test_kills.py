"""A sample of the kills, and proof that the comparison finds every kind of error."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from metaq.client import TextClient
from metaq.protocol.text.replies import OK, UNAVAILABLE, Reply
from tests.crash.command import Violation
from tests.crash.history import CREATED, LARGEST_TEXT_BODY, History
from tests.crash.kills import run
from tests.support.broker import BrokerProcess
from tests.support.samples import seed_of_tree
from tests.support.talk import ReplyReader

STREAM = 1


def test_a_few_kills_lose_nothing() -> None:
    """MQ-004, MQ-036: other moments for each commit."""
    result = run(seed_of_tree(), count=10)
    assert result.cases >= 10
    assert result.details["acknowledged"] > 100


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kills_lose_nothing() -> None:
    """MQ-004, MQ-036, RD-005, SG-042: 40 kills, at both levels, under load and while the broker starts."""
    result = run(seed=0, count=40)
    assert result.cases >= 40
    assert min(result.details[name] for name in ("kills under load", "kills at once", "kills while starting")) > 0
    assert result.details["acknowledged"] > 2_000


class Folder:
    """A broker and the history of what it was told."""

    def __init__(self, broker: BrokerProcess) -> None:
        self.broker = broker
        self.history = History(seed=0)

    def store(self, put: bytes) -> Reply:
        with self.broker.connect() as connection:
            connection.sendall(put)
            reader = ReplyReader()
            while not (replies := reader.receive(connection.recv(1 << 16))):
                pass
        return replies[0]

    def check(self, *, whole: bool) -> None:
        with TextClient(self.broker.host, self.broker.port) as client:
            self.history.check(client, random.Random(0), whole=whole)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    flags = ("--segment-bytes", "1048576", "--max-body-bytes", str(LARGEST_TEXT_BODY))
    with BrokerProcess(tmp_path / "data", *flags) as broker:
        folder = Folder(broker)
        with TextClient(broker.host, broker.port) as client:
            for topic, partitions in CREATED.items():
                client.create(topic, partitions)
        for _ in range(10):
            folder.history.answered(folder.store(folder.history.put(STREAM, "t", 0)))
        yield folder


def test_the_history_agrees_with_an_honest_broker(folder: Folder) -> None:
    """MQ-004: a message that was sent may be there without an answer, or not be there."""
    folder.check(whole=False)
    folder.store(folder.history.put(STREAM, "t", 0))
    folder.history.put(STREAM, "t", 0)
    folder.check(whole=False)
    folder.check(whole=True)
    assert folder.history.acknowledged == 10
    assert sorted(folder.history.places) == list(range(11))


def lost(folder: Folder) -> None:
    stored = folder.store(folder.history.put(STREAM, "t", 1))
    folder.history.answered(stored)
    folder.history.put(STREAM, "t", 1)
    message_id, partition, position = map(int, stored.body.split())
    folder.history.answered(Reply(OK, 11, b"%d %d %d" % (message_id + 1, partition, position + 5000)))


def invented(folder: Folder) -> None:
    other = History(seed=0)
    puts = [other.put(STREAM, "t", 0) for _ in range(11)]
    folder.store(puts[-1])


def altered(folder: Folder) -> None:
    other = History(seed=1)
    puts = [other.put(STREAM, "t", 0) for _ in range(11)]
    folder.history.put(STREAM, "t", 0)
    folder.store(puts[-1])


def doubled(folder: Folder) -> None:
    put = folder.history.put(STREAM, "t", 0)
    folder.history.answered(folder.store(put))
    folder.store(put)


def moved(folder: Folder) -> None:
    put = folder.history.put(STREAM, "orders", 3)
    folder.store(put.replace(b"orders 3", b"orders 2"))


def skipped(folder: Folder) -> None:
    folder.history.put(STREAM, "t", 0)
    folder.store(folder.history.put(STREAM, "t", 0))


def swapped(folder: Folder) -> None:
    first, second = folder.history.put(STREAM, "t", 0), folder.history.put(STREAM, "t", 0)
    folder.store(second)
    folder.store(first)


WRONGS: list[tuple[Callable[[Folder], None], str]] = [
    (lost, "nothing acknowledged or delivered is lost"),
    (invented, "nothing is delivered that was not sent"),
    (altered, "a message is as it was sent"),
    (doubled, "a message stays where it was"),
    (moved, "a message is delivered where it was sent"),
    (skipped, "no hole in what a connection sent"),
    (swapped, "one connection's order is kept"),
]


@pytest.mark.parametrize(("wrong", "words"), WRONGS)
@pytest.mark.parametrize("whole", [False, True])
def test_the_history_sees_what_is_wrong(folder: Folder, wrong: Callable[[Folder], None], words: str, whole: bool) -> None:
    """MQ-011: in what is new, and in everything."""
    wrong(folder)
    with pytest.raises(Violation, match=words):
        folder.check(whole=whole)


def test_the_history_sees_positions_that_go_back(folder: Folder) -> None:
    """MQ-009: a message acknowledged where readers have been already."""
    folder.check(whole=False)
    folder.history.put(STREAM, "t", 0)
    with pytest.raises(Violation, match="positions never go back"):
        folder.history.answered(Reply(OK, 10, b"1 0 0"))


def test_the_history_sees_a_refusal_and_a_lost_partition(folder: Folder) -> None:
    """MQ-017, MQ-062: neither belongs to a broker that has room and time."""
    number = len(folder.history.sent)
    folder.history.put(STREAM, "t", 0)
    with pytest.raises(Violation, match="no put is refused"):
        folder.history.answered(Reply(UNAVAILABLE, number, b"not now"))
    with TextClient(folder.broker.host, folder.broker.port) as client:
        client.create("t", 3)
    with pytest.raises(Violation, match="a topic keeps its partitions"):
        folder.check(whole=False)

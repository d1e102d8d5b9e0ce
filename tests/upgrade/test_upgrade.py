"""An upgrade: today's broker with stores and clients of earlier versions (``keep``); today's client looks at what is there."""

import json
import tarfile
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

import metaq
from metaq.client import xa
from tests.support.broker import BrokerProcess, wait_until
from tests.upgrade.fill import LATER
from tests.upgrade.keep import GOLDEN, SMALL, fill

DEADLINE_S: Final = 60.0
SETTINGS: Final = {**SMALL, "--keep-hours": "1000000", "--check-after-ms": "500", "--check-interval-ms": "500"}
"""Nothing ages out, whatever the clock of this machine says; half messages are asked about at once."""
FLAGS: Final = [word for pair in SETTINGS.items() for word in pair]
SOON_MS: Final = 1000
SOON_LEVEL: Final = 1


class Kept(NamedTuple):
    """What an earlier version left."""

    folder: Path
    expected: dict[str, Any]


@pytest.fixture(scope="module", params=sorted(GOLDEN.glob("*.tar.xz")), ids=lambda file: file.name.partition(".")[0])
def kept(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kept:
    folder = tmp_path_factory.mktemp("kept")
    with tarfile.open(request.param) as archive:
        archive.extractall(folder, filter="data")
    return Kept(folder, json.loads((folder / "expected.json").read_text("utf-8")))


def bodies(text: metaq.TextClient, topic: str, partition: int) -> list[bytes]:
    return [message.body for message in text.iterate(topic, partition=partition)]


def check_messages(client: metaq.Client, text: metaq.TextClient, expected: dict[str, Any]) -> None:
    """All messages in their order; found by tag and by key; the group goes on where it was."""
    for partition in (0, 1):
        assert bodies(text, "orders", partition)[:20] == [b"text %d" % number for number in range(partition, 40, 2)]
    admin = client.admin()
    (found,) = admin.query_by_key("bills", "k7")
    assert (found.body, found.tag, found.properties["number"]) == (b"bill 7", "t1", "7")
    sent = {b"bill %d" % number for number in range(42)}
    offsets = {str(queue.partition): offset for queue, offset in admin.offsets("billing", "bills").items()}
    assert offsets == expected["offsets"]
    done = set()
    for queue in admin.queues("bills"):
        done |= {message.body for message in admin.read(queue.queue, 0, offsets[str(queue.queue.partition)])}
    assert len(done) == 12
    rest = set[bytes]()
    with client.consumer("bills", "billing") as consumer:
        while rest != sent - done:
            message = consumer.receive(DEADLINE_S)
            assert message is not None, sent - done - rest
            rest.add(message.body)
            assert rest <= sent - done


def check_delayed(client: metaq.Client, text: metaq.TextClient, expected: dict[str, Any]) -> None:
    """What fell due is there once; what is due in the year 2100 waits, and is cancelled by its handle."""
    wait_until(lambda: len(bodies(text, "reminders", 0)) >= 2, DEADLINE_S, "the delayed messages are there", 0.1)
    assert sorted(bodies(text, "reminders", 0)) == [b"by level", b"soon"]
    timers = client.admin().timers()
    (broker,) = client.admin().masters()
    assert [row.due_ms for row in timers.pending(broker.address) if row.recurring is None] == [LATER.timestamp() * 1000]
    (yearly,) = timers.recurring(broker.address)
    assert (yearly.name, yearly.topic) == ("yearly", "reminders")
    client.cancel(expected["handle"])
    client.cancel(expected["handle"])  # again does no harm, so it is known


def check_leased(client: metaq.Client, text: metaq.TextClient, expected: dict[str, Any]) -> None:
    """Leases and delays have ended: what was not finished comes again, with its number; the dead one is a dead letter."""
    wanted: dict[str, int] = expected["attempts"]
    attempts: dict[str, int] = {}

    def all_are_given() -> bool:
        for message in text.pop("tasks", "workers", 10, invisible=timedelta(minutes=5)):
            assert message.body.decode() not in attempts
            attempts[message.body.decode()] = message.attempt
        return attempts.keys() >= wanted.keys()

    wait_until(all_are_given, DEADLINE_S, "all are given again", 0.1)
    assert attempts == wanted
    (dead,) = client.admin().dead_letters("workers")
    assert (dead.body, dead.properties["METAQ_DEAD"]) == (b"task 1", "rejected")


def check_undecided(client: metaq.Client, text: metaq.TextClient, address: str) -> None:
    """The branch is prepared, and commits; the broker asks about the half message, and delivers it."""
    with xa.connect(address, qualifier="shop") as session:
        (xid,) = session.tpc_recover()
        assert (xid.gtrid, xid.bqual) == (b"global", b"branch")
        session.tpc_commit(xid)
    assert [*bodies(text, "orders", 0)[20:], *bodies(text, "orders", 1)[20:]] == [b"in a branch"]
    commit = metaq.Outcome.COMMIT
    asked = list[bytes]()

    def decide(half: metaq.HalfMessage) -> metaq.Outcome:
        asked.append(half.body)
        return commit

    producer = client.transaction_producer("deciders", lambda half, argument: commit, check=decide)
    try:
        wait_until(lambda: asked != [], DEADLINE_S, "the broker asks", 0.1)
        wait_until(lambda: b"half" in everything(client, "bills"), DEADLINE_S, "the half message is there", 0.1)
    finally:
        producer.close()
    assert set(asked) == {b"half"}


def everything(client: metaq.Client, topic: str) -> list[bytes]:
    admin = client.admin()
    return [message.body for queue in admin.queues(topic) for message in admin.read(queue.queue, queue.begin, queue.end)]


def check(broker: BrokerProcess, expected: dict[str, Any]) -> None:
    """Everything that ``fill`` left is there."""
    with metaq.connect(broker.registry) as client, metaq.TextClient(broker.host, broker.port) as text:
        check_messages(client, text, expected)
        check_delayed(client, text, expected)
        check_leased(client, text, expected)
        check_undecided(client, text, broker.address)


@pytest.mark.parametrize("left", ["stopped", "killed"])
def test_everything_in_a_store_of_an_earlier_version_is_there(kept: Kept, left: str) -> None:
    """E-30: messages, offsets of groups, delayed, leased and undecided messages; also after a kill, and once more."""
    with BrokerProcess(kept.folder / left, *FLAGS) as broker:
        check(broker, kept.expected)
        assert broker.terminate() == 0
        broker.restart()
        with metaq.TextClient(broker.host, broker.port) as text:
            assert sorted(bodies(text, "reminders", 0)) == [b"by level", b"soon"]
            assert [*text.pop("tasks", "workers", 10)] == []


def test_a_client_of_an_earlier_version_works_with_this_broker(kept: Kept, tmp_path: Path) -> None:
    """E-30: it does all that the earlier version did, and this version's client finds it."""
    with BrokerProcess(tmp_path / "data", *FLAGS) as broker:
        printed = fill(kept.folder / "client", broker.registry, broker.address, SOON_MS, SOON_LEVEL, tmp_path)
        expected = json.loads(printed)
        assert Path(expected["file"]).is_relative_to(kept.folder)
        check(broker, expected)

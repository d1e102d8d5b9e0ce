"""A broker with a full disk starts, serves readers, refuses messages with the reason, and accepts them once there is room."""

from pathlib import Path
from typing import Final

import pytest

from metaq.client import TextClient
from metaq.client.text.textclient import parse_stats
from metaq.errors import Refused
from tests.support import nospace
from tests.support.broker import BrokerProcess, wait_until
from tests.support.cli import Cli
from tests.support.metrics import readiness

DEADLINE_S: Final = 60.0
SEGMENT: Final = 64 * 1024
SMALL: Final = ("--segment-bytes", str(SEGMENT), "--max-body-bytes", "20000", "--sweep-interval-ms", "20")
PROBLEM: Final = 2
HINTS: Final = ("--keep-hours", "--segment-bytes")


class Cramped(BrokerProcess):
    """A broker whose disk gets full when a test says so."""

    program = (nospace.__name__,)

    def fill(self, how: str = "") -> None:
        self.data.with_name("full").write_text(how, "ascii")

    def empty(self) -> None:
        self.data.with_name("full").unlink()

    def lines(self, event: str) -> list[str]:
        return [line for line in self.stderr().splitlines() if f" {event} " in f"{line} "]


def put_until_refused(client: TextClient) -> int:
    """How many messages were taken."""
    for number in range(3 * SEGMENT // 5000):
        try:
            client.put("t", b"%d" % number + bytes(5000))
        except Refused:
            return number
    raise AssertionError("nothing was refused")


def bodies(client: TextClient, count: int) -> list[bytes]:
    position, found = 0, list[bytes]()
    while len(found) < count:
        batch = client.get("t", position=position)
        found += [message.body.rstrip(b"\0") for message in batch.messages]
        position = batch.next_position
    return found


@pytest.mark.parametrize("how", ["", nospace.BRIM], ids=["no segment", "nothing at all"])
@pytest.mark.parametrize("killed", [True, False], ids=["killed", "stopped"])
def test_a_broker_starts_on_a_full_disk(tmp_path: Path, how: str, *, killed: bool) -> None:
    """SG-010, E-02, P39: it gives what it has, says everywhere why it takes nothing, and goes on when there is room."""
    with Cramped(tmp_path / "data", *SMALL, durability="disk") as broker:
        broker.fill(how)
        with TextClient(broker.host, broker.port) as client:
            count = put_until_refused(client)
        wait_until(lambda: bool(broker.lines("puts are refused")), DEADLINE_S, "the log says so")
        broker.kill() if killed else broker.terminate()
        broker.start()
        with TextClient(broker.host, broker.port) as client:
            assert bodies(client, count) == [b"%d" % number for number in range(count)]
            wait_until(lambda: readiness(broker)["ready"] is False, DEADLINE_S, "it is not ready")
            (reason,) = readiness(broker)["reasons"]
            with pytest.raises(Refused) as refused:
                client.put("t", b"hello")
            assert refused.value.code == 503
            stats = parse_stats(client.stats())["writable"]
        findings = Cli(broker.registry).rows("doctor", "--watch", "0", code=PROBLEM)
        (found,) = [row["found"] for row in findings if row["check"] == "writable"]
        for text in (reason, str(refused.value), stats, found):
            assert all(hint in text for hint in HINTS), text
        broker.empty()
        with TextClient(broker.host, broker.port) as client:
            wait_until(lambda: readiness(broker)["ready"] is True, DEADLINE_S, "it takes messages again")
            client.put("t", b"later")
            assert bodies(client, count + 1)[-1] == b"later"
        assert len(broker.lines("puts are taken again")) == 1
        assert len(broker.lines("puts are refused")) == 2  # before the restart, and after it


def test_a_new_folder_without_room_for_its_log(tmp_path: Path) -> None:
    """SG-010: the first segment may be too large for the disk."""
    broker = Cramped(tmp_path / "data", *SMALL)
    broker.fill()
    with broker, TextClient(broker.host, broker.port) as client:
        with pytest.raises(Refused, match="--segment-bytes"):
            client.put("t", b"hello")
        assert parse_stats(client.stats())["writable"].startswith("no: ")
        broker.empty()
        wait_until(lambda: readiness(broker)["ready"] is True, DEADLINE_S, "it takes messages")
        client.put("t", b"hello")
        assert bodies(client, 1) == [b"hello"]


def test_the_log_says_it_once(tmp_path: Path) -> None:
    """E-19: a duty that fails for the same reason again and again is one line, and one when it works again."""
    with Cramped(tmp_path / "data", *SMALL) as broker:
        broker.fill()
        with TextClient(broker.host, broker.port) as client:
            put_until_refused(client)
            wait_until(lambda: bool(broker.lines("puts are refused")), DEADLINE_S, "puts are refused")
            for _ in range(30):  # rounds of duties pass meanwhile
                readiness(broker)
        failed = broker.lines("duty failed")
        assert len(failed) == len({line.partition(" duty failed ")[2] for line in failed})
        broker.empty()
        wait_until(lambda: bool(broker.lines("puts are taken again")), DEADLINE_S, "puts are taken again")
        wait_until(lambda: bool(broker.lines("duty works again")), DEADLINE_S, "the duty works again")


def test_retention_works_on_a_full_disk(tmp_path: Path) -> None:
    """SG-010: what has expired goes, although nothing can be written."""
    soon = ("--clean-ratio", "0.000001", "--ample-free-bytes", str(1 << 60), "--retention-interval-ms", "50")
    with Cramped(tmp_path / "data", *SMALL) as broker:
        with TextClient(broker.host, broker.port) as client:
            for _ in range(4 * SEGMENT // 5000):
                client.put("t", bytes(5000))
        for _ in range(2):  # checkpoint and backup cover all
            assert broker.terminate() == 0
            broker.start()
        broker.kill()
        broker.fill(nospace.BRIM)
        log = broker.data / "commitlog"
        assert (log / f"{0:020d}").exists()
        broker.flags = (*SMALL, *soon, "--force-ratio", "1", "--refuse-ratio", "1", "--keep-hours", "0.0000001")
        broker.start()
        wait_until(lambda: not (log / f"{0:020d}").exists(), DEADLINE_S, "the oldest segment is gone")

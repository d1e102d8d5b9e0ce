"""`metaq.tx.manager` over a store: restarts, damaged snapshots, retention, limits, and many branches."""

import shutil
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import orjson
import pytest

from metaq.errors import CorruptRecord, ReadFailed
from metaq.protocol.properties import MESSAGE_ID
from metaq.protocol.record import decode_properties, decode_record, host_bytes
from metaq.store.expiry import delete_expired
from metaq.store.files.disk import File
from metaq.store.files.filecache import SECTOR, read_here, run_here
from metaq.store.log.retention import RetentionRules
from metaq.store.newrecord import NewRecord
from metaq.store.recovery.recovery import open_store
from metaq.store.settings import StoreSettings
from metaq.tx.branches import Work
from metaq.tx.journal import Held, Journal
from metaq.tx.manager import Transactions
from metaq.tx.openbranches import Room
from metaq.tx.snapshot import IDS_AHEAD
from metaq.tx.states import Decision
from metaq.tx.steps import Step
from metaq.tx.xacodes import XaCode, XaError
from tests.crash.driver import quiet
from tests.support.manualclock import ManualClock

SEGMENT: Final = 4096
HOST: Final = host_bytes("127.0.0.1", 8123)
RULES: Final = RetentionRules(keep_ms=1000, least_free_bytes=1)
MANY: Final = 100_000
BYTES_EACH: Final = 300


def key(number: int) -> str:
    return f"XID:1:{number:08x}:0b:app"


A, B, C, D = map(key, range(4))


class Folder:
    """A real data folder and its transactions, used by one process after the other."""

    def __init__(self, path: Path, segment_bytes: int = SEGMENT, **limits: int) -> None:
        self.path = path
        queue_file_bytes = segment_bytes // 16
        self.settings = StoreSettings(
            segment_bytes=segment_bytes, queue_file_bytes=queue_file_bytes, hot_bytes=0, retention=RULES
        )
        self.limits = {"max_branches": 10, "max_branch_bytes": SEGMENT, "max_open_transaction_bytes": 1 << 20} | limits
        self.clock = ManualClock()
        self.open()

    @property
    def snapshot(self) -> Path:
        return self.path / "config" / "transactions.json"

    def open(self) -> None:
        self.store, _ = open_store(self.path, self.settings, self.clock)
        self.tx = Transactions(self.store, Room(**self.limits, max_timeout_s=60), HOST, self.path / "config")

    def kill(self) -> None:
        """Release the lock and nothing else, as a process does that ends without a stop."""
        assert self.store.lock is not None
        self.store.lock.close()

    def restart(self) -> None:
        self.kill()
        self.open()

    def branch(self, name: str, *bodies: bytes, topic: str = "orders") -> None:
        """Open a branch with messages."""
        self.tx.branches.begin(name, 0, 0)
        for body in bodies:
            queue = self.store.queue(topic, 0)
            held = Held(
                queue, 0, body, zlib.crc32(body) & 0x7FFFFFFF, "tag", self.tx.steps.next_id(), self.clock.now_ms(), HOST
            )
            self.tx.branches.put(name, held, held.size)

    def turn(self, step: Step | None) -> None:
        """Append and sync what was staged."""
        assert step is not None
        self.store.append()
        self.store.sync()
        step.succeeded()

    def prepared(self, name: str, *bodies: bytes) -> None:
        self.branch(name, *bodies)
        self.turn(self.tx.prepare(name))

    def commit(self, name: str, *, one_phase: bool = False) -> None:
        work = self.tx.commit(name, one_phase=one_phase)
        self.turn(self.tx.store_commit(name, work, self.tx.at_hand(work) or self.tx.messages(work, read_here)))

    def decide(self, name: str, outcome: Decision) -> None:
        work = self.tx.decide(name, outcome)
        messages = self.tx.messages(work, read_here) if outcome is Decision.COMMIT else ()
        self.turn(self.tx.store_decision(name, work, outcome, messages))

    def save(self) -> None:
        self.tx.snapshots.save(run_here)

    def delete_expired(self, rounds: int = 1) -> None:
        """Checkpoints, then retention as the broker's duty does it."""
        self.clock.advance(10)
        for _ in range(rounds):
            self.store.checkpoint()
            self.store.checkpoint()
            decision = delete_expired(self.store, at_any_hour=True, needed_from=self.tx.keeping.oldest)
            if decision.due_before is not None:
                for step in self.tx.keeping.keep(decision.due_before, read_here):
                    self.turn(step)
            self.save()

    def fill(self, segments: int) -> None:
        """Ordinary messages over so many segments."""
        end = self.store.log.end + segments * SEGMENT
        while self.store.log.end < end:
            self.turn(self.local(bytes(1000)))

    def local(self, body: bytes) -> Step | None:
        queue = self.store.queue("others", 0)
        crc = zlib.crc32(body) & 0x7FFFFFFF
        return self.tx.store_local("TX:S:1", [Held(queue, 0, body, crc, None, self.tx.steps.next_id(), 0, HOST)])

    @property
    def undecided(self) -> list[str]:
        return [name for name, _ in self.tx.branches.places()]

    def delivered(self, topic: str = "orders") -> list[bytes]:
        queue = self.store.queue(topic, 0)
        first, _ = self.store.first(queue, read_here)
        found = self.store.records(queue, first, 10_000, read_here)
        return [bytes(decode_record(each.buffer[each.at : each.at + each.size]).body) for each in found if each is not None]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    with quiet():
        yield Folder(tmp_path / "data")


def work_of_each_kind(folder: Folder) -> None:
    """A is committed, B rolled back, C prepared, D decided by an operator; what is open is gone with the process."""
    for name in (A, B, C, D):
        folder.prepared(name, b"1 of " + name.encode(), b"2 of " + name.encode())
    folder.save()
    folder.commit(A)
    folder.turn(folder.tx.rollback(B))
    folder.save()
    folder.decide(D, Decision.ROLLBACK)
    folder.branch(key(9), b"open")


def expect_each_kind(folder: Folder) -> None:
    assert folder.undecided == [C]
    assert dict(folder.tx.branches.heuristics()) == {D: Decision.ROLLBACK}
    assert folder.tx.branches.recover(None) == [C, D]
    assert folder.delivered() == [b"1 of " + A.encode(), b"2 of " + A.encode()]
    assert folder.tx.branches.counts().open == 0


def lose(*names: str) -> Callable[[Path], None]:
    def work(config: Path) -> None:
        for name in names:
            (config / name).unlink(missing_ok=True)

    return work


def damage(*names: str) -> Callable[[Path], None]:
    def work(config: Path) -> None:
        for name in names:
            data = bytearray((config / name).read_bytes())
            data[len(data) // 2] ^= 1
            (config / name).write_bytes(data)

    return work


BOTH: Final = ("transactions.json", "transactions.json.bak")


def test_an_older_release_reads_a_snapshot(folder: Folder) -> None:
    """MQ-107: the topics stand beside the rows, which have three values and two as before."""
    folder.prepared(A, b"1")
    folder.prepared(B, b"1")
    folder.decide(B, Decision.ROLLBACK)
    folder.tx.snapshots.save_last()
    saved = orjson.loads(folder.snapshot.read_bytes())
    assert ([row[0] for row in saved["prepared"]], saved["heuristic"]) == ([A], [[B, "rollback"]])
    assert list(map(len, saved["prepared"])) == [3]
    assert saved["topics"] == {A: ["orders"], B: ["orders"]}
    folder.restart()
    assert (folder.tx.topics(A), folder.tx.topics(B), folder.tx.lacks_topics) == (("orders",), ("orders",), False)


@pytest.fixture
def without_topics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Marks as an older version writes them."""
    real = Journal.mark

    def mark(journal: Journal, content: dict[str, Any], ids: int) -> NewRecord:
        return real(journal, {name: each for name, each in content.items() if name != "topics"}, ids)

    monkeypatch.setattr(Journal, "mark", mark)


@pytest.mark.usefixtures("without_topics")
def test_topics_that_an_older_version_did_not_note_are_in_the_messages(folder: Folder) -> None:
    """E-06."""
    for name, body in ((A, b"a"), (B, b"b"), (C, b"damaged later")):
        folder.prepared(name, body)
    folder.store.checkpoint()  # from here on damage costs one record, not its group
    segment = folder.path / "commitlog" / f"{0:020d}"
    segment.write_bytes(segment.read_bytes().replace(b"damaged later", b"damaged LATER"))
    folder.restart()
    assert (folder.tx.topics(A), folder.tx.lacks_topics) == (None, True)
    folder.commit(B)
    folder.tx.learn_topics(read_here)
    assert [folder.tx.topics(name) for name in (A, B, C)] == [("orders",), None, None]
    assert not folder.tx.lacks_topics


@pytest.mark.usefixtures("without_topics")
def test_topics_are_known_of_a_branch_that_was_put_again(folder: Folder) -> None:
    """E-06."""
    folder.prepared(A, b"1")
    folder.restart()
    (step,) = folder.tx.keeping.keep(folder.store.log.end, read_here)
    folder.turn(step)
    assert (folder.tx.topics(A), folder.tx.lacks_topics) == (("orders",), False)


@pytest.mark.parametrize("happens", [lose(), lose(BOTH[0]), lose(*BOTH), damage(BOTH[0]), damage(*BOTH)])
def test_what_is_undecided_survives_with_and_without_a_snapshot(folder: Folder, happens: Callable[[Path], None]) -> None:
    """MQ-071, MQ-075, MQ-076, MQ-107: of a snapshot that is lost or damaged, the copy or the log tells the same."""
    work_of_each_kind(folder)
    happens(folder.snapshot.parent)
    folder.restart()
    expect_each_kind(folder)
    folder.commit(C)
    folder.turn(folder.tx.forget(D))
    folder.restart()
    assert folder.tx.branches.recover(None) == []
    assert folder.delivered()[2:] == [b"1 of " + C.encode(), b"2 of " + C.encode()]
    assert folder.store.reserved_bytes == 0


def test_an_orderly_stop_leaves_nothing_to_replay(folder: Folder) -> None:
    """MQ-107."""
    work_of_each_kind(folder)
    folder.tx.snapshots.save_last()
    folder.store.close()
    saved = orjson.loads(folder.snapshot.read_bytes())
    folder.open()
    assert saved["next"] == folder.store.queue("METAQ_SYS_TRANSACTIONS", 0).next
    expect_each_kind(folder)


def test_a_snapshot_is_taken_while_steps_are_open(folder: Folder) -> None:
    """MQ-107: a broker that is never idle saves too; the open step's mark is applied again."""
    folder.prepared(A, b"a")
    folder.branch(B, b"b")
    step = folder.tx.prepare(B)
    folder.save()
    assert orjson.loads(folder.snapshot.read_bytes())["next"] == 1
    folder.turn(step)
    folder.restart()
    assert folder.undecided == [A, B]


def test_a_snapshot_waits_for_the_log(folder: Folder) -> None:
    """MQ-107: what it covers must not be lost in a power cut that leaves the snapshot."""
    folder.branch(A, b"a")
    step = folder.tx.prepare(A)
    assert step is not None
    folder.store.append()
    step.succeeded()  # told before its time, when the disk takes too long
    folder.save()
    assert not folder.snapshot.exists()
    folder.store.sync()
    folder.save()
    assert folder.snapshot.exists()


def test_an_old_snapshot_does_not_bring_back_what_aged_out(folder: Folder, tmp_path: Path) -> None:
    """MQ-071: the marks that say that a branch was decided are deleted after it, never before."""
    folder.prepared(A, b"a")
    folder.prepared(B, b"b")
    folder.save()
    shutil.copy(folder.snapshot, tmp_path / "old")
    folder.commit(A)
    folder.fill(3)
    folder.delete_expired(rounds=3)
    assert folder.store.log.begin > 0
    shutil.copy(tmp_path / "old", folder.snapshot)
    folder.restart()
    assert folder.undecided == [B]
    assert folder.store.reserved_bytes == 1024


def test_a_snapshot_ahead_of_the_log_is_set_aside(folder: Folder, tmp_path: Path) -> None:
    """MQ-107: a log that was restored from a copy says itself what is undecided, and so do its new marks."""
    folder.prepared(A, b"a")
    folder.kill()
    shutil.copytree(folder.path, tmp_path / "copy")
    folder.open()
    folder.commit(A)
    folder.prepared(B, b"b")
    folder.save()
    shutil.copytree(folder.snapshot.parent, tmp_path / "copy" / "config")
    folder.kill()
    folder.path = tmp_path / "copy"
    folder.open()
    assert folder.undecided == [A]
    folder.prepared(C, b"c")
    folder.restart()
    assert folder.undecided == [A, C]


def test_branches_are_put_again_before_retention(folder: Folder) -> None:
    """MQ-071, MQ-107: an undecided branch never pins the disk, and is none the worse for that."""
    folder.prepared(A, b"a1", b"a2")
    folder.prepared(B, b"b")
    before = folder.tx.messages(folder.tx.branches.decide(A, Decision.COMMIT), read_here)
    folder.tx.branches.failed(A)
    since_ms = folder.tx.prepared(dict(folder.tx.branches.places())[A], read_here).since_ms
    folder.fill(2)
    folder.delete_expired()
    assert folder.store.log.begin == 0
    folder.delete_expired()
    assert folder.store.log.begin >= SEGMENT
    for restart in (False, True):
        if restart:
            folder.restart()
        assert folder.undecided == [A, B]
        assert folder.tx.prepared(dict(folder.tx.branches.places())[A], read_here).since_ms == since_ms
        assert folder.store.reserved_bytes == 3 * 1024
    work = folder.tx.commit(A, one_phase=False)
    after = folder.tx.messages(work, read_here)
    assert after == [each._replace(queue=folder.store.queue("orders", 0)) for each in before]
    folder.turn(folder.tx.store_commit(A, work, after))
    folder.turn(folder.tx.rollback(B))
    folder.delete_expired(rounds=3)
    assert folder.tx.keeping.oldest is None
    assert folder.delivered() == [b"a1", b"a2"]


def test_a_branch_stays_where_it_is_while_it_is_decided(folder: Folder) -> None:
    """MQ-071: put again, and decided before that is in the log."""
    folder.prepared(A, b"a")
    (kept,) = folder.tx.keeping.keep(folder.store.log.end, read_here)
    work = folder.tx.commit(A, one_phase=False)
    place = folder.tx.branches.place(A)
    folder.turn(kept)
    assert folder.tx.branches.place(A) == place
    folder.turn(folder.tx.store_commit(A, work, folder.tx.messages(work, read_here)))
    folder.restart()
    assert folder.undecided == []
    assert folder.delivered() == [b"a"]


def test_a_damaged_branch_pins_nothing_and_can_be_rolled_back(folder: Folder) -> None:
    """MQ-071: its messages are lost, the disk is not."""
    folder.prepared(A, b"damaged later")
    folder.prepared(B, b"b")
    folder.fill(1)
    folder.store.checkpoint()  # from here on damage costs one record, not its group
    segment = folder.path / "commitlog" / f"{0:020d}"
    segment.write_bytes(segment.read_bytes().replace(b"damaged later", b"damaged LATER"))
    folder.restart()
    with pytest.raises(Exception, match="only 0 of 1 messages prepared at log offset 0 are left"):
        folder.tx.messages(folder.tx.commit(A, one_phase=False), read_here)
    folder.tx.branches.failed(A)
    folder.fill(1)
    folder.delete_expired(rounds=2)
    assert folder.store.log.begin >= SEGMENT
    assert folder.undecided == [A, B]
    folder.turn(folder.tx.rollback(A))
    folder.commit(B)
    folder.restart()
    assert folder.undecided == []


def test_ids_never_run_back(folder: Folder) -> None:
    """MQ-075: a message that is in the log keeps its id to itself, whatever the clock says after a restart."""
    for number in range(4):
        folder.prepared(key(number), b"x")
        last = folder.tx.steps.next_id() + 1
        if number == 1:
            folder.save()
        folder.clock.jump(-3_600_000)
        folder.restart()
        assert folder.tx.steps.next_id() < last
    assert folder.tx.steps.next_id() > last - 3 * IDS_AHEAD
    for name in folder.undecided:
        folder.commit(name)
    queue = folder.store.queue("orders", 0)
    records = [each for each in folder.store.records(queue, 0, 10_000, read_here) if each is not None]
    tails = [decode_record(each.buffer[each.at : each.at + each.size]).properties for each in records]
    ids = [int(decode_properties(tail)[MESSAGE_ID]) for tail in tails]
    assert ids == sorted(set(ids), reverse=True)


def test_log_offsets_of_any_size_fit_a_snapshot(folder: Folder) -> None:
    """MQ-107: a log that has grown for years is far beyond 512 GiB."""
    value = (1 << 55) << 24 | 7
    folder.tx.branches.restore_prepared(A, value)
    folder.tx.snapshots.save_last()
    folder.restart()
    assert dict(folder.tx.branches.places()) == {A: value}
    assert folder.store.reserved_bytes == 7 * 1024


# -- limits -----------------------------------------------------------------------------------------------------------


def test_undecided_branches_count_after_a_restart(folder: Folder) -> None:
    """MQ-107: `max_branches` is of all that is open or undecided."""
    folder.limits["max_branches"] = 2
    folder.prepared(A, b"a")
    folder.prepared(B, b"b")
    folder.decide(B, Decision.COMMIT)
    folder.restart()
    with pytest.raises(XaError, match="max_branches") as refused:
        folder.branch(C)
    assert refused.value.code is XaCode.RMERR
    folder.turn(folder.tx.forget(B))
    folder.branch(C)


def test_a_branch_that_does_not_fit_into_a_segment_is_rolled_back_by_its_vote(tmp_path: Path) -> None:
    """MQ-071: the vote refuses what the log could not keep together."""
    folder = Folder(tmp_path / "data", max_branch_bytes=3 * SEGMENT)
    folder.branch(A, bytes(2000), bytes(2000), bytes(2000))
    with pytest.raises(XaError, match="a segment of the log has room for") as refused:
        folder.tx.prepare(A)
    assert refused.value.code is XaCode.RBOTHER
    assert folder.tx.branches.counts()[:2] == (0, 0)
    assert folder.store.reserved_bytes == 0
    folder.prepared(A, b"small")


# -- many -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_hundred_thousand_undecided_branches(tmp_path: Path) -> None:
    """MQ-071, MQ-107: restored from the log and from a snapshot, at most 300 bytes of memory each."""
    folder = Folder(tmp_path / "data", segment_bytes=64 << 20, max_branches=MANY)
    for first in range(0, MANY, 1000):
        steps = []
        for number in range(first, first + 1000):
            folder.branch(key(number), b"a message")
            steps.append(folder.tx.prepare(key(number)))
        folder.store.append()
        for step in steps:
            assert step is not None
            step.succeeded()
    folder.store.sync()
    for saved in (False, True):
        if saved:
            folder.save()
        folder.kill()
        folder.store, _ = open_store(folder.path, folder.settings, folder.clock)
        tracemalloc.start()
        folder.tx = Transactions(folder.store, Room(**folder.limits, max_timeout_s=60), HOST, folder.path / "config")
        size, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert folder.undecided == [key(number) for number in range(MANY)]
        assert size <= BYTES_EACH * MANY


def test_a_sector_of_a_parked_message_that_cannot_be_read(tmp_path: Path) -> None:
    """SG-018: the branch is damaged as by a flipped bit: it is reported so, and can still be rolled back."""
    folder = Folder(tmp_path, segment_bytes=1 << 20)
    folder.prepared(A, b"x" * 4 * SECTOR)
    place = folder.tx.branches.place(A)
    assert place is not None
    bad = place // SECTOR + 3  # of the body

    def read(file: File, size: int, offset: int) -> bytes:
        if offset < (bad + 1) * SECTOR and offset + size > bad * SECTOR:
            raise ReadFailed("cannot read: Input/output error")
        return read_here(file, size, offset)

    assert folder.tx.prepared(place, read).messages == 1
    with pytest.raises(CorruptRecord, match="only 0 of 1 messages"):
        folder.tx.messages(Work([], place), read)

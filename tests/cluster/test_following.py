"""A slave's follower and a master of the test's own, in one process: the exact conditions that the slave waits for."""

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, TypeVar, cast

import gevent
import pytest
from gevent import socket
from gevent.event import Event

from metaq.address import Address
from metaq.errors import DiskFailed
from metaq.message import Durability
from metaq.replication import feeder, follower
from metaq.replication.documents import NAMES, Documents
from metaq.replication.feeder import ReplicaIdentity
from metaq.replication.follower import Follower
from metaq.replication.frames import (
    HELLO_HEAD,
    REPORT,
    Control,
    Hello,
    ReplicationFrameReader,
    encode_control,
    encode_data,
    hello_length,
)
from metaq.replication.insync import InSync
from metaq.replication.peers import STRANGER, Peers
from metaq.store.copies.applying import piece
from metaq.store.copies.discarding import INTENT
from metaq.store.copies.epochs import Epochs
from metaq.store.files.disk import File, RealDisk
from metaq.store.files.documents import encode_document, read_document, write_document
from metaq.store.files.filecache import read_here, run_here
from metaq.store.messagestore import MessageStore
from metaq.store.recovery.recovery import open_store
from metaq.store.settings import StoreSettings
from tests.store.test_record_groups import FIRST as T0
from tests.store.test_record_groups import SECOND as T1
from tests.store.test_record_groups import put

SETTINGS: Final = StoreSettings(
    segment_bytes=4096, queue_file_bytes=256, index_slots=5, index_entries=40, durability=Durability.MEMORY
)
DEADLINE_S: Final = 60.0
TABLE: Final = NAMES[0]

T = TypeVar("T")


class Disk:
    """The pool: what is run there waits while the disk is busy."""

    def __init__(self) -> None:
        self.answers = Event()
        self.answers.set()
        self.asked = Event()

    def run(self, call: Callable[[], T]) -> T:
        self.asked.set()
        self.answers.wait()
        return call()


class Master:
    """The other side of one connection."""

    def __init__(self, store: MessageStore) -> None:
        self._store = store
        self._listener = socket.socket()
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen()
        self.address = Address(*self._listener.getsockname())
        self._sent = 0
        self._connection: Any = None

    def accept(self) -> None:
        """Take a slave, which continues where its log ends."""
        self.follow(self.meet())

    def meet(self) -> int:
        """Where the log of a slave that connects ends."""
        self._connection, _ = self._listener.accept()
        self._connection.settimeout(DEADLINE_S)
        hello = Hello.decode(self._read(hello_length(self._read(HELLO_HEAD))))
        return hello.end

    def follow(self, end: int) -> None:
        """Have it continue there."""
        self._sent = end
        self._connection.sendall(encode_control(self._store.log.end, {"epoch": 0, "follow": end}))

    def send_log(self) -> None:
        """Send what the log has after the part already sent, at most 1 MiB."""
        start, data = piece(self._store.log, self._sent, 1 << 20, read_here)
        self._sent = start + len(data)
        self._connection.sendall(encode_data(start, len(data)) + bytes(data))

    def send_table(self, text: str) -> None:
        self.send_heartbeat([1], documents={TABLE: text})

    def send_heartbeat(self, in_sync: list[int], **more: Any) -> None:
        end = self._store.log.end
        self._connection.sendall(encode_control(end, {"epoch": 0, "readable_end": end, "begin": 0, "in_sync": in_sync, **more}))

    def wait_for_report(self) -> None:
        """Wait until the slave reports that it has all that was sent."""
        while REPORT.unpack(self._read(REPORT.size))[0] < self._sent:
            pass

    def wait_for_end(self) -> float:
        """When the slave hung up, by the monotonic clock."""
        while self._connection.recv(1 << 16):
            pass
        return time.monotonic()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._listener.close()

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = self._connection.recv(size - len(data))
            assert more, "the slave hung up"
            data += more
        return data


def follower_of(
    store: MessageStore,
    find_master: Callable[[], Address],
    disk: Disk,
    took: Callable[[Collection[str]], None] = lambda names: None,
    replaced: Callable[[], None] = lambda: None,
    peers: Peers = STRANGER,
) -> Follower:
    """A slave that has not started."""
    return Follower(
        store,
        Epochs(store),
        ReplicaIdentity("c", "b", 0, 2),
        "127.0.0.1:1",
        find_master=find_master,
        folder=store.directory / "config",
        run=disk.run,
        run_sync=disk.run,
        took=took,
        published=lambda queues: None,
        replaced=replaced,
        peers=peers,
    )


@contextmanager
def following(folder: Path, master: Master, disk: Disk, took: Callable[[Collection[str]], None]) -> Iterator[MessageStore]:
    """A slave that has connected to the master; its store."""
    store, _ = open_store(folder, SETTINGS)
    store.suspicion.rise("it is new")  # else that is what the disk is busy with
    slave = follower_of(store, lambda: master.address, disk, took)
    slave.start()
    try:
        master.accept()
        yield store
    finally:
        disk.answers.set()
        slave.stop()
        master.close()
        store.close()


def table(folder: Path, number: int) -> str:
    """The text of a table with a number in it."""
    write_document(RealDisk(), folder / "made.json", {"number": number})
    return (folder / "made.json").read_text()


def test_the_log_does_not_wait_for_tables(tmp_path: Path) -> None:
    """P08: while the disk is busy with a table, what the log grows by is taken and reported; then the latest table is kept."""
    source, _ = open_store(tmp_path / "master", SETTINGS)
    master, disk, took = Master(source), Disk(), Event()
    with gevent.Timeout(DEADLINE_S), following(tmp_path / "slave", master, disk, lambda names: took.set()) as slave:
        put(source, T0, b"one")
        master.send_log()
        master.wait_for_report()
        disk.answers.clear()
        master.send_table(table(tmp_path, 1))
        disk.asked.wait()
        put(source, T0, b"two")
        master.send_table(table(tmp_path, 2))
        master.send_log()
        master.wait_for_report()
        assert slave.log.end == source.log.end
        assert not took.is_set()
        disk.answers.set()
        took.wait()
        while read_document(RealDisk(), tmp_path / "slave" / "config" / TABLE)[0] != {"number": 2}:
            gevent.sleep(0.01)
    source.close()


def test_tables_that_have_come_are_kept_when_it_stops(tmp_path: Path) -> None:
    """MQ-079: a slave that is stopped while the disk is busy keeps what its master has sent."""
    source, _ = open_store(tmp_path / "master", SETTINGS)
    master, disk = Master(source), Disk()
    with gevent.Timeout(DEADLINE_S), following(tmp_path / "slave", master, disk, lambda names: None):
        disk.answers.clear()
        master.send_table(table(tmp_path, 1))
        disk.asked.wait()
        master.send_table(table(tmp_path, 2))
        put(source, T0, b"one")
        master.send_log()
        master.wait_for_report()
    assert read_document(RealDisk(), tmp_path / "slave" / "config" / TABLE)[0] == {"number": 2}
    source.close()


@contextmanager
def failed_slave(folder: Path) -> Iterator[tuple[MessageStore, Master, MessageStore]]:
    """A master with its store, and a slave whose disk fails after it has reported a message."""
    source, _ = open_store(folder / "master", SETTINGS)
    master = Master(source)
    with gevent.Timeout(DEADLINE_S), following(folder / "slave", master, Disk(), lambda names: None) as slave:
        put(source, T0, b"one")
        master.send_log()
        master.wait_for_report()
        slave.fail(DiskFailed("cannot sync: input/output error"))
        yield source, master, slave
    source.close()


def test_a_slave_whose_disk_has_failed_reports_no_more(tmp_path: Path) -> None:
    """F-FAIL: what it had reported may be gone from the page cache, so it must not stay in sync."""
    with failed_slave(tmp_path) as (source, master, slave):
        put(source, T0, b"two")
        master.send_log()
        with pytest.raises(AssertionError, match="the slave hung up"):
            master.wait_for_report()
        assert slave.log.end < source.log.end


def test_a_slave_whose_disk_has_failed_follows_no_idle_master_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F-FAIL: it would stay in sync, and a suspicion would be taken from it, although nothing comes that it could not keep."""
    monkeypatch.setattr(follower, "SILENCE_S", 2 * DEADLINE_S)
    with failed_slave(tmp_path) as (_, master, slave):
        master.send_heartbeat(in_sync=[1, 2])
        master.wait_for_end()
        assert slave.suspicion.reason == "it is new"


# -- changes ----------------------------------------------------------------------------------------------------------


class SlowPeers(Peers):
    """A network in which each connection takes as long as a test wants."""

    def __init__(self) -> None:
        super().__init__(lambda: None, "")
        self.asked, self.answers = Event(), Event()

    def connect(self, address: tuple[str, int], timeout_s: float) -> socket.socket:
        self.asked.set()
        self.answers.wait()
        return super().connect(address, timeout_s)


def test_who_hears_of_another_master_while_it_connects_follows_that_one(tmp_path: Path) -> None:
    """F-PART: not the one before, which may be master by its own account for a while."""
    source, _ = open_store(tmp_path / "master", SETTINGS)
    store, _ = open_store(tmp_path / "slave", SETTINGS)
    old, new, peers = Master(source), Master(source), SlowPeers()
    found = [old.address, new.address]
    slave = follower_of(store, lambda: found[0], Disk(), peers=peers)
    with gevent.Timeout(DEADLINE_S):
        slave.start()
        peers.asked.wait()
        del found[0]
        slave.go_to(new.address)
        peers.answers.set()
        with pytest.raises(AssertionError, match="the slave hung up"):
            old.accept()
        new.accept()
        slave.stop()
    for master in (old, new):
        master.close()
    for each in (store, source):
        each.close()


def stop_at_a_write(slave: Follower, master: Master, disk: Disk, say: Callable[[], None]) -> None:
    """Stop it while it writes what the master has said; it has to wait."""
    with gevent.Timeout(DEADLINE_S):
        slave.start()
        master.meet()
        disk.asked.clear()
        disk.answers.clear()
        say()
        disk.asked.wait()
        stopping = gevent.spawn(slave.stop)
        gevent.idle()
        assert not stopping.ready()
        disk.answers.set()
        stopping.join()
    master.close()


def test_a_cut_that_is_being_written_down_is_waited_for(tmp_path: Path) -> None:
    """F-FAIL: written after the store was opened anew, in another role, it would cut that one's log at its next opening."""
    source, _ = open_store(tmp_path / "master", SETTINGS)
    store, _ = open_store(tmp_path / "slave", SETTINGS)
    put(store, T0, b"one")
    end = store.log.end
    put(store, T0, b"two")
    master, disk, replaced = Master(source), Disk(), list[str]()
    slave = follower_of(store, lambda: master.address, disk, replaced=lambda: replaced.append("replaced"))
    stop_at_a_write(slave, master, disk, lambda: master.follow(end))
    assert read_document(RealDisk(), store.directory / INTENT)[0] is not None
    assert not replaced, "whoever stops it opens the store anew"
    store.close()
    source.close()


@pytest.mark.parametrize("is_cleared", [False, True])
def test_a_suspicion_that_is_being_written_down_is_waited_for(tmp_path: Path, *, is_cleared: bool) -> None:
    """F-FAIL: raised or cleared after the store was opened anew, it would be one of another role."""
    source, _ = open_store(tmp_path / "master", SETTINGS)
    store, _ = open_store(tmp_path / "slave", SETTINGS)
    if is_cleared:
        store.suspicion.rise("it is new")
    master, disk = Master(source), Disk()

    def follow() -> None:
        master.follow(0)  # raises one, since the log is empty
        master.send_heartbeat([1, 2] if is_cleared else [1])

    stop_at_a_write(follower_of(store, lambda: master.address, disk), master, disk, follow)
    assert (store.suspicion.reason is None) == is_cleared
    store.close()
    source.close()


# -- the link ---------------------------------------------------------------------------------------------------------


def test_a_silent_master_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SG-140: after 5 s in which nothing comes, and not while something does."""
    assert follower.SILENCE_S == 5.0
    monkeypatch.setattr(follower, "SILENCE_S", 1.0)
    source, _ = open_store(tmp_path / "master", SETTINGS)
    master = Master(source)
    with gevent.Timeout(DEADLINE_S), following(tmp_path / "slave", master, Disk(), lambda names: None):
        for _ in range(15):
            gevent.sleep(0.1)
            master.send_table(table(tmp_path, 1))
        heard = time.monotonic()
        assert master.wait_for_end() >= heard + 0.9
    source.close()


def test_a_silent_slave_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SG-140: a master says every 0.5 s how it stands, and waits 10 s for a report; with reports the link stays."""
    assert (feeder.HEARTBEAT_S, feeder.SILENCE_S) == (0.5, 10.0)
    monkeypatch.setattr(feeder, "SILENCE_S", 1.4)
    store, _ = open_store(tmp_path / "master", SETTINGS)
    feeding = feeder_of(store, tmp_path)
    reader, said, end = ReplicationFrameReader(), 0, store.log.end
    with gevent.Timeout(DEADLINE_S):
        feeding.start()
        ours = connect(feeding)
        while said < 5:  # the answer to the hello, and heartbeats every half second, each with its report
            data = ours.recv(1 << 16)
            assert data, "the link is ended although reports come"
            said += len(reader.receive(data))
            ours.sendall(REPORT.pack(end))
        heard = time.monotonic()
        while ours.recv(1 << 16):
            said += 1
        assert time.monotonic() >= heard + 1.3 and said >= 6
    assert not any(slave.in_sync for slave in feeding.in_sync.standings())
    feeding.stop()
    ours.close()
    store.close()


def test_a_table_is_sent_when_it_has_changed_and_not_too_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each change sends all topics: a thousand changes of a large table send it a few times, and the last one is among them."""
    monkeypatch.setattr(feeder, "TABLES_S", 3600.0)
    monkeypatch.setattr(feeder, "TABLE_BYTES_S", 20_000)
    store, _ = open_store(tmp_path / "master", SETTINGS)
    feeding = feeder_of(store, tmp_path)
    (tmp_path / TABLE).write_bytes(encode_document({"changes": 0, "rest": "x" * 10_000}))
    sent: list[str] = []
    with gevent.Timeout(DEADLINE_S):
        feeding.start()
        ours = connect(feeding)
        taking = gevent.spawn(take_tables, ours, store.log.end, sent)
        while not sent:
            gevent.sleep(0.001)
        began, changes = time.monotonic(), 0
        while len(sent) < 4 or changes < 1000:
            changes += 1
            RealDisk().unlink(tmp_path / TABLE)
            (tmp_path / TABLE).write_bytes(encode_document({"changes": changes, "rest": "x" * 10_000}))
            feeding.send_tables()
            gevent.sleep(0.001)
        while f'"changes":{changes},' not in sent[-1]:
            gevent.sleep(0.001)
        assert len(sent) <= 2 + 2 * (time.monotonic() - began)
    feeding.stop()
    taking.kill()
    ours.close()
    store.close()


def take_tables(connection: Any, end: int, sent: list[str]) -> None:
    """Report what a master asks for, and take the tables that it sends."""
    reader = ReplicationFrameReader()
    while data := connection.recv(1 << 16):
        controls = [item.content for item in reader.receive(data) if isinstance(item, Control)]
        sent += [content["documents"][TABLE] for content in controls if "documents" in content]
        connection.sendall(REPORT.pack(end))


def test_a_master_that_has_not_started_takes_no_slave(tmp_path: Path) -> None:
    """SG-140: nothing is copied before the begin of its epoch is saved, and nothing after its role has ended."""
    store, _ = open_store(tmp_path / "master", SETTINGS)
    feeding = feeder_of(store, tmp_path)
    with gevent.Timeout(DEADLINE_S):
        with connect(feeding) as early:
            assert is_ended(early)
        feeding.start()
        with connect(feeding) as slave:
            assert ReplicationFrameReader().receive(slave.recv(1 << 16))
            feeding.stop()
        with connect(feeding) as late:
            assert is_ended(late)
    store.close()


def feeder_of(store: MessageStore, folder: Path) -> feeder.Feeder:
    """Return the feeder of a master that has no slave in sync agreed on."""
    in_sync = InSync(1, 1, 3.0, time.monotonic, lambda: store.log.end, lambda wanted: False, lambda: None)
    state: Any = SimpleNamespace(readable_end=store.log.end)
    own = ReplicaIdentity("c", "b", 0, 1)
    return feeder.Feeder(store, Epochs(store), in_sync, own, state, lambda: Documents(folder, RealDisk()), run_here)


@pytest.mark.parametrize("moment", range(1, 16))
def test_a_copy_begins_at_one_place(tmp_path: Path, moment: int) -> None:
    """F-FAIL: retention deletes segments at any moment while the master reads where each partition begins."""
    store, _ = open_store(tmp_path, SETTINGS)
    for queue, segments in ((T0, 2), (T1, 4), (T0, 6)):
        while len(store.log.segments) < segments:
            put(store, queue, b"x" * 500)
    store.close()
    store, _ = open_store(tmp_path, SETTINGS)  # what it has not appended itself it reads from the disk
    log, reads = store.log, iter(range(1, 1000))

    def read(file: File, size: int, offset: int) -> bytes:
        data = read_here(file, size, offset)
        if next(reads) == moment:
            for segment in log.segments[:3]:
                log.remove(segment)
        return data

    log.remove(log.segments[0])
    feeding = feeder_of(store, tmp_path)
    feeding.read = read
    hello = Hello("c", "b", 0, 2, SETTINGS.segment_bytes, 0, 0, [[1, 0, 0]], None, "h:1", 0)
    copy = feeding._answer(hello, cast(Any, None))["copy"]
    ends = [(*key, *store.first(queue, read_here)) for key, queue in store.queues.items()]
    assert copy == {"begin": log.begin, "partitions": ends}
    store.close()


def is_ended(connection: socket.socket) -> bool:
    """Return whether the other side closes the connection without a word."""
    try:
        return not connection.recv(1)
    except ConnectionResetError:  # it had not read the hello
        return True


def connect(feeding: feeder.Feeder) -> socket.socket:
    """Return a slave's connection, which has said hello."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        ours = socket.create_connection(listener.getsockname(), timeout=DEADLINE_S)
        theirs, _ = listener.accept()
    begin, end = feeding.store.log.begin, feeding.store.log.end
    ours.sendall(Hello("c", "b", 0, 2, SETTINGS.segment_bytes, begin, end, [[0, 0, 0]], None, "127.0.0.1:1", end).encode())
    feeding.serve(theirs, Address("127.0.0.1", 2))
    return ours

"""The store's face: put, append, sync, read, positions, checkpoints.

One writer, which never gives up control between ``put`` and ``append``. Calls that may wait for the disk take a ``Run`` or a
``Read`` from the caller, who decides where the waiting is done; other calls of the store may happen meanwhile.

What a turn of the broker's loop brings is staged by ``put`` and becomes part of the log by one ``append``: all of it or
nothing. Readers see whole appends, at MEMORY when they are written, at DISK when they are synced.
"""

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from metaq.clock import Clock, SystemClock
from metaq.errors import BrokerError, DiskFailed, DiskFull, Fenced, NotWritable, StoreError
from metaq.message import Durability, TextPosition, TopicPartition
from metaq.protocol.record import (
    CHECKSUM_SIZE,
    HEADER_SIZE,
    MAGIC,
    PATCHED_HEADER,
    STORE_MS_OF_MIDDLE,
    record_tail,
    with_sys_flag,
)
from metaq.protocol.text.messages import Stored, plain_overhead
from metaq.store.checkpoint import FAILED, LIVE_NAME, Checkpoint, Live, Progress, write_checkpoint, write_live
from metaq.store.files import ending
from metaq.store.files.disk import Disk, File, RealDisk
from metaq.store.files.filecache import FileCache, Read, Rest, Run, go_on, run_here
from metaq.store.index.indexfile import Entry
from metaq.store.index.indexing import Indexing, entry_of
from metaq.store.index.keyindex import NO_INDEX, IndexMark, KeyIndex
from metaq.store.log.commitlog import CommitLog
from metaq.store.query import query
from metaq.store.queues.consumequeue import WRITE_AT, ConsumeQueue, sync_together
from metaq.store.reading import Reader
from metaq.store.settings import StoreSettings
from metaq.store.statistics import StoreStatistics

LOG: Final = "commitlog"
QUEUES: Final = "consumequeue"
INDEX: Final = "index"
FIRST_EPOCH: Final = 1
"""Not 0: the message at log offset 0 must not get the id 0, which tells Java clients that a put failed."""


Message = tuple[ConsumeQueue, int, bytes, int, bytes, int, bytes | None, int, tuple[str, ...]]
"""The arguments of ``MessageStore.put``."""


class MessageStore:
    """An open data folder. Made by ``metaq.store.recovery.recovery.open_store``."""

    def __init__(
        self,
        directory: Path,
        settings: StoreSettings | None = None,
        clock: Clock | None = None,
        disk: Disk | None = None,
    ) -> None:
        self.directory = directory
        self.settings = settings or StoreSettings()
        self.clock = clock or SystemClock()
        self.disk = disk or RealDisk()
        self.files = FileCache(self.disk, self.settings.open_files)
        self.log = CommitLog(directory / LOG, self.files, self.settings.segment_bytes, self.settings.hot_bytes)
        self.queues: dict[TopicPartition, ConsumeQueue] = {}
        self._queue_root = str(directory / QUEUES)  # thousands of paths are made at the start
        index = KeyIndex(directory / INDEX, self.files, self.settings.index_slots, self.settings.index_entries)
        self.indexing = Indexing(
            *(index, self.log, self.disk, self.clock, self.settings.retention),
            spare=self.settings.segment_bytes,
        )
        self.epoch = FIRST_EPOCH
        self.failure: StoreError | None = None
        """Why nothing more is written until the store is opened anew."""
        self.durable_end = 0
        self.no_room: str | None = None
        """Why puts are refused for now, as retention last saw the disk."""
        self.refusal: BrokerError | None = None
        """Why this replica takes no messages but those of its master."""
        self.reserved_bytes = 0
        """Room on the disk that is promised to others than puts, which may have it when puts are refused."""
        self._behind: StoreError | None = None  # why pending units could not be written
        self.messages_put = 0
        self.syncs = 0
        self._turn = 0
        self._touched: list[tuple[ConsumeQueue, int, int, int]] = []  # per queue how to take back what was staged
        self._keyed: list[Entry] = []  # what is staged and has keys
        self._unpublished: deque[tuple[int, list[tuple[ConsumeQueue, int, int]]]] = deque()
        # ordered, so that the same work makes the same calls
        self._unwritten: dict[ConsumeQueue, None] = {}  # have pending units
        self._changed: dict[ConsumeQueue, None] = {}  # differ from the last durable checkpoint
        self._checkpointed: dict[tuple[str, int], Progress] = {}
        self._index_mark = NO_INDEX  # what the last durable checkpoint says of the key index
        self.index_covered = ""
        """The newest index file that the backup of the checkpoint names."""
        self._checkpoint_mark = -1
        self.covered = -1
        """Both copies of the checkpoint cover the log up to here."""
        self._units_before = 0  # units in all queues when the store was opened
        self._live_mark = -1
        self._boot_id = self.disk.boot_id()
        self.reader = Reader(self.log, self.queues)
        self.lock: File | None = None
        self.suspicion = ending.Suspicion(self.disk, directory)

    # -- partitions ---------------------------------------------------------------------------------------------------

    def queue(self, topic: str, partition: int) -> ConsumeQueue:
        """The consume queue of a partition, made when there is none; nothing is written for that."""
        key = TopicPartition(topic, partition)
        queue = self.queues.get(key)
        if queue is None:
            directory = Path(f"{self._queue_root}/{topic}/{partition}")
            tail = record_tail(topic, b"")
            file_bytes = self.settings.queue_file_bytes
            queue = ConsumeQueue(topic, partition, directory, self.files, file_bytes, tail, plain_overhead(topic))
            self.queues[key] = queue
        return queue

    # -- writing ------------------------------------------------------------------------------------------------------

    @property
    def shortage(self) -> str | None:
        """Why there is no room for messages; ``None`` when there is."""
        error = self.log.shortage or self._behind
        return self.no_room if error is None else str(error)

    @property
    def writable(self) -> bool:
        """Whether puts are taken now."""
        return self.failure is None and self.refusal is None and self.shortage is None

    def check_healthy(self) -> None:
        """Raise why nothing more is written until the store is opened anew."""
        if self.failure is not None:
            raise NotWritable(f"the broker is read-only until it is restarted: {self.failure}")

    def check_master(self) -> None:
        """Raise why this store does not know what is so now: another replica writes, or may do so by now."""
        if self.refusal is not None:
            raise self.refusal
        self.log.fence()

    def check_writable(self) -> None:
        """Raise why a put would be refused now."""
        self.check_healthy()
        if self.refusal is not None:
            raise self.refusal
        if (shortage := self.shortage) is not None:
            raise DiskFull(shortage)

    def put(
        self,
        queue: ConsumeQueue,
        flag: int,
        body: bytes,
        crc: int,
        middle: bytes,
        text_size: int,
        tail: bytes | None = None,
        tag: int = 0,
        keys: tuple[str, ...] = (),
    ) -> int:
        """Stage one message and return where it will be; ``check_writable`` came first.

        ``crc`` is the body's CRC, ``middle`` comes from ``constant_middle``, ``tail`` from ``record_tail`` when the message
        has properties, ``tag`` is the hash of its tag, ``keys`` are what it is found by (``keys_of``). Its ordinal and text
        position are the queue's ``next`` and ``text_end`` before the call. Raises ``DiskFull`` when the log cannot grow; the
        turn goes on without this message.
        """
        if tail is None:
            tail = queue.tail
        length = len(body)
        size = HEADER_SIZE + length + len(tail) + CHECKSUM_SIZE
        log = self.log
        if log.staged_end + size > log.room_end:
            log.make_room(size)
        offset = log.staged_end
        ordinal, position = queue.next, queue.text_end
        if queue.turn != self._turn:
            queue.turn = self._turn
            self._touched.append((queue, ordinal, position, len(queue.pending)))
        header = PATCHED_HEADER.pack(size, MAGIC, crc, queue.partition, flag, ordinal, offset, middle, position, length)
        log.stage(header + body + tail)
        queue.add(offset, size, tag, text_size)
        if keys:
            self._keyed.append((offset, queue.topic, keys, STORE_MS_OF_MIDDLE.unpack(middle)[0]))
        return offset

    def put_all(self, messages: Iterable[Message], sys_flag: int = 0) -> list[int]:
        """Stage messages one behind the other, a fifth cheaper than as many ``put``, whose arguments they are.

        Room for all was reserved (``CommitLog.reserve``): this does not fail half way. ``sys_flag`` is added to theirs.
        """
        shared = patched = b""  # the middle is the same for most messages
        log, turn, pack = self.log, self._turn, PATCHED_HEADER.pack
        offset, offsets = log.staged_end, []
        records: list[bytes] = []
        for queue, flag, body, crc, middle, text_size, own_tail, tag, keys in messages:
            if middle is not shared:
                shared, patched = middle, with_sys_flag(middle, sys_flag)
            tail, length = own_tail or queue.tail, len(body)
            size = HEADER_SIZE + length + len(tail) + CHECKSUM_SIZE
            if offset + size > log.room_end:
                log.stage_all(records)
                log.make_room(size)
                offset, records = log.staged_end, []
            ordinal, position = queue.next, queue.text_end
            if queue.turn != turn:
                self.touch(queue)
            header = pack(size, MAGIC, crc, queue.partition, flag, ordinal, offset, patched, position, length)
            records.append(header + body + tail)
            queue.add(offset, size, tag, text_size)
            if keys:
                self._keyed.append((offset, queue.topic, keys, STORE_MS_OF_MIDDLE.unpack(middle)[0]))
            offsets.append(offset)
            offset += size
        log.stage_all(records)
        return offsets

    def copied(self, record: memoryview, log_offset: int) -> None:
        """Have the keys of a staged copy entered, if it has any."""
        if (entry := entry_of(record, log_offset)) is not None:
            self._keyed.append(entry)

    def touch(self, queue: ConsumeQueue) -> None:
        """Remember how a queue was before this turn, whose append may fail."""
        if queue.turn != self._turn:
            queue.turn = self._turn
            self._touched.append((queue, queue.next, queue.text_end, len(queue.pending)))

    def append(self) -> list[ConsumeQueue]:
        """Write all staged messages; return the queues in which readers now see more.

        On failure nothing of the turn is stored: ``DiskFull`` may be tried again, anything else makes the store read-only.
        """
        touched = self._touched
        if not touched:
            return []
        self._touched = []
        self._turn += 1
        before = self.log.end
        try:
            self.log.append()
        except StoreError as error:
            for queue, ordinal, text_end, pending in touched:
                queue.take_back(ordinal, text_end, pending)
            self._keyed.clear()
            if not isinstance(error, (DiskFull, Fenced)):
                self._fail(error)
            raise
        assert self.log.end > before
        if self._keyed:
            self.indexing.appended(self._keyed)
            self._keyed.clear()
        changes = []
        for queue, ordinal, _, _ in touched:
            self.messages_put += queue.next - ordinal
            changes.append((queue, queue.next, queue.text_end))
            self._unwritten[queue] = None
            self._changed[queue] = None
            if len(queue.pending) >= WRITE_AT:
                self.write_units(queue)
        self._unpublished.append((self.log.end, changes))
        return self.publish(self.log.end) if self.settings.durability is Durability.MEMORY else []

    def publish(self, end: int) -> list[ConsumeQueue]:
        """Let readers see every append that ends at or before ``end``; the store does so by itself at MEMORY and DISK."""
        seen = []
        while self._unpublished and self._unpublished[0][0] <= end:
            for queue, ordinal, text_end in self._unpublished.popleft()[1]:
                queue.publish(ordinal, text_end)
                seen.append(queue)
        return seen

    def hide(self, changes: list[tuple[ConsumeQueue, int, int]]) -> None:
        """Readers see so much of these queues (next ordinal and text end) when all of the log as it is now is published."""
        self._unpublished.append((self.log.end, changes))

    def sync(self, run: Run = run_here) -> list[ConsumeQueue]:
        """Make what is appended now durable; return the queues in which readers see more. One call at a time.

        A failure makes the store read-only: after it the kernel may report the next sync as good without having written.
        It is raised again for as long as there is something to sync.
        """
        end = self.log.end
        if end > self.durable_end:
            if self.failure is not None:
                raise self.failure
            try:
                self.log.sync(self.durable_end, run)
            except StoreError as error:
                self._fail(error)
                raise
            self.syncs += 1
            self.durable_end = max(end, self.durable_end)
        return [] if self.settings.durability.on_replicas else self.publish(self.durable_end)

    def _fail(self, error: StoreError) -> None:
        """Take no more messages, and tell the next process that the page cache may hold what the disk does not."""
        if self.failure is None:
            self.failure = error
            with contextlib.suppress(StoreError):  # the failure is what is reported
                write_live(self._live(), self._boot_id, Live(FAILED, 0))

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def write_units(self, queue: ConsumeQueue) -> bool:
        """Write a queue's pending units; false when that fails. Without room for them no more messages are taken."""
        try:
            self.log.owed.check()
            queue.write()
        except DiskFull as error:
            self._behind = error
            return False
        except DiskFailed as error:
            self._fail(error)
            return False
        self._unwritten.pop(queue, None)
        return True

    @property
    def settled(self) -> bool:
        """Whether no message is staged. Units of staged ones must not be written: their append may still fail."""
        return not self._touched

    def sweep(self, rest: Rest = go_on) -> None:
        """Write all units that are pending now and set the live mark. One call at a time.

        Without room for some of them, the next sweep tries again.
        """
        assert self.settled
        live = Live(self.log.end, self._units_before + self.messages_put)
        behind, all_written = self._behind, True
        for queue in self.in_slices(list(self._unwritten), rest):
            all_written &= self.write_units(queue)
        if not all_written:
            return
        if self._behind is behind:
            self._behind = None
        if self.failure is None and live.mark != self._live_mark:
            write_live(self._live(), self._boot_id, live)
            self._live_mark = live.mark

    def in_slices(self, queues: Iterable[ConsumeQueue], rest: Rest) -> Iterator[ConsumeQueue]:
        """The queues, one by one; others go on each time that the caller has worked for a while."""
        clock, slice_s = self.clock, self.settings.slice_ms / 1000
        began = clock.monotonic()
        for queue in queues:
            yield queue
            if clock.monotonic() - began >= slice_s:
                rest()
                assert self.settled
                began = clock.monotonic()

    def drop_live_mark(self) -> None:
        """Queue files are about to be cut and made anew: what the mark says of them ends here."""
        self._live().truncate(0)

    def _live(self) -> File:
        return self.files.open(self.directory / LIVE_NAME)

    def index_keys(self, run: Run = run_here) -> None:
        """Enter the keys of what was put since, a round of it; call it every sweep interval. One call at a time."""
        if self.failure is not None:
            return
        try:
            self.indexing.work(run)
        except DiskFailed as error:
            self._fail(error)
            raise

    def checkpoint(self, run: Run = run_here, rest: Rest = go_on) -> None:
        """Make everything up to now durable and write it down, so that recovery after a power cut begins here.

        When nothing has changed it is written once more, so that its backup says the same, and then no more.
        """
        assert self.settled
        self.log.owed.check()
        mark = self.log.end
        unchanged = mark == self.covered and not self._changed and self.indexing.mark == self._index_mark
        if self.failure is not None or unchanged:
            return
        changed, self._changed = self._changed, {}
        ends = [(queue.next, queue.text_end) for queue in changed]
        index = self.indexing.capture()
        progress = {}
        try:
            for queue, end in zip(self.in_slices(list(changed), rest), ends, strict=True):
                queue.write()
                progress[queue.topic, queue.partition] = Progress(*end)
            self.log.sync(min(self.durable_end, mark), run)
            many = len(changed) >= self.settings.sync_together
            if not (many and self.lock is not None and sync_together(self.in_slices(changed, rest), self.lock, run)):
                for queue in changed:
                    queue.sync(run)
            flushed = index is not None and self.indexing.flush(index, run)
            index_mark = index.mark if index is not None and flushed else self._index_mark
            self.check_healthy()  # a sync that failed meanwhile may have been the only one to be told
            checkpointed = {**self._checkpointed, **progress}
            run(lambda: write_checkpoint(self.disk, self.directory, Checkpoint(mark, checkpointed, index_mark)))
        except BaseException as error:  # also when the caller gives up while it waits
            self._changed |= changed
            if isinstance(error, DiskFailed):
                self._fail(error)
            raise
        self._checkpointed = checkpointed
        self.index_covered, self._index_mark = self._index_mark.file, index_mark
        self.covered, self._checkpoint_mark = self._checkpoint_mark, mark

    def recovered(self, checkpointed: dict[tuple[str, int], Progress], index_mark: IndexMark, covered: int) -> None:
        """Go on from what recovery found.

        ``checkpointed`` and ``index_mark`` are what the durable checkpoint on disk says; it and its backup cover the log up to
        ``covered``.
        """
        self._checkpointed = checkpointed
        self._index_mark = index_mark
        self.covered = covered
        self._units_before = sum(queue.next for queue in self.queues.values())
        for queue in self.queues.values():
            queue.live_from = queue.next
            queue.publish(queue.next, queue.text_end)
            if queue.pending:
                self._unwritten[queue] = None
            if checkpointed.get((queue.topic, queue.partition)) != Progress(queue.next, queue.text_end):
                self._changed[queue] = None

    def close(self, *, durably: bool = True) -> None:
        """Make everything durable and leave the mark of an orderly stop. The store is not used after that.

        When that fails (``StoreError``) the folder is free all the same, for a recovery. If not ``durably``, nothing waits for
        the disk, and the next opening goes on here as after a kill.
        """
        try:
            self.append()
            if self.failure is None and durably:
                self.sync()
                self.sweep()
                self.checkpoint()
                ending.end(self.disk, self.directory)
            elif self.failure is None:
                self.sweep()
        finally:
            self.release()

    def release(self) -> None:
        """Free the folder without more ado: the next opening recovers. Once more, or after ``close``, changes nothing."""
        self.files.clear()
        if self.lock is not None:
            self.lock.close()
            self.lock = None

    # -- reading ------------------------------------------------------------------------------------------------------

    def records(self, queue: ConsumeQueue, ordinal: int, hint_bytes: int, read: Read) -> Iterator[Stored | None]:
        """The records of a partition from an ordinal on, in order, as far as readers may see.

        ``None`` stands for a message that is damaged or lost. ``hint_bytes`` is about how much the caller will take.
        """
        return self.reader.records(queue, ordinal, hint_bytes, read)

    def first(self, queue: ConsumeQueue, read: Read) -> tuple[int, TextPosition]:
        """Ordinal and text position of the oldest message that is still there, or of the next one when none is."""
        return self.reader.first(queue, read)

    def locate(self, queue: ConsumeQueue, position: int, read: Read) -> tuple[int, TextPosition]:
        """Ordinal and position of the message that contains a text position.

        Where that one is lost or aged out: of the first one behind; at or behind the end: of the message that comes next.
        """
        return self.reader.locate(queue, position, read)

    def query(self, topic: str, key: str, begin_ms: int, end_ms: int, most: int, read: Read) -> list[Stored]:
        """The newest readable messages of a topic that have a key and were stored in a time, both ends included.

        At most ``most``, never more than ``MOST_FOUND`` or, but for the first one, ``MOST_BYTES``. Raises ``Overloaded`` while
        the key index is being made anew.
        """
        return query(self.indexing, self.reader, topic, key, begin_ms, end_ms, most, read)

    def record_at_offset(self, log_offset: int, read: Read) -> Stored | None:
        """The readable record that begins at a log offset which a client names; ``None`` when none does."""
        return self.reader.at_offset(log_offset, read)

    # -- figures ------------------------------------------------------------------------------------------------------

    def statistics(self) -> StoreStatistics:
        return StoreStatistics.of(self)

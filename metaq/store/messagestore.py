"""The message store, as the broker uses it: put, append, sync, read, text positions, checkpoints.

There is one writer, which never yields control between ``put`` and ``append``. Calls that may wait for the disk take a ``Run``
or a ``Read`` from the caller, which decides where the wait takes place; other calls of the store may run meanwhile.

``put`` stages the messages of one turn of the broker's event loop, and one ``append`` adds them to the log: all of them or
none. Readers see whole appends: with durability MEMORY when they are written, with DISK when they are synced.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from metaq.clock import Clock, SystemClock
from metaq.errors import DiskFailed, DiskFull, Fenced, StoreError
from metaq.message import Durability, TextPosition, TopicPartition
from metaq.protocol.record import (
    CHECKSUM_SIZE,
    HEADER_SIZE,
    RecordWriter,
    record_tail,
    store_ms_of,
    with_sys_flag,
)
from metaq.protocol.text.messages import Stored, plain_overhead
from metaq.store.checkpoint import Live, LiveMark, PartitionProgress
from metaq.store.checkpointing import Checkpointing
from metaq.store.fence import Fence
from metaq.store.files import ending
from metaq.store.files.disk import Disk, File, RealDisk
from metaq.store.files.filecache import FileCache, Read, Rest, Run, go_on, run_here
from metaq.store.gate import Gate
from metaq.store.index.indexfile import Entry
from metaq.store.index.indexing import Indexing, entry_of
from metaq.store.index.keyindex import IndexMark, KeyIndex
from metaq.store.log.commitlog import CommitLog
from metaq.store.log.retention import RetentionRules
from metaq.store.newrecord import Fields
from metaq.store.query import query
from metaq.store.queues.consumequeue import WRITE_AT, ConsumeQueue
from metaq.store.reading import Reader
from metaq.store.settings import StoreSettings

LOG: Final = "commitlog"
QUEUES: Final = "consumequeue"
INDEX: Final = "index"
Ends = dict[ConsumeQueue, tuple[int, int]]
"""The ordinal and the text position of the next message of each queue."""
MANY_HIDDEN: Final = 1000
"""From this many appends on that readers do not see yet, further ones become visible together, so that memory does not grow."""
TOGETHER_BYTES: Final = 1024 * 1024
"""The part of the log whose appends become visible together then."""
FIRST_EPOCH: Final = 1
"""Not 0, or the message at log offset 0 would get the id 0, which means to Java clients that a put failed."""


class MessageStore(Gate):
    """An open data folder. ``metaq.store.recovery.recovery.open_store`` makes one."""

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
        fence = Fence()
        segment_bytes, hot_bytes = self.settings.segment_bytes, self.settings.hot_bytes
        on_disk, place = self.settings.durability.on_disk, directory / LOG
        log = CommitLog(place, self.files, segment_bytes, hot_bytes, fence.check, is_synced_often=on_disk)
        super().__init__(log, fence, LiveMark(self.disk, self.files, directory))
        self.queues: dict[TopicPartition, ConsumeQueue] = {}
        self._queue_root = str(directory / QUEUES)  # thousands of paths are made at the start
        index = KeyIndex(directory / INDEX, self.files, self.settings.index_slots, self.settings.index_entries)
        retention, spare = self.settings.retention, self.settings.segment_bytes
        self.indexing = Indexing(index, self.log, self.disk, self.clock, retention, spare=spare)
        self.epoch = FIRST_EPOCH
        self.durable_end = 0
        self.reserved_bytes = 0
        """Disk space kept for other purposes than puts: retention counts it as used, so it is there when puts are refused."""
        self.published_end = 0
        """The log offset before which readers see everything, as of the last append that became readable."""
        self.messages_put = 0
        self.syncs = 0
        self._turn = 0
        self._touched: list[tuple[ConsumeQueue, int, int, int]] = []  # queues with staged messages: their state before
        self._keyed: list[Entry] = []  # the keys of staged messages
        self._records = RecordWriter()
        self._latest_middle, self._latest_ms = b"", 0  # of the latest message with keys; many share theirs
        self._unpublished: deque[tuple[int, Ends]] = deque()
        many = self.settings.sync_together
        self.checkpointing = Checkpointing(self, self.indexing, self.disk, directory, self.in_slices, many_queues=many)
        self._units_before = 0  # units in all queues when the store was opened
        self.reader = Reader(self.log, self.queues)
        self.lock: File | None = None
        self.suspicion = ending.Suspicion(self.disk, directory)

    # -- partitions ---------------------------------------------------------------------------------------------------

    def queue(self, topic: str, partition: int) -> ConsumeQueue:
        """Return the consume queue of a partition; a missing one is made in memory, nothing is written."""
        key = TopicPartition(topic, partition)
        queue = self.queues.get(key)
        if queue is None:
            directory = Path(f"{self._queue_root}/{topic}/{partition}")
            tail = record_tail(topic, b"")
            file_bytes = self.settings.queue_file_bytes
            queue = ConsumeQueue(topic, partition, directory, self.files, file_bytes, tail, plain_overhead(topic))
            self.queues[key] = queue
        return queue

    def retain_by(self, rules: RetentionRules) -> None:
        """Take over other rules of retention and disk use, for the log and for the key index."""
        self.settings = replace(self.settings, retention=rules)
        self.indexing.rules = rules

    # -- writing ------------------------------------------------------------------------------------------------------

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
        """Stage one message and return its log offset. The caller has called ``check_writable`` or ``check_appendable``.

        The parameters are the fields of a ``NewRecord``: to make one for each put would cost a sixth of the put. The message's
        ordinal and text position are the queue's ``next`` and ``text_end`` before the call. Raises ``DiskFull`` when the log
        cannot grow, and ``BadRequest`` for a record larger than a segment; the messages staged before stay staged.
        """
        if tail is None:
            tail = queue.tail
        size = HEADER_SIZE + len(body) + len(tail) + CHECKSUM_SIZE
        log = self.log
        if log.staged_end + size > log.room_end:
            log.make_room(size)
        offset = log.staged_end
        ordinal, position = queue.next, queue.text_end
        if queue.turn != self._turn:
            queue.turn = self._turn
            self._touched.append((queue, ordinal, position, queue.pending_bytes))
        record = self._records.unchecked(size, crc, queue.partition, flag, ordinal, offset, middle, position, body, tail)
        log.stage(record)
        queue.add(offset, size, tag, text_size)
        if keys:
            if middle is not self._latest_middle:
                self._latest_middle, self._latest_ms = middle, store_ms_of(middle)
            self._keyed.append((offset, queue.topic, keys, self._latest_ms))
        return offset

    def put_all(self, new: Iterable[Fields], sys_flag: int = 0) -> list[int]:
        """Stage several messages and return their log offsets.

        The caller has reserved room for all of them (``CommitLog.reserve``), so this does not fail halfway. The bits of
        ``sys_flag`` are added to each message's system flag.
        """
        shared = patched = b""  # most messages share one middle, so it is patched once
        offsets: list[int] = []
        for queue, flag, body, crc, middle, text_size, tail, tag, keys in new:
            if middle is not shared:
                shared, patched = middle, with_sys_flag(middle, sys_flag)
            offsets.append(self.put(queue, flag, body, crc, patched, text_size, tail, tag, keys))
        return offsets

    def copied(self, record: memoryview, log_offset: int) -> None:
        """Remember the keys of a staged copy, if it has any; the append enters them."""
        if (entry := entry_of(record, log_offset)) is not None:
            self._keyed.append(entry)

    def touch(self, queue: ConsumeQueue) -> None:
        """Remember the state of a queue before this turn, whose append may fail."""
        if queue.turn != self._turn:
            queue.turn = self._turn
            self._touched.append((queue, queue.next, queue.text_end, queue.pending_bytes))

    def append(self, *, awaited: bool = False) -> list[ConsumeQueue]:
        """Write all staged messages; return the queues in which readers now see more.

        ``awaited`` says that somebody is answered once readers see the append before, which must not wait for this one then.
        On failure nothing of the turn is stored. All but ``DiskFull``, ``Fenced``, ``TooManyFiles`` make the store read-only.
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
                self.fail(error)
            raise
        assert self.log.end > before
        if self._keyed:
            self.indexing.appended(self._keyed)
            self._keyed.clear()
        changes: Ends = {}
        for queue, ordinal, _, _ in touched:
            self.messages_put += queue.next - ordinal
            changes[queue] = (queue.next, queue.text_end)
            self.checkpointing.appended(queue)
            if queue.pending_bytes >= WRITE_AT:
                self.checkpointing.write_units(queue)
        self.hide(changes, apart=awaited)
        return self.publish(self.log.end) if self.settings.durability is Durability.MEMORY else []

    def publish(self, end: int) -> list[ConsumeQueue]:
        """Let readers see every append that ends at or before ``end``; return the queues in which they see more."""
        latest: Ends = {}
        while self._unpublished and self._unpublished[0][0] <= end:
            self.published_end, changes = self._unpublished.popleft()
            latest.update(changes)
        for queue, (ordinal, text_end) in latest.items():
            queue.publish(ordinal, text_end)
        return list(latest)

    def hide(self, changes: Ends, *, apart: bool = True) -> None:
        """Let readers see these queues up to their new ends once the log, up to its present end, is published.

        Unless it is to become visible ``apart``, the end of a long backlog becomes visible together with what came before.
        """
        hidden, end = self._unpublished, self.log.end
        if not apart and len(hidden) >= MANY_HIDDEN and hidden[-1][0] // TOGETHER_BYTES == end // TOGETHER_BYTES:
            before = hidden.pop()[1]
            before.update(changes)
            changes = before
        hidden.append((end, changes))

    def sync(self, run: Run = run_here) -> list[ConsumeQueue]:
        """Make everything appended so far durable; return the queues in which readers see more. One call at a time.

        A failure makes the store read-only: after a failed sync the kernel may report the next one as successful although the
        data was never written. It is raised again as long as there is something to sync. ``TooManyFiles`` is no such failure.
        """
        end = self.log.end
        if end > self.durable_end:
            if self.failure is not None:
                raise self.failure.with_traceback(None)  # else it would keep the frames of each time
            try:
                self.log.sync(self.durable_end, run)
            except StoreError as error:
                self.fail(error)
                raise
            self.syncs += 1
            self.durable_end = max(end, self.durable_end)
        return [] if self.settings.durability.on_replicas else self.publish(self.durable_end)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    @property
    def settled(self) -> bool:
        """True while no message is staged. Units of staged messages must not be written: their append may still fail."""
        return not self._touched

    def sweep(self, rest: Rest = go_on) -> None:
        """Write all units that are pending now and set the live mark. One call at a time.

        When some of them cannot be written, the live mark stays, and the next sweep tries again. Raises ``TooManyFiles`` then
        if that was the reason; of other failures ``check_writable`` tells.
        """
        assert self.settled
        self.checkpointing.sweep(Live(self.log.end, self._units_before + self.messages_put), rest)

    def in_slices(self, queues: Iterable[ConsumeQueue], rest: Rest) -> Iterator[ConsumeQueue]:
        """Yield the queues one by one; let others go on (``rest``) whenever the caller has worked for ``slice_ms``."""
        clock, slice_s = self.clock, self.settings.slice_ms / 1000
        began = clock.monotonic()
        for queue in queues:
            yield queue
            if clock.monotonic() - began >= slice_s:
                rest()
                assert self.settled
                began = clock.monotonic()

    def index_keys(self, run: Run = run_here) -> None:
        """Enter one round of the keys not yet indexed, every sweep interval. One call at a time.

        ``DiskFailed`` is final, except ``ReadFailed`` and ``TooManyFiles``: the next round tries again.
        """
        if self.failure is not None:
            return
        try:
            self.indexing.work(run)
        except DiskFailed as error:
            self.fail(error)
            raise

    def checkpoint(self, run: Run = run_here, rest: Rest = go_on, run_sync: Run = run_here) -> None:
        """Make everything up to now durable and write a checkpoint, so that recovery after a power cut starts from here.

        When nothing has changed since the last checkpoint, it is written once more, so that its backup is the same, and then
        not again. ``run_sync`` is the ``run`` of ``sync``. Raises ``DiskFull``, ``TooManyFiles`` or ``ReadFailed``, after
        which it can be made later, ``DiskFailed``, which makes the store read-only, or ``NotWritable``, when another sync has
        failed meanwhile. A read-only store makes no checkpoint.
        """
        assert self.settled
        self.checkpointing.checkpoint(self.durable_end, self.lock, run, rest, run_sync)

    def recovered(self, checkpointed: dict[tuple[str, int], PartitionProgress], index_mark: IndexMark, covered: int) -> None:
        """Take over the result of recovery, and let readers see every queue up to its end.

        ``checkpointed`` and ``index_mark`` come from the durable checkpoint on disk; it and its backup cover the log up to
        ``covered``.
        """
        self._units_before = sum(queue.next for queue in self.queues.values())
        self.published_end = self.log.end
        for queue in self.queues.values():
            queue.live_from = queue.next
            queue.publish(queue.next, queue.text_end)
        self.checkpointing.begin(self.queues.values(), checkpointed, index_mark, covered)

    def close(self, *, durably: bool = True) -> None:
        """Make everything durable and mark the stop as orderly. The store must not be used afterwards.

        The folder is released even when that fails (``StoreError``); the next opening then recovers. Without ``durably``,
        nothing is synced, and the next opening recovers as after a killed process.
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
        """Release the folder without writing anything: the next opening recovers. A second call does nothing.

        Later appends raise ``Fenced``: the folder may belong to the next role by then.
        """
        self.fence.release()
        self.files.clear()
        if self.lock is not None:
            self.lock.close()
            self.lock = None

    # -- reading ------------------------------------------------------------------------------------------------------

    def records(self, queue: ConsumeQueue, ordinal: int, hint_bytes: int, read: Read) -> Iterator[Stored | None]:
        """Yield the records of a partition from an ordinal on, in order, as far as readers may see.

        ``None`` stands for a message that is damaged or lost. ``hint_bytes`` is about how many bytes the caller will take.
        """
        return self.reader.records(queue, ordinal, hint_bytes, read)

    def first(self, queue: ConsumeQueue, read: Read) -> tuple[int, TextPosition]:
        """Return ordinal and text position of the oldest message still kept; of the next one to come when there is none."""
        return self.reader.first(queue, read)

    def locate(self, queue: ConsumeQueue, position: int, read: Read) -> tuple[int, TextPosition]:
        """Return ordinal and text position of the message that contains a text position.

        When that message is lost or has aged out, return those of the first message after it; for a position at or after the
        end, those of the next message to come.
        """
        return self.reader.locate(queue, position, read)

    def query(self, topic: str, key: str, begin_ms: int, end_ms: int, most: int, read: Read) -> list[Stored]:
        """Return the newest readable messages of a topic that have a key and were stored in a time range, both ends included.

        They are at most ``most`` and ``MOST_FOUND`` messages of together at most ``MOST_BYTES``; only the first may be larger.
        Raises ``Overloaded`` while too much of the log is still to be indexed, and ``ColdRead`` when ``read`` may not wait and
        would have to.
        """
        return query(self.indexing, self.reader, topic, key, begin_ms, end_ms, most, read)

    def record_at_offset(self, log_offset: int, read: Read) -> Stored | None:
        """Return the readable record that begins at a log offset given by a client; ``None`` when none begins there."""
        return self.reader.at_offset(log_offset, read)

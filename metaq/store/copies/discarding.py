"""Discarding a part of a log, or all of it, because another replica's log is the right one.

While the store is open, the intended change is only written to ``replacing.json``. The next opening makes it, and after a crash
the opening after that makes it again, until it is complete::

    {"crc32c":"…","begin":null,"end":81233,"partitions":[["orders",0,1204,90871],…]}

    begin         null: the log keeps its begin and is cut at ``end``; otherwise all is deleted, and the log begins there, empty
    partitions    topic, number, and the ordinal and text position of the next message
"""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

from metaq.errors import CorruptRecord
from metaq.protocol.record import BLANK, BLANK_MAGIC, BLANK_SIZE
from metaq.store.checkpoint import LIVE_NAME, NAME, Checkpoint, PartitionProgress, write_checkpoint
from metaq.store.copies.applying import end_before
from metaq.store.files.disk import Disk, File
from metaq.store.files.documents import BACKUP, read_document, write_document
from metaq.store.files.filecache import FileCache, Run, read_here, run_here
from metaq.store.log.commitlog import CommitLog
from metaq.store.log.segments import Segment, is_segment_name, segment_name
from metaq.store.log.walk import Gap, walk
from metaq.store.messagestore import INDEX, LOG, QUEUES, MessageStore
from metaq.store.ordered.ordered import remove_ordered
from metaq.store.queues.consumequeue import ConsumeQueue
from metaq.store.settings import StoreSettings

INTENT: Final = "replacing.json"
TIMER_INDEX: Final = "timerindex"
"""The folder of the index that ``metaq.timers`` makes from the log."""
DEDUPE_INDEX: Final = "dedupeindex"
"""The folder of the index that ``metaq.dedupe`` makes from the log."""

Ends = Iterable[tuple[str, int, int, int]]
"""Topic and partition, and the ordinal and text position of its next message."""


def cut_at_next_opening(store: MessageStore, end: int, whole_from: int | None, run: Run = run_here) -> None:
    """Write down that the next opening cuts the log at ``end``, where a record ends. The caller reopens the store at once.

    Given ``whole_from``, an earlier log offset at which a record ends, ``end`` need not be the end of one: the log is cut
    before the first torn or damaged record after ``whole_from``, or before the record that contains ``end``. Raises
    ``CorruptRecord`` when no record ends at ``end`` and ``whole_from`` is missing or after it.
    """
    assert store.settled
    if not _goes_on(store.log, end):
        if whole_from is None or end < whole_from:
            raise CorruptRecord(f"the log cannot be cut at {end}, because no record ends there")
        log = store.log
        segments = [(segment, log.file(segment)) for segment in log.segments if segment.end > whole_from]
        end = run(lambda: _last_end(segments, whole_from, end))
    ends = [(queue.topic, queue.partition, *end_before(store, queue, end)) for queue in store.queues.values()]
    _write(store, None, end, ends, run)


def _last_end(segments: list[tuple[Segment, File]], start: int, most: int) -> int:
    """Return where the last record ends that follows ``start`` without a gap and ends at or before ``most``."""
    end = start
    for found in walk(segments, start):
        if isinstance(found, Gap) or found.log_offset + found.size > most:
            break
        end = found.log_offset + found.size
    return end


def begin_at_next_opening(store: MessageStore, begin: int, ends: Ends, run: Run = run_here) -> None:
    """Write down that the next opening makes the log empty, beginning at ``begin``. The caller reopens the store at once."""
    _write(store, begin, begin, ends, run)


def _write(store: MessageStore, begin: int | None, end: int, ends: Ends, run: Run) -> None:
    content = {"begin": begin, "end": end, "partitions": list(ends)}
    run(lambda: write_document(store.disk, store.directory / INTENT, content))


def _goes_on(log: CommitLog, log_offset: int) -> bool:
    """Return whether an intact record begins at a log offset, or the blank record that closes a segment."""
    segment = log.find(log_offset)
    if segment is None or log_offset + BLANK_SIZE > segment.end:
        return False
    size, magic = BLANK.unpack(read_here(log.file(segment), BLANK_SIZE, log_offset - segment.base))
    return (magic == BLANK_MAGIC and size == segment.end - log_offset) or log.record_at(log_offset) is not None


def discard_intended(directory: Path, settings: StoreSettings, disk: Disk) -> None:
    """Make the change written to ``replacing.json``, if there is one. The folder is locked, and no store is open.

    ``ReadFailed`` when the file cannot be read: carried out at a later start, the change could take what came after it.
    """
    with suppress(FileNotFoundError):
        disk.read_file(directory / INTENT)
    content, _ = read_document(disk, directory / INTENT)
    if content is None:
        return
    ends = {(topic, partition): PartitionProgress(*end) for topic, partition, *end in content["partitions"]}
    files = FileCache(disk, settings.open_files)
    disk.unlink(directory / LIVE_NAME)
    for name in disk.list_directory(directory / INDEX):
        disk.unlink(directory / INDEX / name)
    if content["begin"] is not None:
        for name in (TIMER_INDEX, DEDUPE_INDEX):  # they know nothing of what lies before the new begin
            remove_ordered(directory / name)
        _delete_log(directory, content["begin"], disk)
    for key, progress in ends.items():
        _cut_queue(directory, key, progress.next, settings, files)
    log = CommitLog(directory / LOG, files, settings.segment_bytes, settings.hot_bytes)
    log.start_at(content["end"])
    log.owed.check()
    _sync_all(directory, disk)
    for _ in range(2):  # twice, so that the backup says the same: retention deletes only what both cover
        write_checkpoint(disk, directory, Checkpoint(content["end"], ends))
    files.clear()
    for name in (INTENT, INTENT + BACKUP):
        disk.unlink(directory / name)
    disk.sync_directory(directory)


def _sync_all(directory: Path, disk: Disk) -> None:
    """Make the log and the queues durable: what a killed process wrote may still be in the page cache only."""
    if disk.open(directory / INTENT).sync_file_system():
        return
    queues = directory / QUEUES
    topics = [queues / topic for topic in disk.list_directory(queues)]
    partitions = [topic / partition for topic in topics for partition in disk.list_directory(topic)]
    for folder in (directory / LOG, *partitions):
        for name in disk.list_directory(folder):
            disk.open(folder / name).datasync()
    for folder in (directory / LOG, *partitions, *topics, *([queues] if topics else [])):
        disk.sync_directory(folder)


def _delete_log(directory: Path, begin: int, disk: Disk) -> None:
    for name in (NAME, NAME + BACKUP):
        disk.unlink(directory / name)
    for name in disk.list_directory(directory / LOG):
        if is_segment_name(name) and name != segment_name(begin):
            disk.unlink(directory / LOG / name)
    root = directory / QUEUES
    for topic in disk.list_directory(root):
        for partition in disk.list_directory(root / topic):
            for name in disk.list_directory(root / topic / partition):
                disk.unlink(root / topic / partition / name)
    disk.open(directory / LOG / segment_name(begin)).close()


def _cut_queue(directory: Path, key: tuple[str, int], count: int, settings: StoreSettings, files: FileCache) -> None:
    queue = ConsumeQueue(*key, directory / QUEUES / key[0] / str(key[1]), files, settings.queue_file_bytes, b"", 0)
    queue.load()
    if queue.written > count:
        queue.reset(count, 0)
        queue.write()

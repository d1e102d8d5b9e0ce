"""Giving up a part of a log, or all of it, because another replica's log is the right one.

While the store is open, what is to be is written down in ``replacing.json``; the next opening does it, again and again until
it is done, so a crash in between changes nothing::

    {"crc32c":"…","begin":null,"end":81233,"partitions":[["orders",0,1204,90871],…]}

    begin         null: the log keeps its begin and is cut at ``end``; otherwise all is deleted, and the log begins there, empty
    partitions    of each the ordinal and text position of the message that comes next
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from metaq.errors import CorruptRecord
from metaq.protocol.record import BLANK, BLANK_MAGIC, BLANK_SIZE, identity
from metaq.store.checkpoint import LIVE_NAME, NAME, Checkpoint, Progress, write_checkpoint
from metaq.store.files.disk import Disk, File
from metaq.store.files.documents import BACKUP, read_document, write_document
from metaq.store.files.filecache import FileCache, Run, read_here, run_here
from metaq.store.log.commitlog import CommitLog, Gap, Segment, is_segment_name, segment_name, walk
from metaq.store.messagestore import INDEX, LOG, QUEUES, MessageStore
from metaq.store.queues.consumequeue import FILLER_SIZE, ConsumeQueue
from metaq.store.settings import StoreSettings

INTENT: Final = "replacing.json"

Ends = Iterable[tuple[str, int, int, int]]
"""Topic, partition, ordinal and text position of the message that comes next."""


def cut_at_next_opening(store: MessageStore, end: int, whole_from: int | None, run: Run = run_here) -> None:
    """Have the log end at a log offset, where a record ends; the store is closed and opened anew at once.

    With a log offset ``whole_from``, where one ends before, none need end there: the log is cut before what is torn or damaged.
    ``CorruptRecord`` when none ends there before.
    """
    assert store.settled
    if not _goes_on(store.log, end):
        if whole_from is None or end < whole_from:
            raise CorruptRecord(f"the log cannot be cut at {end}, where no record of it ends")
        log = store.log
        segments = [(segment, log.file(segment)) for segment in log.segments if segment.end > whole_from]
        end = run(lambda: _last_end(segments, whole_from, end))
    ends = [(queue.topic, queue.partition, *_end_before(store, queue, end)) for queue in store.queues.values()]
    _write(store, None, end, ends, run)


def _last_end(segments: list[tuple[Segment, File]], start: int, most: int) -> int:
    """Where the last of the records ends that follow from ``start`` on without a gap, at ``most`` at the latest."""
    end = start
    for found in walk(segments, start):
        if isinstance(found, Gap) or found.log_offset + found.size > most:
            break
        end = found.log_offset + found.size
    return end


def begin_at_next_opening(store: MessageStore, begin: int, ends: Ends, run: Run = run_here) -> None:
    """Have an empty log that begins at a log offset; the store is closed and opened anew at once."""
    _write(store, begin, begin, ends, run)


def _write(store: MessageStore, begin: int | None, end: int, ends: Ends, run: Run) -> None:
    content = {"begin": begin, "end": end, "partitions": list(ends)}
    run(lambda: write_document(store.disk, store.directory / INTENT, content))


def _goes_on(log: CommitLog, log_offset: int) -> bool:
    """Whether a record begins at a log offset, or what closes a segment."""
    segment = log.find(log_offset)
    if segment is None or log_offset + BLANK_SIZE > segment.end:
        return False
    size, magic = BLANK.unpack(read_here(log.file(segment), BLANK_SIZE, log_offset - segment.base))
    return (magic == BLANK_MAGIC and size == segment.end - log_offset) or log.record_at(log_offset) is not None


def _end_before(store: MessageStore, queue: ConsumeQueue, end: int) -> tuple[int, int]:
    """Ordinal and text position of the first message of a queue that is at or behind a log offset."""
    count, position = queue.next, queue.text_end
    while count > queue.base:
        offset, size, _ = queue.unit(count - 1, read_here)
        if offset < end and size != FILLER_SIZE:
            break
        count -= 1
        stored = None if size == FILLER_SIZE else store.log.record_at(offset)
        if stored is not None:
            position = identity(stored.buffer).text_position
    return count, position


def replace(directory: Path, settings: StoreSettings, disk: Disk) -> None:
    """Do what is written down, if anything is. The folder is locked, and no store is open."""
    content, _ = read_document(disk, directory / INTENT)
    if content is None:
        return
    ends = {(topic, partition): Progress(*end) for topic, partition, *end in content["partitions"]}
    files = FileCache(disk, settings.open_files)
    disk.unlink(directory / LIVE_NAME)
    for name in disk.list_directory(directory / INDEX):
        disk.unlink(directory / INDEX / name)
    if content["begin"] is not None:
        _delete_log(directory, content["begin"], disk)
    for key, progress in ends.items():
        _cut_queue(directory, key, progress.next, settings, files)
    log = CommitLog(directory / LOG, files, settings.segment_bytes, settings.hot_bytes)
    log.start_at(content["end"])
    log.owed.check()
    _sync_all(directory, disk)
    for _ in range(2):  # the backup says the same: what both cover may be trusted
        write_checkpoint(disk, directory, Checkpoint(content["end"], ends))
    files.clear()
    for name in (INTENT, INTENT + BACKUP):
        disk.unlink(directory / name)
    disk.sync_directory(directory)


def _sync_all(directory: Path, disk: Disk) -> None:
    """Make the log and the queues durable: some of them the page cache alone may have, from a process that was killed."""
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

"""Opening a data folder: decide where the log ends, rebuild what is derived, and say what was found.

1. The newest mark that may be trusted (``checkpoint``) says from where the log must be walked; without one, from its begin.
2. Every intact record behind the mark is dispatched to its queue. A bad range with intact records behind it stays in the log,
   is listed in ``quarantine.json``, and its messages leave filler units in their queues.
3. Behind the last intact record the log is cut: zeroed and synced before anything is appended.

Nothing here refuses to start over a short, empty, torn or altered file; only an unknown format version does.
"""

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from metaq.clock import Clock
from metaq.errors import UnknownVersion
from metaq.message import Durability
from metaq.protocol.record import identity
from metaq.protocol.textmessage import Stored, tag_hash, text_size
from metaq.store.checkpoint import Checkpoint, Progress, read_checkpoint, read_live
from metaq.store.commitlog import Gap
from metaq.store.consumequeue import UNIT, WRITE_AT, ConsumeQueue
from metaq.store.disk import Disk, RealDisk
from metaq.store.documents import read_document, write_document
from metaq.store.files import read_here
from metaq.store.messagestore import ABORT, QUEUES, MessageStore, StoreSettings
from metaq.store.reading import UNITS_AT_ONCE

logger = logging.getLogger(__name__)

FORMAT_VERSION: Final = 1
IDENTITY: Final = "store.json"
QUARANTINE: Final = "quarantine.json"
LOCK: Final = "lock"


@dataclass(slots=True)
class Recovery:
    """What opening a folder found and did."""

    unclean: bool = False
    """The last process did not stop in order."""
    walked_from: int = 0
    end: int = 0
    records: int = 0
    gaps: list[Gap] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def open_store(
    directory: Path, settings: StoreSettings | None = None, clock: Clock | None = None, disk: Disk | None = None
) -> tuple[MessageStore, Recovery]:
    """Open a folder, new or not, for one writer.

    Raises ``DirectoryLocked``, ``UnknownVersion``, or ``DiskFull`` and ``DiskFailed`` when the disk does not take the first
    writes.
    """
    disk = disk or RealDisk()
    disk.make_directories(directory)
    lock = disk.lock(directory / LOCK)
    disk.sync_directory(directory)  # a document that is read now must not be an older one after the next power cut
    recovery = Recovery(unclean=ABORT in disk.list_directory(directory))
    identity, problems = read_document(disk, directory / IDENTITY)
    recovery.problems += problems
    if identity is not None and identity["format"] != FORMAT_VERSION:
        raise UnknownVersion(
            f"{directory} has format version {identity['format']}, this metaq reads {FORMAT_VERSION}; use the newer metaq"
        )
    disk.open(directory / ABORT).close()
    store = MessageStore(directory, settings, clock, disk)
    store.lock = lock
    if identity is None or problems:
        _write_identity(store)
    _recover(store, recovery)
    for problem in recovery.problems:
        logger.error("store problem: %s", problem)
    return store, recovery


def _write_identity(store: MessageStore) -> None:
    content = {
        "format": FORMAT_VERSION,
        "broker_name": store.settings.broker_name,
        "broker_number": store.settings.broker_number,
        "created_ms": store.clock.now_ms(),
    }
    write_document(store.disk, store.directory / IDENTITY, content)


def _recover(store: MessageStore, recovery: Recovery) -> None:
    disk, log = store.disk, store.log
    checkpoint, problems = read_checkpoint(disk, store.directory)
    recovery.problems += problems
    live = read_live(disk, store.directory)
    partitions = {} if checkpoint is None else checkpoint.partitions
    _load_queues(store, partitions)
    walk_from = _trust(store, checkpoint, live, recovery)
    recovery.walked_from = max(log.begin, min(walk_from, log.segments[-1].end))
    recovery.end = _walk(store, recovery)
    log.start_at(recovery.end)
    for key, progress in partitions.items():
        queue = store.queue(*key)
        queue.fill(progress.next)  # what was acknowledged keeps its place even when its record is gone
        queue.text_end = max(queue.text_end, progress.text_end)
    if recovery.gaps:
        _quarantine(store, recovery)
    store.durable_end = log.begin if checkpoint is None else min(checkpoint.mark, recovery.end)
    store.recovered(partitions)
    if store.settings.durability is Durability.DISK:
        store.sync()


def _load_queues(store: MessageStore, partitions: dict[tuple[str, int], Progress]) -> None:
    root = store.directory / QUEUES
    for topic in store.disk.list_directory(root):
        for partition in store.disk.list_directory(root / topic):
            if partition.isascii() and partition.isdecimal():
                store.queue(topic, int(partition)).load()
    for key in partitions:
        store.queue(*key)


def _trust(store: MessageStore, checkpoint: Checkpoint | None, live: int | None, recovery: Recovery) -> int:
    """Cut every queue to what may be trusted of it; return the log offset from which records must be walked."""
    short = False
    for key, queue in store.queues.items():
        progress = Progress(0, 0) if checkpoint is None else checkpoint.partitions.get(key, Progress(0, 0))
        if queue.written < progress.next:
            short = True
            recovery.problems.append(
                f"{queue.directory} has {queue.written} units, the checkpoint {progress.next}: rebuilt from the log"
            )
        if live is None:
            trusted = min(queue.written, progress.next) if checkpoint else _aged_out(store, queue)
            queue.reset(trusted, 0)
        queue.trust(progress.next, _text_end(store, queue, progress))
    if short or (checkpoint is None and live is None):
        return store.log.begin
    marks = [mark for mark in (live, checkpoint.mark if checkpoint else None) if mark is not None]
    return max(marks)


def _aged_out(store: MessageStore, queue: ConsumeQueue) -> int:
    """The first ordinal whose record may still be in the log: all a queue is trusted for without any checkpoint."""
    ordinal = queue.base
    while ordinal < queue.written:
        for unit in UNIT.iter_unpack(queue.units(ordinal, UNITS_AT_ONCE, read_here)):
            if unit[1] <= 0 or unit[0] >= store.log.begin:
                return ordinal
            ordinal += 1
    return ordinal


def _text_end(store: MessageStore, queue: ConsumeQueue, progress: Progress) -> int:
    """Where the text positions of a queue go on: behind its last intact message.

    For a damaged one behind that, its record's size is added, which is more than its text form, so that positions never go
    back.
    """
    if queue.next == progress.next:
        return progress.text_end
    floor = progress.next if progress.next < queue.next else queue.base
    queue.publish(queue.next, 0)
    beyond = 0
    for ordinal in range(queue.next - 1, floor - 1, -1):
        stored = store.reader.record(queue, ordinal, read_here)
        if stored is not None:
            position = identity(stored.buffer[stored.at :]).text_position
            return position + text_size(stored, queue.overhead) + beyond
        offset, size, _ = queue.unit(ordinal, read_here)
        if store.log.find(offset) is None:
            break  # aged out, and so is everything before it
        beyond += min(max(size, 0), store.settings.segment_bytes)
    return progress.text_end + beyond


def _walk(store: MessageStore, recovery: Recovery) -> int:
    """Dispatch every intact record behind the mark; return where the last one ends."""
    end = recovery.walked_from
    for found in store.log.walk(end):
        if isinstance(found, Gap):
            recovery.gaps.append(found)
        else:
            dispatch(store, found)
            recovery.records += 1
            end = found.log_offset + found.size
    return end


def dispatch(store: MessageStore, stored: Stored) -> None:
    """Enter an intact record into its queue unless it is there already; messages missing before it leave fillers."""
    topic, partition, ordinal, position = identity(stored.buffer[stored.at :])
    queue = store.queue(topic, partition)
    if ordinal < queue.next:
        return
    if ordinal > queue.next:
        if queue.next == queue.base:
            queue.reset(ordinal, 0)
        queue.fill(ordinal)
    queue.text_end = position
    queue.add(stored.log_offset, stored.size, tag_hash(stored, queue.overhead), text_size(stored, queue.overhead))
    if len(queue.pending) >= WRITE_AT:
        store.write_units(queue)


def _quarantine(store: MessageStore, recovery: Recovery) -> None:
    """List the bad ranges; their bytes stay where they are."""
    path = store.directory / QUARANTINE
    known, _ = read_document(store.disk, path)
    ranges = {(start, end) for start, end in (known or {"ranges": []})["ranges"]} | {tuple(gap) for gap in recovery.gaps}
    write_document(store.disk, path, {"ranges": sorted(ranges)})
    for gap in recovery.gaps:
        recovery.problems.append(f"no intact record in log offsets {gap.start} … {gap.end}; listed in {path}")

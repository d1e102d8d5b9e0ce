"""Opening a data folder: finding the end of the log, rebuilding the derived files, and reporting what was found.

1. The newest mark that may be trusted (``checkpoint``) is where the walk through the log starts; without one, at its begin.
2. Every intact record after the mark is dispatched to its queue; the records of a group (``metaq.store.recordgroups``) only
   when all of them are there. A bad range that is followed by records that are kept stays in the log and is listed in
   ``quarantine.json``; its messages leave filler units in their queues.
   The log of a replica ends at such a range instead (``replicated``), and the rest is copied again. Its queues end there, too.
3. After the last record that is kept the log is cut: zeroed and synced before anything is appended.

A short, empty, torn or altered file never prevents a start, and one that cannot be read only if it is the log, where it must be
walked. An unknown format version or feature does, or another broker's folder.
"""

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from metaq.clock import Clock
from metaq.errors import CorruptRecord, DiskFull, ReadFailed, StoreError, UnknownVersion, WrongBroker
from metaq.protocol.record import identity
from metaq.protocol.text.messages import Stored, tag_hash, text_size
from metaq.store.checkpoint import (
    FAILED,
    LIVE_NAME,
    NOTHING,
    Checkpoint,
    Live,
    PartitionProgress,
    covered_by_both,
    read_checkpoint,
    read_live,
    write_checkpoint,
)
from metaq.store.copies.applying import end_before
from metaq.store.copies.discarding import discard_intended
from metaq.store.files.disk import Disk, RealDisk
from metaq.store.files.documents import BACKUP, read_document, write_document
from metaq.store.files.ending import Ending, begin
from metaq.store.files.filecache import Run, read_here, run_here
from metaq.store.index.keyindex import NO_INDEX, IndexMark
from metaq.store.log.segments import SMALLEST_RECORD
from metaq.store.log.walk import Gap
from metaq.store.messagestore import QUEUES, MessageStore
from metaq.store.queues.consumequeue import FILLER_SIZE, UNIT, WRITE_AT, ConsumeQueue, has_record
from metaq.store.queues.dispatch import enter
from metaq.store.reading import UNITS_AT_ONCE
from metaq.store.recordgroups import Dropped, Ranges, whole_groups
from metaq.store.recovery.progress import EVERY, RecoveryStep, Tell, nobody, telling
from metaq.store.runs import kept_back, offsets_of
from metaq.store.settings import StoreSettings

logger = logging.getLogger(__name__)

FORMAT_VERSION: Final = 1
FEATURES: Final = frozenset(("timers", "recurring"))
"""The features of a folder that this version knows: kinds of records that a version without the feature would misread."""
IDENTITY: Final = "store.json"
QUARANTINE: Final = "quarantine.json"
LOCK: Final = "lock"
CHECKING: Final = "checking queues"


@dataclass(slots=True)
class Recovery:
    """The findings and actions of opening a folder."""

    ending: Ending = Ending.ORDERLY
    """How the last process ended."""
    walked_from: int = 0
    end: int = 0
    records: int = 0
    gaps: list[Gap] = field(default_factory=list)
    dropped: int = 0
    """Intact records in the gaps."""
    cut: Gap | None = None
    """The gap at which the log of a replica was cut, although records follow it."""
    damaged: list[tuple[int, int]] = field(default_factory=list)
    """Ranges of the log that are known to be bad."""
    right_end: int = 0
    """The log offset before which everything was durable when the last process ended, and is not known to be bad."""
    problems: list[str] = field(default_factory=list)


def open_store(
    directory: Path,
    settings: StoreSettings | None = None,
    clock: Clock | None = None,
    disk: Disk | None = None,
    *,
    rebuild: bool = False,
    tell: Tell = nobody,
) -> tuple[MessageStore, Recovery]:
    """Open a folder, new or existing, for one writer; return the store, and what recovery found and did.

    With ``rebuild`` no queue is trusted: all units are made from the log; whose folder it is the settings do not say, so where
    no ``store.json`` does, none is written. ``tell`` receives the progress.

    Raises ``DirectoryLocked``, ``UnknownVersion``, ``WrongBroker``, or ``DiskFull`` and ``DiskFailed`` when the first writes
    fail.
    """
    disk = disk or RealDisk()
    try:
        disk.make_directories(directory)
    except StoreError as error:
        error.add_note("choose another data folder")
        raise
    lock = disk.lock(directory / LOCK)
    disk.sync_directory(directory)  # after the next power cut, a document read now must not be an older version again
    recovery = Recovery()
    identity, problems = read_document(disk, directory / IDENTITY)
    recovery.problems += problems
    settings = settings or StoreSettings()
    if identity is not None:
        try:
            _check_identity(directory, identity, None if rebuild else settings)
        except StoreError:
            lock.close()
            raise
    discard_intended(directory, settings, disk)
    store = MessageStore(directory, settings, clock, disk)
    store.lock, owed = lock, store.log.owed
    recovery.ending = begin(disk, directory, store.suspicion, owed, synced=settings.durability.on_disk)
    if identity is None:
        disk.sync_directory(directory.parent)  # also when the folder exists: a process killed before this line may have made it
    if problems if identity is not None else not rebuild:
        owed.do(lambda: _write_identity(store, identity))
    _recover(store, recovery, tell, rebuild=rebuild)
    for problem in recovery.problems:
        logger.error("store problem problem=%s", problem)
    return store, recovery


def _check_identity(directory: Path, identity: dict[str, Any], settings: StoreSettings | None) -> None:
    """Raise ``UnknownVersion`` for a format that cannot be read, ``WrongBroker`` for another broker's folder.

    The ids of the two brokers' messages would be confused. Without ``settings`` the broker is not checked.
    """
    check_format(directory, identity)
    if settings is None:
        return
    theirs = (identity["broker_name"], identity["broker_number"])
    ours = (settings.broker_name, settings.broker_number)
    if theirs != ours:
        raise WrongBroker(
            f"{directory} belongs to broker {theirs[0]!r} number {theirs[1]}, the settings say {ours[0]!r} number {ours[1]}; "
            f"set broker_name and broker_number, or choose another data folder"
        )


def check_format(directory: Path, identity: dict[str, Any]) -> None:
    """Raise ``UnknownVersion`` when the identity of a folder names a format version or a feature that cannot be read."""
    if identity["format"] != FORMAT_VERSION:
        raise UnknownVersion(
            f"{directory} has format version {identity['format']}, this metaq reads {FORMAT_VERSION}; use the newer metaq"
        )
    unknown = sorted(set(identity.get("features", [])) - FEATURES)
    if unknown:
        raise UnknownVersion(f"{directory} has the feature {unknown[0]}, which this metaq does not know; use the newer metaq")


def add_feature(store: MessageStore, name: str, run: Run = run_here) -> None:
    """Write down, durably, that a folder has a feature: from then on versions that do not know it refuse the folder.

    Call this before the first record of the feature is put, and at every start that finds such records: ``store.json`` may have
    been lost and written again. It is written only when it, or its backup, lacks the feature.
    """
    assert name in FEATURES
    run(lambda: _add_feature(store.disk, store.directory / IDENTITY, name))


def _add_feature(disk: Disk, path: Path, name: str) -> None:
    content, _ = read_document(disk, path)
    backup, _ = read_document(disk, path.with_name(path.name + BACKUP))
    assert content is not None
    features = content.get("features", [])
    if name in features and backup is not None and name in backup.get("features", []):
        return
    content["features"] = sorted({*features, name})
    for _ in range(2):  # the second time for the backup, which is read when the document is damaged
        write_document(disk, path, content)


def _write_identity(store: MessageStore, known: dict[str, Any] | None) -> None:
    content = known or {
        "format": FORMAT_VERSION,
        "broker_name": store.settings.broker_name,
        "broker_number": store.settings.broker_number,
        "created_ms": store.clock.now_ms(),
    }
    write_document(store.disk, store.directory / IDENTITY, content)


def _recover(store: MessageStore, recovery: Recovery, tell: Tell, *, rebuild: bool) -> None:
    disk, log = store.disk, store.log
    checkpoint, problems = read_checkpoint(disk, store.directory)
    recovery.problems += problems
    partitions = {} if checkpoint is None else checkpoint.partitions
    _load_queues(store, partitions, tell)
    live = _read_live(store, recovery)
    failed = live is not None and live.mark == FAILED
    if failed and not store.settings.durability.on_disk:
        store.suspicion.rise("a write or a sync failed, and what it was for may be gone from the page cache", log.owed.do)
    live = None if live is None or failed else _confirmed(store, recovery, live, tell)
    mark = max(log.begin if checkpoint is None else checkpoint.mark, log.begin if live is None else live.mark)
    mark = min(mark, log.segments[-1].end)
    if rebuild:
        store.live.drop()
    queues = telling(list(store.queues.values()), CHECKING, tell)
    trusted = {queue: _aged_out(store, queue) if rebuild else _trusted(store, queue, checkpoint, live) for queue in queues}
    partitions = _admit_short(store, checkpoint, trusted)
    cuts = telling(list(trusted.items()), CHECKING, tell)
    starts = [_cut(store, queue, count, partitions, mark, live) for queue, count in cuts]
    recovery.walked_from = log.begin if rebuild else min([mark, *starts])
    listed = _listed(store)
    recovery.end = max(mark, _walk(store, recovery, mark, Ranges(listed), tell))
    _suspect(store, recovery, listed)
    if store.settings.replicated:
        _cut_queues(store, recovery, partitions)
    log.start_at(recovery.end)
    _reach(store, partitions)
    _quarantine(store, recovery, listed)
    store.durable_end = log.begin if checkpoint is None else min(checkpoint.mark, recovery.end)
    recovery.right_end = max(log.begin, min([store.durable_end, *(start for start, _ in recovery.damaged)]))
    if failed:
        log.rewrite(store.durable_end)
        store.live.drop()  # where it cannot be read, it cannot be written over
    if checkpoint is not None:
        checkpoint = checkpoint._replace(partitions=partitions)
    index_mark = _recover_index(store, recovery, checkpoint, rebuild=rebuild)
    store.recovered(partitions, index_mark, covered_by_both(disk, store.directory))
    if store.settings.durability.on_disk:
        store.sync()


def _read_live(store: MessageStore, recovery: Recovery) -> Live | None:
    """Return the live mark. One that cannot be read may have said that a sync failed: the worst is assumed."""
    try:
        return read_live(store.disk, store.directory)
    except ReadFailed as error:
        recovery.problems.append(str(error))
        return Live(FAILED, 0)


def _recover_index(store: MessageStore, recovery: Recovery, checkpoint: Checkpoint | None, *, rebuild: bool) -> IndexMark:
    """Open the key index, or delete it to be rebuilt; missing keys are entered later. Return its mark in the checkpoint."""
    mark = NO_INDEX if checkpoint is None else checkpoint.key_index
    if not rebuild:
        try:
            store.indexing.load(mark)
        except (CorruptRecord, ReadFailed, DiskFull) as error:  # a copy-on-write file system needs room even to take items back
            recovery.problems.append(f"{error}: the key index is made anew from the log")
        else:
            return mark
    if checkpoint is not None:
        without = checkpoint._replace(key_index=NO_INDEX)
        store.log.owed.do(lambda: write_checkpoint(store.disk, store.directory, without))
    store.indexing.begin_anew()
    return NO_INDEX


def _load_queues(store: MessageStore, partitions: dict[tuple[str, int], PartitionProgress], tell: Tell) -> None:
    """Open the queues that have a folder, and make those that only the checkpoint knows."""
    root = store.directory / QUEUES
    for number, topic in enumerate(topics := store.disk.list_directory(root)):
        tell(RecoveryStep("opening queues", number, len(topics), "topics"))
        for partition in store.disk.list_directory(root / topic):
            if partition.isascii() and partition.isdecimal():
                store.queue(topic, int(partition)).load()
    for key in partitions:
        store.queue(*key)


def _confirmed(store: MessageStore, recovery: Recovery, live: Live, tell: Tell) -> Live | None:
    """Return the live mark if the queue files hold the units that it counts; drop it otherwise."""
    if live.units == _units_before(store, live.mark, tell):
        return live
    recovery.problems.append(f"the queue files do not hold the {live.units} units of {LIVE_NAME}: rebuilt from the log")
    store.live.drop()
    return None


def _units_before(store: MessageStore, mark: int, tell: Tell) -> int:
    """Return the number of units of records before a mark in all queues, including fillers and units of dropped files."""
    total = 0
    for queue in telling(list(store.queues.values()), CHECKING, tell):
        count = queue.written
        while count > queue.base:
            offset, size, _ = queue.unit(count - 1, read_here)
            if offset < mark or size == FILLER_SIZE:
                break
            count -= 1
        total += count
    return total


def _trusted(store: MessageStore, queue: ConsumeQueue, checkpoint: Checkpoint | None, live: Live | None) -> int:
    """Return the ordinal before which all units of a queue may be trusted."""
    if live is not None:
        count = queue.written
    elif checkpoint is not None:
        count = min(queue.written, checkpoint.partitions.get((queue.topic, queue.partition), NOTHING).durable_units)
    else:
        count = min(queue.written, _aged_out(store, queue))
    while count > queue.base and not _agrees(store, queue, count - 1):
        count -= 1
    return count


def _admit_short(
    store: MessageStore, checkpoint: Checkpoint | None, trusted: dict[ConsumeQueue, int]
) -> dict[tuple[str, int], PartitionProgress]:
    """Lower, durably, the checkpoint's count of units that are about to be made anew; return its partitions as they are now.

    Otherwise a power cut while the units are written could leave only some of them and a checkpoint that vouches for all.
    """
    if checkpoint is None:
        return {}
    partitions = dict(checkpoint.partitions)
    for queue, count in trusted.items():
        progress = partitions.get((queue.topic, queue.partition), NOTHING)
        if count < progress.durable_units:
            partitions[queue.topic, queue.partition] = progress._replace(units=count)
    if partitions != checkpoint.partitions:
        admitted = checkpoint._replace(partitions=partitions)
        store.log.owed.do(lambda: write_checkpoint(store.disk, store.directory, admitted))
    return partitions


def _cut(
    store: MessageStore,
    queue: ConsumeQueue,
    trusted: int,
    partitions: dict[tuple[str, int], PartitionProgress],
    mark: int,
    live: Live | None,
) -> int:
    """Cut a queue to the units that are trusted; return the log offset from which its records must be walked."""
    progress = partitions.get((queue.topic, queue.partition), NOTHING)
    whole = trusted >= (progress.next if live is None else max(progress.next, queue.written))
    if trusted < queue.written or trusted < queue.base:
        queue.reset(trusted, 0)
    queue.trust(progress.durable_units, _text_end(store, queue, progress))
    return mark if whole else _walk_start(store, queue)


def _agrees(store: MessageStore, queue: ConsumeQueue, ordinal: int) -> bool:
    """Return whether a unit matches its record in the log; zeros or a torn unit at the end of a file do not.

    Where the log has no intact record, the record may be the damaged one, so the unit is kept, and the message its ordinal.
    """
    offset, size, tag = queue.unit(ordinal, read_here)
    if size == FILLER_SIZE:
        return True
    stored = store.log.record_at(offset) if size >= SMALLEST_RECORD else None
    if stored is None:
        return size >= SMALLEST_RECORD
    told = (queue.topic, queue.partition, ordinal, size, tag)
    return told == (*identity(stored.buffer)[:3], stored.size, tag_hash(stored, queue.overhead))


def _walk_start(store: MessageStore, queue: ConsumeQueue) -> int:
    """Return the log offset at which the records after the last unit of a queue may begin."""
    for ordinal in range(queue.written - 1, queue.base - 1, -1):
        offset, size, _ = queue.unit(ordinal, read_here)
        if size != FILLER_SIZE:
            return max(offset + size, store.log.begin)
    return store.log.begin


def _aged_out(store: MessageStore, queue: ConsumeQueue) -> int:
    """Return the first ordinal whose record may still be in the log. Without a checkpoint, only units before it are trusted.

    Return 0 when no unit is of a record that has aged out: files before the first one may have been lost.
    """
    ordinal, aged_out = queue.base, 0
    while ordinal < queue.written:
        for offset, size, _ in UNIT.iter_unpack(queue.units(ordinal, UNITS_AT_ONCE, read_here)):
            if size < SMALLEST_RECORD or offset >= store.log.begin:
                return aged_out
            ordinal = aged_out = ordinal + 1
    return aged_out


def _text_end(store: MessageStore, queue: ConsumeQueue, progress: PartitionProgress) -> int:
    """Return the text position at which a queue goes on: the end of its last intact message.

    For each damaged message after that, the size of its record is added. It is larger than the text form, so positions never
    go back.
    """
    if queue.next <= progress.next:
        return progress.text_end
    queue.publish(queue.next, 0)
    beyond = aged_out = 0
    for ordinal in range(queue.next - 1, max(progress.next, queue.base) - 1, -1):
        stored = store.reader.record(queue, ordinal, read_here)
        if stored is not None:
            position = identity(stored.buffer[stored.at :]).text_position
            return position + text_size(stored, queue.overhead) + beyond
        offset, size, _ = queue.unit(ordinal, read_here)
        if has_record(size):
            beyond += min(size, store.settings.segment_bytes)
            aged_out += offset < store.log.begin
            if aged_out == 2:  # a single one may be a damaged unit
                break
    return progress.text_end + beyond


def _walk(store: MessageStore, recovery: Recovery, mark: int, quarantine: Ranges, tell: Tell) -> int:
    """Dispatch every record that is kept, from ``walked_from`` on; return the log offset at which the last one ends."""
    begin = end = recovery.walked_from
    most = store.log.segments[-1].end - begin
    for number, found in enumerate(whole_groups(store.log.walk(end), mark, quarantine)):
        if number % EVERY == 0:
            tell(RecoveryStep("reading the log", end - begin, most, "bytes"))
        if isinstance(found, Gap) and store.settings.replicated and found.end > mark:
            recovery.cut = found
            break
        if isinstance(found, Gap):
            recovery.gaps.append(found)
        elif isinstance(found, Dropped):
            dispatch(store, found.stored, kept=False)
            recovery.dropped += 1
        else:
            dispatch(store, found)
            recovery.records += 1
            end = found.log_offset + found.size
    if recovery.walked_from < mark and end < mark:
        recovery.gaps.append(Gap(end, mark))
    return end


def dispatch(store: MessageStore, stored: Stored, *, kept: bool = True) -> None:
    """Enter an intact record into its queue (``metaq.store.queues.dispatch``)."""
    whose = identity(stored.buffer[stored.at :])
    queue = store.queue(whose.topic, whose.partition)
    enter(queue, stored, whose, kept=kept)
    if queue.pending_bytes >= WRITE_AT:
        store.checkpointing.write_units(queue)


def _cut_queues(store: MessageStore, recovery: Recovery, partitions: dict[tuple[str, int], PartitionProgress]) -> None:
    """Cut the queues whose written units reach beyond the log offset where the log is cut: other records may come there.

    Their records were there: the log becomes suspect. This comes before it is cut, or a start after a kill would not know it.
    """
    end = recovery.end
    for queue in store.queues.values():
        newest = next(offsets_of(queue, kept_back(queue, queue.next - 1, queue.base, read_here), read_here), None)
        if newest is None or newest[1] < end:
            continue
        progress = partitions.get((queue.topic, queue.partition), NOTHING)
        count = max(progress.next, end_before(store, queue, end)[0])
        if count < queue.next and recovery.cut is None:
            lost = f"no record to keep of {queue.topic} {queue.partition}, {count} … {queue.next - 1}: the log ends at {end}"
            store.suspicion.rise(lost, store.log.owed.do)
            recovery.problems.append(lost)
        queue.reset(count, 0)
        queue.text_end = _text_end(store, queue, progress)


def _reach(store: MessageStore, partitions: dict[tuple[str, int], PartitionProgress]) -> None:
    """Let each queue reach as far as it had by the checkpoint."""
    for key, progress in partitions.items():
        queue = store.queue(*key)
        if queue.next == queue.base < progress.next:  # no unit at all: acknowledged messages have aged out, or are being copied
            queue.reset(progress.next, 0)
        queue.fill(progress.next)  # an acknowledged message keeps its ordinal even when its record is gone
        queue.text_end = max(queue.text_end, progress.text_end)


def _listed(store: MessageStore) -> set[tuple[int, int]]:
    """Return the bad ranges that earlier recoveries have listed."""
    known, _ = read_document(store.disk, store.directory / QUARANTINE)
    return {(start, end) for start, end in (known or {"ranges": []})["ranges"]}


def _suspect(store: MessageStore, recovery: Recovery, listed: set[tuple[int, int]]) -> None:
    """Raise a suspicion, before anything is cut, for records that are missing in new gaps or after a cut."""
    if recovery.cut is not None:
        lost = f"no record to keep in log offsets {recovery.cut.start} … {recovery.cut.end}, where the log is cut"
        store.suspicion.rise(lost, store.log.owed.do)
        recovery.problems.append(lost)
    new = [gap for gap in recovery.gaps if tuple(gap) not in listed]
    if new:
        store.suspicion.rise(f"no record to keep in log offsets {new[0].start} … {new[0].end}", store.log.owed.do)


def _quarantine(store: MessageStore, recovery: Recovery, listed: set[tuple[int, int]]) -> None:
    """List the bad ranges, whose bytes stay in the log, up to the log's end; new records are appended after that."""
    path = store.directory / QUARANTINE
    ranges = listed.union(tuple(gap) for gap in recovery.gaps)
    ranges = {(start, min(end, recovery.end)) for start, end in ranges if start < recovery.end}
    if ranges != listed:
        store.log.owed.do(lambda: write_document(store.disk, path, {"ranges": sorted(ranges)}))
    recovery.damaged = sorted((start, end) for start, end in ranges if end > store.log.begin)
    for gap in recovery.gaps:
        recovery.problems.append(f"no record to keep in log offsets {gap.start} … {gap.end}; listed in {path}")
    if recovery.dropped:
        recovery.problems.append(f"{recovery.dropped} intact records there are kept from readers: their groups are not whole")

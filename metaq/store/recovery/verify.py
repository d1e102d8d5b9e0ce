"""Verifying a data folder that no broker uses, and rebuilding its derived files.

``verify`` reads everything and writes nothing: every record of the log (checksum, log offset, ordinal, text position), every
unit of every queue and every item of the key index against its record, and every document. Leftovers of a killed broker are no
damage: units, items and records that the next start would rebuild or cut are skipped. Ranges that a recovery has listed in
``quarantine.json`` are counted separately, with the intact records in them.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from metaq.errors import CorruptRecord, ReadFailed, StoreError
from metaq.message import TopicPartition
from metaq.protocol.record import BLANK, BLANK_MAGIC, BLANK_SIZE, identity
from metaq.protocol.text.messages import Stored, plain_overhead, tag_hash, text_size
from metaq.store.checkpoint import LIVE_NAME, LIVE_SIZE, NAME, NOTHING, Live, decode_live, read_checkpoint, read_live
from metaq.store.files.disk import Disk, File, RealDisk, replace_file
from metaq.store.files.documents import BACKUP, decode_document, read_document
from metaq.store.files.ending import ABORT
from metaq.store.index.indexcheck import IndexCheck
from metaq.store.index.keyindex import NO_INDEX
from metaq.store.log.segments import SMALLEST_RECORD, Segment, is_segment_name
from metaq.store.log.walk import Gap, walk
from metaq.store.messagestore import INDEX, LOG, QUEUES
from metaq.store.queues.consumequeue import FILLER_SIZE, UNIT, UNIT_SIZE
from metaq.store.recordgroups import Ranges
from metaq.store.recovery.recovery import IDENTITY, LOCK, QUARANTINE, check_format, open_store
from metaq.store.settings import StoreSettings

UNITS_AT_ONCE: Final = 4096
RECORDS_A_REPORT: Final = 1024
"""Records between two calls of the progress callback."""
FOLDERS_OF_DOCUMENTS: Final = (".", "config")

OnProgress = Callable[[int, int], None]
"""``on_progress(done_bytes, total_bytes)``."""
Inspect = Callable[[TopicPartition, Stored], Iterable[tuple[int, str]]]
"""Look at the next record that readers get, and return what is wrong with its content, or with earlier records: log offsets and
texts. The store does not know what the records of its users mean."""


class Damage(NamedTuple):
    """One place that is not as it was written."""

    path: Path
    offset: int
    """Bytes from the begin of the file; 0 for a whole document."""
    text: str


@dataclass(slots=True)
class Report:
    """The result of a verification: counts of what was checked, and the damage found."""

    damages: list[Damage] = field(default_factory=list)
    records: int = 0
    units: int = 0
    documents: int = 0
    index_items: int = 0
    quarantined_bytes: int = 0
    """Bytes of the log in ranges that are known to be bad."""
    dropped: int = 0
    """Intact records in those ranges, hidden from readers: their groups are not whole (``metaq.store.recordgroups``)."""
    owner_known: bool = True
    """False when neither ``store.json`` nor its backup can be read. The next broker that starts on the folder owns it."""


def verify(
    directory: Path, disk: Disk | None = None, progress: OnProgress | None = None, inspect: Inspect | None = None
) -> Report:
    """Check a data folder, and return what was checked and what was wrong. ``inspect`` is given each record in turn.

    Raises ``DirectoryLocked`` when a broker uses it, ``UnknownVersion``, and ``StoreError`` when it is not a data folder.
    """
    disk = disk or RealDisk()
    with _locked(directory, disk):
        return _Verifier(directory, disk, progress or (lambda done, total: None), inspect or (lambda key, stored: ())).run()


def repair(
    directory: Path, disk: Disk | None = None, progress: OnProgress | None = None, inspect: Inspect | None = None
) -> Report:
    """Rebuild queues and checkpoints from the log, whose records stay as they are, and restore documents from their backups.

    The key index is deleted; a running broker rebuilds it with the sizes in its settings. A ``store.json`` that is damaged with
    its backup is deleted, too: only the settings of its broker have what was in it. Return the report of ``verify`` afterwards.
    Raises what ``verify`` raises, and ``DiskFull`` or ``DiskFailed``.
    """
    disk = disk or RealDisk()
    with _locked(directory, disk):
        for path in _documents(directory, disk):
            _restore(disk, path)
        if not _says_owner(directory, disk):
            _delete(disk, directory, {IDENTITY, IDENTITY + BACKUP})
        settings = StoreSettings(segment_bytes=_room_needed(directory, disk))
    store, _ = open_store(directory, settings, disk=disk, rebuild=True)
    store.close()
    return verify(directory, disk, progress, inspect)


def _says_owner(directory: Path, disk: Disk) -> bool:
    """Return whether the folder says which broker's it is."""
    return read_document(disk, directory / IDENTITY)[0] is not None


def _delete(disk: Disk, directory: Path, names: set[str]) -> None:
    """Delete those of the files that are there, durably."""
    for name in names.intersection(disk.list_directory(directory)):
        disk.unlink(directory / name)
    disk.sync_directory(directory)


def _room_needed(directory: Path, disk: Disk) -> int:
    """Return a segment size with which opening the folder does not grow the last segment, unless that was cut short."""
    segments = _segments(directory, disk)
    if not segments:
        return StoreSettings().segment_bytes
    base, path = segments[-1]
    checkpoint, _ = read_checkpoint(disk, directory)
    written = 0 if checkpoint is None else checkpoint.mark - base
    return max(disk.open(path).size(), written + BLANK_SIZE)


@contextmanager
def _locked(directory: Path, disk: Disk) -> Iterator[None]:
    names = disk.list_directory(directory)
    if LOG not in names:
        raise StoreError(f"{directory} is not a data folder: it has no {LOG}")
    lock = disk.lock(directory / LOCK) if LOCK in names else None  # without the file no broker can be running
    try:
        yield
    finally:
        if lock is not None:
            lock.close()


def _segments(directory: Path, disk: Disk) -> list[tuple[int, Path]]:
    names = disk.list_directory(directory / LOG)
    return [(int(name), directory / LOG / name) for name in names if is_segment_name(name)]


def _documents(directory: Path, disk: Disk) -> list[Path]:
    """Return the paths of all documents and their backups."""
    found = []
    for folder in FOLDERS_OF_DOCUMENTS:
        for name in disk.list_directory(directory / folder):
            stem = name.removesuffix(BACKUP)
            if stem in {NAME, ABORT} or stem.endswith(".json"):
                found.append(directory / folder / name)
    return found


def _restore(disk: Disk, path: Path) -> None:
    """Replace a damaged document by its backup, or a damaged backup by its document, if that one is intact."""
    if path.name.endswith(BACKUP):
        source = path.with_name(path.name.removesuffix(BACKUP))
    else:
        source = path.with_name(path.name + BACKUP)
    try:
        decode_document(disk.read_file(path), path)
    except (CorruptRecord, ReadFailed):
        try:
            data = disk.read_file(source)
            decode_document(data, source)
        except (FileNotFoundError, CorruptRecord, ReadFailed):
            return
        replace_file(disk, path, data)


class _Queue:
    """The queue of one partition: its units on disk, and the progress of the walk through the log."""

    def __init__(self, directory: Path, disk: Disk, topic: str) -> None:
        self.directory = directory
        self.overhead = plain_overhead(topic)
        self.next = -1
        """The ordinal that the next record should have; −1 before the first record."""
        self.text_end = -1
        self.missing: tuple[int, int] | None = None
        """Ordinal and log offset of the first record that has no unit."""
        self.files: list[tuple[int, int, Path, File]] = []  # first ordinal, ordinal after the last, path, file
        self.holes: list[tuple[int, Path]] = []
        for name in disk.list_directory(directory):
            if is_segment_name(name):
                path, base = directory / name, int(name) // UNIT_SIZE
                file = disk.open(path)
                if self.files and self.files[-1][1] != base:
                    self.holes.append((self.files[-1][1], self.files[-1][2]))
                self.files.append((base, base + file.size() // UNIT_SIZE, path, file))
        self.base = self.files[0][0] if self.files else 0
        self.end = self.files[-1][1] if self.files else 0
        self._chunk_from = 0
        self._chunk: list[tuple[int, int, int]] = []

    def unit(self, ordinal: int) -> tuple[int, int, int] | None:
        """Return log offset, size and tag hash of a unit; ``None`` when there is no such unit."""
        index = ordinal - self._chunk_from
        if not 0 <= index < len(self._chunk):
            for base, end, _, file in self.files:
                if base <= ordinal < end:
                    size = min(UNITS_AT_ONCE, end - ordinal) * UNIT_SIZE
                    self._chunk_from, index = ordinal, 0
                    self._chunk = list(UNIT.iter_unpack(file.read(size, (ordinal - base) * UNIT_SIZE)))
                    break
            else:
                return None
        return self._chunk[index]

    def place(self, ordinal: int) -> tuple[Path, int]:
        """Return the file and the offset in it at which a unit is, or would be."""
        for base, end, path, _ in self.files:
            if base <= ordinal < end:
                return path, (ordinal - base) * UNIT_SIZE
        if not self.files:
            return self.directory, 0
        base, end, path, _ = self.files[-1]
        return path, (end - base) * UNIT_SIZE


class _Verifier:
    """One verification; ``run`` is called once."""

    def __init__(self, directory: Path, disk: Disk, progress: OnProgress, inspect: Inspect) -> None:
        self._directory = directory
        self._disk = disk
        self._progress = progress
        self._inspect = inspect
        self._report = Report()
        self._live: Live | None = None
        self._queues: dict[TopicPartition, _Queue] = {}
        self._bad: list[Gap] = []
        bases = _segments(directory, disk)
        self._files = {base: disk.open(path) for base, path in bases}
        ends = [base for base, _ in bases[1:]] + [base + self._files[base].size() for base, _ in bases[-1:]]
        self._segments = [Segment(base, end - base, path) for (base, path), end in zip(bases, ends, strict=True)]
        self._begin = bases[0][0] if bases else 0

    def run(self) -> Report:
        """Check everything, and return the report. Raises ``UnknownVersion``."""
        self._check_documents()
        checkpoint, _ = read_checkpoint(self._disk, self._directory)
        with suppress(ReadFailed):  # the documents list it
            live = read_live(self._disk, self._directory)
            self._live = None if live is None or live.mark < 0 else live
        self._partitions = {} if checkpoint is None else checkpoint.partitions
        live_mark = 0 if self._live is None else self._live.mark
        self._mark = max(live_mark, 0 if checkpoint is None else checkpoint.mark)
        self._open_queues()
        key_index = NO_INDEX if checkpoint is None else checkpoint.key_index
        self._index = IndexCheck(self._directory / INDEX, self._disk, key_index, self._add, self._is_lost)
        end = self._check_log()
        if end < self._mark:
            self._check_gap(Gap(self._next_place(end), self._mark))
        for key, queue in self._queues.items():
            self._check_queue_end(key, queue)
        self._index.finish()
        self._report.index_items = self._index.items
        return self._report

    def _add(self, path: Path, offset: int, text: str) -> None:
        self._report.damages.append(Damage(path, offset, text))

    def _add_log(self, log_offset: int, text: str) -> None:
        segment = next((s for s in self._segments if s.base <= log_offset < s.end), None)
        if segment is None:
            self._add(self._directory / LOG, log_offset, text + "; no file holds that part of the log")
        else:
            self._add(segment.path, log_offset - segment.base, text)

    # -- documents ----------------------------------------------------------------------------------------------------

    def _check_documents(self) -> None:
        names = set()
        for path in _documents(self._directory, self._disk):
            self._report.documents += 1
            names.add(path)
            try:
                content = decode_document(self._disk.read_file(path), path)
            except (CorruptRecord, ReadFailed) as error:
                self._add(path, 0, str(error))
                continue
            if path.name == IDENTITY:
                check_format(self._directory, content)
        for path in sorted(names):
            original = path.with_name(path.name.removesuffix(BACKUP))
            if original not in names:
                self._add(original, 0, "missing although its backup is there")
        self._report.owner_known = _says_owner(self._directory, self._disk)
        known, _ = read_document(self._disk, self._directory / QUARANTINE)
        self._quarantined = sorted(Gap(start, end) for start, end in (known or {"ranges": []})["ranges"])
        if LIVE_NAME in self._disk.list_directory(self._directory):
            self._check_live(self._directory / LIVE_NAME)

    def _check_live(self, path: Path) -> None:
        try:
            data = self._disk.read_file(path)
        except ReadFailed as error:
            self._add(path, 0, str(error))
            return
        if len(data) == LIVE_SIZE and any(data) and decode_live(data) is None:
            self._add(path, 0, "the live mark does not have the checksum it ends with")

    # -- log ----------------------------------------------------------------------------------------------------------

    def _check_log(self) -> int:
        """Check every record of the log; return the log offset at which the last intact one ends."""
        for segment, following in zip(self._segments, self._segments[1:], strict=False):
            size = self._files[segment.base].size()
            if size < following.base - segment.base:
                self._add(segment.path, size, f"the file ends {following.base - segment.base - size} bytes too early")
        total = self._segments[-1].end - self._begin if self._segments else 0
        end = self._begin
        quarantine = Ranges(self._quarantined)
        for found in walk([(segment, self._files[segment.base]) for segment in self._segments], self._begin):
            if isinstance(found, Gap):
                self._check_gap(found)
                continue
            end = found.log_offset + found.size
            self._index.record(found)
            if quarantine.hold(found.log_offset):
                self._bad.append(Gap(found.log_offset, end))
                self._report.quarantined_bytes += found.size
                self._report.dropped += 1
                continue
            self._check_record(found)
            self._report.records += 1
            if self._report.records % RECORDS_A_REPORT == 0:
                self._progress(end - self._begin, total)
        self._progress(total, total)
        return end

    def _next_place(self, end: int) -> int:
        """Return where the record after one that ends at ``end`` begins: in the next segment when a blank record follows."""
        for segment in self._segments:
            if segment.base < end <= segment.end - BLANK_SIZE:
                blank = self._files[segment.base].read(BLANK_SIZE, end - segment.base)
                return segment.end if blank == BLANK.pack(segment.end - end, BLANK_MAGIC) else end
        return end

    def _check_gap(self, gap: Gap) -> None:
        self._bad.append(gap)
        at = gap.start
        for known in self._quarantined:
            if known.start <= at < known.end:
                at = min(known.end, gap.end)
        self._report.quarantined_bytes += at - gap.start
        if at < gap.end:
            self._add_log(at, f"no intact record in {gap.end - at} bytes")

    def _check_record(self, stored: Stored) -> None:
        topic, partition, ordinal, position = identity(stored.buffer[stored.at :])
        key = TopicPartition(topic, partition)
        for log_offset, text in self._inspect(key, stored):
            self._add_log(log_offset, text)
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = self._open_queue(key)
        first = queue.next < 0
        if first:
            queue.next = min(queue.base, ordinal)
        if ordinal < queue.next:
            self._add_log(stored.log_offset, f"{key}: ordinal {ordinal} is there already")
            return
        if position < queue.text_end or (position > queue.text_end and ordinal == queue.next and not first):
            self._add_log(stored.log_offset, f"{key}: text position {position} where {queue.text_end} is due")
        for lost in range(queue.next, ordinal):
            self._check_lost(key, queue, lost)
        size = text_size(stored, queue.overhead)
        queue.next, queue.text_end = ordinal + 1, position + size
        unit = queue.unit(ordinal)
        expected = (stored.log_offset, stored.size, tag_hash(stored, queue.overhead))
        if unit is None:
            queue.missing = queue.missing or (ordinal, stored.log_offset)
        elif ordinal < self._trusted(key, queue):
            self._report.units += 1
            if unit != expected:
                self._add(*queue.place(ordinal), f"{key}: unit {ordinal} says {unit}, its record {expected}")

    # -- queues -------------------------------------------------------------------------------------------------------

    def _open_queue(self, key: TopicPartition) -> _Queue:
        return _Queue(self._directory / QUEUES / key.topic / str(key.partition), self._disk, key.topic)

    def _open_queues(self) -> None:
        root = self._directory / QUEUES
        for topic in self._disk.list_directory(root):
            for partition in self._disk.list_directory(root / topic):
                if partition.isascii() and partition.isdecimal():
                    key = TopicPartition(topic, int(partition))
                    self._queues[key] = self._open_queue(key)
        for topic, number in self._partitions:
            key = TopicPartition(topic, number)
            if key not in self._queues:
                self._queues[key] = self._open_queue(key)

    def _trusted(self, key: TopicPartition, queue: _Queue) -> int:
        """Return the ordinal before which units must be right; recovery cuts later ones."""
        return queue.end if self._live is not None else min(queue.end, self._partitions.get(key, NOTHING).durable_units)

    def _check_lost(self, key: TopicPartition, queue: _Queue, ordinal: int) -> None:
        """Check a unit whose record the walk did not find: it must be a filler, or of a record known to be gone."""
        unit = queue.unit(ordinal)
        if unit is None or ordinal >= self._trusted(key, queue):
            return
        self._report.units += 1
        offset, size, _ = unit
        if size < SMALLEST_RECORD or not (size == FILLER_SIZE or self._is_lost(offset)):
            self._add(*queue.place(ordinal), f"{key}: unit {ordinal} says {unit}, where no record of it is")

    def _is_lost(self, log_offset: int) -> bool:
        """Return whether a record at a log offset is known to be gone: it has aged out or is in a bad range."""
        return log_offset < self._begin or any(gap.start <= log_offset < gap.end for gap in self._bad)

    def _check_queue_end(self, key: TopicPartition, queue: _Queue) -> None:
        for ordinal in range(max(queue.next, queue.base), self._trusted(key, queue)):
            self._check_lost(key, queue, ordinal)
        for ordinal, path in queue.holes:
            self._add(path, queue.place(ordinal - 1)[1] + UNIT_SIZE, f"{key}: no file holds unit {ordinal}")
        promised = self._partitions.get(key, NOTHING).durable_units
        if queue.end < promised:
            self._add(*queue.place(queue.end), f"{key}: {queue.end} units, the checkpoint says {promised}")
        elif queue.missing is not None:
            ordinal, log_offset = queue.missing
            if ordinal < promised or (self._live is not None and log_offset < self._live.mark):
                self._add(*queue.place(ordinal), f"{key}: no unit {ordinal} for the record at log offset {log_offset}")

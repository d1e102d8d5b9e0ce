"""Topics straight from a store folder, a broker's own or a copy of it, without a broker (docs/storage-format.md).

Nothing in the folder is written and no lock is taken, so this works beside a running broker. A message can be read once its
unit is in the files of the partition's queue, which takes a fraction of a second. Units lead to records, which are read in
place, through a memory map of a part of a segment::

    consumequeue/orders/3/…0000    │ unit 0 │ unit 1 │ unit 2 │ …         16 bytes each
                                        └────────┐
    commitlog/…0000                … │ record │ record │ record │ …       only those of the units are looked at

A record counts when it is that of the unit: log offset, size, topic, partition, offset in the queue and, unless checksums are
turned off, checksum. For other records, and for fillers, the message is damaged or lost.
"""

import logging
import mmap
import os
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from metaq.errors import AgedOut, DiskFailed, StoreError, UnknownTopic
from metaq.message import INTERNAL_TOPICS, TopicPartition
from metaq.spark.reading.checking import are_of, checksums_match
from metaq.spark.reading.columns import MOST_ROWS, SMALLEST_RECORD, UNIT, Piece, Records, Truths, fitting
from metaq.store.checkpoint import NOTHING, read_checkpoint
from metaq.store.files.disk import RealDisk
from metaq.store.files.documents import read_document
from metaq.store.log.segments import is_segment_name
from metaq.store.messagestore import LOG, QUEUES
from metaq.store.queues.consumequeue import FILLER_SIZE, UNIT_SIZE
from metaq.store.recovery.recovery import IDENTITY, check_format

logger = logging.getLogger(__name__)

TOPICS: Final = Path("config", "topics.json")
SPAN: Final = 64 * 1024 * 1024
"""Bytes of a segment that one piece may span: the pages between its records may count as this process's memory."""
Units = npt.NDArray[np.void]


class Ends(NamedTuple):
    """The offsets of a partition that can be read: ``least`` … ``most`` − 1."""

    least: int
    most: int


class Folder:
    """A store folder, looked up anew at each call; no file of it stays open.

    Only the topic table and the checkpoint are read once, when this object is made.
    """

    def __init__(self, directory: Path) -> None:
        """Read the topic table and the checkpoint.

        ``StoreError`` when this is no store folder, or one that has lost its queues; ``UnknownVersion``; ``DiskFailed``.
        """
        self.directory = directory
        disk = RealDisk()
        if LOG not in disk.list_directory(directory):
            raise StoreError(f"{directory} is not a store folder: it has no {LOG}")
        identity, _ = read_document(disk, directory / IDENTITY)
        if identity is not None:
            check_format(directory, identity)
        content, problems = read_document(disk, directory / TOPICS)
        for problem in problems:
            logger.warning("topic table damaged problem=%s", problem)
        self._table: dict[str, Any] = {} if content is None else content["topicConfigTable"]
        self._deleted: dict[str, dict[str, int]] = {} if content is None else content.get("deleted", {})
        checkpoint, _ = read_checkpoint(disk, directory)
        self._promised = {} if checkpoint is None else checkpoint.partitions
        if QUEUES not in disk.list_directory(directory) and any(self._durable(*key) for key in self._promised):
            raise StoreError(f"{directory} has lost its {QUEUES}; metaq verify --repair rebuilds it from the log")

    # -- what is there ------------------------------------------------------------------------------------------------

    def topics(self) -> list[str]:
        """Return the names of all topics except the broker's own ones, which can be read all the same."""
        names = self._table.keys() | set(_names(self.directory / QUEUES)) | {topic for topic, _ in self._promised}
        return sorted(name for name in names - INTERNAL_TOPICS if self._count(name))

    def partitions(self, topic: str) -> int:
        """Return how many partitions a topic has; they are numbered from 0. ``UnknownTopic`` without any."""
        count = self._count(topic)
        if not count:
            raise UnknownTopic(f"{self.directory} has no topic {topic}")
        return count

    def _count(self, topic: str) -> int:
        """Count a topic's partitions as a broker does: those of the topic table, and others with messages."""
        row = self._table.get(topic)
        most = 0 if row is None else row.get("mostQueueNums", max(row["readQueueNums"], row["writeQueueNums"]))
        found = {int(name) for name in _names(self.directory / QUEUES / topic) if name.isascii() and name.isdecimal()}
        found |= {partition for name, partition in self._promised if name == topic}
        others = [number + 1 for number in found if number >= most and (row is not None or self._is_shown(topic, number))]
        return max([0 if row is None else int(row["readQueueNums"]), *others])

    def _is_shown(self, topic: str, partition: int) -> bool:
        """Return whether any message came after the topic was deleted, if it was."""
        end = max(self._queue(topic, partition).end, self._durable(topic, partition))
        return end > self._deleted.get(topic, {}).get(str(partition), -1)

    def ends(self, topic: str, partition: int) -> Ends:
        """Return the first offset whose record the log may still have, and the offset after the last intact message.

        All messages that the checkpoint names as durable are between the two, even damaged ones.
        """
        while True:
            with suppress(AgedOut, FileNotFoundError):  # deleted while this looks: look again
                return self._ends(topic, partition)

    def _ends(self, topic: str, partition: int) -> Ends:
        queue, key = self._queue(topic, partition), TopicPartition(topic, partition)
        least = self._least(key, queue, self._segments()[0].base)
        # from the end down to the durable offset: first one unit, which mostly is enough, then ``MOST_ROWS`` at a time
        most, high, step = max(least, self._durable(*key)), queue.end, 1
        while high > most:
            low = max(most, high - step)
            pieces = self._pieces(key, low, high, verify=True)
            found = np.concatenate([piece.first + np.flatnonzero(piece.sizes) for piece in pieces])
            if len(found):
                return Ends(least, int(found[-1]) + 1)
            high, step = low, MOST_ROWS
        return Ends(least, most)

    def _least(self, key: TopicPartition, queue: "_Queue", begin: int) -> int:
        """Return the first offset whose record a log that begins there may still have. ``FileNotFoundError``."""
        least = max(queue.base, self._deleted.get(key.topic, {}).get(str(key.partition), 0))
        at = least
        while at < queue.end:
            units = queue.units(at, MOST_ROWS)
            aged = _has_aged(units, begin)
            kept = np.flatnonzero(_may_lead(units) & ~aged)
            passed = int(kept[0]) if len(kept) else len(units)
            if aged[:passed].any():  # else the units without a record are damaged or lost, and may be all that there is
                least = at + passed
            if len(kept):
                break
            at += len(units)
        # all aged out, or no message ever came
        return max(least, self._durable(*key)) if least >= queue.end else least

    def at_time(self, topic: str, partition: int, time_ms: int) -> int:
        """Return the offset of the first message stored at or after a time in milliseconds; the next offset when there is none.

        Damaged messages are passed over.
        """
        key = TopicPartition(topic, partition)
        low, end = self.ends(topic, partition)
        high = end
        while low < high:
            middle = (low + high) // 2
            found, stored_ms = self._next_stored(key, middle, high)
            if found < high and stored_ms < time_ms:
                low = found + 1
            else:
                high = middle
        return self._next_stored(key, low, end)[0]

    def _next_stored(self, key: TopicPartition, low: int, high: int) -> tuple[int, int]:
        """Return offset and store time of the first intact message from ``low`` on; ``high`` and 0 without one."""
        step = 1
        while low < high:
            for piece in self._pieces(key, low, min(high, low + step), verify=True):
                if piece.sizes.any():
                    row = int(np.argmax(piece.sizes > 0))
                    records = Records(piece.data, piece.starts[row : row + 1], piece.sizes[row : row + 1])
                    return piece.first + row, int(records.fields["store_ms"][0])
            low, step = low + step, min(2 * step, MOST_ROWS)
        return high, 0

    def _queue(self, topic: str, partition: int) -> "_Queue":
        return _Queue(self.directory / QUEUES / topic / str(partition))

    def _durable(self, topic: str, partition: int) -> int:
        """Return the offset before which all messages were durable at the checkpoint."""
        return self._promised.get((topic, partition), NOTHING).next

    def _segments(self) -> list["_File"]:
        segments = _files(self.directory / LOG)
        if not segments:
            raise StoreError(f"{self.directory / LOG} is empty: a log has at least one file")
        return segments

    # -- reading ------------------------------------------------------------------------------------------------------

    def pieces(self, topic: str, partition: int, first: int, until: int, *, verify: bool = True) -> Iterator[Piece]:
        """Yield the messages ``first`` … ``until`` − 1 in order, in pieces of at most ``MOST_BYTES``, each read when asked for.

        Messages that are damaged or lost are there, without a record. Without ``verify`` checksums are not compared, so a body
        may differ from the one that was stored. ``AgedOut`` for messages that are gone, also when they go during the read;
        ``DiskFailed``.
        """
        least = self.ends(topic, partition).least
        if first < min(least, until):
            raise AgedOut(topic, partition, first, min(least, until), least=least)
        yield from self._pieces(TopicPartition(topic, partition), first, until, verify=verify)

    def _pieces(self, key: TopicPartition, first: int, until: int, *, verify: bool) -> Iterator[Piece]:
        while first < until:
            # looked up for each round: a running broker adds files and deletes others
            queue, segments = self._queue(*key), self._segments()
            with suppress(FileNotFoundError):  # deleted since it was listed: the next round finds out what is gone
                units = queue.units(first, min(MOST_ROWS, until - first))
                if first < queue.base or _has_aged(units, segments[0].base).any():
                    least = self._least(key, queue, segments[0].base)
                    if first < least:  # else a unit is damaged
                        raise AgedOut(*key, first, min(least, until), least=least)
                if not len(units):  # beyond the queue's files, where a broker would write fillers
                    units = np.zeros(min(MOST_ROWS, until - first), UNIT)
                for segment, rows in _runs(units, segments):
                    piece = _piece(key, first, units[rows], segment, verify=verify)
                    yield piece
                    first += len(piece.sizes)


class _File(NamedTuple):
    """One of the files that together are a log or a queue."""

    base: int
    """Where in the whole it begins, in bytes."""
    size: int
    path: Path


def _files(directory: Path) -> list[_File]:
    found = []
    for name in filter(is_segment_name, _names(directory)):
        with suppress(FileNotFoundError), _reading(directory / name):
            found.append(_File(int(name), (directory / name).stat().st_size, directory / name))
    return found


class _Queue:
    """The units of a partition in its files as they are now: up to the first hole, as a broker takes them over at its start."""

    def __init__(self, directory: Path) -> None:
        self._files = _files(directory)
        self.base = self._files[0].base // UNIT_SIZE if self._files else 0
        """The first offset."""
        self.end = self.base
        """The offset after the last one."""
        for file in self._files:
            if file.base != self.end * UNIT_SIZE:
                break
            self.end += file.size // UNIT_SIZE

    def units(self, ordinal: int, count: int) -> Units:
        """Return at most ``count`` units of one file, from an offset on; none at ``end`` or before ``base``."""
        count = min(count, self.end - ordinal)
        if count <= 0 or ordinal < self.base:
            return np.zeros(0, UNIT)
        file = self._files[bisect_right(self._files, ordinal * UNIT_SIZE, key=lambda file: file.base) - 1]
        with _reading(file.path), file.path.open("rb", buffering=0) as opened:
            data = os.pread(opened.fileno(), count * UNIT_SIZE, ordinal * UNIT_SIZE - file.base)
        return np.frombuffer(data, UNIT, len(data) // UNIT_SIZE)


def _may_lead(units: Units) -> Truths:
    """Return for each unit whether its size can be that of a record: fillers have another, and a broken disk may leave any."""
    may: Truths = (units["size"] >= SMALLEST_RECORD) & (units["size"] < FILLER_SIZE)
    return may


def _has_aged(units: Units, begin: int) -> Truths:
    """Return for each unit whether its record was before the log's begin and has been deleted."""
    aged: Truths = _may_lead(units) & (units["log_offset"] >= 0) & (units["log_offset"] < begin)
    return aged


def _runs(units: Units, segments: list[_File]) -> Iterator[tuple[_File, slice]]:
    """Yield units in runs that make one piece: of one segment, within ``SPAN`` and ``MOST_BYTES``."""
    may = _may_lead(units) & (units["log_offset"] >= segments[0].base)
    if not may.any():
        yield segments[0], slice(0, len(units))
        return
    # a unit without a record joins the run of the unit before it, the first ones the run of the first unit that has one
    latest = np.maximum.accumulate(np.where(may, np.arange(len(units)), int(np.argmax(may))))
    offsets = units["log_offset"].astype(np.int64)[latest]
    sizes = np.where(may, units["size"], 0).astype(np.int64)
    bases = np.array([segment.base for segment in segments])
    numbers = np.searchsorted(bases, offsets, "right") - 1
    row = 0
    while row < len(units):
        near = (numbers[row:] == numbers[row]) & (np.abs(offsets[row:] - offsets[row]) < SPAN // 2)
        count = len(near) if near.all() else int(np.argmin(near))
        count = min(count, fitting(sizes[row : row + count]))
        yield segments[numbers[row]], slice(row, row + count)
        row += count


def _piece(key: TopicPartition, first: int, units: Units, segment: _File, *, verify: bool) -> Piece:
    """Return the messages of some units whose records are in one segment.

    A message whose record is not the expected one gets none.
    """
    offsets, sizes = units["log_offset"].astype(np.int64), units["size"].astype(np.int64)
    places = offsets - segment.base
    rows = np.flatnonzero(_may_lead(units) & (places >= 0) & (places <= segment.size - sizes))
    found, starts, data = np.zeros(len(units), np.int64), np.zeros(len(units), np.int64), memoryview(b"")
    if len(rows):
        low = int(places[rows].min()) // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        data = _mapped(segment.path, low, int((places + sizes)[rows].max()))
        records = Records(data, places[rows] - low, sizes[rows])
        sound = are_of(key, records, first + rows, offsets[rows])
        if verify:
            sound[sound] = checksums_match(data, records.starts[sound], records.properties_ends[sound])
        starts[rows[sound]], found[rows[sound]] = records.starts[sound], sizes[rows[sound]]
        if sound.all():
            return Piece(first, starts, found, data, records)
    return Piece(first, starts, found, data)


def _mapped(path: Path, begin: int, end: int) -> memoryview:
    """Return a part of a file, mapped for as long as a slice of it is in use. ``begin`` is a multiple of a page."""
    with _reading(path), path.open("rb", buffering=0) as file:
        return memoryview(mmap.mmap(file.fileno(), end - begin, prot=mmap.PROT_READ, offset=begin))


def _names(directory: Path) -> list[str]:
    return RealDisk().list_directory(directory)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Raise ``DiskFailed`` for an error of the file system, except ``FileNotFoundError``, which passes."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DiskFailed(f"cannot read {path}: {error.strerror}") from error

"""Checkpoints: how much of the derived files may be trusted when the store is opened.

There are two marks. Both are log offsets: the queue files hold the units of all records before the mark.

``checkpoint`` (a document, at least every 5 s)
    Written after the log and the queue files were synced up to its mark, so it also holds after a power cut. It lists for every
    partition how many units and which text position belong to that mark; units after those are cut after a power cut. When all
    records of a partition have aged out of the log, only the checkpoint still knows its next ordinal.

``checkpoint.live`` (several times a second, never synced)
    Written after the queue files were written, so it holds as long as the page cache does: for the same boot of the machine.
    After a killed process, only the log after it is walked. 64 bytes::

        at  size  field
         0  8     magic "mqlive01"
         8  36    boot id, ASCII
        44  8     mark; −1 after a failed write or sync: the page cache may hold what the disk does not
        52  8     units before the mark in all queues together, so that a queue file cut short is noticed
        60  4     CRC-32C of the bytes before
"""

import struct
from pathlib import Path
from typing import Any, Final, NamedTuple

from metaq.checksum import crc32c
from metaq.errors import CorruptRecord, ReadFailed
from metaq.store.files.disk import Disk, File
from metaq.store.files.documents import BACKUP, decode_document, read_document, write_document
from metaq.store.files.filecache import FileCache
from metaq.store.index.keyindex import NO_INDEX, IndexMark

NAME: Final = "checkpoint"
LIVE_NAME: Final = "checkpoint.live"
_LIVE: Final = struct.Struct(">8s36sqq")
_CRC: Final = struct.Struct(">I")
_LIVE_MAGIC: Final = b"mqlive01"
LIVE_SIZE: Final = 64
FAILED: Final = -1

assert _LIVE.size + _CRC.size == LIVE_SIZE


class PartitionProgress(NamedTuple):
    """The progress of one partition as of a mark: the ordinal and the text position of its next message."""

    next: int
    text_end: int
    units: int = -1
    """The queue files hold the units before this ordinal durably; −1 means all units before ``next``."""

    @property
    def durable_units(self) -> int:
        """The ordinal before which the queue files hold all units durably."""
        return self.next if self.units < 0 else self.units


class Checkpoint(NamedTuple):
    """A durable checkpoint: its mark, and the progress of each partition (topic and number)."""

    mark: int
    partitions: dict[tuple[str, int], PartitionProgress]
    key_index: IndexMark = NO_INDEX
    """How far the key index is durable; its log offset is at most ``mark``."""


NOTHING: Final = PartitionProgress(0, 0)
"""The progress of a partition that the checkpoint does not list."""


class Live(NamedTuple):
    """A live mark, and the number of units before it in all queues together."""

    mark: int
    units: int


def write_checkpoint(disk: Disk, directory: Path, checkpoint: Checkpoint) -> None:
    """Replace the durable checkpoint; the previous one is kept as its backup."""
    topics: dict[str, dict[str, list[int]]] = {}
    for (topic, partition), progress in checkpoint.partitions.items():
        topics.setdefault(topic, {})[str(partition)] = [*progress[:2], *(progress[2:] if progress.units >= 0 else ())]
    index = checkpoint.key_index._asdict()
    write_document(disk, directory / NAME, {"mark": checkpoint.mark, "topics": topics, "index": index})


def read_checkpoint(disk: Disk, directory: Path) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest intact durable checkpoint, or ``None``, and what was wrong with the versions passed over."""
    content, problems = read_document(disk, directory / NAME)
    if content is None:
        return None, problems
    topics: dict[str, dict[str, Any]] = content["topics"]
    partitions = {
        (topic, int(partition)): PartitionProgress(*progress)
        for topic, table in topics.items()
        for partition, progress in table.items()
    }
    index = IndexMark(**content["index"]) if "index" in content else NO_INDEX
    return Checkpoint(content["mark"], partitions, index), problems


def covered_by_both(disk: Disk, directory: Path) -> int:
    """Return the mark up to which both the checkpoint and its backup cover the log; −1 when one is missing or damaged."""
    marks = []
    for name in (NAME, NAME + BACKUP):
        try:
            marks.append(int(decode_document(disk.read_file(directory / name), directory / name)["mark"]))
        except (FileNotFoundError, CorruptRecord, ReadFailed):
            return -1
    return min(marks)


class LiveMark:
    """The live mark of an open store, which overwrites it in place."""

    def __init__(self, disk: Disk, files: FileCache, directory: Path) -> None:
        self._boot_id = disk.boot_id().encode("ascii")
        self._files = files
        self._path = directory / LIVE_NAME

    def write(self, live: Live) -> None:
        """Write the mark. A killed process cannot tear it: its 64 bytes lie within one page."""
        data = _LIVE.pack(_LIVE_MAGIC, self._boot_id, *live)
        self._file().write(data + _CRC.pack(crc32c(data)), 0)

    def fail(self) -> None:
        """Write that a write or a sync failed."""
        self.write(Live(FAILED, 0))

    def drop(self) -> None:
        """Empty the mark, which cannot be read, or would be wrong since queue files are about to be cut and rebuilt."""
        self._file().truncate(0)

    def _file(self) -> File:
        return self._files.open(self._path)


def read_live(disk: Disk, directory: Path) -> Live | None:
    """Return the live mark; ``None`` unless it is intact and was written during this boot. Raises ``ReadFailed``."""
    try:
        data = disk.read_file(directory / LIVE_NAME)
    except FileNotFoundError:
        return None
    decoded = decode_live(data)
    if decoded is None or decoded[0] != disk.boot_id().encode("ascii").ljust(36, b"\0"):
        return None
    return decoded[1]


def decode_live(data: bytes) -> tuple[bytes, Live] | None:
    """Return the boot id and the mark; ``None`` when the bytes are not intact."""
    if len(data) != LIVE_SIZE or data[_LIVE.size :] != _CRC.pack(crc32c(data[: _LIVE.size])):
        return None
    magic, boot_id, mark, units = _LIVE.unpack_from(data)
    return (boot_id, Live(mark, units)) if magic == _LIVE_MAGIC else None

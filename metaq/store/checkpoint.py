"""How much of the derived files may be trusted when the store is opened.

Two marks, both log offsets: all units of records before the mark are in the queue files.

``checkpoint`` (a document, at least every 5 s)
    Written after log and queue files were synced up to its mark, so it holds after a power cut too. It lists for every
    partition how many units and which text position belong to that mark; units behind are cut after a power cut. It is also
    the only memory of a partition whose records have all aged out of the log.

``checkpoint.live`` (several times a second, never synced)
    Written after the queue files were written, so it holds as long as the page cache does: for the same boot of the machine.
    After a killed process only what came behind it is walked. 64 bytes::

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
from metaq.errors import CorruptRecord
from metaq.store.files.disk import Disk, File
from metaq.store.files.documents import BACKUP, decode_document, read_document, write_document
from metaq.store.index.keyindex import NO_INDEX, IndexMark

NAME: Final = "checkpoint"
LIVE_NAME: Final = "checkpoint.live"
_LIVE: Final = struct.Struct(">8s36sqq")
_CRC: Final = struct.Struct(">I")
_LIVE_MAGIC: Final = b"mqlive01"
LIVE_SIZE: Final = 64
FAILED: Final = -1

assert _LIVE.size + _CRC.size == LIVE_SIZE


class Progress(NamedTuple):
    """One partition as of a mark."""

    next: int
    text_end: int
    units: int = -1
    """The queue files hold the units before this ordinal durably; −1: all before ``next``."""

    @property
    def durable_units(self) -> int:
        return self.next if self.units < 0 else self.units


class Checkpoint(NamedTuple):
    """A durable checkpoint."""

    mark: int
    partitions: dict[tuple[str, int], Progress]
    key_index: IndexMark = NO_INDEX
    """How far the key index is durable; its log offset is never behind ``mark``."""


NOTHING: Final = Progress(0, 0)
"""A partition that a checkpoint does not know."""


class Live(NamedTuple):
    """A live mark."""

    mark: int
    units: int


def write_checkpoint(disk: Disk, directory: Path, checkpoint: Checkpoint) -> None:
    """Replace the durable checkpoint; the one before is kept as backup."""
    topics: dict[str, dict[str, list[int]]] = {}
    for (topic, partition), progress in checkpoint.partitions.items():
        topics.setdefault(topic, {})[str(partition)] = [*progress[:2], *(progress[2:] if progress.units >= 0 else ())]
    index = checkpoint.key_index._asdict()
    write_document(disk, directory / NAME, {"mark": checkpoint.mark, "topics": topics, "index": index})


def read_checkpoint(disk: Disk, directory: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest intact durable checkpoint, and what was wrong with those passed over."""
    content, problems = read_document(disk, directory / NAME)
    if content is None:
        return None, problems
    topics: dict[str, dict[str, Any]] = content["topics"]
    partitions = {
        (topic, int(partition)): Progress(*progress) for topic, table in topics.items() for partition, progress in table.items()
    }
    index = IndexMark(**content["index"]) if "index" in content else NO_INDEX
    return Checkpoint(content["mark"], partitions, index), problems


def covered_by_both(disk: Disk, directory: Path) -> int:
    """The mark up to which the checkpoint and its backup cover the log; −1 when one of them is missing or altered."""
    marks = []
    for name in (NAME, NAME + BACKUP):
        try:
            marks.append(int(decode_document(disk.read_file(directory / name), directory / name)["mark"]))
        except (FileNotFoundError, CorruptRecord):
            return -1
    return min(marks)


def write_live(file: File, boot_id: str, live: Live) -> None:
    """Overwrite the live mark in place: 64 bytes within one page are not torn by a killed process."""
    data = _LIVE.pack(_LIVE_MAGIC, boot_id.encode("ascii"), *live)
    file.write(data + _CRC.pack(crc32c(data)), 0)


def read_live(disk: Disk, directory: Path) -> Live | None:
    """The live mark when it was written during this boot of the machine and is intact."""
    try:
        data = disk.read_file(directory / LIVE_NAME)
    except FileNotFoundError:
        return None
    decoded = decode_live(data)
    if decoded is None or decoded[0] != disk.boot_id().encode("ascii").ljust(36, b"\0"):
        return None
    return decoded[1]


def decode_live(data: bytes) -> tuple[bytes, Live] | None:
    """Boot id and mark, or ``None`` when a bit of it is not as written."""
    if len(data) != LIVE_SIZE or data[_LIVE.size :] != _CRC.pack(crc32c(data[: _LIVE.size])):
        return None
    magic, boot_id, mark, units = _LIVE.unpack_from(data)
    return (boot_id, Live(mark, units)) if magic == _LIVE_MAGIC else None

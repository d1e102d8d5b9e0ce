"""The tables that a slave copies beside the log: the files of the folder ``config``, unchanged.

A snapshot refers to a place in the log up to which it covers offsets, transactions or deliveries. That place may be ahead of a
slave's log, by the bytes that are under way, and by more after a power cut. Such a snapshot does not count
(``metaq.store.copies.snapshots``), so the newest one that the slave's durable log covers is kept as the backup.
"""

import logging
from contextlib import suppress
from pathlib import Path
from typing import Final

from metaq.errors import CorruptRecord, ReadFailed
from metaq.store.copies.snapshots import made_end
from metaq.store.files.disk import Disk, replace_file
from metaq.store.files.documents import BACKUP, decode_document, has_right_checksum

logger = logging.getLogger(__name__)

DERIVED: Final = ("consumerOffset.json", "delayOffset.json", "halves.json", "transactions.json")
"""Snapshots of state that the log holds, too: worthless beside any other log."""
NAMES: Final = ("topics.json", "subscriptionGroup.json", "messageRequestMode.json", *DERIVED)


class Documents:
    """The tables of a folder, and the versions of them that one slave has been sent."""

    def __init__(self, folder: Path, disk: Disk) -> None:
        self._folder = folder
        self._disk = disk
        self._sent: dict[str, tuple[int, int, int]] = {}

    def changed(self) -> dict[str, str]:
        """Return name → text of the tables that were written since the last call; all of them at the first call.

        A damaged one is replaced by the version before, or is left out: a master does not write a table that was damaged on the
        disk again while nothing changes in it, and no slave would follow.
        """
        found = {}
        for name in NAMES:
            path = self._folder / name
            try:
                stat = path.stat()
                version = stat.st_mtime_ns, stat.st_ino, stat.st_size  # a time alone may be that of two writes
                if version == self._sent.get(name):
                    continue
                text = self._intact(path)
            except FileNotFoundError:
                continue
            self._sent[name] = version
            if text is not None:
                found[name] = text
        return found

    def _intact(self, path: Path) -> str | None:
        """Return the text of a table, or of the version before if it is damaged; ``None`` when that is damaged or missing."""
        text = self._read(path)
        if text is None:
            logger.error("damaged table not sent to slaves file=%s", path)
            with suppress(FileNotFoundError):
                text = self._read(path.with_name(path.name + BACKUP))
        return text

    def _read(self, path: Path) -> str | None:
        """Return the text of a table; ``None`` when it is damaged, or cannot be read. Raise ``FileNotFoundError``."""
        try:
            data = self._disk.read_file(path)
        except ReadFailed:
            return None
        return data.decode() if has_right_checksum(data) else None


def check(folder: Path, documents: dict[str, str]) -> None:
    """Raise ``CorruptRecord`` when a text that a master has sent is not such a table."""
    for name in NAMES:
        if name in documents:
            decode_document(documents[name].encode(), folder / name)


def keep(folder: Path, disk: Disk, documents: dict[str, str], durable_end: int) -> None:
    """Write the tables that a master has sent; names that it may not send are ignored.

    The slave's own log is durable up to ``durable_end``, which decides about the backups of snapshots.
    """
    disk.make_directories(folder)
    for name in NAMES:
        if name in documents:
            if name in DERIVED:
                _keep_covered(folder / name, disk, durable_end)
            replace_file(disk, folder / name, documents[name].encode())


def _keep_covered(path: Path, disk: Disk, durable_end: int) -> None:
    """Make the present snapshot the backup if the durable log covers it."""
    try:
        data = disk.read_file(path)
        content = decode_document(data, path)
    except (FileNotFoundError, CorruptRecord, ReadFailed):
        return
    if made_end(content) <= durable_end:
        replace_file(disk, path.with_name(path.name + BACKUP), data)


def forget_derived(folder: Path, disk: Disk) -> None:
    """Remove the snapshots of a log that is being replaced, and their backups."""
    for path in [folder / name for name in DERIVED]:
        for each in (path, path.with_name(path.name + BACKUP)):
            disk.unlink(each)

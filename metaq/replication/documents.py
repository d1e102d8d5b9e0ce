"""The tables that a slave copies beside the log: the files of the folder ``config``, as they are.

What they say of the log (how far offsets, transactions and deliveries are covered) may be ahead of a slave's log by what is on
its way, and more after a power cut. Such a one does not count (``metaq.store.copies.snapshots``), so the newest that a slave's
durable log covers stays as the backup.
"""

from pathlib import Path
from typing import Final

from metaq.errors import CorruptRecord
from metaq.store.copies.snapshots import made_end
from metaq.store.files.disk import Disk, replace_file
from metaq.store.files.documents import BACKUP, decode_document

DERIVED: Final = ("consumerOffset.json", "delayOffset.json", "halves.json", "transactions.json")
"""Snapshots of what the log tells: worth nothing beside another log than theirs."""
NAMES: Final = ("topics.json", "subscriptionGroup.json", *DERIVED)


class Documents:
    """What of a folder one slave has been sent."""

    def __init__(self, folder: Path, disk: Disk) -> None:
        self._folder = folder
        self._disk = disk
        self._sent: dict[str, int] = {}

    def changed(self) -> dict[str, str]:
        """Name → text of those that were written since the last call."""
        found = {}
        for name in NAMES:
            path = self._folder / name
            try:
                written_ns = path.stat().st_mtime_ns
                if written_ns == self._sent.get(name):
                    continue
                found[name] = self._disk.read_file(path).decode()
            except FileNotFoundError:
                continue
            self._sent[name] = written_ns
        return found


def check(folder: Path, documents: dict[str, str]) -> None:
    """``CorruptRecord`` when a master has sent what is no such file."""
    for name in NAMES:
        if name in documents:
            decode_document(documents[name].encode(), folder / name)


def keep(folder: Path, disk: Disk, documents: dict[str, str], durable_end: int) -> None:
    """Write what a master has sent, other names than it may send left out; the own log is durable up to ``durable_end``."""
    disk.make_directories(folder)
    for name in NAMES:
        if name in documents:
            if name in DERIVED:
                _keep_covered(folder / name, disk, durable_end)
            replace_file(disk, folder / name, documents[name].encode())


def _keep_covered(path: Path, disk: Disk, durable_end: int) -> None:
    """Have the snapshot that is there as the backup, if the durable log covers it."""
    try:
        data = disk.read_file(path)
        content = decode_document(data, path)
    except (FileNotFoundError, CorruptRecord):
        return
    if made_end(content) <= durable_end:
        replace_file(disk, path.with_name(path.name + BACKUP), data)


def forget_derived(folder: Path, disk: Disk) -> None:
    """Remove what belongs to a log that is being replaced, backups too."""
    for path in [folder / name for name in DERIVED]:
        for each in (path, path.with_name(path.name + BACKUP)):
            disk.unlink(each)

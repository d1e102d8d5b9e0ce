"""The ending of the process before this one: how it ended, and whether the log may lack records because of that.

::

    abort          exists from a start to an orderly stop; names the boot in which the folder is used
                   {"crc32c":"…","boot_id":"3f…","synced":true}      synced: nothing was reported as stored before it was synced
    suspect.json   exists while the log may lack records that it had
                   {"crc32c":"…","reason":"…"}

A process that finds the present boot id in ``abort`` follows one that was killed: the page cache has everything. With any other
boot id, the power or the kernel failed in between: what was not synced may be gone. That is recorded durably in
``suspect.json`` before this process replaces ``abort``; otherwise a process that ends in between would hide it from the next.
"""

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from metaq.errors import CorruptRecord, ReadFailed
from metaq.store.files.disk import Disk, replace_file
from metaq.store.files.documents import decode_document, encode_document
from metaq.store.files.filecache import run_here
from metaq.store.files.owed import OwedCalls

ABORT: Final = "abort"
SUSPECT: Final = "suspect.json"


class Ending(StrEnum):
    """The way in which a process left its folder."""

    ORDERLY = "orderly"
    KILLED = "killed"
    POWER_CUT = "power cut"
    """The power or the kernel failed, or the mark cannot be read: then the worst is assumed."""


class Suspicion:
    """The reason why a log may lack records that it had. It outlives the process, until it is known that none are missing."""

    def __init__(self, disk: Disk, directory: Path) -> None:
        self._disk = disk
        self._path = directory / SUSPECT
        self.reason: str | None = None
        """``None`` when the log lacks nothing."""
        self._is_durable = True
        try:
            self.reason = str(decode_document(disk.read_file(self._path), self._path)["reason"])
        except FileNotFoundError:
            return
        except (CorruptRecord, ReadFailed) as error:
            self.reason = str(error)

    def rise(self, reason: str, do: Callable[[Callable[[], None]], None] = run_here) -> None:
        """Raise the suspicion, at once in memory, and durably when ``do`` has made the call. The first reason is kept."""
        if self.reason is None:
            self.reason, self._is_durable = reason, False
        do(self._keep)

    def _keep(self) -> None:
        if not self._is_durable:
            replace_file(self._disk, self._path, encode_document({"reason": self.reason}))
            self._is_durable = True

    def clear(self) -> None:
        """Clear the suspicion, durably when it returns.

        A suspicion that a full disk has not taken yet stays: the owed write would bring it back later.
        """
        if self.reason is not None and self._is_durable:
            self._disk.unlink(self._path)
            self._disk.sync_directory(self._path.parent)
            self.reason = None


def begin(disk: Disk, directory: Path, suspicion: Suspicion, owed: OwedCalls, *, synced: bool) -> Ending:
    """Return how the last process ended, raise a suspicion if need be, and mark the folder as used by this process.

    ``synced``: nothing that this process writes is reported as stored, to clients or replicas, before it is synced. Writes that
    a full disk refuses are ``owed``.
    """
    path, boot_id = directory / ABORT, disk.boot_id()
    found, ending = None, Ending.ORDERLY
    try:
        found = decode_document(disk.read_file(path), path)
    except (CorruptRecord, ReadFailed):
        ending = Ending.POWER_CUT
    except FileNotFoundError:
        pass
    else:
        ending = Ending.KILLED if found["boot_id"] == boot_id else Ending.POWER_CUT
    # a killed process may have left unsynced records, which stricter settings of this process do not make durable
    own: dict[str, Any] = {"boot_id": boot_id, "synced": synced and (found is None or found["synced"])}
    if ending is Ending.POWER_CUT and not own["synced"]:
        suspicion.rise("the power failed, or the kernel did, before everything was synced", owed.do)
    if found != own:  # otherwise it is durable already, and a change of roles need not wait for a sync
        owed.do(lambda: replace_file(disk, path, encode_document(own)))
    return ending


def end(disk: Disk, directory: Path) -> None:
    """Remove the mark durably, because everything is durable and the process ends."""
    disk.unlink(directory / ABORT)
    disk.sync_directory(directory)  # a mark that a power cut brings back would raise a suspicion

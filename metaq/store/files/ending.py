"""How the process before this one ended, and whether the log may lack for it what it had.

::

    abort          there from a start to an orderly stop; whose folder it is
                   {"crc32c":"…","boot_id":"3f…","synced":true}      synced: nothing counted as held before it was synced
    suspect.json   there while the log may lack what it had
                   {"crc32c":"…","reason":"…"}

A process that finds its machine's own boot id there follows one that was killed: the page cache has everything. With any other
one the power failed in between, or the kernel did: what was not synced may be gone. That is written down, durably, before the
mark becomes this process's own, so that none that ends in between hides it from the next.
"""

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from metaq.errors import CorruptRecord
from metaq.store.files.disk import Disk, replace_file
from metaq.store.files.documents import decode_document, encode_document
from metaq.store.files.filecache import run_here
from metaq.store.files.owed import Owed

ABORT: Final = "abort"
SUSPECT: Final = "suspect.json"


class Ending(StrEnum):
    """How a process left its folder."""

    ORDERLY = "orderly"
    KILLED = "killed"
    POWER_CUT = "power cut"
    """Or its mark cannot be read: the worst is taken for true."""


class Suspicion:
    """Why a log may lack what it had, from one process to the next, until somebody knows that it lacks nothing."""

    def __init__(self, disk: Disk, directory: Path) -> None:
        self._disk = disk
        self._path = directory / SUSPECT
        self.reason: str | None = None
        """``None``: it lacks nothing."""
        self._is_durable = True
        try:
            self.reason = str(decode_document(disk.read_file(self._path), self._path)["reason"])
        except FileNotFoundError:
            return
        except CorruptRecord as error:
            self.reason = str(error)

    def rise(self, reason: str, do: Callable[[Callable[[], None]], None] = run_here) -> None:
        """Durable when ``do`` has made the call, in force at once. The first reason stays."""
        if self.reason is None:
            self.reason, self._is_durable = reason, False
        do(self._keep)

    def _keep(self) -> None:
        if not self._is_durable:
            replace_file(self._disk, self._path, encode_document({"reason": self.reason}))
            self._is_durable = True

    def clear(self) -> None:
        """Durable when it returns. What a full disk has not taken yet stays: it would be written after its end."""
        if self.reason is not None and self._is_durable:
            self._disk.unlink(self._path)
            self._disk.sync_directory(self._path.parent)
            self.reason = None


def begin(disk: Disk, directory: Path, suspicion: Suspicion, owed: Owed, *, synced: bool) -> Ending:
    """Find out how the last process ended, and mark the folder as this one's. ``synced``: nothing that this one writes counts
    as held before it is synced."""
    path, boot_id = directory / ABORT, disk.boot_id()
    found, ending = None, Ending.ORDERLY
    try:
        found = decode_document(disk.read_file(path), path)
    except CorruptRecord:
        ending = Ending.POWER_CUT
    except FileNotFoundError:
        pass
    else:
        ending = Ending.KILLED if found["boot_id"] == boot_id else Ending.POWER_CUT
    # what a killed process had not synced is not made durable by settings that demand it of this one
    own: dict[str, Any] = {"boot_id": boot_id, "synced": synced and (found is None or found["synced"])}
    if ending is Ending.POWER_CUT and not own["synced"]:
        suspicion.rise("the power failed, or the kernel did, before everything was synced", owed.do)
    if found != own:  # else it is durable already: a change of roles waits for no sync
        owed.do(lambda: replace_file(disk, path, encode_document(own)))
    return ending


def end(disk: Disk, directory: Path) -> None:
    """Everything is durable, and the process ends."""
    disk.unlink(directory / ABORT)
    disk.sync_directory(directory)  # a mark that a power cut brings back would raise a suspicion

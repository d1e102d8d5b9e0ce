"""The disk as a parameter: the few calls that the store makes, as protocols and as real system calls.

A crash test replaces ``RealDisk`` by a disk that loses, keeps or reorders what was not synced, so durability must come from
these calls alone: ``File.datasync`` makes a file's bytes and size durable, ``Disk.sync_directory`` its name.

Every ``OSError`` becomes ``DiskFull`` or ``DiskFailed`` here. The methods that a caller may run in a thread pool
(``datasync``, ``sync_file_system``, ``read``, ``allocate``, ``unlink``, ``replace``, ``sync_directory``) are bare system
calls: no lock, no log, no shared state.
"""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from metaq.errors import DirectoryLocked, DiskFailed, DiskFull, ReadFailed, StoreError, TooManyFiles

FULL = (errno.ENOSPC, errno.EDQUOT)
TOO_MANY = (errno.EMFILE, errno.ENFILE)
"""What only a call says that opens a file."""
MAKE_ROOM = "free space, or set --keep-hours or --segment-bytes lower"
BLOCK_BYTES = 512
"""The unit of ``st_blocks``."""
_syncfs = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)
"""``syncfs`` of the C library, which only Linux has; ``None`` elsewhere."""


class Usage(NamedTuple):
    """The used and the available bytes of the file system that holds a path."""

    used: int
    available: int

    @property
    def ratio(self) -> float:
        """used ÷ (used + available), as ``df`` counts: space reserved for root belongs to neither."""
        total = self.used + self.available
        return self.used / total if total else 1.0


class File(Protocol):
    """One open file. Offsets and sizes in bytes."""

    def write(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        """Write all of ``data`` at ``offset``. Raises ``DiskFull`` or ``DiskFailed``; then a part may have been written."""
        ...

    def read(self, size: int, offset: int) -> bytes:
        """Return at most ``size`` bytes from ``offset`` on; fewer only at the end of the file. May wait for the disk."""
        ...

    def read_cached(self, size: int, offset: int) -> bytes | None:
        """Return ``size`` bytes without waiting; ``None`` unless the file has them all and they are in the page cache."""
        ...

    def next_data(self, offset: int) -> int:
        """Return where bytes other than zero may begin, at or after ``offset``; the file's size when there are none.

        Holes that were read ahead are pages of zeros in the page cache, which count as data. So the cached pages after
        ``offset`` are dropped, and from the first call on the open file has no readahead.
        """
        ...

    def view(self) -> memoryview:
        """Map the whole file as it is now, read-only; later writes below its present size show through."""
        ...

    def size(self) -> int:
        """Return the size of the file in bytes."""
        ...

    def allocate(self, size: int) -> bool:
        """Make the file ``size`` bytes long, with disk space reserved for all of it; new bytes are zero.

        Return false when nothing had to be done. Raises ``DiskFull`` or ``DiskFailed``.
        """
        ...

    def truncate(self, size: int) -> None:
        """Cut or extend the file to ``size`` bytes; no disk space is reserved."""
        ...

    def datasync(self) -> None:
        """Make everything written so far, and the size, durable. Raises ``DiskFailed``: some of it may be lost then."""
        ...

    def sync_file_system(self) -> bool:
        """Make everything on the file system of this file durable: bytes, sizes and names of all files.

        Return false when this system has no such call. Raises ``DiskFailed``, also for a write that failed since the file was
        opened.
        """
        ...

    def close(self) -> None: ...


class Disk(Protocol):
    """The calls that take paths. They raise ``FileNotFoundError`` for a missing file and ``StoreError`` for other failures."""

    def open(self, path: Path) -> File:
        """Open a file for reading and writing; create it when it is missing."""
        ...

    def read_file(self, path: Path) -> bytes:
        """Return the whole content of a file. Raises ``FileNotFoundError`` when there is none."""
        ...

    def list_directory(self, path: Path) -> list[str]:
        """Return the names in a folder, sorted; none when it does not exist."""
        ...

    def make_directories(self, path: Path, *, durable: bool = True) -> None:
        """Create a folder and its parents; make their names durable unless ``durable`` is false."""
        ...

    def replace(self, source: Path, target: Path) -> None:
        """Rename a file, replacing the target atomically."""
        ...

    def unlink(self, path: Path) -> None:
        """Remove a file; do nothing when it is gone already."""
        ...

    def sync_directory(self, path: Path) -> None:
        """Make the names in a folder durable."""
        ...

    def usage(self, path: Path) -> Usage:
        """Return the used and the available bytes of the file system that holds ``path``."""
        ...

    def boot_id(self) -> str:
        """Return an id that changes with each boot of the machine, which empties the page cache."""
        ...

    def lock(self, path: Path) -> "File":
        """Take an exclusive lock that ends with the process. Raises ``DirectoryLocked`` when another process has it."""
        ...


def replace_file(disk: Disk, path: Path, data: bytes) -> None:
    """Replace a small file durably; after a crash it holds either the old or the new content, whole."""
    temporary = path.with_name(path.name + ".new")
    file = disk.open(temporary)
    try:
        file.truncate(0)
        file.write(data, 0)
        file.datasync()
    finally:
        file.close()
    disk.replace(temporary, path)
    disk.sync_directory(path.parent)


def _failure(action: str, path: Path, error: OSError) -> StoreError:
    if error.errno in FULL:
        return DiskFull(f"cannot {action} {path}: the disk is full; {MAKE_ROOM}")
    if error.errno in TOO_MANY:
        return TooManyFiles(f"cannot {action} {path}: {error.strerror}; raise the limit of open files (LimitNOFILE, ulimit -n)")
    kind = ReadFailed if action == "read" and error.errno == errno.EIO else DiskFailed
    return kind(f"cannot {action} {path}: {error.strerror}")


@contextlib.contextmanager
def _translated(action: str, path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _failure(action, path, error) from error


class RealFile:
    """A file descriptor, closed at the latest with the last reference: a read in a thread pool keeps it open."""

    __slots__ = ("_fd", "_path")

    def __init__(self, path: Path, fd: int) -> None:
        self._path = path
        self._fd = fd

    def write(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        try:
            written = os.pwrite(self._fd, data, offset)
            view = memoryview(data)
            while written < len(view):  # a short write is followed by the error that caused it
                written += os.pwrite(self._fd, view[written:], offset + written)
        except OSError as error:
            raise _failure("write", self._path, error) from error

    def read(self, size: int, offset: int) -> bytes:
        try:
            data = os.pread(self._fd, size, offset)
            while 0 < len(data) < size:
                more = os.pread(self._fd, size - len(data), offset + len(data))
                if not more:
                    break
                data += more
            return data
        except OSError as error:
            raise _failure("read", self._path, error) from error

    def read_cached(self, size: int, offset: int) -> bytes | None:
        buffer = bytearray(size)
        try:
            count = os.preadv(self._fd, [buffer], offset, os.RWF_NOWAIT)
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno in (errno.EOPNOTSUPP, errno.ENOSYS):
                return None  # a file system without RWF_NOWAIT: every such read leaves the loop
            raise _failure("read", self._path, error) from error
        # fewer bytes: the rest is not cached, or the file ends here; only a read that may wait can tell
        return bytes(buffer) if count == size else None

    def next_data(self, offset: int) -> int:
        try:
            # both: a page marked by an earlier readahead triggers the next one, even in a file set to have none
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_RANDOM)
            os.posix_fadvise(self._fd, offset, 0, os.POSIX_FADV_DONTNEED)
            return os.lseek(self._fd, offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return self.size()
            raise _failure("search", self._path, error) from error

    def view(self) -> memoryview:
        with _translated("map", self._path):
            return memoryview(mmap.mmap(self._fd, 0, prot=mmap.PROT_READ))

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def allocate(self, size: int) -> bool:
        with _translated("allocate room for", self._path):
            known, room = os.fstat(self._fd), os.fstatvfs(self._fd)
            lacking = size - known.st_blocks * BLOCK_BYTES
            if lacking > room.f_bavail * room.f_frsize:  # otherwise the call would take what is left before it fails
                raise OSError(errno.ENOSPC, "")
            if lacking <= 0 and known.st_size >= size:
                return False
            os.posix_fallocate(self._fd, 0, size)
            return True

    def truncate(self, size: int) -> None:
        with _translated("truncate", self._path):
            os.ftruncate(self._fd, size)

    def datasync(self) -> None:
        try:
            os.fdatasync(self._fd)
        except OSError as error:  # a full disk too: the written data is gone and cannot be synced again
            raise DiskFailed(f"cannot sync {self._path}: {error.strerror}") from error

    def sync_file_system(self) -> bool:
        if _syncfs is None:
            return False
        if _syncfs(self._fd):
            raise DiskFailed(f"cannot sync the file system of {self._path}: {os.strerror(ctypes.get_errno())}")
        return True

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    __del__ = close


class RealDisk:
    """The file system of the machine."""

    def open(self, path: Path) -> RealFile:
        with _translated("open", path):
            return RealFile(path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644))

    def read_file(self, path: Path) -> bytes:
        with _translated("read", path):
            return path.read_bytes()

    def list_directory(self, path: Path) -> list[str]:
        try:
            with _translated("list", path):
                return sorted(os.listdir(path))
        except FileNotFoundError:
            return []

    def make_directories(self, path: Path, *, durable: bool = True) -> None:
        with _translated("create", path):
            missing = [folder for folder in (path, *path.parents) if not folder.exists()] if durable else []
            try:
                path.mkdir(parents=True, exist_ok=True)
            except FileNotFoundError as error:  # what /proc says to whoever would make a folder there
                raise _failure("create", path, error) from error
        for folder in missing:
            self.sync_directory(folder.parent)

    def replace(self, source: Path, target: Path) -> None:
        with _translated("rename", source):
            os.replace(source, target)

    def unlink(self, path: Path) -> None:
        with _translated("remove", path):
            path.unlink(missing_ok=True)

    def sync_directory(self, path: Path) -> None:
        with _translated("sync", path):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def usage(self, path: Path) -> Usage:
        with _translated("ask the room on", path):
            stat = os.statvfs(path)
            return Usage((stat.f_blocks - stat.f_bfree) * stat.f_frsize, stat.f_bavail * stat.f_frsize)

    def boot_id(self) -> str:
        with _translated("read", Path("/proc/sys/kernel/random/boot_id")):
            return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()

    def lock(self, path: Path) -> RealFile:
        file = self.open(path)
        try:
            fcntl.flock(file._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.close()
            raise DirectoryLocked(
                f"{path.parent} is in use by another process; stop it or choose another data folder"
            ) from error
        return file

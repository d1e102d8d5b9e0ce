"""A disk in memory that forgets what was not synced, fills up and fails: the `Disk` of the crash tests.

What a write changes is kept per sector of 512 bytes, with every version since the file's last sync. ``power_cut`` makes the
disk that a machine finds when it starts again: each unsynced sector, file size, new name, rename and removal is kept, lost or
(sectors, sizes) an older version of it, each on its own. A rename is one step, as in every journaling file system.
``killed`` is the other end of a process: the page cache stays.

Calls that change something are counted (``calls``): the one with number ``stop_at`` is done partly or not at all and raises
``Stopped``, as does every call after it.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from metaq.errors import DirectoryLocked, DiskFailed, DiskFull, ReadFailed
from metaq.store.files.disk import Usage

SECTOR: Final = 512
BLOCK: Final = 4096
ROOT: Final = Path("/disk")
DATA: Final = ROOT / "data"
EMPTY: Final = Usage(used=0, available=1 << 40)


class Stopped(Exception):
    """The machine or the process ends at this call."""


class Inode:
    """A file's bytes as readers see them (``data``), and what a power cut may leave of them."""

    __slots__ = ("allocated", "data", "failures", "sizes", "stale", "versions")

    def __init__(self, data: bytearray) -> None:
        self.data = data
        self.allocated = 0
        self.failures = 0
        """Failed syncs. Linux reports each once to every open file."""
        self.sizes = [len(data)]
        """The durable size, then each unsynced one."""
        self.versions: dict[int, list[bytes]] = {}
        """Unsynced sectors: the durable content, then each written since."""
        self.stale: dict[int, bytes] = {}
        """Sectors that a failed sync marked clean without writing them: their durable content."""

    def sector(self, number: int) -> bytes:
        return bytes(self.data[number * SECTOR : (number + 1) * SECTOR]).ljust(SECTOR, b"\0")

    def resize(self, size: int) -> None:
        before = len(self.data)
        if size == before:
            return
        if size < before:
            self._touch(size, before)
        try:
            if size < before:
                del self.data[size:]
            else:
                self.data.extend(bytes(size - before))
        except BufferError:  # somebody holds a view: it keeps the old bytes
            self.data = bytearray(self.data[:size].ljust(size, b"\0"))
        self.sizes.append(size)
        if size < before:
            self._record(size, before)

    def write(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        end = offset + len(data)
        if end > len(self.data):
            self.resize(end)
        self._touch(offset, end)
        self.data[offset:end] = data
        self._record(offset, end)

    def _touch(self, start: int, end: int) -> None:
        for number in range(start // SECTOR, -(-end // SECTOR)):
            if number not in self.versions:
                self.versions[number] = [self.stale.pop(number) if number in self.stale else self.sector(number)]

    def _record(self, start: int, end: int) -> None:
        for number in range(start // SECTOR, -(-end // SECTOR)):
            self.versions[number].append(self.sector(number))

    def sync(self) -> None:
        self.versions.clear()
        self.sizes = [len(self.data)]

    def fail_sync(self) -> None:
        """Fail a sync as Linux does: the pages count as clean, readers see them, the disk has the old ones."""
        for number, versions in self.versions.items():
            self.stale[number] = versions[0]
        self.versions.clear()
        self.failures += 1

    def after_cut(self, rng: random.Random, keep: float) -> "Inode":
        size = self.sizes[_kept(rng, keep, len(self.sizes))]
        room = max(size, *self.sizes) + SECTOR
        data = self.data.ljust(room, b"\0")
        chosen = {number: versions[_kept(rng, keep, len(versions))] for number, versions in self.versions.items()}
        for number, content in {**self.stale, **chosen}.items():
            data[number * SECTOR : (number + 1) * SECTOR] = content
        del data[size:]
        return Inode(data)


def _kept(rng: random.Random, keep: float, count: int) -> int:
    """Which of ``count`` versions survives: 0 is the durable one, the last is the newest."""
    if count == 1 or rng.random() >= keep:
        return 0
    return count - 1 if rng.random() < 0.8 else rng.randrange(count)


class Folder:
    """Names as readers see them, those that are durable, and the unsynced steps from one to the other."""

    __slots__ = ("durable", "entries", "steps")

    def __init__(self) -> None:
        self.entries: dict[str, Inode | Folder] = {}
        self.durable: dict[str, Inode | Folder] = {}
        self.steps: list[tuple[str | None, str | None, Inode | Folder]] = []
        """(name that goes, name that comes, what it stands for)."""

    def step(self, source: str | None, target: str | None, node: "Inode | Folder") -> None:
        _apply(self.entries, source, target, node)
        self.steps.append((source, target, node))

    def sync(self) -> None:
        self.durable = dict(self.entries)
        self.steps.clear()

    def after_cut(self, rng: random.Random, keep: float) -> "Folder":
        names = dict(self.durable)
        for step in self.steps:
            if rng.random() < keep:
                _apply(names, *step)
        folder = Folder()
        folder.entries = {name: node.after_cut(rng, keep) for name, node in names.items()}
        folder.durable = dict(folder.entries)
        return folder


def _apply(names: dict[str, Inode | Folder], source: str | None, target: str | None, node: Inode | Folder) -> None:
    if source is not None and names.get(source) is node:
        del names[source]
    if target is not None:
        names[target] = node


class FaultyFile:
    """An open file of a `FaultyDisk`."""

    __slots__ = ("_disk", "_inode", "_path", "_reported")

    def __init__(self, disk: "FaultyDisk", inode: Inode, path: Path) -> None:
        self._disk = disk
        self._inode = inode
        self._path = path
        self._reported = inode.failures

    def write(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        disk, inode = self._disk, self._inode
        if disk.stops():
            # what fits into a sector is written whole or not at all
            part = disk.rng.choice((0, len(data))) if len(data) <= SECTOR else disk.rng.randrange(len(data) + 1)
            inode.write(data[:part], offset)
            raise Stopped
        if disk.is_full() and (disk.copy_on_write or offset + len(data) > inode.allocated):
            if disk.short_writes:
                inode.write(data[: disk.rng.randrange(len(data))], offset)
            raise DiskFull(f"cannot write {self._path}: the disk is full")
        inode.write(data, offset)

    def read(self, size: int, offset: int) -> bytes:
        self._disk.reading(self._path, offset, size)
        return bytes(self._inode.data[offset : offset + size])

    def read_cached(self, size: int, offset: int) -> bytes | None:
        data = self.read(size, offset)
        return data if len(data) == size else None

    def next_data(self, offset: int) -> int:
        self._disk.reading(self._path)
        data = self._inode.data
        rest = data[offset:].lstrip(b"\0")
        return len(data) if not rest else max(offset, (len(data) - len(rest)) // BLOCK * BLOCK)

    def view(self) -> memoryview:
        self._disk.reading(self._path)
        return memoryview(self._inode.data).toreadonly()

    def size(self) -> int:
        return len(self._inode.data)

    def allocate(self, size: int) -> bool:
        if self._disk.stops():
            raise Stopped
        if size > self._inode.allocated and self._disk.is_full():
            raise DiskFull(f"cannot allocate room for {self._path}: the disk is full")
        if size <= min(self._inode.allocated, len(self._inode.data)):
            return False
        self._inode.resize(max(size, len(self._inode.data)))
        self._inode.allocated = max(size, self._inode.allocated)
        return True

    def truncate(self, size: int) -> None:
        if self._disk.stops():
            raise Stopped
        self._inode.resize(size)
        self._inode.allocated = min(size, self._inode.allocated)
        bad = self._disk.unreadable.get(self._path, set())
        bad.difference_update([each for each in bad if each * SECTOR >= size])

    def datasync(self) -> None:
        disk = self._disk
        if disk.stops():
            raise Stopped
        disk.syncs += 1
        if disk.syncs == disk.failing_sync:
            self._inode.fail_sync()
        if self._inode.failures > self._reported:
            self._reported = self._inode.failures
            raise DiskFailed(f"cannot sync {self._path}: input/output error")
        self._inode.sync()

    def sync_file_system(self) -> bool:
        return self._disk.sync_everything()

    def close(self) -> None:
        """Nothing is held."""


class _Lock(FaultyFile):
    """The lock file: closing it gives the folder free."""

    __slots__ = ()

    def close(self) -> None:
        self._disk.locked = False


class FaultyDisk:
    """See the module. ``rng`` decides what a stopped or short write leaves."""

    def __init__(self, rng: random.Random, boot: int = 1) -> None:
        self.rng = rng
        self.calls = 0
        self.stop_at: int | None = None
        self.stopped = False
        self.syncs = 0
        self.failing_sync: int | None = None
        self.space_calls = 0
        """Calls that may need room: the disk is full for those from ``full_from`` on, ``full_for`` of them."""
        self.full_from: int | None = None
        self.full_for = 0
        self.short_writes = False
        self.copy_on_write = False
        """Room allocated before may run out too, as on file systems that never write in place."""
        self.reads = 0
        self.failing_read: int | None = None
        self.unreadable: dict[Path, set[int]] = {}
        """The numbers of sectors that cannot be read, by file."""
        self.room = EMPTY
        self.locked = False
        self._boot = boot
        root = Folder()
        root.sync()
        self._folders = {str(ROOT): root}

    # -- the ends of a process ----------------------------------------------------------------------------------------

    def power_cut(self, rng: random.Random) -> "FaultyDisk":
        """The disk that the machine finds when it starts again; this one stays as it is, for another cut."""
        image = FaultyDisk(rng, self._boot + 1)
        image._adopt(str(ROOT), self._folders[str(ROOT)].after_cut(rng, rng.choice((0.0, 0.5, 0.9, 1.0))))
        image.room = self.room
        return image

    def killed(self) -> None:
        """The process is gone, the machine goes on."""
        self.locked = self.stopped = False
        self.stop_at = None

    def _adopt(self, path: str, folder: Folder) -> None:
        self._folders[path] = folder
        for name, node in folder.entries.items():
            if isinstance(node, Folder):
                self._adopt(f"{path}/{name}", node)

    # -- faults -------------------------------------------------------------------------------------------------------

    def stops(self) -> bool:
        """Count a call; whether it is the one at which all ends."""
        if self.stopped:
            raise Stopped
        self.calls += 1
        self.stopped = self.calls == self.stop_at
        return self.stopped

    def is_full(self) -> bool:
        """Count a call that may need room; whether there is none."""
        self.space_calls += 1
        return self.full_from is not None and 0 <= self.space_calls - self.full_from < self.full_for

    def reading(self, path: Path, offset: int = 0, size: int = 0) -> None:
        """Count a read; it may be one that fails, and so does one of bytes in sectors that cannot be read."""
        if self.stopped:
            raise Stopped
        self.reads += 1
        if self.reads == self.failing_read:
            raise DiskFailed(f"cannot read {path}: input/output error")
        if any(offset // SECTOR <= bad <= (offset + size - 1) // SECTOR for bad in self.unreadable.get(path, ())):
            raise ReadFailed(f"cannot read {path}: input/output error")

    # -- for tests that look or alter from outside --------------------------------------------------------------------

    def files(self) -> Iterator[tuple[Path, bytearray]]:
        """Every file and its bytes, which a test may change."""
        for folder in sorted(self._folders):
            for name, node in sorted(self._folders[folder].entries.items()):
                if isinstance(node, Inode):
                    yield Path(folder) / name, node.data

    def content(self, path: Path) -> bytearray:
        """The bytes of one file, which a test may change."""
        return self._inode(path).data

    def set_content(self, path: Path, data: bytes) -> None:
        """Replace the bytes of a file from outside, durably."""
        folder, name = self._place(path)
        folder.entries[name] = folder.durable[name] = Inode(bytearray(data))

    def copy(self, rng: random.Random, *, reboot: bool = False) -> "FaultyDisk":
        """The same files, everything synced, no process; with ``reboot`` the machine has started again in between."""
        twin = FaultyDisk(rng, self._boot + reboot)
        for path, folder in self._folders.items():
            twin._folders[path] = Folder()
            for name, node in folder.entries.items():
                if isinstance(node, Inode):
                    twin._folders[path].entries[name] = Inode(bytearray(node.data))
        for path, folder in twin._folders.items():
            parent, _, name = path.rpartition("/")
            if parent in twin._folders:
                twin._folders[parent].entries[name] = folder
        for folder in twin._folders.values():
            folder.sync()
        twin.room = self.room
        return twin

    # -- Disk ---------------------------------------------------------------------------------------------------------

    def _place(self, path: Path) -> tuple[Folder, str]:
        folder, _, name = str(path).rpartition("/")
        if folder not in self._folders:
            raise FileNotFoundError(str(path))
        return self._folders[folder], name

    def _inode(self, path: Path) -> Inode:
        folder, name = self._place(path)
        node = folder.entries.get(name)
        if not isinstance(node, Inode):
            raise FileNotFoundError(str(path))
        return node

    def open(self, path: Path) -> FaultyFile:
        return FaultyFile(self, self._open(path), path)

    def _open(self, path: Path) -> Inode:
        folder, name = self._place(path)
        node = folder.entries.get(name)
        if node is None:
            if self.stops():
                raise Stopped
            if self.is_full():
                raise DiskFull(f"cannot open {path}: the disk is full")
            node = Inode(bytearray())
            folder.step(None, name, node)
        assert isinstance(node, Inode), path
        return node

    def read_file(self, path: Path) -> bytes:
        data = self._inode(path).data
        self.reading(path, 0, len(data))
        return bytes(data)

    def list_directory(self, path: Path) -> list[str]:
        self.reading(path)
        folder = self._folders.get(str(path))
        return [] if folder is None else sorted(folder.entries)

    def make_directories(self, path: Path, *, durable: bool = True) -> None:
        missing = [folder for folder in (path, *path.parents) if str(folder) not in self._folders and folder != Path("/")]
        for folder in reversed(missing):
            if self.stops():
                raise Stopped
            if self.is_full():
                raise DiskFull(f"cannot create {folder}: the disk is full")
            self._folders[str(folder)] = made = Folder()
            self._folders[str(folder.parent)].step(None, folder.name, made)
        for folder in missing if durable else ():
            self.sync_directory(folder.parent)

    def replace(self, source: Path, target: Path) -> None:
        if self.stops():
            raise Stopped
        node = self._inode(source)
        folder, name = self._place(target)
        folder.step(source.name, name, node)
        self.unreadable[target] = self.unreadable.pop(source, set())

    def unlink(self, path: Path) -> None:
        if self.stops():
            raise Stopped
        if str(path.parent) not in self._folders:
            return
        folder, name = self._place(path)
        node = folder.entries.get(name)
        if node is not None:
            folder.step(name, None, node)
            self.unreadable.pop(path, None)

    def sync_directory(self, path: Path) -> None:
        if self.stops():
            raise Stopped
        self._folders[str(path)].sync()

    def sync_everything(self) -> bool:
        """All files and names; a call that ends in between, or fails, leaves some of them unsynced."""
        stops = self.stops()
        self.syncs += 1
        fails = self.syncs == self.failing_sync
        for folder in self._folders.values():
            for node in folder.entries.values():
                if isinstance(node, Inode) and not (stops and self.rng.random() < 0.5):
                    node.fail_sync() if fails else node.sync()
            if not stops or self.rng.random() < 0.5:
                folder.sync()
        if stops:
            raise Stopped
        if fails:
            raise DiskFailed("cannot sync the file system: input/output error")
        return True

    def fill(self) -> None:
        """Take all the room from now on, also that which was allocated before."""
        self.copy_on_write = True
        self.full_from, self.full_for = self.space_calls, 1 << 60

    def usage(self, path: Path) -> Usage:
        self.reading(path)
        return self.room

    def boot_id(self) -> str:
        return f"00000000-0000-0000-0000-{self._boot:012d}"

    def lock(self, path: Path) -> FaultyFile:
        if self.locked:
            raise DirectoryLocked(f"{path.parent} is in use by another process")
        lock = _Lock(self, self._open(path), path)
        self.locked = True
        return lock

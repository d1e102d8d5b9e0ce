"""Power cuts of real replicas: run as a program with the flags of ``metaq serve``; :func:`cut_power` when it is killed.

The program's disk records what each sync covered, beside the data folder, where a SIGKILL leaves it as it is::

    replica1.power/durable/4711   what is certain to be in the file with the inode 4711
                   living/4711    another name of that file: while it is there no other file gets the number
                   names          JSON lines: what happened to names, and which ones a sync has covered
                   boot           the boot id

    ["new","log/00000000000000000000",4711]   a file has a name, or with 0 a folder
    ["move","config/topics.json.new","config/topics.json",4712]
    ["gone","abort"]
    ["sync","log",{"00000000000000000000":4711}]   these names in a folder are durable, and no others

Nothing is really synced: no test would notice it, and it costs time. What differs between a file and its durable bytes when the
process is dead was in the page cache only, and a power cut may take each sector of it, each size and each change of a name. As
in ``tests.support.faultydisk`` a name is durable when its folder was synced, and a rename is one step.
"""

import contextlib
import json
import os
import random
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar, Final, Literal

from metaq.config import Settings
from metaq.server.addresses import NONE
from metaq.server.broker import Broker
from metaq.server.replicas.replica import ReplicaServer
from metaq.store.files.disk import RealDisk, RealFile
from metaq.store.recovery.progress import Tell
from tests.support.broker import BrokerProcess
from tests.support.cluster import ReplicaProcess
from tests.support.faultydisk import SECTOR
from tests.support.group import Member
from tests.support.program import serve

How = Literal["all", "some", "middle"]
"""What a cut takes of what no sync covered: all of it; sectors, sizes and names at random; a hole amid each file's sectors."""
HOWS: Final[tuple[How, ...]] = ("all", "some", "middle")
CHUNK: Final = 1 << 20
ROOT: Final = "."
EVERYTHING: Final = (0, 1 << 62)
FOLDER: Final = 0
"""Instead of a file's number."""

Names = dict[str, int]
Step = tuple[str | None, str | None, int]
"""The name that goes, the name that comes, and of what."""


class Book:
    """A record of what the syncs of one data folder have covered."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self.folder = data.with_name(f"{data.name}.power")
        self.durable, self.living = self.folder / "durable", self.folder / "living"
        self.names, self.boot = self.folder / "names", self.folder / "boot"

    def boot_number(self) -> int:
        return int(self.boot.read_text()) if self.boot.exists() else 1

    def close(self) -> None:
        """Forget all but the boot id: whatever there is now is durable."""
        for folder in (self.durable, self.living):
            shutil.rmtree(folder, ignore_errors=True)
        self.names.unlink(missing_ok=True)

    def open(self) -> None:
        """Begin, or go on where a killed process was."""
        if self.names.exists():
            return
        self.close()
        for folder in (self.durable, self.living):
            folder.mkdir(parents=True)
        lines = []
        for parent, _, files in os.walk(self.data):
            for name in files:
                path = Path(parent, name)
                number = path.stat().st_ino
                os.link(path, self.living / str(number))
                self.cover(number, [EVERYTHING])
            lines.append(self.listing(Path(parent)))
        new = self.names.with_suffix(".new")
        new.write_text("".join(lines))
        new.replace(self.names)

    def relative(self, path: Path) -> str:
        return str(path.relative_to(self.data))

    def listing(self, folder: Path) -> str:
        """The line that says that the names there are durable, but of a file that is being made: a kill may come in between."""
        found = {entry.name: FOLDER if entry.is_dir() else entry.inode() for entry in os.scandir(folder)}
        found = {name: number for name, number in found.items() if number == FOLDER or (self.living / str(number)).exists()}
        return json.dumps(["sync", self.relative(folder), found]) + "\n"

    def cover(self, number: int, ranges: list[tuple[int, int]]) -> None:
        """Make these bytes of a file durable, and its size."""
        with (self.living / str(number)).open("rb") as source:
            target = os.open(self.durable / str(number), os.O_RDWR | os.O_CREAT)
            size = os.fstat(source.fileno()).st_size
            os.ftruncate(target, size)
            for start, end in _merged(ranges):
                for at, length in _pieces(start, min(end, size), source.fileno(), target):
                    data = os.pread(source.fileno(), length, at)
                    if data != os.pread(target, length, at):  # zeros where nothing was written stay holes
                        os.pwrite(target, data, at)
            os.close(target)


def _pieces(start: int, end: int, *fds: int) -> Iterator[tuple[int, int]]:
    """Where one of the files at least is no hole, and how many bytes: files of the key index are mostly holes."""
    at = start
    while at < end:
        found = []
        for fd in fds:
            with contextlib.suppress(OSError):  # nothing but a hole up to its end
                found.append(os.lseek(fd, at, os.SEEK_DATA))
        at = min(found, default=end)
        if at < end:
            yield at, min(CHUNK, end - at)
        at += CHUNK


def _merged(ranges: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    begin, end = -1, -1
    for start, stop in sorted(ranges):
        if start > end:
            if end > begin:
                yield begin, end
            begin = start
        end = max(end, stop)
    if end > begin:
        yield begin, end


class PowerFile(RealFile):
    """It tells what was changed."""

    __slots__ = ("_disk", "_number")

    def __init__(self, path: Path, fd: int, disk: "PowerDisk") -> None:
        super().__init__(path, fd)
        self._disk = disk
        self._number = disk.opened(path, fd)

    def write(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        super().write(data, offset)
        self._disk.changed(self._number, offset, offset + len(data))  # a sync that came in between need not cover it

    def truncate(self, size: int) -> None:
        before = self.size()
        super().truncate(size)
        self._disk.changed(self._number, size, before)

    def datasync(self) -> None:
        self._disk.cover(self._number)

    def sync_file_system(self) -> bool:
        self._disk.cover_everything()
        return True


class PowerDisk(RealDisk):
    """See the module. Threads share it: a change is noted when it is made, a sync covers what was noted before it."""

    def __init__(self, data: Path) -> None:
        self._book = Book(data)
        self._book.open()
        self._changes: dict[int, deque[tuple[int, int]]] = {}
        for name in os.listdir(self._book.living):  # what a killed process has written is in the page cache as well
            self._changes[int(name)] = deque([EVERYTHING])
        self._names = os.open(self._book.names, os.O_WRONLY | os.O_APPEND)
        self._lock = threading.Lock()
        """One copy at a time: of two, the one that has read first would bring older bytes back."""

    # -- what files tell ----------------------------------------------------------------------------------------------

    def opened(self, path: Path, fd: int) -> int:
        """The number of a file; that it is new is noted."""
        number = os.fstat(fd).st_ino
        with self._lock:
            if number not in self._changes:
                os.link(path, self._book.living / str(number))  # first: a kill may come in between
                self._note("new", self._book.relative(path), number)
                self._changes[number] = deque()
        return number

    def changed(self, number: int, start: int, end: int) -> None:
        self._changes[number].append((start, end))

    def cover(self, number: int) -> None:
        with self._lock:
            changes = self._changes[number]
            self._book.cover(number, [changes.popleft() for _ in range(len(changes))])

    def cover_everything(self) -> None:
        for number in list(self._changes):
            self.cover(number)
        for folder, _, _ in os.walk(self._book.data):
            self.sync_directory(Path(folder))

    def _note(self, *what: object) -> None:
        os.write(self._names, f"{json.dumps(what)}\n".encode())

    # -- Disk ---------------------------------------------------------------------------------------------------------

    def open(self, path: Path) -> RealFile:
        return PowerFile(path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), self)

    def make_directories(self, path: Path, *, durable: bool = True) -> None:
        inside = [folder for folder in (path, *path.parents) if folder.is_relative_to(self._book.data)]
        missing = [folder for folder in reversed(inside) if folder != self._book.data and not folder.exists()]
        super().make_directories(path, durable=durable)
        for folder in missing if not durable else ():
            self._note("new", self._book.relative(folder), FOLDER)

    def replace(self, source: Path, target: Path) -> None:
        self._note("move", self._book.relative(source), self._book.relative(target), source.stat().st_ino)
        super().replace(source, target)

    def unlink(self, path: Path) -> None:
        self._note("gone", self._book.relative(path))
        super().unlink(path)

    def sync_directory(self, path: Path) -> None:
        if path.is_relative_to(self._book.data):
            os.write(self._names, self._book.listing(path).encode())

    def boot_id(self) -> str:
        return f"00000000-0000-0000-0000-{self._book.boot_number():012d}"


# -- the cut ----------------------------------------------------------------------------------------------------------


class _Folder:
    """Names that are durable, those that a process saw, and the steps from the ones to the others."""

    def __init__(self) -> None:
        self.durable: Names = {}
        self.entries: Names = {}
        self.steps: list[Step] = []

    def step(self, source: str | None, target: str | None, number: int) -> None:
        _apply(self.entries, source, target, number)
        self.steps.append((source, target, number))

    def sync(self, found: Names) -> None:
        self.durable, self.entries, self.steps = dict(found), dict(found), []


def _apply(names: Names, source: str | None, target: str | None, number: int) -> None:
    if source is not None and names.get(source) == number:
        del names[source]
    if target is not None:
        names[target] = number


def _folders(book: Book) -> dict[str, _Folder]:
    """Return the folders that the lines in the book's file of names describe."""
    folders: dict[str, _Folder] = {ROOT: _Folder()}
    for line in book.names.read_text().splitlines():
        kind, path, *rest = json.loads(line)
        if kind == "sync":
            folders.setdefault(path, _Folder()).sync(rest[0])
            continue
        parent, _, name = path.rpartition("/")
        folder = folders.setdefault(parent or ROOT, _Folder())
        if kind == "new":
            folder.step(None, name, rest[0])
        elif kind == "move":
            folder.step(name, rest[0].rpartition("/")[2], rest[1])
        elif name in folder.entries:
            folder.step(name, None, folder.entries[name])
    return folders


def cut_power(process: BrokerProcess, rng: random.Random, how: How) -> int:
    """Kill a process of this module's program and cut its machine's power: the next start finds another boot id.

    Returns how many sectors were taken.
    """
    process.kill()
    return cut(process.data, rng, how)


def cut(data: Path, rng: random.Random, how: How) -> int:
    """Take what no sync has covered from the data folder of a dead process; how many sectors of files those are."""
    book = Book(data)
    keep = rng.choice((0.1, 0.5, 0.9)) if how == "some" else float(how == "middle")
    folders = _folders(book)
    taken = 0

    def restore(path: str) -> None:
        nonlocal taken
        folder = folders.get(path, _Folder())
        names = dict(folder.durable)
        for step in folder.steps:
            if rng.random() < keep:
                _apply(names, *step)
        (data / path).mkdir(parents=True, exist_ok=True)
        for name, number in sorted(names.items()):
            if number == FOLDER:
                restore(name if path == ROOT else f"{path}/{name}")
            else:
                os.link(book.living / str(number), data / path / name)
                taken += _cut_file(book, number, lambda changed: _lost(changed, rng, how, keep), rng.random() < keep)

    shutil.rmtree(data)
    restore(ROOT)
    boot = book.boot_number() + 1
    book.close()
    book.boot.write_text(str(boot))
    return taken


def _lost(changed: list[int], rng: random.Random, how: How, keep: float) -> list[int]:
    """Which of a file's unsynced sectors go."""
    if how == "middle":
        third = len(changed) // 3
        return changed[third : third + max(1, third)] if changed else []
    return [number for number in changed if rng.random() >= keep]


def _cut_file(book: Book, number: int, lost: Callable[[list[int]], list[int]], keep_size: bool) -> int:
    """Give a file back the durable bytes of those sectors that are lost, and its durable size; how many those are."""
    fd = os.open(book.living / str(number), os.O_RDWR)
    durable = os.open(book.durable / str(number), os.O_RDWR | os.O_CREAT)
    sectors = lost(_changed(fd, durable))
    size = os.fstat(fd if keep_size else durable).st_size
    os.ftruncate(fd, size)
    for at in (sector * SECTOR for sector in sectors if sector * SECTOR < size):
        os.pwrite(fd, os.pread(durable, SECTOR, at).ljust(SECTOR, b"\0")[: size - at], at)
    os.close(fd)
    os.close(durable)
    return len(sectors)


def _changed(fd: int, durable: int) -> list[int]:
    """The sectors in which a file differs from its durable bytes."""
    size = max(os.fstat(fd).st_size, os.fstat(durable).st_size)
    found = []
    for at, _ in _pieces(0, size, fd, durable):
        ours, theirs = (os.pread(one, CHUNK, at).ljust(CHUNK, b"\0") for one in (fd, durable))
        if ours != theirs:
            found += [(at + i) // SECTOR for i in range(0, CHUNK, SECTOR) if ours[i : i + SECTOR] != theirs[i : i + SECTOR]]
    return found


# -- programs ---------------------------------------------------------------------------------------------------------

PROGRAM: Final = ("tests.support.powercuts",)


class PoweredBroker(BrokerProcess):
    """A broker whose power can be cut."""

    program: ClassVar[tuple[str, ...]] = PROGRAM


class PoweredReplica(ReplicaProcess):
    """The same, of one replica of a :class:`tests.support.cluster.Cluster`."""

    program: ClassVar[tuple[str, ...]] = PROGRAM


class PoweredMember(Member):
    """The same, of a :class:`tests.support.group.Group`."""

    program: ClassVar[tuple[str, ...]] = PROGRAM


def make(settings: Settings, tell: Tell) -> Broker | ReplicaServer:
    kind = Broker.alone if settings.replication_listen == NONE else ReplicaServer
    return kind(settings, disk=PowerDisk(settings.data), tell=tell)


if __name__ == "__main__":
    serve(make)

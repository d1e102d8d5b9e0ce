"""The ordered index: keys and values in the order of their bytes, in a folder of its own, made from the log.

The index is what the records before a log offset X come to. X stands in the index itself and is written in one batch with what
it covers, so whatever a kill or a power cut leaves is whole batches, and says which. The rest is made again from the log after
X, and an index that is damaged from the log alone.

Keys that begin with ``A:`` hold what the index says of itself; the caller must not use those named here::

    A:v    version of the layout (4), name of the engine
    A:x    X (8), checksum of the record that ends there (4)

Where a call waits is the caller's choice, as everywhere in the store: what may wait for the disk is passed to ``run``, and what
does not is done at once. With SQLite everything may wait, with RocksDB neither ``apply`` nor ``scan``.
"""

import os
import struct
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, NamedTuple, Self

from metaq.errors import ConfigError, DiskFailed, DiskFull, IndexFailed, StoreError
from metaq.store.files.disk import FULL, MAKE_ROOM
from metaq.store.files.filecache import Run, run_here
from metaq.store.ordered.engine import Cursor, Entry, IndexEngine, Operation, SetKey

EngineName = Literal["rocksdict", "sqlite3"]

LAYOUT_VERSION: Final = 2
"""The version of the keys and values of all users of the index. One of version 1 is taken over, any other is made anew."""
CACHE_BYTES: Final = 16 * 1024**2
WRITE_BUFFER_BYTES: Final = 16 * 1024**2
REMOVED: Final = ".removed"
"""The end of the name of a folder that is being removed."""

_ABOUT: Final = b"A:v"
_COVERED: Final = b"A:x"
_ABOUT_HEAD: Final = struct.Struct(">I")
_COVERED_VALUE: Final = struct.Struct(">QI")
_LAST: Final = b"\xff"
"""A key after all others, whose first byte is a letter."""


class Covered(NamedTuple):
    """The part of the log that an index covers."""

    log_offset: int
    """All records that end at or before this log offset are applied, and no others."""
    checksum: int
    """A checksum of 4 bytes of the record that ends there, which shows whether the log is still the one that was applied."""


class Scan:
    """A walk through a part of the index, as it was when the walk began. Keep it for less than a second, and close it."""

    def __init__(self, cursor: Cursor, run: Run) -> None:
        self._cursor = cursor
        self._run = run

    def next(self, most: int) -> list[Entry]:
        """Return the next entries, at most ``most`` of them; fewer only at the end. Raises ``IndexFailed``."""
        return self._run(lambda: self._cursor.next(most))

    def close(self) -> None:
        """End the walk; it may have ended already."""
        self._cursor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class Ordered:
    """An open ordered index. ``open_ordered`` makes one.

    Every call raises ``IndexFailed`` when the engine reports damage or a failure of the disk: the caller closes the index,
    removes it and makes it anew. ``DiskFull`` means that nothing was applied, or made durable; it ends by itself some seconds
    after there is room.

    ``apply`` and ``scan`` are called by one thread at a time. No call may be at work when ``close`` is called.
    """

    def __init__(self, engine: IndexEngine, covered: Covered | None) -> None:
        self._engine = engine
        self._scans = weakref.WeakSet[Scan]()
        self._closed = False
        self.covered = covered
        """What stands in the index, not all of it durable; ``None`` while nothing is applied."""

    def apply(self, batch: Sequence[Operation], covered: Covered, run: Run = run_here) -> bool:
        """Apply operations in their order, and with them what they make the index cover, all or nothing.

        Return false, with nothing applied, when the engine would have to wait: try again later. Batches of 64 operations, 256
        when many are waiting, stop the caller for less than a millisecond.
        """
        whole = [*batch, SetKey(_COVERED, _COVERED_VALUE.pack(*covered))]
        if not self._way(run)(lambda: self._engine.write(whole)):
            return False
        self.covered = covered
        return True

    def scan(self, begin: bytes, end: bytes, run: Run = run_here) -> Scan:
        """Return a walk over the keys from ``begin`` on and before ``end``. Take slices of at most 256 entries.

        Begin where the first key may be: a walk over many deleted keys takes long, unless ``DeleteRange`` deleted them.
        """
        files = self._engine.files(begin, end)
        if files:
            run(lambda: _will_need(files))
        way = self._way(run)
        scan = Scan(way(lambda: self._engine.cursor(begin, end)), way)
        self._scans.add(scan)
        return scan

    def find(self, keys: Sequence[bytes], run: Run = run_here) -> list[bytes | None]:
        """Return the value of each key, or ``None`` for one that is not there."""
        wanted = list(keys)
        return run(lambda: self._engine.find(wanted))

    def may_have(self, keys: Sequence[bytes]) -> bool:
        """Return false when certainly none of the keys is there; never wait.

        RocksDB knows that of 99 in 100 keys with ``seldom_asked``, SQLite of none.
        """
        return self._engine.may_have(keys)

    def flush(self, run: Run = run_here) -> None:
        """Make durable what was applied before the call. Nothing but the length of the next start depends on it."""
        run(self._engine.flush)

    @property
    def size_bytes(self) -> int:
        """The size of the files; what is not flushed may be missing in it."""
        return self._engine.size_bytes()

    def close(self, run: Run = run_here) -> None:
        """End all scans, flush, and release the folder, also when the flush raises an error. Do nothing when it is closed."""
        if self._closed:
            return
        self._closed = True
        for scan in list(self._scans):
            scan.close()
        run(self._engine.close)

    def _way(self, run: Run) -> Run:
        return run if self._engine.waits else run_here


def open_ordered(
    folder: Path,
    engine: EngineName,
    *,
    cache_bytes: int = CACHE_BYTES,
    write_buffer_bytes: int = WRITE_BUFFER_BYTES,
    seldom_asked: bool = False,
) -> tuple[Ordered, str | None]:
    """Open the index in a folder; return it, and why the one that was there was removed, ``None`` when it was not.

    An index is removed, and an empty one made, when it is damaged, or of another engine or layout. The parent of the folder
    must exist. Do not fork after this call.

    ``seldom_asked`` is for an index that gets many keys and is asked for few: its ``apply`` costs a fifth. A key among the last
    ``write_buffer_bytes`` is found in 1 ms for each 1,000 keys there, which RocksDB sorts for that. What says that a key is not
    there stays in memory, outside the cache: 2 bytes for each key.

    Raises ``ConfigError`` when the package of the engine is missing, ``DiskFull`` without room, ``DirectoryLocked`` when the
    index is open elsewhere, and ``IndexFailed`` when not even an empty index can be made.
    """
    mark, make = _engine(engine, cache_bytes, write_buffer_bytes, seldom_asked=seldom_asked)
    _remove(folder.with_name(folder.name + REMOVED))
    try:
        _check_files(folder, engine, mark)
        return _opened(folder, engine, make), None
    except IndexFailed as error:
        reason = str(error)
    remove_ordered(folder)
    return _opened(folder, engine, make), reason


def remove_ordered(folder: Path) -> None:
    """Remove an index that is not open, if there is one, so that no crash leaves a part of it. Raises ``DiskFailed``."""
    doomed = folder.with_name(folder.name + REMOVED)
    _remove(doomed)
    try:
        os.replace(folder, doomed)
        _sync(folder.parent)
    except FileNotFoundError:
        return
    except OSError as error:
        raise DiskFailed(f"cannot remove {folder}: {error.strerror}") from error
    _remove(doomed)


def _remove(folder: Path) -> None:
    if not os.path.lexists(folder):
        return
    import shutil  # noqa: PLC0415 - brings three libraries of compression, for half a megabyte

    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return
    except OSError as error:
        raise DiskFailed(f"cannot remove {folder}: {error.strerror}") from error


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _engine(
    name: EngineName, cache_bytes: int, write_buffer_bytes: int, *, seldom_asked: bool
) -> tuple[str, Callable[[Path], IndexEngine]]:
    """Return a file that each folder of an engine has, and how to open one. An engine is imported when it is asked for."""
    if name == "sqlite3":
        from metaq.store.ordered import sqlite  # noqa: PLC0415

        return sqlite.MARK, lambda folder: sqlite.SqliteEngine(folder, cache_bytes)
    try:
        from metaq.store.ordered import rocksdb  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(
            "the engine rocksdict needs the package rocksdict; pip install 'metaq-broker[timers]', or choose the engine sqlite3"
        ) from error
    return rocksdb.MARK, lambda folder: rocksdb.RocksEngine(folder, cache_bytes, write_buffer_bytes, seldom_asked=seldom_asked)


def _check_files(folder: Path, engine: EngineName, mark: str) -> None:
    """Raise ``IndexFailed`` when a folder has files, but not those of the engine, which would open it as if it were empty."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return
    except OSError as error:
        raise IndexFailed(f"cannot open {folder}: {error.strerror}") from error
    if names and mark not in names:
        raise IndexFailed(f"{folder} is no index of {engine}: it has no file {mark}")


def _opened(folder: Path, name: EngineName, make: Callable[[Path], IndexEngine]) -> Ordered:
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        if error.errno in FULL:
            raise DiskFull(f"cannot make {folder}: {error.strerror}; {MAKE_ROOM}") from error
        raise IndexFailed(f"cannot make {folder}: {error.strerror}") from error
    engine = make(folder)
    try:
        return Ordered(engine, _checked(engine, folder, name))
    except BaseException:
        with suppress(StoreError):
            engine.close()
        raise


def _checked(engine: IndexEngine, folder: Path, name: EngineName) -> Covered | None:
    """Return what an index covers, and have an empty one say what it is. Raises ``IndexFailed`` for a wrong one."""
    ours = _ABOUT_HEAD.pack(LAYOUT_VERSION) + name.encode("ascii")
    about, covered = engine.find([_ABOUT, _COVERED])
    if about is None:
        cursor = engine.cursor(b"", _LAST)
        entries = cursor.next(1)
        cursor.close()
        if entries:
            raise IndexFailed(f"{folder} has entries, but does not say what they are")
        if not engine.write([SetKey(_ABOUT, ours)]):
            raise IndexFailed(f"cannot write to {folder}: the engine is busy")
        engine.flush()
        return None
    if about == _ABOUT_HEAD.pack(1) + name.encode("ascii"):  # it had no packs of timers; ids notice their own older form
        if not engine.write([SetKey(_ABOUT, ours)]):
            raise IndexFailed(f"cannot write to {folder}: the engine is busy")
    elif about != ours:
        raise IndexFailed(f"{folder} has another layout: {about!r}, and ours is {ours!r}")
    if covered is None:
        return None
    if len(covered) != _COVERED_VALUE.size:
        raise IndexFailed(f"{folder} does not say how much of the log it covers")
    return Covered(*_COVERED_VALUE.unpack(covered))


def _will_need(files: list[str]) -> None:
    """Have the system read files ahead. A file that is gone is not needed any more."""
    for path in files:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(fd)

"""SQLite as the engine of the ordered index: in the standard library, on every platform, and a fifth as fast as RocksDB.

A batch is a transaction. SQLite syncs its log only for a checkpoint, so a power cut takes back what was not flushed, whole
batches and the newest ones; a kill takes nothing back.

SQLite has no checksums of its pages. So each value ends with a checksum, and opening checks the structure of the tree: its
pages, and the order of the keys. The checksum is over a number that each index has drawn, key and value: pages of another index
are noticed.
"""

import os
import random
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Final

from metaq.checksum import crc32c
from metaq.errors import DiskFull, IndexFailed
from metaq.store.files.disk import FULL, MAKE_ROOM
from metaq.store.ordered.engine import DeleteKey, Entry, Operation, SetKey

MARK: Final = "index.sqlite"
"""The file that every folder of this engine has."""
PAGE_BYTES: Final = 8192
CHECKSUM_BYTES: Final = 4
REFUSED: Final = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
"""The codes of a write that would have had to wait."""
NO_ROOM: Final = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE)
"""The codes of a full disk; the second one is of an opening, which makes a file that all connections share."""

_PUT: Final = "INSERT INTO kv VALUES (?, ?) ON CONFLICT (k) DO UPDATE SET v = excluded.v"
_DELETE: Final = "DELETE FROM kv WHERE k = ?"
_DELETE_RANGE: Final = "DELETE FROM kv WHERE k >= ? AND k < ?"
_SCAN: Final = "SELECT k, v FROM kv WHERE k >= ? AND k < ? ORDER BY k"
_FIND: Final = "SELECT v FROM kv WHERE k = ?"


@contextmanager
def _translated(action: str, folder: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        text = f"cannot {action} {folder}: {error}"
        if _is_full(getattr(error, "sqlite_errorcode", 0), folder):
            raise DiskFull(f"{text}; {MAKE_ROOM}") from error
        raise IndexFailed(text) from error


def _is_full(code: int, folder: Path) -> bool:
    """Return whether an error says that the disk is full."""
    if code != sqlite3.SQLITE_CANTOPEN:
        return code in NO_ROOM
    try:
        TemporaryFile(dir=folder).close()  # the code does not say why no file was made
    except OSError as error:
        return error.errno in FULL
    return False


class Seal:
    """The checksum at the end of each value, over the number of its index, its key and itself."""

    def __init__(self, number: int, folder: Path) -> None:
        self._number = number.to_bytes(4, "big")
        self._folder = folder

    def sealed(self, key: bytes, value: bytes) -> bytes:
        """Return a value with its checksum."""
        return value + crc32c(self._number + key + value).to_bytes(CHECKSUM_BYTES, "big")

    def opened(self, key: bytes, sealed: bytes) -> bytes:
        """Return a value without its checksum. Raises ``IndexFailed`` when that is wrong."""
        value = sealed[:-CHECKSUM_BYTES]
        if self.sealed(key, value) != sealed:
            raise IndexFailed(f"cannot read {self._folder}: the checksum of the entry {key!r} is wrong")
        return value


class SqliteCursor:
    """A query on a connection of its own, whose transaction sees the index as it was when the cursor was made."""

    def __init__(self, connection: sqlite3.Connection, begin: bytes, end: bytes, seal: Seal, folder: Path) -> None:
        self._connection = connection
        self._seal = seal
        self._folder = folder
        self._ended = False
        connection.execute("BEGIN")
        self._rows = connection.execute(_SCAN, (begin, end))

    def next(self, most: int) -> list[Entry]:
        if self._ended:
            return []
        with _translated("read", self._folder):
            rows = self._rows.fetchmany(most)
        self._ended = len(rows) < most
        return [(key, self._seal.opened(key, sealed)) for key, sealed in rows]

    def close(self) -> None:
        self._ended = True
        self._connection.close()


class SqliteEngine:
    """An index in SQLite."""

    waits = True

    def __init__(self, folder: Path, cache_bytes: int) -> None:
        self._folder = folder
        self._path = folder / MARK
        self._cache_kib = cache_bytes // 1024
        with _translated("open", folder):
            self._writer = self._connect()
            try:
                self._check()
                self._seal = Seal(self._number(), folder)
                self._reader = self._connect()
            except BaseException:
                self._writer.close()
                raise

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, timeout=0, isolation_level=None, check_same_thread=False)
        try:
            for pragma in (
                f"page_size={PAGE_BYTES}",
                "journal_mode=WAL",
                "synchronous=NORMAL",
                "wal_autocheckpoint=0",
                f"cache_size=-{self._cache_kib}",
                "cell_size_check=ON",
            ):
                connection.execute(f"PRAGMA {pragma}")
        except BaseException:
            connection.close()
            raise
        return connection

    def _check(self) -> None:
        (result,) = self._writer.execute("PRAGMA quick_check(1)").fetchone()
        if result != "ok":
            raise IndexFailed(f"cannot open {self._folder}: {result}")

    def _number(self) -> int:
        """Return the number that the index has drawn when it was made; make it if it is empty."""
        number: int
        (number,) = self._writer.execute("PRAGMA user_version").fetchone()
        if number == 0:
            number = random.randrange(1, 1 << 31)
            self._writer.execute("BEGIN IMMEDIATE")
            self._writer.execute("CREATE TABLE kv (k BLOB PRIMARY KEY, v BLOB) WITHOUT ROWID")
            self._writer.execute(f"PRAGMA user_version={number}")
            self._writer.execute("COMMIT")
        return number

    def write(self, batch: Sequence[Operation]) -> bool:
        writer = self._writer
        with _translated("write to", self._folder):
            try:
                writer.execute("BEGIN IMMEDIATE")
                for operation in batch:
                    if isinstance(operation, SetKey):
                        writer.execute(_PUT, (operation.key, self._seal.sealed(operation.key, operation.value)))
                    elif isinstance(operation, DeleteKey):
                        writer.execute(_DELETE, (operation.key,))
                    else:
                        writer.execute(_DELETE_RANGE, (operation.begin, operation.end))
                writer.execute("COMMIT")
            except sqlite3.Error as error:
                if writer.in_transaction:
                    with suppress(sqlite3.Error):
                        writer.execute("ROLLBACK")
                if getattr(error, "sqlite_errorcode", 0) in REFUSED:
                    return False
                raise
        return True

    def cursor(self, begin: bytes, end: bytes) -> SqliteCursor:
        with _translated("read", self._folder):
            connection = self._connect()
            try:
                return SqliteCursor(connection, begin, end, self._seal, self._folder)
            except BaseException:
                connection.close()
                raise

    def files(self, begin: bytes, end: bytes) -> list[str]:
        return []

    def find(self, keys: list[bytes]) -> list[bytes | None]:
        with _translated("read", self._folder):
            rows = [(key, self._reader.execute(_FIND, (key,)).fetchone()) for key in keys]
        return [None if row is None else self._seal.opened(key, row[0]) for key, row in rows]

    def may_have(self, keys: Sequence[bytes]) -> bool:
        return True

    def flush(self) -> None:
        """Copy the log into the tree; then empty it, unless a cursor needs it, so that it never hides newer pages."""
        with _translated("write to", self._folder), closing(self._connect()) as connection:
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def size_bytes(self) -> int:
        total = 0
        for path in (self._path, self._path.with_name(f"{MARK}-wal")):
            with suppress(FileNotFoundError):
                total += os.stat(path).st_size
        return total

    def close(self) -> None:
        """Close all connections; the last one that closes copies the log into the tree."""
        with _translated("close", self._folder):
            self._reader.close()
            self._writer.close()

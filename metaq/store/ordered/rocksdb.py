"""RocksDB as the engine of the ordered index, by the package rocksdict, which only this module imports.

There is no write-ahead log: what was not flushed when the process ends is lost, but always whole batches, and always the newest
ones. RocksDB promises that only with its option ``atomic_flush``.

rocksdict holds the GIL in ``write`` and in cursors, so batches and slices are kept small. Lookups by list, ``flush`` and
``close`` give it up.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, cast

import rocksdict

from metaq.errors import DirectoryLocked, DiskFull, IndexFailed
from metaq.store.files.disk import MAKE_ROOM
from metaq.store.ordered.engine import DeleteKey, Entry, Operation, SetKey

MARK: Final = "CURRENT"
"""The file that every folder of RocksDB has."""
MIB: Final = 1024**2
KIB: Final = 1024
_Key = str | int | float | bytes | bool
"""What rocksdict takes for a key when it is not in raw mode; its lists are declared to hold these."""
REFUSED: Final = "Result incomplete"
"""How the error of a write begins that would have had to wait."""


@contextmanager
def _translated(action: str, folder: Path) -> Iterator[None]:
    """Turn the errors of rocksdict, most of which are plain ``Exception``s, into those of metaq."""
    try:
        yield
    except Exception as error:
        text = f"cannot {action} {folder}: {error}"
        if "No space left" in text:
            raise DiskFull(f"{text}; {MAKE_ROOM}") from error
        if "LOCK:" in text:
            raise DirectoryLocked(text) from error
        raise IndexFailed(text) from error


def _options(cache_bytes: int, write_buffer_bytes: int, *, seldom_asked: bool) -> rocksdict.Options:
    options = rocksdict.Options(raw_mode=True)  # bytes as they are; otherwise values are pickled
    options.set_atomic_flush(True)
    options.set_write_buffer_size(write_buffer_bytes)
    options.set_max_write_buffer_number(4)
    options.set_min_write_buffer_number_to_merge(1)
    options.set_max_background_jobs(2)
    options.set_max_open_files(64)
    options.set_level_zero_file_num_compaction_trigger(4)
    options.set_level_zero_slowdown_writes_trigger(40)
    options.set_level_zero_stop_writes_trigger(80)
    options.set_target_file_size_base(32 * MIB)
    options.set_max_bytes_for_level_base(128 * MIB)
    options.set_level_compaction_dynamic_level_bytes(True)
    options.set_compression_type(rocksdict.DBCompressionType.lz4())
    options.set_bytes_per_sync(MIB)
    options.set_keep_log_file_num(2)
    options.set_max_log_file_size(4 * MIB)
    options.set_max_manifest_file_size(MIB)
    options.set_stats_dump_period_sec(0)
    options.set_skip_stats_update_on_db_open(True)
    options.set_avoid_unnecessary_blocking_io(True)  # files are deleted in the background, not where a cursor is closed
    options.set_block_based_table_factory(_tables(cache_bytes, seldom_asked=seldom_asked))
    if seldom_asked:
        _write_unsorted(options)
    return options


def _write_unsorted(options: rocksdict.Options) -> None:
    """Have new keys sorted in the background, when their buffer is full, and its filter keep questions from sorting it."""
    options.set_memtable_factory(rocksdict.MemtableFactory.vector())
    options.set_allow_concurrent_memtable_write(False)  # which this form cannot do
    options.set_memtable_whole_key_filtering(True)
    options.set_memtable_prefix_bloom_ratio(0.1)
    options.set_level_zero_file_num_compaction_trigger(16)  # the buffers are small


def _tables(cache_bytes: int, *, seldom_asked: bool) -> rocksdict.BlockBasedOptions:
    tables = rocksdict.BlockBasedOptions()
    tables.set_block_size(16 * KIB)
    tables.set_block_cache(rocksdict.Cache(cache_bytes))
    tables.set_cache_index_and_filter_blocks(not seldom_asked)
    tables.set_pin_l0_filter_and_index_blocks_in_cache(True)
    tables.set_format_version(5)
    tables.set_bloom_filter(16 if seldom_asked else 10, False)  # 16 bits: 1 key in 1,400 for another one; 10: 1 in 100
    return tables


class RocksCursor:
    """An iterator of RocksDB, which sees the index as it was when the iterator was made."""

    def __init__(self, iterator: rocksdict.RdictIter, reading: rocksdict.ReadOptions, begin: bytes, folder: Path) -> None:
        self._iterator: rocksdict.RdictIter | None = iterator
        self._reading = reading  # it keeps the upper bound, to which RocksDB only points: a scan would end anywhere without it
        self._folder = folder
        iterator.seek(begin)

    def next(self, most: int) -> list[Entry]:
        iterator = self._iterator
        if iterator is None:
            return []
        found: list[Entry] = []
        try:
            with _translated("read", self._folder):
                while len(found) < most and iterator.valid():
                    found.append((iterator.key(), iterator.value()))
                    iterator.next()
                if len(found) < most:
                    iterator.status()  # damage ends the walk like the end of the range does; this raises the difference
        finally:
            del iterator  # the traceback of an error would keep it
        return found

    def close(self) -> None:
        self._iterator = None  # as long as there is an iterator, its files stay, and the database is open


class RocksEngine:
    """An index in RocksDB."""

    waits = False

    def __init__(self, folder: Path, cache_bytes: int, write_buffer_bytes: int, *, seldom_asked: bool) -> None:
        self._folder = folder
        options = _options(cache_bytes, write_buffer_bytes, seldom_asked=seldom_asked)
        with _translated("open", folder):
            # Without column_families the options of the only one would be those that it was last opened with.
            self._rocks = rocksdict.Rdict(str(folder), options, column_families={"default": options})
        writing = rocksdict.WriteOptions()
        writing.disable_wal = True  # type: ignore[method-assign, assignment] # its stub takes the property for a method
        writing.no_slowdown = True
        self._rocks.set_write_options(writing)

    def write(self, batch: Sequence[Operation]) -> bool:
        writes = rocksdict.WriteBatch(raw_mode=True)
        for operation in batch:
            if isinstance(operation, SetKey):
                key, value = operation
                writes.put(key, value)
            elif isinstance(operation, DeleteKey):
                writes.delete(operation.key)
            elif operation.begin < operation.end:
                writes.delete_range(operation.begin, operation.end)
        with _translated("write to", self._folder):
            try:
                self._rocks.write(writes)
            except Exception as error:
                if str(error).startswith(REFUSED):
                    return False
                raise
        return True

    def cursor(self, begin: bytes, end: bytes) -> RocksCursor:
        reading = rocksdict.ReadOptions()
        reading.set_readahead_size(256 * KIB)
        reading.set_iterate_upper_bound(end)
        with _translated("read", self._folder):
            return RocksCursor(self._rocks.iter(reading), reading, begin, self._folder)

    def files(self, begin: bytes, end: bytes) -> list[str]:
        with _translated("read", self._folder):
            live = self._rocks.live_files()
        folder = str(self._folder)
        return [
            folder + file["name"] for file in live if (file["start_key"] or b"") < end and (file["end_key"] or end) >= begin
        ]

    def find(self, keys: list[bytes]) -> list[bytes | None]:
        with _translated("read", self._folder):
            return cast(list[bytes | None], self._rocks.get(list[_Key](keys)))

    def may_have(self, keys: Sequence[bytes]) -> bool:
        try:  # the context of ``_translated`` would cost more than the question
            return any(map(self._rocks.key_may_exist, keys))
        except Exception as error:
            raise IndexFailed(f"cannot read {self._folder}: {error}") from error

    def flush(self) -> None:
        with _translated("write to", self._folder):
            self._rocks.flush(True)

    def size_bytes(self) -> int:
        with _translated("read", self._folder):
            return self._rocks.property_int_value("rocksdb.total-sst-files-size") or 0

    def close(self) -> None:
        with _translated("close", self._folder):
            self._rocks.close()

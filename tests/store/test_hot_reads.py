"""Hot reads: slices of the map, by units in files and in memory."""

from pathlib import Path

from metaq.clock import ManualClock
from metaq.store.files.filecache import read_here
from metaq.store.recovery.recovery import open_store
from tests.store.test_store_features import SEGMENT, SETTINGS, put


def test_a_hot_read_crosses_from_file_to_file_to_memory(tmp_path: Path) -> None:
    """SG-043: a sweep between two puts does not make the readers' answers shorter."""
    store, _ = open_store(tmp_path / "data", SETTINGS, ManualClock())
    for _ in range(20):  # units for two files
        put(store, "t", b"x")
    store.sweep()
    for _ in range(5):
        put(store, "t", b"y")
    store.sync()
    queue = store.queue("t", 0)
    assert (queue.written, queue.readable) == (20, 25)
    slices, following = store.reader.hot_slices(queue, 0, 32, SEGMENT, read_here)
    assert (sum(map(len, slices)), following) == (store.log.end, 25)
    for most in (3, 18, 22):
        assert store.reader.hot_slices(queue, 0, most, SEGMENT, read_here)[1] == most
    store.close()

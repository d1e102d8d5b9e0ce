"""Hot reads: slices of the map, by units in files and in memory."""

from pathlib import Path

from metaq.store.files.filecache import read_here
from metaq.store.queues.consumequeue import UNIT, UNIT_SIZE
from metaq.store.recovery.recovery import open_store
from tests.store.test_store_features import SEGMENT, SETTINGS, put
from tests.support.manualclock import ManualClock


def test_a_hot_read_crosses_from_file_to_file_to_memory(tmp_path: Path) -> None:
    """SG-043: a sweep between two puts does not make the readers' answers shorter."""
    store, _ = open_store(tmp_path / "data", SETTINGS, ManualClock())
    put(store, "other", b"at log offset 0, which is not trusted")
    begin = store.log.end
    for _ in range(20):  # units for two files
        put(store, "t", b"x")
    store.sweep()
    for _ in range(5):
        put(store, "t", b"y")
    store.sync()
    queue = store.queue("t", 0)
    assert (queue.written, queue.readable) == (20, 25)
    slices, following = store.reader.hot_slices(queue, 0, 32, SEGMENT, read_here)
    assert (sum(map(len, slices)), following) == (store.log.end - begin, 25)
    for most in (3, 18, 22):
        assert store.reader.hot_slices(queue, 0, most, SEGMENT, read_here)[1] == most
    store.close()


def test_a_run_of_hot_records_ends_with_its_segment(tmp_path: Path) -> None:
    """SG-043: and begins where it is wanted from; what another epoch wrote is not in it."""
    store, _ = open_store(tmp_path / "data", SETTINGS, ManualClock())
    put(store, "other", b"at log offset 0, which is not trusted")
    count = 40  # more than a segment holds
    for _ in range(count):
        put(store, "t", bytes(700))
    store.sync()
    queue = store.queue("t", 0)
    ordinal = 0
    seen: list[int] = []
    while ordinal < count:
        run = store.reader.hot_run(queue, ordinal, count, 0, read_here)
        assert run is not None
        offsets = [offset for offset, _, _ in UNIT.iter_unpack(run.units)]
        segment = store.log.find(run.first)
        assert segment is not None and run.base == segment.base
        assert all(segment.base <= offset < segment.end for offset in offsets)
        assert run.before(offsets[-1]).units == run.units[:-UNIT_SIZE]
        seen += offsets
        ordinal += len(offsets)
    assert seen == [queue.unit(each, read_here)[0] for each in range(count)]
    assert len(store.log.segments) > 1
    assert store.reader.hot_run(queue, 0, count, seen[0] + 1, read_here) is None
    assert store.reader.hot_run(queue, count, count, 0, read_here) is None
    store.close()

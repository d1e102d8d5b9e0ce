"""The headers of the key index, as verify compares them with the items behind them."""

from pathlib import Path

import pytest

from metaq.store.files.disk import RealDisk
from metaq.store.files.filecache import FileCache, run_here
from metaq.store.index.indexcheck import IndexCheck
from metaq.store.index.keyindex import KeyIndex


@pytest.mark.parametrize("counted", [1, 3, 5])
def test_each_flip_of_a_header_is_noticed(tmp_path: Path, counted: int) -> None:
    """E-10: whether the checkpoint counts no items, some or all of those that the header counts."""
    disk = RealDisk()
    index = KeyIndex(tmp_path, FileCache(disk, 4), 7, 100)
    assert index.grow(1_795_257_343_457, run_here)
    index.flush(index.capture(), run_here)
    mark = index.mark(0)._replace(items=counted)
    if counted > 1:
        assert index.enter([(offset, "t", (f"k{offset}",), 1_795_257_343_457) for offset in (0, 900, 1800, 2700)]) == 4
        index.flush(index.capture(), run_here)
    (path,) = tmp_path.iterdir()

    def faults() -> list[tuple[Path, int, str]]:
        found: list[tuple[Path, int, str]] = []
        check = IndexCheck(tmp_path, disk, mark, lambda *fault: found.append(fault), explained=lambda _: True)
        check.finish()
        return found

    assert not faults()
    whole = path.read_bytes()
    times_known = counted == 1  # those of items are in the log, which is not there
    for bit in range(0 if times_known else 8 * 16, 8 * 40):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        assert [fault[:2] for fault in faults()] == [(path, 0)], f"bit {bit % 8} of byte {bit // 8}"

"""The table of half messages after a restart."""

from pathlib import Path

from metaq.store.files.documents import write_document
from metaq.store.recovery.recovery import open_store
from metaq.tx.halves import SNAPSHOT, Halves
from tests.store.test_times_and_places import SETTINGS, put


def test_the_oldest_half_is_known_without_looking_at_all_of_them(tmp_path: Path) -> None:
    """E-01: a half that was put again stands behind younger ones in the log, and is no younger for that."""
    store, _ = open_store(tmp_path, SETTINGS)
    put(store, "t", b"x" * 100)
    ages = {7: 3000, 2: 1000, 5: 2000}
    rows = [[ordinal, 0, since_ms, 0, since_ms] for ordinal, since_ms in ages.items()]
    write_document(store.disk, tmp_path / SNAPSHOT, {"ordinal": 0, "op": 0, "halves": rows})
    halves = Halves(store, tmp_path, 60_000)
    assert (len(halves), halves.oldest_ms) == (3, 1000)
    assert list(halves) == [2, 5, 7]

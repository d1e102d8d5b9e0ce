"""Closing a store that cannot be closed in order."""

from pathlib import Path

import pytest

from metaq.errors import Fenced
from metaq.store.recovery import open_store
from tests.store.test_together import FIRST, SETTINGS, bodies, put, ready


def test_a_store_that_cannot_append_leaves_its_folder_free(tmp_path: Path) -> None:
    """F-FAIL: a master that is fenced while it closes opens the same folder again, as a slave, and has what was appended."""

    def fence() -> None:
        raise Fenced("another one may be master")

    store, _ = open_store(tmp_path, SETTINGS)
    put(store, FIRST, b"appended")
    store.log.fence = fence
    store.put(*ready(store, FIRST, b"staged"))
    with pytest.raises(Fenced):
        store.close()
    again, recovery = open_store(tmp_path, SETTINGS)
    assert recovery.unclean
    assert bodies(again, FIRST) == [b"appended"]
    again.release()
    last, recovery = open_store(tmp_path, SETTINGS)
    assert recovery.unclean
    last.close()
    last.release()
    assert not open_store(tmp_path, SETTINGS)[1].unclean

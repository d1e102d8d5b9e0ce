"""Closing a store that cannot be closed in order."""

from pathlib import Path

import pytest

from metaq.errors import Fenced
from metaq.store.files.disk import RealDisk, RealFile
from metaq.store.files.ending import Ending
from metaq.store.recovery.recovery import open_store
from tests.store.test_record_groups import FIRST, SETTINGS, bodies, put, ready


def test_a_store_that_cannot_append_leaves_its_folder_free(tmp_path: Path) -> None:
    """F-FAIL: a master that is fenced while it closes opens the same folder again, as a slave, and has what was appended."""

    def fence() -> None:
        raise Fenced("another one may be master")

    store, _ = open_store(tmp_path, SETTINGS)
    put(store, FIRST, b"appended")
    store.fence.guard(fence)
    store.put(*ready(store, FIRST, b"staged"))
    with pytest.raises(Fenced):
        store.close()
    again, recovery = open_store(tmp_path, SETTINGS)
    assert recovery.ending is Ending.KILLED
    assert bodies(again, FIRST) == [b"appended"]
    again.release()
    last, recovery = open_store(tmp_path, SETTINGS)
    assert recovery.ending is Ending.KILLED
    last.close()
    last.release()
    assert open_store(tmp_path, SETTINGS)[1].ending is Ending.ORDERLY


def test_a_released_store_appends_nothing(tmp_path: Path) -> None:
    """F-FAIL: what the former role still stages must not overwrite what the next one has appended in the same folder."""
    store, _ = open_store(tmp_path, SETTINGS)
    put(store, FIRST, b"before")
    store.close()
    following, _ = open_store(tmp_path, SETTINGS)
    put(following, FIRST, b"of the next role")
    store.put(*ready(store, FIRST, b"late"))
    with pytest.raises(Fenced, match="the data folder is closed"):
        store.append()
    assert store.failure is None
    following.close()
    assert bodies(open_store(tmp_path, SETTINGS)[0], FIRST) == [b"before", b"of the next role"]


def test_a_store_can_be_left_without_waiting_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F-FAIL: a slave that is to be master: the next opening has everything, and walks nothing."""

    def wait(*subject: object) -> None:
        raise AssertionError(f"nobody waits for the disk: {subject}")

    store, _ = open_store(tmp_path, SETTINGS)
    for number in range(100):
        put(store, FIRST, b"%d" % number)
    with monkeypatch.context() as patch:
        patch.setattr(RealFile, "datasync", wait)
        patch.setattr(RealFile, "sync_file_system", wait)
        patch.setattr(RealDisk, "sync_directory", wait)
        store.close(durably=False)
    again, recovery = open_store(tmp_path, SETTINGS)
    assert (recovery.ending, recovery.records, recovery.problems) == (Ending.KILLED, 0, [])
    assert bodies(again, FIRST) == [b"%d" % number for number in range(100)]
    again.close()

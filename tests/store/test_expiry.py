"""Segments that are deleted while the broker goes on."""

from pathlib import Path

from metaq.store.expiry import delete_expired
from metaq.store.recovery.recovery import open_store
from tests.store.test_store_features import SETTINGS, bodies, put, stage
from tests.support.manualclock import ManualClock


def test_segments_expire_while_a_message_is_staged(tmp_path: Path) -> None:
    """SG-049: deletions wait for the disk, and the turn of the loop that goes on meanwhile stages messages."""
    clock = ManualClock()
    store, _ = open_store(tmp_path / "data", SETTINGS, clock)
    for count in range(60):
        put(store, "t", b"%04d" % count * 250)
    store.sync()
    store.checkpoint()
    store.checkpoint()
    clock.advance(10)
    stage(store, "t", b"staged")
    assert delete_expired(store).delete
    store.append()
    store.sync()
    assert bodies(store, "t")[-1] == b"staged"
    store.close()

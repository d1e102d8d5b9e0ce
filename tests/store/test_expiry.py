"""Segments are deleted, and checkpoints are made, while the broker goes on."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from metaq.store.expiry import delete_expired
from metaq.store.recovery.recovery import open_store
from tests.store.test_store_features import SETTINGS, bodies, put, stage
from tests.support.faultydisk import DATA, FaultyDisk
from tests.support.manualclock import ManualClock

T = TypeVar("T")


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


def test_many_queues_are_synced_while_a_message_is_staged() -> None:
    """SG-041: a checkpoint waits for the sync of the log, and the turn of the loop that goes on meanwhile stages a message."""
    rng = random.Random(41)
    disk, settings = FaultyDisk(rng), replace(SETTINGS, sync_together=1, slice_ms=0)
    store, _ = open_store(DATA, settings, ManualClock(), disk)
    topics = [f"t{number}" for number in range(10)]
    for topic in topics:
        put(store, topic, b"covered")
    mark, staged = store.log.end, []

    def run_sync(call: Callable[[], T]) -> T:
        result = call()
        staged.append(stage(store, topics[0], b"staged"))
        return result

    def rest() -> None:
        store.append()

    store.checkpoint(rest=rest, run_sync=run_sync)
    assert staged == [mark]
    store.append()
    store.sync()
    after_cut, recovery = open_store(DATA, settings, ManualClock(), disk.power_cut(rng))
    assert (recovery.problems, recovery.walked_from) == ([], mark)
    assert bodies(after_cut, topics[0]) == [b"covered", b"staged"]
    assert [bodies(after_cut, topic) for topic in topics[1:]] == [[b"covered"]] * 9
    after_cut.close()

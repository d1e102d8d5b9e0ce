"""Limits that change in a running broker."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from metaq.store.files.disk import RealDisk, Usage
from tests.store.test_key_index import found, put
from tests.support.served import Served


class Roomy(RealDisk):
    """The real one, with a gigabyte of space of which half is used."""

    def usage(self, path: Path) -> Usage:
        return Usage(used=1 << 29, available=1 << 29)


def test_the_key_index_keeps_to_the_limits_in_force(tmp_path: Path) -> None:
    """E-29: of disk use and free space, as puts do."""
    small = {"index_slots": 7, "index_entries": 20_000, "segment_bytes": 1 << 20, "max_body_bytes": 1 << 16}
    with ExitStack() as stack:
        served = Served(stack, tmp_path / "data", Roomy(), **small)
        engine, store = served.broker.engine, served.broker.engine.store
        changes: tuple[dict[str, Any], ...] = (
            {"least_free_bytes": 1 << 30},
            {"ample_free_bytes": 1 << 40, "clean_ratio": 0.1, "force_ratio": 0.1, "refuse_ratio": 0.1},
        )
        for changed in changes:
            engine.configure(replace(served.settings, **changed))
            put(store, "t", b"body", keys="key")
            store.index_keys()
            assert [*changed][-1] in (store.indexing.paused or "")
        engine.configure(served.settings)
        store.index_keys()
        assert store.indexing.paused is None
        assert len(found(store, "t", "key")) == len(changes)

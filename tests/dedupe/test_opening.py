"""The reading of the ids in the log, while retention deletes parts of it."""

from contextlib import closing
from pathlib import Path
from typing import Final

from metaq.dedupe.opening import IdReader
from metaq.store.files.filecache import read_here
from metaq.store.recovery.recovery import open_store
from tests.store.test_store_features import SETTINGS, put

TOPIC: Final = "once"


def test_the_reading_ends_when_all_that_is_to_be_read_was_deleted(tmp_path: Path) -> None:
    """SG-045: retention may delete more than was in the log when the reading began."""
    with closing(open_store(tmp_path / "data", SETTINGS)[0]) as store:
        put(store, TOPIC, b"x", ident="a")
        end = store.log.end
        while len(store.log.segments) < 2:
            put(store, TOPIC, bytes(1000), ident="b")
        reader = IdReader(store.log, 0, {TOPIC: 1000})
        store.log.remove(store.log.segments[0])
        assert reader.next(end, read_here) == []
        assert reader.at >= end

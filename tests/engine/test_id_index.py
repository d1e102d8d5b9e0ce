"""The index of ids, checkpoint by checkpoint, without sockets."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Final

import gevent
import pytest

from metaq.engine.dedupe.index import IdIndex
from metaq.engine.writing import internal, stage
from metaq.store.files.filecache import Run, run_here
from metaq.store.ordered.engine import DeleteRange, Operation
from metaq.store.ordered.ordered import Covered, Ordered
from tests.support.inprocess import Parts

TOPIC: Final = "once"
IDLE: Final = 20
"""Checkpoints without anything new."""


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Parts]:
    with closing(Parts(tmp_path / "data", topics={TOPIC: {"partitions": 1, "dedupe_window_ms": 60_000}})) as parts:
        yield parts


def put(parts: Parts) -> None:
    """Have one more message in the log, safe from power cuts."""
    stage(parts.context, internal(parts.context, TOPIC, b"x"))
    parts.store.append()
    parts.store.sync()


def test_ids_are_forgotten_only_when_the_index_is_flushed(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    """E-07: RocksDB keeps all ranges until then, and reads through n of them take n² steps."""
    applied: list[Operation] = []
    apply = Ordered.apply

    def note(index: Ordered, batch: Sequence[Operation], covered: Covered, run: Run = run_here) -> bool:
        applied.extend(batch)
        return apply(index, batch, covered, run)

    monkeypatch.setattr(Ordered, "apply", note)
    with closing(IdIndex(parts.context, parts.turns, run_here)) as index:
        index.start()
        gevent.sleep(0)  # it reads an empty log
        for messages in (1, 2):
            put(parts)
            for _ in range(IDLE):
                index.flush()
            assert sum(isinstance(each, DeleteRange) for each in applied) == messages
        index.stop()

"""The table of request modes: its file, what is forgotten, and limits."""

from pathlib import Path

import pytest

from metaq.engine.tables import modes as table
from metaq.engine.tables.modes import MODES, Mode, ModeTable, RequestMode, mode_of
from metaq.errors import BadRequest, Overloaded
from metaq.store.files.disk import RealDisk
from metaq.store.files.filecache import run_here

DISK = RealDisk()
POP = RequestMode("orders", "billing", Mode.POP, 3)
ROW = {"topic": "orders", "consumerGroup": "billing", "mode": "POP", "popShareQueueNum": 3}


def loaded(folder: Path) -> tuple[ModeTable, list[str]]:
    modes = ModeTable(folder)
    return modes, modes.load(DISK)


def save(modes: ModeTable) -> None:
    assert modes.unsaved
    modes.save(DISK, 0, run_here)
    assert not modes.unsaved


def test_the_mode_is_pull_unless_another_was_set(tmp_path: Path) -> None:
    """MY-010: for each group in each topic of its own."""
    modes, _ = loaded(tmp_path)
    modes.put(POP)
    assert modes.get("orders", "billing") == POP
    assert modes.get("orders", "audit").mode is Mode.PULL
    assert modes.get("returns", "billing") == RequestMode("returns", "billing")


def test_file_is_rocketmqs(tmp_path: Path) -> None:
    """MY-010: topic → group → the body of 401; a start reads it."""
    modes, problems = loaded(tmp_path)
    assert problems == []
    modes.put(POP)
    modes.put(RequestMode("orders", "audit"))
    save(modes)
    assert modes.content()["messageRequestModeMap"]["orders"]["billing"] == ROW
    again, problems = loaded(tmp_path)
    assert problems == []
    assert again.content() == modes.content()
    assert not again.unsaved


def test_a_damaged_file_is_read_as_it_was_before(tmp_path: Path) -> None:
    """The problem is told, and the table saved anew."""
    modes, _ = loaded(tmp_path)
    modes.put(POP)
    save(modes)
    modes.put(POP._replace(pop_share=0))
    save(modes)
    path = tmp_path / "config" / MODES
    path.write_bytes(path.read_bytes()[:-4])
    again, problems = loaded(tmp_path)
    assert len(problems) == 1 and MODES in problems[0]
    assert again.get("orders", "billing") == POP
    save(again)
    assert loaded(tmp_path)[1] == []


def test_a_replica_has_exactly_what_was_copied(tmp_path: Path) -> None:
    """Rows that the master does not have any more are gone."""
    modes, _ = loaded(tmp_path)
    modes.put(POP)
    save(modes)
    slave = ModeTable(tmp_path)
    slave.put(RequestMode("old", "billing", Mode.POP))
    slave.reload(DISK)
    assert slave.content() == modes.content()


def test_what_is_deleted_is_forgotten(tmp_path: Path) -> None:
    """MY-010: a topic or a group of the same name begins anew."""
    modes, _ = loaded(tmp_path)
    for mode in (POP, RequestMode("orders", "audit", Mode.POP), RequestMode("returns", "billing", Mode.POP)):
        modes.put(mode)
    save(modes)
    modes.forget(topic="other")
    modes.forget(group="orders")
    assert not modes.unsaved
    modes.forget(topic="orders")
    assert modes.unsaved
    assert list(modes.content()["messageRequestModeMap"]) == ["returns"]
    modes.forget(group="billing")
    assert len(modes) == 0


def test_modes_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are set can still be changed."""
    monkeypatch.setattr(table, "MOST_MODES", 2)
    modes, _ = loaded(tmp_path)
    modes.put(POP)
    modes.put(RequestMode("orders", "audit"))
    modes.put(RequestMode("orders", "audit", Mode.POP))
    with pytest.raises(Overloaded, match="the modes of 2 groups in topics are set already"):
        modes.put(RequestMode("orders", "third"))


def test_a_row_is_read() -> None:
    """The number may be missing: RocketMQ's is then 0."""
    assert mode_of(ROW) == POP
    assert mode_of({**ROW, "popShareQueueNum": None}) == POP._replace(pop_share=0)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [({"mode": "PUSH"}, "mode is 'PUSH'"), ({"mode": None}, "mode is None"), ({"topic": 7}, "topic is 7"),
     ({"consumerGroup": None}, "consumerGroup is None"), ({"popShareQueueNum": "3"}, "popShareQueueNum is '3'"),
     ({"popShareQueueNum": 1 << 31}, "popShareQueueNum is")],
)  # fmt: skip
def test_wrong_rows_are_refused(wrong: dict[str, object], why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        mode_of({**ROW, **wrong})

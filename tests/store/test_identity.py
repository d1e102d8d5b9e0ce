"""What `store.json` says: the format, whose folder it is, and the features that it has."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from metaq.errors import UnknownVersion, WrongBroker
from metaq.spark.reading.disk import Folder
from metaq.store.files.disk import RealDisk
from metaq.store.files.documents import read_document, write_document
from metaq.store.recovery import recovery
from metaq.store.recovery.recovery import IDENTITY, add_feature, open_store
from metaq.store.recovery.verify import repair, verify
from metaq.store.settings import StoreSettings
from tests.support.faultydisk import DATA, FaultyDisk, Stopped

SETTINGS = StoreSettings(segment_bytes=16 * 1024, queue_file_bytes=256)
FEATURE = "sundials"


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this version know a feature."""
    monkeypatch.setattr(recovery, "FEATURES", frozenset({FEATURE}))


def features(folder: Path, name: str = IDENTITY) -> list[str] | None:
    content, _ = read_document(RealDisk(), folder / name)
    assert content is not None
    found: list[str] | None = content.get("features")
    return found


def test_a_feature_is_written_down_once_and_stays(tmp_path: Path) -> None:
    store, _ = open_store(tmp_path, SETTINGS)
    assert features(tmp_path) is None
    add_feature(store, FEATURE)
    assert features(tmp_path) == features(tmp_path, f"{IDENTITY}.bak") == [FEATURE]
    written = (tmp_path / IDENTITY).stat()
    add_feature(store, FEATURE)
    assert (tmp_path / IDENTITY).stat() == written
    store.close()
    store, opened = open_store(tmp_path, SETTINGS)
    store.close()
    assert features(tmp_path) == [FEATURE] and not opened.problems
    (tmp_path / IDENTITY).write_bytes(b"torn")
    store, _ = open_store(tmp_path, SETTINGS)
    store.close()
    assert features(tmp_path) == [FEATURE]


def test_a_version_that_does_not_know_a_feature_refuses_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its broker, its tools and its Spark source; nothing in the folder is touched."""
    store, _ = open_store(tmp_path, SETTINGS)
    add_feature(store, FEATURE)
    store.close()
    monkeypatch.setattr(recovery, "FEATURES", frozenset[str]())
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    openings: list[Callable[[], object]] = [
        lambda: open_store(tmp_path, SETTINGS),
        lambda: verify(tmp_path),
        lambda: repair(tmp_path),
        lambda: Folder(tmp_path),
    ]
    for opening in openings:
        with pytest.raises(UnknownVersion, match=f"has the feature {FEATURE}, which this metaq does not know"):
            opening()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_folder_of_before_there_were_features_is_read(tmp_path: Path) -> None:
    store, _ = open_store(tmp_path, SETTINGS)
    store.close()
    content, _ = read_document(RealDisk(), tmp_path / IDENTITY)
    assert content is not None and "features" not in content
    write_document(RealDisk(), tmp_path / IDENTITY, {**content, "features": []})
    store, _ = open_store(tmp_path, SETTINGS)
    store.close()


@pytest.mark.parametrize("lost", [(IDENTITY,), (IDENTITY, f"{IDENTITY}.bak")])
def test_a_repair_does_not_say_whose_folder_it_is(tmp_path: Path, lost: tuple[str, ...]) -> None:
    """E-10: where nothing says it any more; the broker's next start does."""
    orders = replace(SETTINGS, broker_name="orders", broker_number=3)
    store, _ = open_store(tmp_path, orders)
    store.close()
    assert verify(tmp_path).owner_known
    for name in lost:
        (tmp_path / name).write_bytes(b"torn")
    assert not verify(tmp_path).owner_known
    for _ in range(2):
        report = repair(tmp_path)
        assert not report.damages and not report.owner_known
        assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(IDENTITY)]
    store, _ = open_store(tmp_path, orders)
    store.close()
    report = repair(tmp_path)
    assert not report.damages and report.owner_known
    with pytest.raises(WrongBroker, match="belongs to broker 'orders' number 3"):
        open_store(tmp_path, SETTINGS)


def test_a_power_cut_leaves_a_feature_written_or_not() -> None:
    """At each call to the disk; once the feature was added it is there, and every folder can be opened."""
    for stop_at in range(1, 100):
        rng = random.Random(stop_at)
        disk = FaultyDisk(rng)
        store, _ = open_store(DATA, SETTINGS, disk=disk)
        disk.stop_at = disk.calls + stop_at
        try:
            add_feature(store, FEATURE)
        except Stopped:
            pass
        else:
            break
        content, problems = read_document(disk.power_cut(rng), DATA / IDENTITY)
        assert content is not None and content.get("features", [FEATURE]) == [FEATURE] and not problems
        open_store(DATA, SETTINGS, disk=disk.power_cut(rng))
    assert stop_at > 10, "it takes that many calls"
    content, _ = read_document(disk.power_cut(rng), DATA / IDENTITY)
    assert content is not None and content["features"] == [FEATURE]

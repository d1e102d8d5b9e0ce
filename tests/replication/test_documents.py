"""The tables that a master sends to its slaves."""

import logging
from pathlib import Path
from typing import Final

import pytest

from metaq.errors import ReadFailed
from metaq.replication.documents import Documents, keep
from metaq.store.files.disk import RealDisk
from metaq.store.files.documents import BACKUP, encode_document

NAME: Final = "transactions.json"
OLD: Final = encode_document({"made_end": 1})
NEW: Final = encode_document({"made_end": 2})


@pytest.mark.parametrize("byte", [0xFF, 0x20])
@pytest.mark.parametrize(
    ("backup", "sent"), [(OLD, {NAME: OLD.decode()}), (OLD[:-1], {}), (None, {})], ids=["intact", "damaged", "missing"]
)
def test_a_damaged_table_is_not_sent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, byte: int, backup: bytes | None, sent: dict[str, str]
) -> None:
    """F-BIT, SG-058: the version before takes its place, if there is one, and the log names the file, once."""
    documents = Documents(tmp_path, RealDisk())
    path = tmp_path / NAME
    path.write_bytes(NEW[:30] + bytes((byte,)) + NEW[31:])
    if backup is not None:
        path.with_name(NAME + BACKUP).write_bytes(backup)
    with caplog.at_level(logging.ERROR):
        assert [documents.changed(), documents.changed()] == [sent, {}]
    assert [record.getMessage() for record in caplog.records] == [f"damaged table not sent to slaves file={path}"]
    path.write_bytes(NEW)
    assert documents.changed() == {NAME: NEW.decode()}


class Unreadable(RealDisk):
    """A disk that cannot read one file."""

    bad = ""

    def read_file(self, path: Path) -> bytes:
        if path.name == self.bad:
            raise ReadFailed(f"cannot read {path}: Input/output error")
        return super().read_file(path)


def test_a_table_that_cannot_be_read_keeps_no_slave_away(tmp_path: Path) -> None:
    """F-BIT, SG-058: the master sends the version before, and the slave writes the new one over its own."""
    disk = Unreadable()
    disk.bad = NAME
    path = tmp_path / NAME
    path.write_bytes(NEW)
    path.with_name(NAME + BACKUP).write_bytes(OLD)
    assert Documents(tmp_path, disk).changed() == {NAME: OLD.decode()}
    keep(tmp_path, disk, {NAME: OLD.decode()}, 10)
    assert path.read_bytes() == OLD

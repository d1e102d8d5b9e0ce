"""The tables that a master sends to its slaves."""

import logging
from pathlib import Path
from typing import Final

import pytest

from metaq.replication.documents import Documents
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

"""The broker that documents are compared with."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.support.broker import BrokerProcess

SEGMENT_BYTES: Final = 32 * 1024 * 1024
"""Room for every example; at the default of 1 GiB a run would reserve 2 GiB for each of them."""


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    """A fresh one, as a person starts it."""
    with BrokerProcess(tmp_path / "data", "--segment-bytes", str(SEGMENT_BYTES), durability="disk") as process:
        yield process
    shutil.rmtree(process.data)  # pytest keeps the folders of three runs

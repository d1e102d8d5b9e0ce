"""The engine and the folder of the tests of the ordered index."""

from pathlib import Path

import pytest

from metaq.store.ordered.ordered import EngineName
from tests.store.ordered.writer import ENGINES


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> EngineName:
    name: EngineName = request.param
    return name


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "timerindex"

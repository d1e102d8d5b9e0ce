"""What takes so long to make that the processes of a run share it."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

_MADE: Final = "made"


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """Return a folder of this name, filled by ``make``: the first process of a run that asks fills it, the others wait."""
    base = factory.getbasetemp()
    return made_in((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name, make)


def made_in(folder: Path, make: Callable[[Path], None]) -> Path:
    """Return a folder, filled by ``make`` unless that was done before; processes that ask meanwhile wait."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / _MADE).exists():
            make(folder)
            (folder / _MADE).touch()
    return folder

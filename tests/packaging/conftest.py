"""The distribution as it is built and installed where there is no C compiler."""

import fcntl
import os
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.packaging.built import build, install_bare, wheel_in


class Bare(NamedTuple):
    """The distribution, and the folder of commands of an environment with it."""

    sdist: Path
    wheel: Path
    binaries: Path


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Bare:
    """Made with an empty PATH: no compiler, no git. The processes of a run share it: the first builds, the others wait."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "bare"
    folder.mkdir(exist_ok=True)
    dist, environment, path = folder / "dist", folder / "environment", folder / "path"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not environment.exists():
            path.mkdir(exist_ok=True)
            build(folder, PATH=str(path), CC="cc")
            install_bare(wheel_in(dist), environment, str(path))
    (sdist,) = dist.glob("*.tar.gz")
    return Bare(sdist, wheel_in(dist), environment / "bin")

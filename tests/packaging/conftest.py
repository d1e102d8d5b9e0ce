"""The distribution as it is built and installed where there is no C compiler."""

from pathlib import Path
from typing import NamedTuple

import pytest

from tests.packaging.built import build, install_bare, wheel_in
from tests.support.once import made_once


class Bare(NamedTuple):
    """The distribution, and the folder of commands of an environment with it."""

    sdist: Path
    wheel: Path
    binaries: Path


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Bare:
    """Made with an empty PATH: no compiler, no git."""
    folder = made_once(tmp_path_factory, "bare", make_bare)
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    return Bare(sdist, wheel_in(folder / "dist"), folder / "environment" / "bin")


def make_bare(folder: Path) -> None:
    path = folder / "path"
    path.mkdir(exist_ok=True)
    build(folder, PATH=str(path), CC="cc")
    install_bare(wheel_in(folder / "dist"), folder / "environment", str(path))

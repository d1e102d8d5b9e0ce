"""Wheels that the tests deploy, made once, and machines."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

from metaq.deploy.cluster import Cluster, ClusterSettings
from metaq.deploy.wheels import build
from tests.deploy.pair import Pair
from tests.deploy.prepared import prepared_python
from tests.deploy.systems import Systems
from tests.support.once import made_once
from tests.support.sshd import SshHost

ROOT: Final = Path(__file__).parents[2]
SOURCES: Final = ("setup.py", "build_metaq.py", "pyproject.toml", "README.md", "pyspark_metaq.py", "metaq")
SECOND: Final = "0.1.999"


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This source tree, and all that it needs with delays and ZooKeeper, as ``fab deploy`` makes them.

    It is not compiled, which takes minutes: ``tests.packaging`` does that.
    """
    return made_once(tmp_path_factory, "release", make_release) / "wheels"


def make_release(folder: Path) -> None:
    settings = ClusterSettings(package=str(ROOT), hosts={"none": None})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPILE_METAQ", "0")
        release = build(Cluster(settings, ()), folder)
    add = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(release.wheels)]
    subprocess.run([*add, "kazoo", "rocksdict"], check=True)


@pytest.fixture(scope="session")
def second_wheels(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with another version."""
    return made_once(tmp_path_factory, "second", lambda folder: make_second(folder, wheels)) / "wheels"


def make_second(folder: Path, wheels: Path) -> None:
    source, built = folder / "source", folder / "wheels"
    source.mkdir()
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    version = source / "metaq" / "__init__.py"
    lines = version.read_text().splitlines()
    version.write_text("\n".join(f'__version__ = "{SECOND}"' if line.startswith("__version__") else line for line in lines))
    shutil.copytree(wheels, built, ignore=shutil.ignore_patterns("metaq_broker-*"))
    make = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(built)]
    subprocess.run([*make, str(source)], check=True, env={**os.environ, "COMPILE_METAQ": "0"})


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Interpreter of machines that have installed the wheels before."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    return prepared_python(shared / "prepared")


@pytest.fixture
def pair(tmp_path: Path, wheels: Path, python: Path) -> Iterator[Pair]:
    with ExitStack() as stack:
        hosts = [stack.enter_context(SshHost(tmp_path, name, python)) for name in ("a", "b")]
        pair = Pair(tmp_path, hosts, wheels)
        pair.configure()
        yield pair


@pytest.fixture
def systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Systems:
    found = Systems(tmp_path)
    monkeypatch.setattr("metaq.deploy.processes.UNITS", str(found.units))
    return found

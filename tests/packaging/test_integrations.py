"""The packages of integrations as users get them: built, installed beside metaq's wheel in a fresh environment, and played."""

import os
import sys
import venv
import zipfile
from pathlib import Path
from typing import Final

import pytest

from tests.docs.examples import ROOT, fences
from tests.docs.shell import Shell
from tests.packaging.built import PIP_INSTALL, READY, clean_environment, copy, run, serving, tracked, wheel_in
from tests.packaging.conftest import Bare

FOLDER: Final = "integrations"
NAMES: Final = sorted(path.parent.name for path in (ROOT / FOLDER).glob("*/pyproject.toml"))

pytestmark = [pytest.mark.slow, pytest.mark.partner("git"), pytest.mark.timeout(2400)]


def build(name: str, folder: Path) -> Path:
    """The wheel of a package, of its tracked files; it has its modules, the mark of types, and nothing else."""
    inside = f"{FOLDER}/{name}/"
    sources = [path for path in tracked() if path.startswith(inside) and not path.startswith(f"{inside}tests/")]
    source = copy(sources, folder / "tree") / inside
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder / name, source, cwd=folder)
    wheel = wheel_in(folder / name)
    with zipfile.ZipFile(wheel) as archive:
        packed = {path for path in archive.namelist() if ".dist-info/" not in path}
    assert packed == {path.removeprefix(inside) for path in sources} - {"README.md", "pyproject.toml"}
    assert any(path.endswith("/py.typed") for path in packed)
    return wheel


def test_the_packages_need_no_more_of_metaq_than_its_wheel(bare: Bare, tmp_path: Path) -> None:
    """What the READMEs show happens where nothing of this project is but the wheels; one environment: each takes a minute."""
    venv.create(tmp_path / "environment", with_pip=True)
    binaries = tmp_path / "environment" / "bin"
    wheels = [build(name, tmp_path) for name in NAMES]
    run(binaries / "python", *PIP_INSTALL, f"{bare.wheel}[timers]", *wheels, cwd=tmp_path)
    run(binaries / "python", "-m", "pip", "check", cwd=tmp_path)
    with serving(binaries, tmp_path / "broker"):
        ready = READY.search((tmp_path / "broker" / "out").read_text())
        assert ready is not None
        registry, path = ready[3], f"{binaries}{os.pathsep}{os.environ['PATH']}"
        for name in NAMES:
            folder = tmp_path / "home" / name
            folder.mkdir(parents=True)
            environment = clean_environment(PATH=path, HOME=str(folder), METAQ_REGISTRY=registry)
            with Shell(folder, environment, lambda text: text.replace("127.0.0.1:9876", registry)) as shell:
                assert shell.play(fences(f"{FOLDER}/{name}/README.md")), name

"""The packages of integrations as users get them: built, installed beside metaq's wheel in a fresh environment, and played."""

import os
import sys
import zipfile
from pathlib import Path
from typing import Final

import pytest

from tests.docs.examples import ROOT, fences
from tests.docs.shell import Shell
from tests.packaging.built import PIP_INSTALL, READY, clean_environment, copy, install, run, serving, tracked, wheel_in
from tests.packaging.conftest import Bare

FOLDER: Final = "integrations"
NAMES: Final = sorted(path.parent.name for path in (ROOT / FOLDER).glob("*/pyproject.toml"))

pytestmark = [pytest.mark.slow, pytest.mark.partner("git"), pytest.mark.timeout(2400)]


@pytest.mark.parametrize("name", NAMES)
def test_a_package_needs_the_wheel_of_metaq_only(bare: Bare, name: str, tmp_path: Path) -> None:
    """What its README shows happens where nothing of this project is but the two wheels."""
    inside = f"{FOLDER}/{name}/"
    sources = [path for path in tracked() if path.startswith(inside) and not path.startswith(f"{inside}tests/")]
    source = copy(sources, tmp_path / "tree") / inside
    run(sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path / "dist", source, cwd=tmp_path)
    wheel = wheel_in(tmp_path / "dist")
    with zipfile.ZipFile(wheel) as archive:
        packed = {path for path in archive.namelist() if ".dist-info/" not in path}
    assert packed == {path.removeprefix(inside) for path in sources} - {"README.md", "pyproject.toml"}
    assert any(path.endswith("/py.typed") for path in packed)

    binaries = install(bare.wheel, tmp_path / "environment")
    run(binaries / "python", *PIP_INSTALL, wheel, cwd=tmp_path)
    run(binaries / "python", "-m", "pip", "check", cwd=tmp_path)
    folder = tmp_path / "home"
    folder.mkdir()
    with serving(binaries, tmp_path / "broker"):
        ready = READY.search((tmp_path / "broker" / "out").read_text())
        assert ready is not None
        registry = ready[3]
        environment = clean_environment(
            PATH=f"{binaries}{os.pathsep}{os.environ['PATH']}", HOME=str(folder), METAQ_REGISTRY=registry
        )
        with Shell(folder, environment, lambda text: text.replace("127.0.0.1:9876", registry)) as shell:
            assert shell.play(fences(f"{inside}README.md"))

"""The packages of integrations/: each is built, and installed beside metaq in an environment of its own."""

import tomllib
import venv
import zipfile
from pathlib import Path
from typing import Final

import pytest

from tests.docs.examples import ROOT
from tests.packaging.built import PIP_INSTALL, copy, run, tracked, wheel_in
from tests.packaging.conftest import Bare

pytestmark = [pytest.mark.slow, pytest.mark.partner("git"), pytest.mark.timeout(2400)]

FOLDERS: Final = sorted(path.parent.name for path in ROOT.glob("integrations/*/pyproject.toml"))
PIP_BUILD: Final = ("-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps", "--wheel-dir")
LOADED: Final = """
import importlib, sys
from importlib.metadata import distribution, version
for package in sys.argv[2:]:
    importlib.import_module(package)
for entry in distribution(sys.argv[1]).entry_points:
    entry.load()
print(version(sys.argv[1]), version("metaq-broker"))
"""


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_package_is_built_and_installed(folder: str, bare: Bare, tmp_path: Path) -> None:
    """Its wheel holds its packages, the mark of types and nothing else; they are imported with what it requires, no more."""
    place = f"integrations/{folder}"
    files = [name for name in tracked() if name.startswith(f"{place}/")]
    source = copy(files, tmp_path / "source") / place
    run(bare.binaries / "python", *PIP_BUILD, tmp_path, source, cwd=tmp_path)
    wheel = wheel_in(tmp_path)
    project = tomllib.loads((source / "pyproject.toml").read_text("utf-8"))["project"]
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
    packages = {name.partition("/")[0] for name in inside}
    assert inside == {name.removeprefix(f"{place}/") for name in files if name.split("/")[2] in packages}
    assert {f"{package}/py.typed" for package in packages} <= inside
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    run(python, *PIP_INSTALL, bare.wheel, wheel, cwd=tmp_path)
    run(python, "-m", "pip", "check", cwd=tmp_path)
    versions = run(python, "-c", LOADED, project["name"], *packages, cwd=tmp_path)
    assert versions.split() == [wheel.name.split("-")[1], bare.wheel.name.split("-")[1]]

"""The packages of integrations/ as they are built, installed beside metaq with their oldest and their newest frameworks."""

import re
import sys
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import Any, Final

import pytest

from tests.docs.examples import ROOT
from tests.packaging.built import copy, run, tracked
from tests.packaging.conftest import Bare
from tests.support.once import made_once

pytestmark = [pytest.mark.slow, pytest.mark.partner("git"), pytest.mark.timeout(2400)]

FOLDERS: Final = sorted(path.parent.name for path in ROOT.glob("integrations/*/pyproject.toml"))
PIP: Final = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python")
LOADED: Final = """
import importlib, re, sys
from importlib import metadata

def required(text, found):
    # the distributions that a requirement needs, those that a platform does not need left out
    name, extras = re.match(r"([\\w.-]+)(?:\\[([^]]*)\\])?", text).groups()
    name = re.sub(r"[-_.]+", "-", name).lower()
    try:
        needs = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return
    if name not in found:
        found.add(name)
        for need in needs:
            extra = re.search(r"extra == ['\\"]([^'\\"]*)", need)
            if extra is None or extra[1] in (extras or ""):
                required(need, found)

class Hidden:
    # nothing but what a distribution requires can be imported
    def __init__(self, seen):
        self.seen = seen

    def find_spec(self, name, path=None, target=None):
        owners = OWNERS.get(name, ())
        if owners and not any(re.sub(r"[-_.]+", "-", owner).lower() in self.seen for owner in owners):
            raise ModuleNotFoundError(f"{name} belongs to {owners}, which are not required")

OWNERS = metadata.packages_distributions()
seen = set()
required(sys.argv[1], seen)
sys.meta_path.insert(0, Hidden(seen))
for package in sys.argv[2:]:
    importlib.import_module(package)
for entry in metadata.distribution(sys.argv[1]).entry_points:
    entry.load()
print(metadata.version(sys.argv[1]), metadata.version("metaq-broker"))
"""


def project(folder: str) -> dict[str, Any]:
    """What a package says of itself."""
    found: dict[str, Any] = tomllib.loads((ROOT / "integrations" / folder / "pyproject.toml").read_text("utf-8"))["project"]
    return found


def oldest(folder: str) -> list[str]:
    """The frameworks of a package, each in the oldest version that it allows."""
    bounds = [
        re.fullmatch(r"([\w-]+)>=([\w.]+)(?:,<[\w.]+)?", text.replace(" ", "")) for text in project(folder)["dependencies"]
    ]
    assert all(bounds), project(folder)["dependencies"]
    return [f"{bound[1]}=={bound[2]}" for bound in bounds if bound is not None and bound[1] != "metaq-broker"]


def environment(folder: Path, bare: Bare) -> Path:
    """The interpreter of a new environment, which has metaq from another one."""
    venv.create(folder, with_pip=False)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    (metaq,) = bare.binaries.parent.glob("lib/python*/site-packages")
    (packages / "metaq.pth").write_text(f"{metaq}\n", "utf-8")
    return folder / "bin" / "python"


def packages_in(wheel: Path) -> tuple[set[str], set[str]]:
    """The files of a wheel beside those that describe it, and the packages that they are of."""
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
    return inside, {name.partition("/")[0] for name in inside}


@pytest.fixture(scope="session")
def wheels(bare: Bare, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Those of all packages, built at once."""

    def make(folder: Path) -> None:
        python = environment(folder / "environment", bare)
        run(*PIP, python, "install", "setuptools>=77.0.3", cwd=folder)
        source = copy([name for name in tracked() if name.startswith("integrations/")], folder / "source")
        sources = [source / "integrations" / name for name in FOLDERS]
        run(*PIP, python, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder / "dist", *sources, cwd=folder)

    place = made_once(tmp_path_factory, "integrations", make) / "dist"
    return {name: next(place.glob(f"{project(name)['name'].replace('-', '_')}-*.whl")) for name in FOLDERS}


@pytest.fixture(scope="session", params=["oldest", "newest"])
def installed(
    wheels: dict[str, Path], bare: Bare, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Path:
    """The interpreter of an environment with all packages."""

    def make(folder: Path) -> None:
        python = environment(folder / "environment", bare)
        frameworks = [text for name in FOLDERS for text in oldest(name)] if request.param == "oldest" else []
        run(*PIP, python, "install", *wheels.values(), *frameworks, cwd=folder)
        run(*PIP, python, "check", cwd=folder)

    return made_once(tmp_path_factory, f"integrations-{request.param}", make) / "environment" / "bin" / "python"


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_wheel_holds_its_packages(folder: str, wheels: dict[str, Path]) -> None:
    """With the mark of types, and nothing else."""
    place = f"integrations/{folder}/"
    inside, packages = packages_in(wheels[folder])
    files = [name.removeprefix(place) for name in tracked() if name.startswith(place)]
    assert inside == {name for name in files if name.split("/")[0] in packages}
    assert {f"{package}/py.typed" for package in packages} <= inside


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_package_is_imported_with_what_it_requires(
    folder: str, installed: Path, wheels: dict[str, Path], bare: Bare, tmp_path: Path
) -> None:
    """Nothing else can be imported, and its entry points are there."""
    _, packages = packages_in(wheels[folder])
    versions = run(installed, "-c", LOADED, project(folder)["name"], *sorted(packages), cwd=tmp_path)
    assert versions.split() == [path.name.split("-")[1] for path in (wheels[folder], bare.wheel)]

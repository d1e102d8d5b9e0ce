"""The distribution: it is built, installed beside the core's, and makes the scheme known by itself; and imports little."""

import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path
from typing import Final

import pytest

from tests.docs.examples import ROOT
from tests.packaging.built import PIP_INSTALL, clean_environment, run

FOLDER: Final = ROOT / "integrations" / "kombu"
MOST_MS: Final = 30.0
RUNS: Final = 5
COST: Final = """
import celery, time
celery.Celery(broker="memory://").connection().transport
begin = time.process_time()
import kombu_metaq.transport
print((time.process_time() - begin) * 1000)
"""
KNOWN: Final = """
from celery import Celery
print(Celery(broker="metaq://127.0.0.1:9876//").connection().transport.driver_name)
"""


@pytest.mark.slow
def test_the_wheel_makes_the_scheme_known(tmp_path: Path) -> None:
    """Installed without what it needs, of which this environment has all but the package itself."""
    source = shutil.copytree(FOLDER, tmp_path / "source", ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", tmp_path, source, cwd=tmp_path)
    (wheel,) = tmp_path.glob("metaq_kombu-*-py3-none-any.whl")
    venv.create(tmp_path / "environment", system_site_packages=False, with_pip=True)
    python = tmp_path / "environment" / "bin" / "python"
    here = [path for path in sys.path if path.endswith("site-packages")]
    run(python, *PIP_INSTALL, "--no-deps", wheel, cwd=tmp_path)
    packages = next((tmp_path / "environment").glob("lib/python*/site-packages"))
    (packages / "needed.pth").write_text("\n".join([*here, str(ROOT)]), "utf-8")
    assert run(python, "-c", KNOWN, cwd=tmp_path) == "metaq\n"
    assert str(packages) in run(python, "-c", "import kombu_metaq; print(kombu_metaq.__file__)", cwd=tmp_path)


def test_it_has_the_licence_and_the_dependencies_of_its_kind() -> None:
    project = tomllib.loads((FOLDER / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["license"] == "Apache-2.0"
    assert {need.partition(">")[0] for need in project["dependencies"]} == {"kombu", "metaq-broker"}


def test_the_transport_imports_little_and_not_the_client() -> None:
    """In processor time, the least of some starts: other programs may be busy."""
    paths = ":".join([str(FOLDER), str(ROOT)])
    costs = [
        float(subprocess.check_output([sys.executable, "-c", COST], env=clean_environment(PYTHONPATH=paths), text=True))
        for _ in range(RUNS)
    ]
    assert min(costs) < MOST_MS, costs
    shown = "import sys, kombu_metaq.transport; print('metaq.client' in sys.modules, 'celery' in sys.modules)"
    answer = subprocess.check_output([sys.executable, "-c", shown], env=clean_environment(PYTHONPATH=paths), text=True)
    assert answer == "False False\n"

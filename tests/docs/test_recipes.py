"""The recipes, one after the other beside one broker, and the types of all programs that the pages show."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.docs.examples import ROOT, fences
from tests.docs.shell import NAMED, Shell
from tests.docs.test_readme import environment
from tests.support.broker import BrokerProcess
from tests.support.ports import free_ports

PAGE: Final = "docs/recipes.md"
PAGES: Final = [
    PAGE,
    "docs/tutorial.md",
    "docs/concepts.md",
    "docs/comparisons.md",
    "docs/migration.md",
    "docs/faq.md",
    "docs/dramatiq.md",
    "docs/taskiq.md",
]
SOURCES: Final = os.pathsep.join(map(str, [ROOT, *(path.parent for path in ROOT.glob("integrations/*/pyproject.toml"))]))


@pytest.mark.slow
def test_the_recipes(broker: BrokerProcess, tmp_path: Path) -> None:
    """Play every line in one folder; only the ports are others."""
    ports = {"127.0.0.1:9876": broker.registry, "127.0.0.1:8000": f"127.0.0.1:{free_ports(1)[0]}"}

    def replaced(text: str) -> str:
        for shown, real in ports.items():
            text = text.replace(shown, real)
        return text

    folder = tmp_path / "home"
    folder.mkdir()
    with Shell(folder, {**environment(broker), "HOME": str(folder)}, replaced) as shell:
        typed = shell.play(fences(PAGE))
    assert len(typed) >= 10


@pytest.mark.slow
def test_the_programs_are_typed(tmp_path: Path) -> None:
    """Check those of all pages that have been written for the site by mypy --strict, each page's in a folder of its own.

    What mypy knows of metaq is kept from page to page.
    """
    for page in PAGES:
        folder = tmp_path / Path(page).stem
        folder.mkdir()
        programs = [fence for fence in fences(page, "python") if NAMED.match(fence.text)]
        assert programs == fences(page, "python"), f"{page}: each program begins with # NAME.py"
        for fence in programs:
            named = NAMED.match(fence.text)
            assert named is not None
            (folder / named[1]).write_text(fence.text, "utf-8")
        if programs:
            command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "--strict"]
            command += ["--cache-dir", str(tmp_path / "cache"), "."]
            done = subprocess.run(
                command, cwd=folder, env={**os.environ, "MYPYPATH": SOURCES}, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, f"{page}: {done.stdout}{done.stderr}"

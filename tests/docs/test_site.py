"""The site is built without a warning, needs nothing from elsewhere, and its drawings are those of their sources."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.docs.drawings import IMAGES, SOURCES, drawings
from tests.docs.examples import ROOT

LOADED: Final = re.compile(
    r"<(?:script|img|iframe|source|link(?! [^>]*rel=\"?(?:canonical|edit)))\b[^>]*\b(?:src|href)=\"?(?:https?:)?//[^>]*>"
)
"""What a browser fetches from another server; links are for readers."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All pages: bad links and anchors, and pages that no menu has, fail a strict build; a quiet one would not see them."""
    folder = tmp_path_factory.mktemp("site") / "built"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
def test_it_has_every_page(site: Path) -> None:
    """Each document, the README as the first page, and what they link to outside of docs."""
    documents = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    pages = {path.with_name("index.html") if path.stem == "README" else path.with_suffix(".html") for path in documents}
    there = {path.relative_to(site) for path in site.rglob("*")}
    assert pages - there == set()
    assert {Path("index.html"), Path("conf/broker.yaml"), Path("benchmarks/index.html"), Path("CHANGELOG.html")} <= there
    assert 'href="conf/broker.yaml"' in (site / "index.html").read_text("utf-8")
    assert "offset-report" in (site / "search" / "search_index.json").read_text("utf-8")


@pytest.mark.slow
def test_it_needs_nothing_from_elsewhere(site: Path) -> None:
    """No script, font, style or picture of another server, also not in a style."""
    foreign = {f"{path.name}: {found}" for path in site.rglob("*.html") for found in LOADED.findall(path.read_text("utf-8"))}
    assert foreign == set()
    styles = [path.read_text("utf-8") for path in site.rglob("*.css")]
    assert styles and not any(re.search(r"url\(['\"]?(?:https?:)?//|@import", style) for style in styles)


def test_the_drawings_are_made_of_their_sources() -> None:
    """To make them anew: python -m tests.docs.drawings"""
    made = drawings()
    assert made.keys() == set(IMAGES.glob("*.svg")) and len(made) == len(list(SOURCES.iterdir()))
    assert {path.name for path, picture in made.items() if path.read_text("utf-8") != picture} == set()

"""What a package index shows of the distribution: links, licence, classifiers."""

import email
import re
import subprocess
import sys
from email.message import Message
from typing import Final

import pytest

import metaq
from tests.docs.examples import ROOT
from tests.docs.test_docs import anchors
from tests.packaging.built import clean_environment
from tests.packaging.conftest import Bare

PREPARE: Final = "import build_metaq, sys; print(build_metaq.prepare_metadata_for_build_wheel(sys.argv[1]))"
_LINK: Final = re.compile(r"""\]\(([^)]+)\)|^\[[^\]]+\]: *(\S+)|(?:href|src)=["']([^"']+)""", re.MULTILINE)


@pytest.fixture(scope="module")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> Message:
    """Made by the build backend, without a build."""
    folder = tmp_path_factory.mktemp("metadata")
    command = [sys.executable, "-c", PREPARE, str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=clean_environment(), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return email.message_from_bytes((folder / done.stdout.splitlines()[-1] / "METADATA").read_bytes())


def links(text: str) -> list[str]:
    """The targets of all links and pictures of a Markdown text."""
    return [match[1] or match[2] or match[3] for match in _LINK.finditer(text)]


def assert_is_there(link: str, tree: str) -> None:
    """Assert that a link into the tree of this version leads to a file, and to a heading of it, that this tree has."""
    path, _, anchor = link.removeprefix(f"{tree}/").partition("#")
    assert (ROOT / path).exists(), link
    assert not anchor or anchor in anchors((ROOT / path).read_text("utf-8")), link


def test_every_link_of_the_description_is_absolute_and_leads_to_what_is_there(metadata: Message) -> None:
    """SG-137: an index has the README and none of the files beside it."""
    tree = f"{metadata['Home-page']}/blob/v{metaq.__version__}"
    found, written = links(str(metadata.get_payload())), links((ROOT / "README.md").read_text("utf-8"))
    assert len(found) == len(written) > 30
    assert [link for link in found if not link.startswith("https://")] == []
    assert any("#" in link for link in found)
    for link in found:
        if link.startswith(metadata["Home-page"]):
            assert_is_there(link, tree)


def test_the_kinds_of_links_are_found() -> None:
    """SG-137: inline, by reference, and as HTML."""
    text = "a [b](c.md) ![d](e.png)\n[f]: g.md\n<img src=\"h.png\"> <a href='i.md'>"
    assert links(text) == ["c.md", "e.png", "g.md", "h.png", "i.md"]


def test_the_urls_of_the_project_lead_to_what_is_there(metadata: Message) -> None:
    """SG-137: each is of the repository that setup.py names, once."""
    urls = dict(url.split(", ") for url in metadata.get_all("Project-URL", []))
    home = metadata["Home-page"]
    assert urls.pop("Issues") == f"{home}/issues"
    assert {"Documentation", "Changelog"} <= urls.keys()
    for url in urls.values():
        assert_is_there(url, f"{home}/blob/v{metaq.__version__}")


def test_licence_and_interpreters_are_those_of_the_wheels(metadata: Message) -> None:
    """SG-137: the licence as an expression, so that no classifier may say it again."""
    classifiers = metadata.get_all("Classifier", [])
    assert metadata["License-Expression"] == "Apache-2.0" and metadata.get_all("License-File") == ["LICENSE"]
    assert not [classifier for classifier in classifiers if classifier.startswith("License")]
    versions = {classifier.rpartition("3.")[2] for classifier in classifiers if " :: 3." in classifier}
    wheels = re.findall(r'"cp3(\d+)-\*"', (ROOT / "pyproject.toml").read_text("utf-8"))
    assert versions == set(wheels)
    assert len(metadata["Keywords"].split(",")) > 5


@pytest.mark.slow
@pytest.mark.partner("git")
def test_the_index_would_take_the_distribution(bare: Bare) -> None:
    """SG-137: twine checks the metadata, and that the description can be shown."""
    command = [sys.executable, "-m", "twine", "check", "--strict", str(bare.sdist), str(bare.wheel)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and done.stdout.count("PASSED") == 2, done.stdout + done.stderr

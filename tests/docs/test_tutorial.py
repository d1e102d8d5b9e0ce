"""The tutorial, from nothing, as a new user plays it."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.docs.examples import ROOT, Fence, fences
from tests.docs.shell import Shell
from tests.packaging.built import copy, run, tracked, wheel_in
from tests.support.ports import free_ports

PAGE: Final = "docs/tutorial.md"
MOST_SECONDS: Final = 600.0
PACKAGE: Final = "metaq-broker"
SPARK: Final = "## Spark"
PORTS: Final = {"8123": "METAQ_LISTEN", "10911": "METAQ_REMOTING_LISTEN", "9876": "METAQ_REGISTRY_LISTEN"}
PIPS: Final = ("PIP_", "SSL_", "HTTP_", "HTTPS_", "http_", "https_", "no_proxy", "NO_PROXY", "REQUESTS_")
"""What tells pip how this machine reaches packages; nothing else of the environment goes along."""


def parts() -> tuple[list[Fence], list[Fence]]:
    """The fences before the part with Spark, and those of it."""
    text = (ROOT / PAGE).read_text("utf-8")
    line = text.count("\n", 0, text.index(f"\n{SPARK}\n")) + 1
    found = fences(PAGE)
    before = [fence for fence in found if int(fence.place.rpartition(":")[2]) < line]
    return before, found[len(before) :]


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """The pure one of this tree."""
    source = copy([name for name in tracked() if not name.startswith(("tests/", "benchmarks/"))], tmp_path / "source")
    run(
        sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path / "wheel", source,
        cwd=tmp_path, COMPILE_METAQ="0",
    )  # fmt: skip
    return wheel_in(tmp_path / "wheel")


class Place:
    """An empty home, ports that nobody else has, and the package of this tree: all in which a reader's machine differs."""

    def __init__(self, folder: Path, path: str, package: str) -> None:
        self.folder = folder
        folder.mkdir()
        addresses = {port: f"127.0.0.1:{free}" for port, free in zip(PORTS, free_ports(len(PORTS)), strict=True)}
        self._replacements = {f"127.0.0.1:{port}": address for port, address in addresses.items()} | {PACKAGE: package}
        self.environment = {
            **{name: value for name, value in os.environ.items() if name.startswith(PIPS)},
            **{setting: addresses[port] for port, setting in PORTS.items()},
            "METAQ_HTTP_LISTEN": "127.0.0.1:0",
            "METAQ_BROKER": addresses["8123"],
            "METAQ_REGISTRY": addresses["9876"],
            "HOME": str(folder),
            "LANG": "C.UTF-8",
            "PATH": path,
        }

    def replaced(self, text: str) -> str:
        for shown, real in self._replacements.items():
            text = text.replace(shown, real)
        return text

    def shell(self) -> Shell:
        return Shell(self.folder, self.environment, self.replaced)


def cache_of_pip() -> str:
    """Where pip keeps what it has once fetched: not a part of the reader's home, so that the test asks nobody twice."""
    command = [sys.executable, "-m", "pip", "cache", "dir"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.slow
@pytest.mark.partner("git")
@pytest.mark.timeout(1800)
def test_from_nothing_to_a_replayed_dead_letter(
    wheel: Path, tmp_path: Path, record_property: pytest.FixtureRequest
) -> None:
    """E-34: every line of the page in an empty home, with nothing on the path but Python and the system's own commands."""

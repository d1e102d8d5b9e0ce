"""The files of others that the repository holds for browsers: python -m tests.packaging.vendored [--check]

Fetches each package with the npm client at its pinned version, compares the archive with its pinned SHA-256, and puts the files
that are wanted, with the package's licence, into their folder. ``--check`` only compares. A new version is a new line in
``PACKAGES``; nothing of npm is needed to build metaq, to install it or to run it.
"""

import hashlib
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[2]
SHIPPED: Final = ROOT / "metaq" / "server" / "console" / "static"
TESTED: Final = ROOT / "tests" / "server" / "console" / "axe"


class Vendored(NamedTuple):
    """A package of npm."""

    name: str
    version: str
    sha256: str
    """Of its archive."""
    licence: str
    folder: Path
    files: dict[str, str]
    """The names here, by the names in the archive."""

    @property
    def purl(self) -> str:
        """The package URL, by which scanners know it."""
        return f"pkg:npm/{self.name}@{self.version}"


PACKAGES: Final = (
    Vendored(
        "htmx.org",
        "2.0.11",
        "165a2655073e9e6e55e307a7c74e8ebcdb76afb7701f9c16cfd106a13add408e",
        "0BSD",
        SHIPPED,
        {"dist/htmx.min.js": "htmx.min.js", "LICENSE": "htmx.LICENSE"},
    ),
    Vendored(
        "uplot",
        "1.6.32",
        "4b8a8191e425658e3ea8c8c1314b0fc679c861ee3a1af2b20c7b16ba50b5133d",
        "MIT",
        SHIPPED,
        {"dist/uPlot.iife.min.js": "uplot.min.js", "dist/uPlot.min.css": "uplot.min.css", "LICENSE": "uplot.LICENSE"},
    ),
    Vendored(
        "axe-core",
        "4.14.1",
        "e6b0ce02b84d892e2e33e403485e7f3d6c29e2be6df65daf44d89ba564139745",
        "MPL-2.0",
        TESTED,
        {"axe.min.js": "axe.min.js", "LICENSE": "LICENSE", "LICENSE-3RD-PARTY.txt": "LICENSE-3RD-PARTY.txt"},
    ),
)


def fetched(package: Vendored) -> dict[str, bytes]:
    """Return the wanted files of a package by their names here. Raise ``SystemExit`` when the archive is another one."""
    with tempfile.TemporaryDirectory() as name:
        command = ["npm", "pack", "--silent", f"{package.name}@{package.version}"]
        subprocess.run(command, cwd=name, check=True, capture_output=True)
        (archive,) = Path(name).glob("*.tgz")
        found = hashlib.sha256(archive.read_bytes()).hexdigest()
        if found != package.sha256:
            raise SystemExit(f"{package.purl}: the archive has SHA-256 {found}, and {package.sha256} is expected")
        with tarfile.open(archive) as content:
            return {ours: _member(content, f"package/{theirs}") for theirs, ours in package.files.items()}


def _member(content: tarfile.TarFile, name: str) -> bytes:
    file = content.extractfile(name)
    assert file is not None, name
    return file.read()


def main(arguments: list[str]) -> int:
    differing = []
    for package in PACKAGES:
        for name, data in fetched(package).items():
            path = package.folder / name
            if path.is_file() and path.read_bytes() == data:
                continue
            differing.append(path)
            if "--check" not in arguments:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
    for path in differing:
        print(path.relative_to(ROOT))
    return 1 if differing and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

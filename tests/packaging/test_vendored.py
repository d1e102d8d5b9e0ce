"""The files of others for browsers: those that were pinned, with their licences, and in what is published."""

import hashlib
from typing import Final

from tests.packaging.vendored import PACKAGES, SHIPPED

FILES: Final = {
    "htmx.min.js": "d6fdc75f204e6bdefa99b69bf1e6d4ac69b8a364f77929f45c13476b4000f717",
    "uplot.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uplot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    "axe.min.js": "29348999450cdf2849a8e70b7912fc2da85a849da39c0d0d5394f51d4a9ed95c",
}
"""SHA-256 of what the pinned archives hold; the archives themselves are compared by ``python -m tests.packaging.vendored``."""


def test_the_files_are_those_of_the_packages() -> None:
    """SG-137: nobody has edited one."""
    found = {
        name: hashlib.sha256((package.folder / name).read_bytes()).hexdigest()
        for package in PACKAGES
        for name in package.files.values()
        if name in FILES
    }
    assert found == FILES


def test_each_has_its_version_and_its_licence() -> None:
    """SG-137: uPlot's files say their version; every package has its licence beside them."""
    versions = {package.name: package.version for package in PACKAGES}
    assert f"(v{versions['uplot']})" in (SHIPPED / "uplot.min.js").read_text("utf-8")
    assert f'version:"{versions["htmx.org"]}"' in (SHIPPED / "htmx.min.js").read_text("utf-8")
    for package in PACKAGES:
        [licence] = [name for theirs, name in package.files.items() if theirs == "LICENSE"]
        assert (package.folder / licence).stat().st_size > 500, package.name

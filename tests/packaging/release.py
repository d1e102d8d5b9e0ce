"""Whether a distribution may be released: python -m tests.packaging.release FOLDER TAG REPOSITORY

Reads the sdist in FOLDER, and ends with 1 and the reasons unless TAG is ``v`` and its version, REPOSITORY is where its links
lead, and CHANGELOG.md has the day of this version.
"""

import email
import re
import sys
import tarfile
from pathlib import Path


def problems(sdist: Path, tag: str, repository: str) -> list[str]:
    """Return what speaks against the release of an sdist."""
    with tarfile.open(sdist) as archive:
        (top,) = {name.partition("/")[0] for name in archive.getnames()}
        files = {}
        for name in ("PKG-INFO", "CHANGELOG.md"):
            stream = archive.extractfile(f"{top}/{name}")
            assert stream is not None
            files[name] = stream.read().decode("utf-8")
    metadata = email.message_from_string(files["PKG-INFO"])
    version, home = metadata["Version"], metadata["Home-page"]
    found = []
    if tag != f"v{version}":
        found.append(f"the tag is {tag} and the version {version}: tag v{version}, or set __version__ in metaq/__init__.py")
    if repository != home:
        found.append(f"this repository is {repository} and the links lead to {home}: set REPOSITORY in setup.py")
    if not re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$", files["CHANGELOG.md"], re.MULTILINE):
        found.append(f"CHANGELOG.md has no line '## [{version}] - YEAR-MONTH-DAY'")
    return found


def main(folder: str, tag: str, repository: str) -> None:
    (sdist,) = Path(folder).glob("*.tar.gz")
    if found := problems(sdist, tag, repository):
        sys.exit("\n".join(f"release: {problem}" for problem in found))


if __name__ == "__main__":
    main(*sys.argv[1:])

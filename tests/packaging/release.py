"""Whether distributions may be released: python -m tests.packaging.release FOLDER TAG REPOSITORY

Reads the sdists in FOLDER, and ends with 1 and the reasons unless TAG is ``v`` and the version of each, REPOSITORY is where the
links of metaq lead, and its CHANGELOG.md has the day of this version.
"""

import email
import re
import sys
import tarfile
from pathlib import Path
from typing import Final

METAQ: Final = "metaq-broker"


def problems(sdist: Path, tag: str, repository: str) -> list[str]:
    """Return what speaks against the release of an sdist: of a package of ``integrations/`` only its version."""
    metadata = email.message_from_string(text_in(sdist, "PKG-INFO"))
    name, version, home = metadata["Name"], metadata["Version"], metadata["Home-page"]
    found = []
    if tag != f"v{version}":
        place = "__version__ in metaq/__init__.py" if name == METAQ else "it in integrations/"
        found.append(f"the tag is {tag} and the version of {name} {version}: tag v{version}, or set {place}")
    if name != METAQ:
        return found
    if repository != home:
        found.append(f"this repository is {repository} and the links lead to {home}: set REPOSITORY in setup.py")
    if not re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$", text_in(sdist, "CHANGELOG.md"), re.MULTILINE):
        found.append(f"CHANGELOG.md has no line '## [{version}] - YEAR-MONTH-DAY'")
    return found


def text_in(sdist: Path, name: str) -> str:
    """Return the text of a file at the top of an sdist."""
    with tarfile.open(sdist) as archive:
        (top,) = {path.partition("/")[0] for path in archive.getnames()}
        stream = archive.extractfile(f"{top}/{name}")
        assert stream is not None
        return stream.read().decode("utf-8")


def main(folder: str, tag: str, repository: str) -> None:
    """End with 1 and the reasons if one of the sdists may not be released."""
    found = [problem for sdist in sorted(Path(folder).glob("*.tar.gz")) for problem in problems(sdist, tag, repository)]
    if found:
        sys.exit("\n".join(f"release: {problem}" for problem in found))


if __name__ == "__main__":
    main(*sys.argv[1:])

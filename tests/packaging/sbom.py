"""The bill of materials: python -m tests.packaging.sbom [FILE]

Writes what metaq-broker needs when it runs, with versions and licences, as CycloneDX 1.6 in JSON: to FILE, or to standard
output. It is read from what is installed here, so other interpreters and platforms may have other versions. What only an extra
brings has the scope ``optional``; the extra ``dev`` is left out. cyclonedx-py would bring 20 packages for it, and does not know
which extras are for users. The files of npm packages that are shipped (``tests.packaging.vendored``) are in it, too.
"""

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import distribution
from pathlib import Path
from typing import Any, Final

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.packaging.vendored import PACKAGES, SHIPPED, Vendored

SEVERAL: Final = "Dual License"
"""What a package says whose classifiers name the licences to choose from."""
PACKAGE: Final = "metaq-broker"
DEVELOPMENT: Final = "dev"
SHORT: Final = 40
"""A licence that is longer than this is its text, and no name."""
SPDX: Final = {
    "Apache 2.0": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "MIT License": "MIT",
    "BSD License": "BSD",
    "Python Software Foundation License": "PSF-2.0",
}
"""Other names of licences. Which of the BSD licences a package means it often does not say."""


@dataclass
class Component:
    """A distribution that is installed."""

    name: str
    version: str
    licence: str
    """An SPDX expression, or a name; empty when the package does not say."""
    needs: set[str] = field(default_factory=set)

    @property
    def purl(self) -> str:
        """The package URL, by which scanners know it."""
        return f"pkg:pypi/{self.name}@{self.version}"


def licence_of(metadata: Mapping[str, str], classifiers: Iterable[str]) -> str:
    """Return the licence that the metadata of a package names: as an expression, in a word, or by its classifiers."""
    if expression := metadata.get("License-Expression"):
        return expression
    short = metadata.get("License", "").strip()
    if 0 < len(short) <= SHORT and "\n" not in short and short != SEVERAL:
        return SPDX.get(short, short)
    found = [line.rpartition(" :: ")[2] for line in classifiers if line.startswith("License :: ")]
    names = [SPDX.get(name, name) for name in found]
    return " OR ".join(names if short == SEVERAL else names[:1])


def collect(extras: Iterable[str]) -> dict[str, Component]:
    """Return the package and all that it needs with these extras, by name. Raises when one of them is not installed."""
    found: dict[str, Component] = {}
    seen: set[tuple[str, str]] = set()
    todo = [(PACKAGE, extra) for extra in ("", *extras)]
    while todo:
        name, extra = todo.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        installed = distribution(name)
        metadata: Any = installed.metadata
        licence = licence_of(metadata, metadata.get_all("Classifier", []))
        component = found.setdefault(name, Component(name, installed.version, licence))
        for requirement in map(Requirement, installed.requires or []):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                needed = canonicalize_name(requirement.name)
                component.needs.add(needed)
                todo += [(needed, wanted) for wanted in ("", *requirement.extras)]
    return found


def extras_of_users() -> list[str]:
    """Return the extras of the package without that for its development."""
    return [extra for extra in distribution(PACKAGE).metadata.get_all("Provides-Extra", []) if extra != DEVELOPMENT]


def licences(text: str) -> list[dict[str, Any]]:
    """Return a licence as CycloneDX has it: an SPDX identifier, an SPDX expression, or a name that is neither."""
    if not text:
        return []
    try:
        canonicalize_license_expression(text)
    except InvalidLicenseExpression:
        return [{"license": {"name": text}}]
    return [{"expression": text}] if " " in text else [{"license": {"id": text}}]


def described(component: Component, scope: str) -> dict[str, Any]:
    """Return the entry of one component."""
    return {
        "type": "library",
        "bom-ref": component.purl,
        "name": component.name,
        "version": component.version,
        "scope": scope,
        "licenses": licences(component.licence),
        "purl": component.purl,
    }


def shipped(package: Vendored) -> dict[str, Any]:
    """Return the entry of an npm package whose files are in the wheel."""
    return {
        "type": "library",
        "bom-ref": package.purl,
        "name": package.name,
        "version": package.version,
        "scope": "required",
        "licenses": licences(package.licence),
        "hashes": [{"alg": "SHA-256", "content": package.sha256}],
        "purl": package.purl,
    }


def document() -> dict[str, Any]:
    """Return the bill of materials."""
    required, everything = collect([]), collect(extras_of_users())
    own = everything[PACKAGE]
    others = [everything[name] for name in sorted(everything.keys() - {PACKAGE})]
    scripts = [shipped(package) for package in PACKAGES if package.folder == SHIPPED]
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {**described(own, "required"), "type": "application"}},
        "components": [
            *(described(other, "required" if other.name in required else "optional") for other in others),
            *scripts,
        ],
        "dependencies": [
            {"ref": component.purl, "dependsOn": sorted(everything[name].purl for name in component.needs)}
            for component in (own, *others)
        ]
        + [{"ref": script["bom-ref"], "dependsOn": []} for script in scripts],
    }


def main(arguments: list[str]) -> None:
    text = json.dumps(document(), indent=2) + "\n"
    if not arguments:
        sys.stdout.write(text)
        return
    file = Path(arguments[0])
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, "utf-8")
    print(file)


if __name__ == "__main__":
    main(sys.argv[1:])

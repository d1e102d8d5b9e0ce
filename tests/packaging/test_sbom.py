"""The bill of materials, and the licences in it."""

import json
import re
from typing import Any, Final

import pytest

import metaq
from tests.packaging import sbom

ALLOWED: Final = {
    "0BSD",
    "Apache-2.0",
    "BSD",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "CC0-1.0",
    "MIT",
    "MIT-0",
    "MIT-CMU",
    "MPL-2.0",
    "PSF-2.0",
    "ZPL-2.1",
    "Zlib",
}
"""What lets everybody use metaq as its own licence does (docs/packaging.md). MPL asks something of who changes its files."""
EXCEPTIONS: Final = {"paramiko": "LGPL-2.1"}
"""Packages of extras, used as they are published and replaceable by their user."""


@pytest.fixture(scope="module")
def bill(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """As ``make sbom`` writes it."""
    file = tmp_path_factory.mktemp("sbom") / "dist" / "metaq.cdx.json"
    sbom.main([str(file)])
    content: dict[str, Any] = json.loads(file.read_text("utf-8"))
    return content


def licence(component: dict[str, Any]) -> str:
    (only,) = component["licenses"]
    return str(only["expression"] if "expression" in only else next(iter(only["license"].values())))


def is_allowed(component: dict[str, Any]) -> bool:
    """Return whether all licences of a component are allowed; those it offers to choose from, too."""
    name, said = component["name"], licence(component)
    words = set(re.findall(r"[\w.+-]+", said)) - {"AND", "OR", "WITH"}
    return words <= ALLOWED or (EXCEPTIONS.get(name) == said and component["scope"] == "optional")


def test_every_dependency_is_there_with_a_version_and_a_licence(bill: dict[str, Any]) -> None:
    """SG-137: what is required and what an extra brings; nothing of the development."""
    own = bill["metadata"]["component"]
    assert (own["name"], own["version"], licence(own)) == ("metaq-broker", metaq.__version__, "Apache-2.0")
    scopes = {component["name"]: component["scope"] for component in bill["components"]}
    assert {"click", "crcmod", "gevent", "greenlet", "librt", "orjson", "pyyaml", "rich", "zlib-ng"} <= {
        name for name, scope in scopes.items() if scope == "required"
    }
    assert {"kazoo", "fabric", "paramiko", "pyspark", "py4j", "matplotlib"} <= scopes.keys() - {
        name for name, scope in scopes.items() if scope == "required"
    }
    assert not {"pytest", "mypy", "ruff", "twine"} & scopes.keys()
    assert all(component["version"] and licence(component) for component in bill["components"])


def test_every_licence_is_allowed(bill: dict[str, Any]) -> None:
    """SG-137: a new dependency under another licence needs a decision."""
    assert {component["name"]: licence(component) for component in bill["components"] if not is_allowed(component)} == {}
    assert EXCEPTIONS.keys() <= {component["name"] for component in bill["components"]}


def test_a_licence_that_is_not_allowed_is_found() -> None:
    """SG-137: also as a part of an expression, and that of an exception where everybody gets it."""
    for name, said, scope, allowed in (
        ("a", "MIT", "required", True),
        ("a", "MPL-2.0 AND (Apache-2.0 OR MIT)", "required", True),
        ("a", "MIT AND GPL-3.0-only", "required", False),
        ("a", "LGPL-2.1", "optional", False),
        ("paramiko", "LGPL-2.1", "optional", True),
        ("paramiko", "LGPL-2.1", "required", False),
    ):
        component = sbom.described(sbom.Component(name, "1", said), scope)
        assert is_allowed(component) == allowed, component


def test_the_parts_refer_to_each_other(bill: dict[str, Any]) -> None:
    """SG-137: each component once, each dependency to a component; gevent leads to greenlet."""
    references = [component["bom-ref"] for component in (bill["metadata"]["component"], *bill["components"])]
    assert len(set(references)) == len(references)
    needs = {line["ref"]: line["dependsOn"] for line in bill["dependencies"]}
    assert list(needs) == references
    from_npm = {reference for reference in references if reference.startswith("pkg:npm/")}  # files, which nothing names
    assert {needed for line in needs.values() for needed in line} == set(references[1:]) - from_npm
    assert {reference.partition("@")[0] for reference in from_npm} == {"pkg:npm/htmx.org", "pkg:npm/uplot"}
    (gevent,) = (reference for reference in references if reference.startswith("pkg:pypi/gevent@"))
    assert any(needed.startswith("pkg:pypi/greenlet@") for needed in needs[gevent])


@pytest.mark.parametrize(
    ("metadata", "classifiers", "expected"),
    [
        ({"License-Expression": "MIT", "License": "x"}, [], "MIT"),
        ({"License": "Apache 2.0"}, ["License :: OSI Approved :: MIT License"], "Apache-2.0"),
        ({"License": "Redistribution and use in source and binary forms, with or without modification"},
         ["Typing :: Typed", "License :: OSI Approved :: BSD License"], "BSD"),
        ({"License": "Dual License"},
         ["License :: OSI Approved :: BSD License", "License :: OSI Approved :: Apache Software License"], "BSD OR Apache-2.0"),
        ({}, ["Typing :: Typed"], ""),
    ],
)  # fmt: skip
def test_where_a_licence_is_found(metadata: dict[str, str], classifiers: list[str], expected: str) -> None:
    """SG-137: not in its whole text."""
    assert sbom.licence_of(metadata, classifiers) == expected


def test_without_a_file_it_is_printed(capsys: pytest.CaptureFixture[str], bill: dict[str, Any]) -> None:
    """SG-137: the same."""
    sbom.main([])
    assert json.loads(capsys.readouterr().out) == bill

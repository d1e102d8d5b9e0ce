"""Which form of a wheel is built: the decision alone. ``test_distribution`` builds the compiled one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.examples import ROOT

SCRIPT = """
import build_metaq

def build(directory, options, metadata):
    import os
    form = os.environ["COMPILE_METAQ"]
    if form == "1" and {fails}:
        raise SystemExit("error: command 'cc' failed")
    return f"form {{form}}"

build_metaq.build_meta.build_wheel = build
build_metaq.build_meta.get_requires_for_build_wheel = lambda options: []
print(build_metaq.get_requires_for_build_wheel(), build_metaq.build_wheel("dist"))
"""


def built(*, fails: bool = False, compiler: bool = True, wish: str | None = None) -> "subprocess.CompletedProcess[str]":
    """Ask the backend what it needs and to build, with a setuptools that only says which form it was asked for."""
    environment = {name: value for name, value in os.environ.items() if name not in {"COMPILE_METAQ", "CC"}}
    environment |= {} if wish is None else {"COMPILE_METAQ": wish}
    environment["CC"] = str(Path(sys.executable)) if compiler else "/nowhere/cc"
    command = [sys.executable, "-c", SCRIPT.format(fails=fails)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("wish", [None, "1"])
def test_a_wheel_is_compiled_where_that_can_be_done(wish: str | None) -> None:
    """P15: mypy comes for the build alone."""
    done = built(wish=wish)
    assert (done.stdout, done.stderr) == ("['mypy~=2.4.0'] form 1\n", "")


def test_without_a_compiler_the_wheel_is_pure_and_the_build_says_so() -> None:
    """P15: nothing that needs a compiler is asked for either."""
    done = built(compiler=False)
    assert done.stdout == "[] form 0\n"
    assert "there is no /nowhere/cc, so this wheel is pure Python" in done.stderr


def test_when_compiling_fails_the_wheel_is_pure_and_the_build_says_so() -> None:
    """P15: unless the compiled form was asked for."""
    done = built(fails=True)
    assert done.stdout == "['mypy~=2.4.0'] form 0\n"
    assert "cannot be compiled here" in done.stderr
    asked = built(fails=True, wish="1")
    assert asked.returncode != 0 and asked.stdout == ""


def test_the_pure_form_can_be_asked_for_and_a_wrong_wish_is_an_error() -> None:
    """P15: by COMPILE_METAQ."""
    assert built(wish="0").stdout == "[] form 0\n"
    wrong = built(wish="yes")
    assert wrong.returncode != 0
    assert "COMPILE_METAQ is 'yes'; it must be 0, 1 or not set" in wrong.stderr


def test_wheels_are_configured_for_all_interpreters_and_platforms() -> None:
    """P15: as far as it can be tried without containers: cibuildwheel says what it would build."""
    command = [sys.executable, "-m", "cibuildwheel", "--platform", "linux", "--print-build-identifiers", str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    systems = [f"{libc}_{machine}" for libc in ("manylinux", "musllinux") for machine in ("x86_64", "aarch64")]
    assert set(done.stdout.split()) == {f"cp3{minor}-{system}" for minor in (11, 12, 13, 14) for system in systems}

"""A machine without a C compiler and without git, as a slim image is: the package builds, installs and serves."""

from pathlib import Path
from typing import Final

import pytest

import metaq
from tests.packaging.built import PIP_INSTALL, run, serving
from tests.packaging.conftest import Bare

CHECK: Final = """
import sys
from metaq.checksum import crc32c
print(hex(crc32c(b"123456789")), *(name for name in sys.modules if name.startswith("crcmod._crcfun")))
"""
CHECKED: Final = "0xe3069283"
"""The check value of CRC-32C."""

pytestmark = [pytest.mark.slow, pytest.mark.partner("git"), pytest.mark.timeout(2400)]


def test_without_a_compiler_it_is_pure_and_takes_the_first_message(bare: Bare, tmp_path: Path) -> None:
    """P15: so is crcmod, which comes as source; what it sums up is the same."""
    assert bare.wheel.name == f"metaq_broker-{metaq.__version__}-py3-none-any.whl"
    assert run(bare.binaries / "python", "-c", CHECK, cwd=tmp_path) == f"{CHECKED} crcmod._crcfunpy\n"
    with serving(bare.binaries, tmp_path / "empty") as broker:
        stored = run(bare.binaries / "metaq", "put", "hello", "world", "--broker", broker.address, cwd=tmp_path)
        assert stored.startswith("stored in hello-0 at 0")
        assert run(bare.binaries / "metaq", "get", "hello", "--broker", broker.address, cwd=tmp_path) == "world\n"


def test_the_version_is_known_without_git(bare: Bare, tmp_path: Path) -> None:
    """SG-137: the wheel was made of the sdist where no command was on PATH."""
    assert run(bare.binaries / "metaq", "--version", cwd=tmp_path) == f"metaq {metaq.__version__} (interpreted)\n"
    assert bare.sdist.name == f"metaq_broker-{metaq.__version__}.tar.gz"


def test_crcmod_plus_is_the_same_module_compiled(bare: Bare, tmp_path: Path) -> None:
    """P15: what docs/packaging.md advises; here in a folder of its own, since others use the environment."""
    python, folder = bare.binaries / "python", tmp_path / "plus"
    run(python, *PIP_INSTALL, "--only-binary", ":all:", "--target", folder, "crcmod-plus", cwd=tmp_path)
    assert run(python, "-c", CHECK, cwd=tmp_path, PYTHONPATH=str(folder)) == f"{CHECKED} crcmod._crcfunext\n"

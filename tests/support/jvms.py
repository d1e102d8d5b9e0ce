"""An environment in which the JVMs that tests start, and the Python processes of Spark, need little processor time."""

import contextlib
import hashlib
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Final

SHORT_LIFE: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""For Java. Most of these JVMs live for seconds, of which the second compiler would take half."""
OPTIONS: Final = ("SPARK_SUBMIT_OPTS", "SPARK_LAUNCHER_OPTS", "MAVEN_OPTS")
HOME: Final = "SPARK_HOME"


def short_lived() -> dict[str, str]:
    """Return the settings of the environment; make the home of Spark that they name."""
    settings = dict.fromkeys(OPTIONS, SHORT_LIFE)
    pyspark = find_spec("pyspark")
    if pyspark is not None and pyspark.origin is not None:
        package = Path(pyspark.origin).parent
        name = f"metaq-tests-spark-{hashlib.sha256(str(package).encode()).hexdigest()[:12]}"
        settings[HOME] = str(make_home(Path(tempfile.gettempdir(), name), package))
    return settings


def make_home(home: Path, package: Path) -> Path:
    """Make a home of Spark without ``python/lib/pyspark.zip``, so that its Python processes import the package instead.

    They look there first, and what is imported from an archive is compiled anew by each of them. A query starts several.
    """
    home.mkdir(exist_ok=True)
    for name in ("bin", "jars"):
        with contextlib.suppress(FileExistsError):
            (home / name).symlink_to(package / name)
    return home

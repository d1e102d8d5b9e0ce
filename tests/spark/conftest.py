"""One Spark session for all tests of a process: it costs ten seconds and 0.8 GB."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from metaq.spark.session import session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

QUIET = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.memory": "1g",
    "spark.python.authenticate.socketTimeout": "180s",  # a busy machine takes its time to start a worker
}


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator["SparkSession"]:
    """A session with two task slots; whatever Spark writes by itself goes to a folder of its own."""
    folder = tmp_path_factory.mktemp("spark")
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    places = {"spark.sql.warehouse.dir": str(folder / "warehouse"), "spark.local.dir": str(folder / "local")}
    spark = session("metaq tests", master="local[2]", settings={**QUIET, **places})
    yield spark
    spark.stop()


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    """A folder for what a streaming query remembers."""
    return str(tmp_path / "checkpoint")

"""Differences between the versions of PySpark: what the oldest ones lack, and what takes its place.

======  =================================================================================================================
4.0     no filters for readers; no register for formats that Spark finds; Arrow is for writers of the batch writer's class
4.1     no limits for micro-batches: a streaming reader is not told where one begins
4.2     all of it
======  =================================================================================================================
"""

from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamWriter
from pyspark.version import __version__

from metaq.errors import ConfigError

VERSION: Final = tuple(int(number) for number in __version__.split(".")[:2])
REGISTERING: Final = (4, 1)
"""The first version that lets a program register a format that Spark finds by itself (``pyspark_metaq``): it saves a search."""
FILTERS: Final = (4, 1)
"""The first version that passes filters to readers."""
LIMITS: Final = (4, 2)
"""The first version that tells a streaming reader where a micro-batch begins and how much it may have."""

if TYPE_CHECKING or VERSION >= (4, 1):
    from pyspark.sql.datasource import DataSourceStreamArrowWriter
else:

    class DataSourceStreamArrowWriter(DataSourceStreamWriter, DataSourceArrowWriter):
        """A writer of streaming queries that gets Arrow: Spark 4.0 looks for the batch writer's class only."""


def refuse_older(first: tuple[int, int], option: str, what: str) -> None:
    """Raise ``ConfigError`` for an option that this PySpark cannot have, naming both versions; ``what`` says why."""
    if first > VERSION:
        raise ConfigError(f"{option}: {what}, from PySpark {first[0]}.{first[1]} on; this is {__version__}")


__all__ = ["FILTERS", "LIMITS", "REGISTERING", "VERSION", "DataSourceStreamArrowWriter", "refuse_older"]

"""The data source ``metaq`` for Spark's Python API.

Spark makes these objects in processes beside the driver (to learn the schema, to plan) and in workers (to read), and pickles
them on the way. So they hold only options, and connect where they need to.
"""

from functools import partial
from typing import Final

from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, DataSourceReader, DataSourceStreamReader
from pyspark.sql.types import StructType

from metaq.errors import ConfigError
from metaq.spark.login import with_password
from metaq.spark.reading.batch import BatchReader
from metaq.spark.reading.options import ReadOptions, read_options
from metaq.spark.reading.tasks import plain_errors
from metaq.spark.versions import FILTERS, LIMITS, VERSION, DataSourceStreamArrowWriter, refuse_older

NAME: Final = "metaq"
COLUMNS: Final = (
    "key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp, timestampType int, tag string"
)
HEADERS: Final = ", headers array<struct<key: string, value: binary>>"
ERROR: Final = ", error string"


class MetaqDataSource(DataSource):
    """``spark.read.format("metaq")``, and the same of ``readStream``, ``write`` and ``writeStream``."""

    def __init__(self, options: dict[str, str]) -> None:
        """Add the password from the driver's environment: workers, and streams, get it with the pickled options."""
        super().__init__(with_password(options))

    @classmethod
    def name(cls) -> str:
        """Return the name for ``format``."""
        return NAME

    def schema(self) -> str:
        """Return the columns of a read as SQL: a worker cannot parse that into types.

        ``ConfigError`` for options that cannot be read.
        """
        with plain_errors():
            options = read_options(self.options)
            return COLUMNS + HEADERS * options.headers + ERROR * options.errors

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of a batch. ``ConfigError``."""
        with plain_errors():
            options = self.read_options(schema).for_batch()
            if not options.pushdown:
                return BatchReader(options)
            refuse_older(FILTERS, "filterPushdown", "Spark passes filters to readers")
        from metaq.spark.reading.filters import FilteringReader  # noqa: PLC0415 - older versions have no filters

        return FilteringReader(options)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Return the reader of a streaming query.

        It reads its options when the query begins: Spark would hide an error that is raised here.
        """
        if VERSION >= LIMITS:
            from metaq.spark.reading.limitedstream import LimitedStreamReader  # noqa: PLC0415 - no batch needs it

            return LimitedStreamReader(partial(self.read_options, schema))
        from metaq.spark.reading.plainstream import PlainStreamReader  # noqa: PLC0415

        return PlainStreamReader(partial(self.read_options, schema))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        """Return the writer of a batch. ``ConfigError``."""
        from metaq.spark.writing.sink import BatchWriter  # noqa: PLC0415 - no reader needs it

        with plain_errors():
            return BatchWriter(self.options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        """Return the writer of a streaming query. ``ConfigError``."""
        from metaq.spark.writing.sink import StreamWriter  # noqa: PLC0415

        with plain_errors():
            return StreamWriter(self.options, schema, overwrite)

    def read_options(self, schema: StructType) -> ReadOptions:
        """Parse the options of a read with these columns. ``ConfigError``, also for columns of the user's own."""
        options = read_options(self.options)
        wanted = [column.split(" ")[0] for column in COLUMNS.split(", ")]
        wanted += ["headers"] * options.headers + ["error"] * options.errors
        if schema.fieldNames() != wanted:
            raise ConfigError(f"the columns are {', '.join(wanted)}; a read cannot have another schema")
        return options

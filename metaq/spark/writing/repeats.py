"""What a Spark write has written twice, dropped by who reads it with Spark."""

from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from metaq.errors import ConfigError
from metaq.spark.writing.packing import WRITE

_VALUE: Final = f"filter(headers, header -> header.key = '{WRITE}')[0].value"


def without_repeats(messages: DataFrame) -> DataFrame:
    """Each message of a Spark write once; messages of other senders stay as they are. ``ConfigError`` without ``headers``.

    ``messages`` are read with ``includeHeaders``. Of a stream, ``withWatermark("timestamp", …)`` has to say first how much
    later a repeat may come: Spark remembers what it has seen for so long.
    """
    if "headers" not in messages.columns:
        raise ConfigError(f"repeats are known by the header {WRITE}: read with the option includeHeaders=true")
    place = f.concat_ws("/", "topic", "partition", "offset")
    marked = messages.withColumn(WRITE, f.coalesce(f.expr(_VALUE).cast("string"), place))
    once = marked.dropDuplicatesWithinWatermark([WRITE]) if messages.isStreaming else marked.dropDuplicates([WRITE])
    return once.drop(WRITE)

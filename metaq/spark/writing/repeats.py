"""A filter for messages that a Spark write has written twice, for readers that use Spark."""

from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from metaq.errors import ConfigError
from metaq.protocol.properties import WRITE

_VALUE: Final = f"get(filter(headers, header -> header.key = '{WRITE}'), 0).value"


def without_repeats(messages: DataFrame) -> DataFrame:
    """Return each message of a Spark write once, and messages of other senders as they are.

    ``messages`` are read with ``includeHeaders``; without its column ``headers``, ``ConfigError``. On a stream,
    ``withWatermark("timestamp", …)`` comes first and says how much later a repeat may come: Spark remembers messages for
    that long.
    """
    if "headers" not in messages.columns:
        raise ConfigError(f"repeats are recognised by the header {WRITE}: read with the option includeHeaders=true")
    place = f.concat_ws("/", "topic", "partition", "offset")
    marked = messages.withColumn(WRITE, f.coalesce(f.expr(_VALUE).cast("string"), place))
    once = marked.dropDuplicatesWithinWatermark([WRITE]) if messages.isStreaming else marked.dropDuplicates([WRITE])
    return once.drop(WRITE)

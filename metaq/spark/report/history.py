"""The history of offsets: a row for every partition of every group, each time that a broker took a sample.

It is read from files (``metaq offsets export``), or from the system topic into which brokers write it by themselves. Rows may
come twice and in any order, as the report's tables do not depend on either.
"""

from pathlib import Path
from typing import Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.types import IntegerType, LongType, StringType, StructField, StructType, TimestampType

from metaq.errors import ConfigError
from metaq.spark.login import NOBODY, PASSWORD, TLS_CA, USER, Login
from metaq.spark.reading.options import SERVERS

SCHEMA: Final = StructType(
    [
        StructField("ts", TimestampType()),
        StructField("broker", StringType()),
        StructField("group", StringType()),
        StructField("kind", StringType()),
        StructField("topic", StringType()),
        StructField("partition", IntegerType()),
        StructField("consumed", LongType()),
        StructField("minimum", LongType()),
        StructField("maximum", LongType()),
        StructField("consumed_ts", TimestampType()),
        StructField("minimum_ts", TimestampType()),
        StructField("maximum_ts", TimestampType()),
        StructField("owner", StringType()),
        StructField("retention_ms", LongType()),
        StructField("lag", LongType()),
        StructField("in_flight", LongType()),
        StructField("delayed", LongType()),
    ]
)
"""``kind``: remoting, zookeeper or observed, or topic for a topic without a group. ``consumed``: the next offset, null when
unknown. ``minimum``, ``maximum``: the oldest offset, and one after the newest. The ``_ts`` columns: when the messages there
were stored; ``consumed_ts`` is null when there is none yet. ``owner``: a client's id, null when no client consumes the
partition. ``lag``, ``in_flight``, ``delayed``: of groups that lease messages; null for others, and in files that were written
before there were leases."""
OF_LEASES: Final = frozenset({"lag", "in_flight", "delayed"})

_JSON_LINES: Final = frozenset({".json", ".jsonl"})
_PARQUET: Final = b"PAR1"

SERIES: Final = ["broker", "group", "kind", "topic", "partition"]
"""The columns that identify a series of samples."""


def read_files(spark: SparkSession, path: str) -> DataFrame:
    """Read a file or folder of Parquet, or of JSON lines: files whose names end in .json or .jsonl.

    ``ConfigError`` when there is no file, or one of another kind.
    """
    place = Path(path)
    files = [place] if place.is_file() else sorted(file for file in place.rglob("[!._]*") if file.is_file())
    if not files:
        raise ConfigError(f"there is no history at {path}; metaq offsets export writes one")
    if all(file.suffix in _JSON_LINES for file in files):
        return spark.read.schema(SCHEMA).option("recursiveFileLookup", True).json(path)
    for file in files:
        with file.open("rb") as opened:
            if opened.read(len(_PARQUET)) != _PARQUET:
                raise ConfigError(f"{file} is neither Parquet nor JSON lines (.jsonl)")
    history = spark.read.options(recursiveFileLookup=True, mergeSchema=True).parquet(path)
    missing = [name for name in SCHEMA.fieldNames() if name not in history.columns and name not in OF_LEASES]
    if missing:
        raise ConfigError(f"{path} is not a history of offsets: it has no column {', '.join(missing)}")
    found = {name: f.col(name) if name in history.columns else f.lit(None) for name in SCHEMA.fieldNames()}
    return history.select([found[field.name].cast(field.dataType).alias(field.name) for field in SCHEMA])


def read_topic(spark: SparkSession, servers: str, topic: str, login: Login = NOBODY) -> DataFrame:
    """Read all samples that the system topic still has; ``servers`` is as in the option ``metaq.bootstrap.servers``."""
    return rows_of(spark.read.format("metaq").options(**_options(servers, topic, login)).load())


def follow_topic(spark: SparkSession, servers: str, topic: str, login: Login = NOBODY) -> DataFrame:
    """Read the samples of the system topic, as a stream from its oldest message on."""
    reader = spark.readStream.format("metaq").options(**_options(servers, topic, login))
    return rows_of(reader.option("startingOffsets", "earliest").load())


def _options(servers: str, topic: str, login: Login) -> dict[str, str]:
    who = {USER: login.user, PASSWORD: login.password, TLS_CA: login.tls_ca}
    given = {name: value for name, value in who.items() if value}
    # a report is about the samples that are kept, however long it did not run
    return {SERVERS: servers, "subscribe": topic, "failOnDataLoss": "false", **given}


def rows_of(messages: DataFrame) -> DataFrame:
    """Return the rows in messages of the system topic, whose bodies are lines of JSON."""
    lines = messages.select(f.explode(f.split(f.col("value").cast("string"), "\n")).alias("line"))
    return lines.select(f.from_json("line", SCHEMA).alias("row")).where("row.ts is not null").select("row.*")

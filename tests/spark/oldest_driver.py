"""A driver for any supported PySpark: it reads, streams, writes and reports, and prints what came of it as JSON.

``python -m tests.spark.oldest_driver SERVERS FOLDER MESSAGES``; the topic ``t`` has so many messages.
"""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.errors import PySparkException
from pyspark.version import __version__

from metaq.spark.report.history import read_files
from metaq.spark.report.report import Job, report
from metaq.spark.session import session
from tests.spark.conftest import QUIET
from tests.spark.planted import plant
from tests.spark.topics import run_now, run_until

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

DEADLINE_S = 60.0


class Driver:
    """The steps over one session."""

    def __init__(self, spark: "SparkSession", servers: str, folder: Path) -> None:
        self.spark = spark
        self.servers = {"metaq.bootstrap.servers": servers}
        self.folder = folder

    def table(self, topic: str, **options: str) -> "DataFrame":
        return self.spark.read.format("metaq").options(**self.servers, subscribe=topic, **options).load()

    def write(self, count: int) -> None:
        rows = self.spark.range(count).selectExpr("string(id) key", "string(id) value", "'new' tag")
        rows.write.format("metaq").options(**self.servers, topic="t").mode("append").save()

    def filtered(self) -> int | str:
        """Return how many messages a pushed filter leaves, or why there can be none."""
        try:
            return self.table("t", filterPushdown="true").where("offset < 5").count()
        except PySparkException as error:
            return str(error)

    def copy(self, messages: int, **options: str) -> list[int]:
        """Stream t to copy until it has so many messages more; return how many each batch had."""
        frame = self.spark.readStream.format("metaq").options(**self.servers, subscribe="t", **options).load()
        writer = frame.select("key", "value").writeStream.format("metaq").options(**self.servers, topic="copy")
        writer = writer.option("checkpointLocation", str(self.folder / "checkpoint"))
        seen: list[int] = []

        def start() -> Any:
            return writer.start()

        def done() -> bool:
            progress = {
                one["batchId"]: one["numInputRows"] for query in self.spark.streams.active for one in query.recentProgress
            }
            seen[:] = [count for count in progress.values() if count]
            return sum(seen) >= messages

        if messages:
            run_until(start, done, f"{messages} messages are copied", DEADLINE_S)
        else:
            run_now(writer.trigger(availableNow=True).start)
        return seen

    def copied(self) -> list[str]:
        return sorted(row.value.decode() for row in self.table("copy").collect())


def main() -> None:
    servers, name, messages = sys.argv[1:]
    folder = Path(name)
    places = {"spark.sql.warehouse.dir": str(folder / "warehouse"), "spark.local.dir": str(folder / "local")}
    spark = session("oldest", master="local[2]", settings={**QUIET, **places})
    driver = Driver(spark, servers, folder)
    found: dict[str, Any] = {"version": __version__, "read": sorted(row.value.decode() for row in driver.table("t").collect())}
    found["columns"] = driver.table("t", includeHeaders="true", includeErrors="true").columns
    found["filtered"] = driver.filtered()
    driver.copy(0, startingOffsets="earliest")
    found["copied"] = driver.copied()
    driver.write(int(messages))
    found["batches"] = driver.copy(int(messages), minOffsetsPerTrigger="7", maxOffsetsPerTrigger="7", maxTriggerDelay="1s")
    found["copied later"] = driver.copied()
    history = read_files(spark, str(plant(folder)))
    found["findings"] = sorted(one.kind for one in report(history, Job(out=str(folder / "out"))))
    spark.stop()
    print(json.dumps(found))


if __name__ == "__main__":
    main()

"""A job that copies topic ``source`` to topic ``copy``: ``python -m tests.spark.dying REGISTRY CHECKPOINT MARK``.

While there is a file MARK, micro-batch 1 ends with SIGKILL of driver and JVM after it was written and before its commit.
"""

import os
import signal
import sys
from pathlib import Path

from pyspark.sql.datasource import WriterCommitMessage
from pyspark.sql.types import StructType

from metaq.spark.session import session
from metaq.spark.source import MetaqDataSource
from metaq.spark.writing.sink import StreamWriter
from tests.spark.conftest import QUIET

BATCH = 1
MESSAGES = 1000
"""In each micro-batch."""
TOO_LATE = "Timed out while waiting for the Python worker to connect back"
"""Spark gives a Python process 10 s to start, which is too little on a machine that does much else: then tests try again."""
TRIES = 5


class DyingWriter(StreamWriter):
    """Commits no batch ``BATCH`` while there is a mark. Spark takes the classes of a program by value, with these numbers."""

    mark = ""
    processes: tuple[int, ...] = ()

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        if batchId == BATCH and Path(self.mark).exists():
            Path(self.mark).unlink()
            for process in self.processes:
                os.kill(process, signal.SIGKILL)
        super().commit(messages, batchId)


class DyingSource(MetaqDataSource):
    """The data source, but for its commits."""

    @classmethod
    def name(cls) -> str:
        return "dying"

    def streamWriter(self, schema: StructType, overwrite: bool) -> DyingWriter:
        return DyingWriter(self.options, schema, overwrite)


def main(registry: str, checkpoint: str, mark: str) -> None:
    spark = session(master="local[2]", settings=QUIET)
    jvm = spark._jvm
    assert jvm is not None
    DyingWriter.mark = mark
    DyingWriter.processes = (jvm.java.lang.ProcessHandle.current().pid(), os.getpid())
    spark.dataSource.register(DyingSource)
    read = spark.readStream.format("metaq").option("metaq.bootstrap.servers", registry).option("subscribe", "source")
    messages = read.option("startingOffsets", "earliest").option("maxOffsetsPerTrigger", MESSAGES).load()
    write = messages.select("key", "value").writeStream.format("dying").option("metaq.bootstrap.servers", registry)
    query = write.option("topic", "copy").option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
    query.awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])

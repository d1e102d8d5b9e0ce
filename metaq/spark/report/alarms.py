"""The offset report kept current: a stream of the history, and a message for each finding that comes or goes.

``metaq offsets report --follow`` starts it as a process of its own, ``python -m metaq.spark.report.alarms JOB``, with the
fields of ``Watch`` as one JSON document. In the report's folder it keeps, beside the files of a report::

    history/0000000017-1769860800000.parquet    rows of one batch: its number, and the time of its newest sample
    checkpoint/                                 how far the stream is
    alarms.json                                 {"stuck/billing/orders/": {…the finding, as it was raised}}

An alarm is a message whose key names the finding, whose tag is ``raised`` or ``ended``, and whose body is the finding as JSON.
It is sent before ``alarms.json`` records it, so a restart in between sends it again, with the same key: at least once.
"""

import json
import logging
import shutil
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from metaq.client import Producer, connect
from metaq.errors import MetaqError
from metaq.spark.login import NOBODY, Login, from_environment
from metaq.spark.report.report import SETTINGS, TOLD, Job, check_topics, line_of, replace_text, report
from metaq.spark.session import session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from metaq.spark.report.findings import OffsetFinding

logger = logging.getLogger(__name__)

RAISED: Final = "raised"
ENDED: Final = "ended"
_ALARMS: Final = "alarms.json"
_HISTORY: Final = "history"
_CHECKPOINT: Final = "checkpoint"
_GROUP: Final = "METAQ_ALARMS"


class Watch(NamedTuple):
    """The history to follow, and where its alarms go."""

    out: str
    """The report's folder."""
    servers: str
    """Addresses, as in the option ``metaq.bootstrap.servers``."""
    topic: str
    """The topic of the history."""
    alarms: str | None = None
    """The topic that alarms go to; ``None`` to keep only the report current."""
    every_s: float = 300.0
    keep_hours: float = 24.0
    """How much of the history the report covers, up to its newest sample."""
    pictures: bool = False
    stuck_samples: int = 10
    risk_hours: float = 24.0
    user: str = ""
    """The user at the brokers; the password is in METAQ_PASSWORD."""
    tls_ca: str = ""

    @property
    def job(self) -> Job:
        """The settings of the report."""
        return Job(out=self.out, pictures=self.pictures, stuck_samples=self.stuck_samples, risk_hours=self.risk_hours)


def follow(spark: "SparkSession", watch: Watch, producer: Producer, login: Login = NOBODY) -> "StreamingQuery":
    """Start the stream: every ``every_s`` seconds new rows go into the report, and its alarms to ``producer``."""
    from metaq.spark.report.history import follow_topic  # noqa: PLC0415 - needs pyspark

    out = Path(watch.out)
    out.mkdir(parents=True, exist_ok=True)

    def take(batch: "DataFrame", number: int) -> None:
        keep(batch, number, watch)
        raise_alarms(watch, report_kept(spark, watch), producer)

    writer = follow_topic(spark, watch.servers, watch.topic, login).writeStream.foreachBatch(take)
    writer = writer.option("checkpointLocation", str(out / _CHECKPOINT)).queryName("metaq-offset-report")
    return writer.trigger(processingTime=f"{watch.every_s} seconds").start()


def keep(batch: "DataFrame", number: int, watch: Watch) -> None:
    """Add a batch to the kept history, in place of itself when it comes again, and remove batches that are too old."""
    from pyspark.sql import functions as f  # noqa: PLC0415

    folder = Path(watch.out) / _HISTORY
    batch.persist()
    (newest,) = batch.agg(f.unix_millis(f.max("ts"))).collect()[0]
    if newest is not None:
        batch.coalesce(1).write.mode("overwrite").parquet(str(folder / f"{number:010}-{newest}.parquet"))
    batch.unpersist()
    kept = {path: int(path.stem.rpartition("-")[2]) for path in folder.glob("*-*.parquet")}
    since = max(kept.values(), default=0) - timedelta(hours=watch.keep_hours) / timedelta(milliseconds=1)
    for path, newest_ms in kept.items():
        if newest_ms < since:
            shutil.rmtree(path)


def report_kept(spark: "SparkSession", watch: Watch) -> "list[OffsetFinding]":
    """Write the report on the kept history and return its findings; an empty list while there is no history."""
    from metaq.spark.report.history import read_files  # noqa: PLC0415

    folder = Path(watch.out) / _HISTORY
    return report(read_files(spark, str(folder)), watch.job) if any(folder.glob("*.parquet")) else []


def raise_alarms(watch: Watch, findings: "list[OffsetFinding]", producer: Producer) -> None:
    """Send an alarm for each finding that has come or gone since the last time."""
    place = Path(watch.out) / _ALARMS
    before: dict[str, Any] = json.loads(place.read_bytes()) if place.exists() else {}
    now = {finding.key: finding for finding in findings}
    after = {key: before[key] if key in before else json.loads(line_of(finding)) for key, finding in now.items()}
    changes = [(RAISED, key, after[key]) for key in now if key not in before]
    changes += [(ENDED, key, finding) for key, finding in before.items() if key not in now]
    for tag, key, finding in changes:
        logger.warning("alarm state=%s key=%s", tag, key)
        if watch.alarms is not None:
            body = json.dumps({"state": tag, **finding}, ensure_ascii=False).encode()
            producer.send(watch.alarms, body, tag=tag, keys=key)
    replace_text(place, json.dumps(after, ensure_ascii=False, indent=1))


def main(document: str) -> int:
    """Follow until the process is ended, or the stream fails. Return the exit code."""
    watch = Watch(**json.loads(document))
    logging.basicConfig(format="%(asctime)s %(message)s", stream=sys.stderr)
    try:
        login = from_environment(watch.user, watch.tls_ca)
        with connect(watch.servers, **login.for_client()) as client:
            check_topics(client, watch.topic, *([watch.alarms] if watch.alarms is not None else []))
            spark = session("metaq offset alarms", settings=SETTINGS)
            follow(spark, watch, client.producer(_GROUP), login).awaitTermination()
    except MetaqError as error:
        print(error, file=sys.stderr)
        return TOLD
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

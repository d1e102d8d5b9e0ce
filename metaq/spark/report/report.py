"""The Spark job that makes the offset report: from a history of offsets to a page, tables and pictures.

``metaq offsets report`` starts it as a process of its own, ``python -m metaq.spark.report.report JOB``, with the fields of
``Job`` as one JSON document. It prints the findings as lines of JSON and ends with exit code 0; for an error it prints one line
to standard error and ends with ``TOLD``. Meanwhile it says there how far it is: ``step 3 of 9``.
"""

import json
import os
import sys
from collections.abc import Callable
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from metaq.client import Client, connect
from metaq.errors import ConfigError, MetaqError
from metaq.spark.login import from_environment
from metaq.spark.session import session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from metaq.spark.report.findings import Limits, OffsetFinding
    from metaq.spark.report.tables import Sampling

PAGE: Final = "report.html"
TOLD: Final = 2
"""Exit code; a stack trace ends with 1."""
STEPS: Final = 9
"""What a job is done in: Spark is there, the times are known, each table is written, the page is."""
SETTINGS: Final = {
    "spark.ui.enabled": "false",
    "spark.log.level": "ERROR",
    # shuffles are small: 200 partitions, the default, take longer to start than to run
    "spark.sql.shuffle.partitions": "16",
}


class Job(NamedTuple):
    """The history to read, and the report to make of it."""

    out: str
    """A folder, made when it does not exist; files of an earlier report in it are replaced."""
    history: str | None = None
    """A file or folder; without it the history is in ``topic`` on the brokers at ``servers``."""
    topic: str | None = None
    servers: str | None = None
    pictures: bool = False
    stuck_samples: int = 10
    risk_hours: float = 24.0
    user: str = ""
    """The user at the brokers; the password is in METAQ_PASSWORD."""
    tls_ca: str = ""


def report(history: "DataFrame", job: Job, stepped: Callable[[], None] = lambda: None) -> "list[OffsetFinding]":
    """Write the page, the tables and the pictures. Return the findings. Call ``stepped`` after each step.

    ``ConfigError`` when the history has no sample, or matplotlib is wanted and missing.
    """
    # they need pyspark and pyarrow: `session` has a readable error when those are missing
    from metaq.spark.report.contents import Shelf, gather  # noqa: PLC0415
    from metaq.spark.report.page import write_page  # noqa: PLC0415
    from metaq.spark.report.tables import sample_times, write_tables  # noqa: PLC0415

    draw = _pictures() if job.pictures else None
    out = Path(job.out)
    out.mkdir(parents=True, exist_ok=True)
    sampling = sample_times(history)
    stepped()
    write_tables(history, sampling, out, stepped)
    contents = gather(Shelf(out), sampling, limits_of(job, sampling))
    write_findings(contents.findings, out)
    if draw is not None:
        draw(contents, out)
    replace_text(out / PAGE, write_page(contents))
    stepped()
    return contents.findings


def replace_text(path: Path, text: str) -> None:
    """Replace a file in one step: readers see the old text or the new one."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(text, "utf-8")
    os.replace(new, path)


def limits_of(job: Job, sampling: "Sampling") -> "Limits":
    """Return the job's limits in seconds."""
    from metaq.spark.report.findings import Limits  # noqa: PLC0415

    return Limits(still_s=job.stuck_samples * sampling.interval_s, risk_s=job.risk_hours * 3600)


def write_findings(findings: "list[OffsetFinding]", out: Path) -> None:
    """Write the findings to ``findings.parquet``."""
    import pyarrow as pa  # noqa: PLC0415
    import pyarrow.parquet as pq  # noqa: PLC0415

    text, time, number, whole = pa.string(), pa.timestamp("us", "UTC"), pa.float64(), pa.int64()
    kinds = [text, text, text, text, pa.list_(text), text, text, time, whole, number, number]
    names = ["severity", "kind", "group", "topic", "partitions", "sentence", "advice", "since", "lag", "left_s", "share"]
    rows = pa.Table.from_pylist([finding._asdict() for finding in findings], pa.schema(zip(names, kinds, strict=True)))
    pq.write_table(rows, out / "findings.parquet")


def _pictures() -> "Any":
    try:
        from metaq.spark.report.pictures import draw_pictures  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError("pictures need matplotlib; pip install 'metaq-broker[report]'") from error
    return draw_pictures


def history_of(spark: "SparkSession", job: Job) -> "DataFrame":
    """Return the rows that the job names."""
    from metaq.spark.report.history import read_files, read_topic  # noqa: PLC0415

    if job.history is not None:
        return read_files(spark, job.history)
    assert job.topic is not None
    assert job.servers is not None
    login = from_environment(job.user, job.tls_ca)
    with connect(job.servers, **login.for_client()) as client:
        check_topics(client, job.topic)
    # the report reads it five times: it is fetched and parsed once
    return read_topic(spark, job.servers, job.topic, login).persist()


def check_topics(client: Client, *topics: str) -> None:
    """Raise the error of a registry or topic before Spark does: here it is one line."""
    for topic in topics:
        client.admin().queues(topic)


def line_of(finding: "OffsetFinding") -> str:
    """Return a finding as a line of JSON."""
    return json.dumps(finding._asdict(), ensure_ascii=False, default=_iso)


def _iso(value: datetime) -> str:
    return value.isoformat()


def main(document: str) -> int:
    """Run one job. Return the exit code."""
    job = Job(**json.loads(document))
    steps = count(1)

    def stepped() -> None:
        print(f"step {next(steps)} of {STEPS}", file=sys.stderr, flush=True)

    try:
        spark = session("metaq offset report", settings=SETTINGS)
        stepped()
        try:
            for finding in report(history_of(spark, job), job, stepped):
                print(line_of(finding))
        finally:
            spark.stop()  # before the error is printed: a thread of Spark that exit interrupts would print after it
    except MetaqError as error:
        print(error, file=sys.stderr)
        return TOLD
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

"""The offset report on a history with four planted problems: it names exactly these, and a browser shows the page."""

import html
import json
import os
import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow.json as pj
import pyarrow.parquet as pq
import pytest
from PIL import Image
from pyspark.sql import functions as f

from metaq.errors import ConfigError
from metaq.protocol.remoting.offsetrows import OffsetRow, encode_row
from metaq.spark.report.history import SCHEMA, read_files
from metaq.spark.report.report import PAGE, Job, report
from tests.spark.planted import END, RISK_S, STUCK_S, UNOWNED_S, plant, planted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from metaq.spark.report.findings import OffsetFinding

pytestmark = [pytest.mark.slow, pytest.mark.partner("java"), pytest.mark.timeout(900)]

WAIT_S: Final = 600.0
MOST_PAGE_BYTES: Final = 2_000_000
TABLES: Final = {"series", "over_time", "partitions", "groups", "members", "topics", "findings"}
PLANTED: Final = {
    ("retention", "archive", "audit", ("east/0", "east/1", "east/2", "east/3")),
    ("unowned", "mailer", "parcels", ("east/4",)),
    ("stuck", "billing", "orders", ("east/3",)),
    ("skew", None, "clicks", ("east/5",)),
}


class Made:
    """A report in a folder."""

    def __init__(self, folder: Path, findings: "list[OffsetFinding]") -> None:
        self.folder = folder
        self.findings = {one.kind: one for one in findings}
        self.named = {(one.kind, one.group, one.topic, tuple(one.partitions)) for one in findings}
        self.page = (folder / PAGE).read_text("utf-8")


@pytest.fixture(scope="module")
def made(spark: "SparkSession", tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("report")
    history = read_files(spark, str(plant(folder)))
    return Made(folder / "out", report(history, Job(out=str(folder / "out"), pictures=True)))


def test_the_four_planted_troubles_are_named_and_no_other(made: Made) -> None:
    """P18: a stuck partition, one without owner, a skewed topic, a group that loses data in two hours."""
    assert made.named == PLANTED
    assert made.findings["retention"].left_s == pytest.approx(RISK_S, rel=0.02)
    assert made.findings["stuck"].since == END - timedelta(seconds=STUCK_S)
    assert made.findings["unowned"].since == END - timedelta(seconds=UNOWNED_S)
    assert made.findings["skew"].share == pytest.approx(130 / 217, abs=0.01)
    assert {kind: one.severity for kind, one in made.findings.items()} == {
        "retention": "problem", "unowned": "problem", "stuck": "problem", "skew": "warning",
    }  # fmt: skip
    assert "billing-0 owns it" in made.findings["stuck"].sentence


def test_the_tables_are_there_for_others(made: Made) -> None:
    """P18: as Parquet with times in UTC; lags and rates are those of the history."""
    assert {path.stem for path in made.folder.glob("*.parquet")} == TABLES
    partitions = {
        (row["group"], row["partition"]): row for row in pq.read_table(made.folder / "partitions.parquet").to_pylist()
    }
    last = [row for row in planted().to_pylist() if row["ts"] == END]
    assert len(partitions) == len(last)
    for row in last:
        found = partitions[row["group"], row["partition"]]
        assert (found["ts"], found["owner"]) == (END, row["owner"])
        assert (found["consumed"], found["lag"]) == (row["consumed"], row["maximum"] - row["consumed"])
    groups = {row["group"]: row for row in pq.read_table(made.folder / "groups.parquet").to_pylist()}
    assert groups["archive"]["consumed_per_s"] == pytest.approx(10, rel=0.05)
    assert groups["archive"]["produced_per_s"] == pytest.approx(20, rel=0.05)
    assert groups["archive"]["drain_s"] is None
    assert groups["sleeper"]["drain_s"] == 0
    assert groups["billing"]["gini"] > 0.8
    assert {row["sentence"] for row in pq.read_table(made.folder / "findings.parquet").to_pylist()} == {
        one.sentence for one in made.findings.values()
    }


def test_the_pictures_show_something(made: Made) -> None:
    """P18: one for each chart."""
    pictures = list((made.folder / "pictures").iterdir())
    names = {path.stem for path in pictures}
    assert names >= {"lag", "behind", "retention", "skew-clicks", "rates-archive-audit", "waiting-billing-orders"}
    for path in pictures:
        assert colours(path) > 10, path.name


def colours(picture: Path) -> int:
    """How many different ones."""
    with Image.open(picture) as image:
        return len(image.convert("RGB").getcolors(1 << 24) or ())


def browse(folder: Path, *flags: str) -> "subprocess.CompletedProcess[str]":
    """The page in a browser without window."""
    # it runs as root here and there, where its sandbox refuses to
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr"]
    command += [f"--user-data-dir={folder / 'browser'}", "--window-size=1240,3900", *flags, (folder / PAGE).as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=True)


@pytest.mark.partner("chromium", "fonts")
def test_a_browser_shows_the_page(made: Made) -> None:
    """P18: its sentences, its charts and what its script adds; nothing from elsewhere, and no error."""
    seen = browse(made.folder, "--dump-dom")
    assert "Uncaught" not in seen.stderr
    text = html.unescape(re.sub(r"<[^>]+>", " ", seen.stdout.partition("<body>")[2]))
    for one in made.findings.values():
        assert one.sentence in text
        assert one.advice in text
    for group in ("archive", "mailer", "billing", "analytics", "shipping", "probe", "ledger", "sleeper"):
        assert group in text
    assert seen.stdout.count('class="cross"') == len(re.findall("<svg [^>]*data-chart", made.page)) > 5
    assert len(made.page.encode()) < MOST_PAGE_BYTES
    outside = set(re.findall(r"\w+://[^\s\"'<]+|(?:src|href)=", made.page))
    assert outside == {"http://www.w3.org/2000/svg"}


@pytest.mark.partner("chromium", "fonts")
def test_a_browser_draws_the_page(made: Made, tmp_path: Path) -> None:
    """P18: light and dark, from top to bottom."""
    brightness = []
    for mode in ("light", "dark"):
        picture = tmp_path / f"{mode}.png"
        scheme = ["--blink-settings=preferredColorScheme=0"] if mode == "dark" else []
        browse(made.folder, f"--screenshot={picture}", *scheme)
        assert colours(picture) > 200
        with Image.open(picture) as image:
            grey = np.asarray(image.convert("L"), dtype=float)
        brightness.append(float(np.median(grey)))
        for top in range(0, 3600, 400):
            assert np.ptp(grey[top : top + 400]) > 60, f"nothing to see at {top}"
    light, dark = brightness
    assert light > 180
    assert dark < 80


def is_healthy() -> str:
    return "not (`group` in ('archive', 'analytics') or (`group`, partition) in (('billing', 3), ('mailer', 4)))"


def test_healthy_groups_have_no_findings(spark: "SparkSession", tmp_path: Path) -> None:
    """P18: noise is none; and names are text on the page, whatever a group calls itself."""
    name = "<img src=x onerror=alert(1)>'"
    history = read_files(spark, str(plant(tmp_path, minutes=200, seed=2))).where(is_healthy())
    named = history.withColumn("group", f.when(f.col("group") == "ledger", f.lit(name)).otherwise(f.col("group")))
    made = Made(tmp_path / "out", report(named, Job(out=str(tmp_path / "out"))))
    assert made.named == set()
    assert "nothing is at risk" in made.page
    assert "<img" not in made.page
    assert html.escape(name) in made.page
    assert not (tmp_path / "out" / "pictures").exists()


def test_rows_may_come_twice_and_brokers_fall_silent(spark: "SparkSession", tmp_path: Path) -> None:
    """P18: repeated rows change nothing; what a broker did not export is a gap, and no finding of its groups."""
    rows = read_files(spark, str(plant(tmp_path, minutes=60)))
    silent = rows.where(f.col("ts") <= f.lit(END - timedelta(minutes=30))).withColumn("broker", f.lit("west"))
    made = Made(tmp_path / "out", report(rows.union(rows).union(silent), Job(out=str(tmp_path / "out"), risk_hours=3.0)))
    assert {named[:3] for named in made.named} == {named[:3] for named in PLANTED} | {("gap", None, None)}
    assert made.findings["gap"].sentence == "west exported no offsets from 17:30 to 18:00 (30 min)."
    assert made.findings["retention"].lag == pytest.approx(360_000, rel=0.05)


def json_lines(folder: Path) -> Path:
    """The planted history as ``metaq offsets export`` writes it."""
    path = folder / "history.jsonl"
    rows = planted(minutes=60).to_pylist()
    path.write_text("".join(json.dumps(row, default=lambda at: at.isoformat()) + "\n" for row in rows), "utf-8")
    assert pj.read_json(path).num_rows == len(rows)
    return path


def test_json_lines_are_the_same_history(spark: "SparkSession", tmp_path: Path) -> None:
    """P18."""

    def rows(frame: "DataFrame") -> set[tuple[object, ...]]:
        return {tuple(row) for row in frame.collect()}

    assert rows(read_files(spark, str(json_lines(tmp_path)))) == rows(read_files(spark, str(plant(tmp_path, minutes=60))))


def leased(minute: int, partition: int, finished: int, delayed: int) -> OffsetRow:
    """A group in a partition from which it leases messages: its offset stands still, and 10 messages come each minute."""
    at_ms, most = int(END.timestamp() * 1000) - (60 - minute) * 60_000, 1000 + 10 * minute
    times = (at_ms - 3_600_000, at_ms - 7_200_000, at_ms)
    row = OffsetRow(at_ms, "east", "workers", "remoting", "tasks", partition, 500, 0, most, *times, None, 259_200_000)
    return row._replace(lag=most - finished, in_flight=3, delayed=delayed)


def test_groups_that_lease_messages(spark: "SparkSession", tmp_path: Path) -> None:
    """MY-033: the lag is what they have not finished, and they move while they finish some, whatever their offset is."""
    rows = [leased(minute, 0, 900 + 10 * minute, 1) for minute in range(61)]  # keeps up, with one message delayed
    rows += [leased(minute, 1, 900, 0) for minute in range(61)]  # finishes none
    rows += [leased(minute, 2, 999 + 10 * minute, 1) for minute in range(61)]  # all but one, which is delayed
    path = tmp_path / "leases.jsonl"
    path.write_bytes(b"".join(encode_row(row) + b"\n" for row in rows))
    made = Made(tmp_path / "out", report(read_files(spark, str(path)), Job(out=str(tmp_path / "out"))))
    assert made.named == {("stuck", "workers", "tasks", ("east/1",))}
    found = sorted(pq.read_table(tmp_path / "out" / "partitions.parquet").to_pylist(), key=lambda row: row["partition"])
    assert [row["lag"] for row in found] == [100, 700, 1]
    assert [row["consumed_per_s"] for row in found] == pytest.approx([10 / 60, 0, 10 / 60])
    (group,) = pq.read_table(tmp_path / "out" / "groups.parquet").to_pylist()
    assert [group[name] for name in ("lag", "in_flight", "delayed")] == [801, 9, 2]


def test_partitions_without_a_known_lag(spark: "SparkSession", tmp_path: Path) -> None:
    """P18: a group whose offsets are known in some partitions only has its lag unevenly in these."""
    rows = [leased(minute, partition, 900, 0) for minute in range(61) for partition in range(4)]
    unknown = {"consumed": None, "consumed_ts": None, "lag": None, "in_flight": None, "delayed": None}
    rows = [row._replace(**unknown if row.partition < 2 else {"lag": 100 * row.partition - 100}) for row in rows]
    path = tmp_path / "unknown.jsonl"
    path.write_bytes(b"".join(encode_row(row) + b"\n" for row in rows))
    report(read_files(spark, str(path)), Job(out=str(tmp_path / "out")))
    (group,) = pq.read_table(tmp_path / "out" / "groups.parquet").to_pylist()
    assert (group["partitions"], group["lag"]) == (4, 300)
    assert group["gini"] == pytest.approx((200 - 100) / (2 * 300)), "of 100 and 200"


def test_a_minute_with_a_sample_a_second(spark: "SparkSession", tmp_path: Path) -> None:
    """19.1: is drawn as finely as it was sampled; and a topic without a group is on the page, but not among the groups."""
    rows = [leased(60, 0, 900 + second, 0)._replace(ts=int(END.timestamp() * 1000) + 1003 * second) for second in range(61)]
    bare = [
        row._replace(
            group="", kind="topic", topic="unread <1>", consumed=None, maximum=1000 + 5 * second, lag=None, delayed=None
        )
        for second, row in enumerate(rows)
    ]
    path = tmp_path / "minute.jsonl"
    path.write_bytes(b"".join(encode_row(row) + b"\n" for row in rows + bare))
    made = Made(tmp_path / "out", report(read_files(spark, str(path)), Job(out=str(tmp_path / "out"))))
    over_time = pq.read_table(tmp_path / "out" / "over_time.parquet").to_pylist()
    for group in ("workers", ""):
        assert len([row for row in over_time if row["group"] == group]) >= 60
    (line,) = re.findall(r'<path class="line s0" d="([^"]+)"', made.page.partition("Messages that wait</h2>")[2])[:1]
    assert len(re.findall("[ML]", line)) >= 60
    assert not made.named
    section = made.page.partition("Topics without a group")[2].partition("</section>")[0]
    assert "unread &lt;1&gt;" in section and "<td>1,300</td>" in section and "<td>4.99/s</td>" in section
    assert "workers" not in section and made.page.count("unread &lt;1&gt;") == 1
    assert "<b>1</b><span>groups; 2 topics, 2 partitions" in made.page


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, r"there is no history at .*none"),
        ("not Parquet", "is neither Parquet nor JSON lines"),
        ("parquet", "is not a history of offsets: it has no column ts, broker, group"),
    ],
)
def test_what_is_no_history(spark: "SparkSession", tmp_path: Path, content: str | None, problem: str) -> None:
    """P18: told at once, with the name of the file."""
    path = tmp_path / "none"
    if content == "parquet":
        spark.range(3).write.parquet(str(path))
    elif content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=problem):
        read_files(spark, str(path))


def test_an_empty_history(spark: "SparkSession", tmp_path: Path) -> None:
    """P18."""
    with pytest.raises(ConfigError, match="the history has no sample"):
        report(spark.createDataFrame([], SCHEMA), Job(out=str(tmp_path)))


# -- the command ------------------------------------------------------------------------------------------------------


def run(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "metaq", "offsets", "report", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=WAIT_S, check=False,
        env={**os.environ, "SPARK_LOCAL_IP": "127.0.0.1", **environment},
    )  # fmt: skip


def test_the_command_writes_a_report(tmp_path: Path) -> None:
    """P18: in a Spark of its own, and prints the findings."""
    history, out = json_lines(tmp_path), tmp_path / "out"
    done = run("--history", str(history), "--out", str(out), "--json")
    assert (done.returncode, done.stderr) == (0, f"wrote {out / PAGE}\n")
    assert {json.loads(line)["kind"] for line in done.stdout.splitlines()} == {named[0] for named in PLANTED}
    assert (out / PAGE).is_file()


def test_the_command_says_what_is_missing(tmp_path: Path) -> None:
    """P18: no Java, no pictures' library, options that contradict each other: a line each, not a trace."""
    history = plant(tmp_path, minutes=5)
    here = ("--history", str(history), "--out", str(tmp_path / "out"))
    without = run(*here, PATH=str(tmp_path), JAVA_HOME=str(tmp_path))
    assert without.returncode == 1
    assert without.stderr.startswith("metaq: Spark needs Java 17 or newer")
    assert without.stderr.count("\n") == 1
    for flags in (("--alarms", "alarms"), ("--follow",)):
        wrong = run(*here, *flags)
        assert wrong.returncode == 2
        assert "--follow" in wrong.stderr

"""The report's charts as files, whatever groups and topics are called."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from metaq.spark.report.charts import Bar, Bars, Heat, Line, LineChart
from metaq.spark.report.contents import Contents
from metaq.spark.report.pictures import draw_pictures
from metaq.spark.report.tables import Sampling

LAST = datetime(2026, 3, 14, 18, 0, tzinfo=UTC)
TIMES = [LAST.timestamp() - 60, LAST.timestamp()]


def lines(*names: str, title: str = "lines") -> LineChart:
    return LineChart(title, "", TIMES, [Line(name, [1.0, 2.0], 0) for name in names], str)


def contents(*groups: str) -> Contents:
    """Return a page about groups of the topic t, each with all charts that it can have."""
    titles = [f"{group} · t" for group in groups]
    return Contents(
        sampling=Sampling(LAST - timedelta(minutes=1), LAST, 60.0, 60, []),
        findings=[],
        groups=[],
        unread=[],
        counts={},
        waiting=0,
        sent_per_s=0.0,
        lag=lines(*titles),
        age=lines(*titles),
        rates=[lines("sent", "consumed", title=title) for title in titles],
        heats=[Heat(title, "", TIMES, [f"{title} / 0"], [[1.0, None]], str) for title in titles],
        skew=[],
        retention=Bars("Retention used", "", [Bar(title, 0.5, "50 %") for title in titles], whole=1.0),
    )


def test_each_chart_has_a_file_of_its_own(tmp_path: Path) -> None:
    """P18: though names are long, or differ only in what a file name cannot have."""
    groups = ["g" * 250, "g" * 249 + "h", "é" * 120, "a/b", "a b"]
    written = draw_pictures(contents(*groups), tmp_path)
    assert sorted(written) == sorted((tmp_path / "pictures").iterdir())
    assert len(written) == 3 + 2 * len(groups)
    assert {"lag.png", "behind.png", "retention.png", "rates-a-b-t.png"} < {path.name for path in written}
    assert max(len(path.name.encode()) for path in written) < 100


@pytest.mark.parametrize("name", ["$\\x$", "$", "a_b^c", "<b>"])
def test_names_in_pictures_are_text(tmp_path: Path, name: str) -> None:
    """P18: whatever a group calls itself."""
    assert len(draw_pictures(contents(name), tmp_path)) == 5

"""The contents of the report's page: a few hundred rows of its tables, and the charts made of them."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow.compute as pc
import pyarrow.parquet as pq

from metaq.spark.report.charts import COLOURS, Bar, Bars, Heat, Line, LineChart
from metaq.spark.report.findings import (
    BEHIND_S,
    LOST,
    RETENTION,
    SKEW,
    SKEW_GINI,
    SKEW_MESSAGES,
    SKEW_PARTITIONS,
    SKEW_RATIO,
    Limits,
    OffsetFinding,
    Row,
    find,
)
from metaq.spark.report.tables import Sampling
from metaq.spark.report.wording import count, duration, percent, rate, short_count

TOPIC: Final = "topic"
"""The kind of rows about topics without a group."""
MOST_FOUND: Final = 10_000
"""Partitions that findings are made of: the worst ones."""
MOST_GROUPS: Final = 60
"""Rows in the table of groups: those with findings first, then those with the largest lag."""
MOST_LINES: Final = 20
"""Lines in a chart; those of groups without findings are grey."""
MOST_RATES: Final = 6
MOST_HEATS: Final = 4
MOST_ROWS: Final = 64
"""Partitions in a heat map: those with the largest lag."""
MOST_SKEWED: Final = 3
MOST_BARS: Final = 24
COLOURED: Final = COLOURS - 1
"""Groups that have a colour of their own; the last colour is for all others."""
WELL: Final = 3
"""Groups that are coloured when there are no findings."""

_KINDS: Final = ("remoting", "zookeeper", "observed")
"""The last ones come and go: anybody who reads over the text protocol is such a group for a day."""
Pair = tuple[str, str]
"""The name of a group, as the page shows it, and a topic."""


class GroupRow(NamedTuple):
    """A row of the table of groups."""

    row: Row
    lags: Sequence[float | None]
    """The lag at each of the report's times."""
    colour: int | None
    """The group's colour in every chart."""
    findings: list[OffsetFinding]


class UnreadRow(NamedTuple):
    """A row of the table of topics without a group."""

    row: Row
    sent_per_s: Sequence[float | None]
    """How much was sent at each of the report's times."""


class Contents(NamedTuple):
    """All that a reader sees."""

    sampling: Sampling
    findings: list[OffsetFinding]
    groups: list[GroupRow]
    unread: list[UnreadRow]
    """Topics without a group, those with most messages a second first."""
    counts: Mapping[str, int]
    """How many ``groups``, ``topics``, topics without a group (``unread``), ``partitions`` and groups of topics (``pairs``)
    there are."""
    waiting: int
    """The lag in messages, over all groups."""
    sent_per_s: float
    lag: LineChart
    age: LineChart
    rates: list[LineChart]
    heats: list[Heat]
    skew: list[Bars]
    retention: Bars | None


class Shelf:
    """The written tables. Rows are mappings, times in UTC.

    Rows about groups also have a ``name``: that of the group, and, when groups of several kinds with this name read the topic,
    the kind of all but the first of ``_KINDS``.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._kinds: dict[tuple[str, str], list[str]] = {}
        """The kinds of group and topic."""
        for row in pq.read_table(folder / "groups.parquet", columns=["group", "kind", "topic"]).to_pylist():
            self._kinds.setdefault((row["group"], row["topic"]), []).append(row["kind"])

    def rows(
        self,
        name: str,
        where: pc.Expression | None = None,
        *,
        columns: list[str] | None = None,
        order: Sequence[str] = (),
        most: int | None = None,
    ) -> list[dict[str, Any]]:
        """Return at most ``most`` rows of a table, sorted by the columns in ``order``; a - before a name means descending."""
        table = pq.read_table(self._folder / f"{name}.parquet", filters=where, columns=columns)
        if order:
            table = table.sort_by([(key.removeprefix("-"), "descending" if key[0] == "-" else "ascending") for key in order])
        return [self._named(row) for row in table.slice(0, most).to_pylist()]

    def about(self, pairs: Collection[Pair]) -> pc.Expression:
        """Return the condition for rows about one of these groups and topics."""
        topics: dict[tuple[str, str], set[str]] = {}
        for (group, topic), kinds in self._kinds.items():
            for kind in kinds:
                if (_name(group, kind, kinds), topic) in pairs:
                    topics.setdefault((group, kind), set()).add(topic)
        conditions = (
            (_f("group") == group) & (_f("kind") == kind) & _f("topic").isin(sorted(found))
            for (group, kind), found in topics.items()
        )
        return reduce(or_, conditions, pc.scalar(value=False))

    def _named(self, row: dict[str, Any]) -> dict[str, Any]:
        if "group" not in row:
            return row
        kinds = self._kinds.get((row["group"], row["topic"]), [row["kind"]])
        return {**row, "name": _name(row["group"], row["kind"], kinds)}


def _name(group: str, kind: str, kinds: Collection[str]) -> str:
    """Return the name of a group; that of a passing reader does not change the name of the group whose name it took."""
    return group if len(kinds) == 1 or kind == min(kinds, key=_KINDS.index) else f"{group} ({kind})"


def find_all(shelf: Shelf, sampling: Sampling, limits: Limits) -> list[OffsetFinding]:
    """Return the findings in the tables."""
    worst = shelf.rows("partitions", _noteworthy(limits), order=["-lost", "-lag"], most=MOST_FOUND)
    pairs = shelf.rows("groups", shelf.about({_pair(row) for row in worst}))
    skewed = shelf.rows("topics", _SKEWED, order=["topic", "-messages"], most=MOST_FOUND)
    return find(worst, pairs, skewed, sampling.gaps, limits, sampling.last)


def _noteworthy(limits: Limits) -> pc.Expression:
    """Return the condition for partitions that `find` may report; it leaves out nearly all others."""
    still = (_f("waiting_s") >= limits.still_s) | (_f("unowned_s") >= limits.still_s)
    waits = (_f("lag") > 0) & (still | (_f("lag_s") >= BEHIND_S))
    return (_f("lost") > 0) | (_f("runway_s") <= limits.risk_s) | waits


_f: Final = pc.field
_SKEWED: Final = (
    (_f("gini") >= SKEW_GINI)
    & (_f("largest") >= _f("median") * SKEW_RATIO)
    & (_f("size") >= SKEW_PARTITIONS)
    & (_f("total") >= SKEW_MESSAGES)
    & (_f("messages") == _f("largest"))
)


def gather(shelf: Shelf, sampling: Sampling, limits: Limits) -> Contents:
    """Choose what the page shows."""
    findings = find_all(shelf, sampling, limits)
    troubled = list(dict.fromkeys((one.group, one.topic) for one in findings if one.group and one.topic))
    groups = shelf.rows("groups", _f("kind") != TOPIC, order=["-lag", "group", "topic"])
    unread = shelf.rows("groups", _f("kind") == TOPIC, order=["-produced_per_s", "topic"])
    by_pair = {_pair(row): row for row in groups}
    shown = list(dict.fromkeys([*troubled, *by_pair]))[:MOST_GROUPS]
    colours = {pair: number for number, pair in enumerate(troubled[:COLOURED] if troubled else shown[:WELL])}
    wanted = [*shown, *map(_pair, unread[:MOST_GROUPS])]
    grid = _Grid(shelf.rows("over_time", shelf.about(wanted), order=["at"]), colours)
    sent = shelf.rows("partitions", columns=["topic", "broker", "partition", "produced_per_s"])
    partitions = {_place(row): row["produced_per_s"] or 0.0 for row in sent}
    return Contents(
        sampling=sampling,
        findings=findings,
        groups=[_group_row(by_pair[pair], grid, colours.get(pair), findings) for pair in shown],
        unread=[UnreadRow(row, grid.values(_pair(row), "produced_per_s")) for row in unread[:MOST_GROUPS]],
        counts={
            "unread": len(unread),
            "groups": len({row["group"] for row in groups}),
            "pairs": len(by_pair),
            "topics": len({topic for topic, _, _ in partitions}),
            "partitions": len(partitions),
        },
        waiting=sum(row["lag"] or 0 for row in groups),
        sent_per_s=sum(partitions.values()),
        lag=grid.lines("Messages that wait", "By group and topic.", "lag", shown, short_count),
        age=grid.lines(
            "How far behind", "The age of the next message of each group, in its slowest partition.", "lag_s", shown, duration
        ),
        rates=[grid.rates(pair) for pair in shown[:MOST_RATES]],
        heats=[_heat(shelf, pair, grid.times) for pair in (troubled or shown[:1])[:MOST_HEATS]],
        skew=[_skew(shelf, one.topic) for one in findings if one.kind == SKEW and one.topic][:MOST_SKEWED],
        retention=_retention(groups, {_about(one) for one in findings if one.kind in {LOST, RETENTION}}),
    )


def _group_row(row: Row, grid: "_Grid", colour: int | None, findings: Iterable[OffsetFinding]) -> GroupRow:
    pair = _pair(row)
    return GroupRow(row, grid.values(pair, "lag"), colour, [one for one in findings if _about(one) == pair])


def _pair(row: Row) -> Pair:
    return row["name"], row["topic"]


def _about(finding: OffsetFinding) -> tuple[str | None, str | None]:
    return finding.group, finding.topic


def _place(row: Row) -> tuple[str, str, int]:
    return row["topic"], row["broker"], row["partition"]


class _Grid:
    """The table over time, with a value or ``None`` at each of its times."""

    def __init__(self, rows: Sequence[Row], colours: Mapping[Pair, int]) -> None:
        self.times = sorted({row["at"] for row in rows})
        self._stamps = [at.timestamp() for at in self.times]
        self._colours = colours
        self._rows: dict[Pair, list[Row | None]] = {}
        at = {time: number for number, time in enumerate(self.times)}
        for row in rows:
            self._rows.setdefault(_pair(row), [None] * len(at))[at[row["at"]]] = row

    def values(self, pair: Pair, name: str) -> list[float | None]:
        return [None if row is None else row[name] for row in self._rows.get(pair, [None] * len(self._stamps))]

    def lines(self, title: str, note: str, name: str, pairs: Sequence[Pair], say: Any) -> LineChart:
        quiet = [pair for pair in pairs if pair not in self._colours][: MOST_LINES - len(self._colours)]
        lines = [
            Line(f"{group} · {topic}", self.values((group, topic), name), self._colours.get((group, topic)))
            for group, topic in [*self._colours, *quiet]
        ]
        return LineChart(title, note, self._stamps, lines, say, logarithmic=True, seconds=name == "lag_s")

    def rates(self, pair: Pair) -> LineChart:
        lines = [
            Line("sent", self.values(pair, "produced_per_s"), None, dashed=True),
            Line("consumed", self.values(pair, "consumed_per_s"), self._colours.get(pair, COLOURED)),
        ]
        return LineChart(" · ".join(pair), "Messages a second, sent and consumed.", self._stamps, lines, rate)


def _heat(shelf: Shelf, pair: Pair, times: Sequence[datetime]) -> Heat:
    cells: dict[tuple[str, int], dict[datetime, float]] = {}
    for row in shelf.rows("series", shelf.about([pair])):
        cells.setdefault((row["broker"], row["partition"]), {})[row["at"]] = row["lag"] or 0
    worst = sorted(cells, key=lambda place: -max(cells[place].values()))[:MOST_ROWS]
    names = [f"{broker} / {partition}" for broker, partition in sorted(worst)]
    values = [[cells[place].get(at) for at in times] for place in sorted(worst)]
    stamps = [at.timestamp() for at in times]
    return Heat(" · ".join(pair), "Messages that wait, by partition.", stamps, names, values, short_count)


def _skew(shelf: Shelf, topic: str) -> Bars:
    rows = shelf.rows("topics", _f("topic") == topic, order=["-messages"], most=MOST_BARS)
    bars = [
        Bar(
            f"{row['broker']} / {row['partition']}",
            row["messages"],
            f"{count(row['messages'])} ({percent(row['messages'] / row['total'])})",
            marked=row["messages"] == row["largest"],
        )
        for row in sorted(rows, key=_place)
    ]
    return Bars(topic, f"Messages in the last day, by partition; the median is {count(rows[0]['median'])}.", bars)


def _retention(groups: Iterable[Row], at_risk: Collection[tuple[str | None, str | None]]) -> Bars | None:
    """Return a chart of the share of the retention time that each group has used."""
    known = [row for row in groups if row["retention_used"] is not None]
    if not known:
        return None
    bars = [
        Bar(
            " · ".join(_pair(row)),
            row["retention_used"],
            percent(row["retention_used"]) + (f", {duration(row['runway_s'])} left" if _ends_soon(row) else ""),
            marked=_pair(row) in at_risk,
        )
        for row in sorted(known, key=lambda row: -row["retention_used"])[: MOST_BARS // 2]
    ]
    return Bars(
        "Retention used", "The age of a group's next message, of the age at which messages are deleted.", bars, whole=1.0
    )


def _ends_soon(row: Row) -> bool:
    return row["runway_s"] is not None and row["runway_s"] <= 7 * 86_400

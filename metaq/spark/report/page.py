"""The report as one page of HTML, which needs no network, and no script to be read."""

import html
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Final

from metaq.spark.report.charts import Bars, Heat, LineChart, draw_bars, draw_heat, draw_lines, draw_spark
from metaq.spark.report.contents import Contents, GroupRow, UnreadRow
from metaq.spark.report.findings import BEHIND_S, PROBLEM, Row
from metaq.spark.report.pagestyle import SCRIPT, STYLE
from metaq.spark.report.wording import count, duration, rate

_STATES: Final = {
    "lost": "lost messages",
    "retention": "will lose messages",
    "unowned": "not owned",
    "stuck": "stuck",
    "behind": "falls behind",
}
_SPARK_POINTS: Final = 75

_MEANINGS: Final = {
    "waiting": "messages of a topic that a group has not consumed: the newest offset less the next one to consume",
    "behind": "the age of the next message that the group will consume, in its slowest partition",
    "sent, consumed": "messages a second, over the last hour",
    "drained in": "when nothing waits any more, if both rates stay; never, if no more is consumed than sent",
    "stuck": "messages wait, and the group has not moved for ten samples (or as many as were asked for)",
    "not owned": "messages wait, and no client has consumed the partition for as long",
    "will lose messages": "retention deletes messages of a certain age; at the present rates it reaches the group within a day",
    "falls behind": f"more than {BEHIND_S // 60} minutes behind, and less is consumed than sent",
    "skew": "one partition has three times the median, and the Gini coefficient of all is 0.35 or more",
}


def write_page(contents: Contents) -> str:
    """Return the whole document."""
    parts = [
        _head(contents),
        _findings(contents),
        _groups(contents),
        _unread(contents),
        _section("Messages that wait", f"{contents.lag.note} {_colours(contents)}", [_wide(draw_lines(contents.lag))]),
        _section("How far behind", contents.age.note, [_wide(draw_lines(contents.age))]),
        _rates(contents.rates),
        _heats(contents.heats),
        _bars(contents),
        _meanings(),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f'<meta name="color-scheme" content="light dark"><title>Offset report</title><style>{STYLE}</style></head>\n'
        f'<body><main>{"".join(parts)}</main><div id="tip" role="status"></div><script>{SCRIPT}</script></body></html>\n'
    )


def _escape(text: str) -> str:
    return html.escape(text)


def _day(at: datetime) -> str:
    return f"{at:%a} {at.day} {at:%b %Y, %H:%M}"


def _section(title: str, note: str, parts: Iterable[str]) -> str:
    return f'<section><h2>{_escape(title)}</h2><p class="note">{_escape(note)}</p>{"".join(parts)}</section>'


def _wide(svg: str) -> str:
    return f'<div class="card wide">{svg}</div>'


def _tile(value: str, text: str, kind: str = "") -> str:
    return f'<div class="tile {kind}"><b>{_escape(value)}</b><span>{_escape(text)}</span></div>'


def _many(number: int, one: str) -> str:
    return f"{number:,} {one}" if number == 1 else f"{number:,} {one}s"


def _head(contents: Contents) -> str:
    sampling, counts = contents.sampling, contents.counts
    problems = sum(one.severity == PROBLEM for one in contents.findings)
    warnings = len(contents.findings) - problems
    verdict = "problem" if problems else "warning" if warnings else "well"
    told = f"{_many(problems, 'problem')}, {_many(warnings, 'warning')}" if contents.findings else "nothing to do"
    oldest = max((group.row["lag_s"] or 0.0 for group in contents.groups), default=0.0)
    tiles = [
        _tile(str(len(contents.findings)), f"{'finding' if len(contents.findings) == 1 else 'findings'}: {told}", verdict),
        _tile(count(contents.waiting), "messages wait, over all groups"),
        _tile(duration(oldest), "behind, at most"),
        _tile(rate(contents.sent_per_s), "are sent"),
        _tile(str(counts["groups"]), f"groups; {_many(counts['topics'], 'topic')}, {_many(counts['partitions'], 'partition')}"),
    ]
    span = duration((sampling.last - sampling.first).total_seconds())
    period = f"{_day(sampling.first)} to {_day(sampling.last)} UTC ({span}), a sample every {duration(sampling.interval_s)}"
    return f'<h1>Offset report</h1><p class="note">{_escape(period)}</p><div class="tiles">{"".join(tiles)}</div>'


def _findings(contents: Contents) -> str:
    if not contents.findings:
        return _section("Findings", "All groups keep up, and nothing is at risk.", [])
    cards = [
        f'<div class="finding {one.severity}"><span class="chip {one.severity}">{one.severity}</span>'
        f'<div><b>{_escape(one.sentence)}</b><p class="note">{_escape(one.advice)}</p></div></div>'
        for one in contents.findings
    ]
    return _section("Findings", "The worst first.", cards)


def _groups(contents: Contents) -> str:
    head = ("group", "topic", "", "waiting", "", "behind", "sent", "consumed", "drained in", "owners", "partitions")
    rows = [_group(group) for group in contents.groups]
    note = "As of the last sample; the small line is what waited over the whole time, to a scale of its own."
    if contents.counts["pairs"] > len(rows):
        note += f" {len(rows)} of {contents.counts['pairs']:,} are shown, those with most waiting; groups.parquet has all."
    return _section("Groups", note, [f'<div class="card">{_table(head, rows)}</div>'])


def _unread(contents: Contents) -> str:
    """Return the topics without a group, if there are any."""
    if not contents.unread:
        return ""
    head = ("topic", "messages", "sent", "", "partitions")
    note = "No group has read these; the small line is what was sent over the whole time, to a scale of its own."
    if contents.counts["unread"] > len(contents.unread):
        note += f" {len(contents.unread)} of {contents.counts['unread']:,} are shown; groups.parquet has all."
    return _section("Topics without a group", note, [f'<div class="card">{_table(head, map(_topic, contents.unread))}</div>'])


def _topic(topic: UnreadRow) -> str:
    row = topic.row
    cells = [
        _escape(row["topic"]),
        count(row["kept"] or 0),
        "?" if row["produced_per_s"] is None else rate(row["produced_per_s"]),
        _small(topic.sent_per_s, None),
        str(row["partitions"]),
    ]
    return _cells(cells)


def _table(head: Iterable[str], rows: Iterable[str]) -> str:
    return (
        f"<table><thead><tr>{''.join(f'<th>{title}</th>' for title in head)}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    )


def _cells(cells: Iterable[str]) -> str:
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _small(values: Sequence[float | None], colour: int | None) -> str:
    return draw_spark(values[:: max(1, len(values) // _SPARK_POINTS)], colour)


def _group(group: GroupRow) -> str:
    row = group.row
    if group.findings:
        worst = group.findings[0]
        chip = f'<span class="chip {worst.severity}">{_STATES[worst.kind]}</span>'
    else:
        chip = '<span class="chip well">keeps up</span>'
    cells = [
        _escape(row["name"]),
        _escape(row["topic"]),
        chip,
        count(row["lag"] or 0),
        _small(group.lags, group.colour),
        "?" if row["lag_s"] is None else duration(row["lag_s"]),
        *("?" if row[name] is None else rate(row[name]) for name in ("produced_per_s", "consumed_per_s")),
        _drained(row, well=not group.findings),
        "–" if row["kind"] == "observed" else str(row["owners"]),
        str(row["partitions"]),
    ]
    return _cells(cells)


def _drained(row: Row, *, well: bool) -> str:
    # the lag of a group that keeps up is on its way: rates that differ by chance say nothing about it
    if well:
        return "–"
    return "never" if row["drain_s"] is None else duration(row["drain_s"])


def _colours(contents: Contents) -> str:
    if any(one.group for one in contents.findings):
        return "Groups with findings are coloured, the others grey. The scale is logarithmic."
    return "The scale is logarithmic."


def _rates(charts: list[LineChart]) -> str:
    cards = [
        f'<div class="card"><h3>{_escape(chart.title)}</h3>{draw_lines(chart, 420, 190, labelled=False)}</div>'
        for chart in charts
    ]
    note = "Messages a second: consumed in colour, sent as a dashed line."
    return _section("Sent and consumed", note, [f'<div class="small">{"".join(cards)}</div>'])


def _heats(charts: list[Heat]) -> str:
    cards = [f'<div class="card wide"><h3>{_escape(chart.title)}</h3>{draw_heat(chart)}</div>' for chart in charts]
    note = "Messages that wait in each partition over time: one strong row is a stuck partition, all strong rows a slow group."
    return _section("Where they wait", note, cards) if charts else ""


def _bars(contents: Contents) -> str:
    charts: list[Bars] = [*contents.skew, *([contents.retention] if contents.retention else [])]
    cards = [
        f'<div class="card"><h3>{_escape(chart.title)}</h3><p class="note">{_escape(chart.note)}</p>{draw_bars(chart)}</div>'
        for chart in charts
    ]
    note = "How evenly topics are spread, and how near the groups are to what retention deletes."
    return _section("Skew and retention", note, [f'<div class="pair">{"".join(cards)}</div>']) if charts else ""


def _meanings() -> str:
    rows = "".join(f"<dt>{_escape(word)}</dt><dd>{_escape(meaning)}</dd>" for word, meaning in _MEANINGS.items())
    return f"<details><summary>What the words mean</summary><dl>{rows}</dl></details>"

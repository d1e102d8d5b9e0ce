"""The problems of groups and topics in one sentence each, found in the report's tables without Spark.

A partition of a group has at most one problem, the first that applies in the order below, as the others follow from it.
Partitions of one group and topic with the same problem are one finding.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from itertools import groupby
from typing import Any, Final, NamedTuple

from metaq.spark.report.wording import HOUR, clock, count, duration, listed, percent, rate

PROBLEM: Final = "problem"
WARNING: Final = "warning"

LOST: Final = "lost"
RETENTION: Final = "retention"
UNOWNED: Final = "unowned"
STUCK: Final = "stuck"
BEHIND: Final = "behind"
SKEW: Final = "skew"
GAP: Final = "gap"

URGENT_S: Final = 6 * HOUR
"""Data loss that is closer than this is a problem, later loss a warning."""
BEHIND_S: Final = 600
"""A group whose lag is less than this does not fall behind: a minute more or less is noise."""
BEHIND_SHARE: Final = 0.98
"""... nor does one that consumes nearly as fast as producers send."""
SKEW_GINI: Final = 0.35
SKEW_RATIO: Final = 3.0
SKEW_PARTITIONS: Final = 3
SKEW_MESSAGES: Final = 1000
"""A topic is skewed when all four are reached. RATIO is that of the largest partition to the median; the last two exclude
topics that are uneven by chance, with few partitions or messages."""
_NOT_IN_KEYS: Final = re.compile(r"[\s\x00-\x1f\x7f-\x9f\\]")
"""The characters that divide a message's keys or properties, or that make a key look like another one. Groups that only read by
``get`` may have any names."""

Row = Mapping[str, Any]


class Limits(NamedTuple):
    """The limits from which a state is a finding."""

    still_s: float
    """A partition with messages in which a group has not moved for this long is stuck, or has no owner."""
    risk_s: float
    """Data that retention deletes unconsumed within this time is at risk."""


class OffsetFinding(NamedTuple):
    """One problem or warning. Fields that do not apply are ``None``."""

    severity: str
    """problem, warning."""
    kind: str
    group: str | None
    """Its name; with its kind, as ``billing (observed)``, when one of the usual kind with this name reads the topic, too."""
    topic: str | None
    partitions: list[str]
    """``broker/number``."""
    sentence: str
    advice: str
    since: datetime | None
    lag: int | None
    """Messages, in these partitions."""
    left_s: float | None
    """Time until data is lost."""
    share: float | None
    """The share of the topic's messages that is in its largest partition."""

    @property
    def key(self) -> str:
        r"""The identity of a finding: the same in every report, and unique within one.

        A message can have it as a key: blanks, control characters and backslashes in names are written by their
        number, as ``\u0020``.
        """
        named = "/".join((self.kind, self.group or "", self.topic or "", "" if self.topic else ",".join(self.partitions)))
        return _NOT_IN_KEYS.sub(lambda found: f"\\u{ord(found[0]):04x}", named)


def find(
    partitions: Iterable[Row],
    groups: Iterable[Row],
    skewed: Iterable[Row],
    gaps: Iterable[tuple[str, datetime, datetime]],
    limits: Limits,
    last: datetime,
) -> list[OffsetFinding]:
    """Return all findings, the worst first; ``last`` is the time of the last sample."""
    sizes = {(row["name"], row["topic"]): row for row in groups}
    troubled = [(row["name"], row["topic"], trouble, row) for row in partitions if (trouble := _trouble(row, limits))]
    found = []
    for (group, topic, trouble), members in groupby(sorted(troubled, key=_order), key=lambda member: member[:3]):
        rows = [member[3] for member in members]
        found.append(_FINDERS[trouble](group, topic, rows, sizes[group, topic], last))
    found += [
        _skew(topic, list(rows)) for topic, rows in groupby(sorted(skewed, key=_place), key=lambda row: str(row["topic"]))
    ]
    found += _gaps(gaps, last)
    order = [LOST, RETENTION, UNOWNED, STUCK, BEHIND, SKEW, GAP]
    return sorted(found, key=lambda one: (one.severity != PROBLEM, order.index(one.kind), -(one.lag or 0)))


def _order(member: tuple[str, str, str, Row]) -> tuple[str, str, str, tuple[str, str, int]]:
    return *member[:3], _place(member[3])


def _place(row: Row) -> tuple[str, str, int]:
    return row["topic"], row["broker"], row["partition"]


def _trouble(row: Row, limits: Limits) -> str | None:
    waits = row["lag"] is not None and row["lag"] > 0
    if row["lost"]:
        return LOST
    if waits and row["runway_s"] is not None and row["runway_s"] <= limits.risk_s:
        return RETENTION
    # a group of the text protocol has no members, and so no owners
    if waits and row["owner"] is None and row["kind"] != "observed" and row["unowned_s"] >= limits.still_s:
        return UNOWNED
    if waits and row["waiting_s"] >= limits.still_s:
        return STUCK
    slow = row["consumed_per_s"] is not None and row["consumed_per_s"] < BEHIND_SHARE * row["produced_per_s"]
    if waits and slow and row["lag_s"] is not None and row["lag_s"] >= BEHIND_S:
        return BEHIND
    return None


# -- one finding of the partitions of a group that have a trouble -----------------------------------------------------


def _names(rows: list[Row]) -> str:
    """Return ``partition 3 of orders on east``, or ``partitions 1 and 2 of orders on east``."""
    brokers = [(broker, [str(row["partition"]) for row in some]) for broker, some in groupby(rows, lambda row: row["broker"])]
    places = [f"{'partition' if len(some) == 1 else 'partitions'} {listed(some)}" for _, some in brokers]
    if len(places) == 1:
        return f"{places[0]} of {rows[0]['topic']} on {brokers[0][0]}"
    parts = listed([f"{place} on {broker}" for place, (broker, _) in zip(places, brokers, strict=True)])
    return f"{rows[0]['topic']}, {parts}"


def _finding(severity: str, kind: str, rows: list[Row], sentence: str, advice: str, **numbers: Any) -> OffsetFinding:
    return OffsetFinding(
        severity=severity,
        kind=kind,
        group=rows[0].get("name"),
        topic=rows[0]["topic"],
        partitions=[f"{row['broker']}/{row['partition']}" for row in rows],
        sentence=sentence,
        advice=advice,
        **{"since": None, "lag": sum(row.get("lag") or 0 for row in rows), "left_s": None, "share": None, **numbers},
    )


def _lost(group: str, topic: str, rows: list[Row], _size: Row, _last: datetime) -> OffsetFinding:
    lost = sum(row["lost"] for row in rows)
    sentence = f"{group} has lost {count(lost)} messages of {topic}: retention deleted them unconsumed in {_names(rows)}."
    advice = "They cannot be recovered, and the next ones are at risk. Add consumers, or keep messages longer."
    return _finding(PROBLEM, LOST, rows, sentence, advice, left_s=0.0)


def _retention(group: str, topic: str, rows: list[Row], _size: Row, _last: datetime) -> OffsetFinding:
    first = min(rows, key=lambda row: row["runway_s"])
    left_s, kept_ms = first["runway_s"], first["retention_ms"]
    taken, sent = (sum(row[name] or 0.0 for row in rows) for name in ("consumed_per_s", "produced_per_s"))
    kept = f", which are kept for {duration(kept_ms / 1000)}" if kept_ms is not None else ""
    begins = f"{group} will begin to lose messages of {topic} in {duration(left_s)}"
    sentence = f"{begins}: it consumes {rate(taken)} of the {rate(sent)} that are sent to {_names(rows)}{kept}."
    severity = PROBLEM if left_s <= URGENT_S else WARNING
    return _finding(severity, RETENTION, rows, sentence, "Add consumers now, or keep messages longer.", left_s=left_s)


def _unowned(group: str, topic: str, rows: list[Row], size: Row, last: datetime) -> OffsetFinding:
    since_s = max(row["unowned_s"] for row in rows)
    since, waiting = last - timedelta(seconds=since_s), f"{count(sum(row['lag'] for row in rows))} messages wait."
    when = f"since {clock(since, last)} ({duration(since_s)})"
    if size["owned"] == 0:
        sentence = f"{group} has had no consumer of {topic} {when}; {waiting}"
        return _finding(
            WARNING, UNOWNED, rows, sentence, "Start one; or delete the group if it is no longer used.", since=since
        )
    sentence = f"Nobody of {group} has owned {_names(rows)} {when}, while others of the group consume; {waiting}"
    advice = f"metaq why-not-consuming {rows[0]['group']} shows who should own it; restart that consumer."
    return _finding(PROBLEM, UNOWNED, rows, sentence, advice, since=since)


def _stuck(group: str, topic: str, rows: list[Row], _size: Row, last: datetime) -> OffsetFinding:
    since_s = max(row["waiting_s"] for row in rows)
    since, waiting = last - timedelta(seconds=since_s), f"{count(sum(row['lag'] for row in rows))} messages wait."
    owners = sorted({row["owner"] for row in rows if row["owner"] is not None})
    owned = f", though {listed(owners)} {'owns it' if len(rows) == 1 else 'own them'}" if owners else ""
    sentence = f"{group} has not moved in {_names(rows)} since {clock(since, last)} ({duration(since_s)}){owned}; {waiting}"
    advice = "Check what that consumer does with the next message: it may hang, or fail again and again."
    return _finding(PROBLEM, STUCK, rows, sentence, advice, since=since)


def _behind(group: str, topic: str, rows: list[Row], _size: Row, _last: datetime) -> OffsetFinding:
    furthest = max(rows, key=lambda row: row["lag_s"])
    sent, taken = (sum(row[name] for row in rows) for name in ("produced_per_s", "consumed_per_s"))
    far = f"{group} is {duration(furthest['lag_s'])} behind in {_names(rows)}"
    sentence = f"{far}, and falls further behind: it consumes {rate(taken)} of the {rate(sent)} that are sent."
    return _finding(WARNING, BEHIND, rows, sentence, "Add consumers, up to one a partition, or make them faster.")


_FINDERS: Final = {LOST: _lost, RETENTION: _retention, UNOWNED: _unowned, STUCK: _stuck, BEHIND: _behind}


def _skew(topic: str, rows: list[Row]) -> OffsetFinding:
    largest = max(rows, key=lambda row: row["messages"])
    share = largest["messages"] / largest["total"]
    times = f"{largest['messages'] / largest['median']:.0f} times as many as the median partition" if largest["median"] else ""
    sentence = f"{_names([largest])} got {percent(share)} of the messages in the last day, {times or 'and most others none'}."
    advice = "Spread the messages over more keys; one consumer must process all of that partition."
    return _finding(WARNING, SKEW, [largest], sentence[0].upper() + sentence[1:], advice, share=share, lag=None)


def _gaps(gaps: Iterable[tuple[str, datetime, datetime]], last: datetime) -> Iterator[OffsetFinding]:
    for broker, of_broker in groupby(sorted(gaps), key=lambda gap: gap[0]):
        pauses = [(since.astimezone(UTC), until.astimezone(UTC)) for _, since, until in of_broker]
        since, until = max(pauses, key=lambda pause: pause[1] - pause[0])
        longest = f"from {clock(since, last)} to {clock(until, last)} ({duration((until - since).total_seconds())})"
        if len(pauses) > 1:
            sentence = f"{broker} exported no offsets {len(pauses)} times, the longest {longest}."
        else:
            sentence = f"{broker} exported no offsets {longest}."
        advice = "There is no data for that time. Was the broker stopped, or its export switched off?"
        yield OffsetFinding(WARNING, GAP, None, None, [broker], sentence, advice, since, None, None, None)

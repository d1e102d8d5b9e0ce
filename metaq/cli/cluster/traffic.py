"""PURE: what two samples of a broker's metrics say about the time between them."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from metaq.cli.cluster.samples import MetricsSample

BEHIND_S: Final = 300.0
"""A lag from which it is a warning, as in conf/alarms.yaml."""
STALL_S: Final = 0.5
"""A stall from which it is a warning, likewise."""

Labelled = tuple[str, ...]


class BrokerTraffic(NamedTuple):
    """A broker as a whole."""

    role: str
    writable: bool
    in_per_s: float
    out_per_s: float
    held_pulls: int
    """Gets, pulls and pops that wait for a message."""
    connections: int
    longest_stall_s: float
    """No stall of the event loop was longer than this in the time between the samples; infinite above the last bucket."""
    in_sync: int
    min_in_sync: int
    replica_lag_bytes: int
    """The lag of the slave that lacks most."""


class TopicTraffic(NamedTuple):
    """A topic as a whole, with an empty ``group``, or what one group does in it."""

    topic: str
    group: str
    in_per_s: float | None
    """Messages a second that were put; ``None`` for a group."""
    out_per_s: float
    lag: int | None
    """Messages that the group has not consumed; ``None`` where that is not known."""
    behind_s: float | None
    """The age of the oldest of them."""
    in_flight: int | None
    """Messages that consumers of the group lease; ``None`` for groups that do not lease."""


def broker_traffic(before: MetricsSample, now: MetricsSample) -> BrokerTraffic:
    """Return what happened between two samples."""
    return BrokerTraffic(
        role="master" if now.one("metaq_is_master") else "slave",
        writable=bool(now.one("metaq_writable")),
        in_per_s=sum(_rates("metaq_messages_in_total", before, now, "topic").values()),
        out_per_s=sum(_rates("metaq_messages_out_total", before, now, "topic", "group").values()),
        held_pulls=round(now.one("metaq_held_pulls") + now.one("metaq_held_pops")),
        connections=round(now.one("metaq_connections")),
        longest_stall_s=_longest_stall(before, now),
        in_sync=round(now.one("metaq_in_sync_replicas")),
        min_in_sync=round(now.one("metaq_min_in_sync_replicas")),
        replica_lag_bytes=round(max(now.by("metaq_replica_lag_bytes", "replica").values(), default=0)),
    )


def topic_traffic(before: MetricsSample, now: MetricsSample) -> list[TopicTraffic]:
    """Return a row for each topic, and after it one for each of its groups; the busiest topics first."""
    put = {topic: rate for (topic,), rate in _rates("metaq_messages_in_total", before, now, "topic").items()}
    got = _rates("metaq_messages_out_total", before, now, "topic", "group")
    lags = now.by("metaq_consumer_lag_messages", "topic", "group")
    ages = now.by("metaq_consumer_lag_seconds", "topic", "group")
    leased = now.by("metaq_lease_in_flight_messages", "topic", "group")
    groups: dict[str, list[TopicTraffic]] = {topic: [] for topic in put}
    for topic, group in sorted({*got, *lags}):
        pair = (topic, group)
        rate, behind = got.get(pair, 0.0), ages.get(pair)
        row = TopicTraffic(topic, group, None, rate, _whole(lags.get(pair)), behind, _whole(leased.get(pair)))
        groups.setdefault(topic, []).append(row)
    whole = [_of_topic(topic, put.get(topic, 0.0), rows) for topic, rows in groups.items()]
    whole.sort(key=lambda row: (-(row.in_per_s or 0.0) - row.out_per_s, row.topic))
    return [row for topic in whole for row in (topic, *groups[topic.topic])]


def _of_topic(topic: str, in_per_s: float, groups: Iterable[TopicTraffic]) -> TopicTraffic:
    return TopicTraffic(topic, "", in_per_s, sum(row.out_per_s for row in groups), None, None, None)


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def _rates(name: str, before: MetricsSample, now: MetricsSample, *labels: str) -> Mapping[Any, float]:
    """Return how much counters grew in a second. After a restart they begin at 0."""
    old, passed_s = before.by(name, *labels), now.at_s - before.at_s
    grown = {key: value - old.get(key, 0.0) for key, value in now.by(name, *labels).items()}
    return {key: (more if more >= 0 else now.by(name, *labels)[key]) / passed_s for key, more in grown.items()}


def _longest_stall(before: MetricsSample, now: MetricsSample) -> float:
    """Return the upper end of the highest bucket of stalls that has grown; 0 if none has."""
    grown = _rates("metaq_loop_stall_seconds_bucket", before, now, "le")
    ends = sorted((math.inf if end == "+Inf" else float(end), rate) for (end,), rate in grown.items())
    below = 0.0
    longest = 0.0
    for end, rate in ends:  # each bucket has the stalls of all that are lower, too
        if rate > below:
            longest, below = end, rate
    return longest

"""The broker's counters since its start, for ``stats`` of the text protocol."""

import time
from collections import Counter
from dataclasses import dataclass, field

from metaq.errors import MetaqError


@dataclass(slots=True)
class Meter:
    """A counter of events and of the sum of their values, with a recent part that can be reset."""

    count: int = 0
    recent_count: int = 0
    recent_value: int = 0

    def add(self, count: int, value: int = 0) -> None:
        self.count += count
        self.recent_count += count
        self.recent_value += value


@dataclass(slots=True)
class TopicCounters:
    """The counters of one topic that cannot be derived from its queues."""

    get: Meter = field(default_factory=Meter)
    offset: Meter = field(default_factory=Meter)
    get_miss: Meter = field(default_factory=Meter)
    put_failed: Meter = field(default_factory=Meter)


@dataclass(slots=True)
class Counters:
    """Counters since the start of the process; the recent parts count since ``since_s``, a monotonic time."""

    topics: dict[str, TopicCounters] = field(default_factory=dict)
    put: Meter = field(default_factory=Meter)
    get: Meter = field(default_factory=Meter)
    offset: Meter = field(default_factory=Meter)
    get_miss: Meter = field(default_factory=Meter)
    put_failed: Meter = field(default_factory=Meter)
    refused: Counter[type[MetaqError]] = field(default_factory=Counter)
    """The failed puts of ``put_failed`` by the class of their error."""
    sent_back: Meter = field(default_factory=Meter)
    dead_letter: Meter = field(default_factory=Meter)
    tx_begin: Meter = field(default_factory=Meter)
    """Local transactions; ``tx_xa_begin`` counts XA branches, the others count both."""
    tx_xa_begin: Meter = field(default_factory=Meter)
    tx_commit: Meter = field(default_factory=Meter)
    tx_rollback: Meter = field(default_factory=Meter)
    started_s: float = field(default_factory=time.monotonic)
    since_s: float = field(default_factory=time.monotonic)

    def refuse(self, error: MetaqError, puts: int) -> None:
        """Count puts that failed with one error."""
        self.put_failed.add(puts)
        self.refused[type(error)] += puts

    def count_step(self, step: str, *, local: bool) -> None:
        """Count a transaction command by its type."""
        if step == "BEGIN":
            (self.tx_begin if local else self.tx_xa_begin).add(1)
        elif step in ("COMMIT_ONE_PHASE", "COMMIT_TWO_PHASE"):
            self.tx_commit.add(1)
        elif step == "ROLLBACK":
            self.tx_rollback.add(1)

    def reset(self) -> None:
        """Reset the recent parts and the counters of topics."""
        self.since_s = time.monotonic()
        for meter in (self.put, self.get, self.offset, self.get_miss, self.put_failed):
            meter.recent_count = meter.recent_value = 0
        self.topics.clear()

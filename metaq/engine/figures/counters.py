"""What the broker has counted since its start, for ``stats`` of the text protocol."""

import time
from collections import Counter
from dataclasses import dataclass, field

from metaq.errors import MetaqError


@dataclass(slots=True)
class Meter:
    """A counter of events and of what they amount to, with a part that can be reset."""

    count: int = 0
    recent_count: int = 0
    recent_value: int = 0

    def add(self, count: int, value: int = 0) -> None:
        self.count += count
        self.recent_count += count
        self.recent_value += value


@dataclass(slots=True)
class TopicCounters:
    """What cannot be derived from a topic's queues."""

    get: Meter = field(default_factory=Meter)
    offset: Meter = field(default_factory=Meter)
    get_miss: Meter = field(default_factory=Meter)
    put_failed: Meter = field(default_factory=Meter)


@dataclass(slots=True)
class Counters:
    """Since the start of the process; the recent parts since ``since_s``, a monotonic time."""

    topics: dict[str, TopicCounters] = field(default_factory=dict)
    put: Meter = field(default_factory=Meter)
    get: Meter = field(default_factory=Meter)
    offset: Meter = field(default_factory=Meter)
    get_miss: Meter = field(default_factory=Meter)
    put_failed: Meter = field(default_factory=Meter)
    refused: Counter[type[MetaqError]] = field(default_factory=Counter)
    """Of ``put_failed``: by what refused them."""
    sent_back: Meter = field(default_factory=Meter)
    dead_letter: Meter = field(default_factory=Meter)
    tx_begin: Meter = field(default_factory=Meter)
    """Of local transactions; the next one of XA branches, the others of both."""
    tx_xa_begin: Meter = field(default_factory=Meter)
    tx_commit: Meter = field(default_factory=Meter)
    tx_rollback: Meter = field(default_factory=Meter)
    started_s: float = field(default_factory=time.monotonic)
    since_s: float = field(default_factory=time.monotonic)

    def refuse(self, error: MetaqError, puts: int) -> None:
        """So many puts failed by one error."""
        self.put_failed.add(puts)
        self.refused[type(error)] += puts

    def count_step(self, step: str, *, local: bool) -> None:
        """A command about a transaction, by its type."""
        if step == "BEGIN":
            (self.tx_begin if local else self.tx_xa_begin).add(1)
        elif step in ("COMMIT_ONE_PHASE", "COMMIT_TWO_PHASE"):
            self.tx_commit.add(1)
        elif step == "ROLLBACK":
            self.tx_rollback.add(1)

    def reset(self) -> None:
        """Begin a new recent part."""
        self.since_s = time.monotonic()
        for meter in (self.put, self.get, self.offset, self.get_miss, self.put_failed):
            meter.recent_count = meter.recent_value = 0
        self.topics.clear()

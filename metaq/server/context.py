"""What the handlers share: settings, store, topics, counters, and the broker's own address."""

import time
from dataclasses import dataclass, field

from metaq.config import Settings
from metaq.server.clients import Clients
from metaq.server.front import Front
from metaq.server.groups import GroupTable
from metaq.server.offsets import OffsetTable
from metaq.server.statistics import Statistics
from metaq.server.tables import TopicTable
from metaq.store.messagestore import MessageStore


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
    sent_back: Meter = field(default_factory=Meter)
    dead_letter: Meter = field(default_factory=Meter)
    started_s: float = field(default_factory=time.monotonic)
    since_s: float = field(default_factory=time.monotonic)

    def reset(self) -> None:
        """Begin a new recent part."""
        self.since_s = time.monotonic()
        for meter in (self.put, self.get, self.offset, self.get_miss, self.put_failed):
            meter.recent_count = meter.recent_value = 0
        self.topics.clear()


@dataclass(slots=True)
class Context:
    """One broker, as its handlers see it."""

    settings: Settings
    store: MessageStore
    topics: TopicTable
    host: str
    port: int
    store_host: bytes
    """The advertised host and port as they stand in records."""
    front: Front
    groups: GroupTable
    offsets: OffsetTable
    clients: Clients
    statistics: Statistics
    counters: Counters = field(default_factory=Counters)

    def topic_counters(self, name: str) -> TopicCounters:
        """The counters of one topic; those of unknown topics are not kept."""
        counters = self.counters.topics.get(name)
        if counters is None:
            counters = TopicCounters()
            if self.topics.get(name) is not None:
                self.counters.topics[name] = counters
        return counters

    @property
    def url(self) -> str:
        """The broker as MetaQ clients name it."""
        return f"meta://{self.host}:{self.port}"

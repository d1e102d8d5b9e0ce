"""The state that all request handlers share: settings, store, tables, counters, and the broker's own address."""

from dataclasses import dataclass

from metaq.config import Settings
from metaq.engine.figures.counters import Counters, TopicCounters
from metaq.engine.figures.statistics import Statistics
from metaq.engine.role import Replicas
from metaq.engine.tables.clients import Clients
from metaq.engine.tables.groups import GroupTable
from metaq.engine.tables.modes import ModeTable
from metaq.engine.tables.observed import Observed
from metaq.engine.tables.offsets import OffsetTable
from metaq.engine.tables.topics import TopicTable
from metaq.store.copies.epochs import Epochs
from metaq.store.messagestore import MessageStore


@dataclass(slots=True)
class Context:
    """One broker as its request handlers see it."""

    settings: Settings
    store: MessageStore
    topics: TopicTable
    host: str
    port: int
    store_host: bytes
    """The advertised host and port as records carry them."""
    groups: GroupTable
    modes: ModeTable
    offsets: OffsetTable
    clients: Clients
    statistics: Statistics
    counters: Counters
    epochs: Epochs
    observed: Observed
    replicas: Replicas

    def topic_counters(self, name: str) -> TopicCounters:
        """Return the counters of one topic; for an unknown topic, new ones that are not kept."""
        counters = self.counters.topics.get(name)
        if counters is None:
            counters = TopicCounters()
            if self.topics.get(name) is not None:
                self.counters.topics[name] = counters
        return counters

    @property
    def url(self) -> str:
        """The broker's address in the form that MetaQ clients use: ``meta://HOST:PORT``."""
        return f"meta://{self.host}:{self.port}"

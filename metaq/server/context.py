"""What the handlers share: settings, store, topics, counters, and the broker's own address."""

from dataclasses import dataclass, field

from metaq.config import Settings
from metaq.server.clients import Clients
from metaq.server.counters import Counters, TopicCounters
from metaq.server.front import Front
from metaq.server.groups import GroupTable
from metaq.server.observed import Observed
from metaq.server.offsets import OffsetTable
from metaq.server.role import NoReplicas, Replicas
from metaq.server.statistics import Statistics
from metaq.server.tables import TopicTable
from metaq.store.copies.epochs import Epochs
from metaq.store.messagestore import MessageStore


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
    counters: Counters
    epochs: Epochs
    observed: Observed
    replicas: Replicas = field(default_factory=NoReplicas)

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

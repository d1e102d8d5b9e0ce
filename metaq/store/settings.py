"""Sizes and limits of a store."""

from dataclasses import dataclass, field

from metaq.message import Durability
from metaq.store.log.retention import RetentionRules


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """Sizes in bytes; each is described in ``metaq.config``."""

    segment_bytes: int = 1024**3
    queue_file_bytes: int = 20 * 1024**2
    index_slots: int = 5_000_000
    index_entries: int = 20_000_000
    hot_bytes: int = 256 * 1024**2
    open_files: int = 512
    sync_together: int = 32
    """Queues that are worth syncing the whole file system: each costs at least two calls, which take a millisecond or more."""
    slice_ms: int = 5
    """A sweep or a checkpoint of many queues lets others go on each time that it has worked so long."""
    durability: Durability = Durability.DISK
    replicated: bool = False
    """What is acknowledged is on other replicas, too: a log with a gap ends there, and what it lacks is copied again."""
    broker_name: str = "metaq"
    broker_number: int = 0
    retention: RetentionRules = field(default_factory=RetentionRules)

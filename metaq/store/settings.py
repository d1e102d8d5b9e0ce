"""The settings of a store: sizes, limits and durability."""

from dataclasses import dataclass, field

from metaq.message import Durability
from metaq.store.log.retention import RetentionRules


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """The settings of a store, sizes in bytes. Those that a broker offers are described in ``metaq.config``."""

    segment_bytes: int = 1024**3
    queue_file_bytes: int = 20 * 1024**2
    index_slots: int = 5_000_000
    index_entries: int = 20_000_000
    hot_bytes: int = 256 * 1024**2
    open_files: int = 512
    sync_together: int = 32
    """From this many changed queues on, a checkpoint syncs the whole file system at once.

    Syncing a queue on its own takes at least two calls of a millisecond or more each.
    """
    slice_ms: int = 2
    """How long a sweep or a checkpoint of many queues works before it lets others go on, again and again.

    A message for a consumer that waits may come at its begin, and must reach it within 5 ms (N-15).
    """
    durability: Durability = Durability.DISK
    replicated: bool = False
    """Acknowledged messages are on other replicas too: recovery ends the log at its first gap, and the rest is copied again."""
    broker_name: str = "metaq"
    broker_number: int = 0
    retention: RetentionRules = field(default_factory=RetentionRules)

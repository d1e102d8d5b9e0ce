"""The figures that a store reports about itself."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from metaq.store.messagestore import MessageStore


@dataclass(frozen=True, slots=True)
class StoreFigures:
    """A snapshot of a store's figures. Counters run from the opening of the store."""

    begin: int
    end: int
    durable_end: int
    segments: int
    partitions: int
    open_files: int
    messages_put: int
    damaged_reads: int
    syncs: int
    index_files: int
    index_behind_bytes: int
    """Bytes of the log that are still to be read for their keys."""
    index_paused: str | None
    """Why no keys are entered for now; ``None`` when they are."""
    index_damaged: int
    """Broken chains that queries found in index files, and places there that could not be read."""
    failure: str | None
    """Why the store is read-only until it is reopened; ``None`` while it is healthy."""

    @classmethod
    def of(cls, store: "MessageStore") -> Self:
        """Return the figures of ``store`` as they are now."""
        return cls(
            begin=store.log.begin,
            end=store.log.end,
            durable_end=store.durable_end,
            segments=len(store.log.segments),
            partitions=len(store.queues),
            open_files=len(store.files),
            messages_put=store.messages_put,
            damaged_reads=store.reader.damaged,
            syncs=store.syncs,
            index_files=len(store.indexing.index.files),
            index_behind_bytes=store.indexing.behind,
            index_paused=store.indexing.paused,
            index_damaged=store.indexing.index.damaged,
            failure=None if store.failure is None else str(store.failure),
        )

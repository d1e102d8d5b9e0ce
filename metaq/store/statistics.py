"""What a store says of itself."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from metaq.store.messagestore import MessageStore


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """A snapshot; counters run from the start of the process."""

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
    """Bytes of the log whose keys are still to be read and entered."""
    index_paused: str | None
    """Why no keys are entered for now."""
    index_damaged: int
    """Times that a query found an index file damaged."""
    failure: str | None

    @classmethod
    def of(cls, store: "MessageStore") -> Self:
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

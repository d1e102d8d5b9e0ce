"""What a store says of itself."""

from dataclasses import dataclass


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

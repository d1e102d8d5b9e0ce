"""A record before it has its place in the log: what a put stages."""

from typing import NamedTuple

from metaq.protocol.record import CHECKSUM_SIZE, HEADER_SIZE
from metaq.store.queues.consumequeue import ConsumeQueue


class NewRecord(NamedTuple):
    """A record that only needs its place: ordinal, log offset and text position are given when it is staged."""

    queue: ConsumeQueue
    """Its partition."""
    flag: int
    """The flag of its sender, which the broker does not interpret."""
    body: bytes
    crc: int
    """The CRC-32 of the body, without its highest bit."""
    middle: bytes
    """The header fields from the system flag to the retries (``constant_middle``)."""
    text_size: int
    """The bytes that a text reader gets for it."""
    tail: bytes | None = None
    """All that follows the body, up to the checksum (``record_tail``); ``None`` without properties."""
    tag: int = 0
    """The hash of its tag."""
    keys: tuple[str, ...] = ()
    """The keys that find it (``keys_of``)."""

    @property
    def size(self) -> int:
        """The bytes of the record in the log."""
        tail = self.queue.tail if self.tail is None else self.tail
        return HEADER_SIZE + len(self.body) + len(tail) + CHECKSUM_SIZE


Fields = tuple[ConsumeQueue, int, bytes, int, bytes, int, bytes | None, int, tuple[str, ...]]
"""A ``NewRecord``, or its fields as a plain tuple, which batches and transactions make: names would cost them 5 to 14 %."""

"""The tie between an ordered index and the log that it was made from."""

from metaq.checksum import crc32
from metaq.protocol.record import CHECKSUM_SIZE
from metaq.store.files.filecache import read_here
from metaq.store.log.commitlog import CommitLog
from metaq.store.ordered.ordered import Covered


def checksum_before(log: CommitLog, end: int) -> int:
    """Return the checksum with which the record closes that ends at a log offset; 0 when the log has none there."""
    segment = log.find(end - CHECKSUM_SIZE)
    if segment is None or end - CHECKSUM_SIZE < segment.base:
        return 0
    return crc32(read_here(log.file(segment), CHECKSUM_SIZE, end - CHECKSUM_SIZE - segment.base))


def has_end(log: CommitLog, covered: Covered) -> bool:
    """Return whether a log still has the record at which an index ends."""
    return log.begin < covered.log_offset <= log.end and checksum_before(log, covered.log_offset) == covered.checksum

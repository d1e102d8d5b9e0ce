"""Snapshots: documents that save reading the log from its begin. Each names the state of the log when it was made::

    {"crc32c":"…","log":[5,99500,2,120000], …}      in epoch 5, which replica 2 began at log offset 99500,
                                                    when the log ended at 120000

A replica's snapshot may be ahead of its log: the master sent both, and a power cut took the records. When another replica then
becomes master, other records take the log offsets that the snapshot covers. So a snapshot counts only if the replica's own log
holds everything it was made from. Otherwise its backup is used, if that is covered, or the log is read instead.

A snapshot without the member ``log`` was written by an earlier version, and counts.
"""

import logging
from pathlib import Path
from typing import Any, Final

from metaq.store.copies.epochs import Epoch, Epochs
from metaq.store.files.disk import Disk
from metaq.store.files.documents import read_document
from metaq.store.files.filecache import Read, read_here
from metaq.store.queues.consumequeue import ConsumeQueue
from metaq.store.runs import kept_from, offsets_of

logger = logging.getLogger(__name__)

LOG: Final = "log"
"""The member of the document that holds the state of the log."""


def moment(epochs: Epochs, log_end: int) -> dict[str, list[int]]:
    """Return the member for a snapshot made in the newest epoch when the log ended at ``log_end``."""
    return {LOG: [*epochs.current, log_end]}


def made_end(content: dict[str, Any]) -> int:
    """Return the log offset at which the log ended when a snapshot was made; 0 when it does not say."""
    return int(content[LOG][-1]) if LOG in content else 0


def shared_end(epochs: Epochs, content: dict[str, Any]) -> int:
    """Return the log offset up to which the own log equals the log that a snapshot was made from; at most ``made_end``."""
    if LOG not in content:
        return 0
    *epoch, end = content[LOG]
    return epochs.shared_end(Epoch(*epoch), end)


def read_snapshot(disk: Disk, path: Path, epochs: Epochs) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the newest intact version that the own log covers, or ``None``, and what was wrong with damaged versions."""

    def is_covered(content: dict[str, Any]) -> bool:
        shared, made = shared_end(epochs, content), made_end(content)
        if shared < made:
            logger.info("snapshot ahead of the log, passed over path=%s made_at=%d shared_end=%d", path, made, shared)
        return shared == made

    return read_document(disk, path, is_covered)


def ordinal_at(queue: ConsumeQueue, log_offset: int) -> int:
    """Return the ordinal of the first message of a queue at or after a log offset.

    A lost message has no log offset; it counts as having that of the message after it.
    """
    low, high = queue.base, queue.next
    if high > low and offset_from(queue, high - 1, high, read_here) < log_offset:
        return high
    while low < high:
        middle = (low + high) // 2
        if offset_from(queue, middle, high, read_here) < log_offset:
            low = middle + 1
        else:
            high = middle
    return low


def offset_from(queue: ConsumeQueue, ordinal: int, end: int, read: Read) -> int:
    """Return the log offset of the first message from an ordinal on that is not lost; a very high one without one."""
    return next((offset for _, offset in offsets_of(queue, kept_from(queue, ordinal, end, read), read)), 1 << 62)

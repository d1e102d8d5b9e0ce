"""Snapshots: documents that shorten the way through the log. Each carries the moment of the log at which it was made::

    {"crc32c":"…","log":[5,99500,2,120000], …}      in epoch 5, which replica 2 began at log offset 99500,
                                                    when the log ended at 120000

A replica may have a snapshot that knows more than its log: the master sent it, and a power cut took what had come with it. When
another replica becomes master then, other records take the places that the snapshot speaks of. So a snapshot counts only where
the own log holds all that it was made from. Otherwise its backup does, if that is older, or what it would shorten is read.

One without a moment is of a version before this one, and is believed.
"""

import logging
from pathlib import Path
from typing import Any, Final

from metaq.store.copies.epochs import Epoch, Epochs
from metaq.store.files.disk import Disk
from metaq.store.files.documents import read_document
from metaq.store.files.filecache import read_here
from metaq.store.queues.consumequeue import FILLER_SIZE, ConsumeQueue

logger = logging.getLogger(__name__)

LOG: Final = "log"
"""The member with the moment."""


def moment(epochs: Epochs, log_end: int) -> dict[str, list[int]]:
    """The member that says when a snapshot was made: in the newest epoch, when the log ended there."""
    return {LOG: [*epochs.current, log_end]}


def made_end(content: dict[str, Any]) -> int:
    """Where the log ended when a snapshot was made; 0 when it does not say."""
    return int(content[LOG][-1]) if LOG in content else 0


def shared_end(epochs: Epochs, content: dict[str, Any]) -> int:
    """The log offset before which the own log is what a snapshot was made from; at most ``made_end``."""
    if LOG not in content:
        return 0
    *epoch, end = content[LOG]
    return epochs.shared_end(Epoch(*epoch), end)


def read_snapshot(disk: Disk, path: Path, epochs: Epochs) -> tuple[dict[str, Any] | None, list[str]]:
    """The newest intact version that the own log covers, ``None`` when there is none, and what was damaged."""

    def is_covered(content: dict[str, Any]) -> bool:
        shared, made = shared_end(epochs, content), made_end(content)
        if shared < made:
            logger.info("snapshot ahead of the log, passed over path=%s made_at=%d shared_end=%d", path, made, shared)
        return shared == made

    return read_document(disk, path, is_covered)


def ordinal_at(queue: ConsumeQueue, log_offset: int) -> int:
    """The ordinal of the first message of a queue that is at or behind a log offset; a lost one counts with that behind it."""
    low, high = queue.base, queue.next
    if high > low and queue.unit(high - 1, read_here)[0] < log_offset:
        return high
    while low < high:
        middle = probe = (low + high) // 2
        while probe < high and queue.unit(probe, read_here)[1] == FILLER_SIZE:
            probe += 1
        if probe < high and queue.unit(probe, read_here)[0] < log_offset:
            low = probe + 1
        else:
            high = middle
    return low

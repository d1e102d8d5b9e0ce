"""Young partitions: a group without an offset reads them from the first message on, whatever it asks for."""

import os
from typing import Final

from metaq.store.files.filecache import Read
from metaq.store.messagestore import MessageStore
from metaq.store.queues.consumequeue import ConsumeQueue

YOUNG_SHARE: Final = 0.4
"""A partition is young when its first message is no further before the end of the log than this share of the machine's
memory."""
_YOUNG_BYTES: Final = round(YOUNG_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def is_young(store: MessageStore, queue: ConsumeQueue, read: Read) -> bool:
    """Return whether no message of a partition has been deleted, and the first one may still be in memory."""
    return not store.first(queue, read)[0] and store.log.end - queue.unit(0, read)[0] <= _YOUNG_BYTES

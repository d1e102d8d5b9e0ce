"""Entering records of the log into the queues derived from it: records that recovery walks, and copied ones."""

from metaq.protocol.record import RecordIdentity
from metaq.protocol.text.messages import Stored, text_size_and_tag
from metaq.store.queues.consumequeue import ConsumeQueue


def enter(queue: ConsumeQueue, stored: Stored, identity: RecordIdentity, *, kept: bool = True) -> None:
    """Enter an intact record into its queue, unless it is there already. Messages missing before it become fillers.

    A record that is not ``kept`` becomes a filler too, so that its ordinal and text position are not used again.
    """
    ordinal = identity.queue_offset
    if ordinal < queue.next:
        return
    if ordinal > queue.next:
        if queue.next <= queue.base:
            queue.reset(ordinal, 0)
        queue.fill(ordinal)
    queue.text_end = identity.text_position
    size, tag = text_size_and_tag(stored, queue.overhead)
    if kept:
        queue.add(stored.log_offset, stored.size, tag, size)
    else:
        queue.fill(ordinal + 1)
        queue.text_end += size

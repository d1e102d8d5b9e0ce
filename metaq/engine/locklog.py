"""The locks of ordered consumers, kept in the log: a client keeps its queues when the broker is restarted or replaced.

Each lock that is taken, renewed or given back is recorded in a message of the internal topic ``METAQ_SYS_LOCKS``. A client
learns that it has a queue when that record is as safe as an acknowledged message. The body is JSON; thousands of queues take
several messages::

    {"group":"billing","client":"10.0.0.7@4711","held":true,"queues":[["orders","broker-a",0],["orders","broker-a",3]]}
    {"group":"billing","client":"10.0.0.7@4711","held":false,"queues":[["orders","broker-a",0]]}

A lock lasts ``LOCK_S`` from the store time of its message, so a start reads only the younger messages. After a failover that
compares the clocks of two machines. Clients rely on half of that time only (``metaq.client.consuming.locks``), so clocks that
differ by less than the other half do no harm.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

import orjson

from metaq.engine.context import Context
from metaq.engine.tables.locks import LOCK_S, QueueLocks
from metaq.engine.turn import PutOutcome, Turns
from metaq.engine.writing import internal, note, stage
from metaq.errors import DiskFull, MetaqError
from metaq.message import LOCKS_TOPIC, MessageQueue, TopicPartition
from metaq.protocol.record import decode_record
from metaq.protocol.remoting.heartbeats import QueueSet
from metaq.store.files.filecache import read_here

logger = logging.getLogger(__name__)

MOST_QUEUES: Final = 2048
"""The most queues in one message."""
QUEUE_BYTES: Final = 300
"""The most bytes that one queue takes in a message: topic and broker name have up to 127 characters each."""
RECORD_BYTES: Final = 2048
"""Bytes allowed for the rest of a message beside its queues."""
READ_BYTES: Final = 256 * 1024

_KEY: Final = TopicPartition(LOCKS_TOPIC, 0)


class LockLog:
    """The locks of one broker, kept in the log."""

    def __init__(self, context: Context, turns: Turns) -> None:
        """Load the locks that the log holds and that have not run out."""
        self._context = context
        self._store = context.store
        self._turns = turns
        self._most = max(1, min(MOST_QUEUES, (context.settings.segment_bytes - RECORD_BYTES) // QUEUE_BYTES))
        self._locks = QueueLocks()
        self._load()

    def _load(self) -> None:
        queue, reader, clock = self._store.queues.get(_KEY), self._store.reader, self._store.clock
        if queue is None:
            return
        now_ms, now_s = clock.now_ms(), clock.monotonic()
        first = reader.at_time(queue, now_ms - round(1000 * LOCK_S), read_here)
        for stored in self._store.records(queue, first, READ_BYTES, read_here):
            if stored is None:
                continue
            record = decode_record(stored.buffer[stored.at : stored.at + stored.size])
            row = orjson.loads(record.body)
            queues = [MessageQueue(*fields) for fields in row["queues"]]
            if row["held"]:
                age_s = max(0, now_ms - record.store_ms) / 1000
                self._locks.give(row["group"], row["client"], queues, now_s - age_s)
            else:
                self._locks.unlock(row["group"], row["client"], queues)

    # -- what clients ask ---------------------------------------------------------------------------------------------

    def lock(
        self, wanted: QueueSet, owner: str, waiting: Callable[[Sequence[MessageQueue]], PutOutcome]
    ) -> Sequence[MessageQueue] | None:
        """Take or renew locks of queues that exist on this broker; return the queues that the client has now.

        Returns ``None`` when the locks are not safe yet: then the outcome that ``waiting`` makes of the queues receives the
        result. A master that has been replaced grants none (``check_master`` raises). When the disk is full, locks are kept in
        memory only, so that consumers can go on.
        """
        self._store.check_master()
        queues, now_s = [queue for queue in wanted.queues if self._is_here(queue)], self._store.clock.monotonic()
        taken = self._locks.lock(wanted.group, wanted.client_id, queues, now_s, owner)
        if not taken:
            return taken
        try:
            self._store.check_writable()
            self._stage(wanted, taken, held=True)
        except DiskFull as error:
            logger.warning("locks are not kept group=%s client=%s reason=%s", wanted.group, wanted.client_id, error)
            if not self._store.settled:  # some of several messages are staged
                note(self._turns, _not_kept)
            return taken
        self._turns.staged(waiting(taken))
        return None

    def _is_here(self, queue: MessageQueue) -> bool:
        topic = self._context.topics.get(queue.topic)
        ours = queue.broker_name == self._context.settings.broker_name
        return ours and topic is not None and 0 <= queue.partition < topic.all_partitions

    def unlock(self, given: QueueSet) -> None:
        """Give back queues, without waiting until the log has it."""
        self._store.check_master()
        freed = self._locks.unlock(given.group, given.client_id, given.queues)
        if freed and self._store.writable:
            self._stage(given, freed, held=False)
            note(self._turns, _not_kept)

    def expire(self) -> None:
        """Remove the locks that have run out."""
        self._locks.expire(self._store.clock.monotonic())

    def _stage(self, whose: QueueSet, queues: Sequence[MessageQueue], *, held: bool) -> None:
        for start in range(0, len(queues), self._most):
            rows = [list(queue) for queue in queues[start : start + self._most]]
            row: dict[str, Any] = {"group": whose.group, "client": whose.client_id, "held": held, "queues": rows}
            stage(self._context, internal(self._context, LOCKS_TOPIC, orjson.dumps(row)))


def _not_kept(error: MetaqError | None) -> None:
    if error is not None:
        logger.warning("a change of locks is not kept reason=%s", error)

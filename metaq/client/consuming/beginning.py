"""The place where a group begins in a queue in which it has no committed offset."""

import enum
from datetime import datetime
from typing import Final

from metaq.client.consuming.offsets import QueueEnds
from metaq.client.message import unix_ms
from metaq.message import RETRY_PREFIX, MessageQueue, QueueOffset

_FROM_TIME: Final = "CONSUME_FROM_TIMESTAMP"


class ConsumeFrom(enum.Enum):
    """The place where a group without a committed offset begins; the values are those on the wire.

    While a topic is young, a broker may make a group begin at the oldest message in any case.
    """

    LAST = "CONSUME_FROM_LAST_OFFSET"
    FIRST = "CONSUME_FROM_FIRST_OFFSET"


class Beginning:
    """The beginning that one consumer asks for."""

    def __init__(self, ends: QueueEnds, consume_from: ConsumeFrom | datetime) -> None:
        self._ends = ends
        self._consume_from = consume_from

    @property
    def wire(self) -> str:
        """Its name in heartbeats."""
        return self._consume_from.value if isinstance(self._consume_from, ConsumeFrom) else _FROM_TIME

    def offset(self, queue: MessageQueue, deadline: float) -> QueueOffset:
        """Return the offset in a queue. Messages to be retried are all consumed."""
        if queue.topic.startswith(RETRY_PREFIX) or self._consume_from is ConsumeFrom.FIRST:
            return self._ends.begin(queue, deadline)
        if isinstance(self._consume_from, datetime):
            return self._ends.at_time(queue, unix_ms(self._consume_from), deadline)
        return self._ends.end(queue, deadline)

"""A streaming query's progress as offsets of a consumer group, for tools that watch groups."""

import json
import logging
from typing import Any

from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)

from metaq.client import checks
from metaq.errors import MetaqError
from metaq.message import MessageQueue
from metaq.spark.login import from_environment
from metaq.spark.reading.brokers import Brokers
from metaq.spark.reading.ranges import QUEUES, decode_position

logger = logging.getLogger(__name__)


class GroupOffsets(StreamingQueryListener):
    """Commits the next offsets of queries after each of their batches: ``spark.streams.addListener(GroupOffsets(…))``.

    The option ``groupId`` commits only when the next batch begins, so never after the last one. The offsets are for display: a
    query starts again from its checkpoint. A commit that fails is logged; the next batch's commit makes up for it.
    """

    def __init__(self, servers: str, group: str, *, query: str | None = None, user: str = "", tls_ca: str = "") -> None:
        """Commit offsets of ``group``. ``BadRequest`` for a name that no group can have, or an address that cannot be read.

        ``query``: only the query with this name; by default every one. ``user`` and ``tls_ca`` are like the options
        ``metaq.user`` and ``metaq.tls.ca``; the password is read from METAQ_PASSWORD. ``ConfigError`` for a user without one.
        """
        checks.group(group)
        self._brokers = Brokers(servers, from_environment(user, tls_ca))
        self._group = group
        self._query = query

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        """Commit the offsets of a batch, which Spark has recorded as done."""
        if self._query in {None, event.progress.name}:
            for source in event.progress.sources:
                self._commit(source.endOffset)

    def _commit(self, text: str | None) -> None:
        found: Any = json.loads(text) if text else None
        if not isinstance(found, dict) or QUEUES not in found:
            return  # another source's
        try:
            position = decode_position(found)
            offsets: dict[MessageQueue, int] = {
                position.layout[key.topic][key.partition]: offset for key, offset in position.offsets.items()
            }
            self._brokers.commit(self._group, offsets)
        except MetaqError as error:
            logger.warning("offsets not committed group=%s reason=%s", self._group, error)

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        """Do nothing: no batch is done yet."""

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        """Do nothing: no batch was done."""

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        """Do nothing: the last batch was reported before."""

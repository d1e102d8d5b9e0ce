"""Offsets of a consumer group from a streaming query's progress, for tools that watch groups."""

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

from metaq.errors import MetaqError
from metaq.message import MessageQueue
from metaq.spark.reading.brokers import Brokers
from metaq.spark.reading.login import from_environment
from metaq.spark.reading.ranges import QUEUES, decode_position

logger = logging.getLogger(__name__)


class GroupOffsets(StreamingQueryListener):
    """Commits the next offsets of queries after each of their batches: ``spark.streams.addListener(GroupOffsets(…))``.

    The option ``groupId`` does so when the next batch begins, and never for the last one. Offsets are a report: a query begins
    again where its checkpoint says. What cannot be committed is logged, and is in the next batch's offsets.
    """

    def __init__(self, servers: str, group: str, *, query: str | None = None, user: str = "", tls_ca: str = "") -> None:
        """``query``: only the one with this name. ``BadRequest`` for an address that cannot be read.

        ``user`` and ``tls_ca`` are as the options ``metaq.user`` and ``metaq.tls.ca``; the password is in METAQ_PASSWORD, and
        ``ConfigError`` says when it is not.
        """
        self._brokers = Brokers(servers, from_environment(user, tls_ca))
        self._group = group
        self._query = query

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        """Spark has written down that a batch is done."""
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
        """Nothing is done yet."""

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        """Nothing more is done."""

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        """Its last batch was told before."""

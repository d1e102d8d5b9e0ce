"""Locks by which one member of a group at a time reads a queue in order (specs: remoting protocol, section 3.2.7)."""

import itertools
import logging
import threading
import time
from collections.abc import Iterable
from operator import attrgetter
from typing import Final

from metaq.client.core import CONTROL_TIMEOUT_S, Core
from metaq.client.transport import Question, ask
from metaq.errors import BadRequest, ClientError
from metaq.message import MessageQueue
from metaq.protocol import fastjson
from metaq.protocol.codes import Request

logger = logging.getLogger(__name__)

RENEW_S: Final = 20.0
VALID_S: Final = 30.0
"""Brokers give a lock away after 60 s; this much of it a member dares to use."""


class QueueLocks:
    """The locks that one member holds."""

    def __init__(self, core: Core, group: str) -> None:
        self._core = core
        self._group = group
        self._guard = threading.Lock()
        self._until: dict[MessageQueue, float] = {}

    def holds(self, queue: MessageQueue) -> bool:
        """Whether the queue is this member's, for certain and now."""
        with self._guard:
            return self._until.get(queue, 0.0) > time.monotonic()

    def take(self, queues: Iterable[MessageQueue]) -> list[MessageQueue]:
        """Lock queues, or renew their locks; those that are this member's now."""
        taken: list[MessageQueue] = []
        for broker_name, own in itertools.groupby(sorted(queues, key=_broker_name), key=_broker_name):
            asked = time.monotonic()
            try:
                question = self._question(Request.LOCK_BATCH_MQ, own)
                response = self._core.ask_broker(broker_name, question, asked + CONTROL_TIMEOUT_S)
                given = _locked(response.body)
            except ClientError as error:
                logger.warning("no locks group=%s broker=%s reason=%s", self._group, broker_name, error)
                continue
            with self._guard:
                self._until |= dict.fromkeys(given, asked + VALID_S)
            taken += given
        return taken

    def renew(self) -> None:
        """Renew all locks; one that cannot be renewed runs out."""
        with self._guard:
            queues = list(self._until)
        self.take(queues)

    def release(self, queues: Iterable[MessageQueue]) -> None:
        """Let other members have queues; a broker that cannot be told lets the locks run out."""
        for broker_name, own in itertools.groupby(sorted(queues, key=_broker_name), key=_broker_name):
            released = list(own)
            with self._guard:
                for queue in released:
                    self._until.pop(queue, None)
            try:
                question = self._question(Request.UNLOCK_BATCH_MQ, released)
                address = self._core.master(broker_name)
                ask(self._core.transport, address, question, time.monotonic() + CONTROL_TIMEOUT_S)
            except ClientError as error:
                logger.info("locks not released group=%s broker=%s reason=%s", self._group, broker_name, error)

    def _question(self, code: Request, queues: Iterable[MessageQueue]) -> Question:
        body = {"clientId": self._core.id, "consumerGroup": self._group, "mqSet": list(queues)}
        return Question.of(code, None, fastjson.encode(body))


_broker_name = attrgetter("broker_name")


def _locked(body: bytes) -> list[MessageQueue]:
    try:
        rows = fastjson.decode(body)["lockOKMQSet"]
        return [MessageQueue(row["topic"], row["brokerName"], row["queueId"]) for row in rows]
    except (BadRequest, KeyError, TypeError) as error:
        raise ClientError(f"a broker answered {body[:80]!r} where locked queues are due") from error

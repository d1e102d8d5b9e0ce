"""Locks by which one member of a group at a time reads a queue in order (specs: remoting protocol, section 3.2.7)."""

import itertools
import logging
import threading
import time
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Final

from metaq.client.connecting.core import CONTROL_TIMEOUT_S, Core
from metaq.client.connecting.presence import level_of
from metaq.client.connecting.transport import Question
from metaq.errors import BadRequest, ClientError
from metaq.message import MessageQueue
from metaq.protocol.remoting import fastjson
from metaq.protocol.remoting.codes import Request
from metaq.protocol.remoting.frames import RemotingCommand

logger = logging.getLogger(__name__)

RENEW_S: Final = 20.0
AGAIN_S: Final = 1.0
"""Until a broker is told again that did not answer: no lock is to run out, and none to last, because a master is replaced."""
GIVEN_AWAY_S: Final = 60.0
"""After which brokers give a lock away that is not renewed."""
VALID_S: Final = 30.0
"""This much of it a member dares to use."""


class QueueLocks:
    """The locks that one member holds."""

    def __init__(self, core: Core, group: str) -> None:
        self._core = core
        self._group = group
        self._asking = threading.Lock()  # a renewal on its way must not take back what is released meanwhile
        self._guard = threading.Lock()  # guards what follows
        self._until: dict[MessageQueue, float] = {}
        self._leaving: dict[MessageQueue, float] = {}
        """Released, but its broker does not know yet; until when it is worth telling."""
        self._planned = False

    def holds(self, queue: MessageQueue) -> bool:
        """Whether the queue is this member's, for certain and now."""
        with self._guard:
            return self._until.get(queue, 0.0) > time.monotonic()

    def take(self, queues: Iterable[MessageQueue]) -> list[MessageQueue]:
        """Lock queues, or renew their locks; those that are this member's now."""
        with self._asking:
            taken, _ = self._take(queues)
            return taken

    def renew(self) -> None:
        """Renew all locks; one that cannot be renewed runs out."""
        with self._asking:
            with self._guard:
                queues = list(self._until)
            _, answered = self._take(queues)
        if not answered:
            self._plan()

    def release(self, queues: Iterable[MessageQueue]) -> None:
        """Let other members have queues."""
        with self._asking:
            with self._guard:
                for queue in queues:
                    self._until.pop(queue, None)
                    self._leaving[queue] = time.monotonic() + GIVEN_AWAY_S
            answered = self._leave()
        if not answered:
            self._plan()

    def _take(self, queues: Iterable[MessageQueue]) -> tuple[list[MessageQueue], bool]:
        """Those that are this member's now, and whether all brokers have answered."""
        taken: list[MessageQueue] = []
        answered = True
        for asked, own, response in self._ask(Request.LOCK_BATCH_MQ, queues):
            try:
                given = [] if response is None else _locked(response.body)
            except ClientError as error:
                logger.warning("no locks group=%s broker=%s reason=%s", self._group, own[0].broker_name, error)
                given = []
            answered = answered and response is not None
            with self._guard:
                self._until |= dict.fromkeys(given, asked + VALID_S)
                for queue in given:
                    self._leaving.pop(queue, None)
            taken += given
        return taken, answered

    def _leave(self) -> bool:
        """Tell brokers what is released; whether they all know."""
        with self._guard:
            now = time.monotonic()
            self._leaving = {queue: until for queue, until in self._leaving.items() if until > now}
            queues = list(self._leaving)
        for _, own, response in self._ask(Request.UNLOCK_BATCH_MQ, queues):
            if response is not None:
                with self._guard:
                    for queue in own:
                        self._leaving.pop(queue, None)
        with self._guard:
            return not self._leaving

    def _plan(self) -> None:
        with self._guard:
            if self._planned:
                return
            self._planned = True
        self._core.scheduler.after(AGAIN_S, self._again)

    def _again(self) -> None:
        with self._guard:
            self._planned = False
        with self._asking:
            answered = self._leave()
        if not answered:
            self._plan()
        self.renew()

    def _ask(
        self, code: Request, queues: Iterable[MessageQueue]
    ) -> Iterator[tuple[float, list[MessageQueue], RemotingCommand | None]]:
        """Ask each broker about its queues: when, which, and its answer; ``None`` when there is none that helps."""
        for broker_name, own in itertools.groupby(sorted(queues, key=_broker_name), key=_broker_name):
            asked, those = time.monotonic(), list(own)
            try:
                answer = self._core.ask_broker(broker_name, self._question(code, those), asked + CONTROL_TIMEOUT_S)
            except ClientError as error:
                logger.log(level_of(error), "locks not told group=%s broker=%s reason=%s", self._group, broker_name, error)
                yield asked, those, None
            else:
                yield asked, those, answer

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

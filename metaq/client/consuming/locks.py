"""Queue locks, by which only one member of a group reads a queue in order (specs: remoting protocol, section 3.2.7)."""

import itertools
import logging
import threading
import time
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Final

from metaq.client.connecting.core import CONTROL_TIMEOUT_S, Core
from metaq.client.connecting.presence import level_of
from metaq.client.connecting.transport import RemotingRequest
from metaq.errors import BadRequest, ClientError
from metaq.message import MessageQueue
from metaq.protocol.remoting import fastjson
from metaq.protocol.remoting.codes import Request
from metaq.protocol.remoting.frames import RemotingCommand

logger = logging.getLogger(__name__)

RENEW_S: Final = 20.0
AGAIN_S: Final = 1.0
"""The pause before a broker that did not answer is asked again, so that a failover neither expires a lock nor prolongs one."""
GIVEN_AWAY_S: Final = 60.0
"""The time after which brokers expire a lock that is not renewed."""
VALID_S: Final = 30.0
"""The part of that time in which a member relies on its lock."""


class HeldQueueLocks:
    """The queue locks that one member holds. Thread-safe."""

    def __init__(self, core: Core, group: str) -> None:
        self._core = core
        self._group = group
        self._asking = threading.Lock()  # a renewal in flight must not lock again what is released meanwhile
        self._guard = threading.Lock()  # guards what follows
        self._until: dict[MessageQueue, float] = {}
        self._leaving: dict[MessageQueue, float] = {}
        """The locks that are released but whose broker does not know it yet, with the time at which they expire anyway."""
        self._planned = False

    def holds(self, queue: MessageQueue) -> bool:
        """Return whether this member certainly holds the lock of a queue now."""
        with self._guard:
            return self._until.get(queue, 0.0) > time.monotonic()

    def take(self, queues: Iterable[MessageQueue]) -> list[MessageQueue]:
        """Lock queues, or renew their locks, and return those that this member holds now. Failures are logged, not raised."""
        with self._asking:
            taken, _ = self._take(queues)
            return taken

    def renew(self) -> None:
        """Renew all locks; one that cannot be renewed expires."""
        with self._asking:
            with self._guard:
                queues = list(self._until)
            _, answered = self._take(queues)
        if not answered:
            self._plan()

    def release(self, queues: Iterable[MessageQueue]) -> None:
        """Release the locks of queues. A broker that does not answer is asked again later."""
        with self._asking:
            with self._guard:
                for queue in queues:
                    self._until.pop(queue, None)
                    self._leaving[queue] = time.monotonic() + GIVEN_AWAY_S
            answered = self._leave()
        if not answered:
            self._plan()

    def _take(self, queues: Iterable[MessageQueue]) -> tuple[list[MessageQueue], bool]:
        """Lock queues; return those that this member holds now, and whether all brokers have answered."""
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
        """Unlock the released queues at their brokers; return whether all brokers know."""
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
        """Ask each broker about its queues; yield the time of the request, the queues, and the answer or ``None``."""
        for broker_name, own in itertools.groupby(sorted(queues, key=_broker_name), key=_broker_name):
            asked, those = time.monotonic(), list(own)
            try:
                answer = self._core.ask_broker(broker_name, self._request(code, those), asked + CONTROL_TIMEOUT_S)
            except ClientError as error:
                logger.log(level_of(error), "locks not told group=%s broker=%s reason=%s", self._group, broker_name, error)
                yield asked, those, None
            else:
                yield asked, those, answer

    def _request(self, code: Request, queues: Iterable[MessageQueue]) -> RemotingRequest:
        body = {"clientId": self._core.id, "consumerGroup": self._group, "mqSet": list(queues)}
        return RemotingRequest.of(code, None, fastjson.encode(body))


_broker_name = attrgetter("broker_name")


def _locked(body: bytes) -> list[MessageQueue]:
    try:
        rows = fastjson.decode(body)["lockOKMQSet"]
        return [MessageQueue(row["topic"], row["brokerName"], row["queueId"]) for row in rows]
    except (BadRequest, KeyError, TypeError) as error:
        raise ClientError(f"a broker answered {body[:80]!r} instead of locked queues") from error

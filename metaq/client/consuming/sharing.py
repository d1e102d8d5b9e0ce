"""The share of one member: which queues of a topic it consumes, by the members and queues that its group has now."""

import enum
import logging
import time
from collections.abc import Sequence
from typing import Final, NamedTuple

import orjson

from metaq.client.connecting.core import CONTROL_TIMEOUT_S, Core
from metaq.client.connecting.presence import level_of
from metaq.client.connecting.transport import RemotingRequest, successful
from metaq.errors import ClientError, RouteNotFound, RouteProblem
from metaq.message import MessageQueue
from metaq.protocol.remoting.codes import Request
from metaq.protocol.remoting.headers import ConsumerGroupOnly
from metaq.registry.assign import Assign

logger = logging.getLogger(__name__)

_MOST_ASKED: Final = 3
"""The most brokers that are asked for the members at one time; the next time begins with others, should these be silent."""


class Model(enum.Enum):
    """The way in which the members of a group share its messages; the values are those on the wire."""

    CLUSTERING = "CLUSTERING"
    """Each message goes to one member."""
    BROADCASTING = "BROADCASTING"
    """Each message goes to all members."""


class Share(NamedTuple):
    """The answer of ``Sharing.share``."""

    queues: Sequence[MessageQueue] | None
    """``None`` when it is not known: then the member keeps what it has."""
    is_final: bool = True
    """False when it may soon be known."""


class Sharing:
    """The way in which the members of one group share its queues."""

    def __init__(self, core: Core, group: str, model: Model, assign: Assign) -> None:
        self._core = core
        self._group = group
        self._model = model
        self._assign = assign
        self._failed_at: dict[str, float] = {}
        """The brokers that did not tell the members when they were last asked, with the readings of ``time.monotonic``."""

    def share(self, topic: str) -> Share:
        """Return this member's queues of a topic. Failures are logged."""
        try:
            queues = self._core.routes.readable(topic, time.monotonic() + CONTROL_TIMEOUT_S)
            members = self._members(queues) if self._model is Model.CLUSTERING else [self._core.id]
        except RouteNotFound as error:
            logger.debug("no route group=%s reason=%s", self._group, error)
            return Share(None, error.reason is RouteProblem.NO_PERMISSION)
        except ClientError as error:
            logger.log(level_of(error), "members not known group=%s topic=%s reason=%s", self._group, topic, error)
            return Share(None, is_final=False)
        if self._core.id not in members:
            logger.info("member not known to brokers yet group=%s topic=%s", self._group, topic)
            self._core.heartbeat()
            return Share(None, is_final=False)
        return Share(queues if self._model is Model.BROADCASTING else self._assign(self._core.id, queues, members))

    def _members(self, queues: Sequence[MessageQueue]) -> list[str]:
        """Return the ids of the members, from the first broker that answers; all brokers know the same members.

        Each broker has a time limit of its own. Those that did not answer before are asked last, the latest of them at the end.
        """
        request = RemotingRequest.of(Request.GET_CONSUMER_LIST_BY_GROUP, ConsumerGroupOnly(self._group))
        failure: ClientError = ClientError(f"no broker of {queues[0].topic} has an address")
        names = {queue.broker_name for queue in queues}
        for name in sorted(names, key=lambda name: (self._failed_at.get(name, 0.0), name))[:_MOST_ASKED]:
            try:
                until = time.monotonic() + CONTROL_TIMEOUT_S
                response = successful(self._core.call_any(name, request, until, shares_time=True))
                members = list(map(str, orjson.loads(response.body)["consumerIdList"]))
            except ClientError as error:
                failure = error
            except (orjson.JSONDecodeError, KeyError, TypeError) as error:
                failure = ClientError(f"{name} answered {response.body[:80]!r} where members are due: {error!r}")
            else:
                self._failed_at.pop(name, None)
                return members
            self._failed_at[name] = time.monotonic()
        raise failure

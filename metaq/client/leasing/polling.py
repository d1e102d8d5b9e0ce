"""Long polls: one at each broker that has the topic, while somebody waits for messages."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

from metaq.client.connecting.core import CONTROL_TIMEOUT_S, Core
from metaq.client.connecting.presence import level_of
from metaq.client.connecting.transport import Outcome, refusal
from metaq.client.leasing.lease import Lease
from metaq.client.leasing.requests import EMPTY, LeaseTerms, read_popped
from metaq.client.retries import READ_BACKOFF
from metaq.errors import BrokerBusy, ClientError, ConnectionFailed, Refused
from metaq.protocol.remoting.codes import Response

logger = logging.getLogger(__name__)

_ANSWER_S: Final = 15.0
"""The time that a poll may take beyond the time that the broker may hold it."""
_TOO_SOON_PAUSE_S: Final = 0.1
_TOO_SOON_S: Final = 0.05
"""A broker that has no messages holds a poll. When it answers faster than this, or need not hold it, there is a pause."""
_SOON_S: Final = 1.0
"""The pause before a route is asked for again that was not there."""


class Demand(NamedTuple):
    """The messages that are wanted now."""

    most: int
    """Messages from each broker; 0: none."""
    wait_s: float
    """The time that a broker may hold a poll."""


class _Poll:
    """The poll at one broker: at most one at a time."""

    def __init__(self) -> None:
        self.is_busy = False
        """True while it is in flight, and during a pause after it."""
        self.failures = 0


class Polls:
    """The polls of one consumer. They survive lost brokers and follow the topic's route. Thread-safe."""

    def __init__(
        self, core: Core, terms: LeaseTerms, demand: Callable[[bool], Demand], deliver: Callable[[Sequence[Lease]], None]
    ) -> None:
        """Create it; ``demand`` says what is wanted, and ``deliver`` takes messages. Both are called on any thread.

        ``demand`` takes true for a planned poll: whoever has planned it may have gone since, to come again for the messages.
        """
        self._core = core
        self._terms = terms
        self._demand = demand
        self._deliver = deliver
        self._guard = threading.Lock()  # guards what follows
        self._polls: dict[str, _Poll] = {}
        self._is_planned = False
        self._resolves_soon = False
        self._is_closed = False

    def close(self) -> None:
        """Poll no more. Messages that still arrive are delivered."""
        self._is_closed = True

    def look(self) -> None:
        """Look for another master soon, because one is lost or none any more."""
        self._core.look_for_masters()
        self._resolve_soon()  # a send may have forgotten the route, and what is not known is not refreshed

    # -- the route ----------------------------------------------------------------------------------------------------

    def resolve(self) -> None:
        """Find out which brokers have the topic, and poll these. Without a route, this happens again soon."""
        if self._is_closed:
            return
        topic = self._terms.topic
        try:
            names = {queue.broker_name for queue in self._core.routes.readable(topic, time.monotonic() + CONTROL_TIMEOUT_S)}
        except ClientError as error:
            logger.debug("no route group=%s reason=%s", self._terms.group, error)
            self._resolve_soon()
            return
        with self._guard:
            self._polls = {name: self._polls.get(name) or _Poll() for name in sorted(names)}
        self.poll()

    def _resolve_soon(self) -> None:
        with self._guard:
            if self._resolves_soon:
                return
            self._resolves_soon = True
        self._core.scheduler.after(_SOON_S, self._resolve_again)

    def _resolve_again(self) -> None:
        with self._guard:
            self._resolves_soon = False
        self.resolve()

    # -- polls --------------------------------------------------------------------------------------------------------

    def poll_soon(self) -> None:
        """Call ``poll`` on another thread: it may have to connect."""
        with self._guard:
            if self._is_planned:
                return
            self._is_planned = True
        self._core.scheduler.run(self._poll_as_planned)

    def _poll_as_planned(self) -> None:
        with self._guard:
            self._is_planned = False
        self.poll(is_planned=True)

    def poll(self, *, is_planned: bool = False) -> None:
        """Ask each broker that is not being asked for the messages that are wanted, if any."""
        with self._guard:
            polls = list(self._polls.items())
        for name, poll in polls:
            self._poll(name, poll, is_planned=is_planned)

    def _poll(self, name: str, poll: _Poll, *, is_planned: bool = False) -> None:
        most, wait_s = self._demand(is_planned)
        with self._guard:
            if not most or poll.is_busy or self._is_closed or self._polls.get(name) is not poll:
                return
            poll.is_busy = True
        sent_s = time.monotonic()
        request = self._terms.pop(name, most, round(wait_s * 1000))
        answered = partial(self._answered, name, poll, sent_s + (min(wait_s, _TOO_SOON_S) or _TOO_SOON_S))
        try:
            self._core.transport.submit(self._core.master(name), request, sent_s + wait_s + _ANSWER_S, answered)
        except ClientError as error:
            answered(error)

    def _answered(self, name: str, poll: _Poll, held_until_s: float, outcome: Outcome) -> None:
        try:
            leases = self._take(name, outcome)
        except Exception as error:  # noqa: BLE001 - whatever it is, even a lack of memory, there must be another poll
            self._failed(name, poll, error)
            return
        with self._guard:
            poll.failures = 0
            poll.is_busy = is_too_soon = not leases and time.monotonic() <= held_until_s
        if is_too_soon:
            self._core.scheduler.after(_TOO_SOON_PAUSE_S, partial(self._resume, name, poll))
            return
        if leases:
            self._deliver(leases)
        self._poll(name, poll)

    def _take(self, name: str, outcome: Outcome) -> list[Lease]:
        if isinstance(outcome, ClientError):
            raise outcome
        if outcome.code in EMPTY:
            return []
        if outcome.code != Response.SUCCESS:
            raise refusal(outcome)
        now_s, invisible_s = time.monotonic(), self._terms.invisible_ms / 1000
        popped = read_popped(outcome, name, self._terms.topic, self._core.max_inflated_bytes)
        return [Lease(message, receipt, now_s, invisible_s) for message, receipt in popped]

    def _failed(self, name: str, poll: _Poll, error: Exception) -> None:
        group, topic = self._terms.group, self._terms.topic
        logger.log(level_of(error), "poll failed group=%s topic=%s broker=%s reason=%r", group, topic, name, error)
        if isinstance(error, Refused) and error.code in {Response.TOPIC_NOT_EXIST, Response.NO_PERMISSION}:
            self._core.routes.forget(topic)
            self._resolve_soon()
        elif isinstance(error, ConnectionFailed) or getattr(error, "code", 0) == Response.SERVICE_NOT_AVAILABLE:
            self.look()
        with self._guard:
            pause_s = READ_BACKOFF.pause_s(poll.failures)
            poll.failures += 1
        least_s = error.retry_after_s if isinstance(error, BrokerBusy) else 0.0
        self._core.scheduler.after(max(least_s, pause_s), partial(self._resume, name, poll))

    def _resume(self, name: str, poll: _Poll) -> None:
        with self._guard:
            poll.is_busy = False
        self._poll(name, poll)

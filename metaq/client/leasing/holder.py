"""The leases that one consumer holds, of messages that wait for it or are being handled: what all its forms are made of.

Polls ask for messages only while somebody waits for one and none is here. What they bring waits in a buffer. The leases of
messages in the buffer, and of those for which a handler runs, are extended when half of their time is over; that of a message
which was handed to the program itself is so with ``keep`` only, while the program has it.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Final
from weakref import WeakSet

from metaq.client import intercepting
from metaq.client.closing import Closing
from metaq.client.connecting.core import CONTROL_TIMEOUT_S, Core
from metaq.client.connecting.forks import MADE_BEFORE, renewed_in_children
from metaq.client.connecting.transport import ClientAnswer
from metaq.client.consuming.running import running_info
from metaq.client.leasing.lease import Lease, back_off_s
from metaq.client.leasing.polling import Demand, Polls
from metaq.client.leasing.requests import LeaseTerms
from metaq.client.leasing.settling import Settling, Told
from metaq.client.retries import Retry
from metaq.client.serializers import decoded
from metaq.errors import ClientClosed, ClientError, LeaseLost, RouteNotFound, RouteProblem
from metaq.protocol.remoting import fastjson
from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.protocol.remoting.heartbeats import subscription_row
from metaq.protocol.remoting.leases.pop import REJECT_MS

logger = logging.getLogger(__name__)

DRAIN_S: Final = 10.0
"""The longest time that a closing consumer waits for running handlers."""
GRACE_S: Final = 5.0
"""The time in which a request reports that its time limit has passed."""
_MOST_TICK_S: Final = 1.0
_TICKS: Final = 10
"""The number of looks at leases in the time of one."""
_KIND: Final = "CONSUME_PASSIVELY"

_handling: Final[ContextVar[Lease | None]] = ContextVar("metaq_handling", default=None)
"""The lease whose handler this code belongs to: on its thread, as a coroutine of asyncio, and on what that has called."""


@contextmanager
def handling(lease: Lease) -> Iterator[None]:
    """Have what is called meanwhile know that the handler of a message calls it."""
    before = _handling.set(lease)
    try:
        yield
    finally:
        _handling.reset(before)


class LeaseHolder:
    """A member of a group that leases messages of one topic. Nothing but ``next`` and ``close`` blocks. Thread-safe."""

    def __init__(
        self,
        core: Core,
        terms: LeaseTerms,
        *,
        batch: int,
        wait_s: float,
        keep: bool = False,
        loads: Callable[[bytes], Any] | None = None,
    ) -> None:
        """Join the group. ``RouteNotFound`` when no registry answers; a topic that does not exist yet is waited for."""
        self.group = terms.group
        self.loads = loads
        """The function that decodes bodies, if any."""
        self.answer_s = core.timeout_s + GRACE_S
        """The longest time that an answer about a message may take."""
        self._core = core
        self._terms = terms
        self._batch = batch
        self._wait_s = wait_s
        self._keep = keep
        self._invisible_s = terms.invisible_ms / 1000
        self._started_ms = time.time_ns() // 1_000_000
        self._polls = Polls(core, terms, self._demand, self._deliver)
        self._settling = Settling(core, terms, self._polls.look)
        self._is_inherited = False
        self._closing = Closing()
        self.on_change: Callable[[], None] = lambda: None
        """Called, on any thread, when ``take`` may have a message, and when the consumer is closed."""
        self._changed = threading.Condition()  # guards what follows
        self.closed = False
        self._waiting = 0
        self._wait_until_s = 0.0
        self._has_handlers = False
        self._retry: Retry | None = None
        self._buffer: deque[Lease] = deque()
        self._handled: set[Lease] = set()
        """Those for which a handler runs."""
        self._kept: WeakSet[Lease] = WeakSet()
        """Those that the program has, if it wants them kept. One that it drops without a word ends by itself."""
        renewed_in_children(self)
        self._start()

    def _start(self) -> None:
        try:
            self._core.routes.route(self._terms.topic, self._core.deadline())
        except RouteNotFound as error:
            if error.reason is RouteProblem.REGISTRY_UNREACHABLE:
                raise
            logger.warning("topic waited for group=%s reason=%s", self.group, error)
        self._core.add_consumer(self)
        try:
            self._core.heartbeat(wait_s=CONTROL_TIMEOUT_S)
            self._core.scheduler.run(self._polls.resolve)
            self._core.scheduler.every(min(_MOST_TICK_S, self._invisible_s / _TICKS), self._extend, self._keeps_nothing)
        except BaseException:  # as Ctrl-C: nobody else could make this member leave
            self.close()
            raise

    def _renew(self) -> None:
        """Become closed in a child of a fork: membership and leases are the parent's."""
        self._changed = threading.Condition()
        self._settling.renew()
        self._is_inherited = self.closed = True
        self._buffer = deque()
        self._handled = set()
        self._kept = WeakSet()

    def check_open(self) -> None:
        """Raise ``ClientClosed`` when it is closed."""
        if self.closed:
            reason = MADE_BEFORE if self._is_inherited else "was closed"
            raise ClientClosed(f"this consumer of group {self.group} {reason}")

    # -- messages for the program -------------------------------------------------------------------------------------

    @contextmanager
    def waiting(self, until_s: float) -> Iterator[None]:
        """Have brokers asked for messages while somebody waits for one, until ``until_s`` at most."""
        with self._changed:
            self._waiting += 1
            self._wait_until_s = max(self._wait_until_s, until_s)
        try:
            yield
        finally:
            with self._changed:
                self._waiting -= 1
                if not self._waiting:
                    self._wait_until_s = 0.0

    def _demand(self, is_planned: bool) -> Demand:
        with self._changed:
            if self.closed or self._buffer or not (self._waiting or is_planned):
                return Demand(0, 0.0)
            most = min(self._batch, self._waiting) if self._has_handlers else self._batch
            return Demand(most, max(0.0, min(self._wait_s, self._wait_until_s - time.monotonic())))

    def take(self, *, is_handled: bool) -> Lease | None:
        """Return the next message, if one is here; else have brokers asked for some, if somebody waits.

        ``is_handled``: a handler will be called for it, so that it stays leased until ``handled`` or ``failed`` is called.
        """
        now_s = time.monotonic()
        with self._changed:
            while self._buffer and not self.closed:
                lease = self._buffer.popleft()
                if not lease.is_usable(now_s):
                    reason = lease.lost or "its time is over"
                    logger.info("lease ended before its message was used message=%s reason=%s", lease.message.id, reason)
                    continue
                if is_handled:
                    self._handled.add(lease)
                elif self._keep:
                    self._kept.add(lease)
                return lease
            if self.closed:
                return None
        self._polls.poll_soon()
        return None

    def next(self, until_s: float, *, is_handled: bool) -> Lease | None:
        """Return the next message as ``take`` does; ``None`` when none comes until then, or it is closed."""
        if self._is_inherited:
            self.check_open()
        with self.waiting(until_s):
            while (lease := self.take(is_handled=is_handled)) is None:
                with self._changed:
                    left_s = until_s - time.monotonic()
                    if self.closed or left_s <= 0:
                        return None
                    if not self._buffer:
                        self._changed.wait(min(left_s, threading.TIMEOUT_MAX))
        return lease

    def _deliver(self, leases: Sequence[Lease]) -> None:
        """Take messages that have come. Those that do not match are done: a broker compares hashes of tags only."""
        subscription = self._terms.subscription
        mine = []
        for lease in leases:
            if subscription.tags and not subscription.matches_tag(lease.message.tag):
                self._settling.ack(lease)
            else:
                mine.append(lease)
        with self._changed:
            is_late = self.closed
            if not is_late:
                self._buffer.extend(mine)
                self._changed.notify_all()
        if is_late:
            self._give_back(mine)
        self.on_change()

    def _give_back(self, leases: Sequence[Lease]) -> None:
        for lease in leases:
            self._settling.change(lease, 0).add_done_callback(partial(_log, "give back", lease))

    # -- what becomes of messages -------------------------------------------------------------------------------------

    def ack(self, lease: Lease) -> Told:
        """Finish a message."""
        lease.is_finished = True
        return self._intercepted("ack", lease, self._settling.ack)

    def nack(self, lease: Lease, delay_s: float | None) -> Told:
        """Give a message back, to come again after a pause; ``None``: one that grows with its attempts."""
        lease.is_finished = True
        pause_ms = round(1000 * (back_off_s(lease.attempt) if delay_s is None else delay_s))
        return self._intercepted("nack", lease, lambda lease: self._settling.change(lease, pause_ms))

    def reject(self, lease: Lease) -> Told:
        """Make a message a dead letter."""
        lease.is_finished = True
        return self._intercepted("reject", lease, lambda lease: self._settling.change(lease, REJECT_MS))

    def _intercepted(self, action: str, lease: Lease, settle: Callable[[Lease], Told]) -> Told:
        if not intercepting.is_intercepted():
            return settle(lease)
        ended = intercepting.settling(self._core.id, self.group, action, lease.message)
        told = settle(lease)
        told.add_done_callback(lambda done: ended(done.exception()))
        return told

    def extend(self, lease: Lease, seconds: float) -> Told:
        """Let a lease end so many seconds from now."""
        lease.is_extending = True
        now_s = time.monotonic()
        told = self._settling.change(lease, round(seconds * 1000))
        told.add_done_callback(partial(self._extended, lease, now_s, seconds))
        return told

    def _extend(self) -> None:
        """Extend the leases of messages that wait here, are being handled or kept, of those for which it is time."""
        now_s = time.monotonic()
        with self._changed:
            due = [lease for lease in (*self._buffer, *self._handled, *self._kept) if lease.wants_extension(now_s)]
        for lease in due:
            self.extend(lease, lease.invisible_s).add_done_callback(partial(_log, "extend", lease))

    def _keeps_nothing(self) -> bool:
        """Return whether it is closed, and nothing that the program has must be extended any more."""
        with self._changed:
            return self.closed and all(lease.is_finished for lease in self._kept)

    def _extended(self, lease: Lease, now_s: float, seconds: float, told: Told) -> None:
        error = told.exception()
        with self._changed:
            if error is None:
                lease.extend(now_s, seconds)
            lease.is_extending = False
            if isinstance(error, LeaseLost):
                lease.lost = error.text

    # -- handlers -----------------------------------------------------------------------------------------------------

    def received(self, lease: Lease) -> None:
        """Tell the interceptor that the program gets a message."""
        intercepting.received(self._core.id, self.group, (lease.message,))

    def processing(self, lease: Lease) -> intercepting.Ended:
        """Tell the interceptor that a handler gets a message, and return what is to be called at its end."""
        return intercepting.processing(self._core.id, self.group, (lease.message,))

    def begin_handlers(self, retry: Retry | None) -> None:
        """Have messages taken for handlers from now on: no more of them than wait for one."""
        self.check_open()
        with self._changed:
            self._has_handlers = True
            self._retry = retry

    def is_readable(self, lease: Lease) -> bool:
        """Return whether a message can be handled; one with an ``error`` is given back, so that it ends as a dead letter."""
        if self.loads is not None:
            lease.message = decoded(lease.message, self.loads)
        error = lease.message.error
        if error is not None:
            logger.warning("message unreadable group=%s message=%s reason=%s", self.group, lease.message.id, error)
            self._fail(lease)
        return error is None

    def handled(self, lease: Lease) -> None:
        """Ack a message whose handler has returned, unless it has said itself what becomes of it."""
        if not lease.is_finished:
            self.ack(lease).add_done_callback(partial(_log, "ack", lease))
        self._leave(lease)

    def raised(self, lease: Lease) -> None:
        """Log the exception that a handler has raised, and give its message back."""
        logger.exception("handler failed group=%s message=%s attempt=%d", self.group, lease.message.id, lease.attempt)
        self._fail(lease)

    def _fail(self, lease: Lease) -> None:
        """Give a message back for which a handler could not do its work, or reject it after the last time."""
        retry = self._retry
        if retry is None or lease.attempt <= retry.times:
            self.failed(lease, None if retry is None else retry.backoff.pause_s(lease.attempt - 1))
            return
        if not lease.is_finished:
            self.reject(lease).add_done_callback(partial(_log, "reject", lease))
        self._leave(lease)

    def failed(self, lease: Lease, delay_s: float | None = None) -> None:
        """Give a message back, unless its handler has said what becomes of it."""
        if not lease.is_finished:
            self.nack(lease, delay_s).add_done_callback(partial(_log, "give back", lease))
        self._leave(lease)

    def settle(self) -> None:
        """Wait for the brokers' answers about messages that were handled."""
        self._settling.settle(CONTROL_TIMEOUT_S)

    def _leave(self, lease: Lease) -> None:
        with self._changed:
            self._handled.discard(lease)
            self._changed.notify_all()

    # -- what brokers and the client ask ------------------------------------------------------------------------------

    def _heartbeat_row(self) -> dict[str, Any]:
        """Return this member's entry in heartbeats."""
        return {
            "groupName": self.group,
            "consumeType": _KIND,
            "consumeFromWhere": "CONSUME_FROM_FIRST_OFFSET" if self._terms.from_first else "CONSUME_FROM_LAST_OFFSET",
            "messageModel": "CLUSTERING",
            "unitMode": False,
            "subscriptionDataSet": [subscription_row(self._terms.subscription)],
        }

    def _rebalance(self) -> None:
        """Follow the topic's route; whose queues are whose is decided by each broker, message by message."""
        self._polls.resolve()

    def _asked(self, request: RemotingCommand) -> ClientAnswer:
        """Answer a broker: report this member's state (307). After a reset (220) nothing need be done: receipts end by it."""
        if request.code == Request.RESET_CONSUMER_CLIENT_OFFSET:
            return ClientAnswer()
        if request.code != Request.GET_CONSUMER_RUNNING_INFO:
            return ClientAnswer(Response.REQUEST_CODE_NOT_SUPPORTED, remark="this consumer leases messages")
        info = running_info(
            registries=self._core.routes.registries,
            kind=_KIND,
            started_ms=self._started_ms,
            ordered=False,
            subscriptions=[self._terms.subscription],
            queues={},
        )
        return ClientAnswer(body=fastjson.encode(info))

    # -- end ----------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Take no more messages, leave the group, give back what was not begun, and wait up to 10 s for running handlers.

        When another thread does so already, wait for it, within limits. A handler that calls this is not waited for.
        """
        own = _handling.get()
        with self._changed:
            is_inside = own in self._handled
            is_first, self.closed = not self.closed, True
            left = list(self._buffer)
            self._buffer.clear()
            self._changed.notify_all()
        if not is_first:
            if not self._is_inherited and not is_inside:
                self._closing.wait()
            return
        with self._closing.begun():
            self._polls.close()
            self.on_change()
            self._core.remove_consumer(self, partial(self._end, left, own))

    def _end(self, left: Sequence[Lease], own: Lease | None) -> None:
        try:
            self._give_back(left)
            self._drain(own)
        finally:
            self._settling.leave(CONTROL_TIMEOUT_S)

    def _drain(self, own: Lease | None) -> None:
        """Wait for the handlers that run, but for that of ``own``."""
        until_s = time.monotonic() + DRAIN_S
        tick_s = min(_MOST_TICK_S, self._invisible_s / _TICKS)
        while (left_s := until_s - time.monotonic()) > 0:
            with self._changed:
                if self._changed.wait_for(lambda: self._handled <= {own}, min(left_s, tick_s)):
                    return
            self._extend()
        logger.warning("handlers still run, their messages may come again group=%s count=%d", self.group, len(self._handled))


def _log(what: str, lease: Lease, told: Told) -> None:
    """Log why a broker did not do what this told it by itself."""
    error = told.exception()
    if isinstance(error, ClientError):
        logger.warning(
            "message not settled what=%s message=%s attempt=%d reason=%s", what, lease.message.id, lease.attempt, error
        )

"""Acks, and other times for leases: all that a consumer tells brokers about its messages.

An ack goes out at once if its broker has none to answer. Those that come meanwhile wait for that answer and then go together,
in one request. So the more there are, the larger the batches, and no ack waits for others to come.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Final, NamedTuple

from metaq.client.connecting.core import Core
from metaq.client.connecting.transport import Outcome, RemotingRequest, may_pass, refusal
from metaq.client.leasing.lease import Lease
from metaq.client.leasing.requests import LeaseTerms, done_of, failure_of
from metaq.errors import BrokerBusy, ClientClosed, ClientError
from metaq.protocol.remoting.codes import Response
from metaq.protocol.remoting.leases.acks import MOST_ACKS

logger = logging.getLogger(__name__)

PAUSE_S: Final = 0.5
"""The pause before an ack is sent again, while its broker cannot be reached or has no master."""

Told = Future[None]
"""Done when a broker has answered; its exception says why it did not do what it was told."""


class _Ack(NamedTuple):
    lease: Lease
    told: Told
    deadline: float


class _Line:
    """The acks for one broker, which go out one request after the other."""

    def __init__(self) -> None:
        self.waiting: deque[_Ack] = deque()
        self.alone: deque[_Ack] = deque()
        """Those that must be asked about one by one; they go first."""
        self.is_busy = False

    def take(self) -> list[_Ack]:
        """Return the acks of the next request."""
        if self.alone:
            return [self.alone.popleft()]
        return [self.waiting.popleft() for _ in range(min(MOST_ACKS, len(self.waiting)))]


class Settling:
    """The acks and changes of one consumer on their way. Only ``settle`` and ``leave`` block. Thread-safe."""

    def __init__(self, core: Core, terms: LeaseTerms, look: Callable[[], None]) -> None:
        """Begin without any; ``look`` has other masters looked for, and is called on any thread."""
        self._core = core
        self._terms = terms
        self._look = look
        self.renew()

    def renew(self) -> None:
        """Start empty, with a lock of its own, in a child of a fork."""
        self._changed = threading.Condition()  # guards what follows
        self._lines: dict[str, _Line] = {}
        self._open: set[Told] = set()
        self._is_left = False

    def _begin(self) -> Told:
        """Return a new future; it has failed already when its client is closed, and the consumer has left it."""
        told: Told = Future()
        with self._changed:
            is_late = self._is_left and self._core.is_closing
            if not is_late:
                self._open.add(told)
        if is_late:
            told.set_exception(ClientClosed("this client was closed"))
        return told

    def _end(self, told: Told, error: ClientError | None) -> None:
        with self._changed:
            if told not in self._open:
                return
            self._open.discard(told)
            self._changed.notify_all()
        if error is None:
            told.set_result(None)
        else:
            told.set_exception(error)

    def settle(self, timeout_s: float) -> None:
        """Wait for what is being told, at most so long."""
        with self._changed:
            self._changed.wait_for(lambda: not self._open, timeout_s)

    def leave(self, timeout_s: float) -> None:
        """Wait for what is being told, at most so long. What is told later counts until the client is closed."""
        self.settle(timeout_s)
        with self._changed:
            self._is_left = True
            late = list(self._open) if self._core.is_closing else []
        for told in late:
            self._end(told, ClientClosed("this client was closed"))

    # -- acks ---------------------------------------------------------------------------------------------------------

    def ack(self, lease: Lease) -> Told:
        """Finish a message. There are tries until the client's time limit while its broker cannot be reached."""
        told = self._begin()
        if told.done():
            return told
        ack = _Ack(lease, told, time.monotonic() + self._core.timeout_s)
        name = lease.message.queue.broker_name
        with self._changed:
            line = self._lines.setdefault(name, _Line())
            line.waiting.append(ack)
            if line.is_busy:
                return told
            line.is_busy = True
        self._core.scheduler.run(partial(self._send, name, line))
        return told

    def _send(self, name: str, line: _Line) -> None:
        with self._changed:
            acks = line.take()
            line.is_busy = bool(acks)
        if not acks:
            return
        request = self._terms.acks(name, [ack.lease for ack in acks])
        self._submit(name, request, acks[-1].deadline, partial(self._acked, name, line, acks))

    def _submit(self, name: str, request: RemotingRequest, deadline: float, done: Callable[[Outcome], None]) -> None:
        try:
            self._core.transport.submit(self._core.master(name), request, deadline, done)
        except ClientError as error:
            done(error)

    def _acked(self, name: str, line: _Line, acks: Sequence[_Ack], outcome: Outcome) -> None:
        error = failure_of(outcome)
        if error is not None and may_pass(error) and self._wait(name, line, acks, error):
            return
        if len(acks) > 1 and _leaves_doubt(outcome, len(acks)):
            with self._changed:
                line.alone.extend(acks)
        else:
            for ack in acks:
                self._end(ack.told, error)
        self._send(name, line)

    def _wait(self, name: str, line: _Line, acks: Sequence[_Ack], error: ClientError) -> bool:
        """Plan another try of those acks that have time for it, and fail the others; return whether there is one."""
        self._look_after(error)
        after = time.monotonic() + PAUSE_S
        again = [ack for ack in acks if ack.deadline > after and not (self._is_left and self._core.is_closing)]
        if not again:
            return False
        with self._changed:
            line.waiting.extendleft(reversed(again))
        for ack in acks:
            if ack not in again:
                self._end(ack.told, error)
        self._core.scheduler.after(PAUSE_S, partial(self._send, name, line))
        return True

    def _look_after(self, error: ClientError) -> None:
        """Look for another master where the error may mean that there is one."""
        if may_pass(error) and not isinstance(error, BrokerBusy):
            self._look()

    # -- other times --------------------------------------------------------------------------------------------------

    def change(self, lease: Lease, invisible_ms: int) -> Told:
        """Let a lease end ``invisible_ms`` from now."""
        told = self._begin()
        if not told.done():
            self._core.scheduler.run(partial(self._change, lease, invisible_ms, told))
        return told

    def _change(self, lease: Lease, invisible_ms: int, told: Told) -> None:
        name = lease.message.queue.broker_name
        deadline = time.monotonic() + self._core.timeout_s
        request = self._terms.change(lease, invisible_ms)
        self._submit(name, request, deadline, partial(self._changed_lease, told))

    def _changed_lease(self, told: Told, outcome: Outcome) -> None:
        error = failure_of(outcome)
        if error is not None:
            self._look_after(error)
        self._end(told, error)


def _leaves_doubt(outcome: Outcome, count: int) -> bool:
    """Return whether an answer to several acks leaves open which of them counted: then each is asked about alone."""
    if isinstance(outcome, ClientError):
        return False
    if outcome.code == Response.SUCCESS:
        return done_of(outcome) not in {None, count}
    return refusal(outcome).code == Response.REQUEST_CODE_NOT_SUPPORTED  # by RocketMQ before 5.1.3

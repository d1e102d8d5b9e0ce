"""Asynchronous sends: their attempts, which no thread waits for, and their futures."""

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from metaq.client import intercepting
from metaq.client.connecting.core import Core
from metaq.client.connecting.scheduler import Scheduler
from metaq.client.connecting.transport import Outcome
from metaq.client.message import SendResult
from metaq.client.sending.sending import Sending
from metaq.errors import ClientClosed, ClientError, MetaqError

Sent = Sequence[SendResult] | MetaqError
"""One result for each message, or the error of all of them."""


class SendFuture(Future[SendResult]):
    """The future of a send. Its callbacks run on the threads of the client, not on the one that reads its connection."""

    def __init__(self, scheduler: Scheduler, ended: intercepting.Sent) -> None:
        """Take ``ended``, which is called before the future is done, with what it will be told."""
        super().__init__()
        self._scheduler = scheduler
        self._ended = ended
        self.set_running_or_notify_cancel()

    def add_done_callback(self, fn: Callable[[Future[SendResult]], object]) -> None:
        """Have ``fn`` called with this future when it is done, also if it is done already."""
        super().add_done_callback(functools.partial(self._schedule, fn))

    def _schedule(self, fn: Callable[[Future[SendResult]], object], _: Future[SendResult]) -> None:
        if not self._scheduler.run(lambda: fn(self)):  # the client was closed, which is what the callback will be told
            fn(self)

    def settle(self, sent: Sent) -> None:
        """Set the outcome of a send of one message."""
        self._ended(sent)
        if isinstance(sent, MetaqError):
            self.set_exception(sent)
        else:
            self.set_result(sent[0])


class AsyncSend:
    """The attempts of one asynchronous send, each made when the previous one is known to have failed."""

    __slots__ = ("_core", "_done", "_sending")

    def __init__(self, core: Core, sending: Sending, done: Callable[[Sent], None]) -> None:
        """Take ``done``, which is called once, on a thread that it must not block."""
        self._core = core
        self._sending = sending
        self._done = done

    def step(self) -> None:
        """Make the next attempt."""
        sending = self._sending
        try:
            attempt = sending.attempt()
        except MetaqError as error:
            self._fail(error)
            return
        if attempt is None:
            self._again()
            return
        try:
            self._core.transport.submit(attempt.address, attempt.request, sending.deadline, self._answered, soon=True)
        except ClientError as error:
            self._answered(error)

    def _answered(self, outcome: Outcome) -> None:
        """Take an answer, on a thread that must not be blocked."""
        try:
            results = self._sending.took(outcome)
        except MetaqError as error:
            self._fail(error)
            return
        if results is None:
            self._again()
        else:
            self._done(results)

    def _again(self) -> None:
        self._core.scheduler.after(self._sending.pause_s, self.step, self._closed)

    def _closed(self) -> None:
        self._fail(ClientClosed("the client was closed before the message was accepted; it may be stored"))

    def _fail(self, error: MetaqError) -> None:
        if isinstance(error, ClientError):
            self._sending.describe(error)
        self._done(error)

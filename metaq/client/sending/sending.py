"""The attempts to send one message: the tries so far, the choice of the next one, and the result.

The steps of ``Sending`` do not wait for an answer, so that blocking and asynchronous sends can share them.
"""

import functools
import itertools
import logging
import random
import time
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from metaq.client.connecting.health import BrokerHealth
from metaq.client.connecting.routing import DEFAULT_QUEUES, Routes
from metaq.client.connecting.transport import Outcome, RemotingRequest, Transport, refusal
from metaq.client.intercepting import Sent, written
from metaq.client.message import SendResult, SendStatus, compressed, properties_text
from metaq.client.retries import Backoff, Retry
from metaq.errors import (
    BadRequest,
    BrokerBusy,
    ClientError,
    ConnectionFailed,
    NotConnected,
    Refused,
    RouteNotFound,
    RouteProblem,
    SendContext,
    SendFailed,
)
from metaq.message import DEFAULT_TOPIC, MessageQueue
from metaq.protocol.properties import KEYS, UNIQUE_KEY
from metaq.protocol.record import java_hash
from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.frames import RemotingCommand

logger = logging.getLogger(__name__)

MAX_BODY_BYTES: Final = 4 * 1024 * 1024
"""The largest body of a message, or of a batch as a whole, that brokers take with their default settings."""
SEND_RETRY: Final = Retry(times=2, backoff=Backoff(first=0.1, factor=2.0, most=1.0, jitter=0.5))
"""Further tries after one that may have reached a broker, and so stored the message; others are limited only by time.

The pauses are those before another try at the same broker, and those while no broker can be reached.
"""
_TOLD: Final = 3
"""The most tries of which an error tells."""
ELSEWHERE: Final = frozenset(
    {
        Response.SYSTEM_ERROR,
        Response.SERVICE_NOT_AVAILABLE,
        Response.NO_PERMISSION,
        Response.TOPIC_NOT_EXIST,
        204,  # codes of brokers that serve other RocketMQ units
        205,
    }
)
"""Refusals after which another broker may still accept the message."""
BORN: Final = "g"
"""The letter of the field for the time at which a message was sent, in milliseconds."""
_STATUSES: Final = {status.value: status for status in SendStatus}
_new: Final = tuple.__new__
"""Makes a named tuple at a third of the cost of its own constructor."""
_STALE_ROUTE: Final = frozenset(
    {
        Response.TOPIC_NOT_EXIST,
        Response.NO_PERMISSION,
        Response.SERVICE_NOT_AVAILABLE,
        Response.SYSTEM_ERROR,  # of a partition that the topic no longer has
    }
)


class Once(NamedTuple):
    """The wish that brokers store only one of the messages with an id."""

    ident: str | None = None
    or_elsewhere: bool = False
    """Whether another broker may get the message when the one of the id gave no answer."""


NOT_ONCE: Final = Once()


class Outgoing(NamedTuple):
    """A message, or several as one batch, as it is sent."""

    topic: str
    fields: Mapping[str, str]
    """The fields of the request, without those of the queue."""
    body: bytes
    code: Request
    ids: Sequence[str]
    """The ids of its messages."""
    ordering_key: str | None
    queue: MessageQueue | None = None
    """The queue that it must go to, whatever the key."""
    keys: Sequence[str] = ()
    """The keys of its messages, for the log."""
    once: Once = NOT_ONCE


class Attempt(NamedTuple):
    """A request, and the broker to send it to."""

    queue: MessageQueue
    address: str
    request: RemotingRequest
    is_alone: bool
    """True when another attempt could only go to the same broker."""


class Sending:
    """The state of one send. Call ``attempt`` and ``took`` in turn until ``took`` returns a result."""

    # Thousands may be in flight, each of them with few objects.
    __slots__ = (
        "_attempt",
        "_began",
        "_choice",
        "_failed",
        "_is_silent",
        "_made",
        "_may_leave",
        "_outgoing",
        "_reached",
        "_tries",
        "_unreached",
        "_waited_for",
        "_waits",
        "deadline",
        "pause_s",
    )

    def __init__(self, outgoing: Outgoing, choice: "QueueChoice", deadline: float) -> None:
        self._outgoing = outgoing
        self._choice = choice
        self.deadline = deadline
        self.pause_s = 0.0
        """The seconds to wait before the next attempt."""
        self._failed: tuple[tuple[str, ClientError], ...] = ()
        """The last three tries: the broker's name and the error of each."""
        self._tries = 0
        self._made = 0
        """The number of attempts."""
        self._reached = 0
        """The number of tries that may have reached a broker."""
        self._unreached: frozenset[str] = frozenset()
        self._may_leave = False
        """Whether another broker than that of the last try may get a message with an id or a key."""
        self._is_silent = False
        """Whether a try had no answer: the message may be stored."""
        self._waits = 0
        self._waited_for: ClientError | None = None
        self._attempt: Attempt | None = None
        self._began = 0.0

    def attempt(self) -> Attempt | None:
        """Return the next attempt; ``None`` to call again after ``pause_s``, when a slave may have become master.

        ``RouteNotFound``; ``SendFailed``, or the last error, when the time is over.
        """
        self._began = time.monotonic()
        self._check_time()
        last = self._attempt.queue if self._attempt is not None else None
        try:
            self._attempt = self._choice.choose(self._outgoing, last, self.deadline, may_leave=self._may_leave)
        except ConnectionFailed as error:  # a route has just changed
            self._wait(error)
            return None
        except RouteNotFound as error:
            if error.reason is not RouteProblem.NO_LIVE_MASTER:
                self._check_time()  # if too little time was left to ask for a route, that is not the reason to report
                if error.reason is not RouteProblem.REGISTRY_UNREACHABLE or not self._choice.routes.met:
                    raise
            self._wait(error)
            return None
        self._made += 1
        return self._attempt

    def _check_time(self) -> None:
        if (self._failed or self._waited_for) and time.monotonic() >= self.deadline:
            raise self._given_up()

    def _wait(self, error: ClientError) -> None:
        """Plan a pause, because no broker that takes messages can be reached; one may be back or be elected master soon."""
        self._waits += 1
        self._waited_for = error
        self.pause_s = self._choice.retry.backoff.pause_s(self._waits - 1)
        if time.monotonic() + self.pause_s >= self.deadline:
            raise self._given_up()

    def took(self, outcome: Outcome) -> list[SendResult] | None:
        """Take the outcome of an attempt. Return the results, or ``None`` to make another attempt; raise when none is left.

        ``SendFailed``, ``Refused``, ``BrokerBusy``, ``RequestTimeout``.
        """
        assert self._attempt is not None
        broker = self._attempt.queue.broker_name
        now = time.monotonic()
        if isinstance(outcome, ClientError):
            self._choice.health.failed(broker, now)
            self._may_leave = self._outgoing.once.or_elsewhere
            self._is_silent = True
            if not isinstance(outcome, ConnectionFailed):
                raise outcome  # it timed out: the message may be stored, and the time is over anyway
            self._again(broker, outcome, may_change=True)
            return None
        if outcome.code in _STATUSES:
            self._choice.health.took(broker, now - self._began, now)
            results = _results(outcome, self._outgoing.ids, self._attempt.queue)
            logger.debug("sent topic=%s keys=%s results=%s", self._outgoing.topic, self._outgoing.keys, results)
            return results
        error = refusal(outcome)
        if outcome.code in _STALE_ROUTE:
            self._choice.routes.forget(self._outgoing.topic)
        if outcome.code not in ELSEWHERE and not isinstance(error, BrokerBusy):
            raise error
        self._choice.health.failed(broker, now)
        may_change = outcome.code == Response.SERVICE_NOT_AVAILABLE
        must_stay = self._is_silent or (may_change and bool(self._outgoing.ordering_key))
        self._may_leave = not must_stay or self._outgoing.once.or_elsewhere
        self._again(broker, error, may_change=may_change)
        return None

    def _again(self, broker: str, error: ClientError, *, may_change: bool) -> None:
        """Prepare another attempt. ``may_change`` says that another replica of the broker may take messages now or soon."""
        assert self._attempt is not None
        self.pause_s = 0.0
        is_last = self._attempt.is_alone or broker in self._unreached
        self._tries += 1
        self._failed = (*self._failed, (broker, error))[-_TOLD:]
        if may_change and len(self._choice.routes.replicas(broker)) > 1:
            self._choice.routes.forget(self._outgoing.topic)
            if self._attempt.is_alone and isinstance(error, NotConnected | Refused):  # it is not stored
                self._wait(error)
                return
        if isinstance(error, NotConnected):
            self._unreached |= {broker}
            if is_last:
                self._wait(error)
            return
        self._reached += 1
        if self._reached > self._choice.retry.times:
            raise self._given_up()
        if self._attempt.is_alone:
            if isinstance(error, BrokerBusy):
                wait = error.retry_after_s * random.uniform(0.75, 1.25)
            else:
                wait = self._choice.retry.backoff.pause_s(self._reached - 1)
            self.pause_s = min(wait, max(0.0, self.deadline - time.monotonic()))

    def describe(self, error: ClientError) -> None:
        """Say in the error of this send what was being sent, and where to."""
        add_context(error, self._outgoing, self._made, "" if self._attempt is None else self._attempt.queue.broker_name)

    def _given_up(self) -> ClientError:
        if not self._failed:
            assert self._waited_for is not None
            return self._waited_for
        last = self._failed[-1][1]
        same = {error.code for _, error in self._failed if isinstance(error, Refused)}
        if len(same) == 1 and all(isinstance(error, Refused) for _, error in self._failed):
            return last  # every broker gave the same answer
        error = SendFailed(self._outgoing.topic, self._failed, self._tries)
        error.__cause__ = last
        return error


class QueueChoice:
    """A chooser of queues: round robin over the brokers that are healthy, or always the same queue for an ordering key."""

    def __init__(self, routes: Routes, health: BrokerHealth, retry: Retry = SEND_RETRY) -> None:
        self.retry = retry
        """What becomes of a try that failed."""
        self.routes = routes
        self.health = health
        self._turns = itertools.count(random.randrange(1 << 16))

    def choose(self, outgoing: Outgoing, last: MessageQueue | None, deadline: float, *, may_leave: bool = False) -> Attempt:
        """Choose a queue, and return the request to its master. ``RouteNotFound``; ``ConnectionFailed`` without a master.

        ``last`` is the queue of the try before. ``may_leave`` says that a message with an id or a key may go to another broker
        than that of its id or of the last try.
        """
        queues = self.routes.writable(outgoing.topic, deadline)
        queue = outgoing.queue
        if queue is None:
            if not may_leave:
                queues = self._at_home(outgoing, last, queues, deadline)
            if not outgoing.ordering_key:
                queue = self._in_turn(queues, "" if last is None else last.broker_name)
            else:
                queue = last if last is not None and last in queues else _of_key(outgoing.ordering_key, queues)
        address = self.routes.address(queue.broker_name)
        if address is None:
            self.routes.forget(outgoing.topic)
            raise ConnectionFailed(f"the master of {queue.broker_name} has just disconnected")
        fields = {**outgoing.fields, "e": str(queue.partition), "n": queue.broker_name}
        # queues are sorted by broker
        alone = bool(outgoing.ordering_key or outgoing.queue) or queues[0].broker_name == queues[-1].broker_name
        return Attempt(queue, address, RemotingRequest(outgoing.code, fields, outgoing.body), alone)

    def of_key(self, topic: str, key: str, deadline: float) -> MessageQueue:
        """Return the queue to which messages with an ordering key go now. ``RouteNotFound``."""
        return _of_key(key, self.routes.writable(topic, deadline))

    def _at_home(
        self, outgoing: Outgoing, last: MessageQueue | None, queues: tuple[MessageQueue, ...], deadline: float
    ) -> tuple[MessageQueue, ...]:
        """Return the queues of the only broker that may get a message with an id, or one with a key after its first try.

        ``RouteNotFound`` while that has no master, if the message may not go elsewhere.
        """
        ident = outgoing.once.ident
        if last is not None and (ident is not None or outgoing.ordering_key):
            home = last.broker_name
        elif ident is not None:
            home = _of_id(ident, self.routes.writers(outgoing.topic, deadline))
        else:
            return queues
        if home == queues[0].broker_name == queues[-1].broker_name:  # queues are sorted by broker
            return queues
        own = tuple(queue for queue in queues if queue.broker_name == home)
        if not own and not outgoing.once.or_elsewhere:
            self.routes.forget(outgoing.topic)
            details = f"Only {home} may get the message, and it has no master now; send it again when there is one"
            raise RouteNotFound(outgoing.topic, RouteProblem.NO_LIVE_MASTER, details)
        return own or queues

    def _in_turn(self, queues: Sequence[MessageQueue], failed_broker: str) -> MessageQueue:
        now = time.monotonic()
        start = next(self._turns)
        for step in range(len(queues)):
            queue = queues[(start + step) % len(queues)]
            if queue.broker_name != failed_broker and self.health.is_available(queue.broker_name, now):
                return queue
        ring = [queues[(start + step) % len(queues)] for step in range(len(queues))]
        others = [queue for queue in ring if queue.broker_name != failed_broker]
        return min(others or ring, key=lambda queue: self.health.available_at(queue.broker_name))


def _of_id(ident: str, brokers: Sequence[str]) -> str:
    """Return the broker to which messages with an id go, as long as the brokers are the same, with or without masters."""
    return brokers[0] if len(brokers) == 1 else brokers[abs(java_hash(ident)) % len(brokers)]


def _of_key(key: str, queues: Sequence[MessageQueue]) -> MessageQueue:
    """Return the queue of an ordering key, chosen by the hash of the Java clients."""
    return queues[abs(java_hash(key)) % len(queues)]


def deliver(
    transport: Transport, choice: QueueChoice, outgoing: Outgoing, deadline: float, sent: Sent | None = None
) -> list[SendResult]:
    """Make attempts until one succeeds, and return one result for each message. It raises the errors of ``Producer.send``.

    The interceptor that has given ``sent`` is told of each attempt while the answer is awaited.
    """
    sending = Sending(outgoing, choice, deadline)
    try:
        return _delivered(transport, sending, deadline, sent)
    except ClientError as error:
        sending.describe(error)
        raise


def tell(transport: Transport, choice: QueueChoice, outgoing: Outgoing, deadline: float) -> None:
    """Write a request to a connection, once; ``RouteNotFound``, ``ConnectionFailed``."""
    attempt: Attempt | None = None
    try:
        attempt = choice.choose(outgoing, None, deadline)
        transport.tell(attempt.address, attempt.request, deadline)
    except ClientError as error:
        add_context(error, outgoing, int(attempt is not None), "" if attempt is None else attempt.queue.broker_name)
        raise


def add_context(error: ClientError, outgoing: Outgoing, attempt: int, broker: str) -> None:
    """Say in an error of a send what was being sent, and where to: in its ``context``, and in a note."""
    if error.context is None:
        error.context = SendContext(outgoing.topic, tuple(outgoing.ids), tuple(outgoing.keys), attempt, broker)
        error.add_note(str(error.context))


def _delivered(transport: Transport, sending: Sending, deadline: float, sent: Sent | None) -> list[SendResult]:
    while True:
        attempt = sending.attempt()
        if attempt is None:
            time.sleep(sending.pause_s)
            continue
        meanwhile = None if sent is None else functools.partial(written, sent, attempt.queue)
        outcome: Outcome
        try:
            outcome = transport.call(attempt.address, attempt.request, deadline, meanwhile)
        except ClientError as error:
            outcome = error
        results = sending.took(outcome)
        if results is not None:
            return results
        time.sleep(sending.pause_s)


def compose(
    group: str,
    topic: str,
    body: bytes,
    properties: Mapping[str, str],
    sys_flag: int = 0,
    *,
    code: Request = Request.SEND_MESSAGE_V2,
    ordering_key: str | None = None,
    once: Once = NOT_ONCE,
) -> Outgoing:
    """Return one message as it is sent, its body compressed if that makes it shorter; ``BadRequest`` if it is too large."""
    packed, packing = compressed(body)
    check_size(packed, "a message")
    fields = send_fields(group, topic, properties_text(properties), sys_flag | packing)
    keys = tuple(properties[KEYS].split()) if KEYS in properties else ()
    ids = (properties[UNIQUE_KEY],)
    return Outgoing(topic, fields, packed, code, ids, ordering_key, keys=keys, once=once)


def check_size(body: bytes, what: str) -> None:
    """Refuse a body that brokers do not take with their default settings."""
    if len(body) > MAX_BODY_BYTES:
        raise BadRequest(f"{what} of {len(body)} bytes is over the limit of {MAX_BODY_BYTES}")


def send_fields(group: str, topic: str, properties: str, sys_flag: int = 0, flag: int = 0) -> dict[str, str]:
    """Return the fields of a send (310, 325) or a batch (320) by letters, without the queue's; a batch needs ``m`` as well."""
    return {
        "a": group,
        "b": topic,
        "c": DEFAULT_TOPIC,
        "d": str(DEFAULT_QUEUES),
        "f": str(sys_flag),
        BORN: str(time.time_ns() // 1_000_000),
        "h": str(flag),
        "i": properties,
    }


def _results(response: RemotingCommand, ids: Sequence[str], queue: MessageQueue) -> list[SendResult]:
    try:
        offset_ids = response.fields["msgId"].split(",")
        first = int(response.fields["queueOffset"])
        queue = queue._replace(partition=int(response.fields["queueId"]))
        status = _STATUSES[response.code]
        pairs = list(zip(ids, offset_ids, strict=True))
    except (KeyError, ValueError) as error:
        raise ClientError(f"{queue.broker_name} accepted a message without saying where it is: {response.fields}") from error
    handle = response.fields.get("recallHandle")
    results = enumerate(pairs, first)
    return [_new(SendResult, (own, offset_id, queue, offset, status, handle)) for offset, (own, offset_id) in results]

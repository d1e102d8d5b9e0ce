"""The brokers as one connection of kombu uses them: topics for queues and exchanges, sends, leases."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Final, TypeVar

from kombu_metaq.groups import check_lease, make_group, see_group
from kombu_metaq.leases import LeaseReader
from kombu_metaq.terms import QueueTerms, SendTerms
from metaq.client import Admin, Client, ConsumeFrom, Producer
from metaq.errors import ClientError, ConnectionFailed, Refused, RouteNotFound, RouteProblem, TooLate
from metaq.protocol.remoting.codes import Response
from metaq.protocol.remoting.timers import TimerRow

logger = logging.getLogger(__name__)

T = TypeVar("T")

PAUSE_S: Final = 0.2
"""Between two questions while a master is elected."""
DEDUPE_MS: Final = 10 * 60 * 1000
"""For so long a message is not stored again that was sent again because no answer came."""
ABSENT_S: Final = 1.0
"""How long a topic that was not there is not asked for again."""
MOST_BATCH: Final = 32
HOLD_S: Final = 15.0
MOST_ABSENT: Final = 10_000
"""Names of absent topics that are remembered: with reply queues each program that asks brings one."""


class Broker:
    """The brokers behind one address, as one connection of kombu uses them."""

    def __init__(self, client: Client, visibility_timeout: float, timeout: float, ring: Callable[[], None]) -> None:
        self._client = client
        self._timeout_s = timeout
        self._invisible_s = visibility_timeout
        self._ring = ring
        self._producer: Producer | None = None
        self._present: set[str] = set()
        self._absent: dict[str, float] = {}
        self._queues: set[str] = set()
        """The topics of queues that are there with their groups."""
        self._leases: dict[str, LeaseReader] = {}

    def check(self) -> None:
        """Raise ``RouteNotFound`` when no registry answers, or when there is no master within the time limit."""
        self._asked(_check)

    def _asked(self, ask: Callable[[Admin], T], *, is_made: bool = False) -> T:
        """Ask brokers, and while a master is lost and another may be elected ask again, within the time limit, as sends do.

        ``is_made`` says that the topic is there, so that a registry which does not know it will hear of it.
        """
        until_s = time.monotonic() + self._timeout_s
        while True:
            try:
                return ask(self._client.admin())
            except (ConnectionFailed, Refused, RouteNotFound) as error:
                if not _may_pass(error, is_made=is_made) or time.monotonic() + PAUSE_S >= until_s:
                    raise
            time.sleep(PAUSE_S)

    # -- topics -------------------------------------------------------------------------------------------------------

    def has_topic(self, topic: str) -> bool:
        """Return whether a topic is there; that it is not may be a second old."""
        if topic in self._present:
            return True
        if time.monotonic() < self._absent.get(topic, 0.0):
            return False
        try:
            self._asked(lambda admin: admin.route(topic))
        except RouteNotFound as error:
            if error.reason is not RouteProblem.TOPIC_ABSENT:
                raise
            if len(self._absent) >= MOST_ABSENT:
                self._absent.clear()
            self._absent[topic] = time.monotonic() + ABSENT_S
            return False
        self._present.add(topic)
        return True

    def make_queue(self, topic: str, terms: QueueTerms) -> None:
        """Create the topic of a queue, and its group, unless they are there: who runs the broker may have made them."""
        if topic in self._queues:
            return
        if self.has_topic(topic):
            self._asked(lambda admin: see_group(admin, topic, terms, self._invisible_s))
        else:
            self._make(topic, lambda admin: _make_queue(admin, topic, terms))
        self._queues.add(topic)

    def make_log(self, topic: str) -> None:
        """Create the topic of an exchange, unless it is there."""
        if not self.has_topic(topic):
            self._make(topic, lambda admin: admin.create_topic(topic, 1, dedupe_window_ms=DEDUPE_MS))

    def _make(self, topic: str, make: Callable[[Admin], None]) -> None:
        """Create a topic, and wait until the registry that is asked knows it: sends before that would guess its partitions."""
        self._asked(make)
        self._asked(lambda admin: admin.route(topic), is_made=True)
        self._present.add(topic)

    def delete_queue(self, topic: str) -> None:
        """Delete the topic of a queue with its messages, also those that are delayed, and its group."""
        reader = self._leases.pop(topic, None)
        if reader is not None:
            reader.close()
        admin = self._client.admin()
        _cancel(admin, topic)  # they would come to a queue of this name that is declared until then
        admin.delete_topic(topic)
        admin.delete_group(topic)
        self._present.discard(topic)
        self._queues.discard(topic)

    def size(self, topic: str) -> int:
        """Return the number of messages of a queue that can be given now, or were given back to be given later."""
        lag, leased = self._asked(lambda admin: _progress(admin, topic))
        return lag - leased

    def is_empty(self, topic: str) -> bool:
        """Return whether no message of a queue is to be given, now or later, and no consumer has one."""
        if self._asked(lambda admin: next(_delayed(admin, topic), None)) is not None:
            return False
        lag, _ = self._asked(lambda admin: _progress(admin, topic))  # afterwards: what falls due in between is seen here
        return lag == 0

    def is_used(self, topic: str) -> bool:
        """Return whether another connection consumes a queue."""
        members = self._asked(lambda admin: admin.members(topic))
        return members is not None and any(member.client_id != self._client.id for member in members.members)

    def purge(self, topic: str) -> int:
        """Finish all messages of a queue, and return how many there were, without those that consumers have."""
        admin = self._client.admin()
        cancelled = _cancel(admin, topic)
        count = self.size(topic)
        admin.reset_offset(topic, topic, ConsumeFrom.LAST, apply=True)
        return cancelled + count

    # -- messages -----------------------------------------------------------------------------------------------------

    def send(self, topic: str, tag: str | None, body: bytes, terms: SendTerms) -> None:
        """Send a message, and return when it is stored; a transient one when it is written to the connection."""
        if self._producer is None:
            self._producer = self._client.producer()
        priority, due, once, is_transient = terms
        if is_transient:
            self._producer.send_oneway(topic, body, tag=tag, priority=priority, deliver_at=due, dedupe_id=once)
        else:
            self._producer.send(topic, body, tag=tag, priority=priority, deliver_at=due, dedupe_id=once)

    def leases(self, topic: str) -> LeaseReader | None:
        """Return the reader of a queue, if it has begun."""
        return self._leases.get(topic)

    def begin_leases(self, topic: str) -> LeaseReader:
        """Return the reader of a queue, which begins with the first call.

        ``ValueError`` when the queue's group does not allow leases of ``visibility_timeout``.
        """
        reader = self._leases.get(topic)
        if reader is None:
            self._asked(lambda admin: check_lease(admin, topic, self._invisible_s))
            consumer = self._client.lease_consumer(
                topic, topic, batch=MOST_BATCH, invisible=self._invisible_s, wait=HOLD_S, from_first=True
            )
            reader = self._leases[topic] = LeaseReader(consumer, self._ring)
        return reader

    def close(self) -> None:
        """Leave all groups, and close the client."""
        for reader in self._leases.values():
            reader.close()
        self._client.close()


def _check(admin: Admin) -> None:
    """Raise ``RouteNotFound`` when no broker has a master."""
    if not admin.masters():
        raise RouteNotFound("", RouteProblem.NO_LIVE_MASTER, "the registry answers, and no master is registered there")


def _make_queue(admin: Admin, topic: str, terms: QueueTerms) -> None:
    """Create the topic of a queue, and its group."""
    make_group(admin, topic, terms)
    admin.create_topic(topic, terms.levels, priority=terms.levels > 1, dedupe_window_ms=DEDUPE_MS)


def _progress(admin: Admin, topic: str) -> tuple[int, int]:
    """Return the number of messages of a queue that are not finished, and of those of them that consumers have."""
    known = {view.queue: view for view in admin.group_lag(topic, topic)}
    lag = leased = 0
    for queue in admin.queues(topic):
        view = known.get(queue.queue)
        lag += queue.end - queue.begin if view is None else view.lag
        leased += view.leased.in_flight if view is not None and view.leased is not None else 0
    return lag, leased


def _delayed(admin: Admin, topic: str) -> Iterator[tuple[str, TimerRow]]:
    """Yield the delayed messages of a topic, each with the name of its broker."""
    for broker in admin.masters():
        for timer in admin.timers().pending(broker.address):
            if timer.topic == topic:
                yield broker.name, timer


def _cancel(admin: Admin, topic: str) -> int:
    """Cancel the delayed messages of a topic, and return how many those were."""
    count = 0
    for broker_name, timer in list(_delayed(admin, topic)):
        if timer.handle is not None:  # runs of recurring messages have none, and a user who may not administer sees none
            with suppress(TooLate):  # it is among the others by now
                admin.timers().cancel(broker_name, timer)
                count += 1
    return count


def _may_pass(error: ClientError, *, is_made: bool) -> bool:
    """Return whether the error is that of a broker whose master is lost or changes, or of a registry that lags behind."""
    if isinstance(error, RouteNotFound):
        return error.reason is RouteProblem.NO_LIVE_MASTER or (is_made and error.reason is RouteProblem.TOPIC_ABSENT)
    return isinstance(error, ConnectionFailed) or (isinstance(error, Refused) and error.code == Response.SERVICE_NOT_AVAILABLE)

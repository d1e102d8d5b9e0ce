"""Routes of topics: fetched from the registries, cached and refreshed (specs: remoting protocol, sections 2.2 and 6)."""

import logging
import random
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, NoReturn

from metaq.client.connecting.presence import level_of
from metaq.client.connecting.transport import RemotingRequest, Transport, successful
from metaq.errors import ClientError, ProtocolError, RequestTimeout, RouteNotFound, RouteProblem
from metaq.message import DEFAULT_TOPIC, MessageQueue
from metaq.protocol.remoting.codes import INHERIT, MASTER, READ, WRITE, Request, Response
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.protocol.remoting.headers import TopicOnly
from metaq.protocol.remoting.routes import (
    NO_LIVE_BROKER,
    BrokerData,
    ClusterInfo,
    TopicRoute,
    decode_cluster_info,
    decode_route,
)

logger = logging.getLogger(__name__)

DEFAULT_QUEUES: Final = 4
_REGISTRY_TIMEOUT_S: Final = 3.0
"""The time that a registry has to answer while there is another one to ask; the last one has the rest of the call's time."""
_PROVISIONAL_S: Final = 1.0
"""The time for which a template route is used: a topic that is being created has its own route soon."""


class _Known(NamedTuple):
    """A cached route, and when it was fetched."""

    route: TopicRoute
    asked: float
    is_template: bool
    """True when the topic does not exist yet and the route names the brokers that would create it."""
    writable: tuple[MessageQueue, ...]
    """The writable queues, sorted. They are kept because every send needs them, and there may be thousands."""
    writers: tuple[str, ...]
    """The sorted names of the brokers with writable queues, including those without a master."""


class Routes:
    """The routes of the topics that a client uses. One registry is asked until it fails, then the next one. Thread-safe."""

    def __init__(self, registries: Sequence[str], transport: Transport) -> None:
        """Start with ``registries``, which may be empty if ``use`` is called later."""
        self.registries: tuple[str, ...] = ()
        self._transport = transport
        self.renew()  # makes the guard of what follows
        self._chosen = ""
        self._silent: set[str] = set()
        """The registries that have not answered the last question."""
        if registries:
            self.use(registries)
        self._topics: dict[str, _Known] = {}
        self._brokers: dict[str, BrokerData] = {}

    def renew(self) -> None:
        """Keep the cached routes in a child of a fork, under a lock of its own."""
        self._guard = threading.Lock()
        self._named = threading.Event()
        if self.registries:
            self._named.set()

    # -- asking -------------------------------------------------------------------------------------------------------

    def use(self, registries: Sequence[str]) -> None:
        """Ask these registries from now on, and stay with the current one if it is among them."""
        with self._guard:
            self.registries = tuple(registries)
            if self._chosen not in self.registries:
                self._chosen = random.choice(self.registries)
        self._named.set()

    def _next_registry(self, failed: str) -> None:
        with self._guard:
            if self._chosen == failed:
                after = self.registries.index(failed) + 1
                self._chosen = self.registries[after % len(self.registries)]

    def ask_registry(self, request: RemotingRequest, deadline: float, topic: str = "") -> RemotingCommand:
        """Return the answer of the first registry that gives one, whatever its code; ``RouteNotFound`` when none does."""
        if not self._named.wait(max(0.0, deadline - time.monotonic())):
            details = "ZooKeeper has named none; is it running, and a broker with the setting zookeeper?"
            raise RouteNotFound(topic, RouteProblem.REGISTRY_UNREACHABLE, details)
        failures = []
        last = len(self.registries) - 1
        for turn in range(len(self.registries)):
            with self._guard:
                address = self._chosen
            limit = deadline if turn == last else min(deadline, time.monotonic() + _REGISTRY_TIMEOUT_S)
            try:
                answer = self._transport.call(address, request, limit)
            except ClientError as error:
                port = "; is that the port of a registry, by default 9876?" if isinstance(error, RequestTimeout) else ""
                failures.append(f"{error}{port}")
                self._next_registry(address)
                if address not in self._silent:  # an outage is asked about some times a second
                    self._silent.add(address)
                    logger.info("registry does not answer address=%s turn=%s reason=%s", address, turn, error)
            else:
                self._silent.discard(address)
                return answer
        details = f"Tried {', '.join(self.registries)}: {'; '.join(failures)}"
        raise RouteNotFound(topic, RouteProblem.REGISTRY_UNREACHABLE, details)

    def refresh(self, topic: str, deadline: float) -> TopicRoute | None:
        """Fetch and return a topic's route; when the registry has none, return ``None`` and keep the cached one.

        ``RouteNotFound`` when no registry answers, ``Refused`` when one answers with an error.
        """
        response = self._ask_route(topic, deadline)
        return None if response.code == Response.TOPIC_NOT_EXIST else self._take(topic, response).route

    def _ask_route(self, topic: str, deadline: float) -> RemotingCommand:
        return self.ask_registry(RemotingRequest.of(Request.GET_ROUTEINFO_BY_TOPIC, TopicOnly(topic)), deadline, topic)

    def _take(self, topic: str, response: RemotingCommand) -> _Known:
        return self._keep(topic, _decoded(topic, successful(response).body), is_template=False)

    def refresh_all(self, timeout_s: float) -> list[str]:
        """Refresh every cached route, and return the topics whose route has changed. A route that cannot be fetched is kept."""
        with self._guard:
            before = dict(self._topics)
        changed = []
        for topic, known in before.items():
            try:
                route = self.refresh(topic, time.monotonic() + timeout_s)
            except RouteNotFound as error:
                logger.log(level_of(error), "routes not refreshed reason=%s", error)
                break  # if no registry answers for one topic, none will for the next
            except (ClientError, ProtocolError) as error:
                logger.warning("route not refreshed topic=%s reason=%s", topic, error)
                continue
            if route is not None and route != known.route:
                changed.append(topic)
        return changed

    def forget(self, topic: str) -> None:
        """Drop a topic's cached route, because a broker said that it is wrong; it is fetched again when it is needed."""
        with self._guard:
            self._topics.pop(topic, None)

    def clusters(self, deadline: float) -> ClusterInfo:
        """Return all clusters and brokers that a registry knows. ``RouteNotFound``, ``Refused``."""
        response = self.ask_registry(RemotingRequest.of(Request.GET_BROKER_CLUSTER_INFO), deadline)
        return decode_cluster_info(successful(response).body)

    def meet_brokers(self, deadline: float) -> bool:
        """Learn all brokers, including those of no known topic, and return whether any is new or has changed its addresses.

        ``RouteNotFound``, ``Refused``.
        """
        brokers = self.clusters(deadline).brokers
        with self._guard:
            are_new = any(self._brokers.get(name) != broker for name, broker in brokers.items())
            self._brokers.update(brokers)
        return are_new

    def _keep(self, topic: str, route: TopicRoute, *, is_template: bool) -> _Known:
        """Keep a route, and return what is kept: another thread may forget it at once."""
        queues = tuple(sorted(writable_queues(topic, route)))
        writers = tuple(sorted({data.broker_name for data in route.queues if data.permission & WRITE and data.write_queues}))
        known = _Known(route, time.monotonic(), is_template, queues, writers)
        with self._guard:
            self._topics[topic] = known
            for broker in route.brokers:
                self._brokers[broker.name] = broker
        return known

    def _known(self, topic: str) -> _Known | None:
        with self._guard:
            return self._topics.get(topic)

    # -- answers ------------------------------------------------------------------------------------------------------

    def route(self, topic: str, deadline: float) -> TopicRoute:
        """Return a topic's route, fetched if it is not cached. ``RouteNotFound`` also when the topic does not exist."""
        known = self._known(topic)
        if known is not None and not known.is_template:
            return known.route
        response = self._ask_route(topic, deadline)
        if response.code == Response.TOPIC_NOT_EXIST:
            remark = response.remark or "it has no route"
            problem = RouteProblem.NO_LIVE_MASTER if NO_LIVE_BROKER in remark else RouteProblem.TOPIC_ABSENT
            raise RouteNotFound(topic, problem, f"{', '.join(self.registries)} answered: {remark}")
        return self._take(topic, response).route

    def writable(self, topic: str, deadline: float) -> tuple[MessageQueue, ...]:
        """Return the sorted queues to which a topic's messages can be sent; the topic need not exist yet. ``RouteNotFound``."""
        known = self._for_sends(topic, deadline)
        if not known.writable:
            self.forget(topic)
            _unroutable(topic, known.route, WRITE, masters_only=True)
        return known.writable

    def writers(self, topic: str, deadline: float) -> tuple[str, ...]:
        """Return the sorted names of the brokers that take a topic's messages while they have a master. ``RouteNotFound``."""
        return self._for_sends(topic, deadline).writers

    def _for_sends(self, topic: str, deadline: float) -> _Known:
        """Return the route of a topic, or for a while of its template, fetched if it is not cached."""
        known = self._known(topic)
        if known is None or (known.is_template and time.monotonic() - known.asked > _PROVISIONAL_S):
            response = self._ask_route(topic, deadline)
            if response.code != Response.TOPIC_NOT_EXIST:
                return self._take(topic, response)
            return self._keep(topic, self._template(topic, response.remark or "", deadline), is_template=True)
        return known

    def _template(self, topic: str, remark: str, deadline: float) -> TopicRoute:
        """Return a route to the brokers that would create a topic; ``remark`` says why the topic has none of its own."""
        response = self.ask_registry(
            RemotingRequest.of(Request.GET_ROUTEINFO_BY_TOPIC, TopicOnly(DEFAULT_TOPIC)), deadline, topic
        )
        if response.code == Response.TOPIC_NOT_EXIST and NO_LIVE_BROKER in remark:
            raise RouteNotFound(topic, RouteProblem.NO_LIVE_MASTER, f"{', '.join(self.registries)} answered: {remark}")
        absent = response.code == Response.TOPIC_NOT_EXIST
        route = TopicRoute((), ()) if absent else _decoded(DEFAULT_TOPIC, successful(response).body)
        queues = tuple(
            queue._replace(write_queues=min(queue.write_queues, DEFAULT_QUEUES))
            for queue in route.queues
            if queue.permission & INHERIT
        )
        if not queues:
            asked = f"Asked {', '.join(self.registries)}"
            details = f"{asked}. No broker creates topics by itself: create it, or set auto_create_topics"
            raise RouteNotFound(topic, RouteProblem.TOPIC_ABSENT, details)
        return route._replace(queues=queues)

    def readable(self, topic: str, deadline: float) -> tuple[MessageQueue, ...]:
        """Return the sorted queues that a topic is read from. ``RouteNotFound``."""
        route = self.route(topic, deadline)
        queues = tuple(sorted(readable_queues(topic, route)))
        if not queues:
            self.forget(topic)
            _unroutable(topic, route, READ, masters_only=False)
        return queues

    def address(self, broker_name: str, broker_id: int = MASTER) -> str | None:
        """Return the address of a replica of a broker, by default the master's; ``None`` when no route has named it."""
        with self._guard:
            broker = self._brokers.get(broker_name)
        return None if broker is None else broker.addresses.get(broker_id)

    def any_address(self, broker_name: str) -> str | None:
        """Return the address of a broker's replica with the lowest number, the master if it is known; else ``None``."""
        with self._guard:
            broker = self._brokers.get(broker_name)
        return broker.addresses[min(broker.addresses)] if broker is not None and broker.addresses else None

    def replicas(self, broker_name: str) -> dict[int, str]:
        """Return the addresses of a broker's replicas by number, the master's first; none when no route names the broker."""
        with self._guard:
            broker = self._brokers.get(broker_name)
        return {} if broker is None else dict(sorted(broker.addresses.items()))

    def broker_addresses(self, *, masters_only: bool) -> set[str]:
        """Return the addresses of all known brokers, or only of their masters."""
        with self._guard:
            brokers = list(self._brokers.values())
        return {
            address
            for broker in brokers
            for number, address in broker.addresses.items()
            if number == MASTER or not masters_only
        }

    @property
    def met(self) -> bool:
        """True when a registry has ever named a broker, which is then worth waiting for."""
        return bool(self._brokers)

    def name_at(self, address: str) -> str | None:
        """Return the name of the broker at an address; ``None`` when no route has named one there."""
        with self._guard:
            return next((broker.name for broker in self._brokers.values() if address in broker.addresses.values()), None)

    def provisional(self, topic: str) -> bool:
        """Return whether a topic did not exist yet when its writable queues were last fetched."""
        known = self._known(topic)
        return known is not None and known.is_template

    def topics(self) -> list[str]:
        """Return the topics whose routes are cached."""
        with self._guard:
            return list(self._topics)


def writable_queues(topic: str, route: TopicRoute) -> Iterable[MessageQueue]:
    """Yield the queues that take messages: the writable ones of brokers whose master is alive."""
    masters = {broker.name for broker in route.brokers if MASTER in broker.addresses}
    for data in route.queues:
        if data.permission & WRITE and data.broker_name in masters:
            yield from (MessageQueue(topic, data.broker_name, number) for number in range(data.write_queues))


def readable_queues(topic: str, route: TopicRoute) -> Iterable[MessageQueue]:
    """Yield the queues that can be read, from a master or from a slave."""
    alive = {broker.name for broker in route.brokers if broker.addresses}
    for data in route.queues:
        if data.permission & READ and data.broker_name in alive:
            yield from (MessageQueue(topic, data.broker_name, number) for number in range(data.read_queues))


def _unroutable(topic: str, route: TopicRoute, permission: int, *, masters_only: bool) -> NoReturn:
    """Raise the ``RouteNotFound`` that says why a route has no usable queue."""
    permitted = {data.broker_name for data in route.queues if data.permission & permission}
    if not permitted:
        shown = ", ".join(f"{data.broker_name} has {data.permission}" for data in route.queues)
        needed = f"{permission} ({'write' if permission == WRITE else 'read'}) is needed"
        raise RouteNotFound(topic, RouteProblem.NO_PERMISSION, f"{needed}: {shown or 'no queue at all'}")
    named = {broker.name: dict(broker.addresses) for broker in route.brokers}
    what = "a master" if masters_only else "an address"
    raise RouteNotFound(topic, RouteProblem.NO_LIVE_MASTER, f"None of {', '.join(sorted(permitted))} has {what}: {named}")


def _decoded(topic: str, body: bytes) -> TopicRoute:
    """Decode a route; ``RouteNotFound`` when it cannot be decoded, because then no registry has answered."""
    try:
        return decode_route(body)
    except ProtocolError as error:
        raise RouteNotFound(topic, RouteProblem.REGISTRY_UNREACHABLE, f"The answer is not from a registry: {error}") from error

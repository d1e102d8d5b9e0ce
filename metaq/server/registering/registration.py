"""The registration of a broker: with the registry in its own process, or with all that its settings name.

Each external registry has one connection, which stays open: when it ends, the registry removes the broker. The whole topic
table goes over it at the start and every ``registration_interval_ms``; in between, topics that change are sent at once.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

import gevent
from gevent.event import Event

from metaq.address import Address, parse_address
from metaq.clock import Clock
from metaq.config import Settings
from metaq.engine.pool import run_in_pool
from metaq.engine.registry import Registry
from metaq.engine.role import Role
from metaq.engine.tables import topics as tables
from metaq.errors import ConnectionFailed, Fenced, MetaqError, NotConnected, Refused, RequestTimeout, UnknownTopic
from metaq.protocol.remoting.codes import MASTER, Request, Response
from metaq.protocol.remoting.headers import BrokerOnly, RegisterBroker, TopicOnly, encode_header
from metaq.protocol.remoting.routes import (
    ClusterInfo,
    DataVersion,
    TopicConfigs,
    TopicRoute,
    decode_cluster_info,
    decode_kv_table,
    decode_route,
    encode_data_version,
    encode_registration,
)
from metaq.registry.routes import BrokerKey
from metaq.replication.peers import Peers
from metaq.server.registering.outbound import Outbound
from metaq.server.remoting.admission import REGISTRATION_BYTES
from metaq.server.wire.listeners import parse_registries, replication_address

logger = logging.getLogger(__name__)

TIMEOUT_S: Final = 6.0
TELL_TIMEOUT_S: Final = 3.0
GOODBYE_TIMEOUT_S: Final = 2.0
FIRST_RETRY_S: Final = 0.5
ROUTE_TIMEOUT_S: Final = 1.0
"""Clients wait 3 s for the answer that needs the route."""


class Registration:
    """Keeps one broker registered."""

    def __init__(
        self,
        settings: Settings,
        role: Role,
        advertised: Address,
        topics: tables.TopicTable,
        identity: str,
        clock: Clock,
        registry: Registry | None,
        peers: Peers,
        check: Callable[[], None],
    ) -> None:
        """Prepare the registration.

        ``registry`` is the one in this process; when it is ``None``, the settings name external ones. ``check`` raises
        ``Fenced`` when another replica may be master by now.
        """
        self._advertised = advertised
        number = MASTER if role.is_master else settings.replica_number
        self.key = BrokerKey(settings.cluster_name, settings.broker_name, number, str(advertised))
        """The name under which registries know this process."""
        # a broker that accepts no slaves names the port above the advertised one, as RocketMQ does
        self._ha_address = replication_address(settings, advertised) or str(advertised._replace(port=advertised.port + 1))
        self._topics = topics
        self._identity = identity
        self._started_ms = clock.now_ms()
        self._registry = registry
        self.peers = peers
        self._check = check
        self.interval_s = settings.registration_interval_ms / 1000
        self.monotonic = clock.monotonic
        self._ordered: dict[Address, Collection[str]] = {}
        self._masters: dict[Address, str] = {}  # registry → the address for slaves that its master has there, the latest last
        self._members = [] if registry is not None else [_Member(self, address) for address in parse_registries(settings)]
        self._greenlets: list[Any] = []
        self._is_here = False  # registered with the registry in this process

    # -- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Register, and keep the broker registered; a registry that is down delays nothing.

        The broker must accept connections already.
        """
        if self._registry is not None:
            self._register_here(self._registry)
            self._is_here = True
            self._greenlets.append(gevent.spawn(self._register_here_forever, self._registry))
        self._greenlets += [gevent.spawn(member.stay_registered) for member in self._members]
        self._greenlets.append(gevent.spawn(self._check_advertised))

    def topic_changed(self, name: str) -> None:
        """Register a topic that was created or changed; never blocks.

        Before ``start`` the registry in this process must not receive it: it would then take the whole table for known.
        """
        if self._registry is not None and self._is_here:
            self._registry.register(self.key, self._ha_address, self.table([name]))
        for member in self._members:
            member.topic_changed(name)

    def wait_told(self) -> None:
        """Wait until every registry that can be reached knows all changes made so far, for ``TELL_TIMEOUT_S`` at most."""
        end_s = self.monotonic() + TELL_TIMEOUT_S
        for member in self._members:
            member.wait_told(max(0.0, end_s - self.monotonic()))

    def find_master(self) -> Address | None:
        """Return the address where this slave's master accepts slaves, from the own registry or as external ones last
        reported it: those that this broker is registered with now, or if there is none, the last one that answered. External
        registries are also asked again, for the next call."""
        if self._registry is not None:
            master = self._registry.tables.master(self.key.name)
            told = None if master is None else master.ha_address
        else:
            for member in self._members:
                member.ask()
            current = [self._masters[member.address] for member in self._members if member.registered]
            told = next(filter(None, current or [*reversed(self._masters.values())]), None)
        return parse_address(told, setting="haServerAddr") if told else None

    @property
    def is_registry(self) -> bool:
        """True when the registry is in this process, and so answers at once."""
        return self._registry is not None

    def route(self, topic: str) -> TopicRoute:
        """Return the brokers and queues of a topic, from the own registry or the first external one that knows it.

        Raise ``UnknownTopic`` when no registry has a broker with it, ``ConnectionFailed`` when one did not answer that may.
        """
        if self._registry is not None:
            return self._registry.tables.route(topic, self._registry.now_ms)
        silent: MetaqError | None = None
        for member in self._members:
            try:
                return member.route(topic)
            except UnknownTopic:
                continue
            except MetaqError as error:
                silent = error
        if silent is not None:
            raise ConnectionFailed(f"the route of the topic {topic} is not known: {silent}") from silent
        raise UnknownTopic(f"no registry knows a broker that has the topic {topic}")

    def cluster_info(self) -> ClusterInfo:
        """Return the brokers of the cluster, from the own registry or the first external one that answers.

        Raise ``ConnectionFailed`` when none does.
        """
        if self._registry is not None:
            return self._registry.tables.cluster_info()
        failed: MetaqError | None = None
        for member in self._members:
            try:
                return member.cluster_info()
            except MetaqError as error:
                failed = error
        raise ConnectionFailed(f"no registry answers: {failed}") from failed

    @property
    def problem(self) -> str | None:
        """The reason why clients cannot find this broker; ``None`` when at least one registry knows it."""
        if not self._members or any(member.registered for member in self._members):
            return None
        return f"not registered with any of {len(self._members)} registries: {self._members[0].problem or 'none answered yet'}"

    def stop(self) -> None:
        """Unregister from every registry, so that clients look elsewhere."""
        self._is_here = False
        if self._registry is not None:
            self._registry.unregister(self.key.name, self.key.address)
        goodbyes = [gevent.spawn(member.leave) for member in self._members]
        gevent.joinall(goodbyes, timeout=GOODBYE_TIMEOUT_S)
        gevent.killall(goodbyes + self._greenlets)

    def _register_here_forever(self, registry: Registry) -> None:
        while True:
            gevent.sleep(self.interval_s)
            self._register_here(registry)

    def _register_here(self, registry: Registry) -> None:
        registry.register(self.key, self._ha_address, self.table())
        self._mark_ordered(registry.ordered_topics())

    def _check_advertised(self) -> None:
        """Connect to the advertised address, and log a warning when something other than this broker answers there."""
        problem = self._problem_with(self._advertised)
        if problem is None:
            logger.debug("advertised address is right address=%s", self._advertised)
        else:
            hint = "set advertise to HOST:PORT under which clients reach this broker"
            logger.warning("advertised address problem=%s hint=%s", problem, hint)

    def _problem_with(self, address: Address) -> str | None:
        try:
            link = Outbound(address, TIMEOUT_S)
            try:
                fields = link.call(Request.IDENTITY, {}).fields
            finally:
                link.close()
        except MetaqError as error:
            return f"this broker does not reach itself under the address that clients are told: {error}"
        if fields.get("identity") == self._identity:
            return None
        other = fields.get("brokerName", "without a name")
        return f"another broker ({other}) answers under the address {address} that clients are told"

    # -- what is registered -------------------------------------------------------------------------------------------

    def table(self, names: Iterable[str] | None = None) -> TopicConfigs:
        """Return the table of all topics, or of those in ``names`` that exist."""
        known = self._topics if names is None else filter(None, map(self._topics.get, names))
        configs = {topic.name: tables.config_of(topic, self._topics.permission_of(topic)) for topic in known}
        return TopicConfigs(DataVersion(self._started_ms, self._topics.version), configs)

    def register_at(self, address: Address, link: Outbound, table: TopicConfigs) -> None:
        """Register once with an external registry.

        Raise ``Fenced`` when another replica may be master by now: it must not lose its place there.
        """
        body = encode_registration(table)
        is_long = len(body) > REGISTRATION_BYTES
        if is_long:  # registries would refuse it; of what routes have, the compressed form lacks the flags of unit topics
            body = run_in_pool(partial(encode_registration, table, compressed=True))
        self._check()
        key = self.key
        header = RegisterBroker(key.name, key.address, key.cluster, self._ha_address, key.number, compressed=is_long)
        answer = link.call(Request.REGISTER_BROKER, encode_header(header), body)
        self._masters.pop(address, None)
        self._masters[address] = answer.fields.get("haServerAddr", "")
        self._ordered[address] = decode_kv_table(answer.body)
        self._mark_ordered({topic for table in self._ordered.values() for topic in table})

    def refresh_at(self, link: Outbound, registered: DataVersion) -> None:
        """Give an external registry a sign of life: a question about the version of the last registration.

        That changes nothing where another replica has taken this one's place, and RocketMQ 4.x, which has no heartbeats, takes
        it, too.
        """
        link.call(Request.QUERY_DATA_VERSION, encode_header(self._named()), encode_data_version(registered))

    def unregister_at(self, link: Outbound) -> None:
        link.call(Request.UNREGISTER_BROKER, encode_header(self._named()))

    def _named(self) -> BrokerOnly:
        key = self.key
        return BrokerOnly(key.name, key.address, key.cluster, key.number)

    def _mark_ordered(self, ordered: Collection[str]) -> None:
        """Mark as ordered exactly the topics that some registry lists as ordered."""
        for topic in list(self._topics):
            if topic.order != (topic.name in ordered):
                self._topics.put(replace(topic, order=not topic.order))


class _Member:
    """The connection to one external registry."""

    def __init__(self, registration: Registration, address: Address) -> None:
        self._registration = registration
        self.address = address
        self._changed: set[str] = set()
        self._wake = Event()
        self._told = Event()  # set when the registry knows all changes, or cannot be reached
        self._link: Outbound | None = None
        self._failing = False
        self.registered = False
        self.problem = ""
        """The reason why the last try failed."""

    def topic_changed(self, name: str) -> None:
        self._changed.add(name)
        if not self._failing:
            self._told.clear()
        self._wake.set()

    def wait_told(self, timeout_s: float) -> None:
        self._told.wait(timeout_s)

    def ask(self) -> None:
        """Have the registry answer soon, by a registration without topics."""
        self._wake.set()

    def route(self, topic: str) -> TopicRoute:
        """Return the route of a topic. Raise ``UnknownTopic``, or ``ClientError`` when the registry cannot tell."""
        try:
            return decode_route(self._ask(Request.GET_ROUTEINFO_BY_TOPIC, encode_header(TopicOnly(topic))))
        except Refused as error:
            if error.code == Response.TOPIC_NOT_EXIST:
                raise UnknownTopic(str(error)) from error
            raise

    def cluster_info(self) -> ClusterInfo:
        """Return the brokers that the registry knows. Raise ``ClientError`` when it cannot tell."""
        return decode_cluster_info(self._ask(Request.GET_BROKER_CLUSTER_INFO, {}))

    def _ask(self, code: Request, fields: Mapping[str, str]) -> bytes:
        if self._link is None:
            raise NotConnected(f"{self.address}: {self.problem or 'not connected yet'}")
        late = RequestTimeout(f"{self.address} did not answer within {ROUTE_TIMEOUT_S} s")
        with gevent.Timeout(ROUTE_TIMEOUT_S, late):
            return bytes(self._link.call(code, fields).body)

    def stay_registered(self) -> None:
        """Connect and register. After every failure try again, with a pause that doubles up to the interval."""
        pause_s = FIRST_RETRY_S
        while True:
            try:
                self._register_until_it_fails()
            except MetaqError as error:
                pause_s = min(2 * pause_s, self._registration.interval_s) if self._failing else FIRST_RETRY_S
                self._report(error)
            finally:
                self._close()
            gevent.sleep(pause_s)

    def _register_until_it_fails(self) -> None:
        registration = self._registration
        link = self._link = Outbound(self.address, TIMEOUT_S, self._wake.set, registration.peers)
        due_s = registration.monotonic()
        version: DataVersion | None = None  # of the last registration
        busy_s = FIRST_RETRY_S
        while True:
            whole = registration.monotonic() >= due_s
            names, self._changed = self._changed, set()
            self._wake.clear()
            if whole:
                due_s = registration.monotonic() + registration.interval_s
            table = registration.table(None if whole else names)
            try:
                try:
                    registration.register_at(self.address, link, table)
                    version = table.version
                except Fenced:
                    if version is None:
                        raise
                    self._changed |= names  # for the next registration: the registry takes its version for that of all topics
                    self._told.set()
                    registration.refresh_at(link, version)  # readers still find it here
                busy_s = FIRST_RETRY_S
            except Refused as error:
                if version is None or error.code != Response.SYSTEM_BUSY:
                    raise
                self._changed |= names  # over this link: the registry removes the broker when it ends
                self._log(logging.WARNING if busy_s == FIRST_RETRY_S else logging.DEBUG, error)
                due_s = registration.monotonic() + busy_s
                busy_s = min(2 * busy_s, registration.interval_s)
            if not self.registered:
                logger.info("registered registry=%s", self.address)
            self.registered, self._failing = True, False
            if not self._changed:
                self._told.set()
            self._wake.wait(max(0.0, due_s - registration.monotonic()))

    def _report(self, error: MetaqError) -> None:
        """Log a failure: a warning for the first try, the debug level for the next ones."""
        self._log(logging.DEBUG if self._failing else logging.WARNING, error)
        self._failing, self.registered, self.problem = True, False, str(error)
        self._told.set()

    def _log(self, level: int, error: MetaqError) -> None:
        hint = "is a registry running there? it is tried again; setting: registries"
        logger.log(level, "cannot register registry=%s reason=%s hint=%s", self.address, error, hint)

    def leave(self) -> None:
        """Unregister the broker, if it is connected."""
        if self._link is None:
            return
        try:
            self._registration.unregister_at(self._link)
        except MetaqError as error:
            logger.info("no goodbye registry=%s reason=%s", self.address, error)

    def _close(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None

"""The transport: one client of metaq for each connection of kombu, in an event loop or without."""

import math
import sys
import time
from functools import partial
from queue import Empty
from typing import TYPE_CHECKING, Any, Final

from kombu.exceptions import ChannelError
from kombu.transport import virtual

import metaq
from kombu_metaq.bell import Bell
from kombu_metaq.channel import Channel
from kombu_metaq.names import ROOT
from kombu_metaq.shared import Shared, SharedKey, join, leave
from kombu_metaq.terms import MOST_LEASE_MS
from metaq.address import REGISTRY_PORT, Address, parse_address
from metaq.errors import BadRequest, BrokerBusy, ConnectionFailed, Refused, RequestTimeout, RouteNotFound, SendFailed

if TYPE_CHECKING:
    from kombu_metaq.broker import Broker

VISIBILITY_S: Final = 60.0
"""The time after which the messages of a worker that died come again; a living one has them for as long as it needs."""
LEAST_VISIBILITY_S: Final = 1.0
TIMEOUT_S: Final = 10.0
MOST_AT_ONCE: Final = 100
"""The messages that one turn of an event loop takes, before it looks at its other tasks."""
_NO_HOST: Final = "localhost"
"""The host of a URL that names none."""
_WORKER_STEPS: Final = (("celery.worker.consumer.mingle", "Mingle"), ("celery.worker.consumer.gossip", "Gossip"))


class Transport(virtual.Transport):  # type: ignore[misc]
    """metaq as a transport of kombu: ``metaq://user:password@host:9876/virtual-host``."""

    Channel = Channel

    default_port = REGISTRY_PORT
    driver_type = "metaq"
    driver_name = "metaq"
    polling_interval = None
    implements = virtual.Transport.implements.extend(
        asynchronous=True, exchange_type=frozenset(["direct", "topic", "fanout"]), heartbeats=False
    )
    connection_errors = (ConnectionFailed, RequestTimeout, RouteNotFound, SendFailed, BrokerBusy, OSError)
    recoverable_connection_errors = connection_errors
    channel_errors = (ChannelError, Refused, BadRequest)
    recoverable_channel_errors = ()

    def __init__(self, client: Any, **kwargs: Any) -> None:
        super().__init__(client, **kwargs)
        self.bell = Bell()
        self._broker: Broker | None = None
        self._shared: Shared | None = None
        self._loop: Any = None
        self._visibility_s = _visibility_s(client.transport_options.get("visibility_timeout", VISIBILITY_S))
        self._timeout_s = float(client.transport_options.get("timeout", TIMEOUT_S))
        registries = _registries(client)
        # kombu goes from one URL to the next one when a connection is lost, and the registries stay the same
        self._key = SharedKey(";".join(sorted(registries)), client.userid or "", self.virtual_host)
        self._connect = partial(
            metaq.connect,
            ";".join(registries),
            user=self._key.user,
            password=client.password or "",
            tls=_tls(client.ssl),
            timeout_s=self._timeout_s,
        )
        _let_workers_meet()

    def driver_version(self) -> str:
        """Return the version of metaq's client."""
        return metaq.__version__

    @property
    def virtual_host(self) -> str:
        """The virtual host, which is a prefix of names; ``/`` has none."""
        return self.client.virtual_host or ROOT

    @property
    def broker(self) -> "Broker":
        """The brokers; the client of metaq is made with the first use."""
        if self._broker is None:
            from kombu_metaq.broker import Broker  # noqa: PLC0415 - metaq's client takes longer to import than the rest

            self._broker = Broker(self._connect(), self._visibility_s, self._timeout_s, self.bell.ring)
        return self._broker

    @property
    def shared(self) -> Shared:
        """The state that all connections of this process share."""
        if self._shared is None:
            self._shared = join(self._key, self._connect)
        return self._shared

    @property
    def state(self) -> Any:
        """Exchanges and bindings, which connections of a process share."""
        return self.shared.state

    @state.setter
    def state(self, value: Any) -> None:
        """Do nothing: kombu's transport would have its own."""

    def establish_connection(self) -> "Transport":
        """Connect: one of the errors of ``connection_errors`` when there is no broker."""
        try:
            self.broker.check()
            connection: Transport = super().establish_connection()
        except BaseException:
            self.close_connection(self)  # kombu drops a transport that has not connected, and the client has threads
            raise
        return connection

    def close_connection(self, connection: Any) -> None:
        """Close all channels, which give back what is not settled, and the client."""
        super().close_connection(connection)
        if self._broker is not None:
            self._broker.close()
            self._broker = None
        if self._shared is not None:
            shared, self._shared = self._shared, None  # it has left, also when a reader cannot be closed
            leave(shared)
        if self._loop is not None:
            self.unregister_from_event_loop(connection, self._loop)
        self.bell.close()

    def drain_events(self, connection: Any, timeout: float | None = None) -> None:
        """Give one message to its consumer; ``TimeoutError`` when none comes within so many seconds."""
        until_s = None if timeout is None else time.monotonic() + timeout
        while not self._deliver_one():
            left_s = None if until_s is None else until_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                raise TimeoutError
            self.bell.wait(left_s)

    def _deliver_one(self) -> bool:
        try:
            self.cycle.get(self._deliver)
        except Empty:
            return False
        return True

    # -- event loops --------------------------------------------------------------------------------------------------

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        """Have the loop give messages to their consumers whenever some are here."""
        self._loop = loop
        loop.add_reader(self.bell.fileno(), self._on_bell, loop)
        loop.call_soon(self._on_bell, loop)

    def unregister_from_event_loop(self, connection: Any, loop: Any) -> None:
        """Have the loop forget this connection."""
        self._loop = None
        loop.remove_reader(self.bell.fileno())

    def _on_bell(self, loop: Any) -> None:
        self.bell.answer()
        for _ in range(MOST_AT_ONCE):
            if not self._deliver_one():
                return
        self.bell.ring()


def _visibility_s(given: Any) -> float:
    """Return a visibility timeout in seconds; ``ValueError`` unless it is a number from 1 s to 30 days."""
    try:
        seconds = float(given)
    except (TypeError, ValueError):
        seconds = math.nan
    if not LEAST_VISIBILITY_S <= seconds <= MOST_LEASE_MS / 1000:
        limits = f"from {LEAST_VISIBILITY_S:g} to {MOST_LEASE_MS // 1000} (30 days)"
        raise ValueError(f"visibility_timeout is {given!r}; write a number of seconds {limits} in the transport options")
    return seconds


def _registries(info: Any) -> list[str]:
    """Return the addresses of a connection: its own, and those that are written after it in its URL."""
    own = Address(info.hostname or _NO_HOST, info.port or REGISTRY_PORT)
    written = [url.partition("://")[2].rpartition("@")[2].partition("/")[0] for url in info.alt]
    others = [parse_address(address or _NO_HOST, default_port=REGISTRY_PORT) for address in written]
    return [str(address) for address in dict.fromkeys([own, *others])]


def _tls(given: Any) -> Any:
    """Return what ``metaq.connect`` takes for Celery's ``broker_use_ssl``."""
    return (given.get("ca_certs") or True) if isinstance(given, dict) else (given or False)


def _let_workers_meet() -> None:
    """Add metaq to the transports with which Celery's workers look for each other, if this process is a worker."""
    for name, step in _WORKER_STEPS:
        module = sys.modules.get(name)
        if module is not None:
            getattr(module, step).compatible_transports.add(Transport.driver_type)

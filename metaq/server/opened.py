"""The opening of a broker: its addresses are bound, its store is opened, and its role is taken."""

from collections.abc import Mapping
from typing import NamedTuple

from gevent.hub import get_hub

from metaq.clock import Clock, SystemClock
from metaq.config import Settings
from metaq.engine.parts import store_settings
from metaq.engine.pool import run_in_pool
from metaq.engine.role import ALONE, Role
from metaq.replication.peers import Peers
from metaq.server.access.authentication import Authentication
from metaq.server.addresses import Addresses, bind
from metaq.server.endpoint import Endpoint
from metaq.server.wire.listeners import Listener
from metaq.server.wire.tls import TlsContext
from metaq.store.copies.epochs import Epochs
from metaq.store.files.disk import Disk
from metaq.store.files.filecache import Run
from metaq.store.messagestore import MessageStore
from metaq.store.recovery.progress import Tell, nobody
from metaq.store.recovery.recovery import Recovery, open_store


class Opened(NamedTuple):
    """The opened parts of a broker, on which the role of a replica and all the rest are built."""

    settings: Settings
    endpoint: Endpoint
    addresses: Addresses
    peers: Peers
    """How this process connects to registries and masters."""
    store: MessageStore
    recovery: Recovery
    role: Role
    epochs: Epochs
    run: Run
    """Takes system calls off the hub."""
    goes_on: bool
    """True when the process has served already, in another role."""

    @property
    def authentication(self) -> Authentication:
        """The users and their authentication."""
        return self.endpoint.authentication


def open_data(
    settings: Settings,
    clock: Clock | None = None,
    disk: Disk | None = None,
    role: Role = ALONE,
    bound: Mapping[str, Listener] | None = None,
    authentication: Authentication | None = None,
    tell: Tell = nobody,
) -> Opened:
    """Bind the addresses, unless they are ``bound``, and open the store.

    ``tell`` receives the progress of the opening. ``bound`` and ``authentication`` come from the broker that had another role
    before.
    """
    tls = TlsContext(settings.tls_certificate, settings.tls_key) if settings.tls_certificate else None
    endpoint, run = Endpoint(settings, get_hub().loop, tls, bound, authentication), run_in_pool
    peers = endpoint.authentication.peers(settings)
    try:
        addresses = bind(endpoint, settings)
        own = settings.data, store_settings(settings, role), clock or SystemClock(), disk
        store, recovery = run(lambda: open_store(*own, tell=tell))
    except BaseException:
        endpoint.close()
        raise
    taken, epochs = role.taken(store, settings.replica_number, run)
    return Opened(settings, endpoint, addresses, peers, store, recovery, taken, epochs, run, goes_on=bound is not None)

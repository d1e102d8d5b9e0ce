"""A registry as a process of its own: the registry's requests, and the text commands that people use with telnet."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final

import gevent
from gevent.hub import get_hub

import metaq
from metaq.clock import Clock, SystemClock
from metaq.config import Settings
from metaq.engine.figures.metrics import Family
from metaq.engine.pool import run_in_pool
from metaq.engine.registry import Registry
from metaq.engine.tables.topics import FOLDER
from metaq.protocol.text.commands import Auth, Command, Create, Get, Help, Offset, Put, Stats, Sync, Transaction, Version
from metaq.protocol.text.replies import BAD_REQUEST, FORBIDDEN, OK, write_result
from metaq.registry.kvconfig import KvConfig
from metaq.server.access.authentication import LOOK_S, Authentication
from metaq.server.access.permissions import Action, allowed, denied
from metaq.server.endpoint import CommandHandler, Endpoint
from metaq.server.http.brokermetrics import registry_families
from metaq.server.remoting.identity import IdentityHandler
from metaq.server.remoting.registry import RegistryHandler
from metaq.server.text.login import log_in
from metaq.server.text.session import TextSession
from metaq.server.wire.tls import TlsContext
from metaq.store.files.disk import Disk, RealDisk
from metaq.store.files.filecache import Rest
from metaq.store.recovery.recovery import LOCK

logger = logging.getLogger(__name__)

IDLE_SCAN_S: Final = 5.0
HELP: Final = """\
stats OPAQUE     brokers and topics
version OPAQUE   the version
auth USER PASSWORD OPAQUE   log in
quit             close the connection
This is a registry: it knows where brokers are, and stores no messages.\r\n"""
REFUSAL: Final = "this is a registry, which stores no messages; connect to a broker"


class RegistryServer:
    """A process that runs a registry only."""

    def __init__(self, settings: Settings, clock: Clock | None = None, disk: Disk | None = None) -> None:
        """Bind the address, lock the data folder and read the key-value configuration; nothing is served before ``start``."""
        self.settings = settings
        """The settings in force."""
        self._clock = clock or SystemClock()
        disk = disk or RealDisk()
        tls = TlsContext(settings.tls_certificate, settings.tls_key) if settings.tls_certificate else None
        self._endpoint = Endpoint(settings, get_hub().loop, tls)
        try:
            self.address = self._endpoint.bind("registry_listen", settings.registry_listen)
            disk.make_directories(settings.data)
            self._lock = disk.lock(settings.data / LOCK)
            keys = KvConfig(disk, settings.data / FOLDER)
        except BaseException:
            self._endpoint.close()
            raise
        self._registry = Registry(settings, keys, self._clock)
        for family in (RegistryHandler(settings, self._registry, run_in_pool), IdentityHandler("")):
            self._endpoint.answer(family.requests())
        commands: dict[type, CommandHandler] = {
            Stats: self._stats,
            Version: lambda session, command: session.reply(write_result(OK, metaq.__version__, command.opaque)),
            Help: lambda session, command: session.reply(write_result(OK, HELP, command.opaque)),
            Auth: partial(log_in, self._endpoint.authentication),
            **dict.fromkeys((Get, Offset, Create, Transaction, Sync), self._refuse),
        }
        self._endpoint.answer_text(commands, self._refuse_puts, self._refuse_puts)
        self._greenlets = [
            gevent.Greenlet(self._every, settings.registry_scan_ms / 1000, self._registry.scan),
            gevent.Greenlet(self._every, IDLE_SCAN_S, self._endpoint.close_idle),
            gevent.Greenlet(self._every, LOOK_S, self._endpoint.authentication.reload_if_changed),
        ]

    def configure(self, settings: Settings) -> None:
        """Take over the settings that can change in a running registry, and read the users again."""
        self.settings = settings
        self._endpoint.configure(settings)
        self._endpoint.authentication.reload()

    @property
    def authentication(self) -> Authentication:
        """The users and their authentication."""
        return self._endpoint.authentication

    @property
    def metrics(self) -> "RegistryServer":
        """The registry itself, as the source of its metrics and readiness."""
        return self

    @property
    def site(self) -> None:
        """Nothing: a registry has no API."""

    def reasons(self) -> list[str]:
        """Return no reasons: a registry that serves is ready."""
        return []

    def facts(self) -> Mapping[str, object]:
        return {"role": "registry"}

    def families(self, rest: Rest) -> Iterator[Family]:
        return registry_families(self._registry)

    def stalled(self, seconds: float) -> None:
        """Take no note: a registry has no history."""

    @property
    def ready(self) -> str:
        """The line that names the address served."""
        host, port = self.address
        return f"metaq registry ready listen={host}:{port} data={self.settings.data}"

    def start(self) -> None:
        """Accept connections, and start the periodic work."""
        self._endpoint.start()
        for greenlet in self._greenlets:
            greenlet.start()

    def stop(self) -> None:
        """Take no more requests, send every answer that is due, and unlock the data folder."""
        self._endpoint.close()
        sessions = self._endpoint.sessions
        for session in list(sessions):
            session.wind_up()
        deadline = self._clock.monotonic() + self.settings.drain_timeout_ms / 1000
        while sessions and self._clock.monotonic() < deadline:
            gevent.sleep(0.005)
        for session in list(sessions):
            session.close()
        gevent.killall(self._greenlets)
        self._lock.close()

    def _every(self, pause_s: float, duty: Callable[[], None]) -> None:
        while True:
            gevent.sleep(pause_s)
            try:
                duty()
            except AssertionError:
                raise  # the registry's own state is wrong: the process ends
            except Exception:  # an unexpected error must not end the duty for ever
                logger.exception("duty failed duty=%s", duty.__name__)

    # -- text protocol ------------------------------------------------------------------------------------------------

    def _stats(self, session: TextSession, stats: Stats) -> None:
        if not allowed(session.principal, Action.INSPECT, ""):
            session.reply(write_result(FORBIDDEN, str(denied(session.principal, Action.INSPECT)), stats.opaque))
            return
        tables = self._registry.tables
        info = tables.cluster_info()
        lines = [f"topics {len(tables.topics())}", f"brokers {len(info.brokers)}"]
        for name, broker in info.brokers.items():
            addresses = " ".join(f"{number}={address}" for number, address in broker.addresses.items())
            lines.append(f"broker {name} cluster {broker.cluster} {addresses}")
        text = "STATS\r\n" + "".join(f"{line}\r\n" for line in lines) + "END\r\n"
        session.reply(write_result(OK, text, stats.opaque))

    def _refuse(self, session: TextSession, command: Get | Offset | Create | Transaction | Sync) -> None:
        session.reply(write_result(BAD_REQUEST, REFUSAL, command.opaque))

    def _refuse_puts(self, session: TextSession, commands: Sequence[Command], at: int) -> int:
        put = commands[at]
        assert type(put) is Put
        session.reply(write_result(BAD_REQUEST, REFUSAL, put.opaque))
        return at + 1

"""The composition root: builds a broker from its settings, starts it, and stops it in reverse."""

import errno
import ipaddress
import logging
import socket
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import gevent
from gevent.hub import get_hub
from gevent.lock import BoundedSemaphore

from metaq.clock import Clock, SystemClock
from metaq.config import Settings
from metaq.errors import ConfigError, MetaqError, StoreError
from metaq.protocol.commands import Auth, Command, Create, Get, Help, Offset, Stats, Sync, Transaction, Version
from metaq.protocol.record import host_bytes
from metaq.protocol.replies import write_result
from metaq.protocol.text import CommandReader, PutHead, TextLimits
from metaq.server.context import Context
from metaq.server.handlers.admin import AdminHandler
from metaq.server.handlers.get import GetHandler
from metaq.server.handlers.put import PutHandler
from metaq.server.hold import Holds
from metaq.server.session import READABLE, Session
from metaq.server.tables import TopicTable
from metaq.server.turn import Turns
from metaq.store.disk import Disk
from metaq.store.messagestore import StoreSettings
from metaq.store.recovery import open_store
from metaq.store.retention import HOUR_MS, RetentionRules

logger = logging.getLogger(__name__)

T = TypeVar("T")

ACCEPTS_A_TURN: Final = 64
LISTEN_BACKLOG: Final = 4096
ACCEPT_PAUSE_S: Final = 0.2
BUSY_RETRY_MS: Final = 1000
IDLE_SCAN_S: Final = 5.0
EXPIRE_S: Final = 0.1
SWEEP_SHARE: Final = 20
"""A sweep's pause is at least this many times its own length, so that it costs at most 5 % of the time."""


def _attempt(call: Callable[[], T]) -> tuple[T, None] | tuple[None, Exception]:
    """Bring a failure home as a value: the pool itself would print it, handled or not."""
    try:
        return call(), None
    except Exception as error:  # noqa: BLE001 - raised again by ``run``
        return None, error


def store_settings(settings: Settings) -> StoreSettings:
    """The store's part of the settings."""
    return StoreSettings(
        segment_bytes=settings.segment_bytes,
        queue_file_bytes=settings.queue_file_bytes,
        hot_bytes=settings.hot_bytes,
        open_files=settings.max_open_files,
        durability=settings.durability,
        broker_name=settings.broker_name,
        broker_number=settings.broker_number,
        retention=RetentionRules(
            keep_ms=round(settings.keep_hours * HOUR_MS),
            hour=settings.delete_hour,
            clean_ratio=settings.clean_ratio,
            force_ratio=settings.force_ratio,
            refuse_ratio=settings.refuse_ratio,
            ample_free_bytes=settings.ample_free_bytes,
            least_free_bytes=settings.least_free_bytes,
        ),
    )


def parse_listen(settings: Settings) -> tuple[str, int]:
    """Host and port to listen on; ``ConfigError`` when others could reach them and nobody said that they may."""
    host, separator, port = settings.listen.rpartition(":")
    if not separator or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"listen: {settings.listen!r} is not HOST:PORT")
    host = host.strip("[]") or "127.0.0.1"
    try:
        address = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        raise ConfigError(f"listen: cannot resolve {host!r}: {error.strerror}") from error
    if not ipaddress.ip_address(address).is_loopback and not settings.allow_public:
        raise ConfigError(
            f"listen: other machines can reach {host} and there are no users yet; say --allow-public if that is meant"
        )
    return str(address), int(port)


def _address_taken(host: str, port: int, error: OSError) -> ConfigError:
    return ConfigError(f"listen: cannot take {host}:{port}: {error.strerror}; is another broker running?")


class Broker:
    """One broker: a store, a listener, the sessions, and the greenlets that look after the store."""

    def __init__(self, settings: Settings, clock: Clock | None = None, disk: Disk | None = None) -> None:
        """Open the store and bind the address; nothing is served before ``start``."""
        self._settings = settings
        self._hub = get_hub()
        self._loop = self._hub.loop
        self.max_unsent_bytes = settings.max_unsent_bytes
        host, port = parse_listen(settings)
        self._listener = self._bind(host, port)
        try:
            self.store, self.recovery = open_store(settings.data, store_settings(settings), clock or SystemClock(), disk)
        except BaseException:
            self._listener.close()
            raise
        topics = TopicTable(settings.data, settings.max_topics)
        for problem in topics.load(self.store.disk, list(self.store.queues)):
            logger.error("topic table damaged, rebuilt from the store problem=%s", problem)
        topics.configure(settings.topics)
        port = self._listener.getsockname()[1]
        self.context = Context(settings, self.store, topics, host, port, host_bytes(host, port))
        self._holds = Holds()
        self._turns = Turns(self.store, settings, self._hub, self.run, self._holds.wake)
        self._puts = PutHandler(self.context, self._turns)
        self._gets = GetHandler(self.context, self._holds, self._hub, self.run)
        self._admin = AdminHandler(self.context, self._save_topics)
        self._handlers: dict[type, Callable[[Session, Any], None]] = {
            Get: self._gets.get,
            Offset: self._gets.offset,
            Stats: self._admin.stats,
            Version: self._admin.version,
            Help: self._admin.help,
            Create: self._admin.create,
            Auth: self._admin.auth,
            Transaction: self._admin.transaction,
            Sync: self._admin.sync,
        }
        self._limits = TextLimits(settings.max_line_bytes, settings.max_body_bytes)
        self._heads: dict[str, PutHead] = {}
        self._sessions: set[Session] = set()
        self._accept_watcher = self._loop.io(self._listener.fileno(), READABLE)
        self._greenlets: list[Any] = []
        self._saving_topics = BoundedSemaphore(1)
        self._busy = 0  # duties that are being done
        self._stopping = False

    def _bind(self, host: str, port: int) -> socket.socket:
        listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            listener.close()
            raise _address_taken(host, port, error) from error
        listener.setblocking(False)
        return listener

    def run(self, call: Callable[[], T]) -> T:
        """Make one system call in the hub's thread pool; only the calling greenlet waits."""
        outcome: Any
        outcome, error = self._hub.threadpool.apply(_attempt, (call,))
        if error is not None:
            raise error
        return outcome  # type: ignore[no-any-return]

    # -- life ---------------------------------------------------------------------------------------------------------

    @property
    def address(self) -> tuple[str, int]:
        return self.context.host, self.context.port

    def start(self) -> None:
        """Serve."""
        settings = self._settings
        self._look_after_retention()
        try:
            self._listener.listen(LISTEN_BACKLOG)
        except OSError as error:  # another broker bound the same port at the same moment and listens already
            raise _address_taken(*self.address, error) from error
        self._accept_watcher.start(self._on_accept)
        self._greenlets = [
            gevent.spawn(self._turns.sync_forever),
            gevent.spawn(self._every, EXPIRE_S, self._turns.expire),
            gevent.spawn(self._sweep_forever),
            gevent.spawn(self._every, settings.checkpoint_interval_ms / 1000, self._checkpoint),
            gevent.spawn(self._every, settings.retention_interval_ms / 1000, self._look_after_retention),
            gevent.spawn(self._every, IDLE_SCAN_S, self._close_idle),
        ]

    def stop(self) -> None:
        """Take no more commands, send every answer that is due, then close the store in order."""
        self._accept_watcher.stop()
        self._listener.close()
        self._gets.stopping = self._stopping = True
        self._holds.wake_all()
        deadline = self._settings.drain_timeout_ms / 1000
        for session in list(self._sessions):
            session.finish()
        self._wait_until(self._turns.nothing_parked, deadline)
        self._wait_until(lambda: not self._sessions, deadline)
        for session in list(self._sessions):
            session.close()
        self._turns.stop()
        syncing = self._greenlets[0]
        syncing.join(deadline)
        self._wait_until(lambda: not self._busy, deadline)
        gevent.killall(self._greenlets[1:])
        if self._busy or not syncing.dead:  # a thread still waits for the disk: the next start recovers, as after a kill
            logger.error("stopped without closing the store reason=the disk did not answer within drain_timeout_ms")
            return
        try:
            self._save_topics()
            self.store.close()
        except MetaqError as error:
            logger.error("stopped without closing the store reason=%s", error)

    def _wait_until(self, done: Callable[[], bool], deadline_s: float) -> None:
        deadline = self.store.clock.monotonic() + deadline_s
        while not done() and self.store.clock.monotonic() < deadline:
            gevent.sleep(0.005)

    # -- looking after the store --------------------------------------------------------------------------------------

    def _every(self, pause_s: float, duty: Callable[[], None]) -> None:
        while True:
            gevent.sleep(pause_s)
            self._do(duty)

    def _do(self, duty: Callable[[], None]) -> None:
        if self._stopping:
            return
        self._busy += 1
        try:
            duty()
        except StoreError as error:  # the next round tries again; what it means for puts the store itself knows
            logger.error("duty failed duty=%s reason=%s", duty.__name__, error)
        finally:
            self._busy -= 1

    def _sweep_forever(self) -> None:
        pause_s = self._settings.sweep_interval_ms / 1000
        while True:
            clock = self.store.clock
            started = clock.monotonic()
            self._do(self._sweep)
            gevent.sleep(max(pause_s, SWEEP_SHARE * (clock.monotonic() - started)))

    def _sweep(self) -> None:
        self._settle()
        self.store.sweep()
        self.store.log.prepare(self.run)

    def _checkpoint(self) -> None:
        if self.store.failure is not None:
            return
        self._save_topics()
        self._settle()
        self.store.checkpoint(self.run)

    def _settle(self) -> None:
        """Wait for the end of the turn: who has waited for the disk may come back in the middle of one."""
        while not self.store.settled:
            gevent.sleep(0)

    def _save_topics(self) -> None:
        with self._saving_topics:
            self.store.check_healthy()
            if self.context.topics.unsaved:
                self.context.topics.save(self.store.disk, self.store.clock.now_ms(), self.run)

    def _look_after_retention(self) -> None:
        decision = self.store.retire(self.run)
        if decision.delete:
            logger.info("segments deleted bases=%s", decision.delete)
        if decision.refuse:
            logger.error("puts are refused reason=%s", decision.refuse)

    # -- connections --------------------------------------------------------------------------------------------------

    def _on_accept(self) -> None:
        for _ in range(ACCEPTS_A_TURN):
            try:
                connection, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno == errno.ECONNABORTED:
                    continue
                logger.error("cannot accept, pausing reason=%s", error)  # out of descriptors or memory
                self._accept_watcher.stop()
                gevent.spawn_later(ACCEPT_PAUSE_S, self._accept_again)
                return
            connection.setblocking(False)
            if len(self._sessions) >= self._settings.max_connections:
                self._turn_away(connection)
                continue
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sessions.add(Session(connection, address, CommandReader(self._limits, self._heads), self))
            self.context.connections = len(self._sessions)

    def _accept_again(self) -> None:
        if self._listener.fileno() >= 0:
            self._accept_watcher.start(self._on_accept)

    def _turn_away(self, connection: socket.socket) -> None:
        limit = self._settings.max_connections
        text = f"there are {limit} connections already (max_connections); retry after {BUSY_RETRY_MS} ms"
        try:
            connection.send(write_result(503, text, "2147483647"))
        except OSError as error:
            logger.debug("cannot tell a client that it is turned away reason=%s", error)
        connection.close()

    def _close_idle(self) -> None:
        oldest = self.now() - self._settings.idle_timeout_ms / 1000
        for session in [session for session in self._sessions if session.last_io < oldest and not session.owed]:
            logger.info("connection idle, closed session=%s", session)
            session.close()

    # -- what sessions need -------------------------------------------------------------------------------------------

    def io(self, fd: int, events: int) -> Any:
        return self._loop.io(fd, events)

    def now(self) -> float:
        return float(self._loop.now())

    def puts(self, session: Session, commands: Sequence[Command], at: int) -> int:
        return self._puts.puts(session, commands, at)

    def command(self, session: Session, command: Command) -> None:
        self._handlers[type(command)](session, command)

    def closed(self, session: Session) -> None:
        self._sessions.discard(session)
        self.context.connections = len(self._sessions)

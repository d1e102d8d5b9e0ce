"""A session with ZooKeeper: reconnects, requests, and a lease that says how long the session certainly lives.

kazoo connects by itself and reports that in callbacks; here no callback does more than leave a note. When a connection stays
lost for a session time, a new client is made, without the old session, for two reasons: kazoo's own loop ends for good at an
answer that it does not expect; and if only the way back is lost, its attempts would keep the old session alive, and with it a
master that may not write.

The lease
    ZooKeeper ends a session no sooner than S (the negotiated time) after it last heard from it. A follower may have answered
    a request of which the leader has not heard: a follower reports its sessions when the leader asks, twice a tick. So a
    renewal is a transaction, which only a leader with a quorum can answer. The lease counts from the third newest renewal: it
    holds even if the leader has noticed neither of the two later ones. It lasts S less ``CLOCK_DRIFT``; with a renewal every
    S/6 it ends about 60 % of S after the newest one. A new leader begins the times of all sessions anew, and only after the
    quorum has left the old leader, which from then on answers no transaction.
"""

import logging
import socket
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from metaq.address import Address, parse_address
from metaq.clock import Clock
from metaq.errors import BadRequest, ChangeUnknown, ConfigError, RegistryUnavailable
from metaq.store.files.filecache import Run, run_here

logger = logging.getLogger(__name__)
_kazoo_logger = logger.getChild("kazoo")
_kazoo_logger.setLevel(logging.ERROR)  # it would warn at every attempt to connect, several times a second

DEFAULT_PORT: Final = 2181
CONNECTED: Final = "CONNECTED"
LOST: Final = "LOST"
"""``CONNECTED`` and ``LOST`` are kazoo's names of states."""
RENEWALS: Final = 6
"""The number of lease renewals in one session time."""
CLOCK_DRIFT: Final = 0.05
"""The share by which ZooKeeper's clock may run faster than ours."""
FIRST_RETRY_S: Final = 0.1
LAST_RETRY_S: Final = 1.0
STOP_S: Final = 3.0


def import_kazoo() -> Any:
    """Import and return kazoo when it is first needed, since it is an extra; raise ``ConfigError`` when it is missing."""
    try:
        import kazoo.client  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError("ZooKeeper needs the package kazoo; pip install 'metaq-broker[zookeeper]'") from error
    return kazoo


def threads() -> Any:
    """Return a kazoo handler that uses threads, for ``make_handler``."""
    return import_kazoo().handlers.threading.SequentialThreadingHandler()


def greenlets() -> Any:
    """Return a kazoo handler that uses greenlets, for ``make_handler``."""
    import_kazoo()
    from kazoo.handlers.gevent import SequentialGeventHandler  # noqa: PLC0415 - clients need no gevent

    return SequentialGeventHandler()


class Znode(NamedTuple):
    """The data of a node and its version, which rises with each change."""

    data: bytes
    version: int


class CreateNode(NamedTuple):
    """Operation: create a node that must not exist, under a parent that must; an ephemeral one ends with this session."""

    path: str
    data: bytes
    ephemeral: bool = False


class SetData(NamedTuple):
    """Operation: set the data of a node that must have this version; -1 is any."""

    path: str
    data: bytes
    version: int = -1


class DeleteNode(NamedTuple):
    """Operation: delete a node that must have this version, and no children."""

    path: str
    version: int = -1


class CheckVersion(NamedTuple):
    """Operation: require that a node has this version."""

    path: str
    version: int = -1


Operation = CreateNode | SetData | DeleteNode | CheckVersion


def parse_hosts(text: str) -> list[Address]:
    """Parse ``HOST:PORT,HOST:PORT``, where the port is 2181 if it is missing; raise ``BadRequest`` for anything else."""
    found = []
    for part in filter(None, map(str.strip, text.split(","))):
        if "/" in part:
            raise BadRequest(f"{part!r} is not HOST:PORT of a ZooKeeper")
        found.append(parse_address(part, default_port=DEFAULT_PORT))
    if not found:
        raise BadRequest(f"{text!r} is not the address of a ZooKeeper; write HOST:PORT,HOST:PORT")
    return found


class ZooKeeperSession:
    """A connection to ZooKeeper with one session after the other, as they expire.

    Any thread or greenlet may use it, but no request may be made from its callbacks. A subclass calls ``_reconnected`` while
    ``connected`` is false, and is woken by ``_wake`` whenever that changes.
    """

    def __init__(
        self,
        hosts: str,
        session_ms: int,
        clock: Clock,
        make_handler: Callable[[], Any] = threads,
        run: Run = run_here,
    ) -> None:
        """Create it; ``make_handler`` decides between threads and greenlets, ``run`` where host names are resolved.

        Raises ``BadRequest`` when ``hosts`` cannot be parsed, and ``ConfigError`` without kazoo.
        """
        self._kazoo = import_kazoo()
        self.hosts = hosts
        self._places = parse_hosts(hosts)
        self._asked_s = session_ms / 1000
        self.session_s = self._asked_s
        """The session time in seconds that ZooKeeper has granted; before the first connection, the requested one."""
        self._clock = clock
        self._make_handler = make_handler
        self._run = run
        self._tasks = make_handler()  # never started: it only makes tasks, events and locks
        self._wake = self._tasks.event_object()
        self._ended = self._tasks.event_object()
        self._client: Any = None
        self._anew_at = 0.0
        self._was_connected = False
        self._stuck = False
        self._renewed: deque[float] = deque(maxlen=3)
        self.connected = False
        """True while requests can be made; the session may live on without a connection."""
        self.lease_end = 0.0
        """The monotonic time until which ``leased_session`` is certainly alive; 0 when that is not known. It is renewed after
        ``hold_lease``, while there is a connection, and holds without one."""
        self.leased_session: int | None = None
        """The number of the session of which ``lease_end`` is."""

    # -- life ---------------------------------------------------------------------------------------------------------

    def hold_lease(self) -> None:
        """Begin to renew ``lease_end``, until ``stop``."""
        self._tasks.spawn(self._renew)

    def stop(self) -> None:
        """End the session: its ephemeral nodes go at once if ZooKeeper can be reached within ``STOP_S``."""
        self.lease_end = 0.0
        self._ended.set()
        self._wake.set()
        client, self._client = self._client, None
        self.connected = False
        if client is not None:
            closed = self._tasks.event_object()
            self._tasks.spawn(self._close, client, closed)
            closed.wait(STOP_S)

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Call a function after some seconds, in a task of its own, unless this is stopped before."""
        self._tasks.spawn(self._call_after, seconds, call)

    def _call_after(self, seconds: float, call: Callable[[], None]) -> None:
        self._ended.wait(seconds)
        if not self._ended.is_set():
            call()

    @property
    def session(self) -> int | None:
        """The number of the session while it is connected, otherwise ``None``."""
        identity = None if self._client is None else self._client.client_id
        return None if identity is None else int(identity[0])

    def _reconnected(self) -> float:
        """Make sure that kazoo reconnects, with a new client if need be; return the seconds until the next call."""
        if self._was_connected:
            self._was_connected = False
            self._anew_at = self._clock.monotonic() + self._asked_s
            logger.warning("zookeeper connection lost hosts=%s", self.hosts)
        left_s = self._anew_at - self._clock.monotonic()
        if self._client is not None and left_s > 0 and not self._stuck:
            return left_s
        self._begin()
        return LAST_RETRY_S if self._client is None else 2 * self._asked_s

    def _begin(self) -> None:
        """Make a new client, which connects by itself; the former one may have stopped for good."""
        if self._client is not None:
            logger.warning("zookeeper does not answer hosts=%s hint=is it running there?", self.hosts)
            self.lease_end = 0.0  # its session may be closed
            self._tasks.spawn(self._close, self._client)
            self._client = None
        self._stuck = False
        self._anew_at = self._clock.monotonic() + 2 * self._asked_s
        addresses = list(self._resolved())
        if not addresses:
            return
        handler = self._make_handler()
        retry = {"max_tries": -1, "delay": FIRST_RETRY_S, "max_delay": LAST_RETRY_S, "sleep_func": handler.sleep_func}
        client = self._kazoo.client.KazooClient(
            ",".join(addresses), timeout=self._asked_s, handler=handler, connection_retry=retry, logger=_kazoo_logger
        )
        self._learn_session_time(client)
        client.add_listener(partial(self._state_changed, client))
        self._client = client
        client.start_async()
        if self._ended.is_set():
            self._close(client)

    def _close(self, client: Any, closed: Any = None) -> None:
        try:
            client.stop()
            client.close()
        except Exception as error:  # noqa: BLE001 - kazoo passes on any error of its sockets, and nothing can be repaired
            logger.info("zookeeper connection not closed in order hosts=%s reason=%s", self.hosts, error)
        if closed is not None:
            closed.set()

    def _resolved(self) -> Iterable[str]:
        """Yield the numeric addresses of the hosts: kazoo would resolve names in its loop, and block all others meanwhile."""
        for host, port in self._places:
            try:
                found = self._run(partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM))
            except OSError as error:
                logger.warning("zookeeper host unknown host=%s reason=%s", host, error.strerror or error)
                continue
            for address in dict.fromkeys(str(row[4][0]) for row in found):
                yield str(Address(address, port))

    def _learn_session_time(self, client: Any) -> None:
        """Have ``session_s`` set at each connection. kazoo does not publish the granted time: its method ``_connect`` only
        returns two thirds of it, as its read timeout (milliseconds)."""
        connect = client._connection._connect

        def learn(*place: Any) -> Any:
            times = connect(*place)
            self.session_s = times[0] * 1.5 / 1000
            return times

        client._connection._connect = learn

    def _state_changed(self, client: Any, state: str) -> None:
        """Note a new state; called by kazoo, so it must not block."""
        if client is not self._client:
            return
        self.connected = state == CONNECTED
        if state == LOST:
            self.lease_end = 0.0
        self._wake.set()

    # -- requests -----------------------------------------------------------------------------------------------------

    def get(self, path: str) -> Znode | None:
        """Return the node at a path, or ``None`` when there is none; may raise ``RegistryUnavailable``."""
        return self.get_all([path])[0]

    def get_all(self, paths: Sequence[str]) -> list[Znode | None]:
        """Return the nodes at several paths, some hundreds at most, which are requested at once; as ``get`` otherwise."""
        client = self._connected()
        return [self._found(answer) for answer in [client.get_async(path) for path in paths]]

    def _found(self, answer: Any) -> Znode | None:
        try:
            data, stat = self._ask(answer)
        except self._kazoo.exceptions.NoNodeError:
            return None
        return Znode(data, stat.version)

    def children(self, path: str) -> list[str]:
        """Return the names of a node's children, sorted, none without the node; may raise ``RegistryUnavailable``."""
        try:
            return sorted(self._ask(self._connected().get_children_async(path)))
        except self._kazoo.exceptions.NoNodeError:
            return []

    def make(self, path: str, data: bytes = b"") -> bool:
        """Create a persistent node, with its parents; return false when it existed already.

        Raises ``RegistryUnavailable`` when nothing was sent, ``ChangeUnknown`` when no answer came.
        """
        try:
            self._ask(self._connected().create_async(path, data, makepath=True), ChangeUnknown)
        except self._kazoo.exceptions.NodeExistsError:
            return False
        return True

    def commit(self, operations: Sequence[Operation]) -> bool:
        """Do all operations in one transaction, or none if one of them cannot be done; return whether they were done.

        Raises:
            RegistryUnavailable: the request was not sent.
            ChangeUnknown: it was sent, and no answer came.
        """
        transaction = self._connected().transaction()
        for operation in operations:
            match operation:
                case CreateNode(path, data, ephemeral):
                    transaction.create(path, data, ephemeral=ephemeral)
                case SetData(path, data, version):
                    transaction.set_data(path, data, version)
                case DeleteNode(path, version):
                    transaction.delete(path, version)
                case CheckVersion(path, version):
                    transaction.check(path, version)
        outcomes = self._ask(transaction.commit_async(), ChangeUnknown)
        return not any(isinstance(outcome, Exception) for outcome in outcomes)

    def _connected(self) -> Any:
        client = self._client
        if client is None or not self.connected:
            raise RegistryUnavailable(f"ZooKeeper {self.hosts} is not connected")
        return client

    def _ask(self, answer: Any, unanswered: type[RegistryUnavailable] = RegistryUnavailable) -> Any:
        """Wait for an answer and return it; raise ``unanswered`` when none comes within ``session_s``, or for an error.

        That a node does not exist, or does already, is raised as kazoo's own error, for the caller to handle.
        """
        answer.wait(self.session_s)
        if not answer.ready():
            self.connected = False  # kazoo would have noticed a silent server: its own loop has ended
            self._stuck = True
            self._wake.set()
            raise unanswered(f"ZooKeeper {self.hosts} did not answer within {self.session_s:.1f} s")
        errors = self._kazoo.exceptions
        try:
            return answer.get(block=False)
        except (errors.NoNodeError, errors.NodeExistsError):
            raise
        except errors.KazooException as error:
            raise unanswered(f"ZooKeeper {self.hosts}: {type(error).__name__} {error}") from error

    # Several of these requests can be under way at once: one method begins a request, another one waits for its outcome.

    def _begin_create(self, path: str, data: bytes) -> Any:
        return self._connected().create_async(path, data, ephemeral=True, makepath=True)

    def _created(self, answer: Any) -> bool:
        """Return whether the node was created; false when it existed already."""
        try:
            self._ask(answer, ChangeUnknown)
        except self._kazoo.exceptions.NodeExistsError:
            return False
        return True

    def _begin_look(self, path: str, seen: Callable[[object], None] | None = None) -> Any:
        """Begin a request whose answer is a node's state, or ``None``.

        kazoo calls ``seen``, which must not block, at the node's next change, at the latest when the connection is lost.
        """
        return self._connected().exists_async(path, watch=seen)

    def _watch_children(self, path: str, seen: Callable[[object], None]) -> bool:
        """Have ``seen`` called at the next change of a node's children, as ``_begin_look`` does; return whether it exists."""
        try:
            self._ask(self._connected().get_children_async(path, watch=seen))
        except self._kazoo.exceptions.NoNodeError:
            return False
        return True

    # -- the lease ----------------------------------------------------------------------------------------------------

    def _renew(self) -> None:
        while not self._ended.is_set():
            sent = self._clock.monotonic()
            try:
                self._renew_once(sent)
            except RegistryUnavailable as error:
                logger.debug("zookeeper lease not renewed reason=%s", error)
            self._ended.wait(max(0.0, sent + self.session_s / RENEWALS - self._clock.monotonic()))

    def _renew_once(self, sent: float) -> None:
        session = self.session
        if session is None or not self.commit([CheckVersion("/")]) or self.session != session or self._ended.is_set():
            return
        if session != self.leased_session:
            self.lease_end = 0.0
            self._renewed.clear()
            self.leased_session = session
        self._renewed.append(sent)
        if len(self._renewed) == self._renewed.maxlen:
            self.lease_end = self._renewed[0] + self.session_s * (1 - CLOCK_DRIFT)

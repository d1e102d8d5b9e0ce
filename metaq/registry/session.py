"""One session with ZooKeeper: connected again and again, requests in it, and how long it certainly lives.

kazoo connects by itself, and tells of it by callbacks; here no callback does more than leave a note. A connection that stays
away for a session time is begun anew, without the old session: kazoo's own loop ends for good at an answer that it does not
expect, and where only the way back is lost, its tries would keep that session alive, and with it a master that may not write.

The lease
    ZooKeeper ends a session S (the negotiated time) after it heard of it last, no sooner. What its leader has heard is not what
    a follower has answered: a follower tells the leader of its sessions when the leader asks, twice a tick. So a renewal is a
    transaction, which only the leader with a quorum can answer, and the lease counts from the last but two of them: it holds
    even if the leader has heard of neither of the two after that. With a renewal every S/6 that is two thirds of S after the
    last one. A new leader begins all sessions anew, and only after the quorum has left the old one, which from then on answers
    no transaction.
"""

import logging
import socket
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from metaq.clock import Clock
from metaq.errors import BadRequest, ConfigError, OutcomeUnknown, RegistryUnavailable
from metaq.store.files.filecache import Run, run_here

logger = logging.getLogger(__name__)
_kazoo_logger = logger.getChild("kazoo")
_kazoo_logger.setLevel(logging.ERROR)  # it would warn at every try of a connection, several times a second

DEFAULT_PORT: Final = 2181
CONNECTED: Final = "CONNECTED"
LOST: Final = "LOST"
"""kazoo's names of states."""
RENEWALS: Final = 6
"""In one session time."""
CLOCK_DRIFT: Final = 0.05
"""How much faster than ours ZooKeeper's clock may run."""
FIRST_RETRY_S: Final = 0.1
LAST_RETRY_S: Final = 1.0
STOP_S: Final = 3.0


def import_kazoo() -> Any:
    """The package, when it is first needed: it is an extra. ``ConfigError``."""
    try:
        import kazoo.client  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError("ZooKeeper needs the package kazoo; pip install 'metaq-broker[zookeeper]'") from error
    return kazoo


def threads() -> Any:
    """What has everything done by threads (``make_handler``)."""
    return import_kazoo().handlers.threading.SequentialThreadingHandler()


def greenlets() -> Any:
    """The same for greenlets."""
    import_kazoo()
    from kazoo.handlers.gevent import SequentialGeventHandler  # noqa: PLC0415 - clients need no gevent

    return SequentialGeventHandler()


class Node(NamedTuple):
    """What stands at a path; the version rises with each change."""

    data: bytes
    version: int


class Create(NamedTuple):
    """Make a node that must not be there, under one that is; an ephemeral one goes with this session."""

    path: str
    data: bytes
    ephemeral: bool = False


class Set(NamedTuple):
    """Change a node that has this version; -1 is any."""

    path: str
    data: bytes
    version: int = -1


class Delete(NamedTuple):
    """Remove a node that has this version and no children."""

    path: str
    version: int = -1


class Check(NamedTuple):
    """Demand that a node has this version."""

    path: str
    version: int = -1


Operation = Create | Set | Delete | Check


def parse_hosts(text: str) -> list[tuple[str, int]]:
    """``HOST:PORT,HOST:PORT``, without a port 2181; ``BadRequest``."""
    found = []
    for part in filter(None, map(str.strip, text.split(","))):
        host, separator, port = part.rpartition(":")
        if not separator or part.endswith("]"):
            host, port = part, str(DEFAULT_PORT)
        if not host or not port.isdecimal() or not 0 < int(port) < 65536 or "/" in host:
            raise BadRequest(f"{part!r} is not HOST:PORT of a ZooKeeper")
        found.append((host.strip("[]"), int(port)))
    if not found:
        raise BadRequest(f"{text!r} names no ZooKeeper; write HOST:PORT,HOST:PORT")
    return found


class Session:
    """One after the other, as they expire. Any thread or greenlet may use it; no request is made from callbacks.

    Who inherits calls ``_reconnected`` while ``connected`` is false, and is woken by ``_wake`` whenever that changes.
    """

    def __init__(
        self,
        hosts: str,
        session_ms: int,
        clock: Clock,
        make_handler: Callable[[], Any] = threads,
        run: Run = run_here,
    ) -> None:
        """``make_handler`` decides between threads and greenlets, ``run`` where host names are resolved.

        ``BadRequest``; ``ConfigError`` without kazoo.
        """
        self._kazoo = import_kazoo()
        self.hosts = hosts
        self._places = parse_hosts(hosts)
        self._asked_s = session_ms / 1000
        self.session_s = self._asked_s
        """What ZooKeeper has granted; before that, what it is asked for."""
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
        self._renewed_session: int | None = None
        self.connected = False
        """Whether requests can be made now; the session may live without."""
        self.lease_end = 0.0
        """The reading of the monotonic clock until which this session is certainly alive; 0 when that is not known.
        Renewed while there is a connection, after ``hold_lease``."""

    # -- life ---------------------------------------------------------------------------------------------------------

    def hold_lease(self) -> None:
        """From now on renew ``lease_end``."""
        self._tasks.spawn(self._renew)

    def stop(self) -> None:
        """End the session: its ephemeral nodes go at once, if ZooKeeper can be told within ``STOP_S``."""
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
        """Call it so much later, from a task of its own, unless this is stopped before."""
        self._tasks.spawn(self._call_after, seconds, call)

    def _call_after(self, seconds: float, call: Callable[[], None]) -> None:
        self._ended.wait(seconds)
        if not self._ended.is_set():
            call()

    @property
    def session(self) -> int | None:
        """The number of the session while it is connected."""
        identity = None if self._client is None else self._client.client_id
        return None if identity is None else int(identity[0])

    def _reconnected(self) -> float:
        """kazoo does it, and this sees to it that kazoo does; how long to wait before the next look."""
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
        """Make a new client, which connects by itself; the one before can be gone for good."""
        if self._client is not None:
            logger.warning("zookeeper does not answer hosts=%s hint=is it running there?", self.hosts)
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
        except Exception as error:  # noqa: BLE001 - kazoo raises whatever its sockets do, and there is nothing to mend
            logger.info("zookeeper connection not closed in order hosts=%s reason=%s", self.hosts, error)
        if closed is not None:
            closed.set()

    def _resolved(self) -> Iterable[str]:
        """Addresses in numbers: kazoo would resolve names where it waits for answers, and nobody else could go on."""
        for host, port in self._places:
            try:
                found = self._run(partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM))
            except OSError as error:
                logger.warning("zookeeper host unknown host=%s reason=%s", host, error.strerror or error)
                continue
            for address in dict.fromkeys(str(row[4][0]) for row in found):
                yield f"[{address}]:{port}" if ":" in address else f"{address}:{port}"

    def _learn_session_time(self, client: Any) -> None:
        """Have ``session_s`` set at each connection. kazoo keeps what the server granted to itself: it only lets two thirds
        of it out of this method, as the time within which it reads (milliseconds)."""
        connect = client._connection._connect

        def learn(*place: Any) -> Any:
            times = connect(*place)
            self.session_s = times[0] * 1.5 / 1000
            return times

        client._connection._connect = learn

    def _state_changed(self, client: Any, state: str) -> None:
        """Called by kazoo, where nothing may block."""
        if client is not self._client:
            return
        self.connected = state == CONNECTED
        if state == LOST:
            self.lease_end = 0.0
        self._wake.set()

    # -- requests -----------------------------------------------------------------------------------------------------

    def get(self, path: str) -> Node | None:
        """What stands there. ``RegistryUnavailable``."""
        return self.get_all([path])[0]

    def get_all(self, paths: Sequence[str]) -> list[Node | None]:
        """The same at several places, which are asked for at once: some hundreds at most. ``RegistryUnavailable``."""
        client = self._connected()
        return [self._found(answer) for answer in [client.get_async(path) for path in paths]]

    def _found(self, answer: Any) -> Node | None:
        try:
            data, stat = self._ask(answer)
        except self._kazoo.exceptions.NoNodeError:
            return None
        return Node(data, stat.version)

    def children(self, path: str) -> list[str]:
        """The names under a path, sorted; none when it is not there. ``RegistryUnavailable``."""
        try:
            return sorted(self._ask(self._connected().get_children_async(path)))
        except self._kazoo.exceptions.NoNodeError:
            return []

    def make(self, path: str, data: bytes = b"") -> bool:
        """A persistent node, with its parents; whether it was not there. ``RegistryUnavailable``, ``OutcomeUnknown``."""
        try:
            self._ask(self._connected().create_async(path, data, makepath=True), OutcomeUnknown)
        except self._kazoo.exceptions.NodeExistsError:
            return False
        return True

    def commit(self, operations: Sequence[Operation]) -> bool:
        """All of them or, when one of them cannot be done, none; which of the two.

        Raises:
            RegistryUnavailable: nothing was asked.
            OutcomeUnknown: it was, and the answer did not come.
        """
        transaction = self._connected().transaction()
        for operation in operations:
            match operation:
                case Create(path, data, ephemeral):
                    transaction.create(path, data, ephemeral=ephemeral)
                case Set(path, data, version):
                    transaction.set_data(path, data, version)
                case Delete(path, version):
                    transaction.delete(path, version)
                case Check(path, version):
                    transaction.check(path, version)
        outcomes = self._ask(transaction.commit_async(), OutcomeUnknown)
        return not any(isinstance(outcome, Exception) for outcome in outcomes)

    def _connected(self) -> Any:
        client = self._client
        if client is None or not self.connected:
            raise RegistryUnavailable(f"ZooKeeper {self.hosts} is not connected")
        return client

    def _ask(self, answer: Any, unanswered: type[RegistryUnavailable] = RegistryUnavailable) -> Any:
        """The answer; a refusal for a reason of the tree of nodes is raised as kazoo's own error, for the caller to take."""
        answer.wait(self.session_s)
        if not answer.ready():
            self.connected = False  # kazoo would have noticed a server that is silent: its own loop has ended
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

    # Several of these can be on their way at once: each begins a request, another one waits for what became of it.

    def _begin_create(self, path: str, data: bytes) -> Any:
        return self._connected().create_async(path, data, ephemeral=True, makepath=True)

    def _created(self, answer: Any) -> bool:
        """Whether the node is new."""
        try:
            self._ask(answer, OutcomeUnknown)
        except self._kazoo.exceptions.NodeExistsError:
            return False
        return True

    def _begin_look(self, path: str, seen: Callable[[object], None] | None = None) -> Any:
        """The answer is a node's state, or ``None``. ``seen`` is called by kazoo at its next change, at the latest when the
        connection is lost, and may not block."""
        return self._connected().exists_async(path, watch=seen)

    def _watch_children(self, path: str, seen: Callable[[object], None]) -> bool:
        """The same for its children; whether the node is there."""
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
        if session is None or not self.commit([Check("/")]) or self.session != session or self._ended.is_set():
            return
        if session != self._renewed_session:
            self._renewed.clear()
            self._renewed_session = session
        self._renewed.append(sent)
        if len(self._renewed) == self._renewed.maxlen:
            self.lease_end = self._renewed[0] + self.session_s * (1 - CLOCK_DRIFT)

"""The master's side of replication: one feeder, with two greenlets for each slave (``metaq.replication.frames``)."""

import contextlib
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

import gevent
from gevent import socket
from gevent.event import Event

from metaq.address import Address
from metaq.errors import AccessDenied, MetaqError, ProtocolError, StoreError
from metaq.protocol.record import CHECKSUM_SIZE
from metaq.replication import frames
from metaq.replication.documents import Documents
from metaq.replication.frames import LENGTH, REPORT, Hello, encode_control, encode_data
from metaq.replication.insync import TICK_S, InSync
from metaq.replication.peers import MOST_PROOF, TLS, Certificate, Doorkeeper, Proof, check_claim
from metaq.replication.sameness import first_difference
from metaq.store.copies.applying import piece
from metaq.store.copies.epochs import FIRST, Epoch, Epochs, common_end
from metaq.store.files.filecache import Run, read_through
from metaq.store.messagestore import MessageStore

logger = logging.getLogger(__name__)

PIECE_BYTES: Final = 512 * 1024
HEARTBEAT_S: Final = 0.5
SILENCE_S: Final = 10.0
"""A slave that reports nothing for this time is taken for gone; a heartbeat asks it for a report."""
HELLO_TIMEOUT_S: Final = 10.0
MOST_NAMELESS: Final = 64
"""The most connections that have not become slaves yet. One more ends the oldest of them. Slaves send their hello at once, so a
slave finds room even while others hold silent connections open."""
MOST_SLAVES: Final = 32
TABLES_S: Final = 1.0
"""The time between two looks at the tables; one that was just saved is sent without waiting for it."""
TABLE_BYTES_S: Final = 4 * 1024 * 1024
"""The most that a slave is sent of tables in a second: each change sends all topics, and thousands of them may be made."""
COMPARING_S: Final = 1.0
"""How often a slave is informed that its log is still being compared."""
REPORTS_AT_ONCE: Final = 64 * 1024


class ReplicaIdentity(NamedTuple):
    """The identity of this replica: its broker, and its own number."""

    cluster: str
    broker_name: str
    broker_number: int
    replica: int


class MasterState(Protocol):
    """The state of a master that it sends to its slaves whenever it changes."""

    @property
    def readable_end(self) -> int: ...


class Feeder:
    """The sender of a master's log to all slaves that connect."""

    def __init__(
        self,
        store: MessageStore,
        epochs: Epochs,
        in_sync: InSync,
        identity: ReplicaIdentity,
        state: MasterState,
        documents: Callable[[], Documents],
        run: Run,
        keeper: Doorkeeper | None = None,
        certificate: Certificate | None = None,
        damaged: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Create it.

        ``documents`` makes the ``Documents`` of one slave; ``run`` takes reads of the disk off the hub; ``keeper``, if any,
        admits only administrators; ``damaged`` are the ranges of the log that are known to be damaged.
        """
        self.store = store
        self.epochs = epochs
        self.in_sync = in_sync
        self.identity = identity
        self.state = state
        self.documents = documents
        self.read = read_through(run)
        self._keeper = keeper
        self._certificate = certificate
        self._damaged = damaged
        self._slaves: dict[int, _Slave] = {}
        self._nameless: dict[socket.socket, str] = {}
        """Connections that have not become slaves yet, the oldest first, with their addresses."""
        self._woken_for: tuple[int, int, frozenset[int]] | None = None
        """The state at the last wake of all slaves: the log's end, and what else they are sent."""
        self._refused: dict[int, str] = {}
        """The reason of the last logged refusal, by replica."""
        self._greenlets: set[Any] = set()
        self._serving = False

    # -- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Take slaves from now on; the caller has saved the epoch."""
        self._serving = True
        self._spawn(self._look_forever)

    def serve(self, connection: socket.socket, address: Address) -> None:
        """Take a new connection, of a slave or of some other client, and serve it in a greenlet of its own."""
        if not self._serving:  # before ``start``, or after ``stop``, when nothing would end it; the slave tries again
            connection.close()
            return
        if len(self._nameless) >= MOST_NAMELESS:
            self._end_oldest()
        self._nameless[connection] = str(address)
        self._spawn(self._serve, connection, address)

    def _end_oldest(self) -> None:
        """Shut down the oldest connection that is not a slave's; its greenlet then stops waiting and closes it."""
        connection = next(iter(self._nameless))
        reason = f"{MOST_NAMELESS} other connections wait to log in"
        logger.warning("connection dropped address=%s reason=%s", self._nameless.pop(connection), reason)
        with contextlib.suppress(OSError):  # the other side has hung up
            socket.socket.shutdown(connection, socket.SHUT_RDWR)  # TLS's own would break a greenlet that waits in it

    def _spawn(self, work: Callable[..., None], *arguments: Any) -> Any:
        greenlet = gevent.spawn(work, *arguments)
        self._greenlets.add(greenlet)
        greenlet.link(self._greenlets.discard)
        return greenlet

    def stop(self) -> None:
        """End all connections, and take no more."""
        self._serving = False
        gevent.killall(list(self._greenlets))
        for slave in list(self._slaves.values()):
            slave.close()

    def wake(self) -> None:
        """Wake all slaves if the log has grown, readers see more of it, or the set in sync has changed."""
        state = (self.store.log.end, self.state.readable_end, self.in_sync.members)
        if state == self._woken_for:  # most reports change nothing that slaves are sent
            return
        self._woken_for = state
        for slave in self._slaves.values():
            slave.wake.set()

    def send_tables(self) -> None:
        """Send the tables that have changed to all slaves now, with the part of the log that is sent next."""
        for slave in self._slaves.values():
            slave.send_tables()

    def _look_forever(self) -> None:
        while True:
            gevent.sleep(TICK_S)
            self.in_sync.tick()

    # -- one slave ----------------------------------------------------------------------------------------------------

    def _serve(self, connection: socket.socket, address: Address) -> None:
        """Serve one connection until it ends."""
        slave: _Slave | None = None
        try:
            with gevent.Timeout(HELLO_TIMEOUT_S, ProtocolError(f"no hello within {HELLO_TIMEOUT_S:.0f} s")):
                connection = self._secure(connection)
                said = read_hello(connection)
                own_proof = self._identify(connection, said, address)
            connection.settimeout(SILENCE_S)
            hello = Hello.decode(said)
            answer = {**self._answer(hello, connection), **own_proof}
            connection.sendall(encode_control(self.store.log.end, answer))
            if "follow" in answer and answer["follow"] == hello.end:
                slave = self._enter(hello, connection, address)
                slave.feed()
        except (OSError, MetaqError) as error:
            if slave is None:
                logger.warning("this is no slave address=%s reason=%s", address, error)
            else:
                logger.warning("slave gone address=%s replica=%d reason=%s", address, slave.replica, error)
        finally:
            self._nameless.pop(connection, None)
            connection.close()
            if slave is not None and self._slaves.get(slave.replica) is slave:
                del self._slaves[slave.replica]
                self.in_sync.left(slave.replica)

    def _secure(self, connection: socket.socket) -> socket.socket:
        """Return the connection, in TLS if its first byte begins a TLS handshake."""
        if connection.recv(1, socket.MSG_PEEK)[:1] != bytes((TLS,)):
            return connection
        if self._certificate is None:
            raise ProtocolError("it uses TLS, but no certificate is configured (tls_certificate)")
        secured = self._certificate.secured(connection)
        self._nameless[secured] = self._nameless.pop(connection, "")
        try:
            secured.do_handshake()
        except BaseException:
            self._nameless.pop(secured, None)
            secured.close()
            raise
        return secured

    def _identify(self, connection: socket.socket, hello: bytes, address: Address) -> dict[str, str]:
        """Have a slave prove who it is; return the members of the answer by which this master proves the same."""
        if self._keeper is None:
            return {}
        challenge = secrets.token_hex(16)
        connection.sendall(encode_control(self.store.log.end, {"challenge": challenge}))
        length: int = LENGTH.unpack(_read_exactly(connection, LENGTH.size))[0]
        if not 2 <= length <= MOST_PROOF:
            raise ProtocolError(f"a proof of {length} bytes")
        proof = Proof.decode(_read_exactly(connection, length))
        try:
            return {"proof": check_claim(self._keeper, proof, challenge, hello, address.host)}
        except AccessDenied as error:
            connection.sendall(encode_control(self.store.log.end, {"refused": str(error)}))
            raise

    def _enter(self, hello: Hello, connection: socket.socket, address: Address) -> "_Slave":
        self._nameless.pop(connection, None)
        before = self._slaves.pop(hello.replica, None)
        if before is not None:  # its connection is lost, and only the slave has noticed
            before.close()
        slave = self._slaves[hello.replica] = _Slave(self, hello, connection)
        self.in_sync.joined(hello.replica, str(address), hello.text, hello.end)
        logger.info("slave follows replica=%d address=%s from=%d end=%d", hello.replica, address, hello.end, self.store.log.end)
        return slave

    def _answer(self, hello: Hello, connection: socket.socket) -> dict[str, Any]:
        """Return the content of the first control frame: how to follow, with this master's epoch, or a refusal."""
        refusal = self._refusal(hello)
        if refusal is not None:
            if self._refused.get(hello.replica) != refusal:  # it tries again every second
                logger.error("slave refused replica=%d reason=%s", hello.replica, refusal)
            self._refused[hello.replica] = refusal
            return {"refused": refusal}
        log, said = self.store.log, {"epoch": self.epochs.current.number}
        empty = hello.begin == hello.end
        end = hello.begin if empty else self._common_end(hello)
        if end is None:
            return {"refused": "the two logs have nothing in common; empty the data folder of one of them to have it copied"}
        if end < max(log.begin, hello.begin) or (empty and end != log.begin):
            return {**said, "copy": self._copy()}
        different = self._first_difference(hello, end, connection)
        if different is not None:
            logger.warning("slave differs replica=%d from=%d end=%d", hello.replica, different, hello.end)
            return {**said, "follow": different, "differs": True}
        if end == hello.end and not self._has_record(hello):
            return {
                "refused": f"the record before log offset {end} is another one here; empty the slave's data folder to copy all"
            }
        return {**said, "follow": end}

    def _copy(self) -> dict[str, Any]:
        """Return where a copy of the whole log begins, with the ordinal and text position of each partition there."""
        store = self.store
        while True:
            begin = store.log.begin
            ends = [(*key, *store.first(queue, self.read)) for key, queue in list(store.queues.items())]
            if store.log.begin == begin:  # otherwise retention has deleted a segment meanwhile
                return {"begin": begin, "partitions": ends}

    def _first_difference(self, hello: Hello, end: int, connection: socket.socket) -> int | None:
        """Return where a slave's log first differs before ``end``, or ``None``; the slave is sent the progress meanwhile."""
        due = self.in_sync.monotonic() + COMPARING_S
        at = hello.proved

        def tell() -> None:
            nonlocal due
            if self.in_sync.monotonic() >= due:
                connection.sendall(encode_control(self.store.log.end, {"comparing": at}))
                due = self.in_sync.monotonic() + COMPARING_S

        return first_difference(self.store.log, at, hello.ranges, end, self._damaged, self.read, tell)

    def _common_end(self, hello: Hello) -> int | None:
        """Return the log offset up to which this log and a slave's are the same; ``None`` if they have nothing in common."""
        theirs = [Epoch(*epoch) for epoch in hello.epochs]
        if hello.begin > 0 and theirs == [FIRST]:  # it was copying a log anew, and its part does not show the epochs yet
            return hello.end if hello.end < self.store.log.begin or self._has_record(hello) else None
        end = common_end(self.epochs.table, self.store.log.end, theirs, hello.end)
        return None if end == 0 else end  # a log is never given up as a whole: an operator may have named the wrong master

    def _refusal(self, hello: Hello) -> str | None:
        own = self.identity
        if (hello.cluster, hello.broker_name, hello.broker_number) != own[:3]:
            theirs = f"{hello.broker_name!r} number {hello.broker_number} of cluster {hello.cluster!r}"
            return (
                f"a slave of broker {theirs}; this is {own.broker_name!r} number {own.broker_number} of cluster {own.cluster!r}"
            )
        if hello.replica == own.replica:
            return f"this master is replica {own.replica} itself; give each replica a replica_number of its own"
        if hello.segment_bytes != self.store.settings.segment_bytes:
            return f"segment_bytes is {hello.segment_bytes} there and {self.store.settings.segment_bytes} here; make them equal"
        if len(self._slaves) >= MOST_SLAVES and hello.replica not in self._slaves:
            return f"this master has {MOST_SLAVES} slaves already, no more are taken"
        if hello.proved < 0:
            return "the slave is of an older version and proves nothing of its log; run one version on all replicas"
        newest = max((epoch[0] for epoch in hello.epochs), default=0)
        if newest > self.epochs.current.number:
            return f"the slave has seen epoch {newest}, this master is of epoch {self.epochs.current.number}: it was replaced"
        return None

    def _has_record(self, hello: Hello) -> bool:
        """Return whether this log holds the last record of a slave, too."""
        if hello.last is None:
            return hello.begin == hello.end
        offset, size, checksum = hello.last
        stored = self.store.log.record_at(offset, self.read) if self.store.log.begin <= offset < self.store.log.end else None
        return stored is not None and stored.size == size and checksum_text(stored.buffer) == checksum


def checksum_text(record: memoryview | bytes) -> str:
    """Return the checksum property of a whole record, by which two logs are compared."""
    return bytes(record[len(record) - CHECKSUM_SIZE :]).decode("latin-1")


def read_hello(connection: socket.socket) -> bytes:
    """Return the JSON of a hello."""
    head = _read_exactly(connection, frames.HELLO_HEAD)
    return _read_exactly(connection, frames.hello_length(head))


def _read_exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise ProtocolError("the connection ended before the hello did")
        data += more
    return data


class _Slave:
    """A slave that follows this master."""

    def __init__(self, feeder: Feeder, hello: Hello, connection: socket.socket) -> None:
        self._feeder = feeder
        self.replica = hello.replica
        self._connection = connection
        self._sent_end = hello.end
        self.wake = Event()
        self._documents = feeder.documents()
        self._tables_due = self._tables_allowed = 0.0  # when they are looked at next, and when that may be at the soonest
        self._told: Mapping[str, Any] = {}
        self._reader: Any = None

    def feed(self) -> None:
        """Send the log until the connection ends, and take reports meanwhile; always raises the reason in the end."""
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reader = gevent.spawn(self._read_reports)
        try:
            while not self._reader.dead:
                self.wake.clear()
                control, log = self._control(), self._feeder.store.log
                try:
                    data = self._pieces() if self._sent_end < log.end else []
                except StoreError as error:  # a damaged record: the operator of the slave has to know why it gets no further
                    self._send([control, encode_control(log.end, {"refused": str(error)})])
                    raise
                if data or control:
                    self._send([*data, control])
                elif not self.wake.wait(min(HEARTBEAT_S, max(0.0, self._tables_due - self._feeder.in_sync.monotonic()))):
                    self._told = {}
            problem = self._reader.value
            raise problem if isinstance(problem, BaseException) else ProtocolError("the slave closed the connection")
        finally:
            self._reader.kill()

    def close(self) -> None:
        self._connection.close()

    def send_tables(self) -> None:
        """Send the tables that have changed as soon as that is allowed."""
        self._tables_due = self._tables_allowed
        self.wake.set()

    def _send(self, parts: Sequence[bytes | memoryview]) -> None:
        """Send all parts, mostly without copying the bytes of the log."""
        if type(self._connection) is not socket.socket:  # one in TLS cannot send several parts at once
            self._connection.sendall(b"".join(parts))
            return
        sent = self._connection.sendmsg(parts)
        if sent < sum(map(len, parts)):
            self._connection.sendall(memoryview(b"".join(parts))[sent:])

    def _pieces(self) -> list[bytes | memoryview]:
        log = self._feeder.store.log
        if self._sent_end < log.begin:
            raise ProtocolError(f"what it lacks, from {self._sent_end} on, has aged out: it must copy everything again")
        start, data = piece(log, self._sent_end, PIECE_BYTES, self._feeder.read)
        self._sent_end = start + len(data)
        return [encode_data(start, len(data)), data]

    def _control(self) -> bytes:
        """Return a control frame with what has changed since the last one; empty when nothing has."""
        feeder = self._feeder
        now: dict[str, Any] = {
            "epoch": feeder.epochs.current.number,
            "readable_end": min(feeder.state.readable_end, feeder.store.log.end),
            "begin": feeder.store.log.begin,
            "in_sync": sorted(feeder.in_sync.members),
        }
        moment = feeder.in_sync.monotonic()
        said: dict[str, Any] = {} if now == self._told else dict(now)
        if moment >= self._tables_due:
            documents = self._documents.changed()
            self._tables_due = moment + TABLES_S
            self._tables_allowed = moment + sum(map(len, documents.values())) / TABLE_BYTES_S
            if documents:
                said = {**now, "documents": documents}
        self._told = now
        return encode_control(feeder.store.log.end, said) if said else b""

    def _read_reports(self) -> Exception | None:
        """Take reports until the connection ends; return its error, or ``None`` when the slave closed it."""
        rest, held_end = b"", 0
        try:
            while data := self._connection.recv(REPORTS_AT_ONCE):
                rest += data
                whole = len(rest) - len(rest) % REPORT.size
                for (report,) in REPORT.iter_unpack(rest[:whole]):
                    if not held_end <= report <= self._sent_end:
                        return ProtocolError(f"a report of {report} after {held_end}, although {self._sent_end} was sent")
                    held_end = report
                rest = rest[whole:]
                if whole and self._feeder._slaves.get(self.replica) is self:
                    self._feeder.in_sync.reported(self.replica, held_end)
        except OSError as error:
            return error
        finally:
            self.wake.set()
        return None

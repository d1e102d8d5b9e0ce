"""One replica of a broker: a ``Broker`` that is closed and opened anew each time that its role changes.

Everything but the log and a few tables is derived from these when a store is opened, so whoever opens it as master goes on
where the last master was, and a slave whose log was cut has forgotten what was cut. The addresses stay bound meanwhile, and
clients connect again. The store is closed and opened in a thread: ZooKeeper must go on hearing of who was elected, however long
the disk takes, or another one is elected before this one serves, again and again.

``config/replica.json`` remembers what an operator has made of this replica, and how far readers could see::

    {"crc32c":"…","role":"slave","master":"10.0.0.1:10912","readable_end":81233}
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import gevent
from gevent import socket
from gevent.event import Event
from gevent.lock import BoundedSemaphore

from metaq.clock import SystemClock
from metaq.config import Settings
from metaq.errors import BadRequest, ConfigError, MetaqError, NotMaster, RequestTimeout
from metaq.replication.election import Election, Log
from metaq.replication.follower import Address
from metaq.replication.frames import encode_control
from metaq.replication.insync import of_nobody
from metaq.server.broker import Broker
from metaq.server.daemon import STARTED_NOT
from metaq.server.front import Listener, resolve
from metaq.server.gate import Gate
from metaq.server.handlers.replica import ReplicaHandler
from metaq.server.measured import Measured
from metaq.server.registration import parse_address, reached_at, written
from metaq.server.role import Role
from metaq.server.sides import MasterSide, SlaveSide
from metaq.server.tables import FOLDER
from metaq.server.zkregistration import open_session
from metaq.store.disk import Disk, RealDisk
from metaq.store.documents import read_document, write_document
from metaq.store.messagestore import MessageStore
from metaq.store.progress import Tell, nobody

logger = logging.getLogger(__name__)

KEPT: Final = "replica.json"
KEEP_S: Final = 1.0
ELECTED: Final = "elected"
HAND_OVER_S: Final = 5.0
HAND_OVER_LOOK_S: Final = 0.005
ALONE_LOOK_S: Final = 0.5
NEXT_EPOCH: Final = 1
"""Of a master that nobody elects: the one after its log's newest."""


class Kept(NamedTuple):
    """What is remembered from one process to the next."""

    role: str
    """What an operator has made of it: ``master``, ``slave``; empty: what the settings say."""
    master: str
    """Of a slave that an operator has made one: its master's ``replication_listen``; empty: as the settings say."""
    readable_end: int


class Replica:
    """The ``Server`` of a broker that has replicas."""

    def __init__(self, settings: Settings, disk: Disk | None = None, tell: Tell = nobody) -> None:
        """Bind the addresses and open the store; ``tell`` hears how far that is."""
        self.settings = settings
        """Those in force, whatever the role."""
        self._disk = disk or RealDisk()
        self._path = settings.data / FOLDER / KEPT
        self._kept = self._load()
        address = resolve("replication_listen", settings.replication_listen, settings)
        listener = Listener("replication_listen", address)
        self.address: Address = listener.address
        """Where slaves connect."""
        self._listener = socket.socket(fileno=listener.socket.detach())
        self.side: MasterSide | SlaveSide
        self._election: Election | None = None
        self.broker = self._open(self._first_role(), None, None, tell)
        if settings.role == ELECTED:
            self._election = self._join_group()
        self._wanted: Role | None = None
        self._changing = Event()
        self._between_roles = BoundedSemaphore(1)
        """Held while one broker is closed and the next one opened."""
        self._keeping = BoundedSemaphore(1)
        self._greenlets: list[Any] = []

    # -- life ---------------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> str:
        """The line that says where it serves."""
        first, _, rest = self.broker.ready.partition(" data=")
        return f"{first} replication={written(self.address)} role={self.role_name} data={rest}"

    @property
    def measured(self) -> Measured:
        """The broker of now."""
        return self.broker.measured

    @property
    def gate(self) -> Gate:
        """The same for the broker of every role."""
        return self.broker.gate

    @property
    def role_name(self) -> str:
        return "master" if self.broker.role.is_master else "slave"

    def start(self) -> None:
        self._listener.listen()
        self._start_broker()
        self._greenlets = [gevent.spawn(self._accept_forever), gevent.spawn(self._change_forever)]
        if self._election is not None:
            self._election.start()
            if self.settings.durability.on_replicas:
                self._greenlets.append(gevent.spawn(self._step_down_when_alone, self._election))

    def _start_broker(self) -> None:
        self.broker.every(KEEP_S, self._keep)
        self.side.start()
        self.broker.start()
        logger.info("serving role=%s epoch=%d", self.role_name, self.broker.epochs.current.number)

    def stop(self) -> None:
        if self._election is not None:
            self._election.stop()
        with self._between_roles:
            gevent.killall(self._greenlets)
        self._listener.close()
        self._keep()
        self.side.stop()
        self.broker.stop()

    # -- roles --------------------------------------------------------------------------------------------------------

    def _join_group(self) -> Election:
        settings = self.settings
        return Election(
            open_session(settings, SystemClock()),
            f"{settings.cluster_name}/{settings.broker_name}",
            *(settings.replica_number, written(reached_at(self.address, self.broker.addresses.advertised))),
            log=self._log,
            elected=lambda epoch, eligible: self._change(Role(is_master=True, epoch=epoch, eligible=eligible)),
            deposed=lambda: self._change(Role(is_master=False)),
            moved=self._go_to,
            monotonic=SystemClock().monotonic,
        )

    def _log(self) -> Log:
        store = self.broker.store
        return Log(self.broker.epochs.current.number, store.log.end, complete=store.log.end >= self._kept.readable_end)

    def _first_role(self) -> Role:
        role = "slave" if self.settings.role == ELECTED else self._kept.role or self.settings.role
        return Role(role == "master", NEXT_EPOCH if role == "master" else 0, self._kept.readable_end)

    def _open(self, role: Role, bound: Any, gate: Gate | None, tell: Tell = nobody) -> Broker:
        settings = self._with_address(self.settings)
        broker = Broker(settings, disk=self._disk, role=role, bound=bound, tell=tell, gate=gate, owner=self)
        if role.is_master:
            self.side = MasterSide(broker, self.settings, of_nobody if self._election is None else self._election.agree)
            if self._election is not None:
                broker.store.log.fence = self._election.check
        else:
            self.side = SlaveSide(broker, self.settings, self._find_master, self._reopen)
        broker.add_family(ReplicaHandler(self, broker.later))
        return broker

    def _find_master(self) -> Address | None:
        if self._election is not None:
            return self._election.master_address
        where = self._kept.master or self.settings.master
        return parse_address("master", where) if where else self.broker.registration.find_master()

    def _go_to(self, master: Address) -> None:
        if isinstance(self.side, SlaveSide):
            self.side.follower.go_to(master)

    def _reopen(self) -> None:
        """The slave's log is to be replaced."""
        self._change(Role(is_master=False))

    def _change(self, role: Role) -> None:
        self._wanted = role
        self._changing.set()

    def configure(self, settings: Settings) -> None:
        """Take over what can change while it runs."""
        self.broker.configure(self._with_address(settings))
        self.settings = settings

    def _with_address(self, settings: Settings) -> Settings:
        """Settings with the port that ``replication_listen`` left open."""
        return settings.model_copy(update={"replication_listen": written(self.address)})

    def _change_forever(self) -> None:
        while True:
            self._changing.wait()
            self._changing.clear()
            role, self._wanted = self._wanted, None
            if role is not None:
                try:
                    with self._between_roles:
                        self._change_now(role._replace(readable_end=self.side.readable_end))
                except MetaqError as error:  # the broker is closed, and nothing would ever open it
                    logger.critical("role not changed, this process ends reason=%s", error)
                    raise SystemExit(STARTED_NOT) from error

    def _change_now(self, role: Role) -> None:
        """Close the broker, and open it in its new role."""
        logger.info("role changes from=%s to=%s", self.role_name, "master" if role.is_master else "slave")
        self.broker.store.refusal = NotMaster("the role of this replica changes; try again")
        self.broker.turns.abandon(self.broker.store.refusal)
        self.side.stop()
        self._kept = self._kept._replace(readable_end=role.readable_end)
        bound = self.broker.give_up()
        self.broker = self._open(role, bound, self.gate)
        self.broker.configure(self._with_address(self.settings))  # they may have changed while it opened
        self._start_broker()

    def promote(self) -> None:
        """Become master, by an operator's order; of a group that elects, as soon as its master is gone."""
        if self.broker.role.is_master:
            raise BadRequest("this replica is the master already")
        if self._election is not None:
            self._election.take_over()
            return
        self._keep(role="master", master="")
        self._change(Role(is_master=True, epoch=NEXT_EPOCH))

    def demote(self, master: str) -> None:
        """Become the slave of the master at an address, by an operator's order."""
        if self._election is not None:
            raise BadRequest("this replica's role is elected through ZooKeeper; hand over instead (metaq cluster handover)")
        try:
            parse_address("master", master)
        except ConfigError as error:
            raise BadRequest(str(error)) from error
        self._keep(role="slave", master=master)
        self._change(Role(is_master=False))

    def hand_over(self, replica: int) -> None:
        """Let another replica in sync be master, by an operator's order.

        This one takes no more puts first, and waits until the other has them all and none waits for a third replica.
        """
        side, turns = self.side, self.broker.turns
        if self._election is None or not isinstance(side, MasterSide):
            raise BadRequest("only the master of a group that elects through ZooKeeper can hand over")
        with self._refusing(f"this master hands over to replica {replica}; try again") as store:
            with gevent.Timeout(
                HAND_OVER_S, RequestTimeout(f"replica {replica} or others in sync did not catch up within {HAND_OVER_S:.0f} s")
            ):
                while not (turns.nothing_parked() and store.settled and side.has_all(replica)):
                    gevent.sleep(HAND_OVER_LOOK_S)
            self._election.hand_over(replica)
        self._change(Role(is_master=False))

    @contextmanager
    def _refusing(self, reason: str) -> Iterator[MessageStore]:
        """Take no puts from now on, unless this fails; ``NotMaster`` when its role changes already."""
        store, refusal = self.broker.store, NotMaster(reason)
        if store.refusal is not None:
            raise store.refusal
        store.refusal = refusal
        try:
            yield store
        except MetaqError:
            if store.refusal is refusal:  # else its role has changed meanwhile
                store.refusal = None
            raise

    def _step_down_when_alone(self, election: Election) -> None:
        """Let another replica be master whenever too few have reported to this one for a session time, and others could.

        Nothing can be acknowledged meanwhile, so the eligible ones lack nothing.
        """
        most_s = self.settings.zookeeper_session_ms / 1000
        alone = False
        while True:
            gevent.sleep(ALONE_LOOK_S)
            was_alone, side = alone, self.side
            alone = isinstance(side, MasterSide) and side.in_sync.unheard_s > most_s
            if alone and was_alone:  # this process may have stood still, and what was reported meanwhile comes first
                try:
                    self._step_down(election)
                except MetaqError as error:
                    logger.info("master does not step down reason=%s", error)

    def _step_down(self, election: Election) -> None:
        successor = election.successor(self.settings.min_in_sync)
        if successor is not None:
            with self._refusing("too few replicas follow this master, another one takes over; try again"):
                election.hand_over(successor)
            logger.warning("master steps down reason=too few slaves report successor=%d", successor)
            self._change(Role(is_master=False))

    # -- remembering --------------------------------------------------------------------------------------------------

    def _load(self) -> Kept:
        content, problems = read_document(self._disk, self._path)
        for problem in problems:
            logger.error("what this replica was is not known, the settings say it problem=%s", problem)
        if content is None:
            return Kept("", "", 0)
        return Kept(content["role"], content["master"], content["readable_end"])

    def _keep(self, **changes: Any) -> None:
        with self._keeping:  # an order may come while the duty waits for the disk
            kept = self._kept._replace(readable_end=self.side.readable_end, **changes)
            if kept != self._kept:
                self._kept = kept
                self.broker.run(lambda: self._disk.make_directories(self._path.parent))
                self.broker.run(lambda: write_document(self._disk, self._path, kept._asdict()))

    # -- slaves that connect ------------------------------------------------------------------------------------------

    def _accept_forever(self) -> None:
        while True:
            try:
                connection, address = self._listener.accept()
            except OSError as error:
                logger.error("cannot accept slaves, pausing reason=%s", error)
                gevent.sleep(1.0)
                continue
            self._take(connection, f"{address[0]}:{address[1]}")

    def _take(self, connection: socket.socket, address: str) -> None:
        if isinstance(self.side, MasterSide):
            self.side.feeder.serve(connection, address)
            return
        gevent.spawn(_turn_away, connection, self.broker.store.log.end)


def _turn_away(connection: socket.socket, log_end: int) -> None:
    try:
        connection.sendall(encode_control(log_end, {"no_master": "this replica is a slave itself"}))
    except OSError as error:
        logger.debug("cannot tell a slave that this is no master reason=%s", error)
    finally:
        connection.close()

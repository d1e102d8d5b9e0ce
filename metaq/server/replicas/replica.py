"""One replica of a broker: a ``Broker`` that is closed and opened anew at each change of its role.

Everything except the log and a few tables is derived from these when a store is opened. So a new master goes on where the last
master was, and a slave whose log was truncated has forgotten what was cut off. The addresses stay bound meanwhile, and clients
connect again. The store is closed and opened in a thread. Otherwise, while the disk is slow, ZooKeeper would hear nothing from
the replica just elected and another one would be elected before this one serves, again and again.

A master with a fixed role, whose log may lack messages that other replicas in sync have, starts as a slave that follows nobody:
as master it would make them all cut off what it lacks. An operator decides (docs/replication.md, suspect replicas).

``config/replica.json`` remembers the role that an operator has given to this replica and the offset up to which readers could
see. For a master with a fixed role it also remembers the in-sync set, which ZooKeeper keeps where masters are elected::

    {"crc32c":"…","role":"slave","master":"10.0.0.1:10912","readable_end":81233,"in_sync":[1,2],"epoch":4}
"""

import logging
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple

import gevent
from gevent import socket
from gevent.event import Event
from gevent.lock import BoundedSemaphore

from metaq.address import Address, parse_address
from metaq.clock import SystemClock
from metaq.config import Settings
from metaq.engine.role import Role
from metaq.engine.tables.topics import FOLDER
from metaq.errors import BadRequest, ConfigError, DiskFull, MetaqError, NotMaster, RequestTimeout
from metaq.replication.election import Election
from metaq.replication.nodes import ReplicaLog
from metaq.server.access.authentication import Authentication
from metaq.server.broker import Broker
from metaq.server.daemon import STARTED_NOT
from metaq.server.http.brokermetrics import BrokerMetrics
from metaq.server.http.http import Site
from metaq.server.lasting import Lasting
from metaq.server.opened import Opened, open_data
from metaq.server.registering.zkregistration import open_session
from metaq.server.reload import Origins
from metaq.server.replicas.masteronly import MasterOnlyHandler
from metaq.server.replicas.orders import ReplicaHandler
from metaq.server.replicas.roles import MasterRole, SlaveRole
from metaq.server.wire.listeners import Listener, reached_at, resolve
from metaq.store.files.disk import Disk, RealDisk
from metaq.store.files.documents import read_document, write_document
from metaq.store.recovery.progress import Tell, nobody

logger = logging.getLogger(__name__)

KEPT: Final = "replica.json"
KEEP_S: Final = 1.0
ELECTED: Final = "elected"
MASTER: Final = "master"
HAND_OVER_S: Final = 5.0
HAND_OVER_LOOK_S: Final = 0.005
ALONE_LOOK_S: Final = 0.5


class ReplicaState(NamedTuple):
    """The state that is remembered from one process to the next."""

    role: str
    """The role that an operator has given: ``master``, ``slave``; empty: the settings decide."""
    master: str
    """For a slave that an operator has made one: its master's ``replication_listen``; empty: the settings decide."""
    readable_end: int
    in_sync: tuple[int, ...] = ()
    """For a master that is not elected: the replicas that have everything that was acknowledged; empty when that is not
    known."""
    epoch: int = 0
    """The last epoch that it began without an election. A power cut may remove that epoch's record from the log, and its number
    must not be used twice."""


class ReplicaServer:
    """The ``Server`` of a broker that has replicas."""

    def __init__(self, settings: Settings, disk: Disk | None = None, tell: Tell = nobody) -> None:
        """Bind the addresses and open the store; ``tell`` receives the progress of that."""
        self.settings = settings
        """The settings in force, whatever the role."""
        self.origins = Origins(settings, {})
        self.lasting = Lasting()
        self._disk = disk or RealDisk()
        self._path = settings.data / FOLDER / KEPT
        self._kept = self._load()
        address = resolve("replication_listen", settings.replication_listen, settings)
        listener = Listener("replication_listen", address)
        self.address: Address = listener.address
        """The address for slaves."""
        self._listener = socket.socket(fileno=listener.socket.detach())
        self.role: MasterRole | SlaveRole
        self._election: Election | None = None
        self._due: Role | None = None
        """The role that this replica takes once its disk has room for it."""
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
        """The line that names the addresses served."""
        first, _, rest = self.broker.ready.partition(" data=")
        return f"{first} replication={self.address} role={self.role_name} data={rest}"

    @property
    def metrics(self) -> BrokerMetrics:
        """The metrics and readiness of the current broker."""
        return self.broker.metrics

    @property
    def site(self) -> Site:
        """The API of the current broker."""
        return self.broker.site

    @property
    def authentication(self) -> Authentication:
        """The users and their authentication, the same for the broker of every role."""
        return self.broker.authentication

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
        if self._election is None and self.broker.role.is_master:
            self._remember_epoch()
        if self._held_back is not None:
            logger.error("not master reason=%s", self._held_back)
        self.broker.engine.duties.every(KEEP_S, self._keep)
        self.broker.engine.duties.every(KEEP_S, self._take_due_role)
        self.role.start()
        self.broker.start()
        logger.info("serving role=%s epoch=%d", self.role_name, self.broker.epochs.current.number)

    def _remember_epoch(self) -> None:
        """Save the epoch before any slave or client is served. If the disk has no room for that, become a slave until it has.

        A power cut may take the record that begins the epoch. A slave that had copied it would then have another record under
        the same number than the log of this replica, and could not tell the two apart by their epochs.
        """
        in_sync, role = self._kept.in_sync or (self.settings.replica_number,), self.broker.role
        try:
            self._keep(in_sync=in_sync, epoch=self.broker.epochs.current.number)
        except DiskFull as error:
            seen = role.readable_end if self.settings.durability.on_replicas else self.broker.store.log.end
            slave = Role(is_master=False, readable_end=seen, shortage=str(error))
            self.broker = self._open(slave, self.broker.give_up(), self.authentication)
            self._due = role

    def stop(self) -> None:
        """Stop in order: a master answers its puts while its slaves still follow and no other replica can be elected."""
        if self._election is not None and self._between_roles.locked():
            self._election.stop()  # the others need not wait for the role that this replica is taking
        with self._between_roles:
            if isinstance(self.role, MasterRole):
                self.broker.drain("this broker stops; try again")
            if self._election is not None:
                self._election.stop()
            gevent.killall(self._greenlets)
        self._listener.close()
        try:
            self._keep()
        except MetaqError as error:  # the next start shows readers less until it has heard from the others
            logger.error("state of this replica not remembered reason=%s", error)
        self.role.stop()
        self.broker.stop()

    # -- roles --------------------------------------------------------------------------------------------------------

    def _join_group(self) -> Election:
        settings = self.settings
        return Election(
            open_session(settings, SystemClock()),
            f"{settings.cluster_name}/{settings.broker_name}",
            settings.replica_number,
            str(reached_at(self.address, self.broker.addresses.advertised)),
            log=self._log,
            elected=self._was_elected,
            deposed=lambda: self._change(Role(is_master=False)),
            moved=self._go_to,
            monotonic=SystemClock().monotonic,
        )

    def _was_elected(self, epoch: int, eligible: frozenset[int], log: ReplicaLog) -> None:
        """Become the master that was elected for a log, unless the opening finds that it lacks more than was known."""
        role = Role(is_master=True, epoch=epoch, eligible=eligible)
        if self.settings.durability.on_replicas:
            role = role._replace(yields=log.suspect is None, stood_with=log)
        self._change(role)

    def _log(self) -> ReplicaLog:
        store, durability, suspect = self.broker.store, self.settings.durability, self.suspicion
        log = store.log
        if suspect is None and log.begin == log.end:  # the log may have had messages that are lost
            suspect = "its log is empty"
        if suspect is None and store.failure is not None and durability.on_replicas and not durability.on_disk:
            suspect = f"its disk has failed: {store.failure}"  # the page cache may have lost what was reported
        return ReplicaLog(self.broker.epochs.current.number, log.end, suspect)

    @property
    def suspicion(self) -> str | None:
        """The reason why this replica may lack acknowledged messages; ``None`` at durability levels that do not rest on
        replicas."""
        return self.broker.store.suspicion.reason if self.settings.durability.on_replicas else None

    @property
    def leads(self) -> bool:
        """True for the elected master, also while its disk has no room for the begin of its epoch."""
        return self._election is not None and self._election.leading

    @property
    def _is_to_be_master(self) -> bool:
        """True when this replica is to be master by an operator's order, or else by the settings; false where masters are
        elected."""
        return self.settings.role != ELECTED and (self._kept.role or self.settings.role) == MASTER

    @property
    def _held_back(self) -> str | None:
        """The reason why this replica is not master although it is to be."""
        if self.broker.role.shortage is not None:
            return f"there is no room for the begin of its epoch; it is master when there is: {self.broker.role.shortage}"
        if not self._is_to_be_master or self.broker.role.is_master:
            return None
        in_sync = [number for number in self._kept.in_sync if number != self.settings.replica_number]
        others = f"replicas {in_sync}, which were in sync, have" if in_sync else "a replica that was in sync has"
        return (
            f"it may lack messages that were acknowledged ({self.suspicion}), and {others} them: make one of those the master, "
            f"or this one, and accept that they are lost"
        )

    def _first_role(self) -> Role:
        kept = self._kept
        if not self._is_to_be_master:
            return Role(is_master=False, readable_end=kept.readable_end)
        alone = kept.in_sync == (self.settings.replica_number,)  # no other replica has what it lacks
        yields = self.settings.durability.on_replicas and not alone
        return Role(True, kept.epoch + 1, kept.readable_end, frozenset(kept.in_sync), yields)

    def _open(self, role: Role, bound: Any, authentication: Authentication | None, tell: Tell = nobody) -> Broker:
        settings = self._with_address(self.settings)
        opened = open_data(settings, disk=self._disk, role=role, bound=bound, authentication=authentication, tell=tell)
        taken = self._make_role(opened, role.epoch)
        broker = Broker(opened, taken.parts, owner=self)
        taken.attach(broker)
        self._due = None if opened.role.shortage is None else role
        if isinstance(taken, MasterRole):
            broker.run(broker.store.suspicion.clear)  # what it lacks is lost: from now on the others copy this log
            if self._election is not None:
                broker.store.fence.guard(partial(self._election.check, role.epoch))
        else:
            broker.add_family(MasterOnlyHandler())
        self.role = taken
        broker.add_family(ReplicaHandler(self, broker.later))
        return broker

    def _make_role(self, opened: Opened, epoch: int) -> MasterRole | SlaveRole:
        if not opened.role.is_master:
            return SlaveRole(opened, self.settings, self._find_master, self._reopen)
        agree = self._agree if self._election is None else partial(self._election.agree, epoch)
        return MasterRole(opened, self.settings, agree)

    def _find_master(self) -> Address | None:
        if self._election is not None:
            return self._election.master_address
        if self._held_back is not None:
            raise NotMaster(self._held_back)
        where = self._kept.master or self.settings.master
        return parse_address(where, setting="master") if where else self.broker.registration.find_master()

    def _go_to(self, master: Address) -> None:
        if isinstance(self.role, SlaveRole):
            self.role.follower.go_to(master)

    def _reopen(self) -> None:
        """Open the broker anew, since the slave's log is to be replaced.

        A change of role may be wanted already. An operator's is kept, unless the log may lose acknowledged messages now.
        """
        if self._election is not None:
            self._election.give_up()  # it may have been elected for the log that is replaced
        elif self._wanted is not None and self.broker.store.suspicion.reason is None:
            return
        self._change(Role(is_master=False))

    def _take_due_role(self) -> None:
        """Become the master that a full disk has kept this replica from being, once there is room."""
        if self._due is not None and self.broker.store.shortage is None:
            self._change(self._due)

    def _change(self, role: Role) -> None:
        self._wanted, self._due = role, None
        self._changing.set()

    def configure(self, settings: Settings) -> None:
        """Take over the settings that can change in a running broker.

        Raise ``MetaqError`` when one is wrong; nothing has changed then.
        """
        self.broker.configure(self._with_address(settings))
        self.settings = settings

    def _with_address(self, settings: Settings) -> Settings:
        """Return the settings with the actual port of ``replication_listen``."""
        return replace(settings, replication_listen=str(self.address))

    def _change_forever(self) -> None:
        while True:
            self._changing.wait()
            self._changing.clear()
            role, self._wanted = self._wanted, None
            if role is not None:
                try:
                    with self._between_roles:
                        self._change_now(role._replace(readable_end=self.role.readable_end))
                except MetaqError as error:  # the old broker is closed, and nothing else would open a new one
                    logger.critical("role not changed, this process ends reason=%s", error)
                    raise SystemExit(STARTED_NOT) from error

    def _change_now(self, role: Role) -> None:
        """Close the broker, and open it in its new role."""
        logger.info("role changes from=%s to=%s", self.role_name, "master" if role.is_master else "slave")
        self.broker.engine.turns.abandon(self.broker.store.fence.close("the role of this replica changes; try again"))
        self.role.stop()
        self._kept = self._kept._replace(readable_end=role.readable_end)
        bound = self.broker.give_up()
        self.broker = self._open(role, bound, self.authentication)
        self.broker.configure(self._with_address(self.settings))  # the settings may have changed while it opened
        taken = self.broker.role
        yielded = role.is_master and not taken.is_master and taken.shortage is None  # its log has turned out to be suspect
        if self._election is not None and yielded and self._wanted is None:  # else it may have been elected anew meanwhile
            self._election.give_up()
        self._start_broker()

    def promote(self, *, accept_loss: bool) -> None:
        """Become master, by an operator's order.

        Raise ``BadRequest`` when acknowledged messages may be lost by that, unless the operator accepts it, and where masters
        are elected while another replica is master.
        """
        if self.broker.role.is_master:
            raise BadRequest("this replica is already the master")
        if self._election is not None:
            self._election.take_over(accept_loss=accept_loss)
            return
        if self.suspicion is not None and not accept_loss:
            raise BadRequest(
                f"this replica may lack messages that were acknowledged: {self.suspicion}. Better: a replica that was in sync "
                f"and is not suspect. This one becomes master only if you accept the loss"
            )
        # which ones are in sync is not known until it serves: others may have what the opening finds to be missing
        self._keep(role=MASTER, master="", in_sync=(self.settings.replica_number,) if accept_loss else ())
        yields = self.settings.durability.on_replicas and not accept_loss
        self._change(Role(is_master=True, epoch=self._kept.epoch + 1, yields=yields))

    def demote(self, master: str) -> None:
        """Become the slave of the master at an address, by an operator's order.

        Raise ``BadRequest`` where masters are elected, or for a bad address.
        """
        if self._election is not None:
            raise BadRequest("the master is elected through ZooKeeper; hand over instead")
        try:
            parse_address(master, setting="master")
        except ConfigError as error:
            raise BadRequest(str(error)) from error
        self._keep(role="slave", master=master, in_sync=())
        self._change(Role(is_master=False))

    def hand_over(self, replica: int) -> None:
        """Make another replica in sync the master, by an operator's order.

        This replica first takes no more puts. It waits until the other one has all of them and none waits for a third replica.
        One that was elected while its disk is full has written nothing since, and hands over at once. Raise ``BadRequest``
        when it is not an elected master, ``RequestTimeout`` when the others do not catch up in ``HAND_OVER_S``.
        """
        if self._election is not None and isinstance(self.role, MasterRole):
            self._let_catch_up(self._election, self.role, replica)
        elif self._election is not None and self.leads and self._due is not None:
            self._election.hand_over(replica)
        else:
            raise BadRequest("only a master that was elected through ZooKeeper can hand over")
        self._change(Role(is_master=False))

    def _let_catch_up(self, election: Election, role: MasterRole, replica: int) -> None:
        """Take no more puts, and hand over once another replica has all of them and none waits for a third one."""
        turns, store = self.broker.engine.turns, self.broker.store
        with store.fence.closing(f"this master hands over to replica {replica}; try again"):
            with gevent.Timeout(
                HAND_OVER_S, RequestTimeout(f"replica {replica} or others in sync did not catch up within {HAND_OVER_S:.0f} s")
            ):
                while not (turns.nothing_parked() and store.settled and role.has_all(replica)):
                    gevent.sleep(HAND_OVER_LOOK_S)
            election.hand_over(replica)

    def _step_down_when_alone(self, election: Election) -> None:
        """Hand over to another replica when too few slaves have reported to this master for a session timeout.

        Nothing can be acknowledged meanwhile, so the replicas that may become master lack nothing.
        """
        most_s = self.settings.zookeeper_session_ms / 1000
        alone = False
        while True:
            gevent.sleep(ALONE_LOOK_S)
            was_alone, role = alone, self.role
            alone = isinstance(role, MasterRole) and role.in_sync.unheard_s > most_s
            if alone and was_alone:  # look twice: if this process stood still, reports are waiting to be read
                try:
                    self._step_down(election)
                except MetaqError as error:
                    logger.info("master does not step down reason=%s", error)

    def _step_down(self, election: Election) -> None:
        successor = election.successor(self.settings.min_in_sync)
        if successor is not None:
            with self.broker.store.fence.closing("too few replicas follow this master, another one takes over; try again"):
                election.hand_over(successor)
            logger.warning("master steps down reason=too few slaves report successor=%d", successor)
            self._change(Role(is_master=False))

    # -- remembering --------------------------------------------------------------------------------------------------

    def _load(self) -> ReplicaState:
        content, problems = read_document(self._disk, self._path)
        for problem in problems:
            logger.error("what this replica was is not known, the settings say it problem=%s", problem)
        if content is None:
            return ReplicaState("", "", 0)
        in_sync = tuple(content.get("in_sync", ()))
        return ReplicaState(content["role"], content["master"], content["readable_end"], in_sync, content.get("epoch", 0))

    def _agree(self, in_sync: frozenset[int]) -> bool:
        """Save the set of replicas from which the next master may be chosen. Used where masters are not elected."""
        self._keep(in_sync=tuple(sorted(in_sync)))
        return True

    def _keep(self, **changes: Any) -> None:
        with self._keeping:  # an order may come while the periodic call waits for the disk
            kept = self._kept._replace(readable_end=self.role.readable_end, **changes)
            if kept != self._kept:
                self.broker.run(lambda: self._disk.make_directories(self._path.parent))
                self.broker.run(lambda: write_document(self._disk, self._path, kept._asdict()))
                self._kept = kept

    # -- slaves that connect ------------------------------------------------------------------------------------------

    def _accept_forever(self) -> None:
        while True:
            try:
                connection, address = self._listener.accept()
            except OSError as error:
                logger.error("cannot accept slaves, pausing reason=%s", error)
                gevent.sleep(1.0)
                continue
            self._take(connection, Address(*address[:2]))

    def _take(self, connection: socket.socket, address: Address) -> None:
        if isinstance(self.role, MasterRole):
            self.role.feeder.serve(connection, address)
        else:
            self.role.away.serve(connection, self.broker.store.log.end)

"""The composition root: builds a broker from its settings, starts it, and stops it in reverse order."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, Self

import gevent
from gevent.hub import get_hub

from metaq.clock import Clock
from metaq.config import Settings
from metaq.engine.checkback import CheckBack
from metaq.engine.context import Context
from metaq.engine.duties import Duties
from metaq.engine.figures.counters import Counters
from metaq.engine.figures.statistics import SAMPLE_S, Statistics
from metaq.engine.halfmessages import HalfMessages
from metaq.engine.hold import Holds
from metaq.engine.leases.draining import Drain
from metaq.engine.leases.keeping import KEEP_S, LeaseKeeper
from metaq.engine.leases.leasing import Leasing
from metaq.engine.locklog import LockLog
from metaq.engine.offsets.offsetexport import OffsetExporter
from metaq.engine.offsets.offsethistory import OffsetHistory
from metaq.engine.offsets.offsetlog import APPEND_S, OffsetLog
from metaq.engine.parts import retention_rules, room
from metaq.engine.pool import run_sync
from metaq.engine.registry import Registry
from metaq.engine.role import NO_PARTS, RoleParts
from metaq.engine.schedule import SAVE_S, Schedule
from metaq.engine.tables.clients import Clients
from metaq.engine.tables.loading import LoadedTables, load_tables
from metaq.engine.tables.observed import Observed
from metaq.engine.tables.offsets import OffsetTable
from metaq.engine.tables.topics import FOLDER, TopicTable
from metaq.engine.timers.figures import figures as timer_figures
from metaq.engine.timers.timing import Timing
from metaq.engine.turn import Turns
from metaq.errors import MetaqError
from metaq.protocol.record import host_bytes
from metaq.protocol.remoting.codes import Request
from metaq.protocol.text.commands import Auth, Transaction
from metaq.registry.kvconfig import KvConfig
from metaq.server.access.authentication import LOOK_S, Authentication
from metaq.server.endpoint import CommandHandler
from metaq.server.http.brokermetrics import BrokerMetrics
from metaq.server.http.sampler import Sampler
from metaq.server.lasting import Lasting
from metaq.server.opened import Opened, open_data
from metaq.server.registering.clusterroutes import ClusterRoutes
from metaq.server.registering.registration import Registration
from metaq.server.reload import Origins, Owner
from metaq.server.remoting.admin.brokerinfo import BrokerInfoHandler
from metaq.server.remoting.admin.clients import ClientAdminHandler
from metaq.server.remoting.admin.delays import DelayHandler
from metaq.server.remoting.admin.groups import GroupAdminHandler
from metaq.server.remoting.admin.leases import LeaseAdminHandler
from metaq.server.remoting.admin.offsetexport import OffsetExportHandler
from metaq.server.remoting.admin.offsets import OffsetAdminHandler
from metaq.server.remoting.admin.timers import TimerAdminHandler
from metaq.server.remoting.admin.topics import TopicsHandler
from metaq.server.remoting.admin.transactions import Tables, TransactionAdminHandler
from metaq.server.remoting.consuming.acks import AckHandler
from metaq.server.remoting.consuming.assignment import AssignmentHandler
from metaq.server.remoting.consuming.bulk import BulkHandler
from metaq.server.remoting.consuming.consumer import ConsumerHandler
from metaq.server.remoting.consuming.heartbeat import HeartbeatHandler
from metaq.server.remoting.consuming.pop import PopHandler
from metaq.server.remoting.consuming.pull import PullHandler
from metaq.server.remoting.consuming.query import QueryHandler
from metaq.server.remoting.consuming.sendback import SendBackHandler
from metaq.server.remoting.identity import IdentityHandler
from metaq.server.remoting.later import Later
from metaq.server.remoting.registry import RegistryHandler
from metaq.server.remoting.sending.half import HalfHandler
from metaq.server.remoting.sending.partitions import Partitions
from metaq.server.remoting.sending.recall import RecallHandler
from metaq.server.remoting.sending.reply import ReplyHandler
from metaq.server.remoting.sending.send import SendHandler
from metaq.server.remoting.session import Family
from metaq.server.services.call import Interior
from metaq.server.sites import BrokerSite
from metaq.server.text.admin import AdminHandler
from metaq.server.text.get import GetHandler
from metaq.server.text.later import LaterHandler
from metaq.server.text.leases import LeaseHandler
from metaq.server.text.login import log_in
from metaq.server.text.push import PushHandler
from metaq.server.text.put import PutHandler
from metaq.server.text.transaction import TransactionHandler
from metaq.server.wire.listeners import Listener
from metaq.server.wire.reads import StoreReads
from metaq.store.copies.applying import hide_from
from metaq.store.files.disk import Disk
from metaq.store.files.filecache import Read, through_cache
from metaq.store.queues.consumequeue import ConsumeQueue
from metaq.store.recovery.progress import Tell, nobody
from metaq.tx.halves import Halves
from metaq.tx.journal import Held
from metaq.tx.local import LocalBranches
from metaq.tx.manager import Transactions

if TYPE_CHECKING:
    from metaq.server.registering.zkregistration import InZooKeeper

logger = logging.getLogger(__name__)

IDLE_SCAN_S: Final = 5.0
EXPIRE_TRANSACTIONS_S: Final = 0.5
LEAVE_S: Final = 0.15
"""Before a broker that changes its role closes its connections, it refuses requests for this long, so that clients turn to
another broker: a request that arrives at a closed connection gets no answer."""
GIVE_UP_S: Final = 0.5
"""Seconds to wait afterwards for clients to read their answers."""


class Broker:
    """One broker: a store, its addresses and sessions, the handlers, and the duties that maintain the store."""

    def __init__(self, opened: Opened, parts: RoleParts = NO_PARTS, owner: Owner | None = None) -> None:
        """Build on an opened store; nothing is served before ``start``.

        ``owner`` holds the settings in force across roles, and takes those that administrators change.
        """
        self.settings = settings = opened.settings
        self.store, self.recovery, self.addresses = opened.store, opened.recovery, opened.addresses
        self.role, self.epochs, self.peers, self.run = opened.role, opened.epochs, opened.peers, opened.run
        self._endpoint, self._parts, self._owner, self._hub = opened.endpoint, parts, owner or self, get_hub()
        self.lasting = Lasting() if owner is None else owner.lasting
        store_host = host_bytes(*self.addresses.advertised)
        tables = load_tables(settings, self.store, is_master=self.role.is_master, goes_on=opened.goes_on, run=self.run)
        self.context = self._make_context(tables, store_host)
        topics = self.context.topics
        self.holds = Holds()
        self.turns = Turns(self.store, settings, self._hub, run_sync, self._wake, parts)
        self._offsets = OffsetLog(self.context, self.turns, self.run)
        self._locks = LockLog(self.context, self.turns)
        self._duties = Duties(self.context, self.turns, self.run, parts.saved)
        self.leasing = Leasing.open(self.context, self.turns, self._hub.loop.timer)
        self._lease_keeper = LeaseKeeper(self.leasing.leases, self.leasing.poison, self._duties.rest, self.run)
        self._reads = StoreReads(settings, self.run)
        self._room = room(settings)
        self.transactions = Transactions(self.store, self._room, store_host, settings.data / FOLDER)
        self.halves = Halves(self.store, settings.data / FOLDER, settings.check_after_ms)
        self._identity = IdentityHandler(settings.broker_name)
        self._registry = self._embed_registry() if self.addresses.registry is not None else None
        self.registration = self._make_registration()
        self._zookeeper = self._enter_zookeeper(topics) if settings.zookeeper else None
        in_zookeeper = None if self._zookeeper is None else self._zookeeper.group_offsets
        self._export = OffsetExporter(self.context, self.leasing.figures.of, in_zookeeper, self.run)
        self._history = OffsetHistory(self.context, self._export, self.turns, self._duties.ending, self.run)
        topics.changed = self._topic_changed
        self._schedule = Schedule(self.context, self.turns, self.holds, self._hub.loop, self.run)
        self.later = Later(self._reads)
        self._timing = Timing.open(self.context, self.turns, self.run)
        self.timers, self.dedupe = self._timing.timers, self._timing.dedupe
        self._local: LocalBranches[Held] = LocalBranches(self._room)
        undecided = Tables(self.transactions, self._local, self._room, self.halves)
        self._operators = TransactionAdminHandler(self.context, self.turns, self.later, undecided, self.run)
        self._answer_text()
        self._answer_remoting()
        self.metrics = self._make_metrics()
        self.origins = Origins(settings, {})
        reads, reasons, cancels = through_cache(self.run), self.metrics.reasons, self._timing.cancels
        shown = self.context, self._endpoint, self.holds, self.turns, self._sends.sends, reads, reasons, cancels
        more = lambda: self._owner.origins, self._pushes, self.registration, self.lasting, self.leasing.figures
        self.site = BrokerSite(Interior(*shown, *more))
        self._take_role()
        self.context.statistics.begin()

    @classmethod
    def alone(cls, settings: Settings, clock: Clock | None = None, disk: Disk | None = None, *, tell: Tell = nobody) -> Self:
        """Bind the addresses and open the store of a broker without replicas; ``tell`` receives the progress of that."""
        return cls(open_data(settings, clock, disk, tell=tell))

    @property
    def authentication(self) -> Authentication:
        """The users and their authentication."""
        return self._endpoint.authentication

    def _make_context(self, tables: LoadedTables, store_host: bytes) -> Context:
        store, counters = self.store, Counters()
        host, port = self.addresses.text
        return Context(
            settings=self.settings,
            store=store,
            topics=tables.topics,
            host=host,
            port=port,
            store_host=store_host,
            groups=tables.groups,
            modes=tables.modes,
            offsets=OffsetTable(),
            clients=Clients(tables.groups, store.clock.monotonic, self._hub.loop.run_callback),
            statistics=Statistics(store.queues, store.clock, counters),
            counters=counters,
            epochs=self.epochs,
            observed=Observed(store.clock.monotonic),
            replicas=self._parts.replicas,
        )

    def _wake(self, queues: list[ConsumeQueue]) -> None:
        """Wake the consumers that wait for messages of queues in which readers can see more."""
        self.holds.wake(queues)
        self.leasing.lines.wake(queues)

    def _take_role(self) -> None:
        """Set up the role. A slave takes no messages from clients, and writes only what comes from the master."""
        if not self.role.is_master:
            self.store.fence.close("this replica is a slave, which only gives messages; send them to its master")
        if self.store.settings.durability.on_replicas:
            hide_from(self.store, self.role.readable_end)

    def configure(self, settings: Settings) -> None:
        """Take over the settings that can change in a running broker, and read the users again.

        Raise ``ConfigError`` when a topic of the settings cannot be made; nothing has changed then.
        """
        context, topics, groups = self.context, self.context.topics, self.context.groups
        other_topics = settings.topics != self.settings.topics  # if not, administrators' changes to topics stay
        if other_topics:
            topics.check_settings(settings.topics, settings.max_topics)
        topics.max_topics, groups.max_groups = settings.max_topics, settings.max_groups
        groups.auto_create = settings.auto_create_groups
        if self.role.is_master:  # a slave has the topics of its master
            topics.add_system_topics(settings.cluster_name, settings.broker_name, auto_create=settings.auto_create_topics)
            if other_topics:
                topics.configure(settings.topics)
        topics.restrict(settings.broker_permission)
        self.settings = context.settings = settings
        self.store.settings = replace(self.store.settings, retention=retention_rules(settings))
        self._room.take_limits(room(settings))
        self.halves.check_after_ms = settings.check_after_ms
        for part in (self._endpoint, self.turns, self._reads, self._sends):
            part.configure(settings)
        self.authentication.reload()

    def add_family(self, family: Family) -> None:
        """Add handlers of more requests. Call it before ``start``."""
        self._endpoint.answer(family.requests())

    def every(self, pause_s: float, duty: Callable[[], None]) -> None:
        """Repeat a duty, with pauses, until the broker stops."""
        self._duties.every(pause_s, duty)

    def _embed_registry(self) -> Registry:
        keys = KvConfig(self.store.disk, self.settings.data / FOLDER)
        return Registry(self.settings, keys, self.store.clock)

    def _make_registration(self) -> Registration:
        return Registration(
            settings=self.settings,
            role=self.role,
            advertised=self.addresses.advertised,
            topics=self.context.topics,
            identity=self._identity.identity,
            clock=self.store.clock,
            registry=self._registry,
            peers=self.peers,
            check=self.store.fence.check,
        )

    def _enter_zookeeper(self, topics: TopicTable) -> "InZooKeeper":
        from metaq.server.registering.zkregistration import InZooKeeper  # noqa: PLC0415 - kazoo is needed with ZooKeeper only

        clock, is_master = self.store.clock, self.role.is_master
        return InZooKeeper(self.settings, self.addresses, topics, self._registry, clock, self.peers, is_master=is_master)

    def _topic_changed(self, name: str) -> None:
        """Publish that a topic was made, changed or removed, and save it."""
        self._duties.topic_changed()
        self.registration.topic_changed(name)
        self.dedupe.topic_changed(name)
        if self._zookeeper is not None:
            self._zookeeper.topic_changed(name)

    def _make_metrics(self) -> BrokerMetrics:
        return BrokerMetrics(
            context=self.context,
            endpoint=self._endpoint,
            turns=self.turns,
            holds=self.holds,
            reads=self._reads,
            positions=self._schedule.positions,
            transactions=self._operators.numbers,
            timers=self.timers,
            dedupe=self.dedupe,
            leases=self.leasing.figures,
            export=self._export,
            registered=self._why_unknown,
            registry=self._registry,
            run=self.run,
            history=self.lasting.history,
        )

    def _figures(self, read: Read) -> Mapping[str, object]:
        """Return figures of transactions, timers, leases and ids for stats: values by name."""
        figures = self.leasing.figures
        return {**self._operators.numbers(read), **timer_figures(self.timers), **figures.numbers(), **self.dedupe.numbers()}

    def _why_unknown(self) -> str | None:
        """Return why clients cannot find this broker, or ``None`` when they can."""
        return self.registration.problem or (None if self._zookeeper is None else self._zookeeper.problem)

    def _forget_topic(self, name: str) -> None:
        """Drop what is kept about a deleted topic: counters, offsets, request modes, statistics."""
        self.context.counters.topics.pop(name, None)
        self.context.offsets.remove_topic(name)
        self.context.modes.forget(topic=name)
        self.leasing.pops.forget(topic=name)
        self.context.statistics.forget(topic=name)

    def _answer_text(self) -> None:
        """Set the handlers of the text protocol's commands."""
        gets = GetHandler(self.context, self.holds, self._reads, self._hub.loop)
        admin = AdminHandler(self.context, self._endpoint, self._duties.save_topics, self._figures)
        puts = PutHandler(self.context, self.turns)
        later = LaterHandler(self.context, puts, self.timers, self._timing.cancels, self.dedupe)
        leases = LeaseHandler(self.context, self.leasing, self._reads)
        self._branches = TransactionHandler(
            self.context, self.turns, self._reads, puts, self.transactions, self._local, self.run
        )
        self._pushes = PushHandler(leases)
        commands: dict[type, CommandHandler] = {
            Auth: partial(log_in, self.authentication),
            Transaction: self._branches.transaction,
        }
        for family in (gets, admin, later, leases, self._pushes):
            commands.update(family.commands())
        self._endpoint.answer_text(commands, puts.puts, self._branches.puts)

    def _answer_remoting(self) -> None:
        """Set the handlers of the remoting protocol's requests."""
        half_messages = HalfMessages(self.context, self.turns, self.halves, self.dedupe)
        decisions = HalfHandler(half_messages, self._reads)
        self._check_back = CheckBack(half_messages, self._duties.rest, self._duties.ending, self.run)
        partitions = Partitions(self.context, self.turns)
        self._sends = SendHandler(self.context, self.turns, half_messages, self.timers, self.dedupe, partitions)
        pulls = PullHandler(self.context, self.holds, self._reads, self._hub.loop)
        later = self.later
        pops = PopHandler(self.context, self.leasing, self._reads, later)
        acks = AckHandler(self.context, self.leasing, self._reads)
        self._endpoint.answer_runs({**self._sends.runs(), Request.ACK_MESSAGE: acks.acks})
        sent_back = SendBackHandler(self.context, self.turns, self._reads)
        consumers = ConsumerHandler(self.context, later, self._locks, self._offsets)
        families: list[Family] = [self._sends, decisions, pulls, sent_back, DelayHandler(self._schedule), self._identity]
        families += [pops, acks, HeartbeatHandler(self.context, self.leasing.lines), *self._administration(later)]
        families.append(TimerAdminHandler(self.context, self._timing, later, self.run))
        families.append(RecallHandler(self._timing.cancels, later, self.settings.broker_name))
        replies = ReplyHandler(self.context, self.turns, partitions)
        families += [consumers, replies, QueryHandler(self.context, later), BulkHandler(self.context, self._reads)]
        routes = ClusterRoutes(self.registration, self.store.clock.monotonic)
        drain = Drain(self.context, self.leasing.leases, self.leasing.moves, self.run)
        families.append(AssignmentHandler(self.context, self._duties, drain, later, routes))
        if self._registry is not None:
            families.append(RegistryHandler(self.settings, self._registry, self.run))
        for family in families:
            self.add_family(family)

    def _administration(self, later: Later) -> list[Family]:
        """Return the handlers of administrators' requests."""
        context, advertised, clocks, owner = self.context, self.addresses.advertised, self.leasing.clocks, self._owner
        return [
            TopicsHandler(context, self._duties, later, self._forget_topic, self.registration.wait_told),
            GroupAdminHandler(context, self._duties, later, lambda name: self.leasing.pops.forget(group=name)),
            OffsetAdminHandler(context, self.leasing.figures, later, advertised, self.run),
            OffsetExportHandler(context, later, self._export),
            LeaseAdminHandler(context, self.leasing, later),
            ClientAdminHandler(context, later, self.run),
            BrokerInfoHandler(context, self.turns, self._schedule.positions, self._figures, clocks, later, advertised, owner),
            self._operators,
        ]

    # -- life ---------------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> str:
        """The line that names the addresses served."""
        addresses = self.addresses
        named = {"listen": addresses.text, "remoting": addresses.remoting, "registry": addresses.registry}
        where = " ".join(f"{name}={address[0]}:{address[1]}" for name, address in named.items() if address is not None)
        return f"metaq ready {where} data={self.settings.data}"

    def start(self) -> None:
        """Accept connections, start the duties, and register the broker."""
        recovery = self.recovery
        walked = recovery.ending, recovery.walked_from, recovery.end, recovery.records, len(recovery.gaps)
        logger.info("recovered ending=%s walked_from=%d end=%d records=%d gaps=%d", *walked)
        self._endpoint.start()
        keeper = self._parts.keeper
        keepers = (self._branches, self._check_back, self.epochs, self._timing.keeper, self._lease_keeper)
        self._duties.start(keepers if keeper is None else (keeper,))
        for index in (self.timers, self.dedupe):
            index.start()
            self._duties.every(self.settings.sweep_interval_ms / 1000, index.apply)
            self._duties.every(self.settings.checkpoint_interval_ms / 1000, index.flush)
        self._duties.every(IDLE_SCAN_S, self._endpoint.close_idle)
        self._duties.every(LOOK_S, self.authentication.reload_if_changed)
        self._duties.every(SAMPLE_S, Sampler(self.metrics, self._duties.rest).sample)
        self._duties.every(self.settings.client_scan_ms / 1000, self._look_for_silent_clients)
        if self.role.is_master:
            self._start_writing()
        if self._registry is not None:
            self._duties.every(self.settings.registry_scan_ms / 1000, self._registry.scan)
        self.registration.start()
        if self._zookeeper is not None:
            self._zookeeper.start()

    def _start_writing(self) -> None:
        """Start the duties that only a master has: they append records to the log and save its tables."""
        self._schedule.start()
        self._timing.delivery.start()
        self._duties.every(SAVE_S, self._schedule.save)
        self._duties.every(APPEND_S, self._offsets.append)
        self._duties.every(self.settings.offset_snapshot_interval_ms / 1000, self._offsets.save)
        self._duties.every(KEEP_S, self._lease_keeper.tend)
        self._duties.every(EXPIRE_TRANSACTIONS_S, self._branches.expire)
        self._duties.every(SAVE_S, self._save_transactions)
        self._duties.every(self._check_back.pause_s, self._check_back.check)
        if self.settings.offset_export_interval_ms:
            self._duties.every(self.settings.offset_export_interval_ms / 1000, self._history.record)

    def _save_transactions(self) -> None:
        self.transactions.snapshots.save(self.run)
        self.halves.save(self.run)

    def _look_for_silent_clients(self) -> None:
        self.context.clients.expire(self.store.clock.monotonic() - self.settings.client_expiry_ms / 1000)
        self._locks.expire()

    def stop(self) -> None:
        """Take no more commands, send every answer that is due, then close the store in order."""
        self._withdraw()
        self._endpoint.close()
        self._end(self.settings.drain_timeout_ms / 1000, durably=True)

    def give_up(self) -> Mapping[str, Listener]:
        """Stop, and return the listeners, still bound, for the next broker, which has another role."""
        self._withdraw()
        bound = self._endpoint.release()
        gevent.sleep(LEAVE_S)
        self._end(GIVE_UP_S, durably=self.role.is_master)  # a slave skips the final sync: puts wait for its promotion
        return bound

    def _withdraw(self) -> None:
        """Take this broker out of the registries, so that clients turn to others."""
        self.metrics.leaves = True
        self.site.stop()
        if self._zookeeper is not None:
            self._zookeeper.stop()
        self.registration.stop()

    def _end(self, deadline: float, *, durably: bool) -> None:
        sessions = self._endpoint.sessions
        self.holds.stop()
        self._duties.pause()
        self._schedule.stop()
        self._timing.stop()
        self.dedupe.stop()
        self.holds.wake_all()
        self.leasing.lines.stop()
        for session in list(sessions):
            session.wind_up()
        self._wait_until(self.turns.nothing_parked, deadline)
        self._wait_until(lambda: not sessions, deadline)
        for session in list(sessions):
            session.close()
        if not self._duties.stop(self.settings.drain_timeout_ms / 1000):
            # a thread still waits for the disk: the next start recovers, as after a kill
            logger.error("stopped without closing the store reason=the disk did not answer within drain_timeout_ms")
            return
        try:
            if self.role.is_master:
                self._save_last()
            self.timers.close()
            self.dedupe.close()
            self.run(lambda: self.store.close(durably=durably))
        except MetaqError as error:
            logger.error("stopped without closing the store reason=%s", error)
            self.store.release()

    def _save_last(self) -> None:
        self._duties.save_topics()
        self._duties.save_groups()
        self._duties.save_modes()
        self._offsets.save_last()
        self._schedule.save_last()
        self.transactions.snapshots.save_last(self.run)
        self.halves.save_last(self.run)

    def _wait_until(self, done: Callable[[], bool], deadline_s: float) -> None:
        deadline = self.store.clock.monotonic() + deadline_s
        while not done() and self.store.clock.monotonic() < deadline:
            gevent.sleep(0.005)

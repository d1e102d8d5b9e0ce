"""The composition root: builds a broker from its settings, starts it, and stops it in reverse order."""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Final, Self

import gevent
from gevent.hub import get_hub

from metaq.clock import Clock
from metaq.config import Settings
from metaq.engine.engine import Engine
from metaq.engine.figures.statistics import SAMPLE_S
from metaq.engine.offsets.offsetexport import OffsetExporter
from metaq.engine.offsets.offsethistory import OffsetHistory
from metaq.engine.registry import Registry
from metaq.engine.role import NO_PARTS, RoleParts
from metaq.engine.tables.topics import FOLDER, TopicTable
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
from metaq.store.files.disk import Disk
from metaq.store.files.filecache import Read, through_cache
from metaq.store.recovery.progress import Tell, nobody

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
    """One broker: its engine, its addresses and sessions, and the handlers between them."""

    def __init__(self, opened: Opened, parts: RoleParts = NO_PARTS, owner: Owner | None = None) -> None:
        """Build on an opened store; nothing is served before ``start``.

        ``owner`` holds the settings in force across roles, and takes those that administrators change.
        """
        self.settings = settings = opened.settings
        self.store, self.recovery, self.addresses = opened.store, opened.recovery, opened.addresses
        self.role, self.epochs, self.peers, self.run = opened.role, opened.epochs, opened.peers, opened.run
        self._endpoint, self._owner, self._hub = opened.endpoint, owner or self, get_hub()
        self.lasting = Lasting() if owner is None else owner.lasting
        self.engine = engine = Engine(
            settings,
            self.store,
            self.role,
            self.epochs,
            parts,
            self.run,
            address=self.addresses.text,
            advertised=self.addresses.advertised,
            goes_on=opened.goes_on,
        )
        context, topics = engine.context, engine.context.topics
        self._reads = StoreReads(settings, self.run)
        self._identity = IdentityHandler(settings.broker_name)
        self._registry = self._embed_registry() if self.addresses.registry is not None else None
        self.registration = self._make_registration()
        self._zookeeper = self._enter_zookeeper(topics) if settings.zookeeper else None
        in_zookeeper = None if self._zookeeper is None else self._zookeeper.group_offsets
        self._export = OffsetExporter(context, engine.leasing.figures.of, in_zookeeper, self.run)
        self._history = OffsetHistory(context, self._export, engine.turns, engine.duties.ending, self.run)
        topics.changed = self._topic_changed
        self.later = Later(self._reads)
        undecided = Tables(engine.transactions, engine.local_branches, engine.room, engine.halves)
        self._operators = TransactionAdminHandler(context, engine.turns, self.later, undecided, self.run)
        self._answer_text()
        self._answer_remoting()
        self.metrics = self._make_metrics()
        self.origins = Origins(settings, {})
        self.site = BrokerSite(self._make_interior())
        context.statistics.begin()

    @classmethod
    def alone(cls, settings: Settings, clock: Clock | None = None, disk: Disk | None = None, *, tell: Tell = nobody) -> Self:
        """Bind the addresses and open the store of a broker without replicas; ``tell`` receives the progress of that."""
        return cls(open_data(settings, clock, disk, tell=tell))

    @property
    def authentication(self) -> Authentication:
        """The users and their authentication."""
        return self._endpoint.authentication

    def configure(self, settings: Settings) -> None:
        """Take over the settings that can change in a running broker, and read the users again.

        Raise ``ConfigError`` when a topic of the settings cannot be made; nothing has changed then.
        """
        self.engine.configure(settings)
        self.settings = settings
        for part in (self._endpoint, self._reads, self._sends):
            part.configure(settings)
        self.authentication.reload()

    def add_family(self, family: Family) -> None:
        """Add handlers of more requests. Call it before ``start``."""
        self._endpoint.answer(family.requests())

    def _embed_registry(self) -> Registry:
        keys = KvConfig(self.store.disk, self.settings.data / FOLDER)
        return Registry(self.settings, keys, self.store.clock)

    def _make_registration(self) -> Registration:
        return Registration(
            settings=self.settings,
            role=self.role,
            advertised=self.addresses.advertised,
            topics=self.engine.context.topics,
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
        """Publish that a topic was made, changed or removed, save it, and deal its partitions to those who own them."""
        self.engine.topic_changed(name)
        self._pushes.topic_changed(name)
        self.registration.topic_changed(name)
        if self._zookeeper is not None:
            self._zookeeper.topic_changed(name)

    def _make_metrics(self) -> BrokerMetrics:
        engine = self.engine
        return BrokerMetrics(
            context=engine.context,
            endpoint=self._endpoint,
            turns=engine.turns,
            holds=engine.holds,
            reads=self._reads,
            positions=engine.schedule.positions,
            transactions=self._operators.numbers,
            timers=engine.timers,
            dedupe=engine.dedupe,
            leases=engine.leasing.figures,
            export=self._export,
            registered=self._why_unknown,
            registry=self._registry,
            run=self.run,
            history=self.lasting.history,
        )

    def _make_interior(self) -> Interior:
        engine = self.engine
        return Interior(
            context=engine.context,
            endpoint=self._endpoint,
            holds=engine.holds,
            turns=engine.turns,
            sends=self._sends.sends,
            read=through_cache(self.run),
            reasons=self.metrics.reasons,
            cancels=engine.timing.cancels,
            origins=lambda: self._owner.origins,
            pushes=self._pushes,
            registration=self.registration,
            lasting=self.lasting,
            leases=engine.leasing.figures,
        )

    def _figures(self, read: Read) -> Mapping[str, object]:
        """Return figures of transactions, timers, leases and ids for stats: values by name."""
        return {**self._operators.numbers(read), **self.engine.numbers()}

    def _why_unknown(self) -> str | None:
        """Return why clients cannot find this broker, or ``None`` when they can."""
        return self.registration.problem or (None if self._zookeeper is None else self._zookeeper.problem)

    def _answer_text(self) -> None:
        """Set the handlers of the text protocol's commands."""
        engine, context, reads = self.engine, self.engine.context, self._reads
        gets = GetHandler(context, engine.holds, reads, self._hub.loop)
        admin = AdminHandler(context, self._endpoint, engine.duties.save_topics, self._figures)
        puts = PutHandler(context, engine.turns)
        later = LaterHandler(context, puts, engine.timers, engine.timing.cancels, engine.dedupe)
        leases = LeaseHandler(context, engine.leasing, reads)
        transactions, local = engine.transactions, engine.local_branches
        self._branches = TransactionHandler(context, engine.turns, reads, puts, transactions, local, self.run)
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
        engine, context, later, reads = self.engine, self.engine.context, self.later, self._reads
        turns, leasing, timing = engine.turns, engine.leasing, engine.timing
        partitions = Partitions(context, turns)
        self._sends = SendHandler(context, turns, engine.half_messages, engine.timers, engine.dedupe, partitions)
        acks = AckHandler(context, leasing, reads)
        self._endpoint.answer_runs({**self._sends.runs(), Request.ACK_MESSAGE: acks.acks})
        routes = ClusterRoutes(self.registration, self.store.clock.monotonic)
        families: list[Family] = [
            self._sends,
            HalfHandler(engine.half_messages, reads),
            ReplyHandler(context, turns, partitions),
            RecallHandler(timing.cancels, later, self.settings.broker_name),
            PullHandler(context, engine.holds, reads, self._hub.loop),
            PopHandler(context, leasing, reads, later),
            acks,
            SendBackHandler(context, turns, reads),
            BulkHandler(context, reads),
            QueryHandler(context, later),
            ConsumerHandler(context, later, engine.locks, engine.offset_log),
            HeartbeatHandler(context, leasing.lines),
            AssignmentHandler(context, engine.duties, engine.drain, later, routes),
            self._identity,
            *self._administration(),
        ]
        if self._registry is not None:
            families.append(RegistryHandler(self.settings, self._registry, self.run))
        for family in families:
            self.add_family(family)

    def _administration(self) -> list[Family]:
        """Return the handlers of administrators' requests."""
        engine, context, later, owner = self.engine, self.engine.context, self.later, self._owner
        advertised, duties, leasing = self.addresses.advertised, engine.duties, engine.leasing
        positions, clocks = engine.schedule.positions, leasing.clocks
        return [
            TopicsHandler(context, duties, later, engine.forget_topic, self.registration.wait_told),
            GroupAdminHandler(context, duties, later, lambda name: leasing.pops.forget(group=name)),
            OffsetAdminHandler(context, leasing.figures, later, advertised, self.run),
            OffsetExportHandler(context, later, self._export),
            LeaseAdminHandler(context, leasing, later),
            ClientAdminHandler(context, later, self.run),
            DelayHandler(engine.schedule),
            TimerAdminHandler(context, engine.timing, later, self.run),
            BrokerInfoHandler(context, engine.turns, positions, self._figures, clocks, later, advertised, owner),
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
        self.engine.start(self._branches)
        every = self.engine.duties.every
        every(IDLE_SCAN_S, self._endpoint.close_idle)
        every(LOOK_S, self.authentication.reload_if_changed)
        every(SAMPLE_S, Sampler(self.metrics, self.engine.duties.rest).sample)
        if self.role.is_master:
            every(EXPIRE_TRANSACTIONS_S, self._branches.expire)
            if self.settings.offset_export_interval_ms:
                every(self.settings.offset_export_interval_ms / 1000, self._history.record)
        if self._registry is not None:
            every(self.settings.registry_scan_ms / 1000, self._registry.scan)
        self.registration.start()
        if self._zookeeper is not None:
            self._zookeeper.start()

    def drain(self, reason: str) -> None:
        """Refuse puts from now on for a reason, and answer those that came before.

        Those that are not as safe as promised within ``drain_timeout_ms`` are refused as in doubt.
        """
        refusal = self.store.fence.close(reason)
        self._wait_until(self.engine.turns.nothing_parked, self.settings.drain_timeout_ms / 1000)
        self.engine.turns.abandon(refusal)

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

    def _end(self, deadline_s: float, *, durably: bool) -> None:
        sessions = self._endpoint.sessions
        self.engine.pause()
        for session in list(sessions):
            session.wind_up()
        self._wait_until(lambda: self.engine.turns.nothing_parked() and not sessions, deadline_s)
        for session in list(sessions):
            session.close()
        self.engine.close(durably=durably)

    def _wait_until(self, done: Callable[[], bool], deadline_s: float) -> None:
        deadline = self.store.clock.monotonic() + deadline_s
        while not done() and self.store.clock.monotonic() < deadline:
            gevent.sleep(0.005)

"""The engine of one broker: all its parts that know no sockets, made in the order in which they need each other."""

import logging
from collections.abc import Mapping

from gevent.hub import get_hub

from metaq.config import Settings
from metaq.engine.checkback import CheckBack
from metaq.engine.context import Context
from metaq.engine.duties import Duties
from metaq.engine.figures.counters import Counters
from metaq.engine.figures.statistics import Statistics
from metaq.engine.halfmessages import HalfMessages
from metaq.engine.leases.draining import Drain
from metaq.engine.leases.keeping import KEEP_S, LeaseKeeper
from metaq.engine.leases.leasing import Leasing
from metaq.engine.locklog import LockLog
from metaq.engine.offsets.offsetlog import APPEND_S, OffsetLog
from metaq.engine.parts import retention_rules, room
from metaq.engine.pool import run_sync
from metaq.engine.reading.hold import Holds
from metaq.engine.role import Keeper, Role, RoleParts
from metaq.engine.schedule import SAVE_S, Schedule
from metaq.engine.tables.clients import Clients
from metaq.engine.tables.loading import load_tables
from metaq.engine.tables.observed import Observed
from metaq.engine.tables.offsets import OffsetTable
from metaq.engine.tables.topics import FOLDER
from metaq.engine.timers.figures import figures as timer_figures
from metaq.engine.timers.timing import Timing
from metaq.engine.turn import Turns
from metaq.errors import MetaqError
from metaq.protocol.record import host_bytes
from metaq.store.copies.applying import hide_from
from metaq.store.copies.epochs import Epochs
from metaq.store.files.filecache import Run
from metaq.store.messagestore import MessageStore
from metaq.store.queues.consumequeue import ConsumeQueue
from metaq.tx.halves import Halves
from metaq.tx.journal import Held
from metaq.tx.local import LocalBranches
from metaq.tx.manager import Transactions

logger = logging.getLogger(__name__)

Address = tuple[str, int]


class Engine:
    """The parts of one broker, in one role, on an opened store."""

    def __init__(
        self,
        settings: Settings,
        store: MessageStore,
        role: Role,
        epochs: Epochs,
        parts: RoleParts,
        run: Run,
        *,
        address: Address,
        advertised: Address,
        goes_on: bool,
    ) -> None:
        """Make the parts; no duty runs before ``start``.

        ``address`` is that of the text protocol, ``advertised`` the one that records carry. ``goes_on`` says that this process
        has served already, in another role.
        """
        self.store, self.role, self.run, self._parts = store, role, run, parts
        store_host, hub = host_bytes(*advertised), get_hub()
        tables = load_tables(settings, store, is_master=role.is_master, goes_on=goes_on, run=run)
        counters = Counters()
        self.context = context = Context(
            settings=settings,
            store=store,
            topics=tables.topics,
            host=address[0],
            port=address[1],
            store_host=store_host,
            groups=tables.groups,
            modes=tables.modes,
            offsets=OffsetTable(),
            clients=Clients(tables.groups, store.clock.monotonic, hub.loop.run_callback),
            statistics=Statistics(store.queues, store.clock, counters),
            counters=counters,
            epochs=epochs,
            observed=Observed(store.clock.monotonic),
            replicas=parts.replicas,
        )
        self.holds = Holds()
        self.turns = turns = Turns(store, settings, hub, run_sync, self._wake, parts)
        self.offset_log = OffsetLog(context, turns, run)
        self.locks = LockLog(context, turns)
        self.duties = Duties(context, turns, run, parts.saved)
        self.leasing = Leasing.open(context, turns, hub.loop.timer)
        self.drain = Drain(context, self.leasing.leases, self.leasing.moves, run)
        self._lease_keeper = LeaseKeeper(self.leasing.leases, self.leasing.poison, self.duties.rest, run)
        self.room = room(settings)
        self.transactions = Transactions(store, self.room, store_host, settings.data / FOLDER)
        self.local_branches: LocalBranches[Held] = LocalBranches(self.room)
        self.schedule = Schedule(context, turns, self.holds, hub.loop, run)
        self.timing = Timing.open(context, turns, run)
        self.timers, self.dedupe = self.timing.timers, self.timing.dedupe
        self.halves = Halves(store, settings.data / FOLDER, settings.check_after_ms)
        self.half_messages = HalfMessages(context, turns, self.halves, self.dedupe)
        self.check_back = CheckBack(self.half_messages, self.duties.rest, self.duties.ending, run)
        self._take_role()

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

    # -- changes ------------------------------------------------------------------------------------------------------

    def configure(self, settings: Settings) -> None:
        """Take over the settings that can change in a running broker.

        Raise ``ConfigError`` when a topic of the settings cannot be made; nothing has changed then.
        """
        context, topics, groups = self.context, self.context.topics, self.context.groups
        other_topics = settings.topics != context.settings.topics  # if not, administrators' changes to topics stay
        if other_topics:
            topics.check_settings(settings.topics, settings.max_topics)
        topics.max_topics, groups.max_groups = settings.max_topics, settings.max_groups
        groups.auto_create = settings.auto_create_groups
        if self.role.is_master:  # a slave has the topics of its master
            topics.add_system_topics(settings.cluster_name, settings.broker_name, auto_create=settings.auto_create_topics)
            if other_topics:
                topics.configure(settings.topics)
        topics.restrict(settings.broker_permission)
        context.settings = settings
        self.store.retain_by(retention_rules(settings))
        self.room.take_limits(room(settings))
        self.halves.check_after_ms = settings.check_after_ms
        self.turns.configure(settings)

    def topic_changed(self, name: str) -> None:
        """Learn that a topic was made, changed or removed, and have the table saved."""
        self.duties.topic_changed()
        self.dedupe.topic_changed(name)

    def forget_topic(self, name: str) -> None:
        """Drop what is kept about a deleted topic: counters, offsets, request modes, statistics."""
        self.context.counters.topics.pop(name, None)
        self.context.offsets.remove_topic(name)
        self.context.modes.forget(topic=name)
        self.leasing.pops.forget(topic=name)
        self.context.statistics.forget(topic=name)

    def numbers(self) -> Mapping[str, object]:
        """Return figures of timers, leases and ids for stats: values by name."""
        return {**timer_figures(self.timers), **self.leasing.figures.numbers(), **self.dedupe.numbers()}

    # -- life ---------------------------------------------------------------------------------------------------------

    def start(self, *keepers: Keeper) -> None:
        """Start the duties; ``keepers`` need records of the log, as some of the engine's parts do."""
        settings, every = self.context.settings, self.duties.every
        own = (self.check_back, self.context.epochs, self.timing.keeper, self._lease_keeper)
        keeper = self._parts.keeper
        self.duties.start((*keepers, *own) if keeper is None else (keeper,))
        for index in (self.timers, self.dedupe):
            index.start()
            every(settings.sweep_interval_ms / 1000, index.apply)
            every(settings.checkpoint_interval_ms / 1000, index.flush)
        every(settings.client_scan_ms / 1000, self._look_for_silent_clients)
        if self.role.is_master:
            self._start_writing()

    def _start_writing(self) -> None:
        """Start the duties that only a master has: they append records to the log and save its tables."""
        settings, every = self.context.settings, self.duties.every
        self.schedule.start()
        self.timing.delivery.start()
        every(SAVE_S, self.schedule.save)
        every(APPEND_S, self.offset_log.append)
        every(settings.offset_snapshot_interval_ms / 1000, self.offset_log.save)
        every(KEEP_S, self._lease_keeper.tend)
        every(SAVE_S, self._save_transactions)
        every(self.check_back.pause_s, self.check_back.check)

    def _save_transactions(self) -> None:
        self.transactions.snapshots.save(self.run)
        self.halves.save(self.run)

    def _look_for_silent_clients(self) -> None:
        context = self.context
        context.clients.expire(self.store.clock.monotonic() - context.settings.client_expiry_ms / 1000)
        self.locks.expire()

    def pause(self) -> None:
        """Begin nothing more, and answer whoever waits for messages."""
        self.holds.stop()
        self.duties.pause()
        self.schedule.stop()
        self.timing.stop()
        self.dedupe.stop()
        self.holds.wake_all()
        self.leasing.lines.stop()

    def close(self, *, durably: bool) -> None:
        """End the duties, save all tables, and close the store; when that fails, the next start recovers it."""
        if not self.duties.stop(self.context.settings.drain_timeout_ms / 1000):
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
        self.duties.save_topics()
        self.duties.save_groups()
        self.duties.save_modes()
        self.offset_log.save_last()
        self.schedule.save_last()
        self.transactions.snapshots.save_last(self.run)
        self.halves.save_last(self.run)

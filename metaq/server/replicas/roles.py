"""The two roles of a replica: the master that feeds its slaves, and the slave that follows its master."""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Final

from metaq.address import Address
from metaq.config import Settings
from metaq.engine.offsets.offsetlog import load_offsets
from metaq.engine.pool import run_sync
from metaq.engine.role import Health, RoleParts
from metaq.engine.tables.groups import GROUPS
from metaq.engine.tables.modes import MODES
from metaq.engine.tables.topics import FOLDER, TOPICS
from metaq.engine.turn import Turns
from metaq.message import OFFSETS_TOPIC, TopicPartition
from metaq.protocol.remoting.codes import MASTER
from metaq.replication.documents import Documents
from metaq.replication.feeder import Feeder, ReplicaIdentity
from metaq.replication.follower import Follower, Seen
from metaq.replication.insync import Agree, InSync
from metaq.replication.peers import Certificate
from metaq.server.broker import Broker
from metaq.server.opened import Opened
from metaq.server.replicas.turningaway import TurningAway
from metaq.store.queues.consumequeue import ConsumeQueue


def identity_of(settings: Settings) -> ReplicaIdentity:
    """Return the identity of the replica that the settings describe."""
    return ReplicaIdentity(settings.cluster_name, settings.broker_name, settings.broker_number, settings.replica_number)


def _certificate(settings: Settings) -> Certificate | None:
    """Return the certificate for slaves that connect with TLS; ``None`` without one."""
    return Certificate(settings.tls_certificate, settings.tls_key) if settings.tls_certificate else None


class MasterRole:
    """Feeds slaves, and tracks how far the log is safely replicated: the ``Copies`` of the broker's turns."""

    is_master: Final = True

    def __init__(self, opened: Opened, settings: Settings, agree: Agree) -> None:
        self._epochs = opened.epochs
        self._store = store = opened.store
        self._on_disk = settings.durability.on_disk
        self._waits = settings.durability.on_replicas
        self._hot_bytes = settings.hot_bytes
        minimum = settings.min_in_sync if self._waits else 1  # without waiting, the master acknowledges alone
        self.in_sync = InSync(
            own=settings.replica_number,
            minimum=minimum,
            lag_s=settings.replica_lag_ms / 1000,
            monotonic=store.clock.monotonic,
            own_end=self._own_end,
            agree=agree,
            changed=self._progress,
            held_before=opened.role.readable_end,
            eligible=opened.role.eligible,
        )
        self._least = settings.min_in_sync
        folder = settings.data / FOLDER
        self.feeder = Feeder(
            store,
            opened.epochs,
            self.in_sync,
            identity_of(settings),
            state=self,
            documents=lambda: Documents(folder, store.disk),
            run=opened.run,
            keeper=opened.authentication if opened.authentication.has_users else None,
            certificate=_certificate(settings),
            damaged=opened.recovery.damaged,
        )
        self.parts = RoleParts(
            self, copies=self.in_sync if self._waits else None, grown=self.feeder.wake, saved=self.feeder.send_tables
        )
        self._turns: Turns

    def attach(self, broker: Broker) -> None:
        """Take the broker that is built with these parts: its puts wait for the slaves."""
        self._turns = broker.engine.turns

    def start(self) -> None:
        self.feeder.start()

    def stop(self) -> None:
        self.feeder.stop()

    @property
    def readable_end(self) -> int:
        """The log offset before which readers may see everything."""
        return self.in_sync.held_end if self._waits else self._own_end()

    def has_all(self, replica: int) -> bool:
        """Return whether a replica is in sync and holds the whole log."""
        end = self._store.log.end
        return any(slave.in_sync and slave.held_end >= end for slave in self.in_sync.standings() if slave.replica == replica)

    def reader_goes_to(self, standby: int, preferred: int, behind_bytes: int) -> int:
        """Return the replica that a reader should use: a slave in sync, for a group with a standby or a reader of data that is
        no longer in memory. That is the standby or else the preferred one if in sync, or else the first slave in sync, or else
        the master."""
        if standby == self.in_sync.own or (not standby and behind_bytes <= self._hot_bytes):
            return MASTER
        preferred = standby or preferred
        able = [slave.replica for slave in self.in_sync.standings() if slave.in_sync]
        return preferred if preferred in able else min(able, default=MASTER)

    def numbers(self) -> Mapping[str, object]:
        """Return the figures for ``stats`` and request 28.

        Lags in milliseconds are −1 for a slave that never held everything.
        """
        in_sync, standings = self.in_sync, self.in_sync.standings()
        return {
            "role": "master",
            "epoch": self._epochs.current.number,
            "in_sync": len(in_sync.members),
            "min_in_sync": self._least,
            "slaves": len(standings),
            **{f"slave_{slave.replica}_in_sync": "yes" if slave.in_sync else "no" for slave in standings},
            **{f"slave_{slave.replica}_lag_bytes": slave.lag_bytes for slave in standings},
            **{f"slave_{slave.replica}_lag_ms": slave.lag_ms for slave in standings},
        }

    def health(self) -> Health:
        in_sync = len(self.in_sync.members)
        problem = None
        if self._waits and in_sync < self._least:
            problem = f"{in_sync} of at least {self._least} replicas are in sync (min_in_sync): no put is safe"
        return Health(in_sync, self.in_sync.standings(), 0, problem)

    def _own_end(self) -> int:
        return self._store.durable_end if self._on_disk else self._store.log.end

    def _progress(self) -> None:
        """Release waiting puts and wake the feeder, after replicas hold more or the in-sync set has changed."""
        if self._waits:
            self._turns.release()
        self.feeder.wake()


class SlaveRole:
    """Follows the master. As a ``Keeper``, it keeps the segments of the log that the master keeps."""

    is_master: Final = False

    def __init__(
        self, opened: Opened, settings: Settings, find_master: Callable[[], Address | None], replaced: Callable[[], None]
    ) -> None:
        self._epochs, self._store = opened.epochs, opened.store
        folder: Path = settings.data / FOLDER
        self.follower = Follower(
            opened.store,
            opened.epochs,
            identity_of(settings),
            str(opened.addresses.text),
            find_master=find_master,
            folder=folder,
            run=opened.run,
            run_sync=run_sync,
            took=self._take_tables,
            published=self._published,
            replaced=replaced,
            peers=opened.peers,
            proved_end=opened.recovery.right_end,
        )
        self.away = TurningAway(_certificate(settings))
        # until the master reports more: other messages will take the place of what was cut off meanwhile
        self.follower.seen.readable_end = min(opened.role.readable_end, opened.store.log.end)
        self._hot_bytes = settings.hot_bytes
        self._number = settings.replica_number
        self.parts = RoleParts(self, keeper=self)
        self._broker: Broker

    def attach(self, broker: Broker) -> None:
        """Take the broker that is built with these parts: its readers see what comes from the master."""
        self._broker = broker

    def start(self) -> None:
        self.follower.start()

    def stop(self) -> None:
        self.follower.stop()
        self.away.stop()

    def _take_tables(self, names: Collection[str]) -> None:
        """Put in force the tables that the master has sent: clients read from this slave while there is no master."""
        context, disk = self._broker.engine.context, self._store.disk
        if TOPICS in names:
            before = dict(context.topics.deleted)
            context.topics.reload(disk, {key: queue.next for key, queue in context.store.queues.items()})
            for key, end in context.topics.deleted.items():
                if end != before.get(key):
                    context.store.queue(*key).hide_before(end)
        if GROUPS in names:
            context.groups.reload(disk)
        if MODES in names:
            context.modes.reload(disk)

    def _published(self, queues: Sequence[ConsumeQueue]) -> None:
        context = self._broker.engine.context
        topics = context.topics
        for queue in queues:
            if queue.topic == OFFSETS_TOPIC:
                load_offsets(context)
            elif topics.get(queue.topic) is None:  # the topic table follows
                topics.add_stored(TopicPartition(queue.topic, queue.partition), queue.next)
        self._broker.engine.holds.wake(list(queues))

    @property
    def seen(self) -> Seen:
        return self.follower.seen

    def reader_goes_to(self, standby: int, preferred: int, behind_bytes: int) -> int:
        """Return the replica that a reader should use: the master, unless it cannot be reached or would send the reader here
        too. An unfit slave keeps nobody: its log does not grow, though its master may be well."""
        if self.seen.is_unfit:
            return MASTER
        in_sync = self.seen.in_sync
        stands_by = bool(standby) and self._number in in_sync and (standby == self._number or standby not in in_sync)
        stays = not self.seen.address or behind_bytes > self._hot_bytes or stands_by
        return self._number if stays else MASTER

    def numbers(self) -> Mapping[str, object]:
        seen = self.seen
        return {
            "role": "slave",
            "epoch": self._epochs.current.number,
            "in_sync": len(seen.in_sync),
            "master": seen.address or "none",
            "lag_bytes": max(0, seen.log_end - self._store.log.end),
            "following": seen.problem or ("yes" if seen.address else "nobody yet"),
        }

    def health(self) -> Health:
        seen = self.seen
        lag_bytes = max(0, seen.log_end - self._store.log.end)
        problem = None
        if not seen.address:
            problem = f"this slave follows no master: {seen.problem or 'it knows none'}"
        elif self._number not in seen.in_sync:
            problem = f"this slave is not in sync with its master yet: it lacks {lag_bytes} bytes"
        return Health(len(seen.in_sync), (), lag_bytes, problem)

    @property
    def readable_end(self) -> int:
        """The log offset before which readers may see everything, as far as this slave has it."""
        return min(self.follower.seen.readable_end, self._store.log.end)

    @property
    def oldest(self) -> int | None:
        """The log offset at which the master's log begins: retention here deletes nothing from there on."""
        return self.follower.seen.begin

    def keep(self, before: int) -> None:
        """Do nothing: the master appends again the records that are still needed."""

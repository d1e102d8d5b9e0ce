"""The role of a replica, master or slave, from one opening of its store to the next, and the parts that it brings along."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

from metaq.errors import DiskFull
from metaq.protocol.remoting.codes import MASTER
from metaq.replication.insync import Standing
from metaq.replication.nodes import NO_LOG, ReplicaLog
from metaq.store.copies.epochs import FIRST, Epochs
from metaq.store.files.filecache import Run
from metaq.store.messagestore import MessageStore


class Role(NamedTuple):
    """The role of a replica, master or slave, with the facts that come with it."""

    is_master: bool = True
    epoch: int = 0
    """Of a master: the epoch that it begins, or a later one if its log knows later ones; 0: none, since it takes no slaves."""
    readable_end: int = 0
    """Where readers wait for replicas: the log offset before which they may see everything from the start."""
    eligible: frozenset[int] = frozenset()
    """Of a master: the replicas that may become the next master, until it has another set agreed on."""
    yields: bool = False
    """Of a master: it becomes a slave instead while its log may lack something that other eligible replicas have."""
    stood_with: ReplicaLog = NO_LOG
    """Of an elected master: the log with which it stood. It yields, too, while its log is suspect and shorter than that, since
    another one may be the longest now."""
    shortage: str | None = None
    """Of a slave that was to become master: why there is no room for the record that begins its epoch."""

    def taken(self, store: MessageStore, replica: int, run: Run) -> "tuple[Role, Epochs]":
        """Return the role that this replica takes with the log it has found, and the log's epochs.

        A master begins its epoch here, durably where it promises that. It becomes a slave when it yields to others, or when
        there is no room for the record that begins the epoch. Of a log without epochs, readers may see all from the start.
        """
        epochs, role = Epochs(store), self
        if self.epoch and epochs.table == [FIRST]:  # never a replica's log: all of it was acknowledged at the level before
            role = self._replace(readable_end=store.log.end)
        slave = role._replace(is_master=False, epoch=0)
        is_shorter = self.stood_with.is_longer(ReplicaLog(epochs.current.number, store.log.end))
        if (self.yields or is_shorter) and store.suspicion.reason is not None:
            return slave, epochs
        if self.epoch:
            number = max(self.epoch, epochs.current.number + 1)  # the log may know later epochs than an operator
            try:
                epochs.begin(number, replica)
                store.append()
            except DiskFull as error:
                epochs.refresh()
                return slave._replace(shortage=str(error)), epochs
            if store.settings.durability.on_disk:
                store.sync(run)
        return role, epochs


ALONE: Final = Role()
"""A broker without replicas."""


class Health(NamedTuple):
    """The state of a broker's replicas, as one of them knows it."""

    in_sync: int = 1
    """The number of replicas in sync, the master included."""
    slaves: Sequence[Standing] = ()
    """The state of each slave, known to the master only."""
    lag_bytes: int = 0
    """Bytes of the master's log that this slave does not have yet."""
    problem: str | None = None
    """Why this replica does not do its part; ``None`` when it does."""


class Replicas(Protocol):
    """The replicas of a broker, as the handlers of one of them see them."""

    @property
    def is_master(self) -> bool:
        """True when this replica takes messages, offsets and commands; a slave only serves what its master has."""
        ...

    def reader_goes_to(self, standby: int, preferred: int, behind_bytes: int) -> int:
        """Return RocketMQ's brokerId of the replica that a reader should ask next.

        Args:
            standby: the ``brokerId`` of its group: the replica that the group always reads from; 0 for none.
            preferred: the ``whichBrokerWhenConsumeSlowly`` of its group.
            behind_bytes: the bytes of the log after the place where it reads.
        """
        ...

    def numbers(self) -> Mapping[str, object]:
        """Return the state of the replicas for operators: values by name."""
        ...

    def health(self) -> Health:
        """Return the state of the replicas for metrics and readiness."""
        ...


class Copies(Protocol):
    """The copies of the log on other replicas."""

    @property
    def held_end(self) -> int:
        """The log offset before which enough replicas, this one included, hold everything. It never goes back."""
        ...

    @property
    def hopeful(self) -> bool:
        """True when enough replicas are in sync for ``held_end`` to move, or may soon be."""
        ...


class Keeper(Protocol):
    """A part of the broker that puts the records it still needs into the log again before their segment is deleted."""

    @property
    def oldest(self) -> int | None:
        """The lowest log offset that it needs, or ``None``; nothing from there on is deleted."""
        ...

    def keep(self, before: int) -> None:
        """Put what is needed before a log offset again, so that a later round can delete the segments before it."""
        ...


class NoReplicas:
    """The ``Replicas`` of a broker that has no others."""

    is_master: Final = True

    def reader_goes_to(self, standby: int, preferred: int, behind_bytes: int) -> int:
        return MASTER

    def numbers(self) -> Mapping[str, object]:
        return {"role": "master"}

    def health(self) -> Health:
        return Health()


def _nothing() -> None:
    """Do nothing: there are no slaves."""


class RoleParts(NamedTuple):
    """The parts that its role brings into a broker. They never change: a replica that changes its role makes a new broker."""

    replicas: Replicas
    copies: Copies | None = None
    """Of a master at REPLICA: the copies for whose ``held_end`` puts and readers wait."""
    grown: Callable[[], None] = _nothing
    """Of a master: called when the log may have grown, or more of it may be durable."""
    saved: Callable[[], None] = _nothing
    """Called on a master when a table of topics or groups was saved: its slaves should have it soon."""
    keeper: Keeper | None = None
    """Of a slave: it alone says which records retention must keep."""


NO_PARTS: Final = RoleParts(NoReplicas())
"""Those of a broker without replicas."""

"""What a replica of a broker is from one opening of its store to the next."""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, Protocol

from metaq.errors import DiskFull
from metaq.registry.routes import MASTER
from metaq.replication.insync import Standing
from metaq.store.copies.epochs import Epochs
from metaq.store.files.filecache import Run
from metaq.store.messagestore import MessageStore


class Role(NamedTuple):
    """Master or slave."""

    is_master: bool = True
    epoch: int = 0
    """Of a master: the one that it begins, or a later one when its log knows it; 0: none, since it takes no slaves."""
    readable_end: int = 0
    """Where readers wait for the replicas: the log offset before which they may see everything from the start."""
    eligible: frozenset[int] = frozenset()
    """Of a master: the replicas of which the next one may be made, until it has others agreed on."""
    yields: bool = False
    """Of a master: while its log may lack what others of these have, it is a slave instead."""
    shortage: str | None = None
    """Of a slave that was to be master: why there is no room for the record with which its epoch begins."""

    def taken(self, store: MessageStore, replica: int, run: Run) -> "tuple[Role, Epochs]":
        """What it is with the log that was found, where a master begins its epoch; and the epochs."""
        epochs, slave = Epochs(store), self._replace(is_master=False, epoch=0)
        if self.yields and store.suspicion.reason is not None:
            return slave, epochs
        if self.epoch:
            number = max(self.epoch, epochs.current.number + 1)  # the log may know later ones than an operator
            try:
                epochs.begin(number, replica)
                store.append()
            except DiskFull as error:
                epochs.refresh()
                return slave._replace(shortage=str(error)), epochs
            if store.settings.durability.on_disk:
                store.sync(run)
        return self, epochs


ALONE: Final = Role()
"""A broker without replicas."""


class Health(NamedTuple):
    """How the replicas of a broker stand, as one of them knows it."""

    in_sync: int = 1
    """Replicas in sync, the master among them."""
    slaves: Sequence[Standing] = ()
    """Known to the master only."""
    lag_bytes: int = 0
    """Of the log of the master, which this slave does not have."""
    problem: str | None = None
    """Why this one does not do its part."""


class Replicas(Protocol):
    """The replicas of a broker, as the handlers of one of them see them."""

    @property
    def is_master(self) -> bool:
        """Whether this one takes messages, offsets and orders; a slave only gives what its master has."""
        ...

    def reader_goes_to(self, standby: int, preferred: int, behind_bytes: int) -> int:
        """RocketMQ's brokerId of the replica that a reader should ask next.

        Args:
            standby: its group's ``brokerId``: the replica that it always reads from; 0 for none.
            preferred: its group's ``whichBrokerWhenConsumeSlowly``.
            behind_bytes: how much of the log lies behind what it reads.
        """
        ...

    def numbers(self) -> Mapping[str, object]:
        """How they stand, for operators, by name."""
        ...

    def health(self) -> Health:
        """How they stand, for metrics and readiness."""
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

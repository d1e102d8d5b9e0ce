"""The ZooKeeper nodes by which a broker's replicas elect their master (who writes what: ``metaq.replication.election``).

::

    /metaq/groups/<cluster>/<broker name>/state           P  {"epoch":7,"master":2,"in_sync":[1,2,3],"preferred":0}
                                          master          E  {"replica":2,"epoch":7,"replication":"10.0.0.2:10912","run":"9f…"}
                                          replicas/<n>    E  {"epoch":7,"end":81233,"suspect":null,"version":12}

While there is a master, ``end`` is −1: the log grows all the time.
"""

from typing import Final, NamedTuple, Self

import orjson

from metaq.address import parse_address
from metaq.errors import BadRequest
from metaq.store.copies.epochs import LAST_EPOCH
from metaq.store.messagestore import FIRST_EPOCH

UNTOLD: Final = -1
"""The end of a log that grows."""


class ReplicaGroupState(NamedTuple):
    """The persistent state of a group, which outlives all its processes."""

    epoch: int
    master: int
    """The last master."""
    in_sync: tuple[int, ...]
    preferred: int = 0
    """The replica to which the last master has handed over; others let it go first."""

    def encode(self) -> bytes:
        return orjson.dumps(self._asdict())

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Decode a state; raise ``BadRequest`` when it cannot be read or its epoch is the last one possible."""
        try:
            row = orjson.loads(data)
            state = cls(int(row["epoch"]), int(row["master"]), tuple(map(int, row["in_sync"])), int(row["preferred"]))
            if not FIRST_EPOCH <= state.epoch < LAST_EPOCH:
                raise ValueError("there is no next epoch")
            return state
        except (ValueError, TypeError, KeyError) as error:
            raise BadRequest(f"the state of a broker's replicas in ZooKeeper cannot be read: {data[:80]!r}") from error


class Master(NamedTuple):
    """The ephemeral node of the present master."""

    replica: int
    epoch: int
    replication: str
    """HOST:PORT to which its slaves connect."""
    run: str
    """A random text that distinguishes one process of a replica from the next."""

    def encode(self) -> bytes:
        return orjson.dumps(self._asdict())

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Decode a master node; raise ``BadRequest`` when it cannot be read."""
        try:
            row = orjson.loads(data)
            parse_address(str(row["replication"]))  # slaves need it
            return cls(int(row["replica"]), int(row["epoch"]), str(row["replication"]), str(row["run"]))
        except (BadRequest, ValueError, TypeError, KeyError) as error:
            raise BadRequest(f"the master in ZooKeeper cannot be read: {data[:80]!r}") from error


class ReplicaLog(NamedTuple):
    """The facts about a replica's log that matter to an election."""

    epoch: int
    end: int
    suspect: str | None = None
    """Why it may lack acknowledged messages; ``None``: it does not."""

    def is_longer(self, other: "ReplicaLog") -> bool:
        """Return whether this log has a newer epoch than the other, or reaches further in the same one."""
        return (self.epoch, self.end) > (other.epoch, other.end)


NO_LOG: Final = ReplicaLog(0, 0)
"""Longer than no other."""


class Candidate(NamedTuple):
    """The ephemeral node of a replica that is running."""

    log: ReplicaLog
    version: int
    """The version of the state at which it saw that there was no master; −1: it sees one."""

    def encode(self) -> bytes:
        return orjson.dumps({**self.log._asdict(), "version": self.version})

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Decode a replica's node; raise ``BadRequest`` when it cannot be read."""
        try:
            row = orjson.loads(data)
            return cls(ReplicaLog(int(row["epoch"]), int(row["end"]), row["suspect"]), int(row["version"]))
        except (ValueError, TypeError, KeyError) as error:
            raise BadRequest(f"a replica in ZooKeeper cannot be read: {data[:80]!r}") from error

"""What the replicas of a broker write into ZooKeeper for each other (who does what: ``metaq.replication.election``).

::

    /metaq/groups/<cluster>/<broker name>/state           P  {"epoch":7,"master":2,"in_sync":[1,2,3],"preferred":0}
                                          master          E  {"replica":2,"epoch":7,"replication":"10.0.0.2:10912","run":"9f…"}
                                          replicas/<n>    E  {"epoch":7,"end":81233,"suspect":null,"version":12}
"""

from typing import NamedTuple, Self

import orjson

from metaq.errors import BadRequest
from metaq.store.copies.epochs import LAST_EPOCH
from metaq.store.messagestore import FIRST_EPOCH


class State(NamedTuple):
    """What outlives all replicas."""

    epoch: int
    master: int
    """Its last one."""
    in_sync: tuple[int, ...]
    preferred: int = 0
    """The replica to which the last master has handed over; others let it go first."""

    def encode(self) -> bytes:
        return orjson.dumps(self._asdict())

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """``BadRequest`` for what is none."""
        try:
            row = orjson.loads(data)
            state = cls(int(row["epoch"]), int(row["master"]), tuple(map(int, row["in_sync"])), int(row["preferred"]))
            if not FIRST_EPOCH <= state.epoch < LAST_EPOCH:
                raise ValueError("there is no next epoch")
            return state
        except (ValueError, TypeError, KeyError) as error:
            raise BadRequest(f"the state of a broker's replicas in ZooKeeper cannot be read: {data[:80]!r}") from error


class Master(NamedTuple):
    """Who is master now."""

    replica: int
    epoch: int
    replication: str
    """HOST:PORT where its slaves connect."""
    run: str
    """Tells one process of a replica from the next."""

    def encode(self) -> bytes:
        return orjson.dumps(self._asdict())

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """``BadRequest`` for what is none."""
        try:
            row = orjson.loads(data)
            int(str(row["replication"]).rpartition(":")[2])  # slaves connect there
            return cls(int(row["replica"]), int(row["epoch"]), str(row["replication"]), str(row["run"]))
        except (ValueError, TypeError, KeyError) as error:
            raise BadRequest(f"the master in ZooKeeper cannot be read: {data[:80]!r}") from error


class Log(NamedTuple):
    """What of a replica's log matters to an election."""

    epoch: int
    end: int
    suspect: str | None = None
    """Why it may lack what was acknowledged; ``None``: it does not."""

    def is_longer(self, other: "Log") -> bool:
        """Whether its newest epoch is newer, or else it has more of that."""
        return (self.epoch, self.end) > (other.epoch, other.end)


class Candidate(NamedTuple):
    """Another replica that is there."""

    log: Log
    version: int
    """Of the state when it saw that there was no master; −1: it sees one."""

    def encode(self) -> bytes:
        return orjson.dumps({**self.log._asdict(), "version": self.version})

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """``BadRequest`` for what is none."""
        try:
            row = orjson.loads(data)
            return cls(Log(int(row["epoch"]), int(row["end"]), row["suspect"]), int(row["version"]))
        except (ValueError, TypeError, KeyError) as error:
            raise BadRequest(f"a replica in ZooKeeper cannot be read: {data[:80]!r}") from error

"""Who of a broker's replicas is master, by ZooKeeper (argument: docs/replication.md).

::

    /metaq/groups/<cluster>/<broker name>/state           P  {"epoch":7,"master":2,"in_sync":[1,2,3],"preferred":0}
                                          master          E  {"replica":2,"epoch":7,"replication":"10.0.0.2:10912","run":"9f…"}
                                          replicas/<n>    E  {"epoch":7,"end":81233}

- A replica becomes master by one transaction: it makes ``master`` and changes ``state`` from the version that it has read.
- Only a replica of ``in_sync`` may: those hold everything that was acknowledged at REPLICA. It begins with the same ones, which
  its first acknowledgement waits for, unless it has others agreed on before (``metaq.replication.insync``).
- The epoch rises with every master. One that reads a state of another master, or cannot change it, is master no more.
- A master writes while its lease lasts, which ends before ZooKeeper removes ``master``: there are never two that write.

Without ``state`` the group is new, or ZooKeeper has lost its data. Then a replica may make one that has never been in a group
and has the longest log of those that are there; or the one that is master by its own memory, when all that were in sync with it
are there and none of them has begun a later epoch.
"""

import logging
import secrets
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Self

import gevent
import orjson
from gevent.event import Event

from metaq.errors import BadRequest, Fenced, MetaqError, OutcomeUnknown, RegistryUnavailable
from metaq.registry.session import Create, Delete, Set
from metaq.registry.zookeeper import ZooKeeper
from metaq.store.epochs import LAST_EPOCH
from metaq.store.messagestore import FIRST_EPOCH

logger = logging.getLogger(__name__)

LOOK_S: Final = 0.5
"""Pause between two looks, if nothing was heard meanwhile."""
GRACE_S: Final = 2.0
"""How long others may come, where a new group has its first master, or one that is preferred; the session of that one may have
ended, and another one is made."""
PREFERRED_S: Final = 30.0
"""How long one that is preferred may take while ZooKeeper has its node. On a busy machine it takes seconds; who has not stood
for election after this time never will, and without a master nobody is served."""

Address = tuple[str, int]


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
    complete: bool
    """It holds all that its readers have seen: a power cut may have taken some."""


class Election:
    """One replica's part in the elections of its group. Its greenlet alone talks to ZooKeeper, but for what a master asks."""

    def __init__(
        self,
        zookeeper: ZooKeeper,
        group: str,
        replica: int,
        replication: str,
        *,
        log: Callable[[], Log],
        elected: Callable[[int, frozenset[int]], None],
        deposed: Callable[[], None],
        moved: Callable[[Address], None],
        monotonic: Callable[[], float],
    ) -> None:
        """``group``: cluster/broker name. ``elected`` is told the epoch to begin and of whom the next master may be elected,
        ``moved`` where another master is that is new; they and ``deposed`` are quick."""
        base = f"/metaq/groups/{group}"
        self._state_path, self._master_path, self._replicas_path = f"{base}/state", f"{base}/master", f"{base}/replicas"
        self._zookeeper = zookeeper
        self._replica = replica
        self._replication = replication
        self._run = secrets.token_hex(8)
        self._log = log
        self._elected = elected
        self._deposed = deposed
        self._moved = moved
        self._monotonic = monotonic
        self._wake = Event()
        self._greenlet: Any = None
        self._state: State | None = None
        self._version = 0
        self._leading: State | None = None
        """The state that this replica has made as master."""
        self._session: int | None = None
        """In which it became master."""
        self._tried: tuple[Master, int | None] | None = None
        """As what it stood for election last, and in which session; it may have been elected without hearing of it."""
        self._alone_since: float | None = None
        self._said = ""
        self.master: Master | None = None
        """As far as is known."""

    # -- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        zookeeper = self._zookeeper
        zookeeper.hold_lease()
        zookeeper.keep(f"{self._replicas_path}/{self._replica}", self._describe, same=lambda found, own: True)
        for path in (self._master_path, self._state_path, self._replicas_path):
            zookeeper.watch(path, self._wake.set)
        zookeeper.start()
        self._greenlet = gevent.spawn(self._look_forever)

    def stop(self) -> None:
        """Leave the group; the others elect at once."""
        if self._greenlet is not None:
            self._greenlet.kill()
        self._leading = None
        self._zookeeper.stop()

    def _describe(self) -> bytes:
        log = self._log()
        return orjson.dumps({"epoch": log.epoch, "end": log.end})

    @property
    def leading(self) -> bool:
        """Whether this replica was elected, and has not heard of another one since."""
        return self._leading is not None

    @property
    def master_address(self) -> Address | None:
        """Where to follow the master; ``None`` when there is none, or it is this replica."""
        if self.master is None or self.master.replica == self._replica:
            return None
        host, _, port = self.master.replication.rpartition(":")
        return host.strip("[]"), int(port)

    # -- while it leads -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """The fence before each append: ``Fenced`` when another replica may be master by now."""
        zookeeper = self._zookeeper
        if self._leading is None or zookeeper.session != self._session or self._monotonic() >= zookeeper.lease_end:
            raise Fenced("this replica may not be the master any more: ZooKeeper has not confirmed it for a while; try again")

    def agree(self, in_sync: frozenset[int]) -> bool:
        """Have the master elected from these replicas from now on. ``OutcomeUnknown``, ``RegistryUnavailable``."""
        leading = self._leading
        if leading is None or not self._is_own(leading):
            return False
        wanted, version = leading._replace(in_sync=tuple(sorted(in_sync))), self._version
        if not self._zookeeper.commit([Set(self._state_path, wanted.encode(), version)]):
            self._read()  # an outcome that was unknown before may have raised the version, or another replica has
            return False
        if self._leading is not leading:  # it was deposed meanwhile, or has handed over
            return False
        self._leading = self._state = wanted
        self._version = version + 1
        return True

    def _is_own(self, leading: State) -> bool:
        """Whether the state that was read last is the one of this master: its version is no leave to change another one's."""
        return self._state is not None and (self._state.epoch, self._state.master) == (leading.epoch, leading.master)

    def hand_over(self, replica: int) -> None:
        """Be master no more, and let another replica in sync be the next; the caller has stopped writing before."""
        leading = self._leading
        if leading is None or replica not in leading.in_sync:
            raise BadRequest(f"replica {replica} is not in sync; in sync are {sorted(leading.in_sync) if leading else 'none'}")
        if not self._is_own(leading):
            raise RegistryUnavailable("this replica may not be the master any more")
        state = leading._replace(preferred=replica)
        self._leading = self._tried = None
        try:
            if not self._zookeeper.commit([Set(self._state_path, state.encode(), self._version), Delete(self._master_path)]):
                raise RegistryUnavailable("the state of the replicas has changed meanwhile; look at it and try again")
        except OutcomeUnknown:  # another replica may be master by now
            self._deposed()
            raise
        except RegistryUnavailable:  # nothing was changed; the next look tells who is master
            self._leading = self._leading or leading
            raise

    def successor(self, minimum: int) -> int | None:
        """Another replica that could be master instead: one of ``in_sync`` that ZooKeeper has heard of lately, if those without
        this one are so many. ``RegistryUnavailable``."""
        leading, others = self._leading, self._others()
        if leading is None or len(others) < minimum:
            return None
        return min(others.keys() & set(leading.in_sync), default=None)

    def take_over(self) -> None:
        """Make a state with this replica alone in sync, by an operator's order, where ZooKeeper has none or an old one."""
        log, found = self._log(), self._zookeeper.get(self._state_path)
        epoch = log.epoch if found is None else max(log.epoch, State.decode(found.data).epoch)
        self._zookeeper.make(self._state_path)
        self._zookeeper.commit([Set(self._state_path, State(epoch, self._replica, (self._replica,)).encode())])
        self._wake.set()

    # -- looking ------------------------------------------------------------------------------------------------------

    def _look_forever(self) -> None:
        while True:
            self._wake.wait(LOOK_S)
            self._wake.clear()
            try:
                if self._zookeeper.connected:
                    self._look()
            except MetaqError as error:
                logger.debug("election not looked at reason=%s", error)
            except AssertionError:
                raise  # the broker's own state is wrong: the process ends
            except Exception:  # whatever stands in ZooKeeper: who does not look any more is never master again
                logger.exception("election failed")

    def _read(self) -> None:
        found = self._zookeeper.get(self._master_path)
        self.master = None if found is None else Master.decode(found.data)
        found = self._zookeeper.get(self._state_path)
        self._state = None if found is None or not found.data else State.decode(found.data)
        self._version = 0 if found is None else found.version

    def _look(self) -> None:
        before = self.master
        self._read()
        master = self.master
        if master != before and self.master_address is not None:
            self._moved(self.master_address)
        if self._leading is not None:
            if master is None and self._state is None and not self._make_anew(self._leading):
                return  # it waits, and writes nothing: its lease is of a session that is over
            if self._still_leads(self._leading):
                return
            logger.warning("master no more epoch=%d now=%s", self._leading.epoch, self.master)
            self._leading = self._tried = None
            self._deposed()
        elif master is not None and (master, self._zookeeper.session) == self._tried and self._state is not None:
            self._lead(self._state)
        elif master is None or master.replica == self._replica:
            self._stand(master)
        else:
            self._alone_since = None

    def _still_leads(self, leading: State) -> bool:
        master = self.master
        ours = master is not None and (master.run, master.epoch) == (self._run, leading.epoch)
        return ours and self._zookeeper.session == self._session

    def _make_anew(self, leading: State) -> bool:
        """ZooKeeper has lost its data. If nobody else was elected since this replica was, it makes the state anew."""
        reason = self._later_master(leading)
        if reason is not None:
            self._say("state of the replicas not made anew", reason)
            return False
        session = self._zookeeper.session
        master = Master(self._replica, leading.epoch, self._replication, self._run)
        self._zookeeper.make(self._state_path)
        change = Set(self._state_path, leading.encode(), 0)
        if self._zookeeper.commit([Create(self._master_path, master.encode(), ephemeral=True), change]):
            logger.warning("state of the replicas made anew epoch=%d reason=ZooKeeper had lost it", leading.epoch)
            self._session, self._said = session, ""
        self._read()
        return True

    def _later_master(self, leading: State) -> str | None:
        """Who may have been elected later; that was one of those in sync, and its log tells."""
        others = self._others()
        for number in leading.in_sync:
            if number != self._replica and number not in others:
                return (
                    f"replica {number} could be elected later, and is not there; if it is lost for good: metaq cluster promote"
                )
        for number, other in others.items():
            if other.epoch > leading.epoch:
                return f"replica {number} has a log of the epoch {other.epoch}"
        return None

    def _others(self) -> dict[int, Log]:
        """The other replicas that are there, by number."""
        found = {}
        for name in self._zookeeper.children(self._replicas_path):
            node = self._zookeeper.get(f"{self._replicas_path}/{name}")
            if node is None:
                continue
            try:
                number, row = int(name), orjson.loads(node.data)
                log = Log(int(row["epoch"]), int(row["end"]), complete=True)
            except (ValueError, TypeError, KeyError):
                logger.debug("node is no replica, ignored name=%s path=%s", name, self._replicas_path)
                continue
            if number != self._replica:
                found[number] = log
        return found

    def _say(self, what: str, reason: str) -> None:
        """Once."""
        if reason != self._said:
            logger.warning("election held up what=%s reason=%s", what, reason)
        self._said = reason

    def _stand(self, former: Master | None) -> None:
        """Try to become master; ``former`` is what this replica has left, as another process or in another session."""
        now = self._monotonic()
        if self._alone_since is None:
            self._alone_since = now
        reason = self._obstacle(now - self._alone_since)
        if reason is not None:
            self._say("not standing for election", reason)
            return
        state, session = self._state, self._zookeeper.session
        epoch = max(self._log().epoch, state.epoch if state is not None else FIRST_EPOCH) + 1
        wanted = State(epoch, self._replica, (self._replica,) if state is None else state.in_sync)
        master = Master(self._replica, epoch, self._replication, self._run)
        if state is None:
            self._zookeeper.make(self._state_path)
        remove = [] if former is None else [Delete(self._master_path)]
        change = Set(self._state_path, wanted.encode(), self._version)
        self._tried = master, session
        if self._zookeeper.commit([*remove, Create(self._master_path, master.encode(), ephemeral=True), change]):
            self._read()
        if self._state == wanted and self.master == master and self._zookeeper.session == session:
            self._lead(wanted)

    def _lead(self, state: State) -> None:
        self._leading, self._session, self._alone_since, self._said = state, self._zookeeper.session, None, ""
        logger.info("elected epoch=%d", state.epoch)
        self._elected(state.epoch, frozenset(state.in_sync))

    def _obstacle(self, alone_s: float) -> str | None:
        """Why this replica must not stand for election now."""
        log, state = self._log(), self._state
        if not log.complete:
            return "its log ends before what its readers have seen: a power cut has taken some of it"
        if state is None:
            return self._obstacle_to_the_first(log, alone_s)
        if self._replica not in state.in_sync:
            return f"it is not in sync, {sorted(state.in_sync)} are; if they are lost for good: metaq cluster promote"
        if state.preferred not in {0, self._replica} and self._may_come(state.preferred, alone_s):
            return f"replica {state.preferred} goes first"
        return None

    def _may_come(self, preferred: int, alone_s: float) -> bool:
        """Whether one that is preferred is waited for."""
        return alone_s < GRACE_S or (alone_s < PREFERRED_S and preferred in self._others())

    def _obstacle_to_the_first(self, log: Log, alone_s: float) -> str | None:
        if log.epoch != FIRST_EPOCH:
            return "ZooKeeper has lost the state of the replicas; the master makes it anew, or metaq cluster promote"
        if alone_s < GRACE_S:
            return "the group is new; others may still come"
        for number, other in self._others().items():
            if (other.epoch, other.end, -number) > (log.epoch, log.end, -self._replica):
                return f"replica {number} has the longer log"
        return None

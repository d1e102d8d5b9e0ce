"""Who of a broker's replicas is master, by ZooKeeper (argument: docs/replication.md; the nodes: ``metaq.replication.nodes``).

- A replica becomes master by one transaction: it makes ``master`` and changes ``state`` from the version that it has read.
- Only a replica of ``in_sync`` may: those hold everything that was acknowledged at REPLICA. It begins with the same ones, which
  its first acknowledgement waits for, unless it has others agreed on before (``metaq.replication.insync``).
- One whose log is *suspect* may lack some of that (``metaq.store.ending``). It leaves the others of ``in_sync`` the place, also
  when they are not there. When all of them are there and suspect, the one with the longest log of the newest epoch goes on.
- Of those that are not suspect, too, the longest log goes first, but nobody waits longer than ``GRACE_S`` for it.
- A node of ``replicas`` says how a log stands while there is no master, in which it does not grow: ``version`` is that of the
  ``state`` with which its replica saw so. With the version of now it is of this vacancy. Else it may be of a process that was
  killed since, or of a log that was another one: nothing is concluded from it.
- The epoch rises with every master. One that reads a state of another master, or cannot change it, is master no more.
- A master writes while its lease lasts, which ends before ZooKeeper removes ``master``: there are never two that write.

Without ``state`` the group is new, or ZooKeeper has lost its data. Then a replica may make one that has never been in a group
and has the longest log of those that are there; or the one that is master by its own memory, when all that were in sync with it
are there and none of them has begun a later epoch.
"""

import logging
import secrets
from collections.abc import Callable
from typing import Any, Final

import gevent
from gevent.event import Event

from metaq.errors import BadRequest, Fenced, MetaqError, OutcomeUnknown, RegistryUnavailable
from metaq.registry.session import Check, Create, Delete, Set
from metaq.registry.zookeeper import ZooKeeper
from metaq.replication.nodes import Candidate, Log, Master, State
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
        self._vacant = -1
        """The version of the state while there is no master, as this replica says it."""
        self._told: Candidate | None = None
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
        return Candidate(self._log(), self._vacant).encode()

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

    def check(self, epoch: int) -> None:
        """The fence before each append of an epoch: ``Fenced`` when another replica may be master by now, or this one anew."""
        zookeeper, leading = self._zookeeper, self._leading
        if (
            leading is None
            or leading.epoch != epoch
            or zookeeper.session != self._session
            or self._monotonic() >= zookeeper.lease_end
        ):
            raise Fenced("this replica may not be the master any more: ZooKeeper has not confirmed it for a while; try again")

    def agree(self, epoch: int, in_sync: frozenset[int]) -> bool:
        """Have the master elected from these replicas from now on; false for an epoch that is over, even if this replica was
        elected again: its next epoch begins with the set that it was elected with. ``OutcomeUnknown``, ``RegistryUnavailable``.
        """
        leading = self._leading
        if leading is None or leading.epoch != epoch or not self._is_own(leading):
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
        return min((number for number in leading.in_sync if number in others and not others[number].log.suspect), default=None)

    def take_over(self, *, accept_loss: bool) -> None:
        """Make a state with this replica alone in sync, by an operator's order, where ZooKeeper has none or an old one.
        ``BadRequest`` when that may lose messages, unless the operator accepts it."""
        log, found = self._log(), self._zookeeper.get(self._state_path)
        state = None if found is None or not found.data else State.decode(found.data)
        loss = self._loss(log, state)
        if loss is not None and not accept_loss:
            raise BadRequest(
                f"{loss}. To have it master all the same, and lose what it lacks: metaq cluster promote --accept-loss"
            )
        epoch = log.epoch if state is None else max(log.epoch, state.epoch)
        self._zookeeper.make(self._state_path)
        self._zookeeper.commit([Set(self._state_path, State(epoch, self._replica, (self._replica,)).encode())])
        self._wake.set()

    def _loss(self, log: Log, state: State | None) -> str | None:
        """Why messages that were acknowledged may be lost when this replica becomes master now, and who would be better."""
        others = self._others()
        in_sync = frozenset(others if state is None else state.in_sync) - {self._replica}
        better = [number for number, other in others.items() if number in in_sync and other.log.suspect is None]
        longest = max(others, key=lambda number: others[number].log[:2], default=None)
        if state is None:
            reason = None
        elif self._replica not in state.in_sync:
            reason = (
                f"this replica was not in sync, {list(state.in_sync)} were: it may lack messages that were acknowledged since"
            )
        else:
            reason = log.suspect and f"this replica may lack messages that were acknowledged: {log.suspect}"
        if reason is not None and better:
            return f"{reason}. Better: {better}, which have all of them"
        if longest is not None and others[longest].log.is_longer(log):
            reason = reason or "nobody knows who was in sync, and this replica has not the longest log"
            return f"{reason}. Of those that are there replica {longest} has the longest log"
        return (
            reason and f"{reason}. None that is there is better; {sorted(in_sync - others.keys())} may be, which are not there"
        )

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
        self._tell_of_log(vacant=self._leading is None and (master is None or master.replica == self._replica))
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

    def _tell_of_log(self, *, vacant: bool) -> None:
        """Have this replica's node say what others have to know while there is no master."""
        self._vacant = self._version if vacant else -1
        log = self._log()
        now = Candidate(log if vacant else Log(0, 0, log.suspect), self._vacant)  # while there is a master it grows on and on
        if now != self._told:
            self._told = now
            self._zookeeper.touch(f"{self._replicas_path}/{self._replica}")

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
            if other.log.epoch > leading.epoch:
                return f"replica {number} has a log of the epoch {other.log.epoch}"
        return None

    def _others(self) -> dict[int, Candidate]:
        """The other replicas that are there, by number; what somebody else has put there is passed over."""
        found = {}
        for name in self._zookeeper.children(self._replicas_path):
            node = self._zookeeper.get(f"{self._replicas_path}/{name}")
            if node is None or name == str(self._replica):
                continue
            try:
                found[int(name)] = Candidate.decode(node.data)
            except (ValueError, BadRequest) as error:
                logger.debug("replica passed over name=%s reason=%s", name, error)
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
        alone_s = now - self._alone_since
        reason = self._obstacle(alone_s)
        if reason is not None:
            self._say("not standing for election", reason)
        if reason is not None or (alone_s < GRACE_S and self._waits_for_others()):
            if former is not None:  # others do not see that there is no master
                self._zookeeper.commit([Check(self._state_path, self._version), Delete(self._master_path)])
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
        if state is None:
            return self._obstacle_to_the_first(log, alone_s)
        if self._replica not in state.in_sync:
            return f"it is not in sync, {sorted(state.in_sync)} are; if they are lost for good: metaq cluster promote"
        if state.preferred not in {0, self._replica} and self._may_come(state.preferred, alone_s):
            return f"replica {state.preferred} goes first"
        return None if log.suspect is None else self._obstacle_to_a_suspect(log, state)

    def _obstacle_to_a_suspect(self, log: Log, state: State) -> str | None:
        """Another one of those that were in sync may have what this log lacks, unless all are known to be no better."""
        others, lacks = self._others(), f"it may lack messages that were acknowledged ({log.suspect})"
        for number in state.in_sync:
            if number == self._replica:
                continue
            other = others.get(number)
            if other is None:
                return (
                    f"{lacks}, and replica {number} is not there; if that is lost for good: metaq cluster promote --accept-loss"
                )
            if other.version != self._version or other.log.suspect is None:
                return f"{lacks}; replica {number} may have them"
            if other.log.is_longer(log):
                return f"{lacks}; so may replica {number}, but has the longer log"
        logger.critical("suspect replica stands in_sync=%s end=%d reason=%s", list(state.in_sync), log.end, log.suspect)
        return None

    def _may_come(self, preferred: int, alone_s: float) -> bool:
        """Whether one that is preferred is waited for."""
        other = self._others().get(preferred)
        return alone_s < GRACE_S or (alone_s < PREFERRED_S and other is not None and other.log.suspect is None)

    def _waits_for_others(self) -> bool:
        """Whether one that was in sync, too, is to go first, since its log is longer, or has not told yet how long that is."""
        log, state = self._log(), self._state
        if log.suspect is not None or state is None or state.preferred == self._replica:
            return False
        others = [other for number, other in self._others().items() if number in state.in_sync]
        return any(
            other.version != self._version or (other.log.suspect is None and other.log.is_longer(log)) for other in others
        )

    def _obstacle_to_the_first(self, log: Log, alone_s: float) -> str | None:
        if log.epoch != FIRST_EPOCH:
            return "ZooKeeper has lost the state of the replicas; the master makes it anew, or metaq cluster promote"
        if alone_s < GRACE_S:
            return "the group is new; others may still come"
        for number, other in self._others().items():
            if (*other.log[:2], -number) > (*log[:2], -self._replica):
                return f"replica {number} has the longer log"
        return None

"""Election of a broker's master through ZooKeeper (argument: docs/replication.md; nodes: ``metaq.replication.nodes``).

- A replica becomes master by one transaction: it creates ``master`` and changes ``state`` from the version that it has read.
- Only a replica in ``in_sync`` may do so: those hold everything that was acknowledged at REPLICA. The new master begins with
  the same set, and its first acknowledgement waits for all of them unless it has another set agreed on before
  (``metaq.replication.insync``).
- A replica whose log is *suspect* may lack some acknowledged messages (``metaq.store.files.ending``). It yields to the others
  in ``in_sync``, even when they are not there. When all of them are there and suspect, the one with the longest log of the
  newest epoch becomes master.
- Among replicas that are not suspect the longest log also goes first, but the others wait for it no longer than ``GRACE_S``.
- A node under ``replicas`` describes a log. It says where that ends only while there is no master, when the log does not grow.
  Its ``version`` is the version of ``state`` at which its replica saw that there is no master. If that is the current version,
  the node is of this vacancy. Otherwise it may be of a process that has been killed, or of an older log: nothing is concluded
  from it.
- The epoch rises with every master. A master that reads another master's state, or cannot change the state, steps down.
- A master writes only while its lease lasts, which ends before ZooKeeper removes ``master``: two masters never write at once.

Without ``state`` the group is new, or ZooKeeper has lost its data. Then two kinds of replicas may create it: one that has never
been in a group and has the longest log of those that are there; or the one that still is master by its own memory, when all
replicas that were in sync with it are there and none of them has begun a later epoch.
"""

import logging
import secrets
from collections.abc import Callable
from typing import Any, Final

import gevent
from gevent.event import Event

from metaq.address import Address, parse_address
from metaq.errors import BadRequest, ChangeUnknown, Fenced, MetaqError, RegistryUnavailable
from metaq.registry.session import CheckVersion, CreateNode, DeleteNode, SetData
from metaq.registry.zookeeper import ZooKeeper
from metaq.replication.nodes import NO_LOG, UNTOLD, Candidate, Master, ReplicaGroupState, ReplicaLog
from metaq.store.messagestore import FIRST_EPOCH

logger = logging.getLogger(__name__)

LOOK_S: Final = 0.5
"""The pause between two looks at ZooKeeper when no change is reported."""
GRACE_S: Final = 2.0
"""How long a replica waits for others: in a new group, for one with a longer log, and for a preferred one, whose session may
have ended so that it needs a new one."""
PREFERRED_S: Final = 30.0
"""How long a preferred replica may take while its node is in ZooKeeper. On a busy machine it takes seconds; one that has not
stood for election after this time never will, and without a master no client is served."""
CHANGED: Final = "the state of the replicas has changed meanwhile; check it and try again"


class Election:
    """One replica's part in the elections of its group. Only its greenlet uses ZooKeeper, except for requests of a master."""

    def __init__(
        self,
        zookeeper: ZooKeeper,
        group: str,
        replica: int,
        replication: str,
        *,
        log: Callable[[], ReplicaLog],
        elected: Callable[[int, frozenset[int], ReplicaLog], None],
        deposed: Callable[[], None],
        moved: Callable[[Address], None],
        monotonic: Callable[[], float],
    ) -> None:
        """Create it for a group, which is named cluster/broker name.

        ``elected`` receives the epoch to begin, the replicas of which the next master may be elected, and the log with which
        this one stood. ``deposed`` is called when this replica is no longer master. ``moved`` receives the address of a new
        master. All three have to be quick.
        """
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
        self._state: ReplicaGroupState | None = None
        self._version = 0
        self._leading: ReplicaGroupState | None = None
        """The state that this replica has written as master; ``None`` while it is not master."""
        self._session: int | None = None
        """The session in which it became master."""
        self._tried: tuple[Master, int | None] | None = None
        """The master node and the session of its last attempt: it may have been elected without receiving the answer."""
        self._stood_with = NO_LOG
        """Its log as it was known at its last attempt."""
        self._alone_since: float | None = None
        self._vacant = -1
        """The version of the state at which this replica sees no master, as its node says; -1 while it sees one."""
        self._told: Candidate | None = None
        self._said = ""
        self.master: Master | None = None
        """The master as far as is known."""

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
        """Leave the group; the others elect a master at once."""
        if self._greenlet is not None:
            self._greenlet.kill()
        self._leading = None
        self._zookeeper.stop()

    def _describe(self) -> bytes:
        return self._candidate().encode()

    def _candidate(self) -> Candidate:
        log = self._log()
        grows = self.master is not None and self._vacant < 0
        return Candidate(log._replace(end=UNTOLD) if grows else log, self._vacant)

    @property
    def leading(self) -> bool:
        """True when this replica was elected and has not learned of another master since."""
        return self._leading is not None

    @property
    def master_address(self) -> Address | None:
        """The address at which to follow the master; ``None`` when there is none, or it is this replica."""
        if self.master is None or self.master.replica == self._replica:
            return None
        return parse_address(self.master.replication)

    # -- while it leads -----------------------------------------------------------------------------------------------

    def check(self, epoch: int) -> None:
        """Raise ``Fenced`` when another replica, or this one anew, may be master by now; called before each append.

        The lease decides, not the connection: while that is renewed, as after a ZooKeeper node has gone, the master goes on.
        """
        zookeeper, leading = self._zookeeper, self._leading
        if (
            leading is None
            or leading.epoch != epoch
            or zookeeper.leased_session != self._session
            or self._monotonic() >= zookeeper.lease_end
        ):
            raise Fenced("this replica may no longer be the master: ZooKeeper has not confirmed it for a while; try again")

    def agree(self, epoch: int, in_sync: frozenset[int]) -> bool:
        """Have the master elected from these replicas from now on; return whether that is agreed.

        False for an epoch that is over, even if this replica was elected again: its next epoch begins with the set that it was
        elected with. ``ChangeUnknown``, ``RegistryUnavailable``.
        """
        leading = self._leading
        if leading is None or leading.epoch != epoch or not self._is_own(leading):
            return False
        wanted, version = leading._replace(in_sync=tuple(sorted(in_sync))), self._version
        if not self._zookeeper.commit([SetData(self._state_path, wanted.encode(), version)]):
            self._read()  # an earlier change with unknown outcome may have raised the version, or another replica has
            return False
        if self._leading is not leading:  # it was deposed, or has handed over, meanwhile
            return False
        self._leading = self._state = wanted
        self._version = version + 1
        return True

    def _is_own(self, leading: ReplicaGroupState) -> bool:
        """Return whether the state that was read last is this master's; it must not change another master's."""
        return self._state is not None and (self._state.epoch, self._state.master) == (leading.epoch, leading.master)

    def hand_over(self, replica: int) -> None:
        """Step down and let another replica in sync be the next master; the caller has stopped writing before.

        Raises ``BadRequest`` when that replica is not in sync, ``RegistryUnavailable`` when nothing was changed, and
        ``ChangeUnknown``, after a call of ``deposed``, when another replica may be master by now.
        """
        leading = self._leading
        if leading is None or replica not in leading.in_sync:
            raise BadRequest(f"replica {replica} is not in sync; these are: {sorted(leading.in_sync) if leading else 'none'}")
        if not self._is_own(leading):
            raise RegistryUnavailable("this replica may no longer be the master")
        state = leading._replace(preferred=replica)
        self._leading = self._tried = None
        try:
            if not self._zookeeper.commit(
                [SetData(self._state_path, state.encode(), self._version), DeleteNode(self._master_path)]
            ):
                raise RegistryUnavailable(CHANGED)
        except ChangeUnknown:  # another replica may be master by now
            self._deposed()
            raise
        except RegistryUnavailable:  # nothing was changed; the next look shows the master
            self._leading = self._leading or leading
            raise

    def give_up(self) -> None:
        """Be master no more, and stand again with the log as it is then; not called while this replica writes as master."""
        self._leading = self._tried = None
        self._wake.set()

    def successor(self, minimum: int) -> int | None:
        """Return another replica in ``in_sync`` that could become master, or ``None``.

        It has a live node in ZooKeeper and is not suspect. There is none when fewer than ``minimum`` other replicas are there.
        May raise ``RegistryUnavailable``.
        """
        leading, others = self._leading, self._others()
        if leading is None or len(others) < minimum:
            return None
        return min((number for number in leading.in_sync if number in others and not others[number].log.suspect), default=None)

    def take_over(self, *, accept_loss: bool) -> None:
        """Write a state from which this replica is elected, on an operator's request, while there is no master.

        It is alone in sync then only if a loss is accepted, or the replicas that were in sync are not known. Otherwise it can
        still give way to the others when its log turns out to be suspect. Raises ``BadRequest`` when another replica is master,
        or messages may be lost and ``accept_loss`` is not set; ``RegistryUnavailable`` when nothing was changed, and
        ``ChangeUnknown``.
        """
        log, found = self._log(), self._zookeeper.get(self._state_path)
        node = self._zookeeper.get(self._master_path)  # read after the state, whose version a later election raises
        master = None if node is None else Master.decode(node.data)
        if master is not None and master.replica != self._replica:
            raise BadRequest(
                f"replica {master.replica} is master: hand over instead, or if it is lost, try again when its session "
                f"(zookeeper_session_ms) has ended"
            )
        state = None if found is None or not found.data else ReplicaGroupState.decode(found.data)
        loss = self._loss(log, state)
        if loss is not None and not accept_loss:
            raise BadRequest(f"{loss}. It becomes master only if you accept the loss")
        epoch = log.epoch if state is None else max(log.epoch, state.epoch)
        self._zookeeper.make(self._state_path)
        in_sync = (self._replica,) if accept_loss or state is None else state.in_sync
        wanted, version = ReplicaGroupState(epoch, self._replica, in_sync, self._replica), 0 if found is None else found.version
        if not self._zookeeper.commit([SetData(self._state_path, wanted.encode(), version)]):
            raise RegistryUnavailable(CHANGED)
        self._wake.set()

    def _loss(self, log: ReplicaLog, state: ReplicaGroupState | None) -> str | None:
        """Return why acknowledged messages may be lost if this replica becomes master now, and better ones; or ``None``."""
        others = self._others()
        untold = [number for number, other in others.items() if other.log.end == UNTOLD]
        if state is None and untold:
            return f"it is unknown which replicas were in sync, and how long the logs of {untold} are: try again in a moment"
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
            reason = reason or "it is unknown which replicas were in sync, and this one does not have the longest log"
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
            except Exception:  # go on whatever is in ZooKeeper: a replica that stops looking is never master again
                logger.exception("election failed")

    def _read(self) -> None:
        found = self._zookeeper.get(self._master_path)
        self.master = None if found is None else Master.decode(found.data)
        found = self._zookeeper.get(self._state_path)
        self._state = None if found is None or not found.data else ReplicaGroupState.decode(found.data)
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
                return  # it waits, and writes nothing: its lease belongs to a session that is over
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
        """Update this replica's node with the facts that others need while there is no master."""
        self._vacant = self._version if vacant else -1
        now = self._candidate()
        if now != self._told:
            self._told = now
            self._zookeeper.touch(f"{self._replicas_path}/{self._replica}")

    def _still_leads(self, leading: ReplicaGroupState) -> bool:
        master = self.master
        ours = master is not None and (master.run, master.epoch) == (self._run, leading.epoch)
        return ours and self._zookeeper.session == self._session

    def _make_anew(self, leading: ReplicaGroupState) -> bool:
        """Write the state anew after ZooKeeper has lost its data, if no other replica was elected since this one.

        Returns false when another one may have been.
        """
        reason = self._later_master(leading)
        if reason is not None:
            self._say("state of the replicas not made anew", reason)
            return False
        session = self._zookeeper.session
        master = Master(self._replica, leading.epoch, self._replication, self._run)
        self._zookeeper.make(self._state_path)
        change = SetData(self._state_path, leading.encode(), 0)
        if self._zookeeper.commit([CreateNode(self._master_path, master.encode(), ephemeral=True), change]):
            logger.warning("state of the replicas made anew epoch=%d reason=ZooKeeper had lost it", leading.epoch)
            self._session, self._said = session, ""
        self._read()
        return True

    def _later_master(self, leading: ReplicaGroupState) -> str | None:
        """Return why another replica may have been elected later, or ``None``.

        Only one of those in sync can have been, and its log shows the epoch.
        """
        others = self._others()
        for number in leading.in_sync:
            if number != self._replica and number not in others:
                return f"replica {number} could be elected later, and is not there; if it is lost for good, promote this one"
        for number, other in others.items():
            if other.log.epoch > leading.epoch:
                return f"replica {number} has a log of the epoch {other.log.epoch}"
        return None

    def _others(self) -> dict[int, Candidate]:
        """Return the other replicas that have a node, by number; nodes that cannot be read are ignored."""
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
        """Log why an election is held up, once for each reason."""
        if reason != self._said:
            logger.warning("election held up what=%s reason=%s", what, reason)
        self._said = reason

    def _stand(self, former: Master | None) -> None:
        """Try to become master; ``former`` is a master node that this replica has left as another process or session."""
        now = self._monotonic()
        if self._alone_since is None:
            self._alone_since = now
        alone_s = now - self._alone_since
        log = self._log()  # read once: what becomes known of it from now on was not considered
        reason = self._obstacle(log, alone_s)
        if reason is not None:
            self._say("not standing for election", reason)
        if reason is not None or (alone_s < GRACE_S and self._waits_for_others(log)):
            if former is not None:  # else the others do not see that there is no master
                self._zookeeper.commit([CheckVersion(self._state_path, self._version), DeleteNode(self._master_path)])
            return
        state, session = self._state, self._zookeeper.session
        epoch = max(log.epoch, state.epoch if state is not None else FIRST_EPOCH) + 1
        wanted = ReplicaGroupState(epoch, self._replica, (self._replica,) if state is None else state.in_sync)
        master = Master(self._replica, epoch, self._replication, self._run)
        if state is None:
            self._zookeeper.make(self._state_path)
        remove = [] if former is None else [DeleteNode(self._master_path)]
        change = SetData(self._state_path, wanted.encode(), self._version)
        tried = self._tried = master, session
        self._stood_with = log
        if self._zookeeper.commit([*remove, CreateNode(self._master_path, master.encode(), ephemeral=True), change]):
            self._read()
        if self._tried is tried and self._state == wanted and self.master == master and self._zookeeper.session == session:
            self._lead(wanted)

    def _lead(self, state: ReplicaGroupState) -> None:
        self._leading, self._session, self._alone_since, self._said = state, self._zookeeper.session, None, ""
        logger.info("elected epoch=%d", state.epoch)
        self._elected(state.epoch, frozenset(state.in_sync), self._stood_with)

    def _obstacle(self, log: ReplicaLog, alone_s: float) -> str | None:
        """Return why this replica must not stand for election now, or ``None``."""
        state = self._state
        if state is None:
            return self._obstacle_to_the_first(log, alone_s)
        if self._replica not in state.in_sync:
            return f"it is not in sync, {sorted(state.in_sync)} are; if they are lost for good, promote this one"
        if state.preferred not in {0, self._replica} and self._may_come(state.preferred, alone_s):
            return f"replica {state.preferred} goes first"
        return None if log.suspect is None else self._obstacle_to_a_suspect(log, state)

    def _obstacle_to_a_suspect(self, log: ReplicaLog, state: ReplicaGroupState) -> str | None:
        """Return why a suspect replica must not stand: another one in sync may have what its log lacks.

        ``None`` when all of them are known to be no better.
        """
        others, lacks = self._others(), f"it may lack messages that were acknowledged ({log.suspect})"
        for number in state.in_sync:
            if number == self._replica:
                continue
            other = others.get(number)
            if other is None:
                return f"{lacks}, and replica {number} is not there; if that is lost for good, promote this one"
            if other.version != self._version or other.log.suspect is None:
                return f"{lacks}; replica {number} may have them"
            if other.log.is_longer(log):
                return f"{lacks}; so may replica {number}, but has the longer log"
        logger.critical("suspect replica stands in_sync=%s end=%d reason=%s", list(state.in_sync), log.end, log.suspect)
        return None

    def _may_come(self, preferred: int, alone_s: float) -> bool:
        """Return whether to wait for the preferred replica."""
        other = self._others().get(preferred)
        return alone_s < GRACE_S or (alone_s < PREFERRED_S and other is not None and other.log.suspect is None)

    def _waits_for_others(self, log: ReplicaLog) -> bool:
        """Return whether another replica in sync goes first: its log is longer, or it has not yet reported how long that is."""
        state = self._state
        if log.suspect is not None or state is None or state.preferred == self._replica:
            return False
        others = [other for number, other in self._others().items() if number in state.in_sync]
        return any(
            other.version != self._version or (other.log.suspect is None and other.log.is_longer(log)) for other in others
        )

    def _obstacle_to_the_first(self, log: ReplicaLog, alone_s: float) -> str | None:
        if log.epoch != FIRST_EPOCH:
            return "ZooKeeper has lost the state of the replicas; the master makes it anew, or you promote a replica"
        if alone_s < GRACE_S:
            return "the group is new; others may still come"
        for number, other in self._others().items():
            if (*other.log[:2], -number) > (*log[:2], -self._replica):
                return f"replica {number} has the longer log"
        return None

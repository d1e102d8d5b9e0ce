"""Which replicas are in sync: hold everything that readers may see, and so may become master.

Every *eligible* replica holds the log before ``held_end``. That log offset moves only forward, so what was acknowledged at
REPLICA is on each of them, and stays so whichever is the next master:

- a slave that has caught up is *required* first, then agreed on with whoever elects masters, and then counts;
- one that lags or is gone is agreed on as no longer eligible first, and is required until then;
- while fewer than the minimum keep up, nothing is acknowledged, so that those who are gone lack nothing: they stay eligible,
  and can go on without this master. Only who has lost some of its log since is left out.

Those in sync are the eligible ones that keep up. Who agrees is a parameter: ZooKeeper where masters are elected, a file of this
replica where an operator promotes.
"""

import logging
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from metaq.errors import MetaqError

logger = logging.getLogger(__name__)

TICK_S: Final = 0.1
"""Pause between two looks at who lags."""

Agree = Callable[[frozenset[int]], bool]
"""Makes a set of replicas the eligible ones, of which one may be elected; false when this replica is master no more."""


class Standing(NamedTuple):
    """How a slave stands, for operators."""

    replica: int
    address: str
    """Where its connection comes from."""
    text: str
    held_end: int
    lag_bytes: int
    lag_ms: int
    """Since it last held everything; −1: it never has."""
    in_sync: bool


@dataclass(slots=True)
class _Slave:
    address: str
    text: str
    caught_up_at: float
    """When it last held everything that the master had then, by the monotonic clock."""
    heard_at: float
    """When its last report came."""
    held_end: int = 0
    connected: bool = True
    complete: bool = True
    """Its log has not lost what it had reported."""


@dataclass(slots=True)
class InSync:
    """The replicas of one master, among which it counts."""

    own: int
    """Number of the master."""
    minimum: int
    """How many must be in sync for a put to be acknowledged, the master among them."""
    lag_s: float
    monotonic: Callable[[], float]
    own_end: Callable[[], int]
    """The log offset before which the master holds everything, as safely as a put is promised to be."""
    agree: Agree
    changed: Callable[[], None]
    """Called when ``held_end`` or the members may have changed."""
    held_before: int = 0
    """Log offset before which readers saw everything when this master began: they go on seeing it."""
    eligible: frozenset[int] = frozenset()
    """Of which the next master may be elected: agreed on. At first those that were so when this one was elected."""
    members: frozenset[int] = frozenset()
    """Those in sync."""
    _required: frozenset[int] = frozenset()
    _slaves: dict[int, _Slave] = field(default_factory=dict)
    _history: deque[tuple[float, int]] = field(default_factory=deque)
    """When the master's log ended where."""
    _held_end: int = 0
    _began: float = 0.0
    _complained: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        self._began = self.monotonic()
        self._held_end = min(self.held_before, self.own_end())  # a power cut may have taken some of it
        self.members = frozenset((self.own,))
        self.eligible |= self.members
        self._required = self.eligible

    # -- what holds ---------------------------------------------------------------------------------------------------

    @property
    def enough(self) -> bool:
        """Whether so many are in sync that puts are safe."""
        return len(self.members) >= self.minimum

    @property
    def hopeful(self) -> bool:
        """Whether enough are in sync, or may soon be: the slaves of a new master have yet to come to it."""
        return self.enough or self.monotonic() < self._began + self.lag_s

    @property
    def held_end(self) -> int:
        """All eligible replicas, and enough of them, hold the log before this log offset."""
        if len(self.eligible) >= self.minimum:
            ends = [self._slaves[number].held_end if number in self._slaves else 0 for number in self._required - {self.own}]
            self._held_end = max(self._held_end, min([self.own_end(), *ends]))
        return self._held_end

    @property
    def unheard_s(self) -> float:
        """For how long not enough replicas have reported for anything to be safe; 0 when this one is enough."""
        if self.minimum <= 1:
            return 0.0
        heard = sorted((slave.heard_at for slave in self._slaves.values()), reverse=True)[: self.minimum - 1]
        since = heard[-1] if len(heard) == self.minimum - 1 else self._began
        return self.monotonic() - max(since, self._began)

    def standings(self) -> list[Standing]:
        """All slaves that are connected or in sync."""
        end, now = self.own_end(), self.monotonic()
        return [
            Standing(
                *(number, slave.address, slave.text, slave.held_end, max(0, end - slave.held_end)),
                *(_milliseconds(now - slave.caught_up_at) if slave.held_end < end else 0, number in self.members),
            )
            for number, slave in sorted(self._slaves.items())
        ]

    # -- what slaves do -----------------------------------------------------------------------------------------------

    def joined(self, replica: int, address: str, text: str, held_end: int) -> None:
        """A slave has connected, whose log ends at a log offset; how much of that is as safe as promised it reports."""
        before, complete = self._slaves.get(replica), held_end >= self.held_end
        heard_at = self._began if before is None else before.heard_at
        if before is not None and replica in self._required and complete:
            self._slaves[replica] = _Slave(address, text, before.caught_up_at, heard_at, min(held_end, before.held_end))
        else:  # it is new, or has lost something: it may not hear that it is in sync before it has caught up
            self.members -= {replica}
            self._slaves[replica] = _Slave(address, text, -math.inf, heard_at, complete=complete)

    def reported(self, replica: int, held_end: int) -> None:
        """A slave holds everything before a log offset."""
        slave = self._slaves[replica]
        slave.held_end, slave.heard_at = held_end, self.monotonic()
        slave.complete = slave.complete or held_end >= self.held_end
        if replica in self._required:
            self.changed()

    def left(self, replica: int) -> None:
        """Its connection has ended."""
        self._slaves[replica].connected = False
        if replica not in self._required:
            del self._slaves[replica]

    def _look(self, slave: _Slave, now: float) -> None:
        """Find out when it last held all that there was."""
        if not slave.connected:
            return
        if slave.held_end >= self.own_end():
            slave.caught_up_at = now
            return
        for moment, end in reversed(self._history):
            if end <= slave.held_end:
                slave.caught_up_at = max(slave.caught_up_at, moment)
                return

    # -- who is in sync -----------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Look who has caught up and who lags, and agree on it; may wait for whoever agrees. One call at a time."""
        now = self.monotonic()
        self._history.append((now, self.own_end()))
        while self._history and self._history[0][0] < now - 2 * self.lag_s:
            self._history.popleft()
        for slave in self._slaves.values():
            self._look(slave, now)
        keep_up = frozenset(
            {self.own, *(number for number, slave in self._slaves.items() if self._keeps_up(number, slave, now))}
        )
        enough = len(keep_up) >= self.minimum
        wanted = keep_up if enough else keep_up | {number for number in self.eligible if self._is_complete(number)}
        before = self.eligible, self.members
        if not wanted == self.eligible == self._required:
            self._agree_on(wanted)
        self.members = keep_up & self.eligible
        if (self.eligible, self.members) != before:
            members, eligible = sorted(self.members), sorted(self.eligible)
            logger.info("replicas in sync members=%s before=%s eligible=%s", members, sorted(before[1]), eligible)
            self.changed()

    def _keeps_up(self, number: int, slave: _Slave, now: float) -> bool:
        if now - slave.caught_up_at > self.lag_s:
            return False
        return number in self.members or (slave.connected and slave.held_end >= self.held_end)

    def _is_complete(self, number: int) -> bool:
        return number not in self._slaves or self._slaves[number].complete

    def _agree_on(self, wanted: frozenset[int]) -> None:
        self._required |= self.eligible | wanted
        try:
            agreed = self.agree(wanted)
        except MetaqError as error:  # it may hold or not: all sets that were tried are required until one is agreed on
            if wanted != self._complained:
                logger.warning("replicas in sync not agreed on wanted=%s reason=%s", sorted(wanted), error)
            self._complained = wanted
            return
        self._complained = frozenset()
        if not agreed:
            return
        self.eligible = self._required = wanted
        for number in [number for number, slave in self._slaves.items() if not slave.connected and number not in wanted]:
            del self._slaves[number]


def _milliseconds(seconds: float) -> int:
    return -1 if math.isinf(seconds) else round(1000 * seconds)

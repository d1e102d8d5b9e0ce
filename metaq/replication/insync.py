"""The in-sync set: the replicas that hold everything that readers may see, and so may become master.

Every *eligible* replica holds the log before ``held_end``. That log offset only moves forward, so a message that was
acknowledged at REPLICA is on each of them, and survives whichever becomes the next master:

- a slave that has caught up is *required* first, then agreed on as eligible, and counts from then on;
- a slave that lags or is gone is agreed on as no longer eligible first, and is required until then;
- while fewer than the minimum keep up, nothing is acknowledged, so those that are gone lack nothing: they stay eligible, and
  can go on without this master. Only a slave that has since lost a part of its log is left out.

Those in sync are the eligible ones that keep up. The function that agrees is a parameter: it writes to ZooKeeper where masters
are elected, and to a file of this replica where an operator promotes.
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
"""The pause between two checks for slaves that lag."""

Agree = Callable[[frozenset[int]], bool]
"""A function that makes a set of replicas eligible for election; it returns false when this replica is no longer master."""


class Standing(NamedTuple):
    """The state of a slave, for operators."""

    replica: int
    address: str
    """The address from which it has connected."""
    text: str
    held_end: int
    lag_bytes: int
    lag_ms: int
    """The time since it last held everything; −1: it never has."""
    in_sync: bool


@dataclass(slots=True)
class _Slave:
    address: str
    text: str
    caught_up_at: float
    """When it last held everything that the master had at that time, by the monotonic clock."""
    heard_at: float
    """When its last report came, by the monotonic clock."""
    held_end: int = 0
    had_end: int = 0
    """The greatest log offset before which it has reported that it held everything."""
    connected: bool = True
    complete: bool = True
    """True unless its log has lost something that it had reported, or that readers may see."""


@dataclass(slots=True)
class InSync:
    """The replicas of one master, the master included."""

    own: int
    """The replica number of the master."""
    minimum: int
    """How many replicas must be in sync for a put to be acknowledged, the master included."""
    lag_s: float
    monotonic: Callable[[], float]
    own_end: Callable[[], int]
    """Returns the log offset before which the master holds everything, as safely as puts are promised to be."""
    agree: Agree
    changed: Callable[[], None]
    """Called when ``held_end`` or the members may have changed."""
    held_before: int = 0
    """The log offset before which readers could see everything when this master began; they still can."""
    eligible: frozenset[int] = frozenset()
    """The agreed set from which the next master may be elected. At first the set at the election of this master."""
    members: frozenset[int] = frozenset()
    """The replicas in sync."""
    _required: frozenset[int] = frozenset()
    _slaves: dict[int, _Slave] = field(default_factory=dict)
    _history: deque[tuple[float, int]] = field(default_factory=deque)
    """Pairs of a monotonic time and the end of the master's log then."""
    _held_end: int = 0
    _began: float = 0.0
    _complained: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        self._began = self.monotonic()
        self._held_end = min(self.held_before, self.own_end())  # a power cut may have taken a part of it
        self.members = frozenset((self.own,))
        self.eligible |= self.members
        self._required = self.eligible

    # -- what holds ---------------------------------------------------------------------------------------------------

    @property
    def enough(self) -> bool:
        """True when enough replicas are in sync for puts to be safe."""
        return len(self.members) >= self.minimum

    @property
    def hopeful(self) -> bool:
        """True when enough are in sync, or may soon be: the slaves of a new master have yet to connect to it."""
        return self.enough or self.monotonic() < self._began + self.lag_s

    @property
    def held_end(self) -> int:
        """The log offset before which all eligible replicas, and at least the minimum of them, hold the log."""
        if len(self.eligible) >= self.minimum:
            ends = [self._slaves[number].held_end if number in self._slaves else 0 for number in self._required - {self.own}]
            self._held_end = max(self._held_end, min([self.own_end(), *ends]))
        return self._held_end

    @property
    def unheard_s(self) -> float:
        """For how many seconds too few replicas have reported for puts to be safe; 0 when the master alone is enough."""
        if self.minimum <= 1:
            return 0.0
        heard = sorted((slave.heard_at for slave in self._slaves.values()), reverse=True)[: self.minimum - 1]
        since = heard[-1] if len(heard) == self.minimum - 1 else self._began
        return self.monotonic() - max(since, self._began)

    def standings(self) -> list[Standing]:
        """Return the state of all slaves that are connected, or still required."""
        end, now = self.own_end(), self.monotonic()
        return [
            Standing(
                replica=number,
                address=slave.address,
                text=slave.text,
                held_end=slave.held_end,
                lag_bytes=max(0, end - slave.held_end),
                lag_ms=_milliseconds(now - slave.caught_up_at) if slave.held_end < end else 0,
                in_sync=number in self.members,
            )
            for number, slave in sorted(self._slaves.items())
        ]

    # -- what slaves do -----------------------------------------------------------------------------------------------

    def joined(self, replica: int, address: str, text: str, held_end: int) -> None:
        """Note that a slave has connected, and where its log ends; its reports say how much of that is as safe as promised."""
        before = self._slaves.get(replica)
        heard_at, had_end = (self._began, 0) if before is None else (before.heard_at, before.had_end)
        # what it had reported may have been acknowledged by the master before, of which this one knows no more than held_before
        complete = held_end >= max(self.held_end, had_end)
        if before is not None and replica in self._required and complete:
            self._slaves[replica] = _Slave(address, text, before.caught_up_at, heard_at, before.held_end, had_end)
        else:  # it is new, or has lost something: it must not learn that it is in sync before it has caught up
            self.members -= {replica}
            self._slaves[replica] = _Slave(address, text, -math.inf, heard_at, had_end=had_end, complete=complete)

    def reported(self, replica: int, held_end: int) -> None:
        """Take a slave's report that it holds everything before a log offset, as safely as promised."""
        slave = self._slaves[replica]
        slave.held_end, slave.heard_at = held_end, self.monotonic()
        slave.had_end = max(slave.had_end, held_end)
        slave.complete = slave.complete or held_end >= max(self.held_end, slave.had_end)
        if replica in self._required:
            self.changed()

    def left(self, replica: int) -> None:
        """Note that a slave's connection has ended."""
        self._slaves[replica].connected = False
        if replica not in self._required:
            del self._slaves[replica]

    def _look(self, slave: _Slave, now: float) -> None:
        """Update the time when a slave last held everything that the master had."""
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
        """Find the slaves that have caught up and those that lag, and have the new set agreed on.

        It may wait for ZooKeeper or the disk in ``agree``. Only one call may run at a time.
        """
        now = self.monotonic()
        self._history.append((now, self.own_end()))
        while self._history and self._history[0][0] < now - 2 * self.lag_s:
            self._history.popleft()
        for slave in self._slaves.values():
            self._look(slave, now)
        keep_up = self._keep_up(now)
        enough = len(keep_up) >= self.minimum
        wanted = keep_up if enough else keep_up | {number for number in self.eligible if self._is_complete(number)}
        before = self.eligible, self.members
        # agree also when only ``_required`` differs: an attempt with an unknown outcome still holds acknowledgements back
        if not wanted == self.eligible == self._required:
            self._agree_on(wanted)
        self.members = self._keep_up(now) & self.eligible  # one may have returned with less while this waited
        if (self.eligible, self.members) != before:
            members, eligible = sorted(self.members), sorted(self.eligible)
            logger.info("replicas in sync members=%s before=%s eligible=%s", members, sorted(before[1]), eligible)
            self.changed()

    def _keep_up(self, now: float) -> frozenset[int]:
        return frozenset({self.own, *(number for number, slave in self._slaves.items() if self._keeps_up(number, slave, now))})

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
        except MetaqError as error:  # it may have been agreed or not: all sets that were tried stay required until one is
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

"""The history of a broker: its figures over the last hours, in rings of a fixed size in memory.

============  =================================  =========================================================
ring          samples                            size
============  =================================  =========================================================
figures       one each 10 s for 6 hours: 2,160   15 figures of 4 bytes, and 8 bytes for the time: 147 kB
lags          one a minute for 6 hours: 360      4 bytes for each of 32 groups, and the time: 49 kB
============  =================================  =========================================================

Numbers have single precision: seven digits, more than a chart shows.

The lag of every group would have no bound. Lags sampled from the time on that someone looks would have no past, which is what
is looked for. So those groups are kept whose lag was the highest in these hours: nearly always all that there are.

The rings outlive a change of the replica's role. They are lost with the process: Prometheus is for more (docs/metrics.md).
"""

from array import array
from collections.abc import Mapping, Sequence
from heapq import nlargest
from typing import Final, NamedTuple

SAMPLES: Final = 2160
LAG_SAMPLES: Final = 360
LAG_EVERY: Final = 6
"""Lags are added with each sixth sample."""
MOST_GROUPS: Final = 32


class Figures(NamedTuple):
    """The figures of one sample. Rates are those since the sample before."""

    put_per_second: float = 0.0
    """Messages."""
    put_bytes_per_second: float = 0.0
    got_per_second: float = 0.0
    got_bytes_per_second: float = 0.0
    refused_per_second: float = 0.0
    """Puts."""
    processor_ratio: float = 0.0
    """Processor time of the process by time: 1 is one processor."""
    lag: float = 0.0
    """Messages that wait for all groups together."""
    longest_stall_seconds: float = 0.0
    """The longest delay of the event loop."""
    replica_lag_bytes: float = 0.0
    """Of the slave that lags most; on a slave its own."""
    disk_used_ratio: float = 0.0
    log_bytes: float = 0.0
    connections: float = 0.0
    gets_waiting: float = 0.0
    leases_open: float = 0.0
    timers_pending: float = 0.0


class Ring:
    """The newest of the numbers that were added."""

    __slots__ = ("_kept", "_most", "count")

    def __init__(self, kind: str, most: int) -> None:
        """Keep ``most`` numbers of the type that ``array`` calls ``kind``."""
        self._kept: array[float] = array(kind)
        self._most = most
        self.count = 0
        """How many were ever added."""

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, value: float) -> None:
        if len(self._kept) < self._most:
            self._kept.append(value)
        else:
            self._kept[self.count % self._most] = value
        self.count += 1

    def newest(self, most: int) -> Sequence[float]:
        """Return the newest numbers, at most so many, the oldest of them first."""
        oldest = self.count % self._most if len(self._kept) == self._most else 0
        return (self._kept[oldest:] + self._kept[:oldest])[-most:] if most else ()

    @property
    def peak(self) -> float:
        """The highest number that is kept."""
        return max(self._kept, default=0.0)


class History:
    """The rings of one process."""

    def __init__(self) -> None:
        self.times = Ring("q", SAMPLES)
        """When each sample was added (Unix ms)."""
        self.rings = [Ring("f", SAMPLES) for _ in Figures._fields]
        """The samples of each figure."""
        self.lag_times = Ring("q", LAG_SAMPLES)
        self.lags: dict[str, Ring] = {}
        """The lags of groups, by name; each ends with the newest of ``lag_times``."""
        self._stall_s = 0.0
        self.now = Figures()
        """The newest sample."""

    def stalled(self, seconds: float) -> None:
        """Take note of a delay of the event loop."""
        self._stall_s = max(self._stall_s, seconds)

    def take_longest_stall(self) -> float:
        """Return the longest delay since the last call, in seconds."""
        longest, self._stall_s = self._stall_s, 0.0
        return longest

    def add(self, at_ms: int, figures: Figures) -> None:
        """Add one sample."""
        self.now = figures
        self.times.add(at_ms)
        for ring, value in zip(self.rings, figures, strict=True):
            ring.add(value)

    @property
    def wants_lags(self) -> bool:
        """True when the lags of groups are due with the next sample."""
        return self.times.count % LAG_EVERY == 0

    def add_lags(self, at_ms: int, lags: Mapping[str, int]) -> None:
        """Add the lags of all groups. A group without one has none."""
        self.lag_times.add(at_ms)
        for group, ring in self.lags.items():
            ring.add(lags.get(group, 0))
        for group, lag in nlargest(MOST_GROUPS, lags.items(), key=lambda item: item[1]):
            if group not in self.lags and self._makes_room(lag):
                self.lags[group] = ring = Ring("f", LAG_SAMPLES)
                ring.add(lag)

    def _makes_room(self, lag: int) -> bool:
        """Return whether there is room for a group with this lag: it takes the place of the one that lagged least."""
        if len(self.lags) < MOST_GROUPS:
            return True
        least = min(self.lags, key=lambda group: self.lags[group].peak)
        if self.lags[least].peak >= lag:
            return False
        del self.lags[least]
        return True

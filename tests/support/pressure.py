"""How busy the machine is: what takes longer than promised while everybody waits for a processor or the disk says nothing.

Linux counts both (PSI)::

    /proc/pressure/cpu    some avg10=95.72 avg60=95.66 avg300=87.56 total=4097825357
    /proc/pressure/io     some avg10=0.19 avg60=0.30 avg300=0.42 total=18020211
                          microseconds, since the start, in which some task had to wait
"""

import re
import time
from pathlib import Path
from typing import Final

SOURCES: Final = (Path("/proc/pressure/cpu"), Path("/proc/pressure/io"))
BUSY: Final = 0.75
"""From this share of the time on. Four groups of three replicas on two idle processors stay below, and at 0.09 for the disk."""
_TOTAL: Final = re.compile(r"some .* total=(\d+)")


class Stopwatch:
    """Counts from its making on."""

    def __init__(self) -> None:
        self._began, self._waited_before = time.monotonic(), _waited_s()

    @property
    def busy(self) -> bool:
        """Whether for most of the time some task waited for a processor, or some for the disk; false where nobody counts."""
        most = BUSY * (time.monotonic() - self._began)
        return any(now - before > most for before, now in zip(self._waited_before, _waited_s(), strict=True))


def _waited_s() -> list[float]:
    """In seconds, of each source."""
    return [_total_s(path) for path in SOURCES]


def _total_s(path: Path) -> float:
    try:
        found = _TOTAL.match(path.read_text())
    except OSError:  # no Linux, or one without PSI
        return 0.0
    return 0.0 if found is None else int(found[1]) / 1e6

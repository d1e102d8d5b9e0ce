"""How busy the machine is: what takes longer than promised while everybody waits for a processor says nothing.

Linux counts it (PSI)::

    /proc/pressure/cpu    some avg10=95.72 avg60=95.66 avg300=87.56 total=4097825357
                          microseconds, since the start, in which some task could run and had to wait
"""

import re
import time
from pathlib import Path
from typing import Final

CPU: Final = Path("/proc/pressure/cpu")
BUSY: Final = 0.75
"""From this share of the time on. Four groups of three replicas on two idle processors stay below."""
_TOTAL: Final = re.compile(r"some .* total=(\d+)")


class Stopwatch:
    """Counts from its making on."""

    def __init__(self) -> None:
        self._began, self._waited_before = time.monotonic(), _waited_s()

    @property
    def busy(self) -> bool:
        """Whether for most of the time some task waited for a processor; false where nobody counts."""
        return _waited_s() - self._waited_before > BUSY * (time.monotonic() - self._began)


def _waited_s() -> float:
    try:
        found = _TOTAL.match(CPU.read_text())
    except OSError:  # no Linux, or one without PSI
        return 0.0
    return 0.0 if found is None else int(found[1]) / 1e6

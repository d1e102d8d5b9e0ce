"""This process's use of memory, files and processor, under the names of Prometheus's own client libraries."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from metaq.engine.figures.metrics import Family, Metric, MetricKind

RESIDENT: Final = Metric(
    "process_resident_memory_bytes", MetricKind.GAUGE, "bytes", "Resident memory of this process, in bytes."
)
OPEN_FILES: Final = Metric("process_open_fds", MetricKind.GAUGE, "descriptors", "Open file descriptors.")
MOST_FILES: Final = Metric("process_max_fds", MetricKind.GAUGE, "descriptors", "File descriptors that may be open.")
PROCESSOR: Final = Metric(
    "process_cpu_seconds_total", MetricKind.COUNTER, "seconds", "Processor time of all threads, user and kernel, in seconds."
)
STARTED: Final = Metric(
    "process_start_time_seconds", MetricKind.GAUGE, "seconds", "When this process started, in seconds since 1970 (UTC)."
)
PROCESS: Final = (RESIDENT, OPEN_FILES, MOST_FILES, PROCESSOR, STARTED)

_OWN: Final = Path("/proc/self")
_STARTED_S: Final = time.time()
"""When this module was imported, some tenths of a second into the process."""


def process_families() -> Iterator[Family]:
    """Yield the metrics of ``PROCESS``, read now; where there is no /proc, only those that do not need it."""
    if _OWN.exists():
        import resource  # noqa: PLC0415 - not on every system

        pages = int((_OWN / "statm").read_text("ascii").split()[1])
        yield RESIDENT, [((), pages * os.sysconf("SC_PAGE_SIZE"))]
        yield OPEN_FILES, [((), len(os.listdir(_OWN / "fd")))]
        yield MOST_FILES, [((), resource.getrlimit(resource.RLIMIT_NOFILE)[0])]
    yield PROCESSOR, [((), time.process_time())]
    yield STARTED, [((), _STARTED_S)]

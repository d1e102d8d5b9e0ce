"""The memory that a process uses, read once or continuously from /proc/PID/status."""

import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.figures import MeasurementError

KILOBYTE, MEGABYTE = 1000, 1_000_000
# A process is at rest when its resident memory stays the same for this long.
REST_SECONDS, REST_DEADLINE_SECONDS = 1.0, 30.0


def status_bytes(pid: int, name: str) -> int:
    """A memory figure of the process: `VmRSS` is all that is resident, `RssAnon` its private part (no file pages)."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024  # /proc says kB and means KiB
    raise ValueError(f"/proc/{pid}/status has no {name}")


def resting_bytes(pid: int) -> int:
    """Resident memory once it has not changed for REST_SECONDS."""
    deadline = time.monotonic() + REST_DEADLINE_SECONDS
    value, since = status_bytes(pid, "VmRSS"), time.monotonic()
    while time.monotonic() - since < REST_SECONDS:
        time.sleep(0.05)
        now = status_bytes(pid, "VmRSS")
        if now != value:
            value, since = now, time.monotonic()
        if time.monotonic() > deadline:
            raise MeasurementError(f"resident memory did not come to rest in {REST_DEADLINE_SECONDS} s")
    return value


class Sampler:
    """Samples one figure in a thread of its own, every `period_seconds`, from entering to leaving the block."""

    def __init__(self, pid: int, name: str, period_seconds: float = 0.1) -> None:
        self.samples = [status_bytes(pid, name)]
        self._pid, self._name, self._period = pid, name, period_seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self._period):
            try:
                self.samples.append(status_bytes(self._pid, self._name))
            except (FileNotFoundError, ProcessLookupError, ValueError):
                return  # the process ended: whoever waits for its replies reports that


def drift_bytes(samples: list[int], start: int) -> int:
    """How far the samples went from the start value, up or down."""
    return max((abs(sample - start) for sample in samples), default=0)
